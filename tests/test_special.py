"""Every row of the table with nothing in an axis, and with special numbers: the passes answer as the plain meaning."""

from __future__ import annotations

import warnings
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import HetuError

from .at_once import compiled_at_once
from .samples import SAMPLES
from .test_ops import as_tuple, each_sample

NUMBERS = [(0.0, -0.0), (0.5,), (np.nan, 1.0, -0.5), (np.inf, 1.0, -0.5), (-np.inf, 0.5, 2.0)]


def asked(sample, arrays, passes=None):
    """An executor of a row, and its placeholders."""
    nodes = [
        ht.placeholder(f"x{k}", a.shape, "float32" if a.dtype.kind == "f" else a.dtype) for k, a in enumerate(arrays)
    ]
    return ht.Executor(list(as_tuple(sample.build(*nodes))), passes=passes), nodes


def answers(sample, arrays, feeds):
    """What all passes and none of them make of each feed; HetuError where these arrays are refused."""
    made = []
    for passes in (None, []):
        try:
            executor, nodes = asked(sample, arrays, passes)
            made.append([executor.run(dict(zip(nodes, feed))) for feed in feeds])
        except HetuError:
            made.append(HetuError)
    return made


@pytest.fixture(scope="module")
def all_compiled():
    def program(sample):
        with suppress(HetuError):
            executor, nodes = asked(sample, sample.arrays())
            executor.program(dict(zip(nodes, sample.arrays())))

    compiled_at_once(partial(program, sample) for sample in SAMPLES)


def references(sample, arrays) -> list[np.ndarray]:
    """What plain NumPy makes of them, if it does; formulas that know the sizes of a row give other shapes."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
            return [*map(np.asarray, as_tuple(sample.reference(*arrays)))]
    except Exception:
        return []


def empty(array: np.ndarray, size: int) -> np.ndarray:
    """The array with nothing along the axes of that size; the state of random numbers stays."""
    return array if array.dtype == np.uint64 else array[tuple(slice(0 if n == size else None) for n in array.shape)]


@each_sample
def test_an_empty_axis_is_answered_or_refused_in_our_words(sample):
    """Sizes that are equal are emptied together, as they may be one axis."""
    arrays = sample.arrays()
    for size in {n for a in arrays if a.dtype != np.uint64 for n in a.shape if n > 1}:
        parts = [empty(a, size) for a in arrays]
        mine, plain = answers(sample, parts, [parts])
        assert (mine is HetuError) == (plain is HetuError)
        for got, wanted in zip(*(() if mine is HetuError else (mine[0], plain[0])), strict=True):
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)
        for got, right in zip(() if mine is HetuError else mine[0], references(sample, parts), strict=False):
            if got.shape == right.shape:
                np.testing.assert_allclose(got, right, rtol=1e-3, atol=1e-3)


@each_sample
def test_special_numbers_go_through_all_passes_as_through_none(all_compiled, sample):
    arrays, rng = sample.arrays(), np.random.default_rng(0)
    if not any(a.dtype.kind == "f" for a in arrays):
        return
    feeds = [[rng.choice(some, a.shape) if a.dtype.kind == "f" else a for a in arrays] for some in NUMBERS]
    mine, plain = answers(sample, arrays, feeds)
    for got, wanted in ((g, w) for both in zip(mine, plain, strict=True) for g, w in zip(*both, strict=True)):
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)


AVERAGED = ["float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]


@pytest.mark.usefixtures("meaning")
@pytest.mark.parametrize("dtype", AVERAGED)
def test_means_and_norms_are_not_lost_in_a_sum_that_overflows(dtype):
    """Of numbers near the limits of the dtype and of many ones; also how far they lie from the mean."""
    kind = np.iinfo(dtype) if "int" in dtype else np.finfo(dtype)
    most, low = (int(kind.max), int(kind.min)) if "int" in dtype else (60_000.0, -60_000.0)
    cases = [[most] * 3, [low] * 5, [most, low] * 4, [1] * 100_000, [most, most // 2, 0], [90, 110] * 40]
    for case in (np.array(c, dtype) for c in cases):
        x = ht.placeholder("x", case.shape, dtype)
        found = ht.Executor([ht.mean(x), ht.var(x), ht.mean(x, 0, keepdims=True), ht.norm(x)]).run({x: case})
        exact = case.astype("longdouble")
        wanted = (
            exact.mean(),
            ((exact - exact.mean()) ** 2).mean(),
            exact.mean(keepdims=True),
            np.sqrt((exact**2).sum()),
        )
        assert {v.dtype.name for v in found} == {dtype if "float" in dtype else "float32"}
        for got, want in zip(found, wanted):
            with np.errstate(over="ignore"):
                want = want.astype(got.dtype)
            near = {"rtol": 4 * np.finfo(got.dtype).eps, "atol": 1e-30 if "int64" not in dtype else 1e26}
            np.testing.assert_allclose(got, want, **near, err_msg=str(case[:3]))
