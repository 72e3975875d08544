"""What can be in one group: nodes that one form computes, within the limits of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..core.graph import Node
from ..core.types import Shape, TensorType
from .apart import looked_at
from .form import DROPOUT, FOLDS, MOVES, expression_of, own_column


@dataclass(frozen=True)
class Limits:
    """What a device can do in one group."""

    dtypes: frozenset[str]
    folded: str = "f"  # kinds of dtypes that it folds
    draws: bool = False
    across: bool = True  # folds over rows and over columns in one group, and folds of one number per row
    some: bool = False  # folds over the columns and some axes of the rows
    lines: int = 48
    arrays: int = 20
    results: int = 48
    small: int = 0  # numbers: up to so many take less time than a launch, which neighbors then share
    whole: Callable[[Node], bool] = lambda node: False  # what has a better way of its own is not taken apart
    folds: Callable[[int, int], bool] = lambda rows, columns: True  # whether a fold of such a space is worth it
    waits: Callable[[int, int], bool] = lambda rows, columns: True  # whether a row can wait for its own fold

    @property
    def by_pattern(self) -> bool:
        """Whether groups follow from which sizes are equal, 0 or 1, however large they are."""
        return not self.small and (self.folds, self.waits) == (Limits.folds, Limits.waits)


class Unit(NamedTuple):
    """Nodes that one form computes, each with whether it has the axes of the rows only; the space, and how many of its
    axes are rows, if that matters; and what must lie outside, as a check looks at it.
    """

    members: dict[Node, bool]
    space: Shape
    split: int | None
    outside: frozenset[Node] = frozenset()


class Rules:
    """What can be in one group of a device."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._known: dict[Node, Unit | None] = {}

    def unit_of(self, node: Node) -> Unit | None:
        """A group of one node, or None for what cannot be in groups."""
        if node not in self._known:
            self._known[node] = self._unit_of(node)
        return self._known[node]

    def unit_of_all(self, nodes: Sequence[Node]) -> Unit | None:
        """One unit for nodes that are inputs first, or None."""
        units = [self.unit_of(node) for node in nodes]
        made = units[0] if units else None
        for unit in units[1:]:
            made = self.joined(made, unit) if made and unit else None
        return made

    def _unit_of(self, node: Node) -> Unit | None:
        arrays = node.inputs[:1] if node.op is DROPOUT else node.inputs
        if not arrays or node.attrs.get("window") is not None:
            return None
        for x in (node, *arrays):
            if isinstance(x.type, tuple) or _name(x.type.dtype) not in self.limits.dtypes:
                return None
        if node.op in FOLDS:
            return self._fold(node)
        if node.op in MOVES:
            return _move(node)
        if node.op is DROPOUT and (not self.limits.draws or not node.ndim or node.attrs["channels"]):
            return None
        looked = looked_at(node)
        unchecked = node.op.check_rule is None or (looked is not None and not looked.arrays)
        split = node.ndim - 1 if node.op is own_column else None
        spans = node.op is DROPOUT or span([x.shape for x in arrays], node.shape)
        return Unit({node: False}, node.shape, split) if spans and unchecked and expression_of(node.op) else None

    def _fold(self, node: Node) -> Unit | None:
        x = node.inputs[0].tensor
        rows = rows_of_fold(x, self.limits.folded, self.limits.some, **node.attrs)
        if rows is None or not self.limits.folds(_count(x.shape[: rows[0]]), _count(x.shape[rows[0] :])):
            return None
        return Unit({node: rows[1]}, x.shape, rows[0])

    def joined(self, a: Unit, b: Unit) -> Unit | None:
        """One unit for both, or None where their spaces differ or it would be too much."""
        if len(a.members) + len(b.members) > self.limits.lines:
            return None
        if a.space == b.space:
            if None not in (a.split, b.split) and a.split != b.split:
                return None
            split = a.split if a.split is not None else b.split
            unit = Unit(a.members | b.members, a.space, split, a.outside | b.outside)
            return self._checked(unit, ((a, b), (b, a)))
        for whole, part in ((a, b), (b, a)):
            rows = _rows_of(whole, part)
            alike = rows is not None and prod(whole.space) == prod(part.space) <= self.limits.small
            if rows is not None and (not rows[1] or alike or _linked(whole, part)):
                members = whole.members | {n: f or rows[1] for n, f in part.members.items()}
                unit = Unit(members, whole.space, rows[0], a.outside | b.outside)
                return self._checked(unit, ((whole, part), (part, whole), (part, part)))
        return None

    def _checked(self, unit: Unit, edges: Iterable[tuple[Unit, Unit]]) -> Unit | None:
        """The unit, unless it reads what is known only at the end: of `edges`, the first of two reads the second."""
        if not unit.outside.isdisjoint(unit.members):
            return None
        if not self.limits.across and not _one_way(unit):
            return None
        if unit.split is None:  # neither folds nor moves, all over the same space
            return unit
        for reading, read in edges:
            for node in reading.members:
                if node.op is DROPOUT and node.shape != unit.space:
                    return None
                for i in node.inputs:
                    if i in read.members and not self._readable(unit, node, unit.members[node], i):
                        return None
        return unit

    def _readable(self, unit: Unit, node: Node, flat: bool, i: Node) -> bool:
        if i.op in FOLDS:
            rows, columns = _count(unit.space[: unit.split]), _count(unit.space[unit.split or 0 :])
            if not _over_columns(unit, i) or not self.limits.waits(rows, columns):
                return False
        wanted = not flat if node.op in MOVES else flat and node.op not in FOLDS
        return unit.members[i] == wanted or not i.ndim


def reads_flat(members: Mapping[Node, bool], reader: Node, i: Node) -> bool:
    """Whether what a member reads has the axes of the rows only, as it is or as the reader takes it."""
    if i in members or not i.ndim:
        return members.get(i, False)
    return not members[reader] if reader.op in MOVES else members[reader] and reader.op not in FOLDS


def rows_of_fold(
    x: TensorType, kinds: str, some: bool = False, *, axis: tuple[int, ...], keepdims: bool, **_: Any
) -> tuple[int, bool] | None:
    """(axes of rows, whether the result has these only) of a fold of the last axes, or of the first; else None.

    `kinds` are those of dtypes that may be folded. With `some`, axes of rows may be folded with the last axes.
    """
    if x.dtype.kind not in kinds or 0 in x.shape or not axis:
        return None
    split = next(a for a in range(x.ndim, -1, -1) if a - 1 not in axis)
    if split < x.ndim and (some or len(axis) == x.ndim - split):
        return split, not keepdims and split > 0 and len(axis) == x.ndim - split
    return (len(axis), False) if axis == tuple(range(len(axis))) and not keepdims else None


def span(shapes: Sequence[Shape], space: Shape) -> bool:
    """Whether shapes broadcast to just this one, so that an expression of one place may compute it."""
    if all(shape == space for shape in shapes):
        return True
    aligned = [(1,) * (len(space) - len(shape)) + shape for shape in shapes]
    return all(len(a) == len(space) for a in aligned) and all(
        {*sizes} - {1} == {n} - {1} for n, *sizes in zip(space, *aligned)
    )


@cache
def _name(dtype: np.dtype) -> str:
    return dtype.name


def _count(sizes: Sequence[Any]) -> int:
    return prod(sizes)


def _move(node: Node) -> Unit | None:
    """A move of one number per row: axes of size 1 come or go behind the rows."""
    x, own = node.inputs[0].shape, node.shape
    if prod(own) != prod(x):
        return None
    if len(own) > len(x) and own[: len(x)] == x and all(n == 1 for n in own[len(x) :]):
        return Unit({node: False}, own, len(x))
    if 0 < len(own) < len(x) and x[: len(own)] == own and all(n == 1 for n in x[len(own) :]):
        return Unit({node: True}, x, len(own))
    return None


def _rows_of(whole: Unit, part: Unit) -> tuple[int, bool] | None:
    """(rows, whether part has the axes of the rows only) where the space of `part` is the rows of `whole`."""
    space, own = whole.space, part.space
    if 0 in space:  # it has no place where a number per row would be computed
        return None
    if len(own) == len(space):
        least = len(own) - next((k for k, n in enumerate(reversed(own)) if n != 1), len(own))
        fit = [s for s in range(least, len(own) + 1) if own[:s] == space[:s]]  # several where axes have a size of 1
        if not fit:
            return None
        known = [s for s in (whole.split, part.split) if s in fit]
        split = (known or fit)[-1]
        return (split, False) if whole.split in (None, split) and part.split in (None, split, len(own)) else None
    split = len(own)
    if split > len(space) or own != space[:split] or whole.split not in (None, split):
        return None
    return (split, True) if part.split in (None, split) and not any(part.members.values()) else None


def _linked(whole: Unit, part: Unit) -> bool:
    """Whether a number per row goes from one to the other: else equal sizes may be by chance."""
    return any(i in part.members for m in whole.members if m.op in MOVES for i in m.inputs) or any(
        i in whole.members and (whole.members[i] or not i.ndim) for n in part.members for i in n.inputs
    )


def _one_way(unit: Unit) -> bool:
    """Whether all folds are of whole rows, or all of whole columns."""
    folds = [n for n in unit.members if n.op in FOLDS]
    last = {len(unit.space) - 1 in n.attrs["axis"] for n in folds}
    return len(last) < 2 and all(n.inputs[0].shape == unit.space for n in folds)


def _over_columns(unit: Unit, fold: Node) -> bool:
    """Whether a fold gives a number per row, which the rest of the group may read."""
    if unit.split is None or unit.members[fold] != (not fold.attrs["keepdims"]):
        return False
    x, axes = fold.inputs[0], tuple(range(unit.split, len(unit.space)))
    return not unit.members.get(x, False) and fold.attrs["axis"] == axes and x.ndim == len(unit.space)
