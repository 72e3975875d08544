"""Rows for operators that only passes for CPUs make; the references are the plain operators they stand for."""

from __future__ import annotations

from functools import partial

import numpy as np

import hetu.cpu_kernels.bags
import hetu.cpu_kernels.groups  # noqa: F401
from hetu.core.graph import OPS

from . import Sample, ints, real


def own_column(places, x):
    return np.eye(x.shape[-1], dtype=bool)[places[:, 0]]


def bag(table, ids, weights):
    return (table[ids] * weights[..., None]).sum(1)


SAMPLES = [
    Sample("bag", partial(OPS["bag"], axes=1), (real(50, 3), ints(4, 2), real(4, 2)), bag, order=0),
    Sample("own_column", lambda places, x: OPS["own_column"](places, x), (ints(4, 1), real(4, 5)), own_column, order=0),
]
