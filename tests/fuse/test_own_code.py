"""Expressions in C that strangers write, in groups and alone, against what their operators mean."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.types import TensorType

from ..at_once import compiled_at_once

BOOL = np.dtype(bool)


def alike(x: TensorType, *_: TensorType, **__: object) -> TensorType:
    return x


def truth(x: TensorType, *_: TensorType, **__: object) -> TensorType:
    return TensorType(x.shape, BOOL)


def doubled(x: TensorType) -> TensorType:
    return TensorType((2 * x.shape[0], *x.shape[1:]), x.dtype)


F, I, L, B = (
    [1.5, -2.0, 0.0, 3.0],
    [-4, 0, 3, 46341],
    [3, 2**53 + 1, -(2**53) - 3, 2**62 + 1],
    [True, False, True, False],
)
# code, type rule, what it means, dtypes, numbers of the inputs
CODES = {
    "an input called column": ("y = column * x", alike, lambda xp, column, x: column * x, "float32", [F, F]),
    "an attribute called column": ("y = column * x", alike, lambda xp, x, *, column=5.0: column * x, "float32", [F]),
    "an input called like a function": (
        "y = first - exp",
        alike,
        lambda xp, first, exp: first - exp,
        "float32",
        [F, F],
    ),
    "names that are no ASCII": ("y = äb * 学", alike, lambda xp, äb, 学: äb * 学, "float32", [F, F]),
    "a bound between integers": ("y = x < k", truth, lambda xp, x, *, k=0.5: x < k, "int32", [I]),
    "a fraction of integers": ("y = x * k", alike, lambda xp, x, *, k=0.5: (x * k).astype(x.dtype), "int32", [I]),
    "true and true": ("y = a + b", alike, lambda xp, a, b: a + b, "bool", [B, B]),
    "a product that wraps": ("y = x * x * x", alike, lambda xp, x: x * x * x, "int32", [I]),
    "a sum that wraps": ("y = x + x + x", alike, lambda xp, x: x + x + x, "int64", [L]),
    "minus zero": ("y = x * k", alike, lambda xp, x, *, k=-0.0: x * xp.asarray(k, x.dtype), "float32", [F]),
    "plus zero": ("y = x * k", alike, lambda xp, x, *, k=0.0: x * xp.asarray(k, x.dtype), "float32", [F]),
    "another shape": ("y = x", doubled, lambda xp, x: xp.concatenate([x, x]), "float32", [F]),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CODES)
def test_own_expressions_mean_what_their_operators_mean(case):
    code, infer, meaning, dtype, numbers = CODES[case]
    own = ht.op(name=f"{case} */\n\\", infer=infer, code=code)(meaning)
    arrays = [np.array(values, dtype) for values in numbers]
    xs = [ht.placeholder(f"x{k}", a.shape, dtype) for k, a in enumerate(arrays)]
    made = own(*xs)
    right = meaning(np, *arrays)
    for got in ht.Executor([made, ht.where(made == made, made, made)]).run(dict(zip(xs, arrays))):
        assert got.dtype == right.dtype and got.tobytes() == right.tobytes()


INTEGERS = {
    "powers": lambda x: x**3,
    "first powers": lambda x: x**1,
    "bounds beyond all": lambda x: ht.clip(x, -1e30, 1e30),
    "bounds": lambda x: ht.clip(x, -3e9, 3e9),
    "no bounds": lambda x: ht.clip(x, -np.inf, np.inf),
    "sums that wrap": lambda x: x + x - 1,
    "products that wrap": lambda x: -x * x,
    "what is finite": ht.isfinite,
    "what is no number": ht.isnan,
    "absolute values": ht.abs,
}


DTYPES = ("int32", "int64")


def of_integers(case, dtype):
    """What is computed, and what it is fed."""
    limits = np.iinfo(dtype)
    values = np.array([0, 1, -1, 3, -7, 46341, limits.max, limits.min + 1, limits.min], dtype)
    x = ht.placeholder("x", values.shape, dtype)
    return INTEGERS[case](x), {x: values}


@pytest.fixture(scope="module")
def all_compiled():
    cases = [of_integers(*case) for case in itertools.product(INTEGERS, DTYPES)]
    compiled_at_once(partial(ht.Executor([y], passes=p).program, feed=feed) for y, feed in cases for p in (None, []))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", INTEGERS)
def test_integers_are_computed_as_integers(all_compiled, case, dtype):
    y, feed = of_integers(case, dtype)
    with np.errstate(over="ignore"):
        (right,) = ht.Executor([y], passes=[]).run(feed)
        (got,) = ht.Executor([y]).run(feed)
    np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("rows", [1, 5, 17, 33, 70])
def test_nothing_is_computed_of_rows_that_are_not_there(rows):
    """A block of rows that is not full has the last of them again: a quotient of what lay there ended the process."""
    own = ht.op(name="own_quotient", infer=alike, dims="...,...->...", code="y = a / b")(lambda xp, a, b: a // b)
    x = ht.placeholder("x", (rows, 9))
    whole = ht.astype(x + 1, "int32")
    back = ht.astype(whole, "float32")
    most = ht.max(back, axis=1, keepdims=True)
    ex = ht.Executor([whole, ht.sum(back, axis=0), own(ht.astype(most + back, "int32"), whole)])
    fed = np.arange(9 * rows, dtype="f").reshape(rows, 9)
    right = (fed + 1).astype("int32")
    for got, wanted in zip(ex.run({x: fed}), (right, right.sum(0), (right.max(1, keepdims=True) + right) // right)):
        np.testing.assert_array_equal(got, wanted)
