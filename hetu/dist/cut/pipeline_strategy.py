"""A strategy with stages, as plain data: each stage on ranks of its own, and a batch fed in micro-batches.

`pipeline_builder.py` writes one; `pipeline_step.py` makes a step of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ...core.errors import ArgumentError, ShapeError
from ...core.graph import Node, topological
from ...core.op import Role
from ...core.types import Atom, Dim
from ..layout.layout import Layout
from .pipeline_schedule import Schedule
from .pipeline_stages import EVERYWHERE, label_by, layers_of, phases, runs_of, stages_of
from .regroup import WorkDivision, on_groups
from .strategy import Strategy

STATISTICS = ("batch", "microbatch")


@dataclass
class Staged(Strategy):
    """A strategy with stages: a grid for each, the stage of each layer (none if the user has marked nodes), a schedule.

    `statistics` are of the whole "batch", or of each "microbatch" as a batch of its own. `base` holds duplicates on the
    ranks of all stages; `variables` names those that are on one stage.
    """

    stages: tuple[Layout, ...] = ()
    cut: dict[str, int] = field(default_factory=dict)
    microbatches: int = 1
    schedule: str = "1f1b"
    statistics: str = "batch"
    kind: ClassVar[str] = "staged"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_statistics(self.statistics)
        of = {layout.ranks: stage for stage, layout in enumerate(self.stages)}
        stored = {name: kept.layouts[-1].ranks for name, kept in self.variables.items() if kept.layouts}
        self.homes = {name: of[ranks] for name, ranks in stored.items() if ranks in of}

    @property
    def own_batches(self) -> bool:
        """Whether each micro-batch that updates anything is a batch of its own; the only one is the batch."""
        return self.schedule == "pipedream" or (self.statistics == "microbatch" and self.microbatches > 1)

    def check(self, outputs: Sequence[Node], world_size: int) -> None:
        """As for any strategy; ArgumentError also for a batch of a fixed size where micro-batches are batches."""
        super().check(outputs, world_size)
        if passing := next((name for name, home in self.variables.items() if home.through), None):
            text = f"the gradient of {passing!r} is to go through other layouts, but stages sum theirs at once"
            raise ArgumentError(text, fix="leave through= empty")
        updates = [node for node in topological(outputs) if node.role is Role.UPDATE]
        who = "PipeDream" if self.schedule == "pipedream" else 'statistics="microbatch"'
        for node in topological(updates) if self.own_batches else ():
            axis = self.batch_axis(node)
            if axis is not None and not isinstance(node.shape[axis], Dim):
                shape = tuple(None if d == axis or isinstance(n, Dim) else n for d, n in enumerate(node.shape))
                raise ArgumentError(
                    f"{node!r} has batches of {node.shape[axis]}, but {who} makes a batch of each micro-batch",
                    fix=f"leave that size open: shape {shape}",
                    site=node.site,
                )

    def batch_axis(self, node: Node) -> int | None:
        """The axis along which a feed is cut into micro-batches; None for all other nodes."""
        return self._split_axis(node.name) if node.role is Role.PLACEHOLDER and node.name in self.feeds else None

    def _split_axis(self, feed: str) -> int | None:
        return max((role for role, _ in self.feeds[feed].axes().values() if role >= 0), default=None)

    def sizes(self, sizes: Mapping[Atom, int], training: bool) -> Mapping[Atom, int]:
        """The sizes that a graph is made for, from those fed: those of a micro-batch that is a batch of its own."""
        found = dict(super().sizes(sizes, training))
        for (name, axis), size in sizes.items() if training else ():
            if name not in self.feeds or axis != self._split_axis(name) or not (self.own_batches or name in self.local):
                continue
            if size % self.microbatches:
                what = "part" if name in self.local else "batch"
                raise ShapeError(
                    f"a {what} of {size} in {name!r} does not divide into {self.microbatches} micro-batches",
                    fix=f"feed a multiple of {self.microbatches} rows, or drop the last batch: "
                    "DataLoader(..., drop_last=True)",
                )
            found[name, axis] //= self.microbatches if self.own_batches else 1
        return found

    def regrouped(self, outputs: Sequence[Node], world_size: int, to: WorkDivision) -> Staged:
        runs, cut, homes = [(k,) * len(to.pipelines) for k in range(len(self.stages))], self.cut, self.homes
        if to.cuts is not None:  # stages are the runs of layers that no pipeline cuts
            cut, runs = runs_of(layers_of(outputs, self.feeds)[0], to.pipelines, to.cuts)
            stages = stages_of(outputs, phases(outputs, self.feeds), label_by(cut)).items()
            homes = {node.name: run for node, run in stages if node.role is Role.VARIABLE and run != EVERYWHERE}
        return replace(self, **on_groups(self, outputs, to, runs, homes), cut=cut, hosts=())

    def grids(self) -> Sequence[Layout]:
        return self.stages

    def moments(self) -> Mapping[int, str]:
        return {k: f"{a.slot.phase}{a.slot.microbatch}" for k, a in enumerate(self.picture().order, 1)}

    def picture(self) -> Schedule:
        """The schedule of a training step, to print or show.

        >>> from hetu.dist import Layout, Shard
        >>> strategy = Staged(Layout(Shard((0,))), stages=(Layout(Shard((0,))),), microbatches=2)
        >>> print(strategy.picture())
        1f1b: 1 stages, 2 micro-batches, bubble 0.0 %
        stage 0  F0 B0 B0 F1 B1 B1
        """
        return Schedule.of(self.schedule, len(self.stages), self.microbatches)


def check_statistics(word: str) -> None:
    """ArgumentError for another word than the two that say what looks at a whole batch."""
    if word not in STATISTICS:
        raise ArgumentError(f"statistics={word!r}", fix=f"use one of {', '.join(map(repr, STATISTICS))}")


def in_one_stage(strategy: Strategy, microbatches: int, statistics: str) -> Staged:
    """`strategy` with each batch in micro-batches, which follow one another on all ranks: gradients accumulate."""
    return Staged(
        strategy.base,
        strategy.variables,
        strategy.feeds,
        hosts=strategy.hosts,
        local=strategy.local,
        stages=(strategy.base,),  # with the shares of unequal groups
        microbatches=microbatches,
        statistics=statistics,
    )
