"""Groups of ranks, and pipelines side by side, that need not be alike: the user gives each its share of a batch.

A fast pair of devices may take two thirds of a batch, and a single device one third. Gradients are summed over the
groups, for any inner splits (HSPMD in Hetu v2, Haoyang Li et al., 2025). A pipeline works on its share of each
micro-batch, and a stage splits its weights over its ranks. Where one cuts between two layers, the others need not: the
stages of the strategy are the runs of layers that nobody cuts, so a rank may have several, one after the other. After
the pipelines of Malleus (Haoyang Li et al., "Malleus: Straggler-Resilient Hybrid Parallel Training of Large-scale
Models via Malleable Data and Model Parallelization", 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ...core.errors import ArgumentError
from ...core.graph import Node
from ...ranges import AtLeast1
from ..cut.regroup import Groups
from .builders import Parallel, Stage
from .pipeline_schedule import Schedule
from .pipeline_stages import balanced_cut, marked_stages
from .pipeline_strategy import Staged, check_statistics, in_one_stage
from .place import refuse_places
from .regroup import WorkDivision


class Heterogeneous(Parallel):
    """`groups` of ranks divide each batch by their `shares`; a group splits weights as `TensorParallel` does.

    `zero`, `accumulate` and `statistics` are those of `Parallel`: what is sharded over groups is so by their shares.

    >>> Heterogeneous([(0, 1), (2,)], shares=(2, 1))
    Heterogeneous(groups=[(0, 1), (2,)], shares=(2, 1))
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        shares: Sequence[int],
        *,
        split: Mapping[str, int] | None = None,
        zero: Stage = 0,
        accumulate: AtLeast1 = 1,
        statistics: str = "batch",
    ) -> None:
        ranks = sorted(chain.from_iterable(groups))
        if ranks != list(range(len(ranks))) or len(shares) != len(groups):
            raise ArgumentError(
                f"groups {groups} with shares {shares}", fix="name every rank in one group, and give each group a share"
            )
        super().__init__(data=len(groups), split=split, zero=zero, accumulate=accumulate, statistics=statistics)
        self.groups = Groups(groups, shares)

    def mesh(self, ranks: Sequence[int]) -> Groups:
        if (wanted := sum(map(len, self.groups.groups))) != len(ranks):
            raise ArgumentError(f"groups of {wanted} ranks, there are {len(ranks)}", fix=f"heturun -w {wanted} ...")
        return self.groups


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
        groups = [tuple(chain.from_iterable(pipeline)) for pipeline in self.pipelines]
        super().__init__(groups, (1,) * len(groups) if shares is None else shares, split=split, zero=zero)
        if cuts is not None and len(cuts) != len(groups):
            raise ArgumentError(f"{len(cuts)} cuts of {len(groups)} pipelines", fix="give each its own, or none")
        self.microbatches, self.schedule, self.statistics, self.cuts = microbatches, schedule, statistics, cuts
        check_statistics(statistics)
        Schedule.of(schedule, 1, microbatches)  # a wrong number or name is an error now

    def build(self, outputs: Sequence[Node], world_size: int) -> Staged:
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
