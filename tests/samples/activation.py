"""Rows for activations and the softmax."""

from __future__ import annotations

import math

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, distinct, given, real

X, G, WIDE = real(3, 4), real(3, 4), given(np.array([-11.0, -5.0, -1.0, 0.0, 1.0, 5.0, 11.0]))
erf = np.vectorize(math.erf)
ROOT, CUBIC = math.sqrt(2 / math.pi), 0.044715


def gate(x):
    return (1 + erf(x / math.sqrt(2))) / 2


def tanh_gate(x):
    return (1 + np.tanh(ROOT * (x + CUBIC * x * x * x))) / 2


def gelu_slope(g, x):
    return g * (gate(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def tanh_gelu_slope(g, x):
    s = tanh_gate(x)
    return g * (s + x * s * (1 - s) * 2 * ROOT * (1 + 3 * CUBIC * x * x))


def sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


SAMPLES = [
    Sample("relu", ht.relu, (distinct(3, 4),), lambda x: np.maximum(x, 0)),
    Sample("relu", ht.relu, (distinct(2, 300),), lambda x: np.maximum(x, 0), label="rows"),
    Sample("leaky_relu", ht.leaky_relu, (distinct(3, 4),), lambda x: np.where(x > 0, x, 0.01 * x)),
    Sample("leaky_relu", lambda x: ht.leaky_relu(x, 0.3), (distinct(3, 4),), lambda x: np.where(x > 0, x, 0.3 * x),
           label="slope"),
    Sample("elu", lambda x: ht.elu(x, alpha=0.7), (distinct(3, 4),), lambda x: np.where(x > 0, x, 0.7 * np.expm1(x))),
    Sample("sigmoid", ht.sigmoid, (X,), sigmoid),
    Sample("sigmoid", ht.sigmoid, (WIDE,), sigmoid, label="wide", order=0),
    Sample("sigmoid", ht.sigmoid, (real(30, 1000),), sigmoid, label="blocks", order=1),
    Sample("softplus", ht.softplus, (X,), lambda x: np.logaddexp(0, x)),
    Sample("softplus", ht.softplus, (WIDE,), lambda x: np.logaddexp(0, x), label="wide"),
    Sample("silu", ht.silu, (X,), lambda x: x / (1 + np.exp(-x))),
    Sample("mish", ht.mish, (X,), lambda x: x * np.tanh(np.logaddexp(0, x))),
    Sample("gelu_erf", ht.gelu, (X,), lambda x: x * gate(x)),
    Sample("gelu_erf", ht.gelu, (WIDE,), lambda x: x * gate(x), label="wide"),
    Sample("gelu_erf", ht.gelu, (real(40, 1000, low=-6, high=6),), lambda x: x * gate(x), label="blocks", order=1),
    Sample("gelu_erf_dx", OPS["gelu_erf_dx"], (G, X), gelu_slope),
    Sample("gelu_tanh", lambda x: ht.gelu(x, "tanh"), (X,), lambda x: x * tanh_gate(x)),
    Sample("gelu_tanh", lambda x: ht.gelu(x, "tanh"), (given(np.array([-4.0, -3.0, 3.0, 9.0])),),
           lambda x: x * tanh_gate(x), label="wide"),
    Sample("gelu_tanh_dx", OPS["gelu_tanh_dx"], (G, X), tanh_gelu_slope),
    Sample("softmax", ht.softmax, (X,), softmax),
    Sample("softmax", lambda x: ht.softmax(x, axis=1), (real(2, 3, 4),), lambda x: softmax(x, 1), label="middle"),
    Sample("softmax", ht.softmax, (given(np.array([[900.0, 901.0], [-900.0, 900.0]])),), softmax, label="wide",
           tolerance=1e-3),
    Sample("log_softmax", ht.log_softmax, (X,), lambda x: np.log(softmax(x))),
    Sample("log_softmax", lambda x: ht.log_softmax(x, axis=0), (X,), lambda x: np.log(softmax(x, 0)), label="first"),
    Sample("log_softmax", ht.log_softmax, (given(np.array([[0.0, -900.0]])),), lambda x: x, label="wide",
           tolerance=1e-3),
]  # fmt: skip
