"""Linear models, and factorization machines, which have a linear model as the nearest of scikit-learn."""

from __future__ import annotations

from functools import partial

import hetu as ht

from .. import Row


def of_theirs(name, **options):
    from sklearn import linear_model, svm

    found = getattr(linear_model, name, None) or getattr(svm, name)
    return found(**options)


COEF = ("predict", "coef_", "intercept_")
ROWS = [
    Row(
        "LinearRegression",
        ht.ml.LinearRegression,
        partial(of_theirs, "LinearRegression"),
        "load_diabetes",
        answers=COEF,
    ),
    Row("Ridge", ht.ml.Ridge, partial(of_theirs, "Ridge"), "load_diabetes", answers=COEF, penalties={"alpha": 1}),
    Row(
        "LogisticRegression",
        ht.ml.LogisticRegression,
        partial(of_theirs, "LogisticRegression", max_iter=1000),
        "load_digits",
        answers=("predict_proba", *COEF),
        penalties={"C": -1},
    ),
    Row(
        "LinearSVC",
        ht.ml.LinearSVC,
        partial(of_theirs, "LinearSVC"),
        "load_digits",
        answers=("decision_function", *COEF),
        penalties={"C": -1},
    ),
    Row(
        "FactorizationMachineClassifier",
        partial(ht.ml.FactorizationMachineClassifier, n_factors=3),
        partial(of_theirs, "LogisticRegression", max_iter=1000),
        "load_digits",
        answers=("decision_function", "factors_", *COEF),
    ),
    Row(
        "FactorizationMachineRegressor",
        partial(ht.ml.FactorizationMachineRegressor, n_factors=3, alpha_factors=0.1, tol=1e-9, max_iter=1000),
        partial(of_theirs, "Ridge", alpha=0.01),
        "load_diabetes",
    ),
]
