"""Rows for what trees are grown by; the references look at one node, column and cut after the other."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np

from hetu.core.graph import OPS

from . import Sample, given, ints

STARTS, FEATURES, CUTS = np.array([0, 3, 3]), np.array([[0, 2], [1, 0], [2, 1]]), np.array([1, 0, 2])
BINS, VALUES, ROWS = ints(9, 3, high=4), ints(6, 2, low=1), given(np.array([8, 0, 3, 5, 1, 7]))
NODES = [slice(0, 3), slice(3, 3), slice(3, 6)]
HOST = "choices are NumPy's"


def histograms(bins, values, rows, starts, features):
    out = np.zeros((2, 3, 4, 2), int)
    for node, here in enumerate(NODES):
        for slot in range(2):
            for row, value in zip(rows[here], values[here]):
                out[slot, node, bins[row, features[node, slot]]] += value
    return out


def best_cuts(found, totals, least):
    """Both results, at half a unit of l2."""
    slots, nodes, size, channels = found.shape
    scores, facts = np.full((nodes, slots), -np.inf), np.zeros((nodes, slots, 2 + channels), int)
    for node in range(nodes):
        for slot in range(slots):
            for cut in range(size):
                left = found[slot, node, : cut + 1].sum(axis=0)
                right = totals[node] - left
                if min(left[-1], right[-1]) <= least[node]:
                    continue
                score = sum((side[:-1] ** 2).sum() / (side[-1] + 0.5) for side in (left, right))
                if score > scores[node, slot] + 1e-9:
                    filled = [k for k in range(cut + 1, size) if found[slot, node, k].any()]
                    scores[node, slot], facts[node, slot] = score, [cut, min(filled) - 1, *left]
    return scores, facts


def key_below(key, side):
    """Of a child, by whole numbers without a bound that are cut to 64 bits."""
    x = (key + 1 + side + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB):
        x = (x ^ x >> shift) * factor % 2**64
    x ^= x >> 31
    return x - 2**64 * (x >> 63)


def grow_trees(bins, values, rows, starts, target, order, begun, units):
    """All four results for the rules of `GROWN`: a queue of nodes, each with its own rows in a list."""
    parted, value, nodes = rows.copy(), dict(zip(rows, values)), 2 * len(rows) + len(starts)
    facts, gains, counts = np.zeros((nodes, 13), int), np.full(nodes, -np.inf), []
    for k, (low, high) in enumerate(pairwise([*starts, len(rows)])):
        queue = [(rows[low:high], low, begun[k, 0], 0, int(begun[k, 1]))]
        for number, (own, begin, depth, parent, key) in enumerate(queue):
            at, total = 2 * low + k + number, sum((value[row] for row in own), np.zeros(2, int))
            parted[begin : begin + len(own)] = own
            facts[at, [*range(1, 6), 11, 12]] = begin, begin + len(own), depth, parent, key, *total
            if len(own) < 2 or depth == 3 or len({*target[own]}) == 1:
                continue
            found = np.zeros((len(order[k]), 1, 4, 2), int)
            for slot, row in product(range(len(order[k])), own):
                found[slot, 0, bins[row, order[k, slot]]] += value[row]
            scores, cuts = best_cuts(found, total[None], units[k, :1])
            best = scores[0].argmax()
            if scores[0, best] > -np.inf:
                facts[at, 0], facts[at, 6:11] = len(queue), (order[k, best], *cuts[0, best])
                gains[at] = (scores[0, best] - total[0] ** 2 / max(total[1] + 0.5, 1)) * units[k, 2]
                right = bins[own, order[k, best]] > cuts[0, best, 0]
                sides = (own[~right], begin), (own[right], begin + int((~right).sum()))
                queue += [(*each, depth + 1, number, key_below(key, side)) for side, each in enumerate(sides)]
        counts.append(len(queue))
    return parted, facts, gains, np.array(counts)


def part_rows(bins, rows, starts, features, cuts):
    parted, lefts = [], []
    for node, here in enumerate(NODES):
        left = [row for row in rows[here] if bins[row, features[node]] <= cuts[node]]
        parted += left + [row for row in rows[here] if row not in left]
        lefts.append(len(left))
    return np.array(parted), np.array(lefts)


def tree_leaves(x, features, thresholds, lefts, roots):
    def leaf(row, node):
        while lefts[node]:
            node = lefts[node] + (row[features[node]] > thresholds[node])
        return node

    return np.array([[leaf(row, root) for root in roots] for row in x])


FIXED = [make(np.random.default_rng(3)) for make in (BINS, VALUES, ROWS)]
FOUND = histograms(*FIXED, STARTS, FEATURES)
ASKED = given(FOUND[0].sum(axis=1)), given(np.array([0.0, 0.0, 3.0]))
ROWS_OF_NODES = (BINS, VALUES, ROWS, given(STARTS), given(FEATURES))
UNITS = np.array([[0, 0.5, 1], [0, 0.5, 2], [1, 0.5, 0.25]])
ROOTS = [
    given(np.arange(9) % 2.0),
    given(np.array([[2, 0, 1]] * 3)),
    given(np.arange(6).reshape(3, 2) % 3),
    given(UNITS),
]
GROWN = {"size": 4, "features": 3, "max_depth": 3, "max_leaf_nodes": 0, "min_samples_split": 2, "min_samples_leaf": 1}
GROWN["least_gain"] = -1e300
TREE = [given(np.array(a)) for a in ([0, 0, 1, 0, 0], [0.0, 0, 0.5, 0, 0], [1, 0, 3, 0, 0], [0, 2])]
SAMPLES = [
    Sample("histograms", lambda *a: OPS["histograms"](*a, size=4), ROWS_OF_NODES, histograms, order=0, strict=HOST),
    Sample(
        "best_cuts", lambda *a: OPS["best_cuts"](*a, l2=0.5), (given(FOUND), *ASKED), best_cuts,
        order=0, strict=HOST,
    ),
    Sample(
        "grow_trees", lambda *a: OPS["grow_trees"](*a, **GROWN), (*ROWS_OF_NODES[:4], *ROOTS), grow_trees,
        order=0, strict=HOST,
    ),
    Sample(
        "part_rows", OPS["part_rows"], (BINS, ROWS, given(STARTS), given(FEATURES[:, 0]), given(CUTS)), part_rows,
        order=0, strict=HOST,
    ),
    Sample(
        "tree_leaves", OPS["tree_leaves"], (lambda rng: rng.normal(size=(7, 2)), *TREE), tree_leaves,
        order=0, strict=HOST,
    ),
]  # fmt: skip
