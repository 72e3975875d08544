"""Trees in C against the forward functions: several nodes, empty ones, few and many channels, both widths of sums."""

from __future__ import annotations

import re

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall, c_call
from hetu.ops import trees

from ..gpu import fake_cupy
from ..samples.trees import SAMPLES
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
    values = RNG.integers(-9, 9, (70, channels)).astype(dtype)
    values[:, -1] = RNG.integers(0, 4, 70)
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


ONES, FOUR, FIRST = np.ones((4, 2), "int64"), np.arange(4), np.array([0])
HISTOGRAM = [np.zeros((4, 2), "uint8"), ONES, FOUR, FIRST, np.array([[0, 1]])]
PARTED = [*HISTOGRAM[:1], *HISTOGRAM[2:4], FIRST, FIRST]
WALK = [np.zeros((3, 1)), np.zeros(3, "int64"), np.zeros(3), np.array([1, 0, 0]), FIRST]
CUTS = [np.ones((1, 3, 4, 2), "int64"), np.ones((3, 2), "int64"), np.zeros(3)]
MISTAKES = [  # the operator, its right arrays, which is wrong and how, and what is said
    ("histograms", HISTOGRAM, {0: np.full((4, 2), 2, "uint8")}, "bin 2 at position [0, 0] lies outside 0 to 1"),
    ("histograms", HISTOGRAM, {2: FOUR + 1}, "row 4 at position [3] lies outside 0 to 3"),
    ("histograms", HISTOGRAM, {3: FIRST + 1}, "bag 0 begins at 1, of 4 entries"),
    ("histograms", HISTOGRAM, {4: np.array([[0, 2]])}, "column 2 at position [0, 1] lies outside 0 to 1"),
    ("histograms", HISTOGRAM, {1: ONES[:3]}, "pass axes nc ek e t ts, a size by letter"),
    ("best_row_cuts", [*HISTOGRAM, ONES[:1], np.zeros(1)], {2: FOUR - 1}, "row -1 at position [0]"),
    ("best_row_cuts", [*HISTOGRAM, ONES[:1], np.zeros(1)], {5: ONES}, "pass axes nc ek e t ts tk t"),
    ("best_cuts", CUTS, {1: ONES[:1]}, "pass axes stbk tk t"),
    ("best_cuts", CUTS, {0: CUTS[0][..., :0], 1: ONES[:3, :0]}, "of 0 channels"),
    ("best_row_cuts", [*HISTOGRAM, ONES[:1], np.zeros(1)], {1: ONES[:, :0], 5: ONES[:1, :0]}, "of 0 channels"),
    ("part_rows", PARTED, {1: FOUR * 2}, "row 4 at position [2] lies outside 0 to 3"),
    ("part_rows", PARTED, {4: FOUR}, "pass axes nc e t t t"),
    ("tree_leaves", WALK, {1: np.ones(3, "int64")}, "column 1 at position [0] lies outside 0 to 0"),
    ("tree_leaves", WALK, {3: np.array([2, 0, 0])}, "left node 2 at position [0] lies outside 0 to 1"),
    ("tree_leaves", WALK, {3: np.array([1, 1, 0])}, "the left node of 1 is 1"),
    ("tree_leaves", WALK, {4: FIRST + 3}, "root 3 at position [0] lies outside 0 to 2"),
]  # fmt: skip


ATTRS = {"histograms": {"size": 2}, "best_row_cuts": {"size": 2, "l2": 0.0}, "best_cuts": {"l2": 0.0}}


@pytest.mark.parametrize(("name", "arrays", "wrong", "said"), MISTAKES)
def test_what_would_lead_out_of_an_array_is_told(name, arrays, wrong, said):
    def run(arrays):
        nodes = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
        made = OPS[name](*nodes, **ATTRS.get(name, {}))
        ht.Executor([*made] if isinstance(made, tuple) else [made]).run(dict(zip(nodes, arrays)))

    run(arrays)
    with pytest.raises(ht.errors.HetuError, match=re.escape(said)):
        run([wrong.get(k, a) for k, a in enumerate(arrays)])


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.op)
def test_where_cupy_is_the_forward_functions_find_the_same(sample):
    arrays = [np.asarray(make(np.random.default_rng(3))) for make in sample.inputs]
    attrs = {"histograms": {"size": 4}, "best_row_cuts": {"size": 4, "l2": 0.5}, "best_cuts": {"l2": 0.5}}
    want = sample.reference(*arrays)
    with fake_cupy.installed() as cupy:
        found = OPS[sample.op].forward(cupy, *map(cupy.asarray, arrays), **attrs.get(sample.op, {}))
        for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, want)), strict=True):
            np.testing.assert_array_equal(one.get(), other)
