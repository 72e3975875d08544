"""Grow trees from histograms, for any loss and any number of workers.

A node is judged by sums of G (one or several channels) and H over the bins of its columns: by squared error G is the
weighted target and H the weight, by Gini impurity G are the weights of the classes, in boosting G is the gradient and
H the curvature. In all of them a cut is worth the sum of G^2 / (H + l2) over its sides (T. Chen, C. Guestrin,
"XGBoost", KDD 2016, eq. 7), and its leaf is G / (H + l2).

Each worker counts its own rows; `judged.py` has the histograms summed and the best cuts found. Of two children the
smaller is counted, and the larger is what the parent has beyond it. Trees that do not depend on each other grow side by
side: what is asked of all of them goes in one message. So do nodes of a tree that best-first growth comes to as far as
gains are known; what their children then push beyond the bound of leaves is pruned. Without a bound most nodes have
few rows, which are a shorter message than their histograms: they come to all workers (B. Panda et al., "PLANET", VLDB
2009). What is below them is grown in one call, and so is all that is small where there is one worker.
Sums are of whole numbers, so trees are the same to the last bit for any number of workers, and side by side or not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...ops import grow
from ...ops.trees import histograms, part_rows
from ..workers import Workers
from .bins import ROOM, BinnedRows, between, compute
from .judged import MOST, histograms_of
from .tree import Trees

SMALL = 1 << 20  # bins of the rows of a node that one thread looks at, where they are all here
TOGETHER = 1 << 18  # rows below which nodes are grown in one call


@dataclass(frozen=True)
class GrowthRules:
    """When a node is split: `least_gain` is of all its rows, `features` is how many columns it looks at."""

    max_depth: int | None = None
    max_leaf_nodes: int | None = None
    min_samples_split: int = 2
    min_samples_leaf: int = 1
    min_weight: float = 0.0
    least_gain: float = 0.0
    l2: float = 0.0
    features: int = 0


def _fact(at: int) -> Any:
    """A fact of nodes, to read and to write."""
    return property(lambda nodes: nodes.facts[:, at], lambda nodes, values: nodes.facts.__setitem__((..., at), values))


class TreeNodes:
    """What is known of each node: facts as `grow_trees` tells them, whose rows are those here, and a few others."""

    left, begin, end, depth = (_fact(at) for at in (grow.LEFT, grow.BEGIN, grow.END, grow.DEPTH))
    parent, key, feature = _fact(grow.PARENT), _fact(grow.KEY), _fact(grow.FEATURE)

    def __init__(self, trees: int, channels: int) -> None:
        self.facts, self.channels = np.zeros((0, grow.SUMS + 2 * channels), np.int64), channels
        self.gain, self.tree, self.count = np.zeros(0), *np.zeros((2, 0), np.int64)  # the count is of all workers' rows
        self.more(np.arange(trees))
        self.parent[:] = -1

    def __len__(self) -> int:
        return len(self.gain)

    def more(self, trees: np.ndarray) -> np.ndarray:
        """Add nodes of these trees; their numbers."""
        facts, none = np.zeros((len(trees), self.facts.shape[1]), np.int64), np.full(len(trees), -np.inf)
        self.facts, self.gain = np.concatenate([self.facts, facts]), np.concatenate([self.gain, none])
        self.tree, self.count = np.concatenate([self.tree, trees]), np.concatenate([self.count, facts[:, 0]])
        return np.arange(len(self) - len(trees), len(self))

    def graft(
        self, ids: np.ndarray, facts: np.ndarray, gains: np.ndarray, first: np.ndarray, counts: np.ndarray
    ) -> None:
        """Grow trees in the place of nodes, of which no worker has other rows; each has some nodes, from `first` on."""
        roots, owner = np.cumsum(counts) - counts, np.repeat(np.arange(len(ids)), counts)
        used, number = np.arange(len(owner)) + (first - roots)[owner], self.more(self.tree[ids][owner])
        facts, self.gain[number] = facts[used], gains[used]
        facts[:, grow.LEFT] += np.where(facts[:, grow.LEFT] > 0, number[roots[owner]], 0)
        self.facts[number], self.count[number] = facts, facts[:, grow.END] - facts[:, grow.BEGIN]
        self.facts[ids], self.gain[ids] = facts[roots], gains[first]  # these are not reached where they were added

    @property
    def cut(self) -> np.ndarray:
        """The last bin on the left, and the last one before the next that has a row."""
        return self.facts[:, grow.CUT : grow.SUMS]

    @property
    def of_left(self) -> np.ndarray:
        """The sums of the rows on the left."""
        return self.facts[:, grow.SUMS : -self.channels]

    @property
    def totals(self) -> np.ndarray:
        return self.facts[:, -self.channels :]


class Grower:
    """Grows trees. `values` are whole numbers (trees, rows, channels), H in the last; `units` (trees, 2) of G and of H.

    Of each tree there are what it draws by, and the `rows` of this worker that take part. `target` (rows,), if it is
    given, tells which nodes are of one kind and so are leaves, as those of trees that may grow until all are. All
    others are then split as far as the rules let them.
    """

    def __init__(
        self,
        workers: Workers,
        table: BinnedRows,
        values: np.ndarray,
        units: np.ndarray,
        rules: GrowthRules,
        draws: Sequence[np.random.Generator],
        rows: Sequence[np.ndarray],
        target: np.ndarray | None = None,
    ) -> None:
        self.workers, self.table, self.units, self.rules = workers, table, units, rules
        self.trees, self.columns, self.target = len(values), table.bins.shape[1], target
        self.values, self.apart = values.reshape(-1, values.shape[2]), len(table.bins)  # those of one tree, then others
        self.order = np.stack([rng.permutation(self.columns) for rng in draws])  # of equally good cuts the first wins
        self.subset = 0 < rules.features < self.columns
        self.l2, self.gain_unit = rules.l2 / units[:, 1], units[:, 0] ** 2 / units[:, 1]  # all sums are whole numbers
        self.known = histograms_of(workers, self.columns * table.size * values.shape[2] * values.itemsize)
        self.nodes, self.open = TreeNodes(self.trees, values.shape[2]), np.zeros(0, np.int64)
        looked, bounded = rules.features if self.subset else self.columns, rules.max_leaf_nodes is not None
        self.few = SMALL // looked if workers.world_size == 1 else -1 if bounded or target is None else table.size
        self.small = self.open  # nodes of few rows, which wait until there are no others
        self.rows = np.concatenate(rows)
        self.nodes.key[:] = [rng.integers(1 << 62) for rng in draws] if self.subset else 0
        self.nodes.end[:] = np.cumsum([len(some) for some in rows])
        self.nodes.begin[1:] = self.nodes.end[:-1]

    def grow(self) -> Trees:
        """The trees, one after the other."""
        nodes, roots = self.nodes, np.arange(self.trees)
        own = [self._entries(roots[k : k + 1])[1].sum(axis=0, dtype=np.int64) for k in roots]
        nodes.totals[:], nodes.count[:] = self.workers.sum(np.stack(own), nodes.end - nodes.begin)
        self._judge(roots)
        if self.rules.max_leaf_nodes is not None:
            while len(wanted := self._best_first()[1]):
                self._judge(self._split(wanted))
            split, left = self._best_first()[0], nodes.left.copy()
            nodes.left[:] = 0
            nodes.left[split] = left[split]
        while self.rules.max_leaf_nodes is None and len(self.open):
            self._judge(self._split(self._choose()))
        self.known.close()
        part = np.cumsum(nodes.count[self.small]) // TOGETHER
        for each in np.unique(part):
            self._grow_small(self.small[part == each])
        return self._trees()

    def _choose(self) -> np.ndarray:
        """Of the open nodes of each tree the last ones, so that few wait."""
        self.open = self.open[np.argsort(self.nodes.tree[self.open], kind="stable")]
        tree = self.nodes.tree[self.open]
        last = np.cumsum(np.bincount(tree, minlength=self.trees))[tree] - np.arange(len(self.open)) <= self._room()
        chosen: np.ndarray = self.open[last]
        self.open = self.open[~last]
        return chosen

    def _best_first(self) -> tuple[np.ndarray, np.ndarray]:
        """The nodes that are split if the best always comes next, as far as gains are known; and which to split now.

        That is the first half of those that are not yet: few messages and calls then make a tree. The first of them is
        surely right; what the children of others push out of the tree is pruned.
        """
        gain, left, found, wanted = self.nodes.gain.tolist(), self.nodes.left.tolist(), list[int](), list[int]()
        for root in range(self.trees):
            heap, open_ = [(-gain[root], 1, root)], list[int]()  # of equal gains the first by its way from the root
            for _ in range((self.rules.max_leaf_nodes or 1) - 1):
                if not heap or not -heap[0][0] >= self.rules.least_gain:
                    break
                _, way, node = heapq.heappop(heap)
                found.append(node)
                open_ += [] if left[node] else [node]
                for side in (0, 1) if left[node] else ():
                    heapq.heappush(heap, (-gain[left[node] + side], 2 * way + side, left[node] + side))
            wanted += open_[: -(-len(open_) // 2)]
        return np.array(found, np.int64), np.array(wanted, np.int64)

    def _room(self) -> int:
        """How many nodes are looked at together."""
        looked = self.rules.features if self.subset else self.columns
        return max(1, ROOM // (looked * self.table.size * self.values.shape[1] * self.values.itemsize))

    def _trees(self) -> Trees:
        nodes, table, order = self.nodes, self.table, self._in_order()
        self.place = np.full(len(nodes), -1)
        self.place[order] = np.arange(len(order))
        lefts, tree, totals = self.place[nodes.left[order]], nodes.tree[order], nodes.totals[order]
        cut, (g, h) = nodes.left[order] > 0, self.units[tree].T
        lefts[~cut] = 0
        features, gains = (np.where(cut, each[order], 0) for each in (nodes.feature, nodes.gain))
        (last, after), at = nodes.cut[order[cut]].T, features[cut]
        thresholds = np.zeros(len(order))
        thresholds[cut] = between(table.below[at, last], table.above[at, after])
        values = totals[:, :-1] / np.maximum(totals[:, -1] + self.l2[tree], 1)[:, None] * (g / h)[:, None]
        return Trees(features, thresholds, lefts, values, gains, nodes.count[order], self.place[: self.trees])

    def _in_order(self) -> np.ndarray:
        """The nodes of each tree, level by level, however it was grown."""
        levels, level = list[np.ndarray](), np.arange(self.trees)
        while len(level):
            levels.append(level)
            lefts = self.nodes.left[level]
            level = np.add.outer(lefts[lefts > 0], [0, 1]).reshape(-1)
        order = np.concatenate(levels)
        return order if self.trees == 1 else order[np.argsort(self.nodes.tree[order], kind="stable")]

    # -- rows ------------------------------------------------------------------------------------------------

    def _standing(self, ids: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray, np.ndarray]:
        """Where the rows of some nodes stand, they, where those of each node begin among them, and how many it has."""
        begin, size = self.nodes.begin[ids], self.nodes.end[ids] - self.nodes.begin[ids]
        starts = np.cumsum(size) - size
        places: np.ndarray | slice = slice(int(begin[0]), int(begin[0] + size[0]))
        if len(ids) > 1:
            places = np.repeat(begin - starts, size) + np.arange(size.sum())
        return places, self.rows[places], starts, size

    def _entries(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of some nodes, their values, and where those of each node begin among them."""
        _, rows, starts, size = self._standing(ids)
        apart = self.nodes.tree[ids] * self.apart
        return rows, self.values.take(rows + np.repeat(apart, size) if apart.any() else rows, axis=0), starts

    def leaves(self) -> np.ndarray:
        """(trees, rows): the number of the leaf of each row of this worker, in trees that have grown without a target
        and have all rows."""
        ids = np.flatnonzero((self.nodes.left == 0) & (self.place >= 0))
        _, rows, _, size = self._standing(ids)
        of = np.repeat(ids, size)
        found = np.empty((self.trees, self.apart), np.int64)
        found[self.nodes.tree[of], rows] = self.place[of]
        return found

    def _split(self, ids: np.ndarray) -> np.ndarray:
        """Split nodes by their best cuts; the numbers of their children, those of one node side by side."""
        nodes = self.nodes
        places, rows, starts, _ = self._standing(ids)
        parted, lefts = np.empty_like(rows), np.empty_like(starts)
        compute(part_rows, (parted, lefts), self.table.bins, rows, starts, nodes.feature[ids], nodes.cut[ids, 0])
        self.rows[places] = parted
        middle, children = nodes.begin[ids] + lefts, nodes.more(np.repeat(nodes.tree[ids], 2))
        left, right = children[::2], children[1::2]
        nodes.left[ids], nodes.parent[children] = left, np.repeat(ids, 2)
        nodes.depth[children], nodes.key[children] = np.repeat(nodes.depth[ids] + 1, 2), grow.keys_below(nodes.key[ids])
        nodes.begin[left], nodes.end[left], nodes.totals[left] = nodes.begin[ids], middle, nodes.of_left[ids]
        nodes.begin[right], nodes.end[right] = middle, nodes.end[ids]
        nodes.totals[right] = nodes.totals[ids] - nodes.of_left[ids]
        (nodes.count[children],) = self.workers.sum(nodes.end[children] - nodes.begin[children])
        return children

    def _of_one_kind(self, ids: np.ndarray) -> np.ndarray:
        """Whether all rows of a node have the same target."""
        if self.target is None or not len(ids):
            return np.zeros(len(ids), bool)
        _, rows, starts, _ = self._standing(ids)
        here = self.nodes.end[ids] > self.nodes.begin[ids]
        ends = np.full((2, len(ids)), -np.inf)  # the largest target, and the smallest times -1
        if here.any():
            found = self.target[rows]
            ends[:, here] = [np.maximum.reduceat(signed, starts[here]) for signed in (found, -found)]
        high, low = self.workers.most(ends)
        return high == -low

    # -- histograms and cuts ---------------------------------------------------------------------------------

    def _judge(self, ids: np.ndarray) -> None:
        """Find the best cut of each node that may be split, which is then open if the cut is worth it."""
        nodes, rules, parents = self.nodes, self.rules, self.nodes.parent[ids].tolist()
        if rules.max_leaf_nodes is None or len(nodes) == self.trees:
            few = nodes.count[ids] <= self.few
            self.small, ids = np.concatenate([self.small, ids[few]]), ids[~few]
        may = nodes.count[ids] >= max(rules.min_samples_split, 2 * rules.min_samples_leaf)
        may &= nodes.depth[ids] < (rules.max_depth or math.inf)
        may[may] = ~self._of_one_kind(ids[may])
        ids = ids[may]
        look, most = self._by_some_columns if self.subset else self._by_all_columns, min(MOST, self._room())
        for at in range(0, len(ids), most):
            look(ids[at : at + most])
        self.known.drop(parents)
        self.open = np.concatenate([self.open, ids[nodes.gain[ids] >= rules.least_gain]])

    def _grow_small(self, ids: np.ndarray) -> None:
        """Grow what is below some nodes, of which each worker gets all rows."""
        nodes, rules, tree, bins, target = self.nodes, self.rules, self.nodes.tree[ids], self.table.bins, self.target
        places, rows, starts, size = self._standing(ids)
        values, moved = self._entries(ids)[1], nodes.begin[ids] - starts
        if self.workers.world_size > 1:
            gather, node = self.workers.gather, np.repeat(np.arange(len(ids)), size)
            bins, values, target = gather(bins[rows]), gather(values), None if target is None else gather(target[rows])
            rows, starts = np.argsort(gather(node), kind="stable"), np.cumsum(nodes.count[ids]) - nodes.count[ids]
            values = values[rows]
        units = np.stack([rules.min_weight / self.units[tree, 1], self.l2[tree], self.gain_unit[tree]], axis=1)
        arrays = bins, values, rows, starts, np.zeros(0) if target is None else target, self.order[tree]
        most = rules.max_leaf_nodes or 0
        room, enough = 2 * most - 1, 2 * len(rows) + len(ids)
        room = room if 0 < room * len(ids) < enough else 0
        gains = np.empty(room * len(ids) or enough)
        facts = np.empty((len(gains), nodes.facts.shape[1]), np.int64)
        compute(
            grow.grow_trees, (parted := np.empty_like(rows), facts, gains, counts := np.empty_like(ids)), *arrays,
            nodes.facts[ids, grow.DEPTH : grow.KEY + 1 : 2], units, size=self.table.size, max_leaf_nodes=most,
            features=rules.features if self.subset else self.columns, max_depth=rules.max_depth or 0,
            min_samples_split=rules.min_samples_split, min_samples_leaf=rules.min_samples_leaf,
            least_gain=rules.least_gain, room=room,
        )  # fmt: skip
        if self.workers.world_size == 1:
            self.rows[places] = parted
        first = np.arange(len(ids)) * room if room else 2 * starts + np.arange(len(ids))
        facts[:, [grow.BEGIN, grow.END]] += np.repeat(moved, np.diff(first, append=len(facts)))[:, None]
        nodes.graft(ids, facts, gains, first, counts)

    def _by_some_columns(self, ids: np.ndarray) -> None:
        """Nodes look at some columns each; those that must be split, and these cannot, at the others."""
        count = self.rules.features
        order = grow.drawn_columns(self.nodes.key[ids], self.columns, count)
        for looked in (order[:, :count], order[:, count:]) if self.target is not None else (order[:, :count],):
            if (lost := np.isinf(self.nodes.gain[ids])).any():
                self._find(ids[lost], np.ascontiguousarray(looked[lost]))

    def _by_all_columns(self, ids: np.ndarray) -> None:
        """Where the parent's histogram is kept, the smaller child is counted, and the larger is the rest."""
        looked = self.order[self.nodes.tree[ids]]
        nodes, known, parents = self.nodes, self.known, self.nodes.parent[ids]
        other = (ids - self.trees ^ 1) + self.trees  # children are numbered in pairs, after the roots
        smaller = np.where(nodes.count[ids] * 2 + (ids > other) < nodes.count[other] * 2 + (other > ids), ids, other)
        counted = np.where([parent in known.kept for parent in parents.tolist()], smaller, ids)
        distinct, at = np.unique(counted, return_inverse=True)
        own, less = self._counted(distinct, self.order[nodes.tree[distinct]]), np.where(counted != ids, parents, -1)
        self._enter(ids, looked, known.best(own, ids, at, less, *self._bounds(ids)))
        known.keep(ids[nodes.gain[ids] >= self.rules.least_gain].tolist())

    def _counted(self, ids: np.ndarray, looked: np.ndarray) -> np.ndarray:
        """This worker's histograms (slots, nodes, bins, channels) of the columns (nodes, slots) at which nodes look."""
        rows, values, starts = self._entries(ids)
        out = np.empty((looked.shape[1], len(ids), self.table.size, self.values.shape[1]), self.values.dtype)
        compute(histograms, out, self.table.bins, values, rows, starts, looked, size=self.table.size)
        return out

    def _bounds(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The H that both sides of the cuts of nodes must have more of, and l2."""
        nodes, tree, weight = self.nodes, self.nodes.tree[ids], self.rules.min_weight
        least = (self.rules.min_samples_leaf - 1) * nodes.totals[ids, -1].astype(np.float64) / nodes.count[ids]
        return np.maximum(least, weight / self.units[tree, 1]), self.l2[tree]

    def _find(self, ids: np.ndarray, looked: np.ndarray) -> None:
        """Enter the best cut of each node, from histograms of which none is kept."""
        own, none = self._counted(ids, looked), np.full(len(ids), -1)
        self._enter(ids, looked, self.known.best(own, none, np.arange(len(ids)), none, *self._bounds(ids)))

    def _enter(self, ids: np.ndarray, looked: np.ndarray, best: np.ndarray) -> None:
        """Note the best cut of each node: bits of its score, its place among the columns, its facts."""
        nodes, tree = self.nodes, self.nodes.tree[ids]
        scores, floats = best[:, 0].copy().view(np.float64), nodes.totals[ids].astype(np.float64)
        weight = np.maximum(floats[:, -1] + self.l2[tree], 1)
        before = sum(floats[:, k] ** 2 for k in range(floats.shape[1] - 1)) / weight
        nodes.gain[ids] = (scores - before) * self.gain_unit[tree]
        nodes.feature[ids] = looked[np.arange(len(ids)), best[:, 1]]
        nodes.facts[ids, grow.CUT : -nodes.channels] = best[:, 2:]
