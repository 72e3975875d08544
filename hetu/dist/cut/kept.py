"""Where a variable lives, and how ranks bring it up to date, as plain data: `Kept` by ranks, or by servers.

`hetu.strategies.Served` is the other home; one of your own says its `layouts` and `words`, and a kind of `Strategy`
in which variables are so. A part of a variable has the initial values that the whole would have there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ...codec import codec
from ...core.graph import Node, topological
from ...core.leaf import Initializer
from ...core.op import Role
from ...core.types import Box, Shape
from ...init import law_of
from ...plain_data import read_fields, write_fields
from ..layout.boxes import within
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
        """All fields as JSON has them."""
        return write_fields(self)

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """What `to_json` wrote; ArgumentError names what is wrong."""
        return cls(**read_fields(cls, data))

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
        what is lost is added to the next gradient, which checkpoints keep for as many ranks; each sends its own to all.
        Rows that are gathered travel as they are. Training is then not that of one process to the last digit.
    """

    compute: Layout
    store: Layout
    bucket: int | None = None
    through: tuple[Layout, ...] = ()
    wire: str = ""
    called: ClassVar = "a variable on ranks", WRITTEN

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


def owners_of(outputs: Iterable[Node]) -> dict[Node, Node]:
    """Variable -> the trainable variable whose value or state it is, as the update operators of a graph declare."""
    nodes = topological(outputs)
    found = {n: n for n in nodes if n.role is Role.VARIABLE and n.attrs["trainable"]}
    for node in nodes:
        if (rule := node.op.update) is not None and node.inputs[0] in found:
            found |= dict.fromkeys(node.inputs[1 : rule.tables], node.inputs[0])
    return found


class LocalInitializer:
    """A part of the values that `init` gives for the whole variable, so that all ranks together start as one would."""

    def __init__(self, init: Initializer | np.ndarray | float, shape: Shape, box: Box) -> None:
        self.init, self.shape, self.box = init, tuple(map(int, shape)), box

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        _, *columns = inside = within(self.box, tuple((0, s) for s in self.shape))
        if (law := law_of(self.init, self.shape)) is not None:
            made = np.empty(shape, dtype)
            for places, values in law.blocks(self.shape, dtype, rng, range(*self.box[0])):
                made[places] = values[(slice(None), *columns)]
            return made
        whole = self.init(self.shape, dtype, rng) if callable(self.init) else self.init
        part: np.ndarray = np.asarray(whole)[inside]
        return part
