"""Nearest neighbors."""

from __future__ import annotations

import hetu as ht
from tests.ml import Row


def theirs(name: str):
    def make():
        from sklearn import neighbors

        return getattr(neighbors, name)()

    return make


ROWS = [
    Row("KNeighborsClassifier", ht.ml.KNeighborsClassifier, theirs("KNeighborsClassifier"), "load_digits"),
    Row("KNeighborsRegressor", ht.ml.KNeighborsRegressor, theirs("KNeighborsRegressor"), "load_diabetes"),
]
