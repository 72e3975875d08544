"""Models with tables without a bound on real servers: the same training as with a bounded one, saved and loaded."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, CheckpointError, UnknownNameError
from hetu.ps import UNBOUNDED, Cache
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, ParameterServer

from ..ps.network import ServerThread, job


def build(grows: bool, optimizer) -> dict:
    ids, t = ht.placeholder("x", (None, 4), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        init = ht.init.constant(0.25)
        if grows:
            table = ht.nn.DynamicEmbedding(3, budget=4 << 20, weight_init=init)
        else:
            table = ht.nn.Embedding(50, 3, weight_init=init)
        y = ht.nn.Linear(12, 3)(ht.flatten(table(ids), 1))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return {"train": [loss, optimizer.minimize(loss)], "infer": [y]}


KINDS = {
    "sgd": lambda: ht.optim.SGD(0.3),
    "adam": lambda: ht.optim.Adam(0.05),
    "adagrad": lambda: ht.optim.AdaGrad(0.3),
}
WIDE = np.random.default_rng(3).integers(0, UNBOUNDED, 50)  # what the ids of the bounded table are called


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("optimizer", KINDS)
def test_training_equals_that_of_one_process_with_a_bounded_table(optimizer, servers, tmp_path):
    rng = np.random.default_rng(0)
    batches = [(rng.integers(0, 50, (8, 4)), rng.integers(0, 3, 8)) for _ in range(6)]
    plain = ht.Executor(build(False, KINDS[optimizer]()))
    wanted = [float(plain.run("train", {"x": x, "t": t})[0]) for x, t in batches]

    def work(client, rank):
        worker = Connected(Place(rank, 2), client)
        ex = ht.Executor(build(True, KINDS[optimizer]()), strategy=ParameterServer(), comm=worker)
        fed = [{"x": WIDE[x], "t": t} for x, t in batches]
        losses = [float(ex.run("train", feed)[0]) for feed in fed]
        ex.save(tmp_path / "saved")
        ids = {"x": fed[0]["x"]}
        before = ex.run("infer", ids)[0]
        then = [float(ex.run("train", feed)[0]) for feed in fed]
        ex.load(tmp_path / "saved")
        np.testing.assert_array_equal(ex.run("infer", ids)[0], before)
        assert [float(ex.run("train", feed)[0]) for feed in fed] == then
        for state in [v.name for v in ex.variables if "embedding/weight/ad" in v.name][:1]:
            with pytest.raises(CheckpointError, match=rf"{state}, of which the rows are those of model/.*/weight, and"):
                ex.load(tmp_path / "saved", only=[state])
        return losses

    each = job("bsp", 2, work, servers, ServerThread)
    np.testing.assert_allclose(np.mean(each, axis=0), wanted, rtol=1e-5)


def test_rows_that_a_file_has_not_are_told(tmp_path):
    """As in a folder of parts of two checkpoints."""

    def work(client, rank):
        ex = ht.Executor(build(True, KINDS["sgd"]()), strategy=ParameterServer(), comm=Connected(Place(0, 1), client))
        ex.run("train", {"x": WIDE[:32].reshape(8, 4), "t": np.zeros(8, int)})
        ex.save(tmp_path / "saved")
        told = tmp_path / "saved" / "manifest.json"
        told.write_text(told.read_text().replace('"ids": "model', '"ids": "another'))
        with pytest.raises(CheckpointError, match=r"weight in '.*saved' is not as its manifest says: .*another.*:ids"):
            ex.load(tmp_path / "saved")
        (held,) = [t["grown"]["held"] for t in client.status()[0]["largest"] if t["grown"]]
        assert held == len(np.unique(WIDE[:32])), "what was there is lost"

    job("bsp", 1, work, 1, ServerThread)


def all_rows(table) -> ht.Node:
    return 0.1 * ht.mean(table.weight**2)


def frozen(table) -> float:
    table.freeze()
    return 0.0


@pytest.mark.parametrize(
    ("adds", "optimizer", "why", "fix"),
    [
        (None, ht.optim.Adam(0.1, clip_norm=1.0), "adam changes all its rows", "clip_norm="),
        (None, ht.optim.LAMB(0.1), "no update that servers can make trains it", "training step"),
        (all_rows, ht.optim.SGD(0.1), "sgd changes all its rows", "penalty"),
        (frozen, ht.optim.SGD(0.1), "no update that servers can make trains it", "training step"),
    ],
)
def test_what_servers_cannot_do_with_a_table_without_a_bound_is_told(adds, optimizer, why, fix):
    table, ids = ht.nn.DynamicEmbedding(3, budget=1 << 20), ht.placeholder("x", (None,), "int64")
    more = adds(table) if adds else 0.0
    loss = ht.mean(ht.nn.Linear(3, 2)(table(ids))) + more
    with pytest.raises(ArgumentError, match=rf"weight' has no bound of its rows, but {why}") as told:
        ht.Executor({"train": [loss, optimizer.minimize(loss)]}, strategy=ParameterServer(), comm=Place(0, 1))
    assert fix in told.value.fix and "at test_growing_tables.py" in str(told.value)


def test_a_table_without_a_bound_needs_servers():
    with pytest.raises(ArgumentError, match="which only parameter servers keep") as told:
        ht.Executor(build(True, KINDS["adam"]()))
    assert "ParameterServer()" in told.value.fix


def widely(table, ids, starts, weights) -> ht.Node:
    return ht.astype(ht.embedding_bag(table, ids, starts, ht.astype(weights, "float64")), "float32")


READ = {  # what also reads rows that are summed, and whether servers sum them up all the same
    "sums": (lambda *_: 0.0, True),
    "two sums of one look-up": (
        lambda table, ids, starts, weights: ht.embedding_bag(table, ids, starts, weights),
        True,
    ),
    "squared weights": (lambda table, ids, starts, w: ht.embedding_bag(table, ids, starts, ht.square(w)), True),
    "other ids": (lambda table, ids, starts, weights: ht.embedding_bag(table, 49 - ids, starts), True),
    "pairs": (lambda table, ids, starts, _: ht.pair_products(table, ids, starts)[:, None], False),
    "rows": (lambda table, ids, *_: ht.mean(ht.square(ht.embedding(table, ids))), False),
    "sums of 64 bits": (widely, False),
}


def bagged(grows: bool, optimizer, also=READ["sums"][0]) -> dict:
    ids, starts = ht.placeholder("ids", (None,), "int64"), ht.placeholder("starts", (None,), "int64")
    weights, t = ht.placeholder("weights", (None,)), ht.placeholder("t", (None,))
    with ht.scope("model"):
        init = ht.init.constant(0.25)
        grown = ht.nn.DynamicEmbedding(3, budget=4 << 20, weight_init=init, name="table")
        table = (grown if grows else ht.nn.Embedding(50, 3, weight_init=init, name="table")).weight
        y = ht.nn.Linear(3, 1)(0.1 * (ht.embedding_bag(table, ids, starts) + also(table, ids, starts, weights)))[:, 0]
        loss = ht.mean(ht.square(y - t))
        return {"train": [loss, optimizer.minimize(loss)]}


def fed(executor: ht.Executor, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    lengths = rng.integers(0, 60, 12)
    entries = int(lengths.sum())
    made = {"ids": rng.integers(0, 50, entries), "starts": np.cumsum(lengths) - lengths}
    made |= {"weights": rng.random(entries, "f4"), "t": rng.random(12, "f4")}
    return {node.name: made[node.name] for node in executor.subgraphs["train"].placeholders.values()}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("grows", [False, True], ids=["bounded", "growing"])
def test_training_is_the_same_where_servers_sum_up_bags(grows, read):
    """Where others read the rows too, these are pulled."""
    also, pooled = READ[read]
    one = ht.Executor(bagged(False, KINDS["adam"](), also))
    wanted = [float(one.run("train", fed(one, step))[0]) for step in range(4)]

    def work(client, rank):
        strategy = ParameterServer(pooled="*table*")
        ex = ht.Executor(bagged(grows, KINDS["adam"](), also), strategy=strategy, comm=Connected(Place(0, 1), client))
        losses = [float(ex.run("train", fed(ex, step))[0]) for step in range(4)]
        return losses, [each["requests"] for each in client.status()]

    [(losses, requests)] = job("bsp", 1, work, 2, ServerThread)
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    assert any("pool" in each for each in requests) == pooled


@pytest.mark.parametrize("row", [(), (1,), (2, 2)], ids=str)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0, 4, 1], [1]], ids=str)
@pytest.mark.parametrize("servers", [1, 2])
def test_bags_of_rows_of_any_axes(row, lengths, servers):
    """Of numbers, as logistic regression has them, too; bags may all be empty, and ids come again."""
    ids = np.arange(sum(lengths)) % 2
    feed = {"ids": ids, "starts": np.cumsum([0, *lengths[:-1]]), "weights": np.linspace(-1, 1, len(ids), dtype="f4")}

    def losses(**where) -> list[float]:
        with ht.scope("model"):
            x = {name: ht.placeholder(name, (None,), a.dtype) for name, a in feed.items()}
            table = ht.variable("table", ht.init.normal(), (3, *row))
            y = ht.embedding_bag(table, x["ids"], x["starts"], x["weights"])
            loss = ht.mean(ht.square(y - 0.3))
            ex = ht.Executor([loss, KINDS["adam"]().minimize(loss)], **where)
        return [float(ex.run({x[name]: a for name, a in feed.items()})[0]) for _ in range(3)]

    def work(client, rank):
        return losses(strategy=ParameterServer(pooled="*"), comm=Connected(Place(0, 1), client))

    [found] = job("bsp", 1, work, servers, ServerThread)
    np.testing.assert_allclose(found, losses(), rtol=1e-5)


def test_bags_without_a_table_and_of_a_cached_one_are_refused():
    outputs = [n for n in bagged(False, KINDS["sgd"]())["train"][1].values()]
    with pytest.raises(UnknownNameError, match=r"pooled='tables' fits no table that servers keep"):
        strategy = ParameterServer(pooled="tables").build(outputs, 1)
        strategy.check(outputs, 1)
    with pytest.raises(ArgumentError, match=r"of which each rank keeps rows") as told:
        strategy = ParameterServer(pooled="*table*", cache=Cache(rows=10)).build(outputs, 1)
        strategy.check(outputs, 1)
    assert "a cache needs the rows" in told.value.fix
