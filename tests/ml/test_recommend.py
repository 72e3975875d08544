"""Alternating least squares, beside the normal equations of the papers in NumPy, user by user."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError, ValueRangeError
from hetu.dist import run_ranks

rng = np.random.default_rng(0)
TRUE = 3 + rng.normal(size=(60, 3)) @ rng.normal(size=(3, 25))
KNOWN = rng.random(TRUE.shape) < 0.6
X = np.where(KNOWN, TRUE, 0)
X[5], KNOWN[5] = 0, False  # a user who says nothing
COUNTS = np.round(np.abs(X))


def ratings(dense: np.ndarray, known: np.ndarray) -> ht.ml.Sparse:
    return ht.ml.Sparse.of(*np.nonzero(known), dense[known], dense.shape)


def explicit(said: np.ndarray, items: np.ndarray, small: float, mean: float) -> np.ndarray:
    """Y. Zhou et al. 2008, section 3.1."""
    known = np.flatnonzero(said)
    own = items[known]
    system = own.T @ own + small * max(len(known), 1) * np.eye(items.shape[1])
    return np.linalg.inv(system) @ own.T @ (said[known] - mean)


def implicit(said: np.ndarray, items: np.ndarray, small: float, alpha: float) -> np.ndarray:
    """Y. Hu et al. 2008, equation 4."""
    trust = np.diag(1 + alpha * said)
    system = items.T @ trust @ items + small * np.eye(items.shape[1])
    return np.linalg.inv(system) @ items.T @ trust @ (said > 0)


def test_factors_of_users_solve_the_equations_of_the_papers():
    model = ht.ml.ALSRecommender(4, regularization=0.2).fit(X)
    np.testing.assert_allclose(model.mean_, X[KNOWN].mean())
    found = [explicit(each, model.item_factors_, 0.2, model.mean_) for each in X]
    np.testing.assert_allclose(model.user_factors_, found, atol=1e-9)
    model = ht.ml.ALSRecommender(4, implicit=True, regularization=0.2, alpha=3).fit(ratings(COUNTS, KNOWN))
    found = [implicit(each, model.item_factors_, 0.2, 3) for each in COUNTS]
    np.testing.assert_allclose(model.user_factors_, found, atol=1e-9)


@pytest.mark.parametrize("kind", ["explicit", "implicit"])
def test_a_fit_is_that_of_a_loop_over_users_and_items(kind):
    rows = X if kind == "explicit" else COUNTS
    model = ht.ml.ALSRecommender(3, implicit=kind == "implicit", alpha=2, n_iter=4).fit(rows)
    solve, last = (explicit, model.mean_) if kind == "explicit" else (implicit, 2)
    items = 0.1 * np.random.default_rng(0).normal(size=(25, 3))
    for _ in range(4):
        users = np.array([solve(each, items, 0.1, last) for each in rows])
        items = np.array([solve(each, users, 0.1, last) for each in rows.T])
    np.testing.assert_allclose(model.item_factors_, items, atol=1e-7)


def test_what_is_not_said_is_foretold():
    model = ht.ml.ALSRecommender(3, regularization=0.01, n_iter=40).fit(X)
    users, items = np.nonzero(~KNOWN & (KNOWN.sum(axis=1, keepdims=True) > 8))
    error = np.sqrt(((model.rate(users, items) - TRUE[users, items]) ** 2).mean())
    assert error < 0.4 * TRUE.std()
    assert (model.rate(np.full(25, 5), np.arange(25)) == model.mean_).all()


def test_a_rating_of_zero_is_one_where_it_is_an_entry():
    shifted = np.where(KNOWN, TRUE - TRUE[0, KNOWN[0]][0], 0)
    said = ht.ml.ALSRecommender(2).fit(ratings(shifted, KNOWN))
    np.testing.assert_allclose(said.mean_, shifted[KNOWN].mean())
    assert not np.isclose(ht.ml.ALSRecommender(2).fit(shifted).mean_, said.mean_, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"implicit": True}], ids=str)
def test_factors_do_not_know_where_users_lie(options):
    rows = ratings(COUNTS, KNOWN)

    def fitted(comm):
        mine = slice(0, 11) if comm.rank == 0 else slice(11, None)
        model = ht.ml.ALSRecommender(3, **options, comm=comm).fit(ratings(COUNTS[mine], KNOWN[mine]))
        return model.item_factors_, model.user_factors_

    alone = ht.ml.ALSRecommender(3, **options).fit(rows)
    parts = run_ranks(2, fitted)
    for items, _ in parts:
        np.testing.assert_allclose(items, alone.item_factors_, atol=1e-8)
    np.testing.assert_allclose(np.concatenate([users for _, users in parts]), alone.user_factors_, atol=1e-8)


def test_the_best_of_what_is_not_known_is_recommended():
    model = ht.ml.ALSRecommender(3).fit(X)
    items, found = model.recommend(X, 25)
    for user in range(len(X)):
        every = np.where(KNOWN[user], -np.inf, model.rate(np.full(25, user), np.arange(25)))
        best = np.argsort(-every, kind="stable")
        np.testing.assert_allclose(found[user], every[best])
        left = int((~KNOWN[user]).sum())
        np.testing.assert_array_equal(items[user], np.where(np.arange(25) < left, best, -1))
    few, _ = model.recommend(X[7:9], 2)
    np.testing.assert_array_equal(few, items[7:9, :2])


@pytest.mark.parametrize(
    "ask, error, said",
    [
        (lambda model: model.rate([60], [0]), ValueRangeError, r"user 60 of 60(.|\n)*from 0 to 59"),
        (lambda model: model.rate([0], [-1]), ValueRangeError, "item -1 of 25"),
        (lambda model: model.recommend(X, 26), ArgumentError, "k=26 of 25 items"),
        (
            lambda model: model.set_params(implicit=True).fit(-COUNTS),
            DataError,
            "Negative values in data passed to ALSRecommender",
        ),
        (lambda model: model.set_params(regularization=0.0), ArgumentError, "regularization"),
    ],
)
def test_what_does_not_fit_is_told(ask, error, said):
    with pytest.raises(error, match=said):
        ask(ht.ml.ALSRecommender(3).fit(X))
