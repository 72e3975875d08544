"""Plans that are not alike on all ranks: rows by the speed of each, and stages of unequal size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...core.graph import Node
from ...core.op import Role
from ...dist.cut.builders import Parallel
from ...dist.cut.heterogeneous import Heterogeneous
from ...dist.cut.kept import Home, Kept, owners_of
from ...dist.cut.pipeline_stages import EVERYWHERE, balanced_cut, label_by, phases, stages_of
from ...dist.cut.pipeline_strategy import Staged
from ...dist.cut.strategy import Builder
from ...dist.layout.layout import Mesh
from ..why import Candidate

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

    def build(self, outputs: Sequence[Node], world_size: int) -> Staged:
        """The strategy for a graph on `world_size` ranks."""
        plain = Parallel(data=1, split=self.split or {}).build(outputs, 1)
        cut = dict(self.cut or balanced_cut(outputs, plain.feeds, [data * tensor for data, tensor in self.grids]))
        meshes = [
            Mesh(grid, ("data", "tensor"), range(first, last))
            for grid, (first, last) in zip(self.grids, itertools.pairwise(self.ends))
        ]
        builders = [Parallel(data=data, tensor=tensor, split=self.split or {}) for data, tensor in self.grids]
        axes = [builder._axes(outputs, mesh) for builder, mesh in zip(builders, meshes)]
        variables, owners = dict[str, Home](), owners_of(outputs)
        for node, k in stages_of(outputs, phases(outputs, plain.feeds), label_by(cut)).items():
            if node.role is Role.VARIABLE and k != EVERYWHERE:
                whole = Kept(meshes[k].layout(), meshes[k].layout())
                variables[node.name] = builders[k]._kept(node, owners.get(node, node), meshes[k], axes[k]) or whole
        return Staged(
            Mesh((world_size, 1), ("data", "tensor")).layout(),
            variables,
            {name: meshes[0].layout(data=0) for name in plain.feeds},
            stages=tuple(mesh.layout() for mesh in meshes),
            cut=cut,
            microbatches=self.microbatches,
            schedule=self.schedule,
        )


def uneven_stages(world_size: int, split: Mapping[str, int], microbatches: int) -> Iterator[Candidate]:
    """Two stages of unequal numbers of ranks, each of which divides its weights; the smaller has a third at least."""
    for first in range(-(-world_size // 3), world_size - world_size // 3):
        if 2 * first != world_size:
            builder = UnevenStages([(1, first), (1, world_size - first)], microbatches, split=split)
            yield Candidate(f"pp2 of {first} and {world_size - first} ranks, {microbatches} micro-batches", builder)
