"""Running sums, places of extremes and the greatest few in C against the forward functions, with ties and NaN."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall, CTable, c_call

from .divided import job_by_job

pytestmark = pytest.mark.compiled
SHAPES = [(1,), (37,), (5, 33), (33, 5), (3, 1, 40), (4, 65, 2), (0, 3), (3, 0)]
VIEWS = {
    "in order": lambda x: x,
    "turned": lambda x: x.T.copy().T,
    "every second, backward": lambda x: np.repeat(x, 2, -1)[..., ::-2],
}
CASES = {
    "cumsum": {"reverse": False},
    "cumsum, reverse": {"reverse": True},
    "argmax": {"keepdims": False},
    "argmin": {"keepdims": True},
    "topk": {"k": 1},
    "topk, some": {"k": 4},
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled(8)
def test_along_every_axis(case, view, dtype):
    rng, name, attrs = np.random.default_rng(0), case.partition(",")[0], CASES[case]
    for shape in SHAPES:
        whole = rng.integers(-4, 5, shape).astype(dtype)
        if dtype[0] == "f" and len(shape) > 1 and name != "cumsum":
            whole[rng.random(shape) < 0.1] = np.nan
        for axis in range(len(shape)):
            if name == "cumsum" or shape[axis] >= attrs.get("k", 1):
                check(OPS[name], VIEWS[view](whole), {**attrs, "axis": axis})


def check(op, x, attrs):
    want = op.forward(np, x, **attrs)
    wanted = want if isinstance(want, tuple) else (want,)
    outs = tuple(np.empty(w.shape, w.dtype) for w in wanted)
    calls = op.bound(np, outs if isinstance(want, tuple) else outs[0], [x], attrs)
    assert all(isinstance(call, CCall) for call in calls)
    assert calls or not x.size
    dtype, better = outs[0].dtype if op.name == "cumsum" else x.dtype, "<" if op.name == "argmin" else ">"

    def plainly(call):
        """By the loops that specify it."""
        c_call("scan.c", f"{call.function}_plainly", dtype, *call.words, jobs=call.jobs, BETTER=better)()

    for run in (lambda call: call(), job_by_job, plainly):
        for out in outs:
            out.fill(77)
        for call in calls[:-1]:
            call()
        for call in calls[-1:]:
            run(call)
        for out, w in zip(outs, wanted):
            np.testing.assert_array_equal(out, w)  # small whole numbers, whose sums are exact in any order


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("size", [7, 33, 150])
def test_an_extremum_or_a_nan_is_found_at_every_place(size, dtype):
    """Behind any number of blocks of vectors; a NaN before and behind the extremum, too."""
    peaks = np.eye(size, dtype=dtype)
    for op, x in (("argmax", peaks), ("argmin", -peaks)):
        check(OPS[op], x, {"axis": 1, "keepdims": False})
        if dtype != "int32":
            for shift in (0, 1, size // 2):
                odd = x.copy()
                odd[np.roll(peaks, shift, 1) == 1] = np.nan
                check(OPS[op], odd, {"axis": 1, "keepdims": False})


def test_sums_are_added_in_the_order_of_numpy():
    x = np.random.default_rng(0).standard_normal((3, 200, 4)).astype("float32")
    for axis in range(3):
        for reverse in (False, True):
            out, attrs = np.empty_like(x), {"axis": axis, "reverse": reverse}
            (call,) = OPS["cumsum"].bound(np, out, [x], attrs)
            call()
            np.testing.assert_array_equal(out, OPS["cumsum"].forward(np, x, **attrs))


def test_a_step_with_all_of_them_is_one_table():
    x = ht.placeholder("x", (None, 9))
    best, places = ht.topk(x * ht.normal(x.shape), k=3)
    outputs = [
        ht.cumsum(best, axis=1) * 2.0,
        ht.argmax(x, axis=1),
        ht.argmin(ht.matrix_transpose(x), axis=1),
        places + 1,
    ]
    ex = ht.Executor({"all": outputs})
    feed = {x: np.random.default_rng(0).random((6, 9), "float32")}
    ex.run("all", feed)
    (table,) = ex.program("all", feed).calls
    assert isinstance(table, CTable)
