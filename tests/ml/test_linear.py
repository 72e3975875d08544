"""Least squares beside NumPy's on columns that are hard, sparse rows beside dense ones, and the triangle of rows."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import HetuError
from hetu.dist import run_ranks
from hetu.ml.workers import Workers, workers_of
from tests.ml.test_gradient import Entries

RNG = np.random.default_rng(0)


def polynomials(rows=3000, degree=9):
    """Columns that are nearly dependent: products of them keep no digit."""
    return np.linspace(0, 1, rows)[:, None] ** np.arange(1, degree + 1)


COLUMNS = {
    "plain": RNG.normal(size=(300, 5)),
    "far from 0": RNG.normal(size=(300, 5)) + 1e6,
    "of many sizes": RNG.normal(size=(300, 5)) * [1e-6, 1e-3, 1, 1e3, 1e6],
    "nearly dependent": polynomials(),
    "constant": np.concatenate([RNG.normal(size=(300, 3)), np.full((300, 2), [7.0, 1e9])], axis=1),
    "twice": np.repeat(RNG.normal(size=(300, 3)), 2, axis=1),
    "more than rows": RNG.normal(size=(20, 30)),
    "all constant": np.full((30, 2), [1.0, 5.0]),
}


def wanted(X, y, weight, alpha=0.0):
    """By the normal equations without a short cut: means taken off, one matrix."""
    means = np.average(X, axis=0, weights=weight), np.average(y, axis=0, weights=weight)
    root = np.sqrt(weight)[:, None]
    left = np.concatenate([root * (X - means[0]), np.sqrt(alpha) * np.eye(X.shape[1])])
    right = np.concatenate([root * (y - means[1]), np.zeros((X.shape[1], y.shape[1]))])
    coef = np.linalg.lstsq(left, right, rcond=None)[0]
    return X @ coef + means[1] - means[0] @ coef


@pytest.mark.parametrize("model", [ht.ml.LinearRegression(), ht.ml.Ridge(alpha=0.5)], ids=["least squares", "ridge"])
@pytest.mark.parametrize("name", COLUMNS)
def test_fits_are_those_of_one_matrix(name, model):
    X, rng = COLUMNS[name], np.random.default_rng(1)
    y, weight = rng.normal(size=(len(X), 2)) + 100, rng.uniform(0.5, 2, len(X))
    model.fit(X, y, weight)
    np.testing.assert_allclose(model.predict(X), wanted(X, y, weight, getattr(model, "alpha", 0.0)), rtol=1e-6)
    one = model.fit(X, y[:, 0], weight)
    assert one.coef_.shape == (X.shape[1],) and type(one.intercept_) is float and one.predict(X).shape == (len(X),)


@pytest.mark.parametrize("span", [3, 20, 120])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("model", [ht.ml.LinearRegression, ht.ml.Ridge])
def test_sparse_rows_fit_as_dense_ones(model, intercept, span):
    """However many digits lie between small columns and large ones: none drowns in the others."""
    rng = np.random.default_rng(2)
    X = Entries(rng.normal(size=(200, 8)) * np.logspace(0, span, 8))
    y, weight = rng.normal(size=(200, 2)) + 5, rng.integers(0, 3, 200)
    made = [model(fit_intercept=intercept).fit(rows, y, weight) for rows in (X, X.array)]
    sizes = np.linalg.norm(X.array, axis=0)
    np.testing.assert_allclose(made[0].coef_ * sizes, made[1].coef_ * sizes, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(made[0].intercept_, made[1].intercept_, rtol=1e-7)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", COLUMNS)
def test_the_triangle_has_the_products_of_all_rows(name, workers):
    X = COLUMNS[name]

    def found(comm):
        return workers_of(comm).triangle(X[comm.rank :: workers])

    for triangle in run_ranks(workers, found):
        sizes = np.linalg.norm(X, axis=0)
        assert triangle.shape == (min(X.shape), X.shape[1]) and not np.tril(triangle, -1).any()
        np.testing.assert_allclose((triangle / sizes).T @ (triangle / sizes), (X / sizes).T @ (X / sizes), atol=1e-12)


def test_nearly_dependent_columns_keep_the_digits_that_their_products_lose():
    X, wanted = polynomials(), np.arange(1.0, 10.0)
    triangle = Workers().triangle(np.concatenate([X, X @ wanted[:, None]], axis=1))
    found = np.linalg.lstsq(triangle[:, :9], triangle[:, 9], rcond=1e-15)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-7)
    by_products = np.linalg.solve(X.T @ X, X.T @ (X @ wanted))
    assert np.abs(by_products - wanted).max() > 1e-6


WRONG = [  # what is fitted to three rows, and what is said of it
    (ht.ml.Ridge, [None, 1, 2], "contains NaN", "drop these rows"),
    (ht.ml.Ridge, None, "requires y to be passed", "pass y, one for each row"),
    (ht.ml.Ridge, [1, 2], "inconsistent numbers of samples: [3, 2]", "pass y of the length of X"),
    (ht.ml.Ridge, ["a", "b", "c"], "no numbers", "pass numbers"),
    (ht.ml.LogisticRegression, [None, 1, 2], "Input y contains NaN", "drop these rows"),
    (ht.ml.LogisticRegression, [0.5, 1, 2], "Unknown label type: continuous", "use a regressor"),
    (ht.ml.LogisticRegression, [1, 1, 1], "only one class: ", "rows of another class"),
]


@pytest.mark.parametrize(("model", "y", "said", "fix"), WRONG, ids=[f"{m.__name__}-{s}" for m, _, s, _ in WRONG])
def test_targets_that_are_none_are_told_with_a_remedy(model, y, said, fix):
    with pytest.raises(HetuError) as told:
        model().fit([[0.0], [1.0], [2.0]], y)
    assert said in str(told.value) and fix in str(told.value)


def test_rows_of_other_columns_and_models_that_are_not_fitted_are_told():
    model = ht.ml.Ridge()
    with pytest.raises(ht.ml.NotFittedError, match="not fitted yet"):
        model.predict([[1.0]])
    model.fit([[0.0], [1.0]], [0, 1])
    with pytest.raises(HetuError, match=r"X has 2 features, but Ridge is expecting 1[\s\S]*pass the columns"):
        model.predict([[1.0, 2.0]])
