"""Pipelines side by side that need not be alike: each has stages of its own, and each stage as many ranks as it likes.

Every pipeline works on its share of each micro-batch, and a stage splits its weights over its ranks. Where one cuts
between two layers, the others need not: the stages of the strategy are the runs of layers that nobody cuts, so a rank
may have several, one after the other. After the pipelines of Malleus (Haoyang Li et al., "Malleus: Straggler-Resilient
Hybrid Parallel Training of Large-scale Models via Malleable Data and Model Parallelization", 2024) and of Hetu v2.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...core.errors import ArgumentError
from ...core.graph import Node
from ...ranges import AtLeast1
from .builders import Stage
from .heterogeneous import Heterogeneous
from .pipeline_schedule import Schedule
from .pipeline_stages import balanced_cut, marked_stages
from .pipeline_strategy import Staged, check_statistics, in_one_stage
from .place import refuse_places
from .regroup import WorkDivision


class Pipelines(Heterogeneous):
    """`pipelines`: for each the ranks of its stages; they divide each micro-batch by their `shares` (equally).

    cuts: for each pipeline layer -> stage, by default stages whose work goes by their numbers of ranks. `split`,
    `zero`, `microbatches`, `schedule` and `statistics` are those of `Pipeline`.

    >>> Pipelines([[(0, 1), (2,)], [(3,)]], shares=(3, 1), microbatches=8)
    Pipelines(pipelines=[[(0, 1), (2,)], [(3,)]], shares=(3, 1), microbatches=8)
    """

    def __init__(
        self,
        pipelines: Sequence[Sequence[Sequence[int]]],
        shares: Sequence[int] | None = None,
        microbatches: AtLeast1 = 4,
        schedule: str = "1f1b",
        *,
        split: Mapping[str, int] | None = None,
        zero: Stage = 0,
        statistics: str = "batch",
        cuts: Sequence[Mapping[str, int]] | None = None,
    ) -> None:
        self.pipelines = [[tuple(stage) for stage in pipeline] for pipeline in pipelines]
        if not self.pipelines or not all(pipeline and all(pipeline) for pipeline in self.pipelines):
            raise ArgumentError(f"pipelines {self.pipelines}", fix="give each a stage at least, and each stage a rank")
        groups = [tuple(itertools.chain.from_iterable(pipeline)) for pipeline in self.pipelines]
        super().__init__(groups, (1,) * len(groups) if shares is None else shares, split=split, zero=zero)
        if cuts is not None and len(cuts) != len(groups):
            raise ArgumentError(f"{len(cuts)} cuts of {len(groups)} pipelines", fix="give each its own, or none")
        self.microbatches, self.schedule, self.statistics, self.cuts = microbatches, schedule, statistics, cuts
        check_statistics(statistics)
        Schedule.of(schedule, 1, microbatches)  # a wrong number or name is an error now

    def build(self, outputs: Sequence[Node], world_size: int) -> Staged:
        """The strategy for a graph on `world_size` ranks."""
        refuse_places(outputs, "a pipeline places")
        if marked_stages(outputs):
            raise ArgumentError(
                "the graph marks stages, but each of these pipelines has its own",
                fix="remove the marks, and say which layers stages have by cuts=",
            )
        plain = in_one_stage(super().build(outputs, world_size), self.microbatches, self.statistics)
        cuts = self.cuts or [balanced_cut(outputs, plain.feeds, [len(s) for s in stages]) for stages in self.pipelines]
        division = WorkDivision(tuple(map(tuple, self.pipelines)), self.groups.shares, cuts)
        return replace(plain.regrouped(outputs, world_size, division), schedule=self.schedule)
