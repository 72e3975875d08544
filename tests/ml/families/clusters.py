"""Groups of rows."""

from __future__ import annotations

from functools import partial
from typing import Any

import hetu as ht
from tests.ml import Row


def kmeans() -> Any:
    from sklearn.cluster import KMeans

    return KMeans(10, n_init=3, random_state=0)


def mixture() -> Any:
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(3, random_state=0)


DRAWN = "its start is drawn along the line of rows, so that rows in another order start elsewhere"

ROWS = [
    Row(
        "GaussianMixture",
        partial(ht.ml.GaussianMixture, n_components=3),
        mixture,
        "load_iris",
        within=0.02,
        answers=("predict", "score_samples", "means_", "covariances_", "lower_bound_"),
        refused={"check_sample_weight_equivalence_on_dense_data": DRAWN},
    ),
    Row(
        "KMeans",
        partial(ht.ml.KMeans, n_clusters=10, n_init=3),
        kmeans,
        "load_digits",
        within=0.02,
        answers=("predict", "transform", "cluster_centers_", "inertia_"),
        refused={f"check_sample_weight_equivalence_on_{kind}_data": DRAWN for kind in ("dense", "sparse")},
    ),
]
