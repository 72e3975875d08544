"""Plans that are not alike on all ranks: rows by the speed of each, and stages of unequal size, with what may vary."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...core.graph import Node
from ...dist.cut.builders import Parallel
from ...dist.cut.heterogeneous import Heterogeneous
from ...dist.cut.pipeline_builder import in_stages
from ...dist.cut.pipeline_stages import balanced_cut
from ...dist.cut.pipeline_strategy import Staged
from ...dist.cut.strategy import Builder
from ...dist.layout.layout import Mesh
from ..why import Candidate
from .candidates import GPIPE, in_other_parts

ALIKE = 1.05  # a rank that takes no longer than so many times the fastest gets as many rows


def rows_by_speed(batch: int, speeds: Sequence[float]) -> list[int]:
    """The rows of a batch that each rank computes in about the same time; `speeds` are factors on its time.

    >>> rows_by_speed(12, [1.0, 1.0, 2.0, 1.0])
    [4, 4, 1, 3]
    """
    wanted = batch / np.array(speeds) / (1 / np.array(speeds)).sum()
    rows = np.floor(wanted).astype(int)
    for _ in range(batch - int(rows.sum())):  # one more to whom it makes the latest end least later
        rows[np.argmin((rows + 1) * np.array(speeds))] += 1
    return [int(n) for n in rows]


def by_speed(batch: int | None, speeds: Sequence[float]) -> Iterator[Candidate]:
    """Data parallelism in which slow ranks get fewer rows."""
    if batch is None or max(speeds) <= ALIKE * min(speeds) or min(rows := rows_by_speed(batch, speeds)) == 0:
        return
    shares = [n // math.gcd(*rows) for n in rows]
    builder = Heterogeneous([(rank,) for rank in range(len(speeds))], shares)
    yield Candidate(f"dp{len(speeds)}, rows by speed", builder, f"rows of each rank: {', '.join(map(str, rows))}")


class UnevenStages(Builder):
    """A pipeline whose stages differ: `grids` has for each how many ranks share the batch, and how many the weights.

    cut: layer -> stage, by default so that their work goes by their numbers of ranks.

    >>> UnevenStages([(1, 1), (2, 1)], 4)
    UnevenStages(grids=[(1, 1), (2, 1)], microbatches=4)
    """

    def __init__(
        self,
        grids: Sequence[tuple[int, int]],
        microbatches: int,
        schedule: str = "1f1b",
        split: Mapping[str, int] | None = None,
        cut: Mapping[str, int] | None = None,
    ) -> None:
        self.grids, self.microbatches, self.schedule, self.split, self.cut = grids, microbatches, schedule, split, cut
        self.ends = [0, *itertools.accumulate(data * tensor for data, tensor in grids)]

    @property
    def name(self) -> str:
        """What people call it: of the stages how many ranks share the batch, or do the same."""
        ranks = ", ".join(f"{data}" if alike == 1 else f"{alike} alike" for data, alike in self.grids)
        schedule = GPIPE if self.schedule == "gpipe" else ""
        return f"pp{len(self.grids)} of {ranks} ranks, {self.microbatches} micro-batches{schedule}"

    def build(self, outputs: Sequence[Node], world_size: int) -> Staged:
        plain = Parallel(data=1, split=self.split or {}).build(outputs, 1)
        cut = dict(self.cut or balanced_cut(outputs, plain.feeds, [data * tensor for data, tensor in self.grids]))
        ranks = map(range, self.ends, self.ends[1:])
        meshes = [Mesh(grid, ("data", "tensor"), stage) for grid, stage in zip(self.grids, ranks)]
        builders = [Parallel(data=data, tensor=tensor, split=self.split or {}) for data, tensor in self.grids]
        whole = Mesh((world_size, 1), ("data", "tensor")).layout()
        how = {"microbatches": self.microbatches, "schedule": self.schedule}
        return in_stages(outputs, whole, builders, meshes, plain.feeds, cut, **how)


def varied(plan: Candidate, cut: Mapping[str, int], counts: Sequence[int]) -> Iterator[Candidate]:
    """A pipeline with another of its choices: a layer on the stage before or behind; where stages differ, also the next
    of these numbers of micro-batches, all passes forth before those back, ranks of a stage that do the same where they
    shared, or share, and two stages with each other's ranks, or one of them."""
    builder, name = plan.builder, re.sub(r", cut by seconds|(, \d+)+ layers", "", plan.name)
    for other in moved(cut):
        text = ", ".join(map(str, Counter(other.values()).values()))
        yield Candidate(f"{name}, {text} layers", builder.but(cut=other))
    if not isinstance(builder, UnevenStages):
        return
    yield from in_other_parts(Candidate(plan.name, builder.but(cut=cut)), counts)
    if builder.microbatches > 1 and builder.schedule == "1f1b":
        yield Candidate(f"{name}{GPIPE}", builder.but(schedule="gpipe", cut=cut))
    for k, (data, alike) in enumerate(builder.grids if not builder.split else ()):
        if data * alike > 1:
            made = builder.but(grids=[*builder.grids[:k], (alike, data), *builder.grids[k + 1 :]], cut=cut)
            yield Candidate(made.name, made)
    for k, (one, next_one) in enumerate(itertools.pairwise(builder.grids)):
        (a, b) = math.prod(one), math.prod(next_one)
        for sizes in ((b, a), (a - 1, b + 1), (a + 1, b - 1)):
            if min(sizes) and sizes != (a, b):
                grids = [*builder.grids[:k], *((n, 1) for n in sizes), *builder.grids[k + 2 :]]
                made = builder.but(grids=grids, cut=None)
                yield Candidate(made.name, made)


def moved(cut: Mapping[str, int]) -> list[dict[str, int]]:
    """The cuts in which one layer, the first or last of a stage with others, is on the stage before or behind.

    >>> moved({"up": 0, "middle": 0, "down": 1})
    [{'up': 0, 'middle': 1, 'down': 1}]
    """
    found = []
    for (a, s), (b, t) in itertools.pairwise(cut.items()):
        for name, to in ((a, t), (b, s)) if s != t else ():
            made = {**cut, name: to}
            found += [made] if {*made.values()} == {*cut.values()} else []
    return found
