"""Linear models of classes."""

from __future__ import annotations

from functools import partial

import hetu as ht

from .. import Row


def of_theirs(name, **options):
    from sklearn import linear_model, svm

    found = getattr(linear_model, name, None) or getattr(svm, name)
    return found(**options)


ROWS = [
    Row(
        "LogisticRegression",
        ht.ml.LogisticRegression,
        partial(of_theirs, "LogisticRegression", max_iter=1000),
        "load_digits",
        answers=("predict", "predict_proba", "coef_", "intercept_"),
    ),
    Row(
        "LinearSVC",
        ht.ml.LinearSVC,
        partial(of_theirs, "LinearSVC"),
        "load_digits",
        answers=("predict", "decision_function", "coef_", "intercept_"),
    ),
]
