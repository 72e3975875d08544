"""Rows for updates joined with what makes their gradient."""

from __future__ import annotations

from hetu.core.graph import OPS

from . import Sample, given, real

SAMPLES = [
    Sample(
        "sgd_product",
        OPS["sgd_product"],
        (real(3, 4), real(3, 2), real(2, 4), given(0.5)),
        lambda p, a, b, lr: p - lr * (a @ b),
        order=0,
    ),
    Sample(
        "sgd_sum",
        OPS["sgd_sum"],
        (real(4), real(2, 3, 4), given(0.5)),
        lambda p, g, lr: p - lr * g.sum((0, 1)),
        order=0,
    ),
]
