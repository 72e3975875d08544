"""Trees in C against the forward functions: several nodes, empty ones, few and many channels, both widths of sums."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall, c_call
from hetu.ops import trees

from .divided import job_by_job

pytestmark = pytest.mark.compiled
RNG = np.random.default_rng(0)
ROWS, COLUMNS, SIZE = 90, 5, 7
STARTS = np.array([0, 20, 20, 45])  # the second node is empty


def check(name, arrays, **attrs):
    forward = OPS[name].forward(np, *arrays, **attrs)
    want = forward if isinstance(forward, tuple) else (forward,)
    out = tuple(np.empty_like(each, order="C") for each in want)
    (call,) = OPS[name].bound(np, out if isinstance(forward, tuple) else out[0], arrays, attrs)
    assert isinstance(call, CCall)
    words = {"jobs": call.jobs, "scratch": call.scratch}
    kind = arrays[0].dtype if name in ("best_cuts", "tree_leaves") else arrays[1].dtype
    few = call.function == "best_row_cuts"  # what it means, the other two say
    plainly = call if few else c_call("trees.c", f"{call.function}_plainly", kind, *call.words, **words)
    for run in (call, lambda: job_by_job(call), plainly):
        for each in out:
            each.fill(77)
        run()
        for got, wanted in zip(out, want, strict=True):
            np.testing.assert_array_equal(got, wanted)


def bins(dtype="uint8"):
    return RNG.integers(0, SIZE, (ROWS, COLUMNS)).astype(dtype)


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_histograms_and_their_best_cuts(dtype, channels, monkeypatch):
    values = RNG.integers(-9, 9, (ROWS, channels)).astype(dtype)
    values[:, -1] = RNG.integers(0, 4, ROWS)
    rows = RNG.permutation(ROWS)[:70]
    features = RNG.permuted(np.tile(np.arange(COLUMNS), (4, 1)), axis=1)[:, :3].copy()
    arrays = [bins(), values, rows, STARTS, features]
    check("histograms", arrays, size=SIZE)
    found = OPS["histograms"].forward(np, *arrays, size=SIZE)
    asked = [np.ascontiguousarray(found[0].sum(axis=1, dtype=dtype)), np.array([0.0, 0, 1, 3])]
    check("best_cuts", [found, *asked], l2=0.5)
    for cells in (trees.CELLS, 1):  # all nodes at once, and one after the other
        monkeypatch.setattr(trees, "CELLS", cells)
        check("best_row_cuts", [*arrays, *asked], size=SIZE, l2=0.5)


def test_rows_part():
    cuts = np.array([3, 0, SIZE, 2])
    check("part_rows", [bins(), RNG.permutation(ROWS)[:70], STARTS, np.array([4, 0, 1, 2]), cuts])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_leaves(dtype):
    thresholds = RNG.standard_normal(7).astype(dtype)
    x = RNG.standard_normal((40, 3)).astype(dtype)
    x[0, 2] = thresholds[0]
    check(
        "tree_leaves",
        [x, np.array([2, 0, 0, 1, 0, 0, 0]), thresholds, np.array([1, 3, 0, 5, 0, 0, 0]), np.array([0, 3, 6])],
    )


def test_what_lies_otherwise_is_left_to_numpy():
    values, rows = RNG.integers(0, 9, (ROWS, 2)), np.arange(ROWS)
    for these in (bins("int64"), np.asfortranarray(bins())):
        arrays = [these, values, rows, np.array([0]), np.array([[0, 1]])]
        want = OPS["histograms"].forward(np, *arrays, size=SIZE)
        (call,) = OPS["histograms"].bound(np, out := np.empty_like(want), arrays, {"size": SIZE})
        assert not isinstance(call, CCall)
        call()
        np.testing.assert_array_equal(out, want)
