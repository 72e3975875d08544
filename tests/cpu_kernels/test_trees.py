"""Trees in C against the forward functions: several nodes, empty ones, few and many channels, both widths of sums."""

from __future__ import annotations

import re

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.cpu_kernels.c_calls import CCall, c_call
from hetu.ops import grow

from ..gpu import fake_cupy
from ..samples import trees as samples
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
    whole = call.function == "grow_trees"  # what it means, the others say
    plainly = call if whole else c_call("trees.c", f"{call.function}_plainly", kind, *call.words, **words)
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
def test_histograms_and_their_best_cuts(dtype, channels):
    values = RNG.integers(-9, 9, (70, channels)).astype(dtype)
    values[:, -1] = RNG.integers(0, 4, 70)
    rows = RNG.permutation(ROWS)[:70]
    features = RNG.permuted(np.tile(np.arange(COLUMNS), (4, 1)), axis=1)[:, :3].copy()
    arrays = [bins(), values, rows, STARTS, features]
    check("histograms", arrays, size=SIZE)
    found = OPS["histograms"].forward(np, *arrays, size=SIZE)
    asked = [np.ascontiguousarray(found[0].sum(axis=1, dtype=dtype)), np.array([0.0, 0, 1, 3])]
    check("best_cuts", [found, *asked], l2=0.5)


@pytest.mark.parametrize("seed", range(60))
def test_whole_trees(seed, monkeypatch):
    """Few rows and many, in few bins and many, with every rule on and off; the plain form also node by node."""
    rng = np.random.default_rng(seed)
    rows, columns, roots, size, channels = rng.integers([1, 1, 1, 1, 1], [150, 20, 4, 256 if seed % 3 else 9, 5])
    monkeypatch.setattr(grow, "CELLS", rng.choice([1, grow.CELLS]))
    bins = np.array(rng.integers(0, size, (rows, columns)), np.uint8, order=rng.choice(["C", "F"]))
    own = rng.choice(rows, rng.integers(0, 2 * rows))
    values = rng.integers(-3, 4, (len(own), channels)).astype(rng.choice(["int32", "int64"]))
    values[:, -1] = rng.integers(rng.integers(0, 2), 4, len(own))
    starts = np.append(0, np.sort(rng.integers(0, len(own) + 1, roots - 1)))
    target = rng.integers(0, 3, rows).astype(float) if seed % 2 else np.zeros(0)
    order = rng.permuted(np.tile(np.arange(columns), (roots, 1)), axis=1)
    begun = rng.integers([0, -(2**63)], [3, 2**63 - 1], (roots, 2))
    units = np.stack([rng.choice(some, roots) for some in ([0, 0.5, 2], [0, 1e-3, 1], [1, 0.25])], axis=1)
    bounds = {"max_depth": [0, 0, 2, 4], "max_leaf_nodes": [0, 0, 1, 2, 3, 8, 31], "min_samples_split": [1, 2, 5]}
    bounds |= {
        "min_samples_leaf": [1, 1, 2, 5],
        "least_gain": [-1e308, 1e-300, 0.5],
        "features": [columns, columns // 3 + 1],
    }
    rules = {name: rng.choice(some).item() for name, some in bounds.items()}
    if rules["max_leaf_nodes"] and seed % 4:
        rules["room"] = 2 * rules["max_leaf_nodes"] + seed % 4 - 2
    check("grow_trees", [bins, values, own, starts, target, order, begun, units], size=int(size), **rules)


@pytest.mark.parametrize("options", [{"max_features": 2}, {"max_leaf_nodes": 5, "min_samples_leaf": 4}], ids=str)
def test_estimators_grow_whole_trees_in_c(options, monkeypatch):
    monkeypatch.delattr(grow._Tree, "grow")
    X, y = RNG.normal(size=(90, 5)), np.arange(90) % 3
    for kind in (ht.ml.RandomForestClassifier, ht.ml.DecisionTreeRegressor):
        assert len(kind(**options).fit(X, y).trees_.lefts) > 5
    assert len(ht.ml.GradientBoostingClassifier(max_iter=3, min_samples_leaf=4).fit(X, y).trees_.lefts) > 5


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
GROWN = [*HISTOGRAM[:4], np.zeros(0), HISTOGRAM[4], np.zeros((1, 2), int), np.zeros((1, 3))]
PARTED = [*HISTOGRAM[:1], *HISTOGRAM[2:4], FIRST, FIRST]
WALK = [np.zeros((3, 1)), np.zeros(3, "int64"), np.zeros(3), np.array([1, 0, 0]), FIRST]
CUTS = [np.ones((1, 3, 4, 2), "int64"), np.ones((3, 2), "int64"), np.zeros(3)]
MISTAKES = [  # the operator, its right arrays, which is wrong and how, and what is said
    ("histograms", HISTOGRAM, {0: np.full((4, 2), 2, "uint8")}, "bin 2 at position [0, 0] lies outside 0 to 1"),
    ("histograms", HISTOGRAM, {2: FOUR + 1}, "row 4 at position [3] lies outside 0 to 3"),
    ("histograms", HISTOGRAM, {3: FIRST + 1}, "bag 0 begins at 1, of 4 entries"),
    ("histograms", HISTOGRAM, {4: np.array([[0, 2]])}, "column 2 at position [0, 1] lies outside 0 to 1"),
    ("histograms", HISTOGRAM, {1: ONES[:3]}, "pass axes nc ek e t ts, a size by letter"),
    ("grow_trees", GROWN, {2: FOUR - 1}, "row -1 at position [0]"),
    ("grow_trees", GROWN, {5: np.array([[0, 2]])}, "column 2 at position [0, 1] lies outside 0 to 1"),
    ("grow_trees", GROWN, {7: np.zeros((2, 3))}, "pass axes nc ek e t m tc tb tu"),
    ("grow_trees", GROWN, {4: np.zeros(3)}, "pass a target a row or none, (t, 2) and (t, 3)"),
    ("grow_trees", GROWN, {6: np.zeros((1, 3), int)}, "pass a target a row or none, (t, 2) and (t, 3)"),
    ("grow_trees", GROWN, {1: ONES[:, :0]}, "of 0 channels"),
    ("grow_trees", GROWN, {7: np.array([[-1.0, 0, 1]])}, "pass the least H and l2 of each tree as 0 or more"),
    ("best_cuts", CUTS, {1: ONES[:1]}, "pass axes stbk tk t"),
    ("best_cuts", CUTS, {0: CUTS[0][..., :0], 1: ONES[:3, :0]}, "of 0 channels"),
    ("part_rows", PARTED, {1: FOUR * 2}, "row 4 at position [2] lies outside 0 to 3"),
    ("part_rows", PARTED, {4: FOUR}, "pass axes nc e t t t"),
    ("tree_leaves", WALK, {1: np.ones(3, "int64")}, "column 1 at position [0] lies outside 0 to 0"),
    ("tree_leaves", WALK, {3: np.array([2, 0, 0])}, "left node 2 at position [0] lies outside 0 to 1"),
    ("tree_leaves", WALK, {3: np.array([1, 1, 0])}, "the left node of 1 is 1"),
    ("tree_leaves", WALK, {4: FIRST + 3}, "root 3 at position [0] lies outside 0 to 2"),
]  # fmt: skip


ATTRS = {"histograms": {"size": 2}, "grow_trees": samples.GROWN | {"size": 2, "features": 2}, "best_cuts": {"l2": 0.0}}


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"max_leaf_nodes": 2, "room": 2}, "room for 2 nodes of a tree of max_leaf_nodes=2"),
        ({"least_gain": -np.inf}, "least_gain=-inf"),
    ],
)
def test_a_tree_that_would_outgrow_its_room_is_told(rules, said):
    with pytest.raises(ht.errors.HetuError, match=said):
        OPS["grow_trees"](*GROWN, **ATTRS["grow_trees"] | rules)


@pytest.mark.parametrize(("name", "arrays", "wrong", "said"), MISTAKES)
def test_what_would_lead_out_of_an_array_is_told(name, arrays, wrong, said):
    def run(arrays):
        nodes = [ht.placeholder(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
        made = OPS[name](*nodes, **ATTRS.get(name, {}))
        ht.Executor([*made] if isinstance(made, tuple) else [made]).run(dict(zip(nodes, arrays)))

    run(arrays)
    with pytest.raises(ht.errors.HetuError, match=re.escape(said)):
        run([wrong.get(k, a) for k, a in enumerate(arrays)])


@pytest.mark.parametrize("sample", samples.SAMPLES, ids=lambda sample: sample.op)
def test_where_cupy_is_the_forward_functions_find_the_same(sample):
    arrays = [np.asarray(make(np.random.default_rng(3))) for make in sample.inputs]
    attrs = {"histograms": {"size": 4}, "grow_trees": samples.GROWN, "best_cuts": {"l2": 0.5}}
    want = sample.reference(*arrays)
    with fake_cupy.installed() as cupy:
        found = OPS[sample.op].forward(cupy, *map(cupy.asarray, arrays), **attrs.get(sample.op, {}))
        for one, other in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, want)), strict=True):
            np.testing.assert_array_equal(one.get(), other)
