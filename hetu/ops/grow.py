"""Whole trees, grown from the rows of their roots: what `hetu.ml` asks for where one worker has all rows.

A tree is grown by the steps of `trees.py`, one node or one level after the other. Which columns a node looks at is a
function of its key, and so the same for any order of growth. Left out: rows of several workers, who grow trees
together (`hetu.ml`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ShapeError, ValueRangeError
from ..core.op import op
from ..core.types import TensorType, compatible
from ..ranges import AtLeast1, Count, Finite
from .index import check_range
from .trees import best_cuts, histograms, histograms_check, require_axes, require_channels

__all__ = ["grow_trees"]

LEFT, BEGIN, END, DEPTH, PARENT, KEY, FEATURE, CUT, LAST, SUMS = range(10)  # facts of a node, as in `grow.c`
CELLS = 1 << 20  # sums that are looked at together


def mixed(x: np.ndarray) -> np.ndarray:
    """Numbers that follow from others, both uint64 (S. Vigna, "splitmix64")."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    x = x ^ x >> np.uint64(31)
    return x


def keys_below(keys: np.ndarray) -> np.ndarray:
    """Of nodes the keys of their children, side by side; int64, as all keys."""
    return mixed(np.add.outer(keys, [1, 2]).reshape(-1).view(np.uint64)).view(np.int64)


def drawn_columns(keys: np.ndarray, columns: int, count: int) -> np.ndarray:
    """(nodes, columns): all columns, the first `count` of which are drawn by the keys of nodes.

    >>> drawn_columns(np.array([1, 2]), 5, 2).tolist()
    [[3, 0, 2, 1, 4], [3, 1, 2, 0, 4]]
    """
    order, at = np.tile(np.arange(columns), (len(keys), 1)), np.arange(len(keys))
    for k in range(count):
        other = k + (mixed((keys + (3 + k)).view(np.uint64)) % np.uint64(columns - k)).astype(np.int64)
        order[at, k], order[at, other] = order[at, other], order[at, k]
    return order


def _grow_types(*types: TensorType, max_leaf_nodes: int, room: int, **rules: Any) -> tuple[TensorType, ...]:
    require_axes("nc ek e t M tc tb TU", *types)
    require_channels(types[1])
    (rows, *_), (entries, channels), _, (roots,), (kinds,), _, (_, facts), (_, units) = (type_.shape for type_ in types)
    if (facts, units) != (2, 3) or not (compatible(kinds, rows) or compatible(kinds, 0)):
        got = ", ".join(map(str, (types[4], *types[6:])))
        raise ShapeError(f"got targets, begun and units {got}", fix="pass a target a row or none, (t, 2) and (t, 3)")
    if room and not 0 < 2 * max_leaf_nodes - 1 <= room:
        said = f"grow_trees has room for {room} nodes of a tree of max_leaf_nodes={max_leaf_nodes}"
        raise ValueRangeError(said, fix="pass room=2 * max_leaf_nodes - 1 or more, or 0")
    nodes = room * roots if room else 2 * entries + roots
    whole = [TensorType(shape, np.dtype("int64")) for shape in ((entries,), (nodes, SUMS + 2 * channels), (roots,))]
    return whole[0], whole[1], TensorType((nodes,), np.dtype("float64")), whole[2]


@op(infer=_grow_types, differentiable=False)
def grow_trees(
    xp: ModuleType, bins: Any, values: Any, rows: Any, starts: Any, target: Any, order: Any, begun: Any, units: Any,
    *, size: AtLeast1, features: AtLeast1, max_depth: Count, max_leaf_nodes: Count, min_samples_split: AtLeast1,
    min_samples_leaf: AtLeast1, least_gain: Finite, room: Count = 0,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """The rows of trees as they part; facts and gains of nodes; how many nodes each tree has.

    `bins`, `values`, `rows` and `starts` are those of `histograms`, for roots; the last channel is H. A node looks at
    the columns as they stand in `order` (roots, columns), or at as many as `features`, which its key draws. The best of
    their cuts, the first of equal ones, splits it if that gains `least_gain`, it has `min_samples_split` rows, and both
    sides have more H than the least, and than all but one of `min_samples_leaf` rows would have. With `target` (n,),
    instead of (0,), a node of one kind is a leaf, and others look at all columns before they are. Trees are split level
    by level, or best first until they have `max_leaf_nodes`: by gain, then the upper, then the left. No bound is 0.

    `begun` (roots, 2) are depth and key of roots; `units` (roots, 3) the least H, l2, and what sums of G^2 / H are
    multiplied by. Facts are `LEFT` ... , then sums of the rows on the left, and of all. Of each tree there is room
    for as many nodes as `room`, or if that is 0 for twice its rows and one.

    >>> import hetu as ht
    >>> roots = [0], np.zeros(0), [[0]], [[0, 0]], np.array([[0.0, 0.0, 1.0]])
    >>> rules = {"features": 1, "max_depth": 0, "min_samples_split": 2, "min_samples_leaf": 1, "least_gain": 1.0}
    >>> bins, values = [[0], [1], [3]], [[3, 1], [4, 1], [-5, 1]]
    >>> made = grow_trees(bins, values, [0, 1, 2], *roots, size=4, max_leaf_nodes=2, room=3, **rules)
    >>> _, facts, gains, counts = (ht.evaluate(each) for each in made)
    >>> facts[:, [LEFT, BEGIN, END, CUT]].tolist(), gains.round(2).tolist(), counts.tolist()
    ([[1, 0, 3, 1], [0, 0, 2, 0], [0, 2, 3, 0]], [48.17, -inf, -inf], [3])
    """
    bins, values, parted, starts, target, order, begun, units = (
        each.get() if hasattr(each, "get") else np.asarray(each)  # all of it is the host's work
        for each in (bins, values, rows, starts, target, order, begun, units)
    )
    least_rows, values, parted = max(min_samples_split, 2 * min_samples_leaf), values.copy(), parted.astype(np.int64)
    rules = size, features, max_depth, max_leaf_nodes, least_rows, min_samples_leaf, least_gain
    (entries, channels), roots, ends = values.shape, len(starts), [*starts.tolist(), len(parted)]
    facts = np.zeros((room * roots or 2 * entries + roots, SUMS + 2 * channels), np.int64)
    gains, counts = np.full(len(facts), -np.inf), np.zeros(roots, np.int64)
    for k in range(roots):
        base = k * room or 2 * ends[k] + k
        facts[base, [BEGIN, END, DEPTH, KEY]] = *ends[k : k + 2], *begun[k]
        tree = _Tree(bins, values, parted, target, order[k], units[k], facts[base:], gains[base:], *rules)
        counts[k] = tree.grow()
    return tuple(map(xp.asarray, (parted, facts, gains, counts)))


@grow_trees.check
def grow_trees_check(
    xp: ModuleType, bins: Any, values: Any, rows: Any, starts: Any, target: Any, order: Any, begun: Any, units: Any,
    *, size: int, features: int, **rules: Any,
) -> None:  # fmt: skip
    histograms_check(xp, bins, values, rows, starts, order, size=size)
    check_range(xp, np.array([features - 1]), bins.shape[1], "last column to look at")
    if not (units[:, :2] >= 0).all():  # or a side of a cut might be empty, and growth without an end
        raise ValueRangeError(f"grow_trees got units {units}", fix="pass the least H and l2 of each tree as 0 or more")


@dataclass
class _Tree:
    """A tree that grows: arrays of `grow_trees`, of which `values` and `rows` part, its own facts and gains, rules."""

    bins: np.ndarray
    values: np.ndarray
    rows: np.ndarray
    target: np.ndarray
    order: np.ndarray
    units: np.ndarray
    facts: np.ndarray
    gains: np.ndarray
    size: int
    features: int
    max_depth: int
    max_leaf_nodes: int
    least_rows: int
    least_leaf: int
    least_gain: float

    def grow(self) -> int:
        """Note the nodes of the tree; how many there are."""
        channels, facts, most, leaves = self.values.shape[1], self.facts, self.max_leaf_nodes, 1
        self.of_left, self.of_all = slice(SUMS, SUMS + channels), slice(SUMS + channels, None)
        facts[0, self.of_all] = self.values[facts[0, BEGIN] : facts[0, END]].sum(axis=0, dtype=np.int64)
        self.ways = [1]  # of the children of a node of way n: 2 n and 2 n + 1
        waiting = self._judge([0])
        while waiting and leaves != most:
            chosen = [min(waiting, key=lambda node: (-self.gains[node], self.ways[node]))] if most else waiting
            waiting = [node for node in waiting if node not in chosen] if most else []
            children, leaves = [child for node in chosen for child in self._split(node)], leaves + len(chosen)
            waiting += self._judge(children) if leaves != most else []
        return len(self.ways)

    def _split(self, node: int) -> tuple[int, int]:
        """Part the rows of a node; its children."""
        facts, left, right = self.facts, len(self.ways), len(self.ways) + 1
        here = slice(facts[node, BEGIN], facts[node, END])
        goes = self.bins[self.rows[here], facts[node, FEATURE]] > facts[node, CUT]
        order = np.argsort(goes, kind="stable")
        self.rows[here], self.values[here] = self.rows[here][order], self.values[here][order]
        facts[node, LEFT], middle = left, here.stop - goes.sum()
        facts[left, [BEGIN, END]], facts[right, [BEGIN, END]] = (here.start, middle), (middle, here.stop)
        facts[[left, right], DEPTH], facts[[left, right], PARENT] = facts[node, DEPTH] + 1, node
        facts[[left, right], KEY] = keys_below(facts[node : node + 1, KEY])
        facts[left, self.of_all] = facts[node, self.of_left]
        facts[right, self.of_all] = facts[node, self.of_all] - facts[node, self.of_left]
        self.ways += [2 * self.ways[node], 2 * self.ways[node] + 1]
        return left, right

    def _judge(self, nodes: list[int]) -> list[int]:
        """Find the best cuts of nodes; those that are worth it."""
        may, columns = (
            [node for node in nodes if self._may_part(*self.facts[node, [BEGIN, END, DEPTH]])],
            len(self.order),
        )
        step = max(1, CELLS // (self.size * columns * self.values.shape[1]))
        for some in (np.array(may[at : at + step]) for at in range(0, len(may), step)):
            looked = np.tile(self.order, (len(some), 1))
            if self.features < columns:
                looked = drawn_columns(self.facts[some, KEY], columns, self.features)
            lost = self._look(some, looked[:, : self.features])
            if self.features < columns and len(self.target) and lost.any():
                self._look(some[lost], looked[lost, self.features :])
        return [node for node in may if self.gains[node] >= self.least_gain]

    def _may_part(self, begin: int, end: int, depth: int) -> bool:
        enough = end - begin >= max(self.least_rows, 1) and not 0 < self.max_depth <= depth
        kinds = self.target[self.rows[begin:end]] if len(self.target) else np.arange(2)
        return bool(enough and (kinds != kinds[0]).any())

    def _look(self, nodes: np.ndarray, looked: np.ndarray) -> np.ndarray:
        """Note the best cuts of nodes in columns (nodes, slots); which have none."""
        facts, at = self.facts, np.arange(len(nodes))
        count, totals = facts[nodes, END] - facts[nodes, BEGIN], facts[nodes, self.of_all]
        entries = np.concatenate([np.arange(*facts[node, [BEGIN, END]]) for node in nodes])
        own = self.values[entries], self.rows[entries], np.cumsum(count) - count
        found, floats = histograms.forward(np, self.bins, *own, looked, size=self.size), totals.astype(np.float64)
        (least, l2, unit), h = self.units, floats[:, -1]
        scores, cuts = best_cuts.forward(np, found, totals, np.maximum((self.least_leaf - 1) * h / count, least), l2=l2)
        place = scores.argmax(axis=1)
        score: np.ndarray = scores[at, place]
        lost: np.ndarray = score == -np.inf
        before = sum(floats[:, k] ** 2 for k in range(floats.shape[1] - 1)) / np.maximum(h + l2, 1)
        facts[nodes, FEATURE], facts[nodes, CUT : self.of_left.stop] = (
            np.where(lost, 0, looked[at, place]),
            cuts[at, place],
        )
        self.gains[nodes] = np.where(lost, -np.inf, (score - before) * unit)
        return lost
