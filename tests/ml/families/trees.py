"""Trees, forests and boosting."""

from __future__ import annotations

from functools import partial

import hetu as ht
from tests.ml import Row


def theirs(module: str, name: str, **options):
    def make():
        import importlib

        return getattr(importlib.import_module(f"sklearn.{module}"), name)(random_state=0, **options)

    return make


EXACT = 1e-12
FEW, DRAWN = (
    {"n_estimators": 20},
    {"check_sample_weight_equivalence_on_dense_data": "a row of weight 2 is drawn as one"},
)
ROUNDS = {"max_iter": 10}
SHARES = ("predict_proba", "feature_importances_")
ROWS = [
    Row(
        "DecisionTreeClassifier", ht.ml.DecisionTreeClassifier, theirs("tree", "DecisionTreeClassifier"), "load_iris",
        equal=EXACT, answers=SHARES,
    ),
    Row(
        "DecisionTreeRegressor", partial(ht.ml.DecisionTreeRegressor, max_leaf_nodes=8),
        theirs("tree", "DecisionTreeRegressor", max_leaf_nodes=8), "load_diabetes", equal=EXACT,
    ),
    Row(
        "RandomForestClassifier", partial(ht.ml.RandomForestClassifier, **FEW),
        theirs("ensemble", "RandomForestClassifier", **FEW), "load_digits", equal=EXACT, answers=SHARES, refused=DRAWN,
    ),
    Row(
        "RandomForestRegressor", partial(ht.ml.RandomForestRegressor, **FEW),
        theirs("ensemble", "RandomForestRegressor", **FEW), "load_digits",  # of diabetes even theirs differ by 5 %
        equal=EXACT, refused=DRAWN,
    ),
    Row(
        "GradientBoostingClassifier", partial(ht.ml.GradientBoostingClassifier, **ROUNDS),
        theirs("ensemble", "HistGradientBoostingClassifier", **ROUNDS), "load_digits", equal=EXACT, answers=SHARES,
    ),
    Row(
        "GradientBoostingRegressor", partial(ht.ml.GradientBoostingRegressor, **ROUNDS),
        theirs("ensemble", "HistGradientBoostingRegressor", **ROUNDS), "load_diabetes", equal=EXACT,
    ),
]  # fmt: skip
