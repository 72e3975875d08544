"""Principal components, and those without negative numbers: scikit-learn's, on any number of workers."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DTypeError
from hetu.dist import run_ranks

rng = np.random.default_rng(0)
X = rng.normal(size=(300, 4)) @ rng.normal(size=(4, 12)) + 0.1 * rng.normal(size=(300, 12)) + 5
PARTS = np.abs(rng.normal(size=(300, 4))) @ np.abs(rng.normal(size=(4, 12))) + 0.1 * rng.random((300, 12))
FEW = np.where(rng.random(X.shape) < 0.3, X, 0)
SOLVERS = ["auto", "full", "covariance_eigh", "randomized"]


def sparse_of(dense: np.ndarray):
    return pytest.importorskip("scipy.sparse", reason="the extra [dev] is not installed").csr_matrix(dense)


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("size", [3, None, 0.9])
@pytest.mark.parametrize("solver", SOLVERS)
def test_components_are_those_of_scikit_learn(solver, size, whiten):
    decomposition = pytest.importorskip("sklearn.decomposition", reason="the extra [dev] is not installed")
    theirs = decomposition.PCA(size, whiten=whiten, svd_solver="full").fit(X)
    ours = ht.ml.PCA(size, whiten=whiten, svd_solver=solver).fit(X)
    assert ours.n_components_ == theirs.n_components_
    for name in "mean_", "components_", "explained_variance_", "explained_variance_ratio_", "singular_values_":
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-6, atol=1e-7, err_msg=name)
    places = ours.transform(X[:9])
    np.testing.assert_allclose(places, theirs.transform(X[:9]), atol=1e-5)
    np.testing.assert_allclose(ours.inverse_transform(places), theirs.inverse_transform(places), atol=1e-5)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
def test_components_do_not_know_where_rows_lie(solver, wide):
    rows = X[:, :3] if not wide else X.reshape(-1, 40)

    def fitted(comm):
        model = ht.ml.PCA(3, svd_solver=solver, comm=comm).fit(rows[:7] if comm.rank else rows[7:])
        return model.components_, model.explained_variance_ratio_

    alone = ht.ml.PCA(3, svd_solver=solver).fit(np.concatenate([rows[7:], rows[:7]]))
    for components, ratio in run_ranks(2, fitted):
        np.testing.assert_allclose(components, alone.components_, atol=1e-9)
        np.testing.assert_allclose(ratio, alone.explained_variance_ratio_)


@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_rows_have_the_components_of_dense_ones(weighted):
    weight = rng.integers(0, 3, len(X)) if weighted else None
    sparse = ht.ml.PCA(4).fit(sparse_of(FEW), sample_weight=weight)
    dense = ht.ml.PCA(4, svd_solver="full").fit(FEW, sample_weight=weight)
    np.testing.assert_allclose(sparse.explained_variance_ratio_, dense.explained_variance_ratio_, rtol=1e-6)
    np.testing.assert_allclose(sparse.transform(sparse_of(FEW)), dense.transform(FEW), atol=1e-3)


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_that_count_twice_are_rows_that_stand_twice(solver):
    weight = rng.integers(0, 3, len(X))
    once = ht.ml.PCA(3, svd_solver=solver).fit(X, sample_weight=weight)
    twice = ht.ml.PCA(3, svd_solver=solver).fit(np.repeat(X, weight, axis=0))
    np.testing.assert_allclose(once.components_, twice.components_, atol=1e-6)
    np.testing.assert_allclose(once.explained_variance_, twice.explained_variance_)


def test_nearly_all_is_explained_where_values_are_alike():
    """Rows without structure, whose singular values lie close together; by the last space alone it is 97 %."""
    draws = np.random.default_rng(0)
    rows = draws.random((2000, 300)) * (draws.random((2000, 300)) < 0.02)
    found, exact = (ht.ml.PCA(10, svd_solver=solver).fit(rows) for solver in ("randomized", "full"))
    assert found.explained_variance_.sum() > 0.995 * exact.explained_variance_.sum()


def test_a_column_without_variance_has_no_part():
    model = ht.ml.PCA().fit(np.column_stack([X[:, 0], np.full(len(X), 3.0)]))
    np.testing.assert_allclose(model.components_, [[1, 0], [0, 1]])
    np.testing.assert_allclose(model.explained_variance_ratio_, [1, 0], atol=1e-12)
    np.testing.assert_allclose(model.inverse_transform(model.transform([[2.0, 3.0]])), [[2, 3]])


@pytest.mark.filterwarnings("ignore:Maximum number of iterations")
@pytest.mark.parametrize("made", [np.asarray, sparse_of], ids=["dense", "sparse"])
@pytest.mark.parametrize("size", [1, 4, 14])
def test_parts_are_those_of_scikit_learn(size, made):
    decomposition = pytest.importorskip("sklearn.decomposition", reason="the extra [dev] is not installed")
    rows = np.where(rng.random(PARTS.shape) < 0.8, PARTS, 0)
    options = {"n_components": size, "max_iter": 150, "tol": 1e-3}
    theirs = decomposition.NMF(**options, random_state=0).fit(made(rows))
    ours = ht.ml.NMF(**options).fit(made(rows))
    norm = np.sqrt((rows**2).sum())
    if size > 12:  # then both start at random, and are far from an end, which is at 0
        assert ours.reconstruction_err_ <= theirs.reconstruction_err_ + 0.05 * norm
    else:  # from singular vectors, and go the same way
        assert ours.n_iter_ == theirs.n_iter_
        np.testing.assert_allclose(ours.components_, theirs.components_, atol=1e-3)
        np.testing.assert_allclose(ours.reconstruction_err_, theirs.reconstruction_err_, rtol=1e-5)
    shares = ours.transform(made(rows))
    assert (shares >= 0).all()
    np.testing.assert_allclose(ours.inverse_transform(shares), shares @ ours.components_)
    left = np.sqrt(((rows - shares @ ours.components_) ** 2).sum())
    np.testing.assert_allclose(left, ours.reconstruction_err_, rtol=0.02, atol=0.03 * norm)


@pytest.mark.filterwarnings("ignore:Maximum number of iterations")
@pytest.mark.parametrize("name", ["load_digits", "load_breast_cancer"])
def test_bundled_data_is_kept_as_well_as_by_scikit_learn(name):
    decomposition = pytest.importorskip("sklearn.decomposition", reason="the extra [dev] is not installed")
    from sklearn import datasets

    rows, _ = getattr(datasets, name)(return_X_y=True)
    options = {"n_components": 8, "max_iter": 60}
    theirs = decomposition.NMF(**options, random_state=0).fit(rows)
    assert ht.ml.NMF(**options).fit(rows).reconstruction_err_ <= 1.02 * theirs.reconstruction_err_
    theirs, ours = decomposition.PCA(8).fit(rows), ht.ml.PCA(8).fit(rows)
    np.testing.assert_allclose(ours.explained_variance_ratio_, theirs.explained_variance_ratio_, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("size", [3, 14])
def test_parts_do_not_know_where_rows_lie(size):
    def fitted(comm):
        mine = sparse_of(PARTS)[:50] if comm.rank else sparse_of(PARTS)[50:]
        return ht.ml.NMF(size, comm=comm).fit(mine).components_

    alone = ht.ml.NMF(size).fit(sparse_of(np.concatenate([PARTS[50:], PARTS[:50]])))
    for components in run_ranks(2, fitted):
        np.testing.assert_allclose(components, alone.components_, atol=1e-6)


def test_what_does_not_fit_is_told():
    with pytest.raises(ArgumentError, match=r"n_components=13 must be between 1 and min\(n_samples, n_features\)=12"):
        ht.ml.PCA(13).fit(X)
    with pytest.raises(DTypeError, match="Sparse data was passed for X, but dense data is required"):
        ht.ml.PCA(svd_solver="full").fit(sparse_of(FEW))
