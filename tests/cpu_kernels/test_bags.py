"""Sums over rows that are looked up become products with a sparse matrix or its transpose; what is no bag stays."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.backend import Scratch
from hetu.core.graph import topological
from hetu.cpu_kernels import bags
from hetu.cpu_kernels.bags import bag, spread
from hetu.cpu_kernels.c_calls import CCall, c_call

from .divided import job_by_job

pytestmark = pytest.mark.compiled

TABLE = np.random.default_rng(0).standard_normal((9, 5)).astype("float32")
table, ids = ht.constant(TABLE), ht.placeholder("ids", (4, 3, 6), "int64")
weights, per_number = ht.placeholder("weights", (4, 3, 6)), ht.placeholder("per_number", (4, 3, 6, 5))
rows = ht.embedding(table, ids)
words, starts = ht.placeholder("words", (None,), "int64"), ht.placeholder("starts", (None,), "int64")
counts, learned = ht.placeholder("counts", (None,)), ht.variable("learned", TABLE)
DIVIDED = ht.embedding_bag(learned, words, starts, counts)
BAGS = {
    "one axis": ht.sum(rows, 2),
    "two axes": ht.sum(rows, (1, 2)),
    "all ids": ht.sum(rows, (0, 1, 2)),
    "kept axes": ht.sum(rows, 2, keepdims=True),
    "mean": ht.mean(rows, 2),
    "weighted": ht.sum(rows * weights[..., None], 2),
    "weighted from the left": ht.sum(weights[..., None] * rows, (1, 2)),
    "divided by starts": ht.embedding_bag(table, words, starts),
    "divided, weighted": DIVIDED,
    "divided, of numbers": ht.embedding_bag(table[:, 0], words, starts, counts),
    "the gradient": ht.gradients(ht.sum(ht.square(DIVIDED)), [learned])[0],
    "a bag of bags": ht.sum(ht.embedding(ht.constant(TABLE), ht.argmax(ht.sum(rows, 2), -1)), 1),
}
OTHERS = {
    "the first axis": ht.sum(rows, 0),
    "numbers of a row": ht.sum(rows, (2, 3)),
    "a weight per number": ht.sum(rows * per_number, 2),
    "read by others": ht.sum(rows, 2, keepdims=True) + rows,
    "weighted, read by others": ht.sum(rows * weights[..., None], 2, keepdims=True) + rows,
    "divided, read twice": ht.pair_products(learned, words, starts, counts),
    "divided, a weight per number": ht.ops.index.scatter_rows(
        ht.constant(np.zeros((4, 5), "float32")),
        ht.bag_ids(starts, words),
        ht.embedding(table, words) * ht.constant(TABLE[:7]),
    ),
    "half a float": ht.sum(ht.astype(ht.embedding(ht.constant(TABLE.astype("float16")), ids), "float16"), 2),
    "columns": ht.sum(ht.take(ht.constant(TABLE.T.copy()), ids, axis=1), 3),
}
FED = {ids: np.random.default_rng(1).integers(0, 9, (4, 3, 6)), weights: np.random.default_rng(2).random((4, 3, 6))}
FED[per_number] = np.ones((4, 3, 6, 5))
FED |= {words: np.array([8, 0, 3, 3, 1, 0, 2]), starts: np.array([0, 3, 3, 6]), counts: np.arange(7.0)}


@pytest.mark.parametrize("y, found", [(y, True) for y in BAGS.values()] + [(y, False) for y in OTHERS.values()])
def test_what_becomes_a_bag(y, found):
    nodes = topological([y])
    fed = {name: FED[name] for name in FED if name in nodes}
    executor = ht.Executor({"y": [y]})
    assert found == any(step.node.op in (bag, spread) for step in executor.program("y", fed).steps)
    plain, joined = (ex.run("y", fed)[0] for ex in (ht.Executor({"y": [y]}, passes=[]), executor))
    np.testing.assert_allclose(joined, plain, rtol=1e-5, atol=1e-6)


def matrix_of(bounds, ids, weights, size):
    """The sparse matrix as an array; entries outside are none."""
    dense = np.zeros((len(bounds) - 1, size))
    for i, k, w in zip(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)), ids, weights):
        if 0 <= k < size:
            dense[i, k] += w
    return dense


@pytest.mark.parametrize("dtype, kind", [("float32", "int32"), ("float64", "int64")])
@pytest.mark.parametrize("width", [(), (1,), (3,), (5,), (7, 33), (0,)])
@pytest.mark.parametrize("lengths", [[6], [0, 0], [], [5, 0, 3, 40], [40] * 30])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("sums", [bag, spread])
def test_bags_in_c(sums, lengths, width, dtype, kind, weighted, monkeypatch):
    monkeypatch.setattr(bags, "LEAST", 1)
    rng = np.random.default_rng(0)
    bounds = np.cumsum([0, *lengths]).astype(kind)
    ids, outside = rng.integers(0, 9, bounds[-1]).astype(kind), sums is spread and bounds[-1] > 1
    ids[:2] = [-1, 9] if outside else ids[:2]
    weights = [rng.standard_normal(len(ids)).astype(dtype)] * weighted
    dense = matrix_of(bounds, ids, *(weights or [np.ones(len(ids))]), 9)
    dense = dense if sums is bag else dense.T
    given, attrs = rng.standard_normal((dense.shape[1], *width)).astype(dtype), {} if sums is bag else {"size": 9}
    want, out = np.tensordot(dense, given, 1), np.empty((len(dense), *width), dtype)
    calls = sums.bound(np, out, [bounds, ids, given, *weights], attrs, *[Scratch()] * (sums is spread))
    assert all(isinstance(call, CCall) for call in calls)
    if sums is spread and len(lengths) == 30 and width != (0,):
        assert max(call.jobs for call in calls if call.function == "spread_entries") > 1

    def plainly(call):
        written = call.file == "sparse.c"
        (c_call("sparse.c", f"{call.function}_plainly", dtype, *call.words, jobs=call.jobs) if written else call)()

    def forward(_):
        out[...] = sums.forward(np, bounds, ids, given, *weights, **attrs)

    for run in (lambda call: call(), job_by_job, plainly, forward):
        out.fill(np.nan)
        for call in calls:
            run(call)
        np.testing.assert_allclose(out, want, rtol=0, atol=2e-4 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize(
    "fed, told",
    [
        ({words: np.array([0, 1, 9])}, "index 9 at position .2. lies outside 0 to 8"),
        ({starts: np.array([0, 2, 1])}, "bag 1 begins at 2, of 3 entries"),
        ({starts: np.array([0, 4, 4])}, "bag 2 begins at 4, of 3 entries"),
        ({starts: np.array([1, 2, 2])}, "bag 0 begins at 1, of 3 entries"),
        ({starts: np.array([], int)}, "there are no bags, of 3 entries"),
    ],
)
def test_what_is_wrong_with_bags_is_told_as_without_the_pass(fed, told):
    good = {words: np.array([0, 1, 8]), starts: np.array([0, 1, 1]), counts: np.ones(3)}
    errors = []
    for passes in None, []:
        executor = ht.Executor([BAGS["the gradient"]], passes=passes)
        with pytest.raises(ht.errors.ValueRangeError, match=told) as error:
            executor.run(good | fed)
        errors.append(error.value)
    told_of = [str(error).partition(":")[2] for error in errors]  # without the name of the operator
    assert told_of[0] == told_of[1]


def test_an_id_outside_names_the_line_of_the_lookup():
    looked_up = ht.embedding(table, ids)
    executor = ht.Executor({"y": [ht.sum(looked_up, 2)]})
    with pytest.raises(ht.errors.ValueRangeError, match="index 9 at position .0, 1, 2. lies outside") as error:
        executor.run("y", {ids: FED[ids] * 0 + 9 * (np.arange(72).reshape(4, 3, 6) == 8)})
    assert error.value.site == looked_up.site
