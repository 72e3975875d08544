"""Rows for convolutions; the references are loops over every output pixel."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, real


def loops(x, w, stride=(1, 1), pads=((0, 0), (0, 0)), dilation=(1, 1), groups=1):
    """conv2d, one output pixel at a time."""
    x = np.pad(x, ((0, 0), (0, 0), *pads))
    o, c, kh, kw = w.shape
    rows = (x.shape[2] - (kh - 1) * dilation[0] - 1) // stride[0] + 1
    columns = (x.shape[3] - (kw - 1) * dilation[1] - 1) // stride[1] + 1
    y = np.zeros((x.shape[0], o, rows, columns))
    for k in range(o):
        first = k // (o // groups) * c
        for i in range(rows):
            for j in range(columns):
                top, left = i * stride[0], j * stride[1]
                down, right = top + (kh - 1) * dilation[0] + 1, left + (kw - 1) * dilation[1] + 1
                patch = x[:, first : first + c, top : down : dilation[0], left : right : dilation[1]]
                y[:, k, i, j] = (patch * w[k]).sum(axis=(1, 2, 3))
    return y


def adjoint(function, value, shape):
    """The transpose of a linear function applied to `value`, from its value at every unit vector."""
    result = np.zeros(int(np.prod(shape)))
    for i in range(result.size):
        unit = np.zeros(result.size)
        unit[i] = 1
        result[i] = (function(unit.reshape(shape)) * value).sum()
    return result.reshape(shape)


STRIDED = {"stride": (2, 1), "pads": ((1, 1), (2, 2)), "dilation": (1, 2)}
BUILD = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}

SAMPLES = [
    Sample("conv2d", ht.conv2d, (real(2, 3, 5, 6), real(4, 3, 3, 2)), loops),
    Sample(
        "conv2d",
        lambda x, w: ht.conv2d(x, w, **BUILD),
        (real(2, 2, 5, 6), real(3, 2, 3, 2)),
        lambda x, w: loops(x, w, **STRIDED),
        label="strided",
    ),
    Sample(
        "conv2d",
        lambda x, w: ht.conv2d(x, w, stride=2, padding="same", groups=2),
        (real(2, 4, 5, 6), real(4, 2, 3, 3)),
        lambda x, w: loops(x, w, stride=(2, 2), pads=((1, 1), (0, 1)), groups=2),
        label="groups",
    ),
    Sample(
        "conv2d",
        lambda x, w: ht.conv2d(ht.reshape(x, (2, 2, x.shape[0], 4)), w, stride=2, padding="same"),
        (real(5, 2, 2, 4), real(1, 2, 3, 3)),
        lambda x, w: loops(x.reshape(2, 2, 5, 4), w, stride=(2, 2), pads=((1, 1), (0, 1))),
        label="unknown-rows",
    ),
    Sample(
        "conv2d",
        lambda x, w: ht.conv2d(x, w, padding="valid"),
        (real(70, 1, 9, 9), real(8, 1, 8, 8)),
        loops,
        label="chunks",
        order=1,
    ),
    Sample(
        "conv2d_dx",
        lambda g, w: OPS["conv2d_dx"](g, w, size=(5, 6), **BUILD),
        (real(2, 3, 3, 8), real(3, 2, 3, 2)),
        lambda g, w: adjoint(lambda x: loops(x, w, **STRIDED), g, (2, 2, 5, 6)),
    ),
    Sample(
        "conv2d_dx",
        lambda g, w: OPS["conv2d_dx"](g, w, size=(4, 4), groups=2),
        (real(2, 4, 2, 3), real(4, 1, 3, 2)),
        lambda g, w: adjoint(lambda x: loops(x, w, groups=2), g, (2, 2, 4, 4)),
        label="groups",
    ),
    Sample(
        "conv2d_dw",
        lambda x, g: OPS["conv2d_dw"](x, g, kernel=(3, 2), **BUILD),
        (real(2, 2, 5, 6), real(2, 3, 3, 8)),
        lambda x, g: adjoint(lambda w: loops(x, w, **STRIDED), g, (3, 2, 3, 2)),
    ),
    Sample(
        "conv2d_dw",
        lambda x, g: OPS["conv2d_dw"](x, g, kernel=(3, 2), groups=2),
        (real(2, 2, 4, 4), real(2, 4, 2, 3)),
        lambda x, g: adjoint(lambda w: loops(x, w, groups=2), g, (4, 1, 3, 2)),
        label="groups",
    ),
    Sample(
        "conv_transpose2d",
        lambda x, w: ht.conv_transpose2d(x, w, stride=2, padding=1, output_padding=(1, 0)),
        (real(2, 3, 3, 4), real(3, 2, 3, 4)),
        lambda x, w: adjoint(lambda y: loops(y, w, (2, 2), ((1, 1), (1, 1))), x, (2, 2, 6, 8)),
    ),
    Sample(
        "conv_transpose2d",
        lambda x, w: ht.conv_transpose2d(x, w, stride=2, padding="same"),
        (real(1, 2, 3, 3), real(2, 1, 3, 3)),
        lambda x, w: adjoint(lambda y: loops(y, w, (2, 2), ((0, 1), (0, 1))), x, (1, 1, 6, 6)),
        label="same",
    ),
]
