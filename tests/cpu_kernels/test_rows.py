"""Rows of tables in C against the forward functions: sizes, layouts, parts of a table, ids that occur often."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall, c_call

from ..pairs import nightly
from .divided import job_by_job

pytestmark = pytest.mark.compiled
WINDOWS = [None, ((3, 8, 16),)]  # all rows, or this rank has 3 to 7 of 16
ROWS = [((5, 1), (40,)), ((5, 7), (3, 4)), ((5, 33), (9,)), ((5, 2, 3), (6, 0)), ((5,), (30,)), ((5, 0), (4,))]
INTEGERS = [("int64", False, "int64"), *nightly((dtype, False, "int64") for dtype in ("int32", "int16", "uint8"))]
ALONG = [((5,), 9, 0), ((5, 3), 7, 0), ((4, 5), 3, 1), ((2, 5, 3), 4, 1), ((3, 5), 0, 1), ((0, 5), 2, 1)]


def numbers(shape, dtype="float32", cut=False):
    x = np.random.default_rng(sum(shape)).standard_normal((*shape, 2)).astype(dtype)
    return x[..., 0] if cut else x[..., 0].copy()


def ids_of(shape, window, dtype="int64"):
    return np.random.default_rng(1).integers(0, 5 if window is None else 16, shape).astype(dtype)


def check(name, arrays, **attrs):
    want = OPS[name].forward(np, *arrays, **attrs)
    out = np.empty_like(want, order="C")
    calls = OPS[name].bound(np, out, arrays, attrs)
    if not out.size:
        assert not any(isinstance(call, CCall) for call in calls)
        return
    *others, call = calls
    assert isinstance(call, CCall)
    plainly = c_call("rows.c", f"{call.function}_plainly", out.dtype, *call.words, jobs=call.jobs)
    for run in (call, lambda: job_by_job(call), plainly):
        out.fill(77)
        for other in others:
            other()
        run()
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype, cut, kind", [("float32", False, "int64"), ("float64", True, "int32"), *INTEGERS])
@pytest.mark.parametrize("shape, count", ROWS, ids=str)
def test_rows(shape, count, dtype, cut, kind, window):
    x, ids = numbers(shape, dtype, cut), ids_of(count, window, kind)
    check("take", [x, ids], axis=0, window=window)
    check("scatter_rows", [x, ids, numbers((*count, *shape[1:]), dtype, cut)], window=window)
    if window is None:
        check("scatter_add", [x, ids, numbers((*count, *shape[1:]), dtype, cut)])
        check("one_hot", [ids], depth=5, dtype=dtype)


@pytest.mark.parametrize(
    "rows",
    [
        numbers((6, 21))[:, 4:16].reshape(6, 4, 3),
        np.broadcast_to(numbers((6, 1, 3)), (6, 4, 3)),
        numbers((4, 6, 3)).transpose(1, 0, 2),
        numbers((6, 3, 4)).transpose(0, 2, 1),
        numbers((2, 4, 3, 3)).transpose(2, 0, 1, 3),
    ],
    ids=["cut", "repeated", "turned", "inside out", "three axes"],
)
def test_rows_that_lie_apart(rows):
    check("scatter_rows", [numbers((5, 3)), ids_of(rows.shape[:-1], None), rows], window=None)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("shape, count, axis", ALONG, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_along_an_axis(shape, count, axis, dtype, window):
    x, taken = numbers(shape, dtype), (*shape[:axis], count, *shape[axis + 1 :])
    ids = ids_of(taken, window)
    check("put_along_axis_add", [x, ids, numbers(taken, dtype)], axis=axis, window=window)
    check("take", [x, ids_of((2, 3), window)], axis=axis, window=window)
    if window is None:
        check("take_along_axis", [x, ids], axis=axis, window=window)
