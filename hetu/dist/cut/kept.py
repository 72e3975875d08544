"""Where a variable lives, as plain data: on the ranks of a job in some layout, or on servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ...core.graph import Node, topological
from ...core.op import Role
from ..layout.layout import Layout


@dataclass(frozen=True)
class Kept:
    """How ranks keep a variable: the model reads it in the layout `compute`, and it is updated in `store`."""

    compute: Layout
    store: Layout
    served: ClassVar[bool] = False  # whether servers keep it
    copied: ClassVar[bool] = True  # whether ranks have it, or parts of it, between steps

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of the ranks."""
        return self.compute, self.store

    @property
    def words(self) -> tuple[str, str]:
        """How it is read and kept, for tables."""
        return str(self.compute), str(self.store)

    def to_json(self) -> dict[str, Any]:
        return {"compute": self.compute.to_json(), "store": self.store.to_json()}

    def __str__(self) -> str:
        return f"{self.compute}, kept as {self.store}"


@dataclass(frozen=True)
class Served:
    """A variable that servers keep and update, by the gradients that ranks send.

    If it is `copied`, each rank has all of it and fetches it anew after each step. Otherwise a rank keeps nothing: it
    fetches the rows of a table that it looks up, and only the servers use the state of an optimizer.
    """

    copied: bool = False
    served: ClassVar[bool] = True
    layouts: ClassVar[tuple[Layout, ...]] = ()

    @property
    def words(self) -> tuple[str, str]:
        return "whole" if self.copied else "by rows", "servers"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.words[0]}, kept on servers"


def owners_of(outputs: Iterable[Node]) -> dict[Node, Node]:
    """Variable -> the trainable variable whose value or state it is, as the update operators of a graph declare."""
    nodes = topological(outputs)
    found = {n: n for n in nodes if n.role is Role.VARIABLE and n.attrs["trainable"]}
    for node in nodes:
        if (rule := node.op.update) is not None and node.inputs[0] in found:
            found |= dict.fromkeys(node.inputs[1 : rule.tables], node.inputs[0])
    return found


def read_kept(data: Mapping[str, Any]) -> Kept | Served:
    """What `to_json` of either wrote."""
    if "copied" in data:
        return Served(bool(data["copied"]))
    return Kept(Layout.from_json(data["compute"]), Layout.from_json(data["store"]))
