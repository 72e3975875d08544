"""A strategy as a table: what each variable looks like on the ranks, and what keeping it so costs.

Ignored on purpose: communication of activations, which only the whole graph shows (`print` a program for that).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..graph import Node, topological
from ..types import show_shape
from .deduce import Grid
from .layout import DUP, SUM, Layout
from .redistribute import plan

if TYPE_CHECKING:
    from .strategy import Strategy

HEADER = ("variable", "shape", "compute", "store", "bytes a rank", "collectives")


def table(strategy: Strategy, outputs: Iterable[Node]) -> str:
    """One row per variable: shape, layouts for computing and keeping, most bytes a rank keeps, collectives a step."""
    variables = [node for node in topological(outputs) if node.op.name == "variable"]
    rows = [HEADER]
    for node in variables:
        store, compute = strategy.store(node), strategy.leaf(node, False)
        most = max(math.prod(piece.shape) for piece in store.pieces(node.shape).values()) * node.dtype.itemsize
        implied = ", ".join(_implied(strategy, node, variables)) if node.attrs["trainable"] else ""
        rows.append((node.name, show_shape(node.shape), str(compute), str(store), f"{most:,}", implied))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows)


def _implied(strategy: Strategy, node: Node, variables: Sequence[Node]) -> list[str]:
    """What a step does to a variable beside computing: gather it, combine its gradient, gather the new value."""
    compute, store = strategy.leaf(node, False), strategy.store(node)
    states = [strategy.store(v) for v in variables if v.name.startswith(f"{node.name}/") and v.shape == node.shape]
    updated = states[0] if states else store
    changes = [(store, compute), (_gradient(strategy, compute), updated), (updated, store)]
    kinds = [plan(src, dst, node.shape).kind for src, dst in changes]
    return [kind for kind in kinds if kind not in ("nothing", "slice")]


def _gradient(strategy: Strategy, compute: Layout) -> Layout:
    """The layout in which a gradient comes out of backward: to be summed over the axes that split the batch."""
    split = {axis for feed in strategy.feeds.values() for axis, (role, _) in feed.axes().items() if role >= 0}
    roles = {axis: SUM if axis in split and role == DUP else role for axis, (role, _) in compute.axes().items()}
    return Grid.of(compute).layout(roles)
