"""Factorization machines beside their formula, pair by pair, and what a linear model cannot learn."""

from __future__ import annotations

from functools import partial
from itertools import combinations

import numpy as np
import pytest

import hetu as ht
from tests.ml import drawn
from tests.ml.test_gradient import Entries


def formula(X, coef, factors, intercept):
    """Equation 1: every pair of columns."""
    pairs = sum(
        np.outer(X[:, i] * X[:, j], factors[i] @ factors[j])[:, 0] for i, j in combinations(range(len(coef)), 2)
    )
    return X @ coef + pairs + intercept


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("classes", [2, 3])
def test_margins_are_those_of_the_formula(classes, sparse):
    X, y = drawn("classifier")
    rows = Entries(X) if sparse else X
    model = ht.ml.FactorizationMachineClassifier(3, max_iter=20).fit(rows, y.clip(max=classes - 1))
    assert model.factors_.shape == (classes if classes > 2 else 1, 6, 3)
    found = model.decision_function(rows).reshape(len(X), -1)
    for each in zip(found.T, model.coef_, model.factors_, model.intercept_, strict=True):
        np.testing.assert_allclose(each[0], formula(rows.array if sparse else X, *each[1:]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_learned_is_a_minimum_of_the_formula(sparse):
    X, rng = drawn("regressor")[0], np.random.default_rng(1)
    rows, weight = (Entries(X) if sparse else X), rng.uniform(0.5, 2, len(X))
    X = rows.array if sparse else X
    y = X[:, 0] * X[:, 1] - X[:, 2] + rng.normal(size=len(X))
    options = {"alpha": 0.1, "alpha_factors": 0.2, "tol": 1e-9, "max_iter": 2000}
    model = ht.ml.FactorizationMachineRegressor(2, **options).fit(rows, y, weight)

    def loss(coef, factors, intercept):
        errors = formula(X, coef, factors, intercept) - y
        return 0.5 * (np.average(errors**2, weights=weight) + 0.1 * coef @ coef + 0.2 * np.sum(factors**2))

    best = model.coef_[0], model.factors_[0], model.intercept_[0]
    assert np.linalg.norm(best[1]) > 0.5  # it has not stayed where all vectors are 0
    for _ in range(10):
        way = [1e-4 * rng.normal(size=np.shape(part)) for part in best]
        up, down = (loss(*(part + sign * step for part, step in zip(best, way))) for sign in (1, -1))
        assert abs(up - down) / 2e-4 < 3e-5 and min(up, down) > loss(*best)


@pytest.mark.parametrize("solver", ["lbfgs", partial(ht.optim.Adam, 0.05)], ids=["lbfgs", "adam"])
@pytest.mark.parametrize("sparse", [False, True])
def test_products_are_learned_that_no_linear_model_knows(sparse, solver):
    X = np.random.default_rng(0).normal(size=(300, 5))
    X[np.abs(X) < 0.3] = 0.3
    y = (X[:, 0] * X[:, 1] > 0).astype(int)
    rows = Entries(3 * X) if sparse else 3 * X  # none of which is left out
    made = ht.ml.FactorizationMachineClassifier(solver=solver, max_iter=60).fit(rows, y)
    assert made.score(rows, y) > 0.95
    assert ht.ml.LogisticRegression().fit(X, y).score(X, y) < 0.75
