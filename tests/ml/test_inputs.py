"""Sparse rows, beside arrays of the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DataError, DTypeError, ShapeError, ValueRangeError
from hetu.ml.inputs import Sparse, matrix

rng = np.random.default_rng(0)
DENSE = rng.normal(size=(30, 7)) * (rng.random((30, 7)) < 0.3)
DENSE[4] = DENSE[:, 2] = 0


def rows_of(dense: np.ndarray) -> Sparse:
    places = rng.permutation(np.argwhere(dense))
    return Sparse.of(*places.T, dense[tuple(places.T)], dense.shape)


@pytest.mark.parametrize("dense", [DENSE, np.zeros((3, 2))], ids=["some", "none"])
def test_products_are_those_of_arrays(dense):
    sparse = rows_of(dense)
    for width in (1, 4):
        other = rng.normal(size=(dense.shape[1], width))
        np.testing.assert_allclose(sparse @ other, dense @ other)
        other = rng.normal(size=(dense.shape[0], width))
        np.testing.assert_allclose(sparse.T @ other, dense.T @ other)
        np.testing.assert_allclose(sparse.back(other), dense.T @ other)
    np.testing.assert_array_equal(sparse.T.dense(), dense.T)
    some = rng.integers(0, len(dense), 9)
    np.testing.assert_array_equal(sparse[some].dense(), dense[some])


def test_entries_of_one_place_are_summed():
    sparse = rows_of(DENSE)
    halves = [np.tile(each, 2) for each in (sparse.rows, sparse.columns)]
    twice = matrix(Sparse.of(*halves, np.tile(sparse.values / 2, 2), sparse.shape), sparse=True)
    np.testing.assert_allclose(twice.dense(), DENSE)
    assert len(twice.values) == len(sparse.values)


def test_matrices_of_scipy_are_read():
    scipy = pytest.importorskip("scipy.sparse", reason="the extra [dev] is not installed")
    np.testing.assert_array_equal(matrix(scipy.coo_matrix(DENSE), sparse=True).dense(), DENSE)


@pytest.mark.parametrize(
    "rows, values, error, said",
    [
        ([0, 3], [1.0, 2.0], ValueRangeError, r"row 3 of 3(.|\n)*pass numbers from 0 to 2"),
        ([-1, 0], [1.0, 2.0], ValueRangeError, "row -1 of 3"),
        ([0, 1], [1.0], ShapeError, r"rows, columns and values of shapes \(2,\), \(2,\) and \(1,\)"),
        ([0, 1], [1.0, np.nan], DataError, "values contains NaN"),
    ],
)
def test_entries_that_do_not_fit_are_told(rows, values, error, said):
    with pytest.raises(error, match=said):
        Sparse.of(rows, [0, 1], values, (3, 2))


def test_a_matrix_of_ours_is_checked_as_theirs():
    made = Sparse.of([0], [1], [2.0], (2, 2))
    assert matrix(made, sparse=True) is made
    with pytest.raises(DTypeError, match="dense data is required"):
        matrix(made)


def test_columns_of_entries_are_no_names():
    class Table:
        columns = ("a", "b")

        def __array__(self, dtype=None, copy=None):
            return np.array([[1.0, 2.0], [3.0, 5.0], [5.0, 2.0]])

    model = ht.ml.PCA(1).fit(Table())
    assert [*model.feature_names_in_] == ["a", "b"]
    np.testing.assert_allclose(model.transform(rows_of(np.eye(2))), model.transform(np.eye(2)))
