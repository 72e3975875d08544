"""Pipelines whose tables live on servers train as one process does: a step is one clock, one pull and one push."""

from __future__ import annotations

import functools
import sys
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.core.op import Role
from hetu.dist import Comm, DataParallel, Pipeline, Pipelines, Strategy, run_ranks
from hetu.dist.comm.threads import count_names_apart
from hetu.dist.comm.world import world
from hetu.plan import MachineProfile, simulate
from hetu.ps import ASP, SSP, Cache, Client
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, Hybrid, Served

from .. import pairs
from ..dist.test_launch import heturun
from ..ps import network
from ..ps.network import ServerThread
from .test_hybrid import OPTIMIZERS, job

ROWS, STEPS, SPLIT = 8, 4, {"*up/weight": 1, "*up/bias": 0}
RULES = {"momentum": lambda: ht.optim.Momentum(0.1), **OPTIMIZERS}
WAYS: dict[str, tuple[int, Any]] = {  # ranks and the strategy for all but the tables
    "1f1b": (2, Pipeline(2, 4)),
    "gpipe": (2, Pipeline(2, 2, "gpipe")),
    "three": (3, Pipeline(3, 4)),
    "data": (4, Pipeline(2, 2, data=2)),
    "tensor": (4, Pipeline(2, 2, tensor=2, split=SPLIT)),
    "zero": (4, Pipeline(2, 4, "gpipe", data=2, zero=3)),
    "wide first": (3, Pipelines([[(0, 1), (2,)]], None, 2, split={})),
    "unlike": (3, Pipelines([[(0,), (1,)], [(2,)]], (2, 2), 2, split={})),
    "six": (6, Pipeline(3, 2, data=2)),
    "one stage": (2, DataParallel(accumulate=2)),
    "own batches": (4, Pipeline(2, 2, data=2, statistics="microbatch")),
    "own feeds": (2, DataParallel(accumulate=2, local_feeds=True)),
}


def model(looked: str, optimizer: Any) -> dict[str, list[Any]]:
    """Rows of a table are looked up by a first layer, a later one, or two stages; ids are fed, or made of rows."""
    ids, more = ht.placeholder("ids", (None, 3), "int64"), ht.placeholder("more", (None,), "int64")
    t = ht.placeholder("t", (None,), "int64")
    marked = ht.dist.stage if looked == "two stages" else nullcontext
    with ht.scope("model"):
        table = ht.variable("table", ht.init.normal(1.0), (50, 8))
        with marked(0):
            if looked == "later":
                h = ht.astype(ids, "float32") * 0.01
            else:
                h = ht.sum(ht.embedding(table, ids * 3 % 50), axis=1)  # bags
            h = ht.nn.Linear(h.shape[1], 16, activation=ht.tanh, name="up")(h)
        with marked(1):
            h = h + ht.nn.Linear(16, 16, activation=ht.tanh, name="middle")(h)
            if looked == "by rows":
                more = ht.astype(ht.abs(h[:, 0]) * 37, "int64") % 50
            if looked != "first":
                h = ht.concat([h, ht.embedding(table, more)], axis=1)
            y = ht.nn.Linear(h.shape[1], 3, name="down")(h)
            loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return {"train": [loss, optimizer.minimize(loss)], "eval": [loss, y]}


def batch(step: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"ids": rng.integers(0, 50, (rows, 3)), "more": rng.integers(0, 50, rows), "t": rng.integers(0, 3, rows)}


def fed(ex: ht.Executor, name: str, values: dict[str, np.ndarray], part: slice = slice(None)) -> dict[str, np.ndarray]:
    return {k: value[part] for k, value in values.items() if k in ex.subgraphs[name].placeholders}


def trained(ex: ht.Executor, part: slice = slice(None)) -> tuple[list[float], np.ndarray]:
    losses = [float(ex.run("train", fed(ex, "train", batch(s), part))[0]) for s in range(STEPS)]
    return losses, ex.run("eval", fed(ex, "eval", batch(9), part))[1]


@functools.cache
def alone(looked: str, optimizer: str) -> tuple[list[float], np.ndarray]:
    return trained(ht.Executor(model(looked, RULES[optimizer]())))


def served(way: str, **more: Any) -> Hybrid:
    return Hybrid(WAYS[way][1], served="*table", **more)


def attached(looked: str, rule: str, way: str, client: Client, comm: Comm, **more: Any) -> ht.Executor:
    return ht.Executor(model(looked, RULES[rule]()), strategy=served(way, **more), comm=Connected(comm, client))


ALIKE = ("tensor", "wide first")  # where ranks share samples

LOOKED = ["first", "later", "two stages", "by rows"]
CASES = [
    case
    for case in pairs.pairwise(WAYS, LOOKED, ["sgd", "momentum", "adam", "adagrad-cosine"])
    if case.values[1] != "two stages" or case.values[0] in ("1f1b", "gpipe", "data", "tensor", "zero")
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("way", "looked", "rule"), CASES)
def test_losses_equal_those_of_one_process(way, looked, rule):
    losses, y = alone(looked, rule)

    def body(client: Client, comm: Comm):
        part = slice(comm.rank * 4, comm.rank * 4 + 4) if way == "own feeds" else slice(None)
        return trained(attached(looked, rule, way, client, comm), part)

    for own_losses, own_y in job(WAYS[way][0], body, servers=2):
        np.testing.assert_allclose(own_losses, losses, atol=1e-5, rtol=0)
        np.testing.assert_allclose(own_y, y, atol=1e-4, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "servers", "way"), [(4, 2, "data"), *pairs.nightly([(3, 1, "unlike"), (6, 2, "six")])]
)
def test_processes_train_as_one_does(ranks, servers, way):
    job = heturun("-w", ranks, "-s", servers, "python", "-m", "tests.strategies.test_hybrid_pipelines", way)
    assert (job.returncode, job.stderr, job.stdout.count("equal")) == (0, "", ranks)


@pytest.mark.parametrize(
    ("way", "looked", "acting"),
    [
        ("1f1b", "first", "pp -"),
        ("1f1b", "later", "- pp"),
        ("gpipe", "two stages", "pp pp"),
        ("data", "first", "pp pp - -"),
        ("tensor", "first", "pp p - -"),  # of two ranks with the same ids one pushes
        ("unlike", "first", "pp - pp"),
    ],
)
def test_a_step_pulls_and_pushes_once_on_ranks_that_look_up_and_ends_one_clock_on_all(way, looked, acting):
    def body(client: Client, comm: Comm):
        ex = attached(looked, "adam", way, client, comm)
        steps = [s.node for s in ex.program("train", fed(ex, "train", batch(0))).steps]
        asked = [n for n in steps if n.role is Role.COMMUNICATION and n.op.collective == "served"]
        return [n.op.name for n in asked if n.attrs.get("acts", True)]

    for found, wanted in zip(job(WAYS[way][0], body), acting.split(), strict=True):
        assert found == ["pull_rows", "push_rows"][: wanted.count("p")] + ["tick"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "own feeds"])
def test_rows_asked_for_ahead_or_cached_change_nothing_and_other_modes_learn(way):
    def body(client: Client, comm: Comm, ahead: bool, steps: int = STEPS, **more: Any) -> list[float]:
        ex = attached("later", "sgd", way, client, comm, **more)
        coming = [batch(s if steps == STEPS else 0) for s in range(steps + 1)]
        return [float(ex.run("train", now, ahead=then if ahead else None)[0]) for now, then in pairwise(coming)]

    ranks = WAYS[way][0]
    plain = job(ranks, lambda client, comm: body(client, comm, False))
    assert job(ranks, lambda client, comm: body(client, comm, True)) == plain
    cache = Cache("lru", 60, 0, 0)
    np.testing.assert_allclose(job(ranks, lambda client, comm: body(client, comm, True, cache=cache)), plain, rtol=1e-5)
    for mode in (ASP(), SSP(1)) if way not in ALIKE else ():
        for losses in job(ranks, functools.partial(body, ahead=True, steps=20, consistency=mode)):
            assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("way", ["1f1b", "own batches", "unlike", "one stage"])
def test_it_is_plain_data_that_can_be_simulated_and_shown(way):
    graph, ranks = model("later", RULES["adam"]()), WAYS[way][0]
    loss, updates = graph["train"]
    strategy = served(way).build([loss, *updates.values()], ranks)
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert [name for name in strategy.variables if strategy.variables[name].served] == [
        name for name in strategy.variables if "table" in name
    ]
    shown = [line.split() for line in str(strategy).splitlines()]
    assert any("model/table" in line[0] and line[-1] == "servers" for line in shown)
    cost = simulate(graph["train"], strategy, MachineProfile(), world_size=ranks, shapes=batch(0))
    assert cost.time > 0 and min(cost.peak) > 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["1f1b", "data", "unlike", "one stage", "own batches"])
def test_a_dense_variable_may_be_served_as_well(way):
    """What no builder writes: its gradient is complete when it is pushed, and all ranks fetch the new value."""
    losses, y = alone("later", "adam")

    def body(client: Client, comm: Comm):
        graph = model("later", RULES["adam"]())
        loss, updates = graph["train"]
        strategy = served(way).build([loss, *updates.values(), graph["eval"][1]], comm.world_size)
        strategy.variables |= {
            v.name: Served() for v in updates if v.name.startswith("model/middle/weight/") and v.ndim
        }
        strategy.variables["model/middle/weight"] = Served(copied=True)
        return trained(ht.Executor(graph, strategy=strategy, comm=Connected(comm, client)))

    for own_losses, own_y in job(WAYS[way][0], body):
        np.testing.assert_allclose(own_losses, losses, atol=1e-5, rtol=0)
        np.testing.assert_allclose(own_y, y, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "parallel", [DataParallel(accumulate=2), DataParallel(accumulate=2, statistics="microbatch"), Pipeline(1, 4)]
)
def test_workers_that_know_the_servers_only_accumulate_too(parallel):
    losses, y = alone("later", "adam")

    def body(client: Client, rank: int):
        count_names_apart()
        comm = Connected(Place(rank, 2), client)
        return trained(ht.Executor(model("later", RULES["adam"]()), strategy=Hybrid(parallel, served="*"), comm=comm))

    found = network.job("bsp", 2, body, kind=ServerThread)
    np.testing.assert_allclose(np.mean([own for own, _ in found], axis=0), losses, atol=1e-5, rtol=0)
    np.testing.assert_allclose(found[0][1], y, atol=1e-4, rtol=0)


def test_checkpoints_pass_between_one_process_and_a_pipeline_with_servers(tmp_path):
    def build() -> dict[str, list[Any]]:
        with ht.scope("optimizer"):
            rule = RULES["adam"]()
        return model("later", rule)

    one = ht.Executor(build())
    for s in range(2):
        one.run("train", batch(s))
    one.save(tmp_path / "one")

    def body(client: Client, comm: Comm):
        ex = ht.Executor(build(), strategy=served("data"), comm=Connected(comm, client))
        ex.load(tmp_path / "one")
        ex.save(tmp_path / "same")
        return float(ex.run("train", batch(2))[0])

    np.testing.assert_allclose(job(4, body, servers=2), float(one.run("train", batch(2))[0]), atol=1e-5)
    one.load(tmp_path / "one")
    other = ht.Executor(build(), seed=1)
    other.load(tmp_path / "same")
    for name, value in one.state.items():
        np.testing.assert_array_equal(other.state[name], value, err_msg=name)


@pytest.mark.parametrize("way", ALIKE)
@pytest.mark.parametrize(
    "more", [{"consistency": ASP()}, {"cache": Cache("lru", 60, 1, 0)}, {"cache": Cache("lru", 60, 0, 1)}]
)
def test_ranks_that_share_samples_must_read_the_same_rows(way, more):
    """Each read its own, so that what they keep alike drifted apart."""
    with pytest.raises(ArgumentError, match=r"(?s)may read different rows of 'model/table': .*fix: .*pull_bound=0"):
        job(WAYS[way][0], lambda client, comm: attached("later", "sgd", way, client, comm, **more))


def test_pipedream_is_refused():
    with pytest.raises(ArgumentError, match=r'(?s)PipeDream updates after each micro-batch.*fix: use schedule="1f1b"'):
        strategy = Hybrid(Pipeline(2, schedule="pipedream"), served="*table")
        run_ranks(2, lambda comm: ht.Executor(model("first", RULES["sgd"]()), strategy=strategy, comm=comm))


if __name__ == "__main__":
    found = trained(ht.Executor(model("later", RULES["adam"]()), strategy=served(sys.argv[1]), comm=None))
    np.testing.assert_allclose(found[0], alone("later", "adam")[0], atol=1e-5, rtol=0)
    print("equal", world().rank)
