"""Strategies as data: what a builder writes survives JSON, and then trains as what the builder gives an executor."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np
import pytest

import hetu as ht
from hetu import dist
from hetu.core.errors import ArgumentError, UnknownNameError
from hetu.dist import Strategy, run_ranks
from hetu.dist.comm.threads import count_names_apart
from hetu.dist.cut.strategy import KINDS
from hetu.ps import ASP, BSP, SSP, Cache, Client, Compress, Placed
from hetu.strategies import (
    PS,
    AllReduce,
    Connected,
    Hybrid,
    Parallax,
    ParameterServer,
    PartitionedAR,
    PartitionedPS,
    RandomAxisPartitionAR,
    Served,
    Serving,
)

from ..ps.network import ServerThread, job
from .test_hybrid import OPTIMIZERS, ROWS, batch, model, trained
from .test_hybrid import job as job_of_ranks

NAMES = ["up/weight", "up/bias", "down/weight", "down/bias"]  # of the dense variables
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
    "buckets": AllReduce(2),
    "halves": PartitionedAR(),
    "drawn halves": RandomAxisPartitionAR(3),
}
ON_SERVERS = {
    "parallax": Parallax(),
    "hybrid": Hybrid(served="*/large/*", batch_size=ROWS, consistency=BSP()),
    "hybrid of zero": Hybrid(dist.ZeRO(3), served=["*/large/*", "*/small/*"]),
    "placed": Hybrid(served="*/large/*", placed={"*/large/*": Placed(np.arange(500) % 2, [[1], [0, 2]])}),
    "hybrid of a pipeline": Hybrid(dist.Pipeline(2, microbatches=1), served="*/large/*"),
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
    builder = ParameterServer(consistency=mode, cache=cache)
    strategy = builder.build(outputs(), 2)
    read = Strategy.from_json(strategy.to_json())
    assert read.apart and read == strategy
    assert {read.variables[name].consistency for name in ("model/large/weight", "model/up/bias")} == {mode}
    for name, asked in (("consistency", mode), ("cache", cache)):
        assert (f", {name}={asked!r}" in repr(builder)) == (asked is not None)
    assert (f"  {mode}" in str(strategy)) == (mode is not None) and str(strategy).endswith("ranks: apart")


def test_each_variable_says_what_it_asks_of_the_servers():
    """One value is for all that can have it, and of several patterns the first that fits counts."""
    placed, wide = Placed(np.arange(500) % 2), Compress("int8", "1bit", at_rest="int8")
    cache = {"*/la*": Cache("lru", 60, 0, 0), "*/large/*": Cache("lfu")}
    strategy = ParameterServer(cache=cache, compress=wide, placed={"*large*": placed}, pooled="*small*").build(
        outputs(), 2
    )
    rows, whole = Compress("int8", at_rest="int8"), Compress(gradients="1bit")
    assert strategy.variables == {
        "model/large/weight": Served(compress=rows, cache=cache["*/la*"], placed=placed),
        "model/small/weight": Served(compress=rows, pooled=True),
        **{f"model/{name}": Served(copied=True, compress=whole) for name in NAMES},
    }
    assert Strategy.from_json(strategy.to_json()) == strategy
    lines = [re.split("  +", line) for line in str(strategy).splitlines()[2:8]]
    lru, codes = "Cache(policy='lru', rows=60, pull_bound=0, push_bound=0)", "Compress(rows='int8', at_rest='int8')"
    where = "Placed(500 rows in 2 parts of 250 to 250 rows)"
    assert sorted(lines) == sorted([
        ["model/large/weight", "by rows", "servers", f"{codes}, {lru}, {where}"],
        ["model/small/weight", "by rows", "servers", f"{codes}, bags summed there"],
        *(["model/" + name, "whole", "servers", "Compress(gradients='1bit')"] for name in NAMES),
    ])  # fmt: skip


@pytest.mark.parametrize("text", ["{}", '{"kind": "serving"}', '{"kind": "sewing"}', "[]", "{", {}])
def test_what_is_no_strategy_is_refused(text):
    with pytest.raises(ArgumentError, match=r"not a strategy[\s\S]*fix: pass what Strategy.to_json wrote"):
        Strategy.from_json(text)


def kept(**wrong):
    layout = dist.Mesh((1,), ("data",)).layout()
    return {"variables": {"w": dist.Kept(layout, layout).to_json() | wrong}}


def served(**wrong):
    return {"variables": {"w": Served().to_json() | wrong}}


WRONG = {
    '"sewing", wanted one of layouts, .*serving': {"kind": "sewing"},
    "wanted base, .*; wrong or missing: color": {"color": 3},
    "consistency is 'bps': unknown consistency 'bps'.*fix: use bsp, asp": served(consistency="bps"),
    "consistency is 3: consistency got text=3.*fix: pass text as str": served(consistency=3),
    "cache is .*no cache policy 'lur'.*did you mean 'lru'": served(cache={"policy": "lur"}),
    "cache is .*rows='5'.*fix: pass rows as": served(cache={"rows": "5"}),
    "cache is .*takes no 'pull'.*fix: known names: ahead": served(cache={"pull": 5}),
    "compress is .*no way 'int9'.*did you mean 'int8'": served(compress={"rows": "int9"}),
    "Compress.gradients='1bit'. of what travels by rows.*fix: say rows=": served(compress={"gradients": "1bit"}),
    "placed is .*a division .*fix: give owners, replicas": served(placed={"owners": [0]}),
    "pooled is 1: wanted bool": served(pooled=1),
    "pooled= of a table of which each rank keeps rows.*fix: leave one out": served(pooled=True, cache={}),
    "cache= of a variable that is copied whole.*fix: use it for tables": served(copied=True, cache={}),
    "apart is 'no': wanted bool": {"apart": "no"},
    "batch_size is 'many': wanted int": {"batch_size": "many"},
    "batch_size is -1: -1 is not of 0 at least": {"batch_size": -1},
    "bucket_bytes is '4': wanted int": {"bucket_bytes": "4"},
    "not a variable on ranks.*wrong or missing: bucket, compute, sore, store, through.*did you mean 'store'": {
        "variables": {"w": {"sore": 1}}
    },
    "bucket is 'one': wanted int": kept(bucket="one"),
    "through is 5: wanted list": kept(through=5),
    "not a variable on servers.*wrong or missing: catch.*did you mean 'cache'": served(catch={}),
    "copied is 'no': wanted bool": served(copied="no"),
    "feeds is .*5 is not a layout.*fix: pass what to_json": {"feeds": {"x": 5}},
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_in_the_data_of_a_strategy_is_named(said):
    data = json.loads(ON_SERVERS["cached hybrid"].build(outputs(), 2).to_json()) | WRONG[said]
    with pytest.raises(ArgumentError, match=f"(?s){said.replace(chr(34), chr(39))}"):
        Strategy.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Hybrid("dp"), r"parallel='dp'.*DataParallel\(\)"),
        (lambda: Hybrid(batch_size="8"), "batch_size='8'.*count the rows"),
        (lambda: ParameterServer(consistency="bsp"), r"consistency='bsp'.*hetu.ps.BSP\(\)"),
        (lambda: ParameterServer(cache="lru"), "cache='lru'.*hetu.ps.Cache"),
        (lambda: Hybrid(served="*/large/weights").build(outputs(), 2), "fits no table.*'model/large/weight'"),
        (lambda: Hybrid(served="*/up/*").build(outputs(), 2), "served='.*' fits no table that is only looked up"),
        (
            lambda: ParameterServer(cache={"model/larg/weight": Cache()}).build(outputs(), 2),
            "cache='.*' fits no table that servers keep.*did you mean 'model/large/weight'",
        ),
        (
            lambda: ParameterServer(compress={"*/up/*": Compress(at_rest="int8")}).build(outputs(), 2),
            "at_rest='int8', but servers keep no table that it is for.*served=",
        ),
        (
            lambda: ParameterServer(compress={"*/u": Compress()}).build(outputs(), 2),
            "fits no variable that servers keep",
        ),
    ],
)
def test_what_servers_cannot_be_asked_for_is_refused(made, said):
    with pytest.raises((ArgumentError, UnknownNameError), match=f"(?s){said}"):
        made()


def test_ranks_that_keep_variables_must_be_able_to_talk():
    worker = Connected(ht.ps.wire.environment.Place(0, 2))
    with pytest.raises(ArgumentError, match=r"cannot talk to each other[\s\S]*comm=Connected\(comm, client\)"):
        ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=Hybrid(), comm=worker)


def test_a_strangers_kind_of_strategy_is_data_too():
    @dataclass
    class Colored(Strategy):
        color: str = "red"

    class Plain(Strategy):
        pass

    layout = dist.Mesh((1,), ("data",)).layout()
    try:
        for strategy in (Colored(layout, color="blue"), Plain(layout), Strategy(layout)):
            read = Strategy.from_json(strategy.to_json())
            assert (type(read), read) == (type(strategy), strategy)
    finally:
        for kind in ("Colored", "Plain"):
            KINDS.pop(kind)


def again(strategy):
    """What a strategy's JSON says, for an executor of the same model."""
    graph = model(OPTIMIZERS["sgd"]())
    nodes = [n for entries in graph.values() for e in entries for n in (e.values() if isinstance(e, dict) else [e])]
    return Strategy.from_json(strategy.build(nodes, 2).to_json())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["data", "tensor", "unequal"])
def test_ranks_train_alike_by_what_is_read(name):
    def body(comm: dist.Comm, strategy):
        return trained(ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=comm))[0]

    written = run_ranks(2, lambda comm: body(comm, ON_RANKS[name]))
    assert run_ranks(2, lambda comm: body(comm, again(ON_RANKS[name]))) == written


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ON_SERVERS)
def test_ranks_with_servers_train_alike_by_what_is_read(name):
    def body(client: Client, comm: dist.Comm, strategy):
        ex = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=Connected(comm, client))
        assert sum(map(ex.placement.strategy.is_served, ex.variables)) == len(ex.placement.kept) > 0
        return trained(ex)[0]

    written = job_of_ranks(2, lambda client, comm: body(client, comm, ON_SERVERS[name]))
    read = job_of_ranks(2, lambda client, comm: body(client, comm, again(ON_SERVERS[name])))
    np.testing.assert_allclose(read, written, rtol=1e-6)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", APART)
def test_workers_train_alike_by_what_is_read(name):
    def body(client: Client, rank: int, strategy):
        count_names_apart()
        comm = Connected(ht.ps.wire.environment.Place(rank, 2), client)
        ex = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=comm)
        assert (ex.placement.rank, ex.placement.world_size) == (rank, 2)
        return [float(ex.run("train", batch(step))[0]) for step in range(4)]

    written = job("bsp", 2, lambda client, rank: body(client, rank, APART[name]), kind=ServerThread)
    read = job("bsp", 2, lambda client, rank: body(client, rank, again(APART[name])), kind=ServerThread)
    assert read == written
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


def test_a_variable_that_is_read_whole_is_not_kept_by_rows():
    strategy = Serving(dist.Mesh((1,), ("data",)).layout(), {"model/up/weight": Served()})
    with pytest.raises(
        ArgumentError, match=r"'model/up/weight' .* by rows, but a step reads all of it[\s\S]*copied=True"
    ):
        strategy.check(outputs(), 1)


def test_a_variable_that_servers_cannot_update_is_refused():
    graph = model(OPTIMIZERS["sgd"]())
    layout = dist.Mesh((1,), ("data",)).layout()
    strategy = Serving(layout, {"model/up/weight": Served(copied=True)})
    with pytest.raises(ArgumentError, match="'model/up/weight' is to be kept on servers, which cannot update it"):
        ht.Executor({"eval": graph["eval"]}, strategy=strategy, comm=dist.SerialComm())
