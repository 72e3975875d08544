"""The same strategy on other groups of ranks, with other shares of a batch, and cut elsewhere.

What a strategy says of a variable or a feed is two roles: between the groups of ranks that share a batch, and inside a
group. Layouts on groups of equal size are meshes, and can be had on any others, which may have unequal shares. The
roles stay, and only groups, shares and stages change; so whoever wrote the strategy need not know of it. Left out: two
roles inside a group, experts, and what ranks are fed in parts, which are divided alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import ArgumentError
from ...core.graph import Node
from ..layout.deduce import Grid
from ..layout.layout import ACROSS, DUP, Layout, MeshAxis, Shard
from .kept import Kept, owners_of

RankGroup = tuple[int, ...]


class Groups:
    """Groups as rows of a mesh, which may be of unequal length: the axis `data` is between them, `tensor` inside."""

    def __init__(self, groups: Sequence[Sequence[int]], shares: Sequence[int]) -> None:
        self.groups, self.shares = tuple(map(tuple, groups)), tuple(shares)

    @property
    def sizes(self) -> tuple[int, int]:
        return len(self.groups), max(map(len, self.groups))

    def layout(self, *, data: int = DUP, tensor: int = DUP) -> Layout:
        """The layout with these roles of the two axes."""
        parts = tuple(Shard(group, ((tensor, len(group)),)) for group in self.groups)
        return Layout(parts, data, self.shares if data >= 0 else ())


class Grouped(NamedTuple):
    """A layout as groups of ranks, its role between them, and that inside them."""

    groups: tuple[RankGroup, ...]
    data: int
    tensor: int

    @staticmethod
    def along(layout: Layout, axis: MeshAxis) -> Grouped:
        """The groups between which an axis of the layout goes. ArgumentError if ranks of a group have several roles.

        >>> from hetu.dist import Mesh
        >>> Grouped.along(Mesh((2, 2), ("data", "tensor")).layout(data=0, tensor=1), (0, 0))
        Grouped(groups=((0, 1), (2, 3)), data=0, tensor=1)
        """
        groups, (data, _) = tuple(part.ranks for part in layout.parts), layout.axes()[axis]
        if axis != ACROSS:
            (part,), (_, place) = layout.parts, axis
            lying = np.moveaxis(np.reshape(part.ranks, [n for _, n in part.axes]), place, 0)
            groups = tuple(tuple(map(int, group.flat)) for group in lying)
        roles = {role for at, (role, n) in layout.axes().items() if n > 1 and at not in (ACROSS, axis)} or {DUP}
        if len(roles) > 1:
            raise ArgumentError(f"{layout} has several roles in each of the groups {groups}", fix="use one axis there")
        return Grouped(groups, data, *roles)


RankGrid = tuple[tuple[RankGroup, ...], ...]  # pipelines of stages of ranks


class WorkDivision(NamedTuple):
    """Who does how much: pipelines side by side, which may have one stage, their shares of a batch and, if layers may
    change their stage, for each layer -> stage."""

    pipelines: RankGrid
    shares: Sequence[int]
    cuts: Sequence[Mapping[str, int]] | None = None


def refused(said: str) -> ArgumentError:
    fix = "use data, tensor or pipeline parallelism of hetu.dist, fed whole batches, or pass auto="
    return ArgumentError(f"ranks of unequal speed cannot share the work: {said}", fix=fix)


def pipelines_of(strategy: Any) -> RankGrid:
    """Which ranks work on the same rows under a `Strategy`, stage by stage: pipelines side by side, which may have one.

    ArgumentError if no feed is divided, or if stages divide it otherwise.
    """
    stages = [Grouped.along(layout, batch_axis(strategy)).groups for layout in strategy.grids()]
    if len({*map(len, stages)}) > 1:
        raise refused("stages divide a batch by unequal numbers of ranks")
    return tuple(zip(*stages))


def batch_axis(strategy: Any) -> MeshAxis:
    """The axis along which ranks share a batch; ArgumentError if there is none."""
    if strategy.local:
        raise refused(f"ranks are fed parts of {', '.join(strategy.local)}")
    feeds: Mapping[str, Layout] = strategy.feeds
    split = [(at, n) for feed in feeds.values() for at, (role, n) in feed.axes().items() if role >= 0]
    if not split:
        raise refused("they share no batch")
    return max(split, key=lambda one: one[1] > 1)[0]


def shared_axes(strategy: Any) -> dict[str, int]:
    """Of each feed of which ranks share the batch, its axis along which they do; ArgumentError if there is none."""
    axis = batch_axis(strategy)
    roles = {name: layout.axes().get(axis, (DUP, 1))[0] for name, layout in strategy.feeds.items()}
    return {name: role for name, role in roles.items() if role >= 0}


def on_groups(
    strategy: Any, outputs: Sequence[Node], to: WorkDivision, runs: Sequence[Sequence[int]], homes: Mapping[str, int]
) -> dict[str, Any]:
    """The fields of the strategy whose stages are these `runs`, each a stage of every pipeline; feeds are for the first
    run, and variables for that of their `homes`. What lies on other ranks than those of a stage stays there."""
    rows = [Groups([pipeline[k] for pipeline, k in zip(to.pipelines, run)], to.shares) for run in runs]
    axis, known = batch_axis(strategy), {Grid.of(layout).parts for layout in strategy.grids()}

    def moved(layout: Layout, to: Groups) -> Layout:
        if Grid.of(layout).parts not in known:
            return layout
        _, data, tensor = Grouped.along(layout, axis)
        return to.layout(data=data, tensor=tensor)

    variables, trained = dict(strategy.variables), {node.name for node in owners_of(outputs).values()}
    for name, home in homes.items():
        kept = variables.get(name) or Kept(rows[home].layout(), rows[home].layout())
        if isinstance(kept, Kept):
            compute, store = (moved(layout, rows[home]) for layout in kept.layouts)
            if name in trained and compute.across >= 0:
                raise refused(f"{name!r} is divided among those that share a batch")
            variables[name] = replace(kept, compute=compute, store=store, through=())
    ranks = [tuple(chain.from_iterable(stages)) for stages in to.pipelines]
    return {
        "base": Groups(ranks, to.shares).layout(data=0),
        "variables": variables,
        "feeds": {name: moved(layout, rows[0]) for name, layout in strategy.feeds.items()},
        "stages": tuple(row.layout(data=0) for row in rows),
    }
