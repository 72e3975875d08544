"""Copies in C between arrays that lie in any way, against NumPy's; and the operators that are such copies."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall, c_call
from hetu.cpu_kernels.moves import WORDS, moved

from .divided import job_by_job

pytestmark = pytest.mark.compiled

LIES = {  # what is copied, of an array (5, 70, 3, 40), to an array of the same shape
    "plain": lambda x: x,
    "turned": lambda x: x.transpose(3, 2, 1, 0),
    "channels last": lambda x: x.transpose(0, 2, 3, 1),
    "halves swapped": lambda x: x.transpose(2, 3, 0, 1),
    "backward": lambda x: x[::-1, :, :, ::-1],
    "every other": lambda x: x[:, ::2, :, 1::3],
    "repeated": lambda x: np.broadcast_to(x[:, :1, :, 2:3], (5, 9, 3, 33)),
    "one number": lambda x: np.broadcast_to(x[0, 0, 0, 0], (7, 65)),
    "no axes": lambda x: x[1, 2, 0, 3, ...],
    "six axes": lambda x: x.reshape(5, 7, 10, 3, 8, 5).transpose(5, 1, 3, 0, 4, 2),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "float16", "bool"])
@pytest.mark.parametrize("lies", LIES)
def test_moved(lies, dtype):
    x = LIES[lies]((np.arange(42000).reshape(5, 70, 3, 40) % 251).astype(dtype))
    for to in (np.empty(x.shape, dtype), np.empty((*x.shape, 2), dtype)[..., 1]):
        (call,) = moved(to, x)
        assert isinstance(call, CCall)
        plainly = c_call("moves.c", "move_plainly", WORDS[to.itemsize], *call.words)
        for run in (call, partial(job_by_job, call), plainly):
            to[...] = 1
            run()
            np.testing.assert_array_equal(to, x)


X = np.arange(24.0, dtype="float32").reshape(2, 3, 4)
OPERATORS = [
    ("reshape", [X.transpose(2, 0, 1)], {"shape": (6, 4)}),
    ("concat", [X, X[:, ::-1], X[:, :0], X[:, 1:2]], {"axis": 1}),
    ("concat", [X[..., :1], X.astype("float32")], {"axis": 2}),
    (
        "slice_scatter",
        [X[:, 0, ::-2], np.empty((2, 5, 4))],
        {"key": (("slice", None, None, 1), 3, ("slice", 3, 0, -2))},
    ),
    ("roll", [X], {"shift": -5, "axis": None}),
    ("roll", [X[:, ::-1]], {"shift": (1, -5), "axis": (2, 1)}),
    ("pad", [X], {"pad_width": ((0, 1), (2, 0), (1, 1)), "value": -3.0}),
    ("pad", [X[:0]], {"pad_width": ((2, 1), (0, 0), (1, 1)), "value": np.inf}),
]


@pytest.mark.parametrize("name, arrays, attrs", OPERATORS)
def test_operators_are_copies(name, arrays, attrs):
    want = OPS[name].forward(np, *arrays, **attrs)
    out = np.full(want.shape, 7, want.dtype)
    calls = OPS[name].bound(np, out, arrays, attrs)
    assert calls and all(isinstance(call, CCall) for call in calls)
    for call in calls:
        call()
    np.testing.assert_array_equal(out, want)


def test_other_dtypes_are_converted_and_nothing_needs_no_call():
    to = np.empty(3, "int64")
    (call,) = moved(to, np.array([1, 2, 3], "int32"))
    assert isinstance(call, CCall)
    call()
    assert to.tolist() == [1, 2, 3]
    assert moved(np.empty((2, 0)), np.ones((2, 0))) == []
