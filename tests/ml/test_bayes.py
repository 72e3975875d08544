"""Naive Bayes beside scikit-learn's: batches, sparse rows, weights, priors, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError

from . import drawn

NAMES = ["BernoulliNB", "GaussianNB", "MultinomialNB"]


def rows(name: str):
    X, y = drawn("classifier")
    return (np.abs(np.round(X)) if name == "MultinomialNB" else X), y


@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_scikit_learn_finds_with_weights_and_priors(name):
    theirs = pytest.importorskip("sklearn.naive_bayes", reason="the extra [dev] is not installed")
    (X, y), weight = rows(name), np.random.default_rng(1).integers(0, 4, 240)
    options = {"priors" if name == "GaussianNB" else "class_prior": [0.2, 0.5, 0.3]}
    ours = getattr(ht.ml, name)(**options).fit(X, y, weight)
    wanted = getattr(theirs, name)(**options).fit(X, y, weight)
    np.testing.assert_allclose(ours.predict_log_proba(X), wanted.predict_log_proba(X), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_one_fit(name):
    (X, y), model = rows(name), getattr(ht.ml, name)()
    order = np.argsort(y, kind="stable")  # a batch has not every class
    for part in np.array_split(order, 5):
        model.partial_fit(X[part], y[part], classes=[0, 1, 2])
    whole = type(model)().fit(X, y)
    np.testing.assert_allclose(model.predict_proba(X), whole.predict_proba(X), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(model.class_count_, whole.class_count_)


@pytest.mark.parametrize("name", ["BernoulliNB", "MultinomialNB"])
def test_sparse_rows_are_as_dense_ones(name):
    sparse = pytest.importorskip("scipy.sparse", reason="the extra [dev] is not installed")
    (X, y) = rows(name)
    X = X * (X > 1)
    dense, from_sparse = (getattr(ht.ml, name)().fit(each, y) for each in (X, sparse.csr_matrix(X)))
    found = from_sparse.predict_log_proba(sparse.csr_matrix(X))
    np.testing.assert_allclose(found, dense.predict_log_proba(X), rtol=1e-12)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda X, y: ht.ml.GaussianNB().partial_fit(X, y), ArgumentError, "classes must be passed"),
        (lambda X, y: ht.ml.GaussianNB().fit(X, y).partial_fit(X, y, [0, 1]), ArgumentError, "not the same as on last"),
        (lambda X, y: ht.ml.GaussianNB().fit(X, y).partial_fit(X, y + 1), DataError, r"label\(s\) \[3\]"),
        (lambda X, y: ht.ml.GaussianNB(priors=[0.5, 0.5]).fit(X, y), ArgumentError, "got 2 of 3"),
        (lambda X, y: ht.ml.GaussianNB(priors=[0.5, 0.4, 0.3]).fit(X, y), ArgumentError, "should be 1"),
        (lambda X, y: ht.ml.MultinomialNB().fit(X, y), DataError, "Negative values"),
        (lambda X, y: ht.ml.BernoulliNB(alpha=0.0), ArgumentError, "alpha"),
        (lambda X, y: ht.ml.GaussianNB().fit(X, y * 0), DataError, "one class: "),
    ],
)
def test_mistakes_are_named(call, error, says):
    with pytest.raises(error, match=says):
        call(*drawn("classifier"))


def test_constant_columns_are_no_reason_to_fail():
    model = ht.ml.GaussianNB().fit(np.ones((6, 2)), [0, 0, 0, 0, 1, 1])
    np.testing.assert_allclose(model.predict_proba(np.ones((1, 2))), [[2 / 3, 1 / 3]])
