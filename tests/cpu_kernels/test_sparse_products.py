"""Sparse products in C against the forward functions: fixed and fed entries, widths of every kind, empty rows."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels import sparse
from hetu.cpu_kernels.bags import bag, spread
from hetu.cpu_kernels.c_calls import CCall, c_call

from .divided import job_by_job

pytestmark = pytest.mark.compiled
WIDTHS = [0, 1, 3, 7, 8, 15, 16, 17, 31, 40, 50, 63, 64, 70, 130]


def fix(array):
    array.flags.writeable = False
    return array


def check(name, arrays, **attrs):
    want = OPS[name].forward(np, *arrays, **attrs)
    out = np.empty_like(want)
    *others, call = OPS[name].bound(np, out, arrays, attrs)
    assert isinstance(call, CCall)
    made = []
    for run in (lambda call: call(), job_by_job, plainly):
        out.fill(77)
        for other in others:
            run(other)
        run(call)
        made.append(out.copy())
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-5 if out.dtype == np.float32 else 1e-13)
    np.testing.assert_array_equal(*made[:2])


def plainly(call):
    """By the loops that specify a call of `sparse.c`."""
    name, dtype = (
        f"{call.function}_plainly",
        call.words[-2].dtype if isinstance(call.words[-2], np.ndarray) else "float32",
    )
    (c_call("sparse.c", name, dtype, *call.words, jobs=call.jobs) if name in call.text else call)()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype, ids", [("float32", "int64"), ("float64", "int32")])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("count", [0, 1, 90])
def test_sparse_products(count, fixed, dtype, ids, width):
    rng = np.random.default_rng(count)
    rows, columns = ((size * rng.random(count) ** 2).astype(ids) for size in (12, 9))
    a, b = (rng.standard_normal((size, width)).astype(dtype) for size in (12, 9))
    if fixed:
        rows, columns = fix(rows), fix(columns)
    check("sparse_matmul", [rows, columns, rng.standard_normal(count).astype(dtype), b], size=12)
    check("sampled_matmul", [rows, columns, a, b])


def test_what_stands_in_without_a_compiler(monkeypatch):
    monkeypatch.setattr(sparse, "c_call", lambda *_, **__: None)
    rng = np.random.default_rng(0)
    rows, columns = (fix((size * rng.random(9000)).astype(np.int64) // 2 * 2) for size in (400, 90))
    arrays = [rows, columns, rng.standard_normal(9000), rng.standard_normal((90, 40))]
    out = np.full((400, 40), np.nan)
    (call,) = OPS["sparse_matmul"].bound(np, out, arrays, {"size": 400})
    call()
    np.testing.assert_allclose(out, OPS["sparse_matmul"].forward(np, *arrays, size=400), atol=1e-12)


VIEWS = {
    "turned": lambda x: x.T.copy().T,
    "part of a larger one": lambda x: np.pad(x, [(1, 2)] * x.ndim)[(slice(1, -2),) * x.ndim],
    "backward": lambda x: np.flip(x).copy()[(slice(None, None, -1),) * x.ndim],
    "every second": lambda x: np.repeat(x, 2, -1)[..., ::2],
}
RNG = np.random.default_rng(5)
ENTRIES = [RNG.integers(0, size, 30) for size in (12, 9)]
SLOTS = RNG.permutation(np.concatenate([np.arange(10), np.full(4, -1)])).reshape(7, 2)
DENSE = {
    "sparse_matmul": ([*ENTRIES, RNG.random(30), RNG.random((9, 5))], {"size": 12}),
    "sampled_matmul": ([*ENTRIES, RNG.random((12, 5)), RNG.random((9, 5))], {}),
    "bag": ([np.array([0, 3, 3, 12]), RNG.integers(0, 9, 12), RNG.random((9, 5)), RNG.random(12)], {}),
    "spread": ([np.array([0, 3, 3, 12]), RNG.integers(0, 9, 12), RNG.random((3, 5)), RNG.random(12)], {"size": 9}),
    "moe_dispatch": ([RNG.random((7, 5)), SLOTS, RNG.random((7, 2))], {"experts": 3, "capacity": 4}),
    "moe_combine": ([RNG.random((3, 4, 5)), SLOTS, RNG.random((7, 2))], {}),
    "moe_products": ([RNG.random((7, 5)), RNG.random((3, 4, 5)), SLOTS], {}),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("name", DENSE)
def test_views_are_read_by_c_and_anew_in_each_step(name, fixed, view):
    arrays, attrs = DENSE[name]
    for k, whole in enumerate(arrays):
        given = [*arrays[:k], VIEWS[view](whole), *arrays[k + 1 :]]
        if fixed:
            given = [fix(x.copy()) if x.dtype.kind == "i" and x is not given[k] else x for x in given]
        op = {"bag": bag, "spread": spread}.get(name) or OPS[name]
        out = np.empty_like(op.forward(np, *arrays, **attrs))
        calls = op.bound(np, out, given, attrs)
        assert calls and all(isinstance(call, CCall) for call in calls)
        for factor in (1, 2):  # numbers change between steps, where they lie
            if given[k].dtype.kind == "f":
                given[k][...] = factor * whole
            out.fill(77)
            for call in calls:
                call()
            np.testing.assert_allclose(out, op.forward(np, *given, **attrs), rtol=1e-12)
