"""Products in C equal those of NumPy, wherever their matrices lie and however their jobs are divided."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels import products
from hetu.cpu_kernels.c_calls import CCall, c_call
from hetu.cpu_kernels.products import product

from .divided import job_by_job

pytestmark = pytest.mark.compiled

SHAPES = [(1, 1, 1), (13, 7, 33), (5, 96, 64), (195, 33, 100), (400, 65, 31), (203, 1100, 70)]  # m, k, n
LIES = {
    "plain": lambda a: a,
    "turned": lambda a: np.ascontiguousarray(a.T).T,
    "part": lambda a: np.pad(a, 3)[3:-3, 3:-3],
}
LIE = [("plain", "plain"), ("turned", "plain"), ("plain", "turned"), ("part", "part"), ("turned", "turned")]


@pytest.fixture(autouse=True)
def always(monkeypatch):
    monkeypatch.setattr(products, "pays", lambda m, n, k: True)


def matrices(m, k, n, dtype, lies=LIE[0]):
    rng = np.random.default_rng(m)
    a, b = (LIES[way](rng.standard_normal(s).astype(dtype)) for way, s in zip(lies, ((m, k), (k, n))))
    return a, b, rng.standard_normal(n).astype(dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lies", LIE, ids="-".join)
@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_numpy_however_divided(shape, dtype, lies, biased):
    a, b, bias = matrices(*shape, dtype, lies)
    wanted, made = a @ b + (bias if biased else 0), []
    for way in (lambda call: call(), job_by_job):
        out = LIES["part"](np.full(wanted.shape, np.nan, dtype))
        way(product(a, b, out, bias if biased else None))
        made.append(out)
        frame = out.base
        assert np.isnan(frame).sum() == 0 and (frame[:3] == 0).all() and (frame[:, -3:] == 0).all()
    assert made[0].tobytes() == made[1].tobytes()
    np.testing.assert_allclose(made[0], wanted, rtol=0, atol=(1e-6 if dtype == "f" else 1e-14) * max(100, shape[1]))


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_columns_may_be_rows(dtype):
    a, b, _ = matrices(13, 7, 33, dtype)
    out = np.empty((33, 13), dtype).T
    product(a, b, out)()
    np.testing.assert_allclose(out, a @ b, rtol=0, atol=1e-5)


def test_plain_loops_say_what_is_computed():
    a, b, bias = matrices(13, 7, 33, "d")
    out = np.empty((13, 33))
    c_call("products.c", "product_plainly", "d", out, a, b, bias, 13, 33, 7, 33, 7, 1, 33, 1, jobs=13)()
    np.testing.assert_allclose(out, a @ b + bias, rtol=0, atol=1e-12)


def test_what_c_does_not_take_is_left_to_others():
    a, b, bias = matrices(8, 8, 8, "f")
    assert product(a.astype(np.float16), b.astype(np.float16), np.empty((8, 8), np.float16)) is None
    assert product(a[:, ::2], b[::2], np.empty((8, 8), np.float32)) is None
    assert product(a, b, np.empty((8, 8), np.float32).T, bias) is None


@pytest.mark.parametrize("shape", [(2, 100, 64), (150, 64)], ids=str)
def test_operators_use_it(shape):
    rng = np.random.default_rng(1)
    x, w, b = (rng.standard_normal(s) for s in (shape, (64, 96), (96,)))
    for name, arrays in (("matmul", (x, w)), ("linear", (x, w, b))):
        wanted = OPS[name].forward(np, *arrays)
        out = np.empty_like(wanted)
        (call,) = OPS[name].bound(np, out, arrays, {})
        assert isinstance(call, CCall) and call.function == "product"
        call()
        np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("lies", LIE, ids="-".join)
@pytest.mark.parametrize("dtype", ["f", "d"])
@pytest.mark.parametrize(
    "m, k, n", [(m, k, n) for few in (1, 2, 3) for k in (16, 70) for m, n in ((few, 33), (40, few))]
)
def test_few_rows_or_columns_go_one_by_one(m, k, n, dtype, lies):
    a, b, bias = matrices(m, k, n, dtype, lies)
    out = LIES["part"](np.full((m, n), np.nan, dtype))
    calls = OPS["matmul"].bound(np, out, [a, b], {})
    assert [call.function for call in calls] == ["gemv"] * min(m, n)
    for call in calls:
        call()
    np.testing.assert_allclose(out, a @ b, rtol=1e-4 if dtype == "f" else 1e-11, atol=1e-5)
    out = np.empty((m, n), dtype)
    for call in OPS["linear"].bound(np, out, [a, b, bias], {}):
        call()
    np.testing.assert_allclose(out, a @ b + bias, rtol=1e-4 if dtype == "f" else 1e-11, atol=1e-5)


VIEWS = {
    "every other column": lambda x: x[..., ::2],
    "columns from the last": lambda x: x[..., 8::-1],
    "rows from the last": lambda x: x[..., ::-1, :9],
    "every other column, turned": lambda x: x[..., ::2].mT,
    "the same row again": lambda x: np.broadcast_to(x[..., :1, :9], (*x.shape[:-1], 9)),
}


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_product_of_matrices_that_blas_cannot_read_is_made_in_c(view, batch):
    rng = np.random.default_rng(0)
    a, weight = view(rng.standard_normal((*batch, 9, 18))), rng.standard_normal((9, 5))
    b, bias = np.ascontiguousarray(np.broadcast_to(weight, (*batch, 9, 5))), np.ones(5)
    for name, inputs in (("matmul", (a, weight)), ("matmul", (a, b)), ("linear", (a, weight, bias))):
        out = np.empty((*batch, 9, 5))
        calls = OPS[name].bound(np, out, inputs, {})
        assert all(isinstance(call, CCall) for call in calls)
        for call in calls:
            call()
        np.testing.assert_allclose(out, a @ weight + (name == "linear"), rtol=1e-12, atol=1e-12)
