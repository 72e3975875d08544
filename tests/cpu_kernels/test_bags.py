"""Sums over rows that are looked up become bags, with and without weights; what is no bag stays."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import topological
from hetu.cpu_kernels.bags import bag, join_bags
from hetu.cpu_kernels.c_calls import CCall

from .divided import job_by_job

TABLE = np.random.default_rng(0).standard_normal((9, 5)).astype("float32")
table, ids = ht.constant(TABLE), ht.placeholder("ids", (4, 3, 6), "int64")
weights, per_number = ht.placeholder("weights", (4, 3, 6)), ht.placeholder("per_number", (4, 3, 6, 5))
rows = ht.embedding(table, ids)
BAGS = {
    "one axis": ht.sum(rows, 2),
    "two axes": ht.sum(rows, (1, 2)),
    "all ids": ht.sum(rows, (0, 1, 2)),
    "kept axes": ht.sum(rows, 2, keepdims=True),
    "mean": ht.mean(rows, 2),
    "weighted": ht.sum(rows * weights[..., None], 2),
    "weighted from the left": ht.sum(weights[..., None] * rows, (1, 2)),
    "a bag of bags": ht.sum(ht.embedding(ht.constant(TABLE), ht.argmax(ht.sum(rows, 2), -1)), 1),
}
OTHERS = {
    "the first axis": ht.sum(rows, 0),
    "numbers of a row": ht.sum(rows, (2, 3)),
    "a weight per number": ht.sum(rows * per_number, 2),
    "read by others": ht.sum(rows, 2, keepdims=True) + rows,
    "weighted, read by others": ht.sum(rows * weights[..., None], 2, keepdims=True) + rows,
    "columns": ht.sum(ht.take(ht.constant(TABLE.T.copy()), ids, axis=1), 3),
}
FED = {ids: np.random.default_rng(1).integers(0, 9, (4, 3, 6)), weights: np.random.default_rng(2).random((4, 3, 6))}
FED[per_number] = np.ones((4, 3, 6, 5))


@pytest.mark.parametrize("y, found", [(y, True) for y in BAGS.values()] + [(y, False) for y in OTHERS.values()])
def test_what_becomes_a_bag(y, found):
    (made,) = join_bags([y])
    nodes = topological([made])
    assert found == any(node.op is bag for node in nodes)
    fed = {name: FED[name] for name in FED if name in nodes}
    plain, joined = (ht.Executor({"y": [y]}, passes=p).run("y", fed)[0] for p in ([], ["join_bags", "fuse_groups"]))
    np.testing.assert_allclose(joined, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("width", [(), (1,), (5,), (7, 33)])
@pytest.mark.parametrize("shape, axes", [((6,), 1), ((4, 0), 1), ((5, 3), 1), ((2, 3, 4), 2), ((0, 3), 1)])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags_in_c(shape, axes, width, dtype, weighted):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((9, *width)).astype(dtype), rng.integers(0, 9, shape).astype("int32")]
    arrays += [rng.standard_normal(shape).astype(dtype)] if weighted else []
    want = bag.forward(np, *arrays, axes=axes)
    out = np.empty_like(want)
    calls = bag.bound(np, out, arrays, {"axes": axes})
    assert all(isinstance(call, CCall) for call in calls)
    for run in (lambda call: call(), job_by_job):
        out.fill(np.nan)
        for call in calls:
            run(call)
        np.testing.assert_allclose(out, want, rtol=2e-5 if dtype == "float32" else 1e-12, atol=1e-5)


def test_an_id_outside_names_the_line_of_the_lookup():
    looked_up = ht.embedding(table, ids)
    executor = ht.Executor({"y": [ht.sum(looked_up, 2)]})
    with pytest.raises(ht.errors.ValueRangeError, match="index 9 at position .0, 1, 2. lies outside") as error:
        executor.run("y", {ids: FED[ids] * 0 + 9 * (np.arange(72).reshape(4, 3, 6) == 8)})
    assert error.value.site == looked_up.site
