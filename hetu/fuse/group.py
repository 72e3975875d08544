"""Put elementwise operators, and folds of what they make, into groups that a device computes in one go.

A group is over one space, see `form.py`. Neighbors in the graph are merged while the result is still one form, and
convex: no path leads from a group through another node back to it, where the one order of communication counts as a
path. Operators that can be written in such terms are taken apart first, see `apart.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from graphlib import TopologicalSorter
from math import prod
from typing import Any

import numpy as np

from ..core.graph import OPS, Node, origin_of, readers_of, remade, topological
from ..core.memory import in_line
from ..core.op import Role
from ..core.types import Shape, TensorType
from .apart import Checks, Looked, looked_at, taken_apart
from .form import FOLDS, MOVES, Form, Line, Make, Operand, PartCheck, expression_of, own_column

MOST_LINES, MOST_ARRAYS = 48, 20
NEAR = 32  # nodes: a large result is not made much earlier than it is read, as it takes memory until then
DTYPES = frozenset(map(np.dtype, ("float32", "float64", "bool", "int32", "int64")))


def fuse(outputs: Sequence[Node], make: Make) -> tuple[Node, ...]:
    """The graph with its groups as one operator each, which `make` gives for a form."""
    known = cache(unit_of)
    apart, checks = taken_apart(outputs, lambda node: known(node) is not None)
    units = _Units(apart, checks, known)
    units.merge()
    return units.rebuilt(make)


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


def unit_of(node: Node) -> Unit | None:
    """A group of one node, or None for what cannot be in groups."""
    for x in (node, *node.inputs):
        if isinstance(x.type, tuple) or x.type.dtype not in DTYPES:
            return None
    if not node.inputs or node.attrs.get("window") is not None:
        return None
    if node.op in FOLDS:
        return _fold(node)
    if node.op in MOVES:
        return _move(node)
    looked = looked_at(node)
    unchecked = node.op.check_rule is None or (looked is not None and not looked.arrays)
    split = node.ndim - 1 if node.op is own_column else None
    return Unit({node: False}, node.shape, split) if expression_of(node.op) and unchecked else None


def _fold(node: Node) -> Unit | None:
    rows = rows_of_fold(node.inputs[0].tensor, **node.attrs)
    return None if rows is None else Unit({node: rows[1]}, node.inputs[0].shape, rows[0])


def rows_of_fold(x: TensorType, *, axis: tuple[int, ...], keepdims: bool, **_: Any) -> tuple[int, bool] | None:
    """(axes of rows, whether the result has these only) of a fold of the last axes, or of the first; else None."""
    if x.dtype.kind != "f" or 0 in x.shape or not axis:
        return None
    split = x.ndim - len(axis)
    if axis == tuple(range(split, x.ndim)):
        return split, not keepdims and split > 0
    return (len(axis), False) if axis == tuple(range(len(axis))) and not keepdims else None


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


def _joined(a: Unit, b: Unit) -> Unit | None:
    """One unit for both, or None where their spaces differ, or there is too much in it."""
    if len(a.members) + len(b.members) > MOST_LINES:
        return None
    if a.space == b.space:
        if None not in (a.split, b.split) and a.split != b.split:
            return None
        split = a.split if a.split is not None else b.split
        return _checked(replace(a, members=a.members | b.members, split=split, outside=a.outside | b.outside))
    for whole, part in ((a, b), (b, a)):
        rows = _rows_of(whole, part)
        if rows is not None:
            members = whole.members | {n: f or rows[1] for n, f in part.members.items()}
            return _checked(Unit(members, whole.space, rows[0], a.outside | b.outside))
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
    linked = any(i in part.members for m in whole.members if m.op in MOVES for i in m.inputs) or any(
        i in whole.members and (whole.members[i] or not i.ndim) for n in part.members for i in n.inputs
    )
    return (split, True) if linked and part.split in (None, split) and not any(part.members.values()) else None


def _checked(unit: Unit) -> Unit | None:
    """The unit, unless it reads what is known only at the end."""
    if not unit.outside.isdisjoint(unit.members):
        return None
    for node, flat in unit.members.items():
        for i in node.inputs:
            if i in unit.members and not _readable(unit, node, flat, i):
                return None
    return unit


def _readable(unit: Unit, node: Node, flat: bool, i: Node) -> bool:
    if i.op in FOLDS and not _over_columns(unit, i):
        return False
    wanted = not flat if node.op in MOVES else flat and node.op not in FOLDS
    return unit.members[i] == wanted or not i.ndim


def _over_columns(unit: Unit, fold: Node) -> bool:
    """Whether a fold gives a number per row, which the rest of the group may read."""
    if unit.split is None or unit.members[fold] != (not fold.attrs["keepdims"]):
        return False
    x, axes = fold.inputs[0], tuple(range(unit.split, len(unit.space)))
    return not unit.members.get(x, False) and fold.attrs["axis"] == axes and x.ndim == len(unit.space)


def is_number(node: Node) -> bool:
    """Whether this is a constant of one number, which a line has among its operands."""
    return node.role is Role.CONSTANT and not node.ndim and node.dtype in DTYPES


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

    `place` is an order of all units in which each stands behind what it reads. It is kept as they are merged, so that
    only what stands between two units is searched for a path (D. Pearce and P. Kelly, 2007).
    """

    def __init__(self, outputs: Sequence[Node], checks: Checks, unit_of: Callable[[Node], Unit | None]) -> None:
        self.outputs, self.checks, self.earlier = outputs, checks, _in_line(outputs, checks)
        self.nodes = [*self.earlier]
        self.kept, self.numbers = set(outputs), {node for node in self.nodes if is_number(node)}
        self.at = {node: k for k, node in enumerate(self.nodes)}
        self.readers = {node: [r for r in found if r is not None] for node, found in readers_of(self.nodes).items()}
        self.groups: dict[int, Unit] = {}
        for k, node in enumerate(self.nodes):
            if (unit := unit_of(node)) is not None:
                looked_at = frozenset(x for check in checks.get(node, ()) for x in check.arrays)
                self.groups[k] = replace(unit, outside=looked_at) if looked_at else unit
        self.unit = dict(self.at)
        self.place = {k: k for k in range(len(self.nodes))}
        self.later: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for i in self.earlier[node]:
                self.later[i].append(node)

    def _members(self, unit: int) -> Collection[Node]:
        return self.groups[unit].members if unit in self.groups else (self.nodes[unit],)

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
        for neighbors in (self._across_edges, self._beside_inputs):
            for unit in sorted(self.groups):
                while unit in self.groups:
                    others = dict.fromkeys(self.unit[n] for n in neighbors(unit))
                    if not any(u in self.groups and abs(u - unit) <= NEAR and self._merged(unit, u) for u in others):
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

    def _outside(self, members: dict[Node, bool]) -> list[Node]:
        read = dict.fromkeys(i for n in members for i in n.inputs)
        return [i for i in read if i not in members and i not in self.numbers]

    def _merged(self, a: int, b: int) -> bool:
        if a == b or self.nodes[a].tags.get("event") != self.nodes[b].tags.get("event"):
            return False
        joined = _joined(self.groups[a], self.groups[b])
        if joined is None or len(self._outside(joined.members)) > MOST_ARRAYS:
            return False
        first, last = sorted((a, b), key=self.place.__getitem__)
        start, end = self.place[first], self.place[last]
        behind = self._reached(first, self.later, start, end)
        before = self._reached(last, self.earlier, start, end) if behind else set()
        if not behind.isdisjoint(before):
            return False
        moved = sorted((first, last, *behind, *before), key=self.place.__getitem__)
        places = [self.place[unit] for unit in moved]
        order = [*(u for u in moved if u in before), a, *(u for u in moved if u in behind)]
        self.groups[a] = joined
        self.unit.update(dict.fromkeys(self.groups.pop(b).members, a))
        del self.place[b]
        self.place.update(zip(order, places[1:]))
        return True

    def _reached(self, unit: int, edges: Mapping[Node, Iterable[Node]], start: int, end: int) -> set[int]:
        """The units that edges lead to from one, step by step, of those with places between start and end."""
        found: set[int] = set()
        frontier = [unit]
        while frontier:
            for node in self._members(frontier.pop()):
                for n in edges[node]:
                    other = self.unit[n]
                    if start < self.place[other] < end and other not in found:
                        found.add(other)
                        frontier.append(other)
        return found

    # -- the new graph -----------------------------------------------------------------------------------------------

    def rebuilt(self, make: Make) -> tuple[Node, ...]:
        new: dict[Node, Node] = {}
        for unit in self._order():
            members = self._members(unit)
            if len(members) > 1 or any(n in self.checks for n in members):
                new.update(self._fused(self.groups[unit], new, make))
                continue
            node = self.nodes[unit]
            with origin_of(node):
                new[node] = remade(node, tuple(new[i] for i in node.inputs))
        return tuple(new[o] for o in self.outputs)

    def _order(self) -> Iterator[int]:
        reads = {u: {self.unit[i] for n in self._members(u) for i in self.earlier[n]} - {u} for u in self.place}
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

    def _fused(self, group: Unit, new: dict[Node, Node], make: Make) -> Iterator[tuple[Node, Node]]:
        lines = sorted(group.members, key=self.at.__getitem__)
        results = [n for n in lines if n in self.kept or not group.members.keys() >= {*self.readers[n]}]
        form, arrays = _form_of(group, lines, results, [c for n in lines for c in self.checks.get(n, ())])
        with origin_of(results[-1]):
            inputs = tuple(new.get(i, i) for i in arrays)  # what only a check looks at is nowhere else in the graph
            made = make(form).make(inputs, {"form": form})
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
            if i not in members and not is_number(i):
                place.setdefault(key(node, i), len(place))
    arrays, flat = [i for i, _ in place], [f for _, f in place]
    types = tuple(i.tensor for i in arrays)
    for node in nodes:
        place[node, members[node]] = len(place)
    lines = []
    for node in nodes:
        operands: list[Operand] = []
        for i in node.inputs:
            operands.append((i.dtype.name, i.attrs["value"].item()) if is_number(i) else place[key(node, i)])
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
