"""Batch normalization in C equals the operators' plain forward functions, however its jobs are divided."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall

from .divided import job_by_job

pytestmark = pytest.mark.compiled

SHAPES = {"one": ((1, 1, 1, 1), 1), "images": ((3, 5, 7, 9), 1), "rows": ((4, 6, 33), 1), "first": ((3, 70), 0),
          "long": ((2, 3, 40, 41), 1), "between": ((2, 3, 4, 5), 2)}  # fmt: skip


def made(name, arrays, attrs):
    """What the C call makes, at once and job by job, and what the operator means."""
    want = OPS[name].forward(np, *arrays, **attrs)
    for run in (lambda call: call(), job_by_job):
        out = tuple(np.full_like(a, np.nan) for a in want)
        (call,) = OPS[name].bound(np, out, arrays, attrs)
        assert isinstance(call, CCall)
        run(call)
        yield call, out, want


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", SHAPES)
def test_equals_numpy_however_divided(case, dtype):
    (shape, axis), rng = SHAPES[case], np.random.default_rng(0)
    x, g = (rng.normal(3, 2, shape).astype(dtype) for _ in range(2))
    scale, bias = (rng.normal(size=shape[axis]).astype(dtype) for _ in range(2))
    attrs, near = {"axis": axis, "epsilon": 1e-3}, {"atol": 2e-4 if dtype == "float32" else 1e-12, "rtol": 1e-4}
    forward = [*made("batch_norm_train", [x, scale, bias], attrs)]
    backward = [*made("batch_norm_dx", [g, x, scale, *forward[0][2][1:]], attrs)]
    for (_, whole, want), (_, parts, _) in (forward, backward):
        for one, other, right in zip(whole, parts, want):
            assert one.tobytes() == other.tobytes()
            np.testing.assert_allclose(one, right, **near)


@pytest.mark.parametrize("case", SHAPES)
def test_the_plain_loops_say_the_same(case):
    (shape, axis), rng = SHAPES[case], np.random.default_rng(1)
    arrays = [rng.normal(3, 2, shape), *(rng.normal(size=shape[axis]) for _ in range(2))]
    call, out, want = next(made("batch_norm_train", arrays, {"axis": axis, "epsilon": 1e-3}))
    CCall(call.source, "batch_norm_plainly", call.words, jobs=call.jobs)()
    for got, right in zip(out, want):
        np.testing.assert_allclose(got, right, atol=1e-12)
