"""Batch normalization bound in many pieces against its plain form."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.backend import Scratch
from hetu.core.graph import OPS
from hetu.cpu_kernels import batch_sweeps, openblas


@pytest.fixture(params=(1, 2))
def threads(request):
    """BLAS with one thread, or with two and as many lanes."""
    before = openblas.get_threads()
    if before is None:
        pytest.skip("no BLAS to be told")
    openblas.set_threads(request.param)
    yield request.param
    openblas.set_threads(before)


def bound(name, like, *arrays, **attrs):
    """What the calls of an operator write over NaN, and their number."""
    out = tuple(np.full_like(a, np.nan) for a in like) if isinstance(like, tuple) else np.full_like(like, np.nan)
    calls = OPS[name].bound(np, out, arrays, attrs, Scratch())
    for call in calls:
        call()
    return out, len(calls)


@pytest.mark.parametrize("shape", [(5, 7, 3, 33), (4, 4, 8, 32), (1, 1, 9, 5), (301, 4)])
def test_sweeps_over_pieces_make_the_same_normalization(shape, threads, monkeypatch):
    monkeypatch.setattr(batch_sweeps, "PIECE", 256)
    monkeypatch.setattr(batch_sweeps, "WIDE", 100)
    rng = np.random.default_rng(1)
    x, g = rng.standard_normal((2, *shape)) * 3 + 50
    scale, bias = rng.standard_normal((2, shape[-1]))
    axis = {"axis": len(shape) - 1}
    _, mean, var = OPS["batch_norm_train"].forward(np, x, scale, bias, **axis)
    for name, arrays in (
        ("batch_norm_train", (x, scale, bias)),
        ("batch_norm_dx", (g - 50, x, scale, mean, var)),
    ):
        attrs = {"epsilon": 1e-5, **axis}
        plain = OPS[name].forward(np, *arrays, **attrs)
        out, _ = bound(name, plain, *arrays, **attrs)
        for a, b in zip(out, plain):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11, err_msg=name)


def test_variance_is_exact_far_from_zero():
    """Squares are summed around the mean of each piece: around 0 nothing would be left of the variance."""
    x = np.random.default_rng(2).standard_normal((4096, 32)).astype(np.float32) + np.float32(1000)
    (_, _, var), _ = bound("batch_norm_train", (x, x[0], x[0]), x, x[0], x[0], axis=1, epsilon=1e-5)
    np.testing.assert_allclose(var, x.astype(np.float64).var(0), rtol=1e-5)


def test_steps_run_with_a_small_buffer_that_stays_theirs():
    """NumPy copies rows that are shorter than half of its buffer before it computes; the caller keeps his own size."""
    before = np.getbufsize()
    executor = ht.Executor([ht.placeholder("x", (2,)) + 1])
    assert executor.quiet.run(np.getbufsize) < np.getbufsize() == before
