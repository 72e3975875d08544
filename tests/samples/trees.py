"""Rows for what trees are grown by; the references look at one node, column and cut after the other."""

from __future__ import annotations

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


def best_row_cuts(bins, values, rows, starts, features, totals, least):
    return best_cuts(histograms(bins, values, rows, starts, features), totals, least)


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
FIXED_ROWS = (*map(given, FIXED), *ROWS_OF_NODES[3:])
TREE = [given(np.array(a)) for a in ([0, 0, 1, 0, 0], [0.0, 0, 0.5, 0, 0], [1, 0, 3, 0, 0], [0, 2])]
SAMPLES = [
    Sample("histograms", lambda *a: OPS["histograms"](*a, size=4), ROWS_OF_NODES, histograms, order=0, strict=HOST),
    Sample(
        "best_cuts", lambda *a: OPS["best_cuts"](*a, l2=0.5), (given(FOUND), *ASKED), best_cuts,
        order=0, strict=HOST,
    ),
    Sample(
        "best_row_cuts", lambda *a: OPS["best_row_cuts"](*a, size=4, l2=0.5), (*FIXED_ROWS, *ASKED),
        best_row_cuts, order=0, strict=HOST,
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
