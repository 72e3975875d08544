"""Sums around axes in C against NumPy's, job by job too."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall
from hetu.cpu_kernels.compiler import compiler

from .divided import job_by_job

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    "shape, axis",
    [
        ((3, 5, 7), (0, 2)),
        ((2, 3, 4, 70), (0, 3)),
        ((2, 6, 9, 33), (0, 2, 3)),
        ((4, 1, 5), (0, 2)),
        ((0, 3, 2), (0, 2)),
    ],
)
def test_sums(shape, axis, keepdims, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    want = x.sum(axis=axis, keepdims=keepdims)
    out = np.full_like(want, np.nan)
    (call,) = OPS["sum"].bound(np, out, [x], {"axis": axis, "keepdims": keepdims})
    assert isinstance(call, CCall)
    for run in (call, lambda: job_by_job(call)):
        out.fill(np.nan)
        run()
        np.testing.assert_allclose(out, want, rtol=1e-4 if dtype == "float32" else 1e-12, atol=1e-5)
