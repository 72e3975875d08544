"""Sparse rows, beside arrays of the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.ml.inputs import Sparse, matrix

rng = np.random.default_rng(0)
DENSE = rng.normal(size=(30, 7)) * (rng.random((30, 7)) < 0.3)
DENSE[4] = DENSE[:, 2] = 0


def rows_of(dense: np.ndarray) -> Sparse:
    rows, columns = np.nonzero(dense)
    starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    return Sparse(starts, columns, dense[rows, columns], dense.shape)


@pytest.mark.parametrize("dense", [DENSE, np.zeros((3, 2))], ids=["some", "none"])
def test_products_are_those_of_arrays(dense):
    sparse = rows_of(dense)
    for width in (1, 4):
        other = rng.normal(size=(dense.shape[1], width))
        np.testing.assert_allclose(sparse @ other, dense @ other)
        other = rng.normal(size=(dense.shape[0], width))
        np.testing.assert_allclose(sparse.T @ other, dense.T @ other)
    np.testing.assert_array_equal(sparse.T.dense(), dense.T)


def test_matrices_of_scipy_are_read():
    scipy = pytest.importorskip("scipy.sparse", reason="the extra [dev] is not installed")
    np.testing.assert_array_equal(matrix(scipy.coo_matrix(DENSE), sparse=True).dense(), DENSE)
