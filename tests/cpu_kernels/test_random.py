"""Random numbers in C are those of the forward functions, whoever draws which block."""

from __future__ import annotations

import math
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
NORMAL = {"kind": "normal", "a": -1.0, "b": 2.5}
DROPS = {"rate": 0.3, "window": None}


def check(name: str, arrays: list[np.ndarray], attrs: dict[str, Any], places: int = 0) -> None:
    """The same numbers, to so many units in the last place of 1, and the same bits whoever draws which block."""
    want = OPS[name].forward(np, *arrays, **attrs)
    out = np.full_like(want, np.nan)
    (call,) = OPS[name].bound(np, out, arrays, attrs)
    assert isinstance(call, CCall)
    call()
    np.testing.assert_allclose(out, want, rtol=0, atol=places * float(np.finfo(want.dtype).eps))
    whole = out.copy()
    out.fill(np.nan)
    job_by_job(call)
    np.testing.assert_array_equal(out, whole)


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normal(shape, dtype):
    check("random", [STATE], NORMAL | {"shape": shape, "dtype": dtype, "stream": 7}, places=40)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_numbers_are_independent_and_spread_as_they_should(dtype):
    """Moments, the share of the tails, and products of neighbors, of pairs and of blocks, each within 5 deviations."""
    out, count = np.empty(400_000, dtype), 400_000
    (call,) = OPS["random"].bound(
        np, out, [STATE], NORMAL | {"a": 0.0, "b": 1.0, "shape": (count,), "dtype": dtype, "stream": 2}
    )
    call()
    x = out.astype("float64")
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs((x**power).mean() - mean) < 5 * (variance / count) ** 0.5
    for far in (1.0, 2.0, 3.0, 4.0):
        share = math.erfc(far / 2**0.5)
        assert abs((abs(x) > far).mean() - share) < 5 * (share / count) ** 0.5
    for apart in (1, 2, 4, 8, 16, 64):
        assert abs((x[apart:] * x[:-apart]).mean()) < 5 / count**0.5
        assert abs((x[apart:] ** 2 * x[:-apart] ** 2).mean() - 1) < 5 * (8 / count) ** 0.5
