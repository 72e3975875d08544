"""Grow trees from histograms, for any loss and any number of workers.

A node is judged by sums of G (one or several channels) and H over the bins of its columns: by squared error G is the
weighted target and H the weight, by Gini impurity G are the weights of the classes, in boosting G is the gradient and
H the curvature. In all of them a cut is worth the sum of G^2 / (H + l2) over its sides (T. Chen, C. Guestrin,
"XGBoost", KDD 2016, eq. 7), and its leaf is G / (H + l2).

Each worker counts its own rows; `judged.py` has the histograms summed and the best cuts found. Of two children the
smaller is counted, and the larger is what the parent has beyond it. Trees that do not depend on each other grow side by
side: what is asked of all of them goes in one message. So do nodes of a tree that best-first growth comes to as far as
gains are known; what their children then push beyond the bound of leaves is pruned. Without a bound most nodes have
few rows, which are a shorter message than their histograms: they come to all workers, who go on alone (B. Panda et al.,
"PLANET", VLDB 2009).
Sums are of whole numbers, so trees are the same to the last bit for any number of workers, and side by side or not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from ...ops.trees import best_row_cuts, histograms, part_rows
from ...ps.store.functions import first_best
from ..workers import Workers
from .bins import ROOM, BinnedRows, between, compute
from .judged import MOST, histograms_of
from .tree import Trees


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


@dataclass
class TreeNodes:
    """What is known of each node, an array for each fact; its rows here stand from `begin` to `end`."""

    tree: np.ndarray
    parent: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    count: np.ndarray  # rows of all workers
    depth: np.ndarray
    totals: np.ndarray
    gain: np.ndarray
    feature: np.ndarray
    cut: np.ndarray  # its facts, as `best_cuts` tells them
    left: np.ndarray

    @classmethod
    def empty(cls, count: int, channels: int) -> TreeNodes:
        wide = {"totals": (count, channels), "cut": (count, 2 + channels)}
        made = {f.name: np.zeros(wide.get(f.name, count), np.int64) for f in fields(cls)}
        return cls(**made | {"gain": np.full(count, -np.inf), "parent": np.full(count, -1)})

    def __len__(self) -> int:
        return len(self.begin)

    def more(self, count: int) -> np.ndarray:
        """Add nodes; their numbers."""
        added = TreeNodes.empty(count, self.totals.shape[1])
        for f in fields(self):
            setattr(self, f.name, np.concatenate([getattr(self, f.name), getattr(added, f.name)]))
        return np.arange(len(self) - count, len(self))


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
        self.workers, self.table, self.units, self.rules, self.draws = workers, table, units, rules, draws
        self.trees, self.columns, self.target = len(values), table.bins.shape[1], target
        self.values, self.apart = values.reshape(-1, values.shape[2]), len(table.bins)  # those of one tree, then others
        self.order = np.stack([rng.permutation(self.columns) for rng in draws])  # of equally good cuts the first wins
        self.subset = 0 < rules.features < self.columns
        self.l2, self.gain_unit = rules.l2 / units[:, 1], units[:, 0] ** 2 / units[:, 1]  # all sums are whole numbers
        self.known = histograms_of(workers, self.columns * table.size * values.shape[2] * values.itemsize)
        self.nodes, self.open = TreeNodes.empty(self.trees, values.shape[2]), np.zeros(0, np.int64)
        self.small, self.alone = self.open, False  # nodes that wait until there is none but small ones; they are judged
        self.rows, self.nodes.tree[:] = np.concatenate(rows), np.arange(self.trees)
        self.nodes.end[:] = np.cumsum([len(some) for some in rows])
        self.nodes.begin[1:] = self.nodes.end[:-1]

    def grow(self) -> Trees:
        """The trees, one after the other."""
        nodes, roots = self.nodes, np.arange(self.trees)
        own = [self._entries(roots[k : k + 1])[1].sum(axis=0, dtype=np.int64) for k in roots]
        nodes.totals, nodes.count = self.workers.sum(np.stack(own), nodes.end - nodes.begin)
        self._judge(roots)
        if self.rules.max_leaf_nodes is not None:
            while len(wanted := self._best_first()[1]):
                self._judge(self._split(wanted))
            self._prune(self._best_first()[0])
        while self.rules.max_leaf_nodes is None and (len(self.open) or len(self.small)):
            if not len(self.open):
                self._go_on_alone()
                continue
            self._judge(self._split(self._choose()))
        self.known.close()
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

    def _prune(self, split: np.ndarray) -> None:
        """Leave nodes that are not split without children."""
        nodes, kept = self.nodes, np.ones(len(self.nodes), bool)
        nodes.left[np.setdiff1d(np.arange(len(nodes)), split)] = 0
        kept[self.trees :] = nodes.left[nodes.parent[self.trees :]] > 0
        number = np.cumsum(kept) - 1
        for f in fields(nodes):
            setattr(nodes, f.name, getattr(nodes, f.name)[kept])
        nodes.left = np.where(nodes.left > 0, number[nodes.left], 0)

    def _room(self) -> int:
        """How many nodes are looked at together."""
        looked = self.rules.features if self.subset else self.columns
        of_node = 64 if self.alone else self.table.size * self.values.shape[1] * self.values.itemsize
        return max(1, ROOM // (looked * of_node))

    def _trees(self) -> Trees:
        nodes, table = self.nodes, self.table
        self.place = np.argsort(order := np.argsort(nodes.tree, kind="stable"))
        cut, (g, h) = nodes.left > 0, self.units[nodes.tree].T
        at = nodes.feature[cut]
        thresholds = np.zeros(len(nodes))
        thresholds[cut] = between(table.below[at, nodes.cut[cut, 0]], table.above[at, nodes.cut[cut, 1]])
        sums = np.maximum(nodes.totals[:, -1] + self.l2[nodes.tree], 1)
        values = nodes.totals[:, :-1] / sums[:, None] * (g / h)[:, None]
        lefts = np.where(cut, self.place[nodes.left], 0)
        facts = [each[order] for each in (nodes.feature, thresholds, lefts, values, nodes.gain, nodes.count)]
        return Trees(*[*facts, self.place[: self.trees]])

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
        ids = np.flatnonzero(self.nodes.left == 0)
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
        cuts = np.ascontiguousarray(nodes.cut[ids, 0])
        compute(part_rows, (parted, lefts), self.table.bins, rows, starts, nodes.feature[ids], cuts)
        self.rows[places] = parted
        children, middle, of_left = nodes.more(2 * len(ids)), nodes.begin[ids] + lefts, nodes.cut[ids, 2:]
        nodes.left[ids], nodes.tree[children] = children[::2], np.repeat(nodes.tree[ids], 2)
        nodes.parent[children], nodes.depth[children] = np.repeat(ids, 2), np.repeat(nodes.depth[ids] + 1, 2)
        nodes.begin[children] = np.stack([nodes.begin[ids], middle], axis=1).reshape(-1)
        nodes.end[children] = np.stack([middle, nodes.end[ids]], axis=1).reshape(-1)
        nodes.totals[children] = np.stack([of_left, nodes.totals[ids] - of_left], axis=1).reshape(len(children), -1)
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
        same: np.ndarray = high == -low
        return same

    # -- histograms and cuts ---------------------------------------------------------------------------------

    def _judge(self, ids: np.ndarray) -> None:
        """Find the best cut of each node that may be split, which is then open if the cut is worth it."""
        nodes, rules, parents = self.nodes, self.rules, self.nodes.parent[ids].tolist()
        may = nodes.count[ids] >= max(rules.min_samples_split, 2 * rules.min_samples_leaf)
        may &= nodes.depth[ids] < (rules.max_depth or math.inf)
        may[may] = ~self._of_one_kind(ids[may])
        ids = ids[may]
        if rules.max_leaf_nodes is None and self.target is not None and not self.alone:
            few = nodes.count[ids] <= self.table.size
            self.small, ids = np.concatenate([self.small, ids[few]]), ids[~few]
        look, most = self._by_some_columns if self.subset else self._by_all_columns, min(MOST, self._room())
        for at in range(0, len(ids), most):
            look(ids[at : at + most])
        self.known.drop(parents)
        self.open = np.concatenate([self.open, ids[nodes.gain[ids] >= rules.least_gain]])

    def _go_on_alone(self) -> None:
        """From here on each worker has all rows of the nodes that wait, and grows all of them."""
        ids, nodes = np.sort(self.small), self.nodes
        rows, values, starts = self._entries(ids)
        node = np.repeat(np.arange(len(ids)), np.diff(starts, append=len(rows)))
        if self.workers.world_size > 1:
            gather = self.workers.gather
            node, self.values, self.apart = gather(node), gather(values), 0
            self.table = BinnedRows(gather(self.table.bins[rows]), self.table.below, self.table.above)
            self.target = None if self.target is None else gather(self.target[rows])
            rows, self.workers = np.arange(len(node)), Workers()
        self.rows = rows[np.argsort(node, kind="stable")]
        nodes.end[ids] = np.cumsum(nodes.count[ids])
        nodes.begin[ids] = nodes.end[ids] - nodes.count[ids]
        self.small, self.alone = np.zeros(0, np.int64), True
        self._judge(ids)

    def _by_some_columns(self, ids: np.ndarray) -> None:
        """Nodes look at some columns each; those that must be split, and these cannot, at the others."""
        count, order, tree = self.rules.features, np.empty((len(ids), self.columns), np.int64), self.nodes.tree[ids]
        for k in np.unique(tree):
            order[tree == k] = self.draws[k].random(((tree == k).sum(), self.columns)).argsort(axis=1)
        for looked in (order[:, :count], order[:, count:]) if self.target is not None else (order[:, :count],):
            if (lost := np.isinf(self.nodes.gain[ids])).any():
                self._find(ids[lost], np.ascontiguousarray(looked[lost]))

    def _by_all_columns(self, ids: np.ndarray) -> None:
        """Where the parent's histogram is kept, the smaller child is counted, and the larger is the rest."""
        looked = self.order[self.nodes.tree[ids]]
        if self.alone:
            return self._find(ids, looked)
        nodes, known, parents = self.nodes, self.known, self.nodes.parent[ids]
        other = (ids - self.trees ^ 1) + self.trees  # children are numbered in pairs, after the roots
        smaller = np.where(nodes.count[ids] * 2 + (ids > other) < nodes.count[other] * 2 + (other > ids), ids, other)
        counted = np.where([parent in known.kept for parent in parents.tolist()], smaller, ids)
        distinct, at = np.unique(counted, return_inverse=True)
        own, less = self._counted(distinct, self.order[nodes.tree[distinct]]), np.where(counted != ids, parents, -1)
        self._enter(ids, looked, known.best(own, ids, at, less, *self._bounds(ids)))
        known.keep(ids[nodes.gain[ids] >= self.rules.least_gain].tolist())
        return None

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
        """Enter the best cut of each node from rows, if all are here, or from histograms of which none is kept."""
        nodes, slots = looked.shape
        if self.workers.world_size > 1:
            own, none = self._counted(ids, looked), np.full(nodes, -1)
            return self._enter(ids, looked, self.known.best(own, none, np.arange(nodes), none, *self._bounds(ids)))
        if len(of_l2 := np.unique(self.l2[self.nodes.tree[ids]])) > 1:
            for some in (self.l2[self.nodes.tree[ids]] == value for value in of_l2):
                self._find(ids[some], looked[some])
            return None
        out = np.empty((nodes, slots)), np.empty((nodes, slots, 2 + self.values.shape[1]), np.int64)
        rows, values, starts = self._entries(ids)
        totals, (least, l2) = self.nodes.totals[ids].astype(values.dtype), self._bounds(ids)
        args = self.table.bins, values, rows, starts, looked, totals, least
        compute(best_row_cuts, out, *args, size=self.table.size, l2=float(l2[0]))
        return self._enter(ids, looked, first_best(*out))

    def _enter(self, ids: np.ndarray, looked: np.ndarray, best: np.ndarray) -> None:
        """Note the best cut of each node: bits of its score, its place among the columns, its facts."""
        nodes, tree = self.nodes, self.nodes.tree[ids]
        scores, floats = best[:, 0].copy().view(np.float64), nodes.totals[ids].astype(np.float64)
        weight = np.maximum(floats[:, -1] + self.l2[tree], 1)
        before = sum(floats[:, k] ** 2 for k in range(floats.shape[1] - 1)) / weight
        nodes.gain[ids] = (scores - before) * self.gain_unit[tree]
        nodes.feature[ids], nodes.cut[ids] = looked[np.arange(len(ids)), best[:, 1]], best[:, 2:]
