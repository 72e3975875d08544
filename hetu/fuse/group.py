"""Put elementwise operators, and folds of what they make, into groups that a device computes in one go.

A group is over one space, see `form.py`. Neighbors in the graph are merged while the result is still one form, and
convex: no path leads from a group through another node back to it, where the one order of communication counts as a
path. Operators that can be written in such terms are taken apart first, see `apart.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import accumulate
from math import prod
from typing import Any

from ..core.graph import Node, readers_of, topological
from ..core.memory import in_line
from ..core.op import Role
from .apart import Checks, Parts, taken_apart
from .divided import Division, rebuilt
from .form import Enter
from .pattern import Pattern, kept
from .unit import Limits, Rules, Unit, reads_flat

NEAR = 32  # nodes: a large result is not made much earlier than it is read, as it takes memory until then


def fuse(outputs: Sequence[Node], limits: Limits, enter: Enter) -> tuple[Node, ...]:
    """The graph with its groups as one operator each, which `enter` makes known to a device."""
    rules = Rules(limits)
    apart, checks, alike = taken_apart(outputs, lambda node: rules.unit_of(node) is not None, limits.whole)
    earlier = _in_line(apart, checks)
    nodes = [*earlier]
    pattern = Pattern(nodes, apart, checks, alike)
    known = kept(limits, pattern.key) if limits.by_pattern else []
    if not known:
        units = _Units(apart, checks, earlier, pattern.at, rules)
        units.enter(alike)
        units.merge()
        known.append(units.divided(pattern.rows))
    return rebuilt(known[0], nodes, apart, checks, enter)


def is_number(node: Node) -> bool:
    """Whether this is a constant of one number, which a line has among its operands."""
    return node.role is Role.CONSTANT and not node.ndim and node.dtype.kind in "bif"


def _in_line(outputs: Sequence[Node], checks: Checks) -> dict[Node, tuple[Node, ...]]:
    """As `in_line`; a part whose check looks at arrays comes after these too."""
    looked_at = {part: [x for check in found for x in check.arrays] for part, found in checks.items()}
    if not any(looked_at.values()):
        return in_line(outputs)
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

    def __init__(
        self,
        outputs: Sequence[Node],
        checks: Checks,
        earlier: Mapping[Node, tuple[Node, ...]],
        at: Mapping[Node, int],
        rules: Rules,
    ) -> None:
        self.rules, self.limits = rules, rules.limits
        self.checks, self.earlier, self.nodes, self.at = checks, earlier, [*earlier], at
        self.kept, self.numbers = set(outputs), {node for node in self.nodes if is_number(node)}
        # Constants do not count: there are fewer of them where two are equal by chance.
        self.when = dict(zip(self.nodes, accumulate(node.role is not Role.CONSTANT for node in self.nodes)))
        found: Any = readers_of(self.nodes)  # all are nodes, as no outputs are asked for
        self.readers = {node: dict.fromkeys(found[node]) for node in self.nodes}
        self.later: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node, before in self.earlier.items():
            for i in before:
                self.later[i].append(node)
        self.unit = dict(self.at)
        self.groups: dict[int, Unit] = {}
        self.refused: set[tuple[int, int, int]] = set()
        self.reads: dict[int, list[Node]] = {}  # what each group reads from outside
        self.results: dict[int, list[Node]] = {}  # which of its members are read there

    def enter(self, alike: Sequence[Sequence[Parts]]) -> None:
        """The groups to begin with: the parts of an operator, or one node."""
        for copies in alike:
            self._enter_alike(copies)
        for k, node in enumerate(self.nodes):
            if self.unit[node] == k and k not in self.groups and (unit := self.rules.unit_of(node)) is not None:
                looked_at = frozenset(x for check in self.checks.get(node, ()) for x in check.arrays)
                self._enter(k, unit._replace(outside=looked_at) if looked_at else unit)
        self.place = {unit: k for k, unit in enumerate(self._order())}

    def _enter_alike(self, copies: Sequence[Parts]) -> None:
        """The parts of one operator are one group from the start, where they can be: no path leads between them."""
        unit = self.rules.unit_of_all(copies[0])
        if unit is None:
            return
        flats = [unit.members[node] for node in copies[0]]
        for nodes in copies:
            if all(node in self.at and node not in self.checks for node in nodes):
                members = dict(zip(nodes, flats))
                self._enter(max(self.at[node] for node in nodes), unit._replace(members=members))

    def _enter(self, number: int, unit: Unit) -> None:
        reads = self._outside([i for node in unit.members for i in node.inputs], unit)
        results = self._read(unit.members, unit)
        if len(unit.members) == 1 or self._allowed(reads, results):
            self.groups[number], self.reads[number], self.results[number] = unit, reads, results
            self.unit.update(dict.fromkeys(unit.members, number))

    def _members(self, unit: int) -> Collection[Node]:
        return self.groups[unit].members if unit in self.groups else (self.nodes[unit],)

    def merge(self) -> None:
        """First each value joins its readers, if these are one group; then groups their neighbors, if they are near.

        So what a later group can compute from what is kept anyway is not kept beside it.
        """
        for node in reversed(self.nodes):
            unit = self.unit[node]
            if node in self.kept or unit not in self.groups:
                continue
            readers = {self.unit[r] for r in self.readers[node]}
            if len(readers) == 1 and (reader := readers.pop()) in self.groups:
                self._merged(reader, unit)
        for neighbors in (self._across_edges, self._beside_inputs, self._small_ones):
            for unit in sorted(self.groups):
                while unit in self.groups:
                    others = dict.fromkeys(self.unit[n] for n in neighbors(unit))
                    if not any(u != unit and u in self.groups and self._merged(unit, u) for u in others):
                        break

    def _across_edges(self, unit: int) -> Iterator[Node]:
        for node in self.groups[unit].members:
            yield from node.inputs
            yield from self.readers[node]

    def _beside_inputs(self, unit: int) -> Iterator[Node]:
        group = self.groups[unit]
        for i in self.reads[unit]:
            if i.shape == group.space:
                yield from self.readers[i]

    def _small_ones(self, unit: int) -> Iterator[Node]:
        """What lies near, where a launch takes longer than the work."""
        group = self.groups[unit]
        for node in group.members if prod(group.space) <= self.limits.small else ():
            yield from self.nodes[max(0, self.at[node] - NEAR) : self.at[node] + NEAR]

    def _outside(self, nodes: Iterable[Node], unit: Unit) -> list[Node]:
        return [i for i in dict.fromkeys(nodes) if i not in unit.members and i not in self.numbers]

    def _read(self, nodes: Iterable[Node], unit: Unit) -> list[Node]:
        inside = unit.members.keys()
        return [n for n in nodes if n in self.kept or not inside >= self.readers[n].keys()]

    def _merged(self, a: int, b: int) -> bool:
        """Whether both are now one; what was refused once is not tried again before one of them has grown."""
        asked = (min(a, b), max(a, b), len(self.groups[a].members) + len(self.groups[b].members))
        if asked in self.refused:
            return False
        if self._joined(a, b):
            return True
        self.refused.add(asked)
        return False

    def _joined(self, a: int, b: int) -> bool:
        if a == b or self.nodes[a].tags.get("event") != self.nodes[b].tags.get("event"):
            return False
        joined = self.rules.joined(self.groups[a], self.groups[b])
        if joined is None:
            return False
        reads = self._outside((*self.reads[a], *self.reads[b]), joined)
        results = self._read((*self.results[a], *self.results[b]), joined)
        if not self._allowed(reads, results) or not self._moved(a, b):
            return False
        self.groups[a], self.reads[a], self.results[a] = joined, reads, results
        self.unit.update(dict.fromkeys(self.groups.pop(b).members, a))
        return True

    def _moved(self, a: int, b: int) -> bool:
        """Give both units the place of a, what stands between them beside it; False where a path leads between them."""
        first, last = sorted((a, b), key=self.place.__getitem__)
        start, end = self.place[first], self.place[last]
        behind = self._reached(first, self.later, start, end)
        before = self._reached(last, self.earlier, start, end) if behind else set()
        if not behind.isdisjoint(before):
            return False
        moved = sorted((first, last, *behind, *before), key=self.place.__getitem__)
        places = [self.place[unit] for unit in moved]
        order = [*(u for u in moved if u in before), a, *(u for u in moved if u in behind)]
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

    def _allowed(self, reads: Sequence[Node], results: Sequence[Node]) -> bool:
        """Whether they are not too many, and no large result would be made long before it is read."""
        if len(reads) > self.limits.arrays or len(results) > self.limits.results:
            return False
        places = [self.when[n] for n in results]
        if max(places) - min(places) <= NEAR:
            return True
        large = (self.when[n] for n in results if prod(n.shape) > self.limits.small)
        return max(large, default=0) - min(places) <= NEAR

    # -- what comes of it ----------------------------------------------------------------------------------------------

    def divided(self, rows: Sequence[Any]) -> list[int | Division]:
        """The nodes that stay and the groups, inputs first; `rows` are those of the pattern."""
        likes: dict[Any, int] = {}
        return [
            self._division(unit, rows, likes)
            if len(members := self._members(unit)) > 1 or any(n in self.checks for n in members)
            else unit
            for unit in self._order()
        ]

    def _division(self, unit: int, rows: Sequence[Any], likes: dict[Any, int]) -> Division:
        members, space, split, _ = self.groups[unit]
        at = self.at
        lines = sorted(members, key=at.__getitem__)
        read = [  # an array may be read in both ways
            [None if i in self.numbers else (i, reads_flat(members, node, i)) for i in node.inputs] for node in lines
        ]
        arrays = dict.fromkeys(k for keys in read for k in keys if k is not None and k[0] not in members)
        place = {k: n for n, k in enumerate((*arrays, *((node, members[node]) for node in lines)))}
        operands = tuple(
            tuple(-1 - at[i] if k is None else place[k] for i, k in zip(node.inputs, keys))
            for node, keys in zip(lines, read)
        )
        numbers = tuple(at[n] for n in lines)
        results = tuple(sorted(at[n] for n in self.results[unit]))
        shaped = next(at[n] for node in lines for n in (node, *node.inputs) if n.shape == space)
        flat = tuple(flat for _, flat in place)
        like = (
            *(rows[k] for k in (*numbers, shaped, *(at[i] for i, _ in arrays))),
            *(tuple(o if o >= 0 else rows[-1 - o] for o in own) for own in operands),
            *(numbers.index(k) for k in results),
            *(split, len(lines), flat),
        )
        arrays_at = tuple(at[i] for i, _ in arrays)
        return Division(numbers, operands, arrays_at, results, shaped, split, flat, likes.setdefault(like, len(likes)))

    def _order(self) -> Iterator[int]:
        reads = {
            u: {self.unit[i] for n in self._members(u) for i in self.earlier[n]} - {u}
            for u in dict.fromkeys(self.unit.values())
        }
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
