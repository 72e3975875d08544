"""Random numbers in C are those of the forward functions, whoever draws which block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall

from .divided import job_by_job

pytestmark = pytest.mark.compiled
STATE = np.array([12345678901234567, 3], np.uint64)
SHAPES = [(1,), (7, 5), (16,), (64, 3), (2, 3, 5, 7), (4, 16, 3, 3), (3, 17, 4, 0), (1000, 17)]
DTYPES = ["float32", "float64"]
RANGE = {"kind": "uniform", "a": -1.0, "b": 2.5}
DROPS = {"rate": 0.3, "window": None}


def check(name: str, arrays: list[np.ndarray], attrs: dict[str, Any]) -> None:
    want = OPS[name].forward(np, *arrays, **attrs)
    out = np.full_like(want, np.nan)
    (call,) = OPS[name].bound(np, out, arrays, attrs)
    assert isinstance(call, CCall)
    for run in (call, lambda: job_by_job(call)):
        out.fill(np.nan)
        run()
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    check("dropout", [x, STATE], DROPS | {"stream": 2**31, "channels": False})
    if x.ndim == 4:
        check("dropout", [x, STATE], DROPS | {"stream": 5, "channels": True})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_uniform(shape, dtype):
    check("random", [STATE], RANGE | {"shape": shape, "dtype": dtype, "stream": 7})
