"""Rows for bags of entries; the references go from bag to bag, and from pair to pair."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, given, ints, real

STARTS, ENDS = np.array([0, 3, 3, 4]), (3, 3, 4, 7)  # one is empty
FIELDS = np.array([0, 2, 0, 1, 1, 1, 2])
NO_SCATTER = "the array API has no scatter"


def bags():
    return [range(start, end) for start, end in zip(STARTS, ENDS)]


def sums(table, ids, starts, weights):
    rows = table[ids] * weights.reshape(-1, *[1] * (table.ndim - 1))
    return np.stack([rows[[*bag]].sum(0) for bag in bags()])


def pairs(table, ids, starts, weights):
    rows = table[ids] * weights[:, None]
    return np.array([sum(rows[i] @ rows[j] for i, j in itertools.combinations(bag, 2)) for bag in bags()])


def by_field(table, ids, starts, weights):
    rows = table[ids] * weights[:, None]
    return np.array([[rows[[i for i in bag if FIELDS[i] == f]].sum(0) for f in range(3)] for bag in bags()])


def field_pairs(table, ids, starts, weights):
    rows, f = (table[ids] * weights[:, None]).reshape(len(ids), 3, -1), FIELDS
    return np.array([sum(rows[i, f[j]] @ rows[j, f[i]] for i, j in itertools.combinations(bag, 2)) for bag in bags()])


def of_fields(function, table, ids, starts, weights):
    return function(table, ids, FIELDS, 3, starts, weights)


ENTRIES = (ints(7, high=5), given(STARTS), real(7))

SAMPLES = [
    Sample(
        "bag_ids", OPS["bag_ids"], (given(STARTS), ints(7)), lambda *_: np.array([0, 0, 0, 2, 3, 3, 3]), order=0,
    ),
    Sample("scatter_rows", ht.embedding_bag, (real(5, 3), *ENTRIES), sums, label="bags", strict=NO_SCATTER),
    Sample("scatter_rows", ht.embedding_bag, (real(5), *ENTRIES), sums, label="bags-of-numbers", strict=NO_SCATTER),
    Sample("scatter_rows", ht.pair_products, (real(5, 4), *ENTRIES), pairs, label="pairs", strict=NO_SCATTER),
    Sample(
        "scatter_rows", partial(of_fields, ht.field_bags), (real(5, 4), *ENTRIES), by_field,
        label="fields", strict=NO_SCATTER,
    ),
    Sample(
        "scatter_rows", partial(of_fields, ht.field_products), (real(5, 6), *ENTRIES), field_pairs,
        label="field-pairs", strict=NO_SCATTER,
    ),
]  # fmt: skip
