"""Sums of what is computed entry by entry equal the same graph without the pass: models, losses, rules, strangers'."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import hetu as ht
from hetu.core.backend import Scratch
from hetu.core.graph import topological
from hetu.core.types import elementwise
from hetu.cpu_kernels.c_calls import CCall
from hetu.passes import PASSES

from .divided import job_by_job

pytestmark = pytest.mark.compiled
COUNT, FIELDS = 50, 3
WITHOUT = [name for name, run in PASSES.items() if getattr(run, "device", "cpu") == "cpu" and name != "join_entries"]


@ht.optim.update_rule
def stranger(p, m, g, lr, step, *, keep=0.5):
    m = keep * m + ht.tanh(g)
    return p - lr * m / step, m


class Stranger(ht.optim.Optimizer):
    rule = stranger


@ht.op(infer=elementwise, dims="...->...", code="y = x * x / ((T)1 + fabs(x))")
def bent(xp, x):
    """A curve of nobody's."""
    return x * x / (1 + xp.abs(x))


@ht.op(infer=elementwise, dims="...->...", differentiable=False)
def slope(xp, x):
    """Its slope, for which there is no C."""
    return x * (2 + xp.abs(x)) / (1 + xp.abs(x)) ** 2


@bent.grad
def bent_grad(g, y, x):
    return g * slope(x)


def csr(lengths, hot=False, seed=0):
    """Ids, starts, weights and fields; of hot ids, a few are most of them, within one bag too."""
    rng, entries = np.random.default_rng(seed), int(np.sum(lengths))
    ids = rng.zipf(1.5, entries) % COUNT if hot else rng.integers(0, COUNT, entries)
    return ids, np.cumsum([0, *lengths[:-1]]), rng.standard_normal(entries), rng.integers(0, FIELDS, entries)


BAGS = {
    "empty bags": csr([0, 3, 0, 0, 5, 0]),
    "hot": csr([7] * 30, hot=True),
    "one": csr([1]),
    "no entries": csr([0, 0]),
    "one id": (np.full(13, COUNT - 1), np.array([0, 0, 6, 11, 13]), np.arange(13.0) / 9, np.arange(13) % FIELDS),
    "many": csr([40] * 900, hot=True),
}
OPTIMIZERS = {
    "sgd": lambda: ht.optim.SGD(0.1), "adam": lambda: ht.optim.Adam(0.01), "adagrad": lambda: ht.optim.AdaGrad(0.1),
    "momentum": lambda: ht.optim.Momentum(0.1), "stranger": lambda: Stranger(0.1),
}  # fmt: skip


def table(name, shape, dtype):
    return ht.variable(name, ht.init.normal(0.3), shape, dtype)


def lr(x, dtype):
    return ht.embedding_bag(table("w", (COUNT,), dtype), x["ids"], x["starts"], x["weights"])


def fm(x, dtype):
    return lr(x, dtype) + ht.pair_products(table("v", (COUNT, 5), dtype), x["ids"], x["starts"], x["weights"])


def ffm(x, dtype):
    t = table("v", (COUNT, FIELDS * 2), dtype)
    return ht.field_products(t, x["ids"], x["fields"], FIELDS, x["starts"], x["weights"])


def deep(x, dtype):
    bags = ht.field_bags(table("v", (COUNT, 4), dtype), x["ids"], x["fields"], FIELDS, x["starts"], x["weights"])
    kernel = table("deep", (4 * FIELDS, 1), dtype)
    return lr(x, dtype) + ht.squeeze(ht.tanh(ht.flatten(bags, 1)) @ kernel, axis=1)


def plain(x, dtype):
    """Rows as they are looked up, without weights."""
    return ht.sum(ht.embedding_bag(table("v", (COUNT, 3), dtype), x["ids"], x["starts"]), axis=1)


def of_stranger(x, dtype):
    """Elementwise code of no known model, over two tables and a number of each bag, of two axes of columns."""
    a, b = table("a", (COUNT, 2, 3), dtype), table("b", (7,), dtype)
    bags = ht.ops.bag_ids(x["starts"], x["ids"])
    mine = ht.expand_dims(ht.embedding(b, x["ids"] % 7) * x["weights"], axis=(1, 2))
    rows = ht.sigmoid(ht.embedding(a, x["ids"])) * mine - ht.square(mine)
    return ht.sum(ht.scatter_add(ht.full((x["starts"].shape[0], 2, 3), 0.0, dtype), bags, rows), axis=(1, 2))


def bent_fields(x, dtype):
    """A field-aware machine of a stranger's curve, under other names, of which a bag may have no field."""
    t, bags = table("quux", (COUNT, FIELDS, 2), dtype), ht.ops.bag_ids(x["starts"], x["ids"])
    rows = bent(ht.embedding(t, x["ids"])) * ht.expand_dims(x["weights"], axis=(1, 2))
    zeros = ht.full((x["starts"].shape[0] * FIELDS, FIELDS, 2), 0.0, dtype)
    sums = ht.reshape(ht.scatter_add(zeros, bags * FIELDS + x["fields"], rows), (-1, FIELDS, FIELDS, 2))
    return ht.sum(sums * ht.permute_dims(sums, (0, 2, 1, 3)), axis=(1, 2, 3))


def of_ids(x, dtype):
    """A row depends on the number of its id, and one table is looked up twice."""
    t, bags = table("glorp", (COUNT,), dtype), ht.ops.bag_ids(x["starts"], x["ids"])
    rows = ht.embedding(t, x["ids"]) * ht.astype(x["ids"], dtype) / COUNT
    rows = ht.where(ht.embedding(t, x["ids"]) > 0, rows, x["weights"])
    return ht.scatter_add(ht.full((x["starts"].shape[0],), 0.0, dtype), bags, rows)


def two_lists(x, dtype):
    """Vectors of one table by two lists of ids, which meet in each entry: its rows are read where others change."""
    t = table("t", (COUNT, 4), dtype)
    bags, pairs = ht.ops.bag_ids(x["starts"], x["ids"]), ht.embedding(t, x["ids"]) * ht.embedding(t, x["fields"])
    return ht.sum(ht.scatter_add(ht.full((x["starts"].shape[0], 4), 0.5, dtype), bags, pairs), axis=1)


def lacking(x, dtype):
    """A weight and a row of a table that stand beside several entries and columns each."""
    a, b = table("a", (COUNT, 2, 3, 2), dtype), table("b", (COUNT, 2, 1, 2), dtype)
    ids, bags = ht.stack([x["ids"], x["fields"]]), ht.ops.bag_ids(x["starts"], x["ids"])
    rows = ht.tanh(ht.embedding(a, ids)) * ht.embedding(b, ids) * ht.reshape(x["weights"], (1, -1, 1, 1, 1))
    sums = ht.scatter_add(ht.full((x["starts"].shape[0], 2, 3, 2), 0.0, dtype), ht.stack([bags, bags]), rows)
    return ht.sum(sums, axis=(1, 2, 3))


def graph(model, dtype, data, optimizer):
    ids, starts, weights, fields = data
    arrays = {"ids": ids, "starts": starts, "weights": weights.astype(dtype), "fields": fields}
    x = {name: ht.placeholder(name, a.shape, a.dtype) for name, a in arrays.items()}
    y = model(x, dtype)
    loss = ht.mean(ht.softplus(y) - 0.3 * y)
    feed = {node: arrays[name] for name, node in x.items() if node in topological([loss])}
    return [loss, optimizer.minimize(loss)], feed


def trained(fetches, feed, passes, seed=0):
    executor = ht.Executor(fetches, passes=passes, seed=seed)
    losses = [float(executor.run(feed)[0]) for _ in range(3)]
    return losses, {v.name: np.array(executor.state[v]) for v in executor.variables}, executor.program(feed)


@pytest.mark.parametrize("data", BAGS)
@pytest.mark.parametrize("model", [lr, fm, ffm, deep, plain, of_stranger, bent_fields, of_ids, two_lists, lacking])
def test_models(model, data):
    dtype, near = ("float64", 1e-12) if data == "many" else ("float32", 1e-6)  # of many float32, a sum has less digits
    fetches, feed = graph(model, dtype, BAGS[data], OPTIMIZERS["sgd"]())
    same(trained(fetches, feed, None), trained(fetches, feed, WITHOUT), near)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rules(optimizer, dtype):
    """Of float16 nothing is compiled."""
    for seed, model in enumerate((fm, of_stranger)):
        fetches, feed = graph(model, dtype, BAGS["hot"], OPTIMIZERS[optimizer]())
        ways = [trained(fetches, feed, passes, seed) for passes in (None, WITHOUT)]
        same(*ways, {"float16": 2e-3, "float32": 1e-6, "float64": 1e-13}[dtype])


def same(one, other, near):
    np.testing.assert_allclose(one[0], other[0], rtol=10 * near)
    for name, value in other[1].items():
        scale = np.abs(value).max(initial=1)
        np.testing.assert_allclose(one[1][name] / scale, value / scale, rtol=near, atol=near, err_msg=name)


@pytest.mark.parametrize("model, sums", [(lr, 1), (fm, 3), (ffm, 2), (plain, 1), (two_lists, 1)])
def test_no_row_of_an_entry_is_in_memory(model, sums):
    """One call for each sum and each table, and no other instruction over the entries, but those of their ids."""
    fetches, feed = graph(model, "float32", BAGS["many"], OPTIMIZERS["sgd"]())
    count, names = len(BAGS["many"][0]), Counter()
    for step in trained(fetches, feed, None)[2].steps:
        names[step.node.op.name] += 1
        types = step.node.type if isinstance(step.node.type, tuple) else (step.node.type,)
        joined = model is not two_lists  # the gradients of two lists are one list of rows
        assert not (joined and any(t.dtype.kind == "f" and count in t.shape for t in types)), step.node
    assert names["summed_entries"] + names["bag"] == sums and names["update_entries"] == (len(fetches[1]) - 1) * joined
    assert not names["scatter_rows"] + names["scatter_add"]


def bound(node, rng):
    """Calls of an operator for numbers of its types, the results that they fill, what they should be and the arrays."""
    given = {i: np.asarray(1 + rng.random(i.shape), i.dtype) for i in node.inputs}
    given |= {i: rng.integers(0, 5, i.shape) for i in node.inputs if i.ndim and i.dtype.kind == "i"}
    arrays = [given[i] for i in node.inputs]
    want = node.op.forward(np, *arrays, **node.attrs)
    want = want if isinstance(want, tuple) else (want,)
    outs = tuple(np.full_like(w, np.nan) for w in want)
    calls = node.op.bound(np, outs if len(outs) > 1 else outs[0], arrays, node.attrs, Scratch())
    assert all(isinstance(call, CCall) for call in calls)
    return calls, outs, want, arrays


def test_rows_are_written_once():
    """At least half of all writes are saved where ids follow a law of Zipf, as they do in clicks."""
    rng, rows = np.random.default_rng(0), 100_000
    law = np.arange(1, rows + 1.0) ** -1.05
    ids = rng.permutation(rows)[rng.choice(rows, 40_000, p=law / law.sum())]
    w, x = ht.variable("w", ht.init.zeros, (rows,)), ht.placeholder("ids", ids.shape, "int64")
    weights, starts = np.ones(len(ids), "float32"), np.arange(0, len(ids), 40)
    loss = ht.sum(ht.sigmoid(ht.embedding_bag(w, x, starts, weights)))
    program = trained([loss, ht.optim.SGD(0.1).minimize(loss)], {x: ids}, None)[2]
    (node,) = (step.node for step in program.steps if step.node.op.name == "update_entries")
    calls, _, _, arrays = bound(node, rng)
    arrays[-1][:] = ids  # of rows; others are those of bags
    for call in calls:
        call()
    (places,) = (a for a in calls[-1].words if isinstance(a, np.ndarray) and a.dtype == "int64")
    written = places[places < rows]
    assert len(places) == calls[-1].jobs and sorted(written) == sorted({*ids}) and len(written) < len(ids) / 2


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("data", ["hot", "many"])
def test_threads_do_not_decide(data, optimizer):
    """Each job gives what it gives alone, in any order, beside the tables and in place."""
    fetches, feed = graph(fm, "float32", BAGS[data], OPTIMIZERS[optimizer]())
    nodes = [step.node for step in trained(fetches, feed, None)[2].steps if "_entries" in step.node.op.name]
    assert len(nodes) == 4
    for node in nodes:
        calls, outs, want, arrays = bound(node, np.random.default_rng(0))
        alone = []
        for run in (lambda call: call(), job_by_job):
            for call in calls:
                run(call)
            alone.append([out.copy() for out in outs])
        inside = node.op.bound(np, tuple(arrays[: len(outs)]), arrays, node.attrs, Scratch()) if node.op.inplace else []
        for call in inside:
            job_by_job(call)
        assert len(inside) == (len(calls) - len(outs)) * bool(inside)
        alone += [arrays[: len(outs)]] * bool(inside)
        for found in zip(*alone, want, strict=True):
            for got in found[1:-1]:
                np.testing.assert_array_equal(found[0], got)
            np.testing.assert_allclose(found[0], found[-1], rtol=2e-3 if data == "many" else 1e-4)


def test_an_id_outside_is_told():
    fetches, feed = graph(fm, "float32", BAGS["hot"], OPTIMIZERS["sgd"]())
    executor = ht.Executor(fetches)
    node = next(n for n in feed if n.name == "ids")
    with pytest.raises(ht.errors.ValueRangeError, match="index 50 at position .3. lies outside 0 to 49"):
        executor.run({**feed, node: np.where(np.arange(210) == 3, 50, feed[node])})


@pytest.mark.parametrize("passes", [None, WITHOUT], ids=["joined", "apart"])
def test_a_row_outside_is_told(passes):
    ids, rows = (ht.placeholder(name, (4,), "int64") for name in ("ids", "rows"))
    vectors = ht.tanh(ht.embedding(ht.constant(np.ones((9, 3), "float32")), ids))
    executor = ht.Executor([ht.scatter_add(ht.full((5, 3), 0.0), rows, vectors)], passes=passes)
    with pytest.raises(ht.errors.ValueRangeError, match="row id 5 at position .2. lies outside 0 to 4"):
        executor.run({ids: np.zeros(4, int), rows: np.array([0, 1, 5, 4])})


def test_without_a_compiler_the_plain_path_runs(monkeypatch):
    fetches, feed = graph(fm, "float32", BAGS["hot"], OPTIMIZERS["adam"]())
    want = trained(fetches, feed, None)
    monkeypatch.setenv("HETU_KERNELS", "0")
    got = trained(fetches, feed, None)
    assert "summed_entries" not in {step.node.op.name for step in got[2].steps}
    same(got, want, 1e-6)
