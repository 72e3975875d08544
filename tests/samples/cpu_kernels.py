"""Rows for operators that only passes make; the references are the plain operators they stand for."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np

import hetu as ht
import hetu.cpu_kernels.bags
import hetu.cpu_kernels.groups
from hetu.core.graph import OPS
from hetu.cpu_kernels.touched import LIMITS
from hetu.fuse.entries import Joining

from . import Sample, given, ints, real


def own_column(places, x):
    return np.eye(x.shape[-1], dtype=bool)[places[:, 0]]


BOUNDS = np.array([0, 2, 2, 7])


def bag(bounds, ids, table, weights):
    return np.stack([weights[a:b] @ table[ids[a:b]] for a, b in itertools.pairwise(bounds)])


def spread(bounds, ids, bags, weights):
    return np.eye(50)[ids].T @ (weights[:, None] * np.repeat(bags, np.diff(bounds), 0))


def joined(*nodes):
    """Terms of a factorization machine and of no known model, where entries are summed in 9 rows, one frequent."""
    table, vector, ids, weights, into = nodes
    rows = ht.sigmoid(ht.embedding(table, ids)) * ht.expand_dims(weights * ht.embedding(vector, ids), 1)
    added = OPS["scatter_rows"](ht.full((9, 6), 0.0, table.dtype), into, rows - 0.5)
    return Joining([added], LIMITS, lambda update: None).joined()[0]


def sums(table, vector, ids, weights, into):
    rows = (weights * vector[ids])[:, None] / (1 + np.exp(-table[ids])) - 0.5
    return np.stack([rows[into == i].sum(0) for i in range(9)])


FREQUENT = np.where(np.arange(400) % 3, 4, np.arange(400) % 9)
SUMMED = (real(7, 6), real(7), ints(400, high=7), real(400), given(FREQUENT))

SAMPLES = [
    Sample("summed_entries", joined, SUMMED, sums, order=0, fixed=True, strict="the array API has no scatter"),
    Sample("bag_bounds", partial(OPS["bag_bounds"], entries=7), (given(BOUNDS[:-1]),), lambda *_: BOUNDS, order=0),
    Sample(
        "bag",
        lambda *a: OPS["bag"](*a),
        (given(BOUNDS), ints(7), real(50, 3), real(7)),
        bag,
        order=0,
        strict="the array API has no scatter",
    ),
    Sample(
        "spread",
        partial(OPS["spread"], size=50),
        (given(BOUNDS), ints(7), real(3, 3), real(7)),
        spread,
        order=0,
        strict="the array API has no scatter",
    ),
    Sample("own_column", lambda places, x: OPS["own_column"](places, x), (ints(4, 1), real(4, 5)), own_column, order=0),
]
