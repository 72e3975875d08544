"""Sub-graphs on ranks of their own: they train as one process does and live where they are placed; mistakes."""

from __future__ import annotations

import functools
import re
from collections import Counter

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.core.op import Role
from hetu.dist import (
    DataParallel,
    ExpertParallel,
    Heterogeneous,
    Mesh,
    Parallel,
    Pipeline,
    SerialComm,
    Strategy,
    ZeRO,
    place,
    run_ranks,
    world,
)

from ..apart import APART
from .models import STEPS, batches, losses, mlp
from .test_by_hand import data_parallel
from .test_hierarchical import EXPERTS, HOSTS
from .test_hints import expert_feeds, mixture
from .test_launch import heturun

SPLIT = {"*/up/weight": 1, "*/up/bias": 0, "*/down/weight": 0}


def halves(first, second, clip_norm=None):
    x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
    with ht.scope("halves"):
        with place(first):
            h = ht.dropout(ht.nn.Linear(10, 16, activation=ht.relu, name="front")(x), 0.2)
        with place(second):
            h = ht.tanh(ht.nn.Linear(16, 24, name="up")(h))
            y = ht.nn.Linear(24, 5, name="down")(h)
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return {"train": [loss, ht.optim.Adam(0.01, clip_norm=clip_norm).minimize(loss)], "eval": [y]}


def images():
    x, t = ht.placeholder("x", (None, 2, 8, 8)), ht.placeholder("t", (None,), "int64")
    with ht.scope("images"):
        with place((0, 1)):
            h = ht.max_pool2d(ht.relu(ht.nn.BatchNorm(4)(ht.nn.Conv2d(2, 4, 3, padding=1)(x))), 2)
        with place(2):
            y = ht.nn.Linear(64, 5)(ht.flatten(h, 1))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return {"train": [loss, ht.optim.Momentum(0.05).minimize(loss)]}


def towers():
    """Two branches side by side, and what joins them wherever the larger one ends."""
    x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
    with ht.scope("towers"):
        with place((0, 1)):
            a = ht.nn.Linear(10, 16, activation=ht.relu, name="left")(x)
        with place((2, 3)):
            b = ht.nn.Linear(10, 8, activation=ht.tanh, name="right")(x)
        y = ht.nn.Linear(24, 5, name="head")(ht.concat([a, b], axis=1))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}


def train(model, strategy=None, comm=None, shape=(10,)):
    ex = ht.Executor(model(), strategy=strategy, comm=comm)
    return [float(ex.run("train", feed)[0]) for feed in batches(shape, 5)]


CASES = {
    "one and one": (functools.partial(halves, 0, 1), DataParallel, 2),
    "one and two": (functools.partial(halves, 0, (1, 2)), DataParallel, 3),
    "two and one": (functools.partial(halves, (0, 2), 1), DataParallel, 3),
    "overlapping": (functools.partial(halves, (0, 1), (1, 2)), DataParallel, 3),
    "two and two, sharded": (functools.partial(halves, (0, 1), (2, 3)), lambda: ZeRO(3), 4),
    "clipped": (functools.partial(halves, 0, (1, 2), 0.1), lambda: ZeRO(1), 3),
    "two and four": (functools.partial(halves, (0, 1), (2, 3, 4, 5)), lambda: Parallel(tensor=2, split=SPLIT), 6),
    "towers": (towers, DataParallel, 4),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_losses_equal_those_of_one_process(case):
    model, strategy, ranks = CASES[case]
    wanted = train(model)
    assert len(wanted) == STEPS
    for found in run_ranks(ranks, lambda comm: train(model, strategy(), comm), rendezvous=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def test_batch_norm_over_the_ranks_of_a_place():
    wanted = train(images, shape=(2, 8, 8))
    for found in run_ranks(3, lambda comm: train(images, DataParallel(), comm, (2, 8, 8))):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


def program(comm, model, strategy=None):
    return ht.Executor(model(), strategy=strategy or DataParallel(), comm=comm, passes=APART)


def test_each_rank_computes_and_keeps_its_part_only():
    def run(comm):
        ex = program(comm, lambda: halves(0, (1, 2)))
        steps = ex.program("train", batches((10,), 5)[0]).steps
        sizes = {s.out.shape[0] for s in steps if s.node.op.name == "linear"}
        return {name.split("/")[1] for name in ex.state if "/" in name} - {"optimizer", "adam"}, sizes

    front, back, other = run_ranks(3, run)
    assert "front" in front[0] and not {"up", "down"} & front[0]
    assert {"up", "down"} <= back[0] and "front" not in back[0] and back == other
    assert (front[1], back[1]) == ({12}, {6})  # the batch is split where there are two


def test_a_border_is_crossed_once_each_way():
    def run(comm):
        steps = program(comm, lambda: halves(0, 1)).program("train", batches((10,), 5)[0]).steps
        return Counter(s.node.attrs["shape"] for s in steps if s.node.role is Role.COMMUNICATION)

    # the activations, their gradient, and the loss that is fetched on all ranks
    assert run_ranks(2, run) == [{(12, 16): 2, (): 1}] * 2


def test_json_and_table():
    graph = halves(0, (1, 2))
    outputs = [*graph["train"][:1], *graph["train"][1].values()]
    strategy = DataParallel().build(outputs, 3)
    read = Strategy.from_json(strategy.to_json())
    assert read == strategy and [p.ranks for p in read.places] == [(0,), (1, 2)]
    rows = {line.split()[0]: line for line in strategy.table(outputs).splitlines()}
    assert "on 1-2" in rows["halves/down/weight"] and "all_reduce" in rows["halves/down/weight"]
    assert "on 0 " in rows["halves/front/weight"] and "all_reduce" not in rows["halves/front/weight"]
    assert ["placed on 1-2", "[dup/2, dup/1] on 1-2"] in [
        re.split("  +", line)[:2] for line in f"{strategy}".splitlines()
    ]
    wanted = train(lambda: halves(0, (1, 2)))
    assert run_ranks(3, lambda comm: train(lambda: halves(0, (1, 2)), read, comm))[0] == pytest.approx(wanted, abs=1e-5)


def test_a_checkpoint_continues_elsewhere(tmp_path):
    feeds = batches((10,), 5)

    def begin(comm):
        ex = program(comm, lambda: halves(0, (1, 2)))
        for feed in feeds[:3]:
            ex.run("train", feed)
        ex.save(tmp_path / "saved")
        return float(ex.run("train", feeds[3])[0])

    wanted = run_ranks(3, begin)[0]
    ex = ht.Executor(halves(0, (1, 2)))
    ex.load(tmp_path / "saved")
    assert float(ex.run("train", feeds[3])[0]) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.nightly
def test_processes_train_as_threads_do():
    """Places, experts on two hosts, and collectives written by hand, over MPI."""
    job = heturun("-w", 4, "python", "-m", "tests.dist.test_place")
    assert (job.returncode, job.stderr, job.stdout.count("equal")) == (0, "", 4)


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(), (0, 0), -1, (0, -2), 1.5, "01", True])
def test_ranks_that_are_none(ranks):
    with pytest.raises(ArgumentError, match="a place on ranks|place got ranks="):
        place(ranks)


def test_a_rank_that_does_not_exist():
    with pytest.raises(ArgumentError, match=r"<.* is placed on rank 6-7, the job has 1 ranks") as caught:
        ht.Executor(halves(0, (6, 7)), strategy=DataParallel(), comm=SerialComm())
    assert "Linear(16, 24" in str(caught.value) and "heturun -w 8" in str(caught.value)


def test_a_strategy_without_the_place():
    strategy = Strategy(Mesh((1,), ("data",)).layout())
    with pytest.raises(ArgumentError, match="is placed on rank 0, the strategy has no such place"):
        ht.Executor(halves(0, 0), strategy=strategy, comm=SerialComm())


def test_strategies_that_place_nodes_themselves():
    with pytest.raises(ArgumentError, match="a pipeline places nodes by their stages"):
        ht.Executor(halves(0, 0), strategy=Pipeline(1), comm=SerialComm())
    with pytest.raises(ArgumentError, match="groups of 2 ranks, there are 1"):
        run_ranks(2, lambda comm: program(comm, lambda: halves(0, 1), Heterogeneous([(0,), (1,)], (1, 1))))
    with pytest.raises(ArgumentError, match=r"0 x 2 \(data x tensor\) ranks, there are 1"):
        run_ranks(2, lambda comm: program(comm, lambda: halves(0, 1), Parallel(tensor=2)))


if __name__ == "__main__":
    np.testing.assert_allclose(train(towers, DataParallel(), world()), train(towers), atol=1e-5, rtol=0)
    experts = lambda: (mixture(4, hinted=False), expert_feeds(3))  # noqa: E731
    found = losses(experts, ExpertParallel(EXPERTS, hosts=HOSTS[4]), world(), steps=3)
    np.testing.assert_allclose(found, losses(experts, steps=3), atol=1e-5, rtol=0)
    np.testing.assert_allclose(data_parallel(world())[0], losses(mlp), atol=1e-5, rtol=0)
    print("equal")
