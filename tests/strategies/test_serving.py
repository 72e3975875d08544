"""Strategies as data: what a builder writes survives JSON, and then trains as what the builder gives an executor."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import dist
from hetu.core.errors import ArgumentError
from hetu.core.leaf import count_names_apart
from hetu.dist import Served, Strategy, run_ranks
from hetu.plan.builders import PS, AllReduce, PartitionedAllReduce, PartitionedPS, RandomAxisAllReduce
from hetu.ps import ASP, BSP, SSP, Cache, Client
from hetu.strategies import Connected, Hybrid, ParameterServer, Serving

from ..ps.network import job
from .test_hybrid import OPTIMIZERS, ROWS, batch, model, trained
from .test_hybrid import job as job_of_ranks

SPLIT = {"*/up/weight": 1, "*/up/bias": 0, "*/down/weight": 0}
ON_RANKS = {
    "data": dist.DataParallel(),
    "zero1": dist.ZeRO(1),
    "zero3": dist.ZeRO(3),
    "tensor": dist.TensorParallel(SPLIT),
    "tensor and zero": dist.Parallel(data=1, tensor=2, zero=3, split=SPLIT),
    "unequal": dist.Heterogeneous([(0,), (1,)], shares=(2, 1)),
    "pipeline": dist.Pipeline(2, microbatches=2, schedule="gpipe"),
    "home": PS(),
    "homes": PartitionedPS(),
    "buckets": AllReduce(1 << 10),
    "halves": PartitionedAllReduce(),
    "drawn halves": RandomAxisAllReduce(3),
}
ON_SERVERS = {
    "hybrid": Hybrid(served="*/large/*", batch_size=ROWS, consistency=BSP()),
    "hybrid of zero": Hybrid(dist.ZeRO(3), served=["*/large/*", "*/small/*"]),
    "cached hybrid": Hybrid(served="*/large/*", cache=Cache("lru", 60, 0, 0), consistency=BSP()),
}
APART = {
    "servers": ParameterServer(consistency=BSP()),
    "cache": ParameterServer(cache=Cache("lru", 60, 0, 0)),
    "hybrid of everything": Hybrid(served=["*"]),
}


def outputs() -> list[ht.Node]:
    loss, updates = model(OPTIMIZERS["sgd"]())["train"]
    return [loss, *updates.values()]


@pytest.mark.parametrize("builder", [*ON_RANKS.values(), *ON_SERVERS.values(), *APART.values()], ids=repr)
def test_what_is_read_is_what_was_written(builder):
    strategy = builder.build(outputs(), 2)
    read = Strategy.from_json(strategy.to_json())
    assert (type(read), read) == (type(strategy), strategy) and read.build([], 7) is read


@pytest.mark.parametrize("mode", [None, BSP(), SSP(3), ASP()], ids=str)
@pytest.mark.parametrize("cache", [None, Cache("lfu", 0.25, 3, 5)], ids=["no cache", "cache"])
def test_all_that_servers_are_asked_for_is_data(mode, cache):
    strategy = ParameterServer(consistency=mode, cache=cache).build(outputs(), 2)
    read = Strategy.from_json(strategy.to_json())
    assert (read.consistency, read.cache, read.apart) == (mode, cache, True) and read == strategy


@pytest.mark.parametrize("text", ["{}", '{"kind": "serving"}', '{"kind": "sewing"}', "[]", "{"])
def test_what_is_no_strategy_is_refused(text):
    with pytest.raises(ArgumentError, match=r"not a strategy[\s\S]*fix: pass what Strategy.to_json wrote"):
        Strategy.from_json(text)


def again(strategy):
    """What a strategy's JSON says, for an executor of the same model."""
    graph = model(OPTIMIZERS["sgd"]())
    nodes = [n for entries in graph.values() for e in entries for n in (e.values() if isinstance(e, dict) else [e])]
    return Strategy.from_json(strategy.build(nodes, 2).to_json())


@pytest.mark.parametrize("name", ["data", "tensor", "unequal"])
def test_ranks_train_alike_by_what_is_read(name):
    def body(comm: dist.Comm, strategy):
        return trained(ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=comm))[0]

    written = run_ranks(2, lambda comm: body(comm, ON_RANKS[name]))
    assert run_ranks(2, lambda comm: body(comm, again(ON_RANKS[name]))) == written


@pytest.mark.parametrize("name", ON_SERVERS)
def test_ranks_with_servers_train_alike_by_what_is_read(name):
    def body(client: Client, comm: dist.Comm, strategy):
        ex = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=Connected(comm, client))
        assert sum(map(ex.placement.strategy.is_served, ex.variables)) == len(ex.placement.kept) > 0
        return trained(ex)[0]

    written = job_of_ranks(2, lambda client, comm: body(client, comm, ON_SERVERS[name]))
    read = job_of_ranks(2, lambda client, comm: body(client, comm, again(ON_SERVERS[name])))
    np.testing.assert_allclose(read, written, rtol=1e-6)


@pytest.mark.parametrize("name", APART)
def test_workers_train_alike_by_what_is_read(name):
    def body(client: Client, rank: int, strategy):
        count_names_apart()
        comm = Connected(ht.ps.wire.environment.Place(rank, 2), client)
        ex = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=comm)
        assert (ex.placement.rank, ex.placement.world_size) == (rank, 2)
        return [float(ex.run("train", batch(step))[0]) for step in range(4)]

    written = job("bsp", 2, lambda client, rank: body(client, rank, APART[name]))
    assert job("bsp", 2, lambda client, rank: body(client, rank, again(APART[name]))) == written
    assert written[0] != written[1]  # each has a loss of its own


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_whole_variable_may_be_served_to_ranks_that_share_a_loss(optimizer):
    """What no builder writes: dense variables on servers, the rest and the loss among ranks."""
    wanted = trained(ht.Executor(model(OPTIMIZERS[optimizer]())))[0]

    def body(client: Client, comm: dist.Comm):
        graph = model(OPTIMIZERS[optimizer]())
        loss, updates = graph["train"]
        plain = dist.DataParallel().build([loss, *updates.values(), graph["eval"][1]], 2)
        states = [v for v in updates if v.name.startswith("model/up/weight/") and v.ndim]
        plain.variables |= {"model/up/weight": Served(copied=True)} | {v.name: Served() for v in states}
        strategy = Serving(plain.base, plain.variables, plain.feeds)
        ex = ht.Executor(graph, strategy=strategy, comm=Connected(comm, client))
        assert "model/up/weight" in client.parameters and "model/up/weight" in ex.state
        assert not {v.name for v in states} & set(ex.state)
        return trained(ex)[0]

    for losses in job_of_ranks(2, body):
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)


def test_a_variable_that_servers_cannot_update_is_refused():
    graph = model(OPTIMIZERS["sgd"]())
    layout = dist.Mesh((1,), ("data",)).layout()
    strategy = Serving(layout, {"model/up/weight": Served(copied=True)})
    with pytest.raises(ArgumentError, match="'model/up/weight' is to be kept on servers, which cannot update it"):
        ht.Executor({"eval": graph["eval"]}, strategy=strategy, comm=dist.SerialComm())
