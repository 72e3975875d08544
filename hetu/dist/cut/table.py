"""A strategy as a table or a picture: what each variable looks like on the ranks, and what keeping it so costs.

Ignored on purpose: communication of activations, which only the whole graph shows (`print` a program for that).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ...core.graph import Node, topological
from ...core.op import Role
from ...look.shards import shards_svg
from ...look.svg import Svg
from ...core.types import show_shape
from ..layout.deduce import Grid
from ..layout.layout import DUP, SUM, Layout
from ..layout.redistribute import plan

if TYPE_CHECKING:
    from .strategy import Strategy

HEADER = ("variable", "shape", "compute", "store", "bytes a rank", "collectives")


def table(strategy: Strategy, outputs: Iterable[Node]) -> str:
    """The rows as text."""
    found = rows(strategy, outputs)
    widths = [max(map(len, column)) for column in zip(*found)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in found)


def rows(strategy: Strategy, outputs: Iterable[Node]) -> list[tuple[str, ...]]:
    """For each variable: shape, layouts for computing and keeping, most bytes a rank keeps, collectives a step."""
    variables = [node for node in topological(outputs) if node.role is Role.VARIABLE]
    found = [HEADER]
    for node in variables:
        store, compute = strategy.store(node), strategy.leaf(node, False)
        most = max(math.prod(piece.shape) for piece in store.pieces(node.shape).values()) * node.dtype.itemsize
        implied = ", ".join(_implied(strategy, node, variables)) if node.attrs["trainable"] else ""
        found.append((node.name, show_shape(node.shape), str(compute), str(store), f"{most:,}", implied))
    return found


def shards(strategy: Strategy, outputs: Iterable[Node]) -> Svg:
    """A picture: a row for each variable, and in it the part that each rank keeps."""
    variables = [node for node in topological(outputs) if node.role is Role.VARIABLE]
    pieces = {node: strategy.store(node).pieces(node.shape) for node in variables}
    rows = [(n.name, tuple(n.shape), {rank: p.box for rank, p in pieces[n].items()}) for n in variables]
    kept = {rank: 0 for rank in strategy.base.ranks}
    for node, of_ranks in pieces.items():
        for rank, piece in of_ranks.items():
            kept[rank] += math.prod(piece.shape) * node.dtype.itemsize
    return shards_svg(rows, {rank: f"{nbytes:,} bytes" for rank, nbytes in kept.items()})


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
