"""Where a variable lives, and how ranks bring it up to date, as plain data: `Kept` by ranks, or by servers.

`hetu.strategies.Served` is the other home; one of your own says its `layouts` and `words`, and a kind of `Strategy`
that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...codec import codec
from ...core.errors import ArgumentError, HetuError, did_you_mean
from ...core.graph import Node, topological
from ...core.op import Role
from ..layout.layout import Layout

SUMMED = "float16", "bfloat16"  # what ranks sum as it travels
WRITTEN = "pass what Strategy.to_json wrote"


def check_wire(name: str) -> str:
    """`name`, if gradients can travel so; UnknownNameError or ArgumentError if not."""
    if name not in SUMMED:
        codec(name)
    return name


class Home:
    """Where one variable lives between steps."""

    served: ClassVar[bool] = False  # whether servers keep it
    copied: bool = True  # whether ranks have it, or parts of it, between steps
    layouts: tuple[Layout, ...] = ()  # those of the ranks: as it is read, and as it is stored
    bucket: int | None = None  # what ranks send of it travels with all else that has this number
    through: tuple[Layout, ...] = ()  # that its gradient has one after the other before it is as the variable is stored
    wire: str = ""  # how its gradient travels between ranks that sum it

    @property
    def words(self) -> tuple[str, str, str]:
        """How it is read, where it is kept, and how it is synchronized, for tables."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError

    def __str__(self) -> str:
        read, kept, how = self.words
        return f"{read}, kept as {kept}{how and f', {how}'}"


@dataclass(frozen=True)
class Kept(Home):
    """How ranks keep a variable: the model reads it in the layout `compute`, and it is updated in `store`.

    Sums of its gradient, and what is gathered of it, travel in one message with those of all variables of its `bucket`,
    whatever their size, as far as nobody needs some of them before the others are there. Without a number it goes with
    its neighbors, in buckets of at most as many bytes as the strategy says. Its gradient goes `through` these layouts
    before it updates: on a grid of hosts, a sum within each, of which a rank gets a part, and then one between hosts.

    wire: how the sum that ends this travels between ranks, so with `through` the one between hosts: "float16" or
        "bfloat16", which ranks sum as they are, or, on CPUs, "int8", "topk:0.01" or "1bit" (`hetu.codec`), of which
        what is lost is added to the next gradient, but is in no checkpoint; of these k ranks send theirs k - 1 times.
        Rows that are gathered travel as they are. Training is then not that of one process to the last digit.
    """

    compute: Layout
    store: Layout
    bucket: int | None = None
    through: tuple[Layout, ...] = ()
    wire: str = ""

    def __post_init__(self) -> None:
        check_wire(self.wire)

    @property
    def layouts(self) -> tuple[Layout, ...]:  # type: ignore[override]
        return self.compute, self.store

    @property
    def words(self) -> tuple[str, str, str]:
        how = [] if self.bucket is None else [f"bucket {self.bucket}"]
        how += [f"through {layout}" for layout in self.through] + [f"gradients as {self.wire}"] * bool(self.wire)
        return str(self.compute), str(self.store), ", ".join(how)

    def to_json(self) -> dict[str, Any]:
        through = [layout.to_json() for layout in self.through]
        more = {"bucket": self.bucket, "through": through, "wire": self.wire}
        return {"compute": self.compute.to_json(), "store": self.store.to_json(), **more}

    @staticmethod
    def from_json(data: Any) -> Kept:
        """What `to_json` wrote; ArgumentError names what is wrong."""
        return Kept(**read_fields("a variable on ranks", data, KEPT, WRITTEN))


def owners_of(outputs: Iterable[Node]) -> dict[Node, Node]:
    """Variable -> the trainable variable whose value or state it is, as the update operators of a graph declare."""
    nodes = topological(outputs)
    found = {n: n for n in nodes if n.role is Role.VARIABLE and n.attrs["trainable"]}
    for node in nodes:
        if (rule := node.op.update) is not None and node.inputs[0] in found:
            found |= dict.fromkeys(node.inputs[1 : rule.tables], node.inputs[0])
    return found


def exactly(kind: type) -> Callable[[Any], Any]:
    """Reads a value of JSON that must be of this type."""

    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ArgumentError(f"wanted {kind.__name__}")
        return value

    return read


def read_fields(what: str, data: Any, readers: Mapping[str, Callable[[Any], Any]], fix: str) -> dict[str, Any]:
    """The fields of a JSON object, each as its reader takes it; ArgumentError names one that is wrong or missing."""
    if wrong := {*data} ^ readers.keys() if isinstance(data, dict) else {*readers}:
        names = f"{', '.join(readers)}; wrong or missing: {', '.join(sorted(wrong))}"
        unknown = sorted(wrong - readers.keys())
        raise ArgumentError(f"not {what}: wanted {names}", fix=did_you_mean(unknown[0], readers) if unknown else fix)
    found = {}
    for name, value in data.items():
        try:
            found[name] = readers[name](value)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why, better = (error.message, error.fix) if isinstance(error, HetuError) else (repr(error), "")
            raise ArgumentError(f"not {what}: {name} is {value!r:.80}: {why}", fix=better or fix) from None
    return found


KEPT: dict[str, Callable[[Any], Any]] = {
    "compute": Layout.from_json,
    "store": Layout.from_json,
    "bucket": lambda number: None if number is None else exactly(int)(number),
    "through": lambda layouts: tuple(map(Layout.from_json, exactly(list)(layouts))),
    "wire": exactly(str),
}
