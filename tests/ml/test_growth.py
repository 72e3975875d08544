"""Best-first growth beside one that is written out: a list of leaves, of which the best is split, one by one."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu.ml.trees.bins import between, binned, whole
from hetu.ml.trees.grow import Grower, GrowthRules
from hetu.ml.workers import Workers


class WrittenOut:
    """Cuts by their way from the root (1, then 2 n and 2 n + 1), and how many rows come to each leaf."""

    def __init__(self, table, values, units, rules, order):
        self.table, self.values, self.rules, self.order = table, values.tolist(), rules, order
        self.l2, self.unit = rules.l2 / units[1], units[0] ** 2 / units[1]
        self.least = rules.min_weight / units[1]
        open_, self.cuts = {1: range(len(values))}, {}
        while len(open_) < rules.max_leaf_nodes:
            found = {way: self.best(rows, way.bit_length() - 1) for way, rows in open_.items()}
            best = min((-cut[0], way) for way, cut in found.items())[1]
            gain, column, last, after = found[best]
            if not gain >= rules.least_gain:
                break
            self.cuts[best] = column, float(between(table.below[column, last], table.above[column, after - 1]))
            rows = open_.pop(best)
            open_[2 * best] = [r for r in rows if table.bins[r, column] <= last]
            open_[2 * best + 1] = [r for r in rows if table.bins[r, column] > last]
        self.leaves = {way: len(rows) for way, rows in open_.items()}

    def best(self, rows, depth):
        """Gain, column, and the bins that have rows on both sides of the best cut; of equal ones the first."""
        rules, found = self.rules, (-np.inf, 0, 0, 1)
        if len(rows) < max(rules.min_samples_split, 2 * rules.min_samples_leaf) or depth == rules.max_depth:
            return found
        sums = self.sums(rows)
        least, score = max((rules.min_samples_leaf - 1) * float(sums[1]) / len(rows), self.least), -np.inf
        for column in self.order:
            of = {r: int(self.table.bins[r, column]) for r in rows}
            bins = sorted({of[r] for r in rows if any(self.values[r])})
            for last, after in pairwise(bins):
                left = self.sums([r for r in rows if of[r] <= last])
                right = [a - b for a, b in zip(sums, left)]
                if min(left[1], right[1]) > least and (of_both := self.score(left) + self.score(right)) > score:
                    gain = (of_both - float(sums[0]) ** 2 / max(float(sums[1]) + self.l2, 1)) * self.unit
                    score, found = of_both, (gain, int(column), last, after)
        return found

    def sums(self, rows):
        return [sum(self.values[r][channel] for r in rows) for channel in range(2)]

    def score(self, sums):
        return float(sums[0]) ** 2 / (float(sums[1]) + self.l2)


def read(trees):
    """The same of trees that have grown."""
    cuts, leaves, waiting = {}, {}, [(0, 1)]
    while waiting:
        node, way = waiting.pop()
        if left := int(trees.lefts[node]):
            cuts[way] = int(trees.features[node]), float(trees.thresholds[node])
            waiting += [(left, 2 * way), (left + 1, 2 * way + 1)]
        else:
            leaves[way] = int(trees.counts[node])
    return cuts, leaves


COLUMNS = {
    "any": lambda rng, shape: rng.normal(size=shape),
    "few values": lambda rng, shape: rng.integers(0, 3, shape).astype(float),
    "constant": lambda rng, shape: np.repeat(rng.normal(size=(1, shape[1])), shape[0], axis=0),
    "rising": lambda rng, shape: np.sort(rng.normal(size=shape), axis=0),
    "any power": lambda rng, shape: np.ldexp(rng.normal(size=shape), rng.integers(-400, 400, shape)),
    "ends of float32": lambda rng, shape: rng.choice(np.float32([3.4e38, -3.4e38, 1e-45, 0, -0.0]), shape).astype(
        float
    ),
}
SLOPES = [lambda rng, n: rng.integers(-2, 3, n), lambda rng, n: rng.normal(size=n), lambda rng, n: np.ones(n)]
CURVES = [
    lambda rng, n: np.ones(n),
    lambda rng, n: rng.integers(0, 3, n),
    lambda rng, n: rng.random(n),
    lambda rng, n: np.zeros(n),
]


@pytest.mark.parametrize("few", [-1, 50])
@pytest.mark.parametrize("kind", COLUMNS)
@settings(max_examples=40)
@given(st.data())
def test_trees_are_those_that_are_split_one_by_one(kind, few, data):
    """Step by step, and in one call."""
    pick = lambda *options: data.draw(st.sampled_from(options))  # noqa: E731
    rng, rows = np.random.default_rng(data.draw(st.integers(0, 1 << 32))), data.draw(st.integers(2, 50))
    X = COLUMNS[kind](rng, (rows, data.draw(st.integers(1, 4)))).clip(-1e140, 1e140)
    pairs = np.stack([pick(*SLOPES)(rng, rows), pick(*CURVES)(rng, rows)], axis=1).astype(float)
    rules = GrowthRules(
        max_depth=pick(None, None, 1, 3), max_leaf_nodes=pick(2, 3, 5, 8, 31, 64), min_samples_split=pick(2, 5),
        min_samples_leaf=pick(1, 2, 5), min_weight=pick(0.0, 1e-3, 0.5), l2=pick(0.0, 1e-3, 1.0),
        least_gain=pick(np.finfo(float).tiny, np.finfo(float).min, 0.1),
    )  # fmt: skip
    workers, table = Workers(), binned(Workers(), X, pick(255, 4, 2))
    values, units = whole(workers, pairs)
    grower = Grower(workers, table, values[None], units[None], rules, [rng], [np.arange(rows)])
    grower.few = few
    wanted = WrittenOut(table, values, units, rules, grower.order[0])
    assert read(grower.grow()) == (wanted.cuts, wanted.leaves)
