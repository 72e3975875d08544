"""Recurrent steps in C equal the operators' plain forward functions, and do so however their jobs are divided."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.backend import Scratch
from hetu.cpu_kernels.c_calls import c_call
from hetu.cpu_kernels.compiled import compiler
from hetu.cpu_kernels.lstm import lstm_bind, lstm_dx_bind
from hetu.ops.lstm import _lstm, lstm_dx

from .divided import job_by_job

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler")

SHAPES = [(1, 1, 1, 1), (3, 2, 5, 3), (4, 3, 1, 2), (16, 5, 28, 32), (49, 3, 7, 11), (101, 2, 65, 40)]  # n, time, f, k
LIES = {
    "plain": lambda a: a,
    "turned": lambda a: np.ascontiguousarray(a.T).T,
    "spread": lambda a: a.repeat(2, -1)[..., ::2],
}


def numbers(rng, *shape):
    return rng.normal(0, 0.3, shape)


def cases(rng, n, time, f, k, dtype, lies):
    """The operator, its recipe and its arguments, forward and backward."""
    inputs = [numbers(rng, *s) for s in ((n, time, f), (f, 4 * k), (k, 4 * k), (4 * k,), (n, k), (n, k))]
    seeds = [numbers(rng, *s) for s in ((n, time, k), (n, k), (n, k))]
    seeds, inputs = ([lies(a.astype(dtype)) for a in arrays] for arrays in (seeds, inputs))
    hs, _, _, *kept = _lstm.forward(np, *inputs)
    yield _lstm.forward, lstm_bind, inputs
    yield lstm_dx.forward, lstm_dx_bind, [*seeds, *inputs, hs, *kept]


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_numpy_however_divided(shape, dtype, lies):
    for forward, bind, arrays in cases(np.random.default_rng(0), *shape, dtype, LIES[lies]):
        wanted = forward(np, *arrays)
        made = []
        for way in (lambda call: call(), job_by_job):
            out = tuple(np.full_like(a, np.nan, order="C") for a in wanted)
            for call in bind(np, out, *arrays, scratch=Scratch()):
                way(call)
            made.append(out)
        for whole, parts, want in zip(*made, wanted, strict=True):
            assert whole.tobytes() == parts.tobytes()
            np.testing.assert_allclose(whole, want, rtol=0, atol=5e-6 if dtype == "f" else 1e-12)


def test_the_gradient_may_lie_where_the_gates_do():
    _, (forward, bind, arrays) = cases(np.random.default_rng(1), 5, 3, 4, 6, "f", LIES["plain"])
    wanted = forward(np, *arrays)
    out = (arrays[-1], *(np.empty_like(a) for a in wanted[1:]))
    for call in bind(np, out, *arrays, scratch=Scratch()):
        call()
    for got, want in zip(out, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_loops_say_what_is_computed(shape, dtype):
    (forward, _, arrays), _ = cases(np.random.default_rng(2), *shape, dtype, LIES["plain"])
    wanted = forward(np, *arrays)
    out = tuple(np.full_like(a, np.nan) for a in wanted)
    n, time, f, k = shape
    c_call("lstm.c", "lstm_plainly", dtype, *out, *arrays, time, f, k, jobs=n)()
    for got, want in zip(out, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 if dtype == "f" else 1e-12)


def test_what_c_does_not_take_is_left_to_numpy():
    rng = np.random.default_rng(3)
    for dtype, shape in (("e", (2, 3, 4, 5)), ("f", (0, 3, 4, 5))):
        for forward, bind, arrays in cases(rng, *shape, dtype, LIES["plain"]):
            assert bind(np, forward(np, *arrays), *arrays, scratch=Scratch()) is None
