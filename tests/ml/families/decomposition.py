"""Rows as sums of components."""

from __future__ import annotations

from functools import partial

import hetu as ht
from tests.ml import Row

MANY = "there are as many components as rows, of which it has more where they stand repeatedly"

ROWS = [
    Row("ALSRecommender", ht.ml.ALSRecommender, answers=("transform", "item_factors_")),
    Row(
        "NMF",
        partial(ht.ml.NMF, n_components=3),
        answers=("transform", "components_", "reconstruction_err_"),
    ),
    Row(
        "PCA",
        ht.ml.PCA,
        answers=("transform", "components_", "explained_variance_ratio_"),
        refused={f"check_sample_weight_equivalence_on_{kind}_data": MANY for kind in ("dense", "sparse")},
    ),
]
