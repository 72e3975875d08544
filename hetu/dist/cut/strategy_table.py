"""A strategy as a table or a picture: how each variable lies on the ranks, and what that costs in memory and messages.

It leaves out the communication of activations; print a program for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

from ...core.graph import Node, topological
from ...core.op import Role
from ...core.types import show_shape
from ...look.shards import shards_svg
from ...look.svg import Svg
from ..layout.deduce import Grid
from ..layout.layout import DUP, SUM, Layout, Piece
from ..layout.redistribute import plan
from .kept import Kept, Served, owners_of

HEADER = ("variable", "shape", "compute", "store", "bytes a rank", "collectives")


class Laid(Protocol):
    """What is asked of a strategy here."""

    base: Layout
    feeds: dict[str, Layout]

    def kept(self, node: Node) -> Kept | Served: ...

    def compute(self, node: Node) -> Layout: ...

    def store(self, node: Node) -> Layout: ...

    def piece(self, node: Node, rank: int) -> Piece | None: ...


def table(strategy: Laid, outputs: Iterable[Node]) -> str:
    """The rows as text."""
    found = rows(strategy, outputs)
    widths = [max(map(len, column)) for column in zip(*found)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in found)


def rows(strategy: Laid, outputs: Iterable[Node]) -> list[tuple[str, ...]]:
    """For each variable: shape, layouts for computing and keeping, most bytes kept per rank, collectives per step."""
    variables = [node for node in topological(outputs) if node.role is Role.VARIABLE]
    found: list[tuple[str, ...]] = [HEADER]
    owners = owners_of(outputs)
    for node in variables:
        most = max((math.prod(p.shape) for p in _pieces(strategy, node).values()), default=0) * node.dtype.itemsize
        implied = ", ".join(_implied(strategy, node, owners)) if node.attrs["trainable"] else ""
        found.append((node.name, show_shape(node.shape), *strategy.kept(node).words, f"{most:,}", implied))
    return found


def shards(strategy: Laid, outputs: Iterable[Node]) -> Svg:
    """A picture: a row for each variable, and in it the part that each rank keeps."""
    variables = [node for node in topological(outputs) if node.role is Role.VARIABLE]
    pieces = {node: _pieces(strategy, node) for node in variables}
    rows = [(n.name, tuple(map(int, n.shape)), {rank: p.box for rank, p in pieces[n].items()}) for n in variables]
    kept = {rank: 0 for rank in strategy.base.ranks}
    for node, of_ranks in pieces.items():
        for rank, piece in of_ranks.items():
            kept[rank] += math.prod(piece.shape) * node.dtype.itemsize
    return shards_svg(rows, {rank: f"{nbytes:,} bytes" for rank, nbytes in kept.items()})


def _pieces(strategy: Laid, node: Node) -> dict[int, Piece]:
    """What each rank has of a variable."""
    pieces = {rank: strategy.piece(node, rank) for rank in strategy.store(node).ranks}
    return {rank: piece for rank, piece in pieces.items() if piece is not None}


def _implied(strategy: Laid, node: Node, owners: Mapping[Node, Node]) -> list[str]:
    """What a step communicates for a variable: it gathers it, combines its gradient, gathers the new value."""
    if strategy.kept(node).served:
        return ["push", "pull"]
    compute, store = strategy.compute(node), strategy.store(node)
    states = [strategy.store(v) for v, owner in owners.items() if owner is node is not v]
    updated = states[0] if states else store
    changes = [(store, compute), (_gradient(strategy, compute), updated), (updated, store)]
    kinds = [plan(src, dst, node.shape).kind for src, dst in changes]
    return [kind for kind in kinds if kind not in ("nothing", "slice")]


def _gradient(strategy: Laid, compute: Layout) -> Layout:
    """The layout of a gradient at the end of the backward pass: still to be summed over the axes of the batch."""
    split = {axis for feed in strategy.feeds.values() for axis, (role, _) in feed.axes().items() if role >= 0}
    roles = {axis: SUM if axis in split and role == DUP else role for axis, (role, _) in compute.axes().items()}
    return Grid.of(compute).layout(roles)
