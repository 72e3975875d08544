"""Rows for the gated recurrent unit."""

from __future__ import annotations

import numpy as np

from hetu.core.graph import OPS

from . import Sample, real
from .lstm import ENDS, SLOPES, each_row, sigmoid
from .normalization import slopes


def gru(x, w, u, b, d, h, *lengths):
    """h after each step, (n, time, k), and the last h."""
    if lengths:
        return each_row(gru, 1, x, w, u, b, d, h, *lengths)
    hs = np.zeros((*x.shape[:2], u.shape[0]))
    for t in range(x.shape[1]):
        (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(x[:, t] @ w + b, 3, axis=1), np.split(h @ u + d, 3, axis=1)
        z = sigmoid(x_z + h_z)
        hs[:, t] = h = (1 - z) * np.tanh(x_n + sigmoid(x_r + h_r) * h_n) + z * h
    return hs, h


def gru_slopes(gh, dh, x, w, u, b, d, h, *lengths):
    """The gradients with respect to w, u, b, d and h."""

    def flat(arrays):
        return np.concatenate([array.ravel() for array in arrays])

    return slopes(lambda *others: flat(gru(x, *others, *lengths)), flat([gh, dh]), w, u, b, d, h)


def gru_dx(gh, dh, *inputs):
    hs, _, gates = OPS["gru"](*inputs)
    return OPS["gru_dx"](gh, dh, *inputs[:6], hs, gates, *inputs[6:])[1:]


GRU = (real(4, 3, 1), real(1, 6), real(2, 6), real(6), real(6), real(4, 2))

SAMPLES = [
    sample
    for label, ends in ENDS.items()
    for sample in (
        Sample("gru", lambda *inputs: OPS["gru"](*inputs)[:2], (*GRU, *ends), gru, label, fixed=True),
        Sample("gru_dx", gru_dx, (real(4, 3, 2), real(4, 2), *GRU, *ends), gru_slopes, label, **SLOPES),
    )
]
