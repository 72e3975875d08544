"""Rows for sorting."""

from __future__ import annotations

import numpy as np

import hetu as ht

from . import Sample, distinct, ints


def falling(x, axis=-1):
    """The places of a stable sort downward."""
    return np.argsort(-x, axis=axis, kind="stable")


SAMPLES = [
    Sample("sort", ht.sort, (distinct(3, 4),), lambda x: np.sort(x, -1)),
    Sample("sort", lambda x: ht.sort(x, axis=0, descending=True), (distinct(5, 2),), lambda x: -np.sort(-x, 0),
           label="falling"),
    Sample("argsort", ht.argsort, (ints(3, 8),), lambda x: np.argsort(x, -1, kind="stable"), order=0),
    Sample("argsort", lambda x: ht.argsort(x, 0, True), (ints(30, 2),), lambda x: falling(x, 0), label="falling",
           order=0),
    Sample("topk", lambda x: ht.topk(x, 3), (distinct(4, 5),), lambda x: (-np.sort(-x, -1)[:, :3], falling(x)[:, :3])),
    Sample("topk", lambda x: ht.topk(x, k=2, axis=1), (ints(2, 30, 3),),
           lambda x: (-np.sort(-x, 1)[:, :2], falling(x, 1)[:, :2]), label="ties", order=0),
]  # fmt: skip
