"""k-means: what a fit means, and scikit-learn's from the same start."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError, ShapeError
from hetu.dist import run_ranks
from hetu.ml.clusters import Lots
from hetu.ml.workers import workers_of
from tests.ml import drawn

X, _ = drawn("clusterer")


@pytest.mark.parametrize("batch_size", [None, 32])
def test_labels_name_the_nearest_center(batch_size):
    model = ht.ml.KMeans(5, batch_size=batch_size).fit(X)
    squares = ((X[:, None] - model.cluster_centers_) ** 2).sum(axis=2)
    np.testing.assert_array_equal(model.labels_, squares.argmin(axis=1))
    np.testing.assert_allclose(model.inertia_, squares.min(axis=1).sum())
    np.testing.assert_allclose(model.transform(X), np.sqrt(squares))
    np.testing.assert_array_equal(model.predict(X), model.labels_)
    np.testing.assert_allclose(model.score(X), -model.inertia_)


@pytest.mark.parametrize(
    "model", [ht.ml.KMeans(3, n_init=8), ht.ml.GaussianMixture(2, n_init=8)], ids=["kmeans", "mixture"]
)
def test_of_starts_that_end_alike_the_first_counts_on_any_number_of_workers(model):
    rng = np.random.default_rng(0)
    for seed in range(8):
        rows, weight = rng.normal(size=(41, 3)), rng.exponential(size=41)

        def fitted(comm=None, mine=slice(None), rows=rows, weight=weight, seed=seed):
            own = type(model)(**model.get_params() | {"comm": comm, "random_state": seed})
            own.fit(rows[mine], None, weight[mine]).comm = None
            return own.predict(rows)

        alone = fitted()
        for found in run_ranks(3, lambda comm: fitted(comm, slice(*[0, 7, 8, 41][comm.rank :][:2]))):
            np.testing.assert_array_equal(found, alone)


def test_centers_that_are_given_are_told_again():
    model = ht.ml.KMeans(2, init=np.zeros((2, 3)))
    assert repr(model).startswith("KMeans(n_clusters=2, init=array([[0., 0., 0.]")
    assert model.set_params(n_clusters=3).n_clusters == 3


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_same_start_ends_where_scikit_learns_does(seed, empty):
    cluster = pytest.importorskip("sklearn.cluster", reason="the extra [dev] is not installed")
    rng = np.random.default_rng(seed)
    start = X[rng.choice(len(X), 7, replace=False)]
    start[:2] += 1000 * empty  # which no row is next to
    weight = rng.random(len(X))
    theirs = cluster.KMeans(7, init=start, n_init=1, tol=0).fit(X, sample_weight=weight)
    ours = ht.ml.KMeans(7, init=start, tol=0).fit(X, sample_weight=weight)
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_)
    np.testing.assert_array_equal(ours.labels_, theirs.labels_)
    np.testing.assert_allclose(ours.inertia_, theirs.inertia_)


@pytest.mark.parametrize(
    "options", [{}, {"tol": 0.0, "n_init": 3}, {"batch_size": 32}, {"init": "random"}, {"init": np.full((5, 20), 9.0)}],
    ids=str,
)  # fmt: skip
def test_sparse_rows_have_the_clusters_of_dense_ones(options):
    rng = np.random.default_rng(0)
    rows, weight = rng.poisson(0.3, (200, 20)) * rng.random((200, 20)), rng.random(200)
    rows[3] = 0
    rows[:, :10] += 3 * (rng.random((200, 1)) < 0.5) * (rng.random(10) < 0.4)
    sparse = ht.ml.Sparse.of(*np.nonzero(rows), rows[rows != 0], rows.shape)
    wanted, found = (ht.ml.KMeans(5, **options).fit(each, sample_weight=weight) for each in (rows, sparse))

    def squares(fitted, x):
        return fitted.transform(x) ** 2  # the root of a rounding error, where a row is its center, is no small number

    np.testing.assert_array_equal(found.labels_, wanted.labels_)
    for one, other in zip(
        (found.cluster_centers_, found.inertia_, squares(found, sparse), found.score(sparse), found.predict(sparse)),
        (wanted.cluster_centers_, wanted.inertia_, squares(wanted, rows), wanted.score(rows), wanted.predict(rows)),
    ):
        np.testing.assert_allclose(one, other, atol=1e-7)


def test_rows_that_count_twice_are_rows_that_stand_twice():
    weight = np.random.default_rng(0).integers(0, 3, len(X))
    once = ht.ml.KMeans(4).fit(X, sample_weight=weight)
    twice = ht.ml.KMeans(4).fit(np.repeat(X, weight, axis=0))
    np.testing.assert_allclose(once.cluster_centers_, twice.cluster_centers_)
    np.testing.assert_allclose(once.inertia_, twice.inertia_)


@pytest.mark.parametrize("options", [{"batch_size": 50}, {"init": "random"}, {"init": np.full((4, 6), 99.0)}], ids=str)
def test_a_fit_does_not_know_where_rows_lie(options):
    options |= {"n_clusters": 4}

    def fitted(comm):
        return ht.ml.KMeans(**options, comm=comm).fit(X[comm.rank :: 2] if comm.rank else X[:10]).cluster_centers_

    alone = ht.ml.KMeans(**options).fit(np.concatenate([X[:10], X[1::2]])).cluster_centers_
    for centers in run_ranks(2, fitted):
        np.testing.assert_allclose(centers, alone)


def test_lots_fall_on_rows_by_their_weight():
    weight = np.array([0.0, 1, 0, 3, 0, 0, 4, 0])
    lots = np.random.default_rng(0).random(4000)
    rows = Lots(workers_of(None), weight).fall(lots)
    np.testing.assert_allclose(np.bincount(rows, minlength=8) / 4000, weight / 8, atol=0.02)
    assert not np.bincount(rows, minlength=8)[weight == 0].any()

    def parted(comm):
        mine = slice(0, 5) if comm.rank == 0 else slice(5, 8)
        return Lots(workers_of(comm), weight[mine]).fall(lots) + 5 * comm.rank

    np.testing.assert_array_equal(np.sort(np.concatenate(run_ranks(2, parted))), np.sort(rows))


def test_fewer_different_rows_than_clusters():
    model = ht.ml.KMeans(4).fit(np.array([[0.0], [0.0], [0.0], [5.0]]))
    assert model.inertia_ == 0
    assert {*model.cluster_centers_.ravel()} == {0, 5}


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"n_clusters": 241}, DataError, "n_samples=240 should be >= n_clusters=241"),
        ({"init": np.zeros((2, 2))}, ShapeError, r"initial centers \(2, 2\) does not match the number of clusters 8"),
        ({"init": "best"}, ArgumentError, "init"),
        ({"batch_size": 0}, ArgumentError, "batch_size"),
    ],
)
def test_what_does_not_fit_is_told(options, error, said):
    with pytest.raises(error, match=said):
        ht.ml.KMeans(**options).fit(X)
