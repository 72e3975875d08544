"""Ranks in groups of unequal size: layouts on them, and which groups the axes of a layout make.

A layout on groups has two roles: one between them, where they may have unequal shares, and one inside. So layouts on
groups of equal size, which are meshes, can be had on any others. Left out: two roles inside a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...core.errors import ArgumentError
from .layout import ACROSS, DUP, Layout, MeshAxis, Shard

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
