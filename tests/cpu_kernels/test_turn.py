"""Copies of turned arrays in C against NumPy's, job by job too, alone and where operators ask for them."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.backend import Scratch
from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall
from hetu.cpu_kernels.compiler import compiler
from hetu.cpu_kernels.turn import is_turned, turned

from .divided import job_by_job

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")
# sizes in memory, the order of axes, and whether C copies them
CASES = {
    "matrix": ((70, 65), (1, 0), True),
    "images with their channels last": ((9, 7, 3, 33), (2, 3, 0, 1), True),
    "images with their channels first": ((3, 33, 9, 7), (2, 3, 0, 1), True),
    "few channels": ((40, 40, 4, 3), (2, 3, 0, 1), True),
    "whole squares": ((128, 64), (1, 0), True),
    "an axis of one": ((1, 80, 1, 64), (0, 3, 2, 1), True),
    "all axes reversed": ((3, 4, 5, 6, 7, 8), (5, 4, 3, 2, 1, 0), True),
    "too many axes": ((3, 2, 3, 4, 3, 2, 3, 8), (7, 6, 5, 4, 3, 2, 1, 0), False),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int64"])
@pytest.mark.parametrize("case", CASES)
def test_a_copy(case, dtype):
    shape, order, compiled = CASES[case]
    x = np.random.default_rng(0).integers(0, 99, shape).astype(dtype).transpose(order)
    out = np.empty(x.shape, dtype)
    call = turned(out, x)
    assert is_turned(x) and isinstance(call, CCall) == compiled
    for run in (lambda: call(), lambda: job_by_job(call))[: 1 + compiled]:
        out[...] = 1
        run()
        np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize("step", [slice(None, None, 2), slice(None, None, -1)])
def test_a_view_with_gaps_or_backward(step):
    x = np.arange(90.0 * 80).reshape(90, 80)[step].T
    out = np.empty(x.shape)
    turned(out, x)()
    np.testing.assert_array_equal(out, x)


def test_half_precision_goes_by_numpy():
    x = np.arange(80 * 64).astype(np.float16).reshape(80, 64).T
    out = np.empty(x.shape, np.float16)
    turned(out, x)()
    np.testing.assert_array_equal(out, x)


@pytest.mark.parametrize(
    "x", [np.ones((80, 64)), np.ones((8, 6)).T, np.ones((80, 64))[:, ::2], np.float64(1), np.ones((0, 9)).T]
)
def test_what_is_not_turned(x):
    assert not is_turned(np.asarray(x))


def test_a_reshape_and_a_group_copy_in_c():
    x = np.random.default_rng(0).standard_normal((9, 8, 3, 33)).astype(np.float32).transpose(2, 3, 0, 1)
    out = np.empty((3, 33 * 72), np.float32)
    (call,) = OPS["reshape"].bound(np, out, [x], {"shape": out.shape}, Scratch())
    call()
    assert isinstance(call, CCall)
    np.testing.assert_array_equal(out, x.reshape(out.shape))
    a, b = (ht.placeholder(name, shape) for name, shape in (("a", (9, 8, 3, 33)), ("b", (3, 33, 9, 8))))
    y = ht.exp(ht.permute_dims(a, (2, 3, 0, 1)) * b) + b
    feed = {a: np.ascontiguousarray(x.transpose(2, 3, 0, 1)), b: np.ascontiguousarray(x)}
    np.testing.assert_allclose(ht.evaluate(y, feed), np.exp(x * x) + x, rtol=1e-5)
