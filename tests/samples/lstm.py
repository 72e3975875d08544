"""Rows for the long short-term memory."""

from __future__ import annotations

import numpy as np

from hetu.core.graph import OPS

from . import Sample, real
from .normalization import slopes


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def each_row(layer, states, x, *others):
    """A layer over sequences that end early, (outputs, *states): each row alone, as long as it is."""
    *weights, lengths = others
    weights, first = weights[: len(weights) - states], weights[len(weights) - states :]
    rows = []
    for r, n in enumerate(lengths):
        hs, *last = layer(x[r : r + 1, :n], *weights, *(state[r : r + 1] for state in first))
        rows.append([np.pad(hs, ((0, 0), (0, x.shape[1] - n), (0, 0))), *last])
    return tuple(np.concatenate(parts) for parts in zip(*rows))


def lstm(x, w, u, b, h, c, *lengths):
    """h after each step, (n, time, k), and the last h and c."""
    if lengths:
        return each_row(lstm, 2, x, w, u, b, h, c, *lengths)
    hs = np.zeros((*x.shape[:2], u.shape[0]))
    for t in range(x.shape[1]):
        i, f, g, o = np.split(x[:, t] @ w + b + h @ u, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        hs[:, t] = h = sigmoid(o) * np.tanh(c)
    return hs, h, c


def lstm_slopes(gh, dh, dc, x, w, u, b, h, c, *lengths):
    """The gradients with respect to w, u, b, h and c."""

    def flat(arrays):
        return np.concatenate([array.ravel() for array in arrays])

    return slopes(lambda *others: flat(lstm(x, *others, *lengths)), flat([gh, dh, dc]), w, u, b, h, c)


def lstm_dx(gh, dh, dc, *inputs):
    hs, _, _, *kept = OPS["lstm"](*inputs)
    return OPS["lstm_dx"](gh, dh, dc, *inputs[:6], hs, *kept, *inputs[6:])[1:]


LSTM = (real(4, 3, 1), real(1, 8), real(2, 8), real(8), real(4, 2), real(4, 2))
STATES = (real(4, 3, 2), real(4, 2), real(4, 2))

ENDS = {"": (), "lengths": (lambda rng: np.array([3, 0, 1, 2]),)}
SLOPES = {"order": 1, "fixed": True, "extra": {"no_float16": True}, "tolerance": 1e-4}

SAMPLES = [
    sample
    for label, ends in ENDS.items()
    for sample in (
        Sample("lstm", lambda *inputs: OPS["lstm"](*inputs)[:3], (*LSTM, *ends), lstm, label, fixed=True),
        Sample("lstm_dx", lstm_dx, (*STATES, *LSTM, *ends), lstm_slopes, label, **SLOPES),
    )
]
