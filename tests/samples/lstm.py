"""Rows for the long short-term memory."""

from __future__ import annotations

import numpy as np

from hetu.core.graph import OPS

from . import Sample, real
from .normalization import slopes


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def lstm(x, w, u, b, h, c):
    """h after each step, (n, time, k), and the last h and c."""
    hs = []
    for t in range(x.shape[1]):
        i, f, g, o = np.split(x[:, t] @ w + b + h @ u, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        hs.append(h)
    return np.stack(hs, axis=1), h, c


def lstm_slopes(gh, dh, dc, x, *inputs):
    """The gradients with respect to w, u, b, h and c."""

    def flat(arrays):
        return np.concatenate([array.ravel() for array in arrays])

    return slopes(lambda *others: flat(lstm(x, *others)), flat([gh, dh, dc]), *inputs)


def lstm_dx(gh, dh, dc, *inputs):
    hs, _, _, *kept = OPS["lstm"](*inputs)
    return OPS["lstm_dx"](gh, dh, dc, *inputs, hs, *kept)[1:]


LSTM = (real(4, 3, 1), real(1, 8), real(2, 8), real(8), real(4, 2), real(4, 2))
STATES = (real(4, 3, 2), real(4, 2), real(4, 2))

SAMPLES = [
    Sample("lstm", lambda *inputs: OPS["lstm"](*inputs)[:3], LSTM, lstm, fixed=True),
    Sample(
        "lstm_dx",
        lstm_dx,
        (*STATES, *LSTM),
        lstm_slopes,
        order=1,
        fixed=True,
        extra={"no_float16": True},
        tolerance=1e-4,
    ),
]
