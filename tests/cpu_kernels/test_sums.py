"""Sums, greatest and least over any axes in C against NumPy's, job by job too."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall, c_call

from .divided import job_by_job

pytestmark = pytest.mark.compiled


def runs_of(call):
    """The call; if it is no group, which is one job, job by job too and the plain loops that specify it."""
    if getattr(call, "function", "group") == "group":
        return [call]
    return [
        call,
        partial(job_by_job, call),
        c_call("sums.c", f"{call.function}_plainly", call.words[0].dtype, *call.words),
    ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    "shape, axis, lies",
    [
        ((3, 5, 7), (0, 2), (0, 1, 2)),
        ((2, 3, 4, 70), (0, 3), (0, 1, 2, 3)),
        ((2, 6, 9, 33), (0, 2, 3), (0, 1, 2, 3)),
        ((4, 1, 5), (0, 2), (0, 1, 2)),
        ((0, 3, 2), (0, 2), (0, 1, 2)),
        ((2, 50, 129), (1,), (0, 1, 2)),
        ((3, 2, 4, 5), (1, 2), (0, 1, 2, 3)),
        ((4, 0, 3), (1,), (0, 1, 2)),
        ((2, 6, 9, 33), (0, 2, 3), (0, 2, 3, 1)),
        ((2, 6, 9, 5), (0, 2, 3), (2, 3, 0, 1)),
        ((2, 6, 9), (1,), (1, 0, 2)),
        ((2, 6, 9), (0,), (1, 0, 2)),
        ((2, 6, 9, 3), (0, 2), (0, 1, 2, 3)),
        ((2, 6, 9), (0,), (2, 1, 0)),
    ],
)
@pytest.mark.parametrize("name", ["sum", "max", "min"])
@pytest.mark.sampled(8)
def test_folds(name, shape, axis, lies, keepdims, dtype):
    """The array lies with the axes `lies` in memory."""
    x = np.random.default_rng(0).standard_normal([shape[a] for a in lies]).astype(dtype).transpose(np.argsort(lies))
    want = OPS[name].forward(np, x, axis=axis, keepdims=keepdims)
    out = np.full_like(want, np.nan, order="C")
    *moves, call = OPS[name].bound(np, out, [x], {"axis": axis, "keepdims": keepdims})
    assert all(isinstance(c, CCall) for c in (*moves, call)) or not x.size
    for move in moves:
        move()
    for run in runs_of(call):
        out.fill(np.nan)
        run()
        np.testing.assert_allclose(out, want, rtol=1e-4 if dtype == "float32" else 1e-12, atol=1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", [s for n in (1, 2, 3, 4) for s in itertools.product((0, 3), repeat=n) if 0 in s])
def test_sums_of_no_numbers(shape):
    """Over all axes; no call has a grain of 0, by which C would divide."""
    x = ht.placeholder("x", shape)
    axes = [a for n in range(len(shape) + 1) for a in itertools.combinations(range(len(shape)), n)]
    for fold, axis in itertools.product((ht.sum, ht.norm, ht.mean), axes):
        ex, feed = ht.Executor([fold(x, axis=axis)]), {x: np.zeros(shape, "float32")}
        made = [call for step in ex.program(feed).steps for call in step.calls if isinstance(call, CCall)]
        assert all(call.grain > 0 for call in made)
        np.testing.assert_array_equal(ex.run(feed)[0], ht.evaluate(fold(x, axis=axis), feed))
