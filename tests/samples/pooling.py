"""Rows for pooling and resizing; the references are loops over every output pixel."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, distinct, given, real


def pool(x, kernel, stride, pads=(0, 0), fill=-np.inf, function=np.max):
    """`function` of every window."""
    x = np.pad(x, ((0, 0), (0, 0), (pads[0],) * 2, (pads[1],) * 2), constant_values=fill)
    rows, columns = ((x.shape[2 + a] - kernel[a]) // stride[a] + 1 for a in (0, 1))
    y = np.zeros((*x.shape[:2], rows, columns))
    for i in range(rows):
        for j in range(columns):
            top, left = i * stride[0], j * stride[1]
            y[:, :, i, j] = function(x[:, :, top : top + kernel[0], left : left + kernel[1]], axis=(2, 3))
    return y


def scattered(g, taps, size, kernel, stride):
    dx = np.zeros((*g.shape[:2], *size))
    for n, c, i, j in np.ndindex(*g.shape):
        down, right = divmod(int(taps[n, c, i, j]), kernel[1])
        dx[n, c, i * stride[0] + down, j * stride[1] + right] += g[n, c, i, j]
    return dx


def picked(x, taps, kernel, stride):
    y = np.zeros(taps.shape)
    for n, c, i, j in np.ndindex(*taps.shape):
        down, right = divmod(int(taps[n, c, i, j]), kernel[1])
        y[n, c, i, j] = x[n, c, i * stride[0] + down, j * stride[1] + right]
    return y


def spread(g, size, kernel, stride):
    dx = np.zeros((*g.shape[:2], *size))
    for n, c, i, j in np.ndindex(*g.shape):
        top, left = i * stride[0], j * stride[1]
        dx[n, c, top : top + kernel[0], left : left + kernel[1]] += g[n, c, i, j] / (kernel[0] * kernel[1])
    return dx


def bilinear(x, size):
    """Each new pixel from its four neighbors, one by one."""
    h, w = x.shape[2:]
    y = np.zeros((*x.shape[:2], *size))
    for i, j in np.ndindex(*size):
        a = min(max((i + 0.5) * h / size[0] - 0.5, 0), h - 1)
        b = min(max((j + 0.5) * w / size[1] - 0.5, 0), w - 1)
        top, left = int(a), int(b)
        for r, c in np.ndindex(2, 2):
            weight = abs(1 - r - (a - top)) * abs(1 - c - (b - left))
            y[:, :, i, j] += weight * x[:, :, min(top + r, h - 1), min(left + c, w - 1)]
    return y


TAPS = given(np.array([0, 3, 1, 2] * 4, np.uint8).reshape(2, 2, 2, 2))
WIDE = {"kernel": (3, 2), "stride": (1, 2)}

SAMPLES = [
    Sample("max_pool2d", lambda x: ht.max_pool2d(x, 2), (distinct(2, 2, 4, 6),), lambda x: pool(x, (2, 2), (2, 2))),
    Sample(
        "max_pool2d",
        lambda x: ht.max_pool2d(x, (3, 2), stride=(2, 1), padding=1),
        (distinct(1, 2, 5, 4),),
        lambda x: pool(x, (3, 2), (2, 1), (1, 1)),
        label="overlapping",
    ),
    Sample(
        "max_pool2d",
        lambda x: ht.max_pool2d(x, 2, stride=3),
        (distinct(1, 2, 6, 7),),
        lambda x: pool(x, (2, 2), (3, 3)),
        label="apart",
    ),
    Sample(
        "max_pool2d",
        lambda x: OPS["max_pool2d"](x, kernel=2),
        (given(np.array([[[[1.0, 2, 5, 5], [2, 2, 5, 5]]]])),),
        lambda x: (np.array([[[[2.0, 5.0]]]]), np.array([[[[1, 0]]]])),
        label="ties-go-to-the-first",
        order=0,
    ),
    Sample(
        "max_pool2d_dx",
        lambda g, taps: OPS["max_pool2d_dx"](g, taps, size=(4, 4), **WIDE),
        (real(2, 2, 2, 2), TAPS),
        lambda g, taps: scattered(g, taps, (4, 4), (3, 2), (1, 2)),
    ),
    Sample(
        "max_pool2d_pick",
        lambda x, taps: OPS["max_pool2d_pick"](x, taps, **WIDE),
        (real(2, 2, 4, 4), TAPS),
        lambda x, taps: picked(x, taps, (3, 2), (1, 2)),
    ),
    Sample(
        "avg_pool2d",
        lambda x: ht.avg_pool2d(x, (2, 3), stride=(2, 1), padding=1),
        (real(2, 2, 4, 5),),
        lambda x: pool(x, (2, 3), (2, 1), (1, 1), 0.0, np.mean),
    ),
    Sample(
        "avg_pool2d_dx",
        lambda g: OPS["avg_pool2d_dx"](g, size=(4, 5), **WIDE),
        (real(2, 2, 2, 2),),
        lambda g: spread(g, (4, 5), (3, 2), (1, 2)),
    ),
    Sample("global_avg_pool2d", ht.global_avg_pool2d, (real(2, 3, 4, 2),), lambda x: x.mean(axis=(2, 3))),
    Sample("global_max_pool2d", ht.global_max_pool2d, (distinct(2, 3, 4, 2),), lambda x: x.max(axis=(2, 3))),
    Sample(
        "repeat_pixels",
        lambda x: OPS["repeat_pixels"](x, times=(2, 3)),
        (real(2, 2, 3, 4),),
        lambda x: x.repeat(2, 2).repeat(3, 3),
    ),
    Sample(
        "interpolate", lambda x: ht.interpolate(x, scale=2), (real(2, 2, 1, 3),), lambda x: x.repeat(2, 2).repeat(2, 3)
    ),
    Sample(
        "interpolate",
        lambda x: ht.interpolate(x, (5, 3)),
        (real(2, 2, 2, 4),),
        lambda x: x[:, :, [0, 0, 1, 1, 1]][..., [0, 2, 3]],
    ),
    Sample(
        "interpolate",
        lambda x: ht.interpolate(x, scale=(2, 3), method="bilinear"),
        (real(2, 2, 2, 4),),
        lambda x: bilinear(x, (4, 12)),
        label="bilinear",
    ),
]
