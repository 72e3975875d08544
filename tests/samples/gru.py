"""Rows for the gated recurrent unit."""

from __future__ import annotations

import numpy as np

from hetu.core.graph import OPS

from . import Sample, real
from .lstm import sigmoid
from .normalization import slopes


def gru(x, w, u, b, d, h):
    """h after each step, (n, time, k), and the last h."""
    hs = []
    for t in range(x.shape[1]):
        (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x[:, t] @ w + b, 3, axis=1), np.split(h @ u + d, 3, axis=1)
        z = sigmoid(x_z + h_z)
        h = (1 - z) * np.tanh(x_n + sigmoid(x_r + h_r) * h_n) + z * h
        hs.append(h)
    return np.stack(hs, axis=1), h


def gru_slopes(gh, dh, x, *inputs):
    """The gradients with respect to w, u, b, d and h."""

    def flat(arrays):
        return np.concatenate([array.ravel() for array in arrays])

    return slopes(lambda *others: flat(gru(x, *others)), flat([gh, dh]), *inputs)


def gru_dx(gh, dh, *inputs):
    hs, _, gates = OPS["gru"](*inputs)
    return OPS["gru_dx"](gh, dh, *inputs, hs, gates)[1:]


GRU = (real(4, 3, 1), real(1, 6), real(2, 6), real(6), real(6), real(4, 2))

SAMPLES = [
    Sample("gru", lambda *inputs: OPS["gru"](*inputs)[:2], GRU, gru, fixed=True),
    Sample(
        "gru_dx",
        gru_dx,
        (real(4, 3, 2), real(4, 2), *GRU),
        gru_slopes,
        order=1,
        fixed=True,
        extra={"no_float16": True},
        tolerance=1e-4,
    ),
]
