"""Rows for arithmetic, functions, comparison and choice."""

from __future__ import annotations

import math

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, bools, distinct, given, ints, positive, real

A, B, ROW = real(3, 4), real(3, 4), real(4)
TIED = given(np.array([1.0, 2.0, 2.0, -1.0]))
SPECIAL = given(np.array([0.5, np.nan, np.inf, -np.inf]))
BYTES = given(np.array([0, 1, 7, 200], np.uint8))
erf = np.vectorize(math.erf)


def unary(name, reference, make=A, **rest):
    return Sample(name, OPS[name], (make,), reference, **rest)


def binary(name, reference, first=A, second=B, **rest):
    return Sample(name, OPS[name], (first, second), reference, **rest)


ARITHMETIC = [
    binary("add", lambda a, b: a + b),
    binary("add", lambda a, b: a + b, second=ROW, label="broadcast"),
    binary("add", lambda a, b: a + b, second=ints(3, 4), label="integer"),
    binary("subtract", lambda a, b: a - b),
    binary("subtract", lambda a, b: a - b, first=ROW, label="broadcast"),
    binary("multiply", lambda a, b: a * b),
    binary("multiply", lambda a, b: a * b, second=real(3, 1), label="broadcast"),
    binary("multiply", lambda a, b: a * b, second=bools(3, 4), label="mask"),
    binary("divide", lambda a, b: a / b, second=positive(3, 4)),
    binary("divide", lambda a, b: a / b, second=positive(4), label="broadcast"),
    binary("divide", lambda a, b: a / b, ints(3, 4), ints(3, 4, low=1), label="integer", order=0, tolerance=1e-4),
    binary("floor_divide", lambda a, b: a // b, second=positive(3, 4), order=0),
    binary("floor_divide", lambda a, b: a // b, ints(3, 4, low=-9), ints(4, low=1), label="integer", order=0),
    binary("remainder", lambda a, b: a % b, given(np.array([2.3, -1.2, 0.4])), given(np.array([0.7, 0.5, -1.0]))),
    binary("remainder", lambda a, b: a % b, ints(3, 4, low=-9), ints(4, low=1), label="integer", order=0),
    binary("power", lambda a, b: a**b, first=positive(3, 4)),
    Sample("power", lambda x: x**2, (A,), lambda x: x * x, label="square"),
    Sample("power", lambda x: x**3, (A,), lambda x: x * x * x, label="cube"),
    Sample("power", lambda x: x**0, (A,), np.ones_like, label="zero"),
    Sample("power", lambda x: 2**x, (A,), np.exp2, label="two"),
    binary("power", lambda a, b: a**b, ints(3, 4), ints(3, 4), label="integer", order=0),
    unary("negative", lambda x: -x),
    unary("abs", np.abs, distinct(3, 4)),
    unary("sign", np.sign, given(np.array([-2.0, 0.0, 3.0])), order=0),
    unary("square", lambda x: x * x),
    unary("reciprocal", lambda x: 1 / x, positive(3, 4)),
    unary("reciprocal", lambda x: 1 / x.astype(np.float32), ints(3, low=2), label="integer", order=0, tolerance=1e-4),
    Sample("astype", lambda x: ht.astype(x, "float64"), (A,), lambda x: x, tolerance=1.0),
    Sample("astype", lambda x: ht.astype(x, "int32"), (A,), lambda x: x.astype(int), label="integer", order=0),
]

FUNCTIONS = [
    unary("exp", np.exp),
    unary("exp", lambda x: np.exp(x.astype(np.float32)), given(np.array([0, 1, 7], np.uint8)), label="bytes", order=0,
          tolerance=1e-3),
    unary("expm1", np.expm1),
    unary("log", np.log, positive(3, 4)),
    unary("log1p", np.log1p, positive(3, 4)),
    unary("sqrt", np.sqrt, positive(3, 4)),
    unary("rsqrt", lambda x: 1 / np.sqrt(x), positive(3, 4)),
    unary("sin", np.sin),
    unary("cos", np.cos),
    unary("tanh", np.tanh),
    unary("atan", np.arctan),
    unary("erf", erf),
    unary("erf", erf, given(np.array([-8.0, -4.1, -0.47, -1e-6, 0.0, 0.46, 2.5, 3.9, 5.5])), label="range"),
    unary("erf", erf, real(40, 1000), label="blocks", order=1),
]  # fmt: skip

COMPARISON = [
    unary("floor", np.floor, order=0),
    unary("ceil", np.ceil, order=0),
    unary("round", np.round, given(np.array([-1.5, -0.4, 0.5, 1.5, 2.6])), order=0),
    Sample("clip", lambda x: ht.clip(x, -0.4, 0.8), (distinct(4, 5),), lambda x: np.clip(x, -0.4, 0.8)),
    Sample("clip", lambda x: ht.clip(x, max=0.8), (distinct(4, 5),), lambda x: np.minimum(x, 0.8), label="above"),
    Sample("clip", lambda x: ht.clip(x, 1, 3), (ints(9),), lambda x: np.clip(x, 1, 3), label="integer", order=0),
    binary("minimum", np.minimum),
    binary("minimum", np.minimum, second=ROW, label="broadcast"),
    binary("maximum", np.maximum),
    binary("maximum", np.maximum, SPECIAL, given(np.zeros(4)), label="nan", order=0),
    binary("maximum", np.maximum, given(np.zeros(4)), SPECIAL, label="nan on the right", order=0),
    binary("minimum", np.minimum, SPECIAL, given(np.zeros(4)), label="nan", order=0),
    binary("minimum", np.minimum, given(np.zeros(4)), SPECIAL, label="nan on the right", order=0),
    *(
        binary(name, getattr(np, name), first, TIED, order=0, label=label)
        for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
        for first, label in ((given(np.array([1.0, 2.0, 3.0, -2.0])), ""), (ints(4), "integer"))
    ),
    *(
        binary(name, getattr(np, name), bools(3, 4), bools(4), order=0)
        for name in ("logical_and", "logical_or", "logical_xor")
    ),
    unary("logical_not", np.logical_not, bools(3, 4), order=0),
    *(
        binary(name, getattr(np, name), ints(3, 4, low=-9, high=9), ints(4, high=7), order=0)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")
    ),
    unary("bitwise_invert", np.invert, BYTES, order=0),
    Sample(
        "bitcast",
        lambda x: OPS["bitcast"](x, dtype="uint64"),
        (ints(3, 4, low=-9),),
        lambda x: x.view(np.uint64),
        order=0,
        strict="arrays have no view",
    ),
    unary("isnan", np.isnan, SPECIAL, order=0),
    unary("isfinite", np.isfinite, SPECIAL, order=0),
    unary("isfinite", lambda x: np.ones(x.shape, bool), BYTES, order=0, label="integer"),
    Sample("where", ht.where, (bools(3, 4), A, B), np.where),
    Sample("where", ht.where, (bools(3, 1), ROW, B), np.where, label="broadcast"),
    Sample("where", lambda c, a: ht.where(c, a, 0), (bools(3, 4), A), lambda c, a: a * c, label="number"),
]

SAMPLES = ARITHMETIC + FUNCTIONS + COMPARISON
