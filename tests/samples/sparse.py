"""Rows for the sparse products; the reference is the dense matrix of their entries."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, given, ints, real


def dense(rows, columns, values, x, size=4):
    matrix = np.zeros((size, len(x)))
    for row, column, value in zip(rows, columns, values):
        matrix[row, column] += value
    return matrix @ x


def product(rows, columns, values, x):
    return ht.sparse_matmul(rows, columns, values, x, size=4)


ENTRIES = (ints(9, high=4), ints(9, high=3), real(9), real(3, 2))
NO_SCATTER = "the array API has no scatter"

SAMPLES = [
    Sample("sparse_matmul", product, ENTRIES, dense, strict=NO_SCATTER),
    Sample(
        "sparse_matmul",
        product,
        (given(np.array([3, 0, 3], "int32")), given(np.array([2, 2, 2], "int32")), real(3), real(3, 2)),
        dense,
        label="empty-rows",
        strict=NO_SCATTER,
    ),
    Sample(
        "sampled_matmul",
        ht.sampled_matmul,
        (ints(9, high=4), ints(9, high=3), real(4, 4), real(3, 4)),
        lambda rows, columns, a, b: (a @ b.T)[rows, columns],
    ),
    Sample(
        "row_maxima",
        lambda rows, values: OPS["row_maxima"](rows, values, size=4),
        (given(np.array([3, 0, 3, 1, 0, 3])), real(6)),
        lambda rows, values: np.array([values[rows == i].max(initial=-np.inf) for i in range(4)]),
        order=0,
        strict=NO_SCATTER,
    ),
]
