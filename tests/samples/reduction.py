"""Rows for reductions."""

from __future__ import annotations

import numpy as np

import hetu as ht
from hetu.core.graph import OPS

from . import Sample, bools, distinct, given, ints, positive, real

X, CUBE = real(3, 4), real(2, 3, 4)
ZEROS = given(np.array([[0.0, 2.0, 3.0], [0.0, 0.0, 1.5], [1.0, 2.0, 0.5]]))
FLAGS = given(np.array([[True, False], [False, False], [True, True]]))


def sum_of_powers(x, p):
    return (np.abs(x) ** p).sum(-1) ** (1 / p)


SAMPLES = [
    Sample("sum", ht.sum, (X,), np.sum),
    Sample("sum", lambda x: ht.sum(x, axis=(0, -1)), (CUBE,), lambda x: x.sum((0, 2)), label="axes"),
    Sample("sum", lambda x: ht.sum(x, 1, True), (CUBE,), lambda x: x.sum(1, keepdims=True), label="keep"),
    Sample("sum", ht.sum, (bools(3, 4),), np.sum, label="truth", order=0),
    Sample("sum", lambda x: ht.sum(x, axis=0), (given(np.full((3, 2), 200, np.uint8)),), lambda x: x.sum(0),
           label="bytes", order=0),
    Sample("sum", ht.mean, (X,), np.mean, label="mean"),
    Sample("sum", lambda x: ht.mean(x, 0, True), (CUBE,), lambda x: x.mean(0, keepdims=True), label="mean_keep"),
    Sample("sum", ht.mean, (ints(3, 4),), np.mean, label="mean_integer", order=0, tolerance=1e-4),
    Sample("sum", lambda x: ht.var(x, axis=1), (X,), lambda x: x.var(1), label="var"),
    Sample("sum", lambda x: ht.var(x, correction=1), (X,), lambda x: x.var(ddof=1), label="var_correction"),
    Sample("sum", lambda x: ht.var(x, 0, 0.5), (X,), lambda x: x.var(0, ddof=0.5), label="var_fraction"),
    Sample("prod", lambda x: ht.prod(x, axis=1), (positive(3, 4),), lambda x: x.prod(1)),
    Sample("prod", lambda x: ht.prod(x, axis=1), (ZEROS,), lambda x: x.prod(1), label="zeros"),
    Sample("prod", lambda x: ht.prod(x, axis=(0, 2)), (given(np.array([[[0.0, 2.0], [3.0, 0.0]], [[1.5, 0.5]] * 2])),),
           lambda x: x.prod((0, 2)), label="axes"),
    Sample("prod_dx", lambda g, x: OPS["prod_dx"](g, x), (real(3, 1), ZEROS),
           lambda g, x: g * [[r[np.arange(3) != k].prod() for k in range(3)] for r in x]),
    Sample("cumsum", lambda x: ht.cumsum(x, axis=0), (X,), lambda x: x.cumsum(0)),
    Sample("cumsum", lambda x: ht.cumsum(x, -1, True), (X,), lambda x: x[:, ::-1].cumsum(1)[:, ::-1],
           label="reverse"),
    Sample("max", ht.max, (distinct(3, 4),), np.max),
    Sample("max", lambda x: ht.max(x, axis=1, keepdims=True), (distinct(2, 3, 4),), lambda x: x.max(1, keepdims=True),
           label="keep"),
    Sample("min", lambda x: ht.min(x, axis=(0, 2)), (distinct(2, 3, 4),), lambda x: x.min((0, 2))),
    Sample("min", ht.min, (ints(3, 4),), np.min, label="integer", order=0),
    Sample("argmax", lambda x: ht.argmax(x, -1), (X,), lambda x: x.argmax(-1), order=0),
    Sample("argmax", lambda x: ht.argmax(x), (ints(3, 4),), lambda x: x.argmax(), label="of all", order=0),
    Sample("argmin", lambda x: ht.argmin(x, keepdims=True), (ints(3, 4),), lambda x: x.argmin(keepdims=True),
           label="of all", order=0),
    Sample("argmax", lambda x: ht.argmax(x, 0, True), (ints(3, 4),), lambda x: x.argmax(0)[None], label="ties",
           order=0),
    Sample("argmin", lambda x: ht.argmin(x, axis=1), (CUBE,), lambda x: x.argmin(1), order=0),
    Sample("any", lambda x: ht.any(x, axis=1), (FLAGS,), lambda x: x.any(1), order=0),
    Sample("all", lambda x: ht.all(x, axis=1), (FLAGS,), lambda x: x.all(1), order=0),
    Sample("all", ht.all, (FLAGS,), np.all, label="axes", order=0),
    Sample("logsumexp", lambda x: ht.logsumexp(x, axis=1), (X,), lambda x: np.log(np.exp(x).sum(1))),
    Sample("logsumexp", lambda x: ht.logsumexp(x, axis=1, keepdims=True),
           (given(np.array([[-np.inf, 900.0], [-900.0, -900.0]])),),
           lambda x: np.array([[900.0], [-900 + np.log(2)]]), label="wide", order=0, tolerance=10.0),
    Sample("norm", lambda x: ht.norm(x, axis=-1), (X,), lambda x: sum_of_powers(x, 2)),
    Sample("norm", lambda x: ht.norm(x, axis=-1, ord=1), (distinct(3, 4),), lambda x: sum_of_powers(x, 1),
           label="absolute"),
    Sample("norm", lambda x: ht.norm(x, axis=-1, ord=2.5), (X,), lambda x: sum_of_powers(x, 2.5), label="power"),
    Sample("norm", lambda x: ht.norm(x, 0, float("inf"), True), (distinct(3, 4),),
           lambda x: np.abs(x).max(0, keepdims=True), label="largest"),
]  # fmt: skip
