"""Rows for the marks and leaves."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, real

SAMPLES = [
    Sample("stop_gradient", ht.stop_gradient, (real(3, 4),), lambda x: x, order=0),
    Sample("printed", lambda x: ht.print(x, "x"), (real(3, 4),), lambda x: x),
    Sample("barrier", OPS["barrier"], (real(3, 4), real(2)), lambda x, after: x),
    Sample("if_training", lambda a, b: ht.if_training(a, b), (real(3), real(3)), lambda a, b: b, order=0),
    Sample("constant", lambda x: x + ht.constant(value=np.ones((2, 3))), (real(2, 3),), lambda x: x + 1),
]
