"""How a graph is divided into groups, kept by what that follows from, so that other sizes need not find it again.

Which nodes may be one group follows from which sizes are equal, 0 or 1, not from how large they are. So a `Pattern`
numbers the sizes of a graph in the order in which they are met, and graphs of one pattern are divided alike: a batch or
length seen for the first time is, and all layers that are alike have forms that are. A device that asks how large sizes
are (`Limits.by_pattern`) keeps nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ..core.graph import Node
from ..core.op import Role
from .apart import Checks, Parts
from .divided import Division
from .form import DROPOUT, FOLDS, MOVES, expression_of
from .unit import Limits

KEPT = 32  # patterns, of which one of 20,000 nodes takes 10 MB


class Pattern:
    """What the division of a graph follows from, of `nodes` in their order: `rows`, one for each, and the rest.

    A row has all but what the node reads: equal rows have equal types, attributes and numbers, at whatever sizes.
    """

    def __init__(
        self, nodes: Sequence[Node], outputs: Sequence[Node], checks: Checks, alike: Sequence[Sequence[Parts]]
    ):
        self.at = {node: k for k, node in enumerate(nodes)}
        self._sizes: dict[Any, int] = {0: 0, 1: 1}
        self._shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}
        self._numbers: dict[tuple[str, bytes], int] = {}
        self.rows = [self._row(node) for node in nodes]
        at = self.at
        looked = [(at[n], *(at[x] for check in found for x in check.arrays)) for n, found in checks.items() if n in at]
        self.key = (
            tuple(self.rows),
            tuple([tuple([at[i] for i in node.inputs]) for node in nodes]),
            tuple([at[node] for node in outputs]),
            tuple(looked),
            tuple([tuple([tuple(map(at.get, copy)) for copy in copies]) for copies in alike]),
        )

    def _row(self, node: Node) -> tuple[Any, ...]:
        op: Any = node.op
        type_: Any = node.type
        made: Any = None
        if op in MOVES:
            made = node.attrs.get("shape") in (None, node.shape)  # shapes alone say what it moves
        elif op in FOLDS or op is DROPOUT or expression_of(op):
            # A check may ask how large sizes are.
            made = *node.attrs.items(), *(i.type for i in node.inputs if op.check_rule is not None)
        elif node.role is Role.COMMUNICATION:
            made = node.attrs.get("order")
        elif node.role is Role.CONSTANT and not node.ndim:
            number = type_.dtype.name, node.attrs["value"].tobytes()
            made = self._numbers.setdefault(number, len(self._numbers))
        if isinstance(type_, tuple):
            return op, tuple([(self._shape(t.shape), t.dtype) for t in type_]), made, node.tags.get("event")
        return op, self._shape(type_.shape), type_.dtype, made, node.tags.get("event")

    def _shape(self, shape: tuple[Any, ...]) -> tuple[int, ...]:
        found = self._shapes.get(shape)
        if found is None:
            sizes = self._sizes
            found = self._shapes[shape] = tuple([sizes.setdefault(n, len(sizes)) for n in shape])
        return found


@lru_cache(KEPT)
def kept(limits: Limits, key: Any) -> list[list[int | Division]]:
    """Where the division of graphs of a pattern is kept: an empty list at first."""
    return []
