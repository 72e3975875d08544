"""Rows for images with the channels last; the references are those of `conv.py` and `pooling.py` between transposes."""

from __future__ import annotations

import numpy as np

from hetu.core.graph import OPS

from . import Sample, distinct, given, real
from .conv import adjoint, loops
from .pooling import pool, scattered, spread


def forward(x, w, stride, pads, **more):
    return loops(x.transpose(2, 3, 0, 1), w, stride=stride, pads=pads, **more).transpose(2, 3, 0, 1)


def rows(label, images, kernels, stride, pads, **more):
    """One row for each of the three operators."""
    attrs = {"stride": stride, "padding": pads, **more}
    h, w, _, _ = images
    out = forward(np.zeros(images), np.zeros(kernels), stride, pads, **more).shape
    options = {"label": label, "order": 0, "fixed": True, "tolerance": 2e-5, "extra": {"no_float16": True}}
    size, kernel = (h, w), kernels[2:]
    return [
        Sample(
            "conv2d_last",
            lambda x, w: OPS["conv2d_last"](x, w, **attrs),
            (real(*images), real(*kernels)),
            lambda x, w: forward(x, w, stride, pads, **more),
            **options,
        ),
        Sample(
            "conv2d_last_dx",
            lambda g, w: OPS["conv2d_last_dx"](g, w, size=size, **attrs),
            (real(*out), real(*kernels)),
            lambda g, w: adjoint(lambda x: forward(x, w, stride, pads, **more), g, images),
            **options,
        ),
        Sample(
            "conv2d_last_dw",
            lambda x, g: OPS["conv2d_last_dw"](x, g, kernel=kernel, **attrs),
            (real(*images), real(*out)),
            lambda x, g: adjoint(lambda w: forward(x, w, stride, pads, **more), g, kernels),
            **options,
        ),
    ]


def first(x):
    return x.transpose(2, 3, 0, 1)


def pooled(x):
    """The greatest value of each window of 3 x 2, a step of one down and two right, and its tap."""
    frame, best = first(x), first(pool(first(x), (3, 2), (1, 2)))
    taps = np.zeros(best.shape, np.uint8)
    for i, j, n, c in np.ndindex(*best.shape):
        taps[i, j, n, c] = frame[n, c, i : i + 3, 2 * j : 2 * j + 2].argmax()
    return best, taps


POOLING = {"kernel": (3, 2), "stride": (1, 2)}
TAPS = given(np.array([0, 3, 1, 2] * 4, np.uint8).reshape(2, 2, 2, 2))
POOLS = [
    Sample("max_pool2d_last", lambda x: OPS["max_pool2d_last"](x, **POOLING), (distinct(4, 4, 2, 3),), pooled, order=0),
    Sample(
        "max_pool2d_last_dx",
        lambda g, taps: OPS["max_pool2d_last_dx"](g, taps, size=(4, 4), **POOLING),
        (real(2, 2, 2, 2), TAPS),
        lambda g, taps: first(scattered(first(g), first(taps), (4, 4), (3, 2), (1, 2))),
        order=0,
    ),
    Sample(
        "avg_pool2d_last",
        lambda x: OPS["avg_pool2d_last"](x, **POOLING),
        (real(4, 4, 2, 3),),
        lambda x: first(pool(first(x), (3, 2), (1, 2), function=np.mean)),
        order=0,
    ),
    Sample(
        "avg_pool2d_last_dx",
        lambda g: OPS["avg_pool2d_last_dx"](g, size=(4, 4), **POOLING),
        (real(2, 2, 2, 2),),
        lambda g: first(spread(first(g), (4, 4), (3, 2), (1, 2))),
        order=0,
    ),
    Sample(
        "repeat_pixels_last",
        lambda x: OPS["repeat_pixels_last"](x, times=(3, 2)),
        (real(2, 3, 2, 4),),
        lambda x: x.repeat(3, 0).repeat(2, 1),
        order=0,
    ),
]
WIDE = {"stride": (1, 1), "padding": ((1, 1), (0, 2))}  # many channels and small kernels: `cpu_kernels/winograd.py`
WIDE_IMAGES, WIDE_KERNELS, WIDE_SLOPES = real(5, 4, 2, 32), real(33, 32, 3, 3), real(5, 4, 2, 33)
OPTIONS = {"label": "wide", "order": 0, "fixed": True, "extra": {"no_float16": True}}

SAMPLES = [
    *POOLS,
    Sample(
        "conv2d_last",
        lambda x, w: OPS["conv2d_last"](x, w, **WIDE),
        (WIDE_IMAGES, WIDE_KERNELS),
        lambda x, w: forward(x, w, (1, 1), WIDE["padding"]),
        **OPTIONS,
    ),
    Sample(
        "conv2d_last_dx",
        lambda g, w: OPS["conv2d_last_dx"](g, w, size=(5, 4), **WIDE),
        (WIDE_SLOPES, WIDE_KERNELS),
        lambda g, w: forward(g, w[:, :, ::-1, ::-1].swapaxes(0, 1), (1, 1), ((1, 1), (2, 0))),
        **OPTIONS,
    ),
    Sample(
        "conv2d_last_dw",
        lambda x, g: OPS["conv2d_last_dw"](x, g, kernel=(3, 3), **WIDE),
        (WIDE_IMAGES, WIDE_SLOPES),
        lambda x, g: loops(
            np.pad(x, (*WIDE["padding"], (0, 0), (0, 0))).transpose(3, 2, 0, 1), g.transpose(3, 2, 0, 1)
        ).swapaxes(0, 1),
        **OPTIONS,
    ),
    *rows("strided", (5, 4, 2, 3), (2, 3, 3, 2), (2, 1), ((1, 1), (0, 2))),
    *rows("points", (4, 4, 2, 3), (2, 3, 1, 1), (2, 2), ((0, 0), (0, 0))),
    *rows("chunks", (5, 4, 2, 8), (8, 8, 3, 2), (2, 1), ((1, 1), (0, 2))),  # channels for tensor cores
    *rows("depthwise", (4, 5, 1, 17), (17, 1, 3, 2), (2, 1), ((1, 1), (0, 2)), groups=17),
    *rows("dilated groups", (6, 5, 2, 4), (6, 2, 2, 2), (1, 1), ((1, 1), (0, 1)), groups=2, dilation=(2, 1)),
    *rows("few", (5, 4, 3, 3), (8, 3, 3, 2), (1, 2), ((1, 0), (1, 1))),
]
