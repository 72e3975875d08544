"""Naive Bayes."""

from __future__ import annotations

import hetu as ht
from tests.ml import Row


def theirs(name: str):
    def make():
        from sklearn import naive_bayes

        return getattr(naive_bayes, name)()

    return make


ROWS = [
    Row("GaussianNB", ht.ml.GaussianNB, theirs("GaussianNB"), "load_wine", answers=("predict_proba", "var_")),
    Row(
        "MultinomialNB",
        ht.ml.MultinomialNB,
        theirs("MultinomialNB"),
        "load_digits",
        answers=("predict_proba",),
        penalties={"alpha": 1},
    ),
    Row(
        "BernoulliNB",
        ht.ml.BernoulliNB,
        theirs("BernoulliNB"),
        "load_digits",
        answers=("predict_proba",),
        penalties={"alpha": 1},
    ),
]
