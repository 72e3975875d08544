"""Put elementwise operators, and reductions of what they make, into groups that a GPU computes by one kernel each.

Only for GPUs: NumPy would run the same steps one by one, so it gains nothing. The values do not change, as every step
keeps its dtype; only sums are added in another order.

First, trees: a value joins the group of its readers if these are all in one group, and so never reaches memory. Then
groups of one shape are merged where that saves reading an array, or a launch of small ones; what is read outside of a
group is one of its results. A merged group must be convex: no path leads from it through another node back to it, where
the one order of communication counts as a path.
Smaller operands are not computed inside, and nothing is computed twice.

Gain: not measured apart. Off by leaving `fuse_elementwise` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from ...core.graph import OPS, Node, origin_of, readers_of, rewrite
from ...core.memory import in_line
from ...core.operators import broadcast_axes
from ...core.types import Shape, same
from ...ops.random import _dropout
from ..reduce import FOLDS
from .fused_group import MOST_INPUTS, fused

MOST_STEPS, MOST_RESULTS = 24, 6  # beyond, a thread runs out of registers
NARROW = 32  # elements: shorter rows leave threads of a warp without work
SMALL = 1 << 18  # elements: below, a launch takes longer than the work
NEAR = 32  # nodes: a large result is not made much earlier than it is read, as it takes memory until then


def fuse_elementwise(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """Groups of two or more elementwise operators and reductions become one `fused_elementwise` each."""
    groups = _Groups(rewrite(outputs, _taken_apart))
    groups.grow_trees()
    for neighbors in (groups.across_edges, groups.beside_inputs, groups.small_ones):
        groups.merge(neighbors)
    return groups.rebuilt()


def _taken_apart(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    """The same in operators of which one can join a group: the bias of a linear layer, and sums to a shape."""
    made = node
    if node.op.name == "linear":
        made = OPS["add"](OPS["matmul"](*inputs[:2]), inputs[2])
    if node.op.name == "sum_to_like":
        axes = broadcast_axes(inputs[0].shape, node.shape)
        made = OPS["reshape"](OPS["sum"](inputs[0], axis=axes), node.shape) if axes else node
    return made if made is not node and made.type == node.type else None


# -- what can be in a group --------------------------------------------------------------------------------------------


def _fits(node: Node) -> bool:
    """Whether a kernel can compute the node place by place; dropout decides about each by its number."""
    known = node.op.code is not None or (node.op is _dropout and node.ndim > 0 and not node.attrs["channels"])
    return known and not isinstance(node.type, tuple) and node.attrs.get("window") is None


def _folded_axes(node: Node) -> tuple[int, ...] | None:
    """The axes of a reduction that a kernel can follow: the last among them, or all of the first ones.

    Axes of one element count as it suits. None for other nodes.
    """
    if node.op not in FOLDS or node.attrs.get("window") is not None:
        return None
    x = node.inputs[0].tensor
    axes = node.attrs["axis"]
    large = [a for a, n in enumerate(x.shape) if n > 1]
    reduced = [a for a in large if a in axes]
    if 0 in x.shape or not reduced:
        return None
    if large[-1] in reduced:
        axes = tuple(a for a, n in enumerate(x.shape) if a in reduced or (n == 1 and a > reduced[0]))
        first = next((a + 1 for a in reversed(range(x.ndim)) if a not in axes), 0)
    else:
        first = next(a for a in large if a not in reduced)
        axes = tuple(range(first))
        if reduced[-1] > first:
            return None
    return axes if prod(x.shape[first:]) >= NARROW or prod(x.shape) <= SMALL // NARROW else None


def _number(node: Node) -> tuple[str, float] | None:
    """(dtype, value) of a constant of one number, which is compiled into the kernel."""
    if node.op.name != "constant" or node.ndim or node.dtype.kind not in "bif":
        return None
    return node.dtype.name, node.attrs["value"].item()


@dataclass
class KernelGroup:
    """Nodes of one kernel, which visits every place of `shape`; with `axes` it reduces over these.

    Its first result would be made at `first`, a place in the order of the graph, its latest large one at `last`.
    """

    members: dict[Node, None]
    shape: Shape
    axes: tuple[int, ...] | None
    first: int
    last: int

    @property
    def small(self) -> bool:
        return prod(self.shape) <= SMALL


# -- the groups of a graph ---------------------------------------------------------------------------------------------


class _Groups:
    """A graph whose groups count as one node each: a *unit*, numbered by the place of its last node.

    What comes before and behind a unit are sets of such numbers, kept as the bits of integers.
    """

    def __init__(self, outputs: Sequence[Node]) -> None:
        self.outputs, self.earlier = outputs, in_line(outputs)
        self.nodes = [*self.earlier]
        self.later: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node, earlier in self.earlier.items():
            for i in earlier:
                self.later[i].append(node)
        self.kept = set(outputs)
        self.at = {node: k for k, node in enumerate(self.nodes)}
        self.readers = readers_of(self.nodes)
        self.folds = {node: axes for node in self.nodes if (axes := _folded_axes(node)) is not None}
        self.unit = dict(self.at)
        self.groups: dict[int, KernelGroup] = {}

    def grow_trees(self) -> None:
        """Groups of one result each, from the end of the graph upward. A node that could be in a group is one."""
        taken: set[Node] = set()
        for root in reversed(self.nodes):
            if root not in taken and (_fits(root) or root in self.folds):
                shape = root.inputs[0].shape if root in self.folds else root.shape
                at, axes = self.at[root], self.folds.get(root)
                group = KernelGroup(self._tree(root, shape, taken), shape, axes, at, at if axes is None else 0)
                group.last = 0 if group.small else group.last
                taken.update(group.members)
                self.groups[at] = group
                self.unit.update(dict.fromkeys(group.members, at))
        self.above, self.below, self.bits = {}, {}, {}
        order = sorted(set(self.unit.values()))
        for unit in order:
            self.bits[unit] = 1 << unit
            self.above[unit] = self._joined(
                self.above, (self.unit[i] for n in self._nodes(unit) for i in self.earlier[n]), unit
            )
        for unit in reversed(order):
            users = (self.unit[r] for n in self._nodes(unit) for r in self.later[n])
            self.below[unit] = self._joined(self.below, users, unit)

    def _tree(self, root: Node, shape: Shape, taken: set[Node]) -> dict[Node, None]:
        """The root and what feeds only the group."""
        members, frontier = {root: None}, list(root.inputs)
        while frontier and len(members) < MOST_STEPS:
            node = frontier.pop(0)
            ready = node not in members and node not in taken and node not in self.kept and _fits(node)
            if ready and same(node.shape, shape) and members.keys() >= {*self.readers[node]}:
                grown = {**members, node: None}
                if len(self._outside(grown)) <= MOST_INPUTS:
                    members = grown
                    frontier.extend(node.inputs)
        return members

    def _outside(self, members: dict[Node, None]) -> list[Node]:
        """The arrays that a group reads."""
        read = dict.fromkeys(i for n in members for i in n.inputs)
        return [i for i in read if i not in members and _number(i) is None]

    def _results(self, members: dict[Node, None]) -> list[Node]:
        """What is read outside: first the elementwise values, then the reductions."""
        found = [n for n in members if n in self.kept or not members.keys() >= {*self.readers[n]}]
        return sorted(found, key=lambda n: (n in self.folds, self.at[n]))

    def _nodes(self, unit: int) -> Sequence[Node]:
        return [*self.groups[unit].members] if unit in self.groups else [self.nodes[unit]]

    def _joined(self, sets: dict[int, int], units: Iterator[int], own: int) -> int:
        whole = 0
        for unit in set(units) - {own}:
            whole |= sets[unit] | 1 << unit
        return whole

    # -- merging -------------------------------------------------------------------------------------------------------

    def merge(self, neighbors: Callable[[int], Iterator[Node]]) -> None:
        """Merge each group with those of its neighbors, as long as one is found that may be."""
        for unit in sorted(self.groups):
            while unit in self.groups:
                others = dict.fromkeys(self.unit[n] for n in neighbors(unit))
                found = next((u for u in others if u != unit and u in self.groups and self._merged(unit, u)), None)
                if found is None:
                    break

    def across_edges(self, unit: int) -> Iterator[Node]:
        """What a group reads, and what reads its results."""
        for node in self.groups[unit].members:
            yield from node.inputs
            yield from self.readers[node]

    def beside_inputs(self, unit: int) -> Iterator[Node]:
        """What reads the same arrays, where these are as large as the group."""
        group = self.groups[unit]
        for i in self._outside(group.members):
            if not isinstance(i.type, tuple) and same(i.shape, group.shape):
                yield from self.readers[i]

    def small_ones(self, unit: int) -> Iterator[Node]:
        """The small groups that are near."""
        group = self.groups[unit]
        for node in self.nodes[max(0, group.first - NEAR) : group.first + NEAR] if group.small else ():
            other = self.groups.get(self.unit[node])
            if other is not None and other.small and abs(other.first - group.first) <= NEAR:
                yield node

    def _merged(self, a: int, b: int) -> bool:
        """Merge group b into group a if that is allowed."""
        one, two = self.groups[a], self.groups[b]
        members = {**one.members, **two.members}
        group = KernelGroup(
            members, one.shape, one.axes or two.axes, min(one.first, two.first), max(one.last, two.last)
        )
        allowed = (
            same(one.shape, two.shape)
            and (one.axes == two.axes or None in (one.axes, two.axes))
            and group.last - group.first <= NEAR
            and self._event(a) == self._event(b)
            and len(members) <= MOST_STEPS
            and len(self._outside(members)) <= MOST_INPUTS
            and len(self._results(members)) <= MOST_RESULTS
            and not any(i in members and i in self.folds for n in members for i in n.inputs)
            and not self._between(a, b)
        )
        if allowed:
            self.groups[a] = group
            self.unit.update(dict.fromkeys(self.groups.pop(b).members, a))
            self._join(a, b)
        return allowed

    def _event(self, unit: int) -> int | None:
        """When a pass has marked a unit as due."""
        return self.nodes[unit].tags.get("event")

    def _between(self, a: int, b: int) -> int:
        """The units on paths from one to the other, as bits."""
        found = self.below[a] & self.above[b] | self.below[b] & self.above[a]
        return found & ~(self.bits[a] | self.bits[b])

    def _join(self, a: int, b: int) -> None:
        """Let the numbers of both stand for unit a: what is before one is now before what is behind the other."""
        self.bits[a] |= self.bits.pop(b)
        above, below = ((s[a] | s.pop(b)) & ~self.bits[a] for s in (self.above, self.below))
        self.above[a], self.below[a] = above, below
        for unit in self.bits:
            if above >> unit & 1:
                self.below[unit] |= below | self.bits[a]
            elif below >> unit & 1:
                self.above[unit] |= above | self.bits[a]

    # -- the new graph -------------------------------------------------------------------------------------------------

    def rebuilt(self) -> tuple[Node, ...]:
        """The outputs, with one node for each group of several."""
        new: dict[Node, Node] = {}
        for unit in self._order():
            nodes = self._nodes(unit)
            if len(nodes) > 1:
                new.update(self._fused(self.groups[unit].members, new))
                continue
            (node,) = nodes
            inputs = tuple(new[i] for i in node.inputs)
            with origin_of(node):
                new[node] = node if inputs == node.inputs else node.op.make(inputs, node.attrs)
        return tuple(new[o] for o in self.outputs)

    def _order(self) -> Iterator[int]:
        """The units, each behind what it reads, otherwise in the order of the graph."""
        reads = {u: {self.unit[i] for n in self._nodes(u) for i in self.earlier[n]} - {u} for u in self.bits}
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

    def _fused(self, members: dict[Node, None], new: dict[Node, Node]) -> Iterator[tuple[Node, Node]]:
        """Each result of a group with the node that has it now."""
        outside = self._outside(members)
        inner = sorted(members, key=lambda n: (n in self.folds, self.at[n]))
        place = {node: k for k, node in enumerate([*outside, *inner])}
        lines = []
        for node in inner:
            operands = tuple(place[i] if i in place else _number(i) for i in node.inputs)
            attrs = tuple(node.attrs.items())
            if node in self.folds:
                attrs = (("axis", self.folds[node]), ("keepdims", False))
            lines.append((node.op, operands, attrs))
        results = self._results(members)
        op = fused(sum(n not in self.folds for n in results))
        attrs = {"lines": tuple(lines), "results": tuple(place[n] for n in results)}
        with origin_of(results[0]):
            made = op.make(tuple(new[i] for i in outside), attrs)
        for k, node in enumerate(results):
            with origin_of(node):
                value = OPS["item"](made, index=k) if len(results) > 1 else made
                yield node, value if same(value.shape, node.shape) else OPS["reshape"](value, node.shape)
