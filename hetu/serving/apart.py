"""Whether what a model gives for a row follows from that row alone, so that requests may share a run.

The sharding rules of operators tell: were the batch cut between two ranks, neither would have to hear of the other.
Left out: models of which only some outputs are so.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.graph import Node, topological
from ..core.leaf import random_state
from ..core.op import Role
from ..core.passes import specialize
from ..core.types import Atom, Dim
from ..dist.layout.deduce import Grid, deduce
from ..dist.layout.layout import Layout, Mesh

ROWS = 6  # of the batch that is cut in two


def rows_apart(outputs: Sequence[Node], inputs: Mapping[str, Node], sizes: Mapping[Atom, int]) -> bool:
    """Whether rows, along the first axes of all inputs and outputs, may be joined with any others; at these sizes.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 3))
    >>> [rows_apart([y], {"x": x}, {}) for y in (ht.softmax(x), ht.softmax(x, axis=0), x / x.shape[0])]
    [True, False, False]
    """
    batch = {(name, 0) for name in inputs}
    if not all(node.shape and isinstance(node.shape[0], Dim) for node in (*inputs.values(), *outputs)):
        return False
    if any(node is random_state or _counts(node, batch) for node in topological(outputs)):
        return False
    made = specialize(outputs, {**sizes, **dict.fromkeys(batch, ROWS)})
    whole, cut = (Mesh((2,), ("batch",)).layout(**roles) for roles in ({}, {"batch": 0}))

    def leaf(node: Node, updating: bool) -> Layout | None:
        return cut if node.role is Role.PLACEHOLDER else whole if node.role is Role.VARIABLE else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators without a rule, which hear of all rows
        found = deduce(made, leaf, lambda node: Grid.of(cut), set())
    asked = (
        (i, want)
        for node, wants in found.wants.items()
        if node.role is not Role.ITEM
        for i, want in zip(node.inputs, wants)
    )
    stay = all(found.layouts[i][0] in (want, whole) for i, want in asked)
    return stay and all(found.layouts[node] == (cut,) for node in made)


def _counts(node: Node, batch: set[tuple[str, int]]) -> bool:
    """Whether a node computes with the number of rows; to be as long is another thing."""
    if node.role is Role.PLACEHOLDER or not any(_mentions(value, batch) for value in node.attrs.values()):
        return False
    return node.role is not Role.MOVE or not node.ndim or any(_mentions(size, batch) for size in node.shape[1:])


def _mentions(value: Any, batch: set[tuple[str, int]]) -> bool:
    if isinstance(value, tuple):
        return any(_mentions(each, batch) for each in value)
    return isinstance(value, Dim) and any(atom in batch or _mentions(atom[1:], batch) for atom in value.atoms)
