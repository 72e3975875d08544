"""Nearest neighbors beside all distances, sorted: also where many are equal, and however the rows are divided."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError
from hetu.dist import run_ranks


def whole(count: int, columns: int = 3) -> np.ndarray:
    """Whole numbers: many rows are equally far, and some are there twice."""
    return np.random.default_rng(count).integers(0, 4, (count, columns)).astype(float)


def sorted_all(queries: np.ndarray, rows: np.ndarray, k: int, metric: str) -> tuple[np.ndarray, np.ndarray]:
    apart = np.abs(queries[:, None] - rows)
    far = apart.sum(axis=2) if metric == "manhattan" else np.sqrt((apart**2).sum(axis=2))
    order = np.argsort(far, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(far, order, axis=1), order


@pytest.mark.parametrize("metric", ["euclidean", "manhattan"])
@pytest.mark.parametrize(("count", "k"), [(1, 1), (7, 7), (300, 5), (5000, 3), (5000, 200)])
def test_they_are_the_first_of_all_sorted(metric, count, k):
    rows, queries = whole(count), whole(40)
    model = ht.ml.KNeighborsRegressor(n_neighbors=k, metric=metric).fit(rows, np.arange(count))
    distances, numbers = model.kneighbors(queries)
    wanted = sorted_all(queries, rows, k, metric)
    np.testing.assert_array_equal(distances, wanted[0])
    np.testing.assert_array_equal(numbers, wanted[1])


@pytest.mark.parametrize("metric", ["euclidean", "manhattan"])
def test_what_rounding_hides_is_told_apart(metric):
    """Rows 1e-6 apart at 1e6 from the origin: squares of the norms have an error beyond the distances."""
    rows = np.array([[1e6 + 1e-6 * i] for i in (5, 3, 1, 4, 2)])
    model = ht.ml.KNeighborsRegressor(n_neighbors=3, metric=metric).fit(rows, np.zeros(5))
    assert model.kneighbors([[1e6]], return_distance=False).tolist() == [[2, 4, 1]]


def test_workers_with_queries_of_their_own_find_the_same():
    """Also one who has fewer rows than neighbors are wanted."""
    rows, queries, ends = whole(60), whole(31), [0, 2, 33, 60]

    def found(comm):
        mine = slice(ends[comm.rank], ends[comm.rank + 1])
        model = ht.ml.KNeighborsClassifier(4, comm=comm, weights="distance").fit(rows[mine], rows[mine, 0])
        asked = queries[10 * comm.rank :][: 10 + comm.rank]
        return *model.kneighbors(asked), model.predict_proba(asked)

    alone = ht.ml.KNeighborsClassifier(4, weights="distance").fit(rows, rows[:, 0])
    for rank, (distances, numbers, shares) in enumerate(run_ranks(3, found)):
        asked = queries[10 * rank :][: 10 + rank]
        wanted = alone.kneighbors(asked)
        np.testing.assert_array_equal(distances, wanted[0])
        np.testing.assert_array_equal(numbers, wanted[1])
        np.testing.assert_array_equal(shares, alone.predict_proba(asked))


@pytest.mark.parametrize("weights", ["uniform", "distance"])
def test_it_is_what_scikit_learn_foretells(weights):
    theirs = pytest.importorskip("sklearn.neighbors", reason="the extra [dev] is not installed")
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(500, 4)), rng.normal(size=(500, 2))
    queries = np.concatenate([rng.normal(size=(50, 4)), X[:5]])  # those that are there have no distance
    ours = ht.ml.KNeighborsRegressor(7, weights=weights).fit(X, y).predict(queries)
    wanted = theirs.KNeighborsRegressor(7, weights=weights).fit(X, y).predict(queries)
    np.testing.assert_allclose(ours, wanted, rtol=1e-9)
    classes = ht.ml.KNeighborsClassifier(7, weights=weights).fit(X, y[:, 0] > 0).predict_proba(queries)
    wanted = theirs.KNeighborsClassifier(7, weights=weights).fit(X, y[:, 0] > 0).predict_proba(queries)
    np.testing.assert_allclose(classes, wanted, rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda X: ht.ml.KNeighborsRegressor(9).fit(X, X[:, 0]).predict(X), "n_neighbors = 9, n_samples_fit = 8"),
        (lambda X: ht.ml.KNeighborsRegressor(0), "n_neighbors"),
        (lambda X: ht.ml.KNeighborsClassifier(metric="cosine"), "euclidean"),
        (lambda X: ht.ml.KNeighborsRegressor(1).fit(X * 1e200, X[:, 0]).predict(X), "whose squares have no end"),
    ],
)
def test_mistakes_are_named(call, says):
    with pytest.raises((ArgumentError, DataError), match=says):
        call(whole(8))
