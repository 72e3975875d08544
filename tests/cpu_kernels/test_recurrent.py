"""Recurrent steps in C equal the operators' plain forward functions, and do so however their jobs are divided."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.backend import Scratch
from hetu.cpu_kernels.c_calls import c_call
from hetu.cpu_kernels.recurrent import gru_bind, gru_dx_bind, lstm_bind, lstm_dx_bind
from hetu.ops.gru import _gru, gru_dx
from hetu.ops.lstm import _lstm, lstm_dx

from .divided import job_by_job

pytestmark = pytest.mark.compiled

SHAPES = [(1, 1, 1, 1), (3, 2, 5, 3), (4, 3, 1, 2), (16, 5, 28, 32), (49, 3, 7, 11), (101, 2, 65, 40)]  # n, time, f, k
LIES = {
    "plain": lambda a: a,
    "turned": lambda a: np.ascontiguousarray(a.T).T,
    "spread": lambda a: a.repeat(2, -1)[..., ::2],
}


LAYERS = {  # forward, backward, their recipes, gates, biases, states
    "lstm": (_lstm, lstm_dx, lstm_bind, lstm_dx_bind, 4, 1, 2),
    "gru": (_gru, gru_dx, gru_bind, gru_dx_bind, 3, 2, 1),
}


def cases(layer, rng, n, time, f, k, dtype, lies="plain", ends=True):
    """The forward function, the recipe and the arguments, of the layer and of its gradient; sequences may end early."""
    op, op_dx, bind, bind_dx, gates, biases, states = LAYERS[layer]
    wide = gates * k
    shapes = [(n, time, k), *[(n, k)] * states, (n, time, f), (f, wide), (k, wide), *[(wide,)] * biases]
    arrays = [LIES[lies](rng.normal(0, 0.3, s).astype(dtype)) for s in (*shapes, *[(n, k)] * states)]
    lengths = [rng.integers(0, time + 1, n, np.int32)] if ends else []
    inputs = [*arrays[1 + states :], *lengths]
    hs, *others = op.forward(np, *inputs)
    yield op.forward, bind, inputs
    yield op_dx.forward, bind_dx, [*arrays, hs, *others[states:], *lengths]


@pytest.mark.parametrize("ends", [False, True], ids=["all steps", "lengths"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(24)
def test_equals_numpy_however_divided(layer, shape, dtype, lies, ends):
    for forward, bind, arrays in cases(layer, np.random.default_rng(0), *shape, dtype, lies, ends):
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


@pytest.mark.parametrize("layer", LAYERS)
def test_the_gradient_may_lie_where_the_gates_do(layer):
    _, (forward, bind, arrays) = cases(layer, np.random.default_rng(1), 5, 3, 4, 6, "f")
    wanted = forward(np, *arrays)
    out = (arrays[-2], *(np.empty_like(a) for a in wanted[1:]))
    for call in bind(np, out, *arrays, scratch=Scratch()):
        call()
    for got, want in zip(out, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ends", [False, True], ids=["all steps", "lengths"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_loops_say_what_is_computed(layer, shape, dtype, ends):
    (forward, _, arrays), _ = cases(layer, np.random.default_rng(2), *shape, dtype, ends=ends)
    wanted = forward(np, *arrays)
    out = tuple(np.full_like(a, np.nan) for a in wanted)
    n, time, f, k = shape
    lengths = arrays.pop().astype(np.int64) if ends else 0
    c_call("recurrent.c", f"{layer}_plainly", dtype, *out, *arrays, time, f, k, lengths, jobs=n)()
    for got, want in zip(out, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 if dtype == "f" else 1e-12)


@pytest.mark.parametrize("layer", LAYERS)
def test_what_c_does_not_take_is_left_to_numpy(layer):
    rng = np.random.default_rng(3)
    for dtype, shape in (("e", (2, 3, 4, 5)), ("f", (0, 3, 4, 5))):
        for forward, bind, arrays in cases(layer, rng, *shape, dtype):
            assert bind(np, forward(np, *arrays), *arrays, scratch=Scratch()) is None
