"""The builder of pipelines: stages on ranks of their own, and batches fed in micro-batches.

The ranks form a grid of stages x data x tensor. A stage keeps its variables and computes its nodes; the user's marks
(`stage`) or a balanced cut between layers say which they are. Stages of unequal size are in `heterogeneous.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...core.errors import ArgumentError
from ...core.graph import Node
from ...core.op import Role
from ...ranges import AtLeast1
from ..layout.layout import DUP, Layout, Shard
from .builders import Parallel, RankRows, Stage
from .kept import Home, Kept, owners_of
from .pipeline_schedule import Schedule
from .pipeline_stages import EVERYWHERE, balanced_cut, label_by, marked_stages, phases, stages_of
from .pipeline_strategy import Staged
from .place import refuse_places


class Pipeline(Parallel):
    """Pipeline parallelism, and within each stage data, tensor and expert parallelism as in `Parallel`.

    stages: their number; by default as many as are marked with `stage`, else as many as fill the ranks.
    microbatches: parts of a batch that follow one another through the stages. The bubble is (P - 1) / (M + P - 1).
    schedule: "1f1b", "gpipe", or "pipedream", which updates after every micro-batch with stashed weights: there each
    micro-batch is a batch of its own, fetched scalars are averaged over them, and `run` drains the pipeline at its end.
    statistics: of the whole "batch", so that what looks at several samples at once (batch norm, the capacity of
    experts, penalties of gradients) is a GraphError; or of each "microbatch", as in `Parallel`.
    cut: layer -> stage for a graph without marks; by default stages of about equal work (`balanced_cut`).

    >>> Pipeline(2, microbatches=8)
    Pipeline(stages=2, microbatches=8)
    """

    def __init__(
        self,
        stages: AtLeast1 | None = None,
        microbatches: AtLeast1 = 4,
        schedule: str = "1f1b",
        *,
        data: AtLeast1 | None = None,
        tensor: AtLeast1 = 1,
        zero: Stage = 0,
        split: Mapping[str, int] | None = None,
        experts: Mapping[str, int] | None = None,
        hosts: Sequence[Sequence[int]] = (),
        statistics: str = "batch",
        cut: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(
            data=data, tensor=tensor, zero=zero, split=split, experts=experts, hosts=hosts, statistics=statistics
        )
        self.stages, self.microbatches, self.schedule, self.cut = stages, microbatches, schedule, cut
        Schedule.of(schedule, stages or 1, microbatches)  # a wrong number or name is an error now

    def build(self, outputs: Sequence[Node], world_size: int) -> Staged:
        marked = marked_stages(outputs)
        refuse_places(outputs, "a pipeline places")
        inside = (self.data or 1) * self.tensor
        stages = self.stages or marked or max(1, world_size // inside)
        if marked and marked != stages:
            raise ArgumentError(
                f"{stages} stages, the graph marks {marked}", fix="make them equal, or remove the marks"
            )
        data = self.data or max(1, world_size // (stages * self.tensor))
        if stages * data * self.tensor != world_size:
            raise ArgumentError(
                f"{stages} x {data} x {self.tensor} (stages x data x tensor) ranks, the job has {world_size}",
                fix="the product must be the number of ranks",
            )
        size = data * self.tensor
        plain = super().build(outputs, size)
        cut = {} if marked else dict(self.cut or balanced_cut(outputs, plain.feeds, [1] * stages))
        meshes = [self.mesh(range(s * size, (s + 1) * size)) for s in range(stages)]
        whole = Layout((Shard(tuple(range(world_size)), ((DUP, stages), *plain.whole.parts[0].axes)),))
        how = {"microbatches": self.microbatches, "schedule": self.schedule, "statistics": self.statistics}
        return in_stages(outputs, whole, [self] * stages, meshes, plain.feeds, cut, hosts=plain.hosts, **how)


def in_stages(
    outputs: Sequence[Node],
    whole: Layout,
    builders: Sequence[Parallel],
    meshes: Sequence[RankRows],
    feeds: Collection[str],
    cut: dict[str, int],
    **how: Any,
) -> Staged:
    """The strategy of stages on these ranks, each of which keeps its variables as its builder says; `whole` has all."""
    owners, variables = owners_of(outputs), dict[str, Home]()
    kinds = {mesh.sizes: (builder, mesh) for builder, mesh in zip(builders, meshes)}
    axes = {sizes: builder._axes(outputs, mesh) for sizes, (builder, mesh) in kinds.items()}
    for node, k in stages_of(outputs, phases(outputs, feeds), label_by(cut)).items():
        if node.role is Role.VARIABLE and k != EVERYWHERE:
            mesh, everywhere = meshes[k], Kept(meshes[k].layout(), meshes[k].layout())
            kept = builders[k]._kept(node, owners.get(node, node), mesh, axes[mesh.sizes])
            variables[node.name] = kept or everywhere
    fed = dict.fromkeys(feeds, meshes[0].layout(data=0))
    return Staged(whole, variables, fed, stages=tuple(mesh.layout() for mesh in meshes), cut=cut, **how)
