"""Rows for arrays that are assembled of parts; the references are written out in NumPy."""

from __future__ import annotations

import numpy as np

from hetu.ops import pad
from hetu.plan.memory.split import set_rows

from . import Sample, real


def with_rows(whole, part):
    made = whole.copy()
    made[1:3] = part
    return made


def filled(first, second):
    """Both parts one after the other, as the pass assembles them."""
    return set_rows(pad(first, ((0, 3), (0, 0))), second, first=2)


SAMPLES = [
    Sample(
        "set_rows",
        lambda x, y: set_rows(x, y, first=1),
        (real(4, 3), real(2, 3)),
        with_rows,
        order=0,
        fixed=True,
    ),
    Sample(
        "set_rows",
        lambda x, y: set_rows(x, y, first=1, axis=1),
        (real(2, 4, 3), real(2, 2, 3)),
        lambda x, y: np.concatenate([x[:, :1], y, x[:, 3:]], axis=1),
        "axis",
        order=0,
        fixed=True,
    ),
    Sample("set_rows", filled, (real(2, 3), real(3, 3)), lambda a, b: np.vstack([a, b]), "chain", order=0, fixed=True),
]
