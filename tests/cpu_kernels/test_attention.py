"""Attention in C against the plain operators and against the loops that specify it, one job at a time too."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels import attention
from hetu.cpu_kernels.c_calls import c_call

from ..pairs import in_turn
from .divided import job_by_job

pytestmark = pytest.mark.compiled
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
CASES = {  # leading axes, queries, keys, features, features of values
    "one": ((1, 2), 1, 1, 1, 1),
    "odd": ((2, 3), 5, 7, 4, 6),
    "whole": ((2,), 64, 64, 64, 64),
    "strips": ((2, 1, 2), 131, 131, 17, 9),
    "wide": ((), 70, 300, 33, 40),
    "chunks": ((1,), 70, 530, 16, 8),
    "few-keys": ((2,), 90, 33, 8, 8),
    "one-query": ((2, 3), 1, 37, 20, 20),
    "two-queries": ((3,), 2, 333, 64, 70),
    "two-narrow": ((), 2, 16, 3, 7),
}


def normal(shape, dtype, seed):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def spread(x):
    """The same numbers in memory that is neither dense nor in order."""
    wide = np.full((*x.shape[:-2], x.shape[-1] + 3, 2 * x.shape[-2]), np.nan, x.dtype)
    view = wide[..., 1 : 1 + x.shape[-1], ::2].swapaxes(-1, -2)
    view[...] = x
    return view


def case(lead, s, t, d, e, dtype):
    return [normal((*lead, *size), dtype, seed) for seed, size in enumerate([(s, e), (s, d), (t, d), (t, e)])]


def masks_of(kind, lead, s, t, dtype):
    """Masks by name: what they hide differs from head to head, and some queries see nothing."""
    rng = np.random.default_rng(9)
    some = rng.random((*lead, s, t)) < 0.7
    some[..., ::5, :] = False
    return {
        "": (),
        "lengths": (np.arange(t) < rng.integers(0, t + 1, (*lead, 1, 1)),),
        "window": (np.abs(np.arange(s)[:, None] - np.arange(t)) < 20,),
        "some": (some,),
        "bias": (normal((*lead, s, t), dtype, 8),),
        "far": (np.where(np.arange(s)[:, None] % 3, 0, -1e30).astype(dtype),),  # whose scores are all alike
        "both": (some, np.where(rng.random((1, t)) < 0.5, -np.inf, 0).astype(dtype)),
    }[kind]


MASKS = ("", "lengths", "window", "some", "bias", "far", "both")


def filled(like):
    return tuple(np.full_like(x, np.nan) for x in like)


@pytest.mark.parametrize(
    ("name", "dtype", "causal", "view", "mask"), in_turn(4, CASES, TOLERANCE, ["", "causal"], ["dense", "view"], MASKS)
)
@pytest.mark.sampled(30)
def test_values_and_gradients(name, dtype, causal, view, mask):
    sizes, causal, view = CASES[name], causal == "causal", view == "view"
    arrays, attrs = case(*sizes, dtype), {"scale": 0.3, "causal": causal}
    masks = masks_of(mask, *sizes[:3], dtype)
    with np.errstate(invalid="ignore"):  # a query to which -inf is added everywhere
        outs = OPS["attention"].forward(np, *arrays[1:], *masks, **attrs)
        slopes = OPS["attention_dx"].forward(np, *arrays, *outs, *masks, **attrs)
    g, q, k, v = (spread(a) if view else a for a in arrays)
    got, got_slopes = filled(outs), filled(slopes)
    if view:
        got_slopes = tuple(spread(x) for x in got_slopes)
    calls = [
        attention.attention_bind(np, got, q, k, v, *masks, **attrs),
        attention.attention_dx_bind(np, got_slopes, g, q, k, v, *got, *masks, **attrs),
    ]
    for call in calls:
        call()
    for a, b in zip((*got, *got_slopes), (*outs, *slopes), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * max(1, np.abs(b).max()))
    at_once = [a.copy() for a in (*got, *got_slopes)]
    for call in calls:
        job_by_job(call)
    for a, b in zip((*got, *got_slopes), at_once, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_loops_that_specify_it(dtype, causal, mask):
    s, t, d, e = 5, 7, 4, 6
    _, q, k, v = case((), s, t, d, e, dtype)
    masks = {m.dtype.kind: np.ascontiguousarray(np.broadcast_to(m, (s, t))) for m in masks_of(mask, (), s, t, dtype)}
    with np.errstate(invalid="ignore"):
        wanted = OPS["attention"].forward(np, q, k, v, *masks.values(), scale=0.3, causal=causal)
    got, scores = filled(wanted), np.empty(t, dtype)
    where = [masks.get(kind, 0) for kind in "bf"]
    sizes = (s, t, d, e, 0.3, int(causal))
    c_call("attention.c", "attention_plainly", q.dtype, q, k, v, *where, *got, scores, *sizes)()
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_what_it_leaves_to_numpy():
    empty, half = np.empty((2, 0, 4), np.float32), np.ones((2, 3, 4), np.float16)
    total = np.empty((2, 3), np.float32)
    for q in (empty, half):
        out = np.empty_like(q), total[:, : q.shape[1]]
        assert attention.attention_bind(np, out, q, q, q, scale=1.0, causal=False) is None
