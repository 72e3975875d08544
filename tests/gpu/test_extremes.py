"""Folds of rows that a wrong beginning or comparison would spoil: -infinity, NaN, all negative, the least there is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.gpu_kernels import attention, emulator
from hetu.gpu_kernels.emulator import Emulator
from hetu.gpu_kernels.launchers import bound
from hetu.gpu_kernels.machine import Machine, RecordingMachine

from ..at_once import chosen
from .cases import TOLERANCE
from .test_groups import group, run

pytestmark = pytest.mark.skipif(emulator.compiler() is None, reason="no C++ compiler: install g++ or clang++")
FLOATS = ("float64", "float32", "float16")
INTEGERS = ("int64", "uint64", "int32")
WIDTHS = (37, 1100)  # of a row that a warp folds, and a block


def rows(dtype: str, width: int) -> np.ndarray:
    """(rows, width): each has something for which a fold may not be prepared."""
    rng = np.random.default_rng(width)
    if "float" not in dtype:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        ends = (low, low + 1), (high, high - 1), (low, low), (high, high), (0, 0), (max(low, -1), max(low, -2))
        x = np.array([[most] * width for most, _ in ends], dtype)
        x[np.arange(len(ends)), rng.integers(0, width, len(ends))] = [one for _, one in ends]
        return x
    usual = rng.uniform(0.5, 1.5, (20, width)) * rng.choice([-1, 1], (20, width))
    usual[0], usual[1, :], usual[2] = -np.inf, np.nan, np.finfo(dtype).min
    usual[3, :-1], usual[4, 1:] = -np.inf, -np.inf
    usual[5, 0], usual[6, -1], usual[7, width // 2] = np.nan, np.nan, np.nan
    usual[8, :-1], usual[9, 1:] = np.nan, np.nan
    usual[10], usual[11] = -abs(usual[10]), -abs(usual[11]) * 1e4
    usual[12, ::2], usual[12, 1::2] = np.finfo(dtype).min, -np.inf
    usual[13], usual[14], usual[15, width // 3] = 0, -0.0, -np.inf
    usual[16], usual[17, width // 2], usual[18, [3, -3]] = np.inf, np.inf, np.nan
    return usual.astype(dtype)


OPERATORS = {  # of (rows, width)
    **{name: {"axis": (1,), "keepdims": False} for name in ("sum", "prod", "max", "min", "all", "any")},
    "topk": {"k": 3, "axis": 1},
    "softmax_cross_entropy": {"ignore_index": None, "label_smoothing": 0.0},
    "max_pool2d": {"kernel": (3, 3), "stride": (1, 1), "padding": ((1, 1), (1, 1))},
}
OF_FLOATS = ("sum", "prod", "topk", "softmax_cross_entropy", "max_pool2d")
CASES = [(name, d) for name in OPERATORS for d in (*FLOATS, *INTEGERS) if d in FLOATS or name not in OF_FLOATS]


def given(name: str, dtype: str) -> Iterator[tuple[list[np.ndarray], dict]]:
    """Arrays and attributes."""
    for width in WIDTHS:
        x, attrs = rows(dtype, width), OPERATORS[name]
        if name == "max_pool2d":
            yield [x[:, :36].reshape(-1, 1, 6, 6)], attrs
        elif name == "softmax_cross_entropy":
            x = x[~np.isposinf(x).any(1)]  # an infinite one of a row makes it NaN, or itself alone
            yield [x, np.arange(len(x)) % width], attrs
        else:
            yield [x], attrs
        if "keepdims" in attrs:
            yield [np.ascontiguousarray(x.T)], attrs | {"axis": 0 if attrs["axis"] == 1 else (0,)}


def wanted(name: str, arrays: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    """Half precision is computed wide, as kernels round only results."""
    with np.errstate(all="ignore"):
        wide = (a.astype("float64") if a.dtype == np.float16 else a for a in arrays)
        results = OPS[name].forward(np, *wide, **attrs)
        results = [np.asarray(r) for r in (results if isinstance(results, tuple) else (results,))]
        return [r.astype(arrays[0].dtype) if r.dtype.kind == "f" else r for r in results]


def made(machine: Machine, name: str, arrays: list[np.ndarray], attrs: dict, like: list[np.ndarray]) -> None:
    outs = [np.full(w.shape, 77, w.dtype) for w in like]
    for call in bound(machine, OPS[name], tuple(outs) if len(outs) > 1 else outs[0], arrays, attrs):
        call()
    return outs


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest) -> None:
    """The kernels of the chosen cases, compiled together."""
    recorder = RecordingMachine()
    for case in chosen(request, test_folds_of_extremes):
        for arrays, attrs in given(**case):
            made(recorder, case["name"], arrays, attrs, wanted(case["name"], arrays, attrs))
    emulator.prepare(recorder.texts)


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.sampled(16)
def test_folds_of_extremes(name, dtype):
    for arrays, attrs in given(name, dtype):
        right = wanted(name, arrays, attrs)
        for got, value in zip(made(Emulator(), name, arrays, attrs, right), right, strict=True):
            tolerance = TOLERANCE.get(got.dtype.name, 0)
            np.testing.assert_allclose(got, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fold", [ht.max, ht.min, ht.sum])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.sampled(8)
def test_folds_in_groups(fold, axis):
    x = np.concatenate([rows("float32", width) for width in WIDTHS], axis=1)
    x = np.tile(x.T, 4) if axis == 0 else x  # fewer columns make no group
    a, b = ht.placeholder("a", x.shape), ht.placeholder("b", x.shape)
    node = group(fold(a * b, axis=axis))
    (out,), _ = run(Emulator(), node, [x, np.ones_like(x)])
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(out, fold.forward(np, x, axis=(axis,), keepdims=False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "features", "most"),
    [("float64", 5, 1e300), ("float32", 5, 1e30), ("float16", 5, 1e6), ("float16", 16, 1e6)],
)
@pytest.mark.sampled(8)
def test_attention_whose_scores_are_all_negative(dtype, features, most, causal):
    """And alike, so that each query gets the mean of what it sees."""
    q, k = np.zeros((2, 1, 70, 2, features), dtype)
    q[..., 0], k[..., 0] = np.sqrt(most), -np.sqrt(most)
    v = np.random.default_rng(0).standard_normal(q.shape).astype(dtype)
    y, total = np.zeros_like(v), np.zeros((1, 2, 70), "float64" if dtype == "float64" else "float32")
    for call in attention.tiled(Emulator(), (y, total), q, k, v, scale=1.0, causal=causal):
        call()
    means = (
        np.cumsum(v, 1, "float64") / np.arange(1, 71)[:, None, None] if causal else v.mean(1, "float64", keepdims=True)
    )
    np.testing.assert_allclose(y, np.broadcast_to(means, y.shape), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    scores = q[:, :, :, 0].astype("float64") * k[:, :, :, 0]  # of which float16 does not hold the largest
    np.testing.assert_allclose(total, scores.transpose(0, 2, 1), rtol=1e-3)


NAMELESS = np.array([0, -1, 8, 1 << 40, -(1 << 40), 7])


def test_ids_that_name_nothing_read_as_0():
    x, last = np.random.default_rng(0).standard_normal((8, 8, 3)).astype("float32"), np.zeros((8, 1, 1), int)
    ids = NAMELESS[:, None, None] + last[:1]
    for name, arrays, right in (
        ("take", [x, NAMELESS], x[[0, 7]]),
        ("take_along_axis", [x, np.broadcast_to(ids, (6, 8, 3)).copy()], x[[0, 7]]),
    ):
        out = np.full((6, 8, 3), 77, "float32")
        for call in bound(Emulator(), OPS[name], out, arrays, {"axis": 0}):
            call()
        np.testing.assert_array_equal(out[[0, 5]], right)
        assert not out[1:5].any()


@pytest.mark.parametrize("count", [6, 600])  # added in turn, and by sorting
def test_ids_that_name_nothing_add_nothing(count):
    """Also not to the rows of a neighbor, before or behind."""
    ids = np.resize(NAMELESS, (2, count, 1))
    values, out, right = np.ones(ids.shape, "float32"), np.full((2, 8, 1), 77, "float32"), np.zeros((2, 8, 1))
    right[:, [0, 7], 0] = np.count_nonzero(NAMELESS == 0) * count // len(NAMELESS)
    for call in bound(Emulator(), OPS["put_along_axis_add"], out, [out, ids, values], {"axis": 1}):
        call()
    np.testing.assert_array_equal(out, right)


def test_labels_that_name_nothing_have_no_logit():
    x = np.random.default_rng(0).standard_normal((6, 8)).astype("float32")
    loss, total = np.zeros((2, 6), "float32")
    attrs = {"ignore_index": None, "label_smoothing": 0.0}
    for call in bound(Emulator(), OPS["softmax_cross_entropy"], (loss, total), [x, NAMELESS], attrs):
        call()
    np.testing.assert_allclose(total, np.log(np.exp(x).sum(1)), rtol=1e-5)
    np.testing.assert_allclose(loss, total - [x[0, 0], 0, 0, 0, 0, x[5, 7]], rtol=1e-5)
