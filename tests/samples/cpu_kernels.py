"""Rows for operators that only passes for CPUs make; the references are the plain operators they stand for."""

from __future__ import annotations

import math

import numpy as np

import hetu.cpu_kernels.fused_update
import hetu.cpu_kernels.gelu
import hetu.cpu_kernels.loss
import hetu.cpu_kernels.phases  # noqa: F401 - all for their operators
from hetu.core.graph import OPS

from . import Sample, distinct, given, ints, real
from .conv import loops

KERNEL, PADDING = (3, 2), ((1, 1), (0, 1))
WINDOW = {"kernel": KERNEL, "padding": PADDING}


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


def gelu_tanh(x):
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return x * (1 + np.tanh(u)) / 2, (1 + np.tanh(u)) / 2 + x / 2 * slope / np.cosh(u) ** 2


def gelu_erf(x):
    below = np.array([(1 + math.erf(v / math.sqrt(2))) / 2 for v in x.flat]).reshape(x.shape)
    return x * below, below + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)


def entropy(g, logits, ids, smoothing=0.0, ignore=None):
    total = np.log(np.exp(logits).sum(-1))
    target = np.eye(logits.shape[-1])[ids] * (1 - smoothing) + smoothing / logits.shape[-1]
    counted = np.ones(ids.shape) if ignore is None else ids != ignore
    loss = (total - (target * logits).sum(-1)) * counted
    return loss, total, (g * counted)[..., None] * (np.exp(logits - total[..., None]) - target)


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
    Sample("gelu_tanh_slope", OPS["gelu_tanh_slope"], (real(3, 4),), gelu_tanh, order=0),
    Sample("gelu_erf_slope", OPS["gelu_erf_slope"], (real(3, 4),), gelu_erf, order=0),
    Sample(
        "cross_entropy_slope",
        OPS["cross_entropy_slope"],
        (real(2, 3), real(2, 3, 5), ints(2, 3)),
        entropy,
        order=0,
    ),
    Sample(
        "cross_entropy_slope",
        lambda g, x, ids: OPS["cross_entropy_slope"](g, x, ids, label_smoothing=0.1, ignore_index=2),
        (real(6), real(6, 5), ints(6)),
        lambda g, x, ids: entropy(g, x, ids, 0.1, 2),
        label="smooth",
        order=0,
    ),
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
