"""Rows for operators that only passes for CPUs make; the references are the plain operators they stand for."""

from __future__ import annotations

import numpy as np

import hetu.cpu_kernels.groups
import hetu.cpu_kernels.phases  # noqa: F401 - all for their operators
from hetu.core.graph import OPS

from . import Sample, distinct, given, ints, real
from .conv import loops

KERNEL, PADDING = (3, 2), ((1, 1), (0, 1))
WINDOW = {"kernel": KERNEL, "padding": PADDING}


def own_column(places, x):
    return np.eye(x.shape[-1], dtype=bool)[places[:, 0]]


def convolved(x, w, b):
    """relu(max_pool(conv(x) + b)) of images (c, h, w, n), one window at a time, as (o, positions)."""
    y = loops(x.transpose(3, 0, 1, 2), w, pads=PADDING) + b[:, None, None]
    n, o, rows, columns = y.shape
    y = y[:, :, : rows // 2 * 2, : columns // 2 * 2].reshape(n, o, rows // 2, 2, columns // 2, 2)
    return np.maximum(y.max(axis=(3, 5)), 0).transpose(1, 2, 3, 0).reshape(o, -1)


def fused_convolution(x, w, b):
    columns = OPS["phase_columns"](x, **WINDOW)
    return OPS["phase_pool"](OPS["matmul"](OPS["phase_weights"](w, b), columns))[0]


def columns(x):
    c, *_, n = x.shape
    frame = np.pad(x, ((0, 0), *PADDING, (0, 0)))
    rows, cols = (frame.shape[1] - 2) // 2, (frame.shape[2] - 1) // 2
    made = [
        [frame[k, 2 * i + u, 2 * j + v] for i in range(rows) for j in range(cols)]
        for k in range(c)
        for u in range(4)
        for v in range(3)
    ]
    return np.vstack([np.array(made).reshape(len(made), -1), np.ones((1, rows * cols * n))])


def weights(w, b):
    o, c, i, j = w.shape
    made = np.zeros((4, o, c * (i + 1) * (j + 1) + 1))
    for phase in range(4):
        for place in np.ndindex(o, c, i, j):
            row, column = place[2] + phase // 2, place[3] + phase % 2
            made[phase, place[0], (place[1] * (i + 1) + row) * (j + 1) + column] = w[place]
        made[phase, :, -1] = b
    return made.reshape(4 * o, -1)


def adjoint_of(function, shape, d):
    """The transpose of a linear function applied to d, one unit vector after the other."""
    made = np.zeros(shape)
    for place in np.ndindex(*shape):
        unit = np.zeros(shape)
        unit[place] = 1
        made[place] = (function(unit) * d).sum()
    return made


def pooled(z):
    phases = z.reshape(4, -1, z.shape[1])
    chosen = np.zeros(phases.shape, bool)
    for o, place in np.ndindex(*phases.shape[1:]):
        best = phases[:, o, place].argmax()
        chosen[best, o, place] = phases[best, o, place] > 0
    return np.maximum(phases.max(axis=0), 0), chosen


IMAGES = real(2, 5, 4, 3)


SAMPLES = [
    Sample("phase_columns", lambda x: OPS["phase_columns"](x, **WINDOW), (IMAGES,), columns, order=0, fixed=True),
    Sample(
        "phase_columns",
        fused_convolution,
        (IMAGES, real(3, 2, *KERNEL), real(3)),
        convolved,
        label="whole",
        order=0,
        fixed=True,
    ),
    Sample(
        "phase_columns_dx",
        lambda d: OPS["phase_columns_dx"](d, size=(5, 4), **WINDOW),
        (real(24, 12),),
        lambda d: adjoint_of(lambda x: columns(x)[:-1], (2, 5, 4, 3), d),
        order=0,
        fixed=True,
    ),
    Sample("phase_weights", OPS["phase_weights"], (real(3, 2, *KERNEL), real(3)), weights, order=0, fixed=True),
    Sample(
        "phase_weights_dx",
        lambda d: OPS["phase_weights_dx"](d, kernel=KERNEL),
        (real(12, 25),),
        lambda d: (
            adjoint_of(lambda w: weights(w, np.zeros(3)), (3, 2, *KERNEL), d),
            adjoint_of(lambda b: weights(np.zeros((3, 2, *KERNEL)), b), (3,), d),
        ),
        order=0,
        fixed=True,
    ),
    Sample("phase_pool", OPS["phase_pool"], (distinct(8, 6),), pooled, order=0, fixed=True),
    Sample(
        "phase_pool",
        OPS["phase_pool"],
        (given([[1.0, -1.0, 0.0, 2.0], [1.0, -1.0, 0.0, 1.0], [1.0, -2.0, 0.0, 2.0], [0.0, -1.0, 0.0, 2.0]]),),
        pooled,
        label="ties",
        order=0,
        fixed=True,
    ),
    Sample("own_column", lambda places, x: OPS["own_column"](places, x), (ints(4, 1), real(4, 5)), own_column, order=0),
]
