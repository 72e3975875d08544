"""Grow a tree from histograms, for any loss and any number of workers.

A node is judged by sums of G (one or several channels) and H over the bins of its columns: by squared error G is the
weighted target and H the weight, by Gini impurity G are the weights of the classes, in boosting G is the gradient and
H the curvature. In all of them a cut is worth the sum of G^2 / (H + l2) over its sides (T. Chen, C. Guestrin,
"XGBoost", KDD 2016, eq. 7), and its leaf is G / (H + l2).

Each worker counts its own rows; `judged.py` has the histograms summed and the best cuts found. Of two children the
smaller is counted, and the larger is what the parent has beyond it. Without a bound for leaves most nodes have few
rows, which are a shorter message than their histograms: they come to all workers, who go on alone (B. Panda et al.,
"PLANET", VLDB 2009). Sums are of whole numbers, so the tree is the same to the last bit for any number of workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np

from ...ops.trees import best_row_cuts, histograms, part_rows
from ..workers import Workers
from .bins import BinnedRows, between, compute
from .judged import ROOM, Histograms, first_best, histograms_of
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
    """Grows one tree. `values` are whole numbers (rows, channels), H in the last; `units` those of G and of H.

    Of this worker's rows `rows` take part. `target` (rows,), if it is given, tells which nodes are of one kind and so
    are leaves, as those of trees that may grow until all are. All others are then split as far as the rules let them.
    """

    def __init__(
        self,
        workers: Workers,
        table: BinnedRows,
        values: np.ndarray,
        units: np.ndarray,
        rules: GrowthRules,
        rng: np.random.Generator,
        rows: np.ndarray,
        target: np.ndarray | None = None,
    ) -> None:
        self.workers, self.table, self.units, self.rules = workers, table, units, rules
        self.values, self.rng, self.rows, self.target = np.ascontiguousarray(values), rng, rows, target
        self.columns = table.bins.shape[1]
        self.order = rng.permutation(self.columns)  # of cuts that are equally good the first is taken
        self.subset = 0 < rules.features < self.columns
        self.l2, self.gain_unit = rules.l2 / units[1], units[0] ** 2 / units[1]  # all sums here are whole numbers
        self.known = histograms_of(workers, self.l2, self.columns * table.size * self.values[:1].nbytes)
        self.nodes, self.open = TreeNodes.empty(1, values.shape[1]), np.zeros(0, np.int64)
        self.small, self.alone = self.open, False  # nodes that wait until there is none but small ones; they are judged

    def grow(self) -> Trees:
        """The tree."""
        nodes, most = self.nodes, self.rules.max_leaf_nodes
        own = self.values[self.rows].sum(axis=0, dtype=np.int64)
        nodes.end[0] = len(self.rows)
        nodes.totals[0], nodes.count[:] = self.workers.sum(own, nodes.end)
        self._judge(np.array([0]))
        leaves = 1
        while (len(self.open) or len(self.small)) and leaves < (most or math.inf):
            if not len(self.open):
                self._go_on_alone()
                continue
            if most is not None:
                self.open = self.open[np.argsort(nodes.gain[self.open], kind="stable")]
            self.open, chosen = np.split(self.open, [max(0, len(self.open) - self._at_once())])
            children = self._split(chosen)
            leaves += len(chosen)
            if leaves < (most or math.inf):
                self._judge(children)
        return self._tree()

    def _at_once(self) -> int:
        """How many nodes are split together, the last ones, so that few wait: one if the best go first."""
        if self.rules.max_leaf_nodes is not None:
            return 1
        looked = self.rules.features if self.subset else self.columns
        of_node = 64 if self.alone else self.table.size * self.values.shape[1] * self.values.itemsize
        return max(1, ROOM // (looked * of_node))

    def _tree(self) -> Trees:
        nodes, table = self.nodes, self.table
        cut, (g, h) = nodes.left > 0, self.units
        at = nodes.feature[cut]
        thresholds = np.zeros(len(nodes))
        thresholds[cut] = between(table.below[at, nodes.cut[cut, 0]], table.above[at, nodes.cut[cut, 1]])
        values = nodes.totals[:, :-1] / np.maximum(nodes.totals[:, -1:] + self.l2, 1) * (g / h)
        return Trees(nodes.feature, thresholds, nodes.left, values, nodes.gain, nodes.count, np.zeros(1, np.int64))

    # -- rows ------------------------------------------------------------------------------------------------

    def _entries(self, ids: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray, np.ndarray]:
        """Where the rows of some nodes stand, the rows, and where those of each node begin among these."""
        begin, size = self.nodes.begin[ids], self.nodes.end[ids] - self.nodes.begin[ids]
        starts = np.cumsum(size) - size
        places: np.ndarray | slice = slice(int(begin[0]), int(begin[0] + size[0]))
        if len(ids) > 1:
            places = np.repeat(begin - starts, size) + np.arange(size.sum())
        return places, self.rows[places], starts

    def leaves(self) -> np.ndarray:
        """The number of the leaf of each row of this worker, of a tree that was grown without a target."""
        ids = np.flatnonzero(self.nodes.left == 0)
        _, rows, starts = self._entries(ids)
        found = np.empty(len(rows), np.int64)
        found[rows] = np.repeat(ids, np.diff(starts, append=len(rows)))
        return found

    def _split(self, ids: np.ndarray) -> np.ndarray:
        """Split nodes by their best cuts; the numbers of their children, those of one node side by side."""
        nodes = self.nodes
        places, rows, starts = self._entries(ids)
        parted, lefts = np.empty_like(rows), np.empty_like(starts)
        cuts = np.ascontiguousarray(nodes.cut[ids, 0])
        compute(part_rows, (parted, lefts), self.table.bins, rows, starts, nodes.feature[ids], cuts)
        self.rows[places] = parted
        children, middle, of_left = nodes.more(2 * len(ids)), nodes.begin[ids] + lefts, nodes.cut[ids, 2:]
        nodes.left[ids] = children[::2]
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
        _, rows, starts = self._entries(ids)
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
        look, most = self._by_some_columns if self.subset else self._by_all_columns, self.known.most
        for at in range(0, len(ids), most):
            look(ids[at : at + most])
        for parent in parents:
            self.known.kept.pop(parent, None)
        self.open = np.concatenate([self.open, ids[nodes.gain[ids] >= rules.least_gain]])

    def _go_on_alone(self) -> None:
        """From here on each worker has all rows of the nodes that wait, and grows all of them."""
        ids, nodes = np.sort(self.small), self.nodes
        _, rows, starts = self._entries(ids)
        node = np.repeat(np.arange(len(ids)), np.diff(starts, append=len(rows)))
        if self.workers.world_size > 1:
            gather = self.workers.gather
            node, self.values = gather(node), gather(self.values[rows])
            self.table = BinnedRows(gather(self.table.bins[rows]), self.table.below, self.table.above)
            self.target = None if self.target is None else gather(self.target[rows])
            rows, self.workers, self.known = np.arange(len(node)), Workers(), Histograms(Workers(), self.l2)
        self.rows = rows[np.argsort(node, kind="stable")]
        nodes.end[ids] = np.cumsum(nodes.count[ids])
        nodes.begin[ids] = nodes.end[ids] - nodes.count[ids]
        self.small, self.alone = np.zeros(0, np.int64), True
        self._judge(ids)

    def _by_some_columns(self, ids: np.ndarray) -> None:
        """TreeNodes look at some columns each; those that must be split, and these cannot, at the others."""
        count, order = self.rules.features, self.rng.random((len(ids), self.columns)).argsort(axis=1)
        for looked in (order[:, :count], order[:, count:]) if self.target is not None else (order[:, :count],):
            if (lost := np.isinf(self.nodes.gain[ids])).any():
                self._find(ids[lost], np.ascontiguousarray(looked[lost]))

    def _by_all_columns(self, ids: np.ndarray) -> None:
        """Where the parent's histogram is kept, the smaller child is counted, and the larger is the rest."""
        looked = np.tile(self.order, (len(ids), 1))
        if self.alone:
            return self._find(ids, looked)
        nodes, known, parents = self.nodes, self.known, self.nodes.parent[ids]
        known.make_room(len(ids))
        other = (ids - 1 ^ 1) + 1  # children are numbered in pairs, from 1 on
        smaller = np.where(nodes.count[ids] * 2 + (ids > other) < nodes.count[other] * 2 + (other > ids), ids, other)
        counted = np.where(np.isin(parents, [*known.kept]), smaller, ids)
        distinct, at = np.unique(counted, return_inverse=True)
        own = self._counted(distinct, looked[: len(distinct)])
        self._enter(ids, looked, *known.best(own, at, np.where(counted != ids, parents, -1), *self._asked(ids)))
        for k in np.flatnonzero(nodes.gain[ids] >= self.rules.least_gain):
            known.kept[int(ids[k])] = known.last[k]
        return None

    def _counted(self, ids: np.ndarray, looked: np.ndarray) -> np.ndarray:
        """This worker's histograms (slots, nodes, bins, channels) of the columns (nodes, slots) at which nodes look."""
        _, rows, starts = self._entries(ids)
        out = np.empty((looked.shape[1], len(ids), self.table.size, self.values.shape[1]), self.values.dtype)
        compute(histograms, out, self.table.bins, self.values, rows, starts, looked, size=self.table.size)
        return out

    def _asked(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The totals of nodes, and the H that both sides of their cuts must have more of."""
        totals = self.nodes.totals[ids]
        least = (self.rules.min_samples_leaf - 1) * totals[:, -1].astype(np.float64) / self.nodes.count[ids]
        return totals.astype(self.values.dtype), np.maximum(least, self.rules.min_weight / self.units[1])

    def _find(self, ids: np.ndarray, looked: np.ndarray) -> None:
        """Enter the best cut of each node from rows, if all are here, or from histograms of which none is kept."""
        nodes, slots = looked.shape
        if self.workers.world_size > 1:
            own, none = self._counted(ids, looked), np.full(nodes, -1)
            return self._enter(ids, looked, *self.known.best(own, np.arange(nodes), none, *self._asked(ids)))
        out = np.empty((nodes, slots)), np.empty((nodes, slots, 2 + self.values.shape[1]), np.int64)
        _, rows, starts = self._entries(ids)
        args = self.table.bins, self.values, rows, starts, looked, *self._asked(ids)
        compute(best_row_cuts, out, *args, size=self.table.size, l2=self.l2)
        return self._enter(ids, looked, *first_best(*out))

    def _enter(
        self, ids: np.ndarray, looked: np.ndarray, scores: np.ndarray, slot: np.ndarray, facts: np.ndarray
    ) -> None:
        """Note the best cut of each node."""
        nodes, floats = self.nodes, self.nodes.totals[ids].astype(np.float64)
        before = sum(floats[:, k] ** 2 for k in range(floats.shape[1] - 1)) / np.maximum(floats[:, -1] + self.l2, 1)
        nodes.gain[ids] = (scores - before) * self.gain_unit
        nodes.feature[ids], nodes.cut[ids] = looked[np.arange(len(ids)), slot], facts
