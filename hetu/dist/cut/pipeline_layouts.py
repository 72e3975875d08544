"""Micro-batches as one more axis of the device grid, the outermost, in all layouts of a pipelined step.

To the rules of operators it is an axis like any other: nodes split along it are computed once per micro-batch, pending
sums are accumulated, and duplicates are computed once per step. So means are those of the whole batch, and an operator
that needs all samples at once is found.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...core.errors import GraphError
from ...core.graph import Node, topological
from ...core.op import Role
from ..layout.deduce import AxisId, Grid, PartsOf, deduce, updating
from ..layout.layout import DUP, PENDING, Layout, Shard
from .pipeline_stages import EVERYWHERE, UPDATE, label_by, phases, stages_of
from .pipeline_strategy import Staged


@functools.lru_cache(maxsize=4096)
def lift(layout: Layout, count: int, role: int = DUP) -> Layout:
    """`layout` with an outermost axis over `count` micro-batches in every part."""
    step = max(layout.ranks) + 1
    parts = tuple(
        Shard(tuple(m * step + rank for m in range(count) for rank in part.ranks), ((role, count), *part.axes))
        for part in layout.parts
    )
    return Layout(parts, layout.across, layout.ratio)


@functools.lru_cache(maxsize=4096)
def within_microbatch(layout: Layout) -> Layout:
    """The layout of one micro-batch: `layout` without its outermost axis."""
    parts = tuple(Shard(p.ranks[: len(p.ranks) // p.axes[0][1]], p.axes[1:]) for p in layout.parts)
    return Layout(parts, layout.across, layout.ratio)


def over_microbatches(layout: Layout) -> int:
    """The role of the axis over micro-batches; a single micro-batch holds everything."""
    role, count = layout.parts[0].axes[0]
    return role if count > 1 else DUP


def unsplit(layout: Layout, axis: int) -> Layout:
    """The layout with `axis` of the tensor whole."""
    parts = tuple(Shard(p.ranks, tuple((DUP if r == axis else r, n) for r, n in p.axes)) for p in layout.parts)
    return Layout(parts, *((DUP,) if layout.across == axis else (layout.across, layout.ratio)))


@dataclass(frozen=True)
class StageGrid(Grid):
    """The grid of a stage. Sums over micro-batches are completed before they leave their stage or reach an update."""

    late: bool = False

    def carry(self, layout: Layout) -> Layout:
        """`layout` on this grid, with such sums completed."""
        key = layout, "in this stage"
        if key not in self._made:
            self._made[key] = self._carried(layout)
        return self._made[key]

    def _carried(self, layout: Layout) -> Layout:
        roles: dict[AxisId, int] = {axis: role for axis, (role, _) in super().carry(layout).axes().items()}
        here = {rank for ranks, _ in self.parts for rank in ranks}
        role = layout.parts[0].axes[0][0]
        if role in PENDING and (self.late or here != set(layout.ranks)):
            role = DUP
        return self.layout({**roles, **{(p, 0): role for p in range(len(self.parts))}})

    @property
    def whole_batches(self) -> bool:
        return self.parts[0][1][0] == 1

    def hinted(self, hint: Layout, given: Layout | None, node: Node) -> Layout:
        """As asked for within one micro-batch, on ranks of the stage that the hint numbers from 0."""
        role, count = (DUP, self.parts[0][1][0]) if given is None else self.carry(given).parts[0].axes[0]
        ranks = [rank for part, _ in self.parts for rank in part[: len(part) // count]]
        if (most := max(hint.ranks)) >= len(ranks):
            raise GraphError(
                f"{node!r} uses rank {most} of a stage of {len(ranks)}",
                fix="number the ranks of its stage from 0",
                site=node.site,
            )
        parts = tuple(Shard(tuple(ranks[r] for r in p.ranks), p.axes) for p in hint.parts)
        return lift(Layout(parts, hint.across, hint.ratio), count, role)


@functools.lru_cache(maxsize=1024)  # a grid remembers the layouts that it made, so that all readers share them
def stage_grid(grid: Grid, late: bool) -> StageGrid:
    """The grid of a stage with these ranks and degrees; `late` for its updates."""
    return StageGrid(grid.parts, grid.ratio, late)


class Stages:
    """A graph with the phase, stage and layouts of every node; `apart` if each micro-batch is a batch of its own."""

    def __init__(
        self, outputs: Sequence[Node], strategy: Staged, count: int, *, parts: PartsOf, apart: bool = False
    ) -> None:
        self.outputs, self.strategy, self.count = outputs, strategy, count
        # The last variable first, as the program will run: its gradient is the first that backward finishes.
        self.nodes = topological((*outputs[:1], *reversed(outputs[1:])))
        self.phase = phases(outputs, strategy.feeds, apart=apart)
        label = label_by(strategy.cut) if len(strategy.stages) > 1 else (lambda node: None)
        self.stage = stages_of(outputs, self.phase, label, strategy.homes)
        late = updating(outputs)
        self.found = deduce(outputs, self.leaf, self.grid, late, narrow=strategy.narrow_sums, parts=parts)

    def leaf(self, node: Node, updating: bool) -> Layout | None:
        """As that of a strategy, with the axis over micro-batches."""
        layout = self.strategy.leaf(node, updating)
        axis = self.strategy.batch_axis(node)
        return None if layout is None else lift(layout, self.count, DUP if axis is None else axis)

    def grid(self, node: Node) -> StageGrid:
        """Where a node is computed."""
        stage = self.stage.get(node, EVERYWHERE)
        base = self.strategy.whole if stage == EVERYWHERE else self.strategy.stages[stage]
        return stage_grid(Grid.of(lift(base, self.count)), self.phase.get(node) == UPDATE)

    def given(self, node: Node) -> int:
        """How a value lies over micro-batches where it is made."""
        if node.inputs:
            return over_microbatches(self.found.layouts[node][0])
        layout = self.leaf(node, False)
        return DUP if layout is None else over_microbatches(layout)

    def check(self, effects: Collection[Node] = ()) -> GraphError | None:
        """Move nodes that need all micro-batches to the end of the step; an error if a micro-batch waits for one.

        There `effects` may act for each by itself.
        """
        moved: dict[Node, tuple[Node, Node]] = {}  # for whose sake each was, and what that one reads
        for node in self.nodes:
            if not node.inputs or node.role is Role.ITEM:
                for source in node.inputs:
                    self.phase[node] = self.phase[source]
                    if source in moved:
                        moved[node] = moved[source]
                continue
            outs = [over_microbatches(layout) for layout in self.found.layouts[node]]
            for i, want in zip(node.inputs, self.found.wants[node]):
                have, need = self.given(i), over_microbatches(want)
                if self.phase.get(i) == UPDATE or (have != DUP and need == DUP):
                    self.phase[node] = UPDATE
                    moved.setdefault(node, moved.get(i, (node, i)))
                elif have not in (DUP, need):
                    return self._needs_all(node, i)
            if self.phase[node] == UPDATE and node not in effects and any(role != DUP for role in outs):
                return self._needs_all(*moved.get(node, (node, node)))
        return None

    def _needs_all(self, node: Node, read: Node) -> GraphError:
        """Names who reads, or the maker of what is read, if that is still to be combined and others only pass it on."""
        role = self.given(read)
        alike = [read] if role < 0 and role != DUP else []
        while alike:
            node = alike[0]
            alike = [i for i in node.inputs if self.given(i) == role]
        return GraphError(
            f"{node!r} needs the whole batch at once, but is fed in {self.count} micro-batches",
            fix='make each a batch of its own by statistics="microbatch", use what looks at single samples (LayerNorm '
            "instead of BatchNorm), or feed one micro-batch",
            site=node.site,
        )
