"""Put elementwise operators, and folds of what they make, into groups that a device computes in one go.

A group is over one space, see `form.py`. Neighbors in the graph are merged while the result is still one form, and
convex: no path leads from a group through another node back to it, where the one order of communication counts as a
path. Operators that can be written in such terms are taken apart first, see `apart.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from math import prod
from typing import Any

from ..core.graph import OPS, Node, origin_of, readers_of, remade, topological
from ..core.memory import in_line
from ..core.op import Op, Role
from ..core.types import Shape, TensorType
from .apart import Checks, Looked, looked_at, taken_apart
from .form import (
    DROPOUT,
    FOLDS,
    MOVES,
    Enter,
    Form,
    Line,
    Number,
    Operand,
    PartCheck,
    expression_of,
    overwriting,
    overwritten,
    own_column,
)

NEAR = 32  # nodes: a large result is not made much earlier than it is read, as it takes memory until then


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
    whole: Callable[[Op[..., Any]], bool] = lambda op: False  # what has a better way of its own is not taken apart
    folds: Callable[[int, int], bool] = lambda rows, columns: True  # whether a fold of such a space is worth it
    waits: Callable[[int, int], bool] = lambda rows, columns: True  # whether a row can wait for its own fold


def fuse(outputs: Sequence[Node], limits: Limits, enter: Enter) -> tuple[Node, ...]:
    """The graph with its groups as one operator each, which `enter` makes known to a device."""
    rules = _Rules(limits)
    apart, checks = taken_apart(outputs, lambda node: rules.unit_of(node) is not None, limits.whole)
    units = _Units(apart, checks, rules)
    units.merge()
    return units.rebuilt(enter)


# -- units -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """Nodes that one form computes, each with whether it has the axes of the rows only; the space, and how many of its
    axes are rows, if that matters; and what must lie outside, as a check looks at it.
    """

    members: dict[Node, bool]
    space: Shape
    split: int | None
    outside: frozenset[Node] = frozenset()


class _Rules:
    """What can be in one group of a device."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def unit_of(self, node: Node) -> Unit | None:
        """A group of one node, or None for what cannot be in groups."""
        arrays = node.inputs[:1] if node.op is DROPOUT else node.inputs
        if not arrays or any(isinstance(x.type, tuple) for x in (node, *arrays)):
            return None
        if node.attrs.get("window") is not None or any(x.dtype.name not in self.limits.dtypes for x in (node, *arrays)):
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
        return Unit({node: False}, node.shape, split) if expression_of(node.op) and unchecked else None

    def _fold(self, node: Node) -> Unit | None:
        x = node.inputs[0].tensor
        rows = rows_of_fold(x, self.limits.folded, self.limits.some, **node.attrs)
        if rows is None or not self.limits.folds(_count(x.shape[: rows[0]]), _count(x.shape[rows[0] :])):
            return None
        return Unit({node: rows[1]}, x.shape, rows[0])

    def joined(self, a: Unit, b: Unit) -> Unit | None:
        """One unit for both, or None where their spaces differ or it would be too much."""
        if a.space == b.space:
            if None not in (a.split, b.split) and a.split != b.split:
                return None
            split = a.split if a.split is not None else b.split
            return self._checked(replace(a, members=a.members | b.members, split=split, outside=a.outside | b.outside))
        for whole, part in ((a, b), (b, a)):
            rows = _rows_of(whole, part)
            alike = rows is not None and prod(whole.space) == prod(part.space) <= self.limits.small
            if rows is not None and (not rows[1] or alike or _linked(whole, part)):
                members = whole.members | {n: f or rows[1] for n, f in part.members.items()}
                return self._checked(Unit(members, whole.space, rows[0], a.outside | b.outside))
        return None

    def _checked(self, unit: Unit) -> Unit | None:
        """The unit, unless it has too much in it, or reads what is known only at the end."""
        if len(unit.members) > self.limits.lines or not unit.outside.isdisjoint(unit.members):
            return None
        if not self.limits.across and not _one_way(unit):
            return None
        for node, flat in unit.members.items():
            if node.op is DROPOUT and node.shape != unit.space:
                return None
            for i in node.inputs:
                if i in unit.members and not self._readable(unit, node, flat, i):
                    return None
        return unit

    def _readable(self, unit: Unit, node: Node, flat: bool, i: Node) -> bool:
        if i.op in FOLDS:
            rows, columns = _count(unit.space[: unit.split]), _count(unit.space[unit.split or 0 :])
            if not _over_columns(unit, i) or not self.limits.waits(rows, columns):
                return False
        wanted = not flat if node.op in MOVES else flat and node.op not in FOLDS
        return unit.members[i] == wanted or not i.ndim


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
    if len(own) == len(space):
        split = len(own) - next((k for k, n in enumerate(reversed(own)) if n != 1), len(own))
        fits = whole.split in (None, split) and part.split in (None, split, len(own))
        return (split, False) if own[:split] == space[:split] and fits else None
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


def number_of(node: Node) -> Number | None:
    """(dtype, value) of a constant of one number."""
    if node.role is not Role.CONSTANT or node.ndim or node.dtype.kind not in "bif":
        return None
    return node.dtype.name, node.attrs["value"].item()


def _in_line(outputs: Sequence[Node], checks: Checks) -> dict[Node, tuple[Node, ...]]:
    """As `in_line`; a part whose check looks at arrays comes after these too."""
    looked_at = {part: [x for check in found for x in check.arrays] for part, found in checks.items()}
    arrays = [x for node in topological(outputs) for x in looked_at.get(node, ())]
    found = {n: (*before, *looked_at.get(n, ())) for n, before in in_line((*arrays, *outputs)).items()}
    place = {node: k for k, node in enumerate(found)}
    if all(place[i] < place[n] for n, before in found.items() for i in before):
        return found
    return {node: found[node] for node in TopologicalSorter(found).static_order()}


# -- the units of a graph ----------------------------------------------------------------------------------------------


class _Units:
    """A graph whose groups count as one node each: a unit, numbered by the place of one of its nodes.

    What comes before and behind a unit are sets of such numbers, kept as the bits of integers.
    """

    def __init__(self, outputs: Sequence[Node], checks: Checks, rules: _Rules) -> None:
        self.rules, self.limits = rules, rules.limits
        self.outputs, self.checks, self.earlier = outputs, checks, _in_line(outputs, checks)
        self.nodes = [*self.earlier]
        self.kept = set(outputs)
        self.at = {node: k for k, node in enumerate(self.nodes)}
        self.readers = {node: [r for r in found if r is not None] for node, found in readers_of(self.nodes).items()}
        self.groups: dict[int, Unit] = {}
        for k, node in enumerate(self.nodes):
            if (unit := rules.unit_of(node)) is not None:
                looked_at = frozenset(x for check in checks.get(node, ()) for x in check.arrays)
                self.groups[k] = replace(unit, outside=looked_at)
        self.unit = dict(self.at)
        self.bits = {k: 1 << k for k in range(len(self.nodes))}
        self.above: dict[int, int] = {}
        self.below: dict[int, int] = {}
        later: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for k, node in enumerate(self.nodes):
            for i in self.earlier[node]:
                later[i].append(node)
            self.above[k] = self._union(self.above, self.earlier[node])
        for k in reversed(range(len(self.nodes))):
            self.below[k] = self._union(self.below, later[self.nodes[k]])

    def _union(self, sets: dict[int, int], nodes: Iterable[Node]) -> int:
        whole = 0
        for node in nodes:
            whole |= sets[self.at[node]] | 1 << self.at[node]
        return whole

    def merge(self) -> None:
        """First each value joins its readers, if these are one group; then groups their neighbors, if they are near.

        So what a later group can compute from what is kept anyway is not kept beside it.
        """
        for node in reversed(self.nodes):
            readers = {self.unit[r] for r in self.readers[node]}
            if node not in self.kept and len(readers) == 1 and self.unit[node] in self.groups:
                (reader,) = readers
                if reader in self.groups:
                    self._merged(reader, self.unit[node])
        for neighbors in (self._across_edges, self._beside_inputs, self._small_ones):
            for unit in sorted(self.groups):
                while unit in self.groups:
                    others = dict.fromkeys(self.unit[n] for n in neighbors(unit))
                    if not any(u in self.groups and self._merged(unit, u) for u in others):
                        break

    def _across_edges(self, unit: int) -> Iterator[Node]:
        for node in self.groups[unit].members:
            yield from node.inputs
            yield from self.readers[node]

    def _beside_inputs(self, unit: int) -> Iterator[Node]:
        group = self.groups[unit]
        for i in self._outside(group.members):
            if i.shape == group.space:
                yield from self.readers[i]

    def _small_ones(self, unit: int) -> Iterator[Node]:
        """What lies near, where a launch takes longer than the work."""
        group = self.groups[unit]
        for node in group.members if prod(group.space) <= self.limits.small else ():
            yield from self.nodes[max(0, self.at[node] - NEAR) : self.at[node] + NEAR]

    def _outside(self, members: dict[Node, bool]) -> list[Node]:
        read = dict.fromkeys(i for n in members for i in n.inputs)
        return [i for i in read if i not in members and number_of(i) is None]

    def _results(self, members: dict[Node, bool]) -> list[Node]:
        return [n for n in members if n in self.kept or not members.keys() >= {*self.readers[n]}]

    def _merged(self, a: int, b: int) -> bool:
        if a == b or self.nodes[a].tags.get("event") != self.nodes[b].tags.get("event"):
            return False
        joined = None if self._between(a, b) else self.rules.joined(self.groups[a], self.groups[b])
        if joined is None or len(self._outside(joined.members)) > self.limits.arrays:
            return False
        results = self._results(joined.members)
        if len(results) > self.limits.results or not self._near(results):
            return False
        self.groups[a] = joined
        self.unit.update(dict.fromkeys(self.groups.pop(b).members, a))
        self.bits[a] |= self.bits.pop(b)
        above, below = ((s[a] | s.pop(b)) & ~self.bits[a] for s in (self.above, self.below))
        self.above[a], self.below[a] = above, below
        for unit, own in self.bits.items():
            if above & own:
                self.below[unit] |= below | self.bits[a]
            elif below & own:
                self.above[unit] |= above | self.bits[a]
        return True

    def _near(self, results: Sequence[Node]) -> bool:
        """Whether no large one of them would be made long before it is read."""
        places = [self.at[n] for n in results]
        return max((self.at[n] for n in results if prod(n.shape) > self.limits.small), default=0) - min(places) <= NEAR

    def _between(self, a: int, b: int) -> int:
        found = self.below[a] & self.above[b] | self.below[b] & self.above[a]
        return found & ~(self.bits[a] | self.bits[b])

    # -- the new graph -----------------------------------------------------------------------------------------------

    def rebuilt(self, enter: Enter) -> tuple[Node, ...]:
        new: dict[Node, Node] = {}
        for unit in self._order():
            members = self.groups[unit].members if unit in self.groups else {self.nodes[unit]: False}
            if len(members) > 1 or any(n in self.checks for n in members):
                new.update(self._fused(self.groups[unit], new, enter))
                continue
            node = self.nodes[unit]
            with origin_of(node):
                new[node] = remade(node, tuple(new[i] for i in node.inputs))
        return tuple(new[o] for o in self.outputs)

    def _order(self) -> Iterator[int]:
        members = {u: self.groups[u].members if u in self.groups else (self.nodes[u],) for u in self.bits}
        reads = {u: {self.unit[i] for n in own for i in self.earlier[n]} - {u} for u, own in members.items()}
        users: dict[int, list[int]] = {u: [] for u in reads}
        for unit, inputs in reads.items():
            for i in inputs:
                users[i].append(unit)
        ready = [u for u, inputs in reads.items() if not inputs]
        heapq.heapify(ready)
        while ready:
            unit = heapq.heappop(ready)
            yield unit
            for user in users[unit]:
                reads[user].discard(unit)
                if not reads[user]:
                    heapq.heappush(ready, user)

    def _fused(self, group: Unit, new: dict[Node, Node], enter: Enter) -> Iterator[tuple[Node, Node]]:
        lines = sorted(group.members, key=self.at.__getitem__)
        results = sorted(self._results(group.members), key=self.at.__getitem__)
        form, arrays = _form_of(group, lines, results, [c for n in lines for c in self.checks.get(n, ())])
        with origin_of(results[-1]):
            inputs = tuple(new.get(i, i) for i in arrays)  # what only a check looks at is nowhere else in the graph
            made = overwriting(tuple(overwritten(form).items()), enter).make(inputs, {"form": form})
        for k, node in enumerate(results):
            with origin_of(node):
                yield node, OPS["item"](made, index=k) if len(results) > 1 else made


def _form_of(
    group: Unit, nodes: Sequence[Node], results: Sequence[Node], checks: Sequence[Looked]
) -> tuple[Form, list[Node]]:
    """The form of a group, and the arrays that it reads."""
    members = group.members

    def key(reader: Node, i: Node) -> tuple[Node, bool]:  # an array may be read in both ways
        if i in members:
            return i, members[i]
        flat = members[reader]
        return i, bool(i.ndim) and (not flat if reader.op in MOVES else flat and reader.op not in FOLDS)

    place: dict[tuple[Node, bool], int] = {}
    for node in nodes:
        for i in node.inputs:
            if i not in members and number_of(i) is None:
                place.setdefault(key(node, i), len(place))
    arrays, flat = [i for i, _ in place], [f for _, f in place]
    types = tuple(i.tensor for i in arrays)
    for node in nodes:
        place[node, members[node]] = len(place)
    lines = []
    for node in nodes:
        operands: list[Operand] = []
        for i in node.inputs:
            number = number_of(i)
            operands.append(place[key(node, i)] if number is None else number)
        lines.append(Line(node.op, tuple(operands), tuple(node.attrs.items())))
    made = []
    for check in dict.fromkeys(checks):
        extra = {x: len(arrays) - len(types) + k for k, x in enumerate(check.arrays)}
        arrays += extra
        looked_at = tuple(extra.get(i, i.tensor) for i in check.inputs)
        made.append(PartCheck(check.op, looked_at, check.attrs, check.site))
    flats = (*flat, *(members[n] for n in nodes))
    numbers = tuple(place[n, members[n]] for n in results)
    return Form(types, tuple(lines), numbers, group.space, group.split or 0, flats, tuple(made)), arrays
