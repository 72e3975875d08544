"""Ranks that become slow get less to do, and more again: on a clock of operations, with the losses of one process."""

from __future__ import annotations

import functools
import math
import random
import sys
import weakref

import numpy as np
import pytest

import hetu as ht
from hetu.core import executor as core_executor
from hetu.core.errors import ArgumentError
from hetu.core.graph import topological
from hetu.core.op import Role
from hetu.dist import (
    Builder,
    DataParallel,
    ExpertParallel,
    Heterogeneous,
    Kept,
    Link,
    Mesh,
    Parallel,
    Pipeline,
    SerialComm,
    Strategy,
    TensorParallel,
    ZeRO,
    run_ranks,
    world,
)
from hetu.dist.cut.regroup import Groups, pipelines_of, shared_axes
from hetu.plan import Cluster, DeviceFigures, MachineProfile, Plan, Within, stragglers
from hetu.plan.costs.speeds import ROUNDS, EqualWork, Speeds, TimedSteps
from hetu.plan.search.stage_cut import LayerCosts, cut_stages
from hetu.plan.search.uneven import UnevenStages
from hetu.plan.stragglers import regrouped
from hetu.strategies import PS, AllReduce, PartitionedAR

from ..dist.models import MODELS
from ..dist.models import losses as trained
from ..dist.test_launch import heturun
from .slowed import WIRE, SlowedClock, SlowedProgram, steps_of

NETWORK = Cluster(inner=WIRE, outer=WIRE)
PROFILE = MachineProfile(cluster=NETWORK)  # of devices that nobody has measured
WIDTH = 32


def graph_of(h, x, t, batch, optimizer):
    loss = ht.mean((h - t) ** 2)
    rng = np.random.default_rng(0)
    feeds = [{n: rng.normal(size=(batch, WIDTH)).astype("float32") for n in (x.name, t.name)} for _ in range(3)]
    return {"train": [loss, optimizer.minimize(loss)]}, feeds


def deep(layers=4, batch=112):
    """Layers that are alike."""
    x, t = (ht.placeholder(name, (None, WIDTH)) for name in "xt")
    h = x
    with ht.scope("deep"):
        for number in range(layers):
            h = ht.tanh(ht.nn.Linear(WIDTH, WIDTH, name=f"layer{number}")(h))
        return graph_of(h, x, t, batch, ht.optim.Momentum(0.05))


def wide(blocks=2, batch=96):
    """Blocks that tensor parallelism splits."""
    x, t = (ht.placeholder(name, (None, WIDTH)) for name in "xt")
    h = x
    with ht.scope("wide"):
        for number in range(blocks):
            with ht.scope(f"block{number}"):
                up = ht.relu(ht.nn.Linear(WIDTH, 2 * WIDTH, name="up")(h))
                h = h + ht.nn.Linear(2 * WIDTH, WIDTH, name="down")(up)
        return graph_of(h, x, t, batch, ht.optim.SGD(0.05))


ONE, TWO = (1, 1, 2, 1), (1, 4, 2, 1)
night = pytest.mark.nightly
# model, plan, how slow the ranks are, and how many times as long as without slow ones a step then takes before
CASES = {
    "data": (deep, DataParallel(), ONE, 2.0),
    "data, two slow": (deep, DataParallel(), TWO, 4.0),
    "zero1": (deep, ZeRO(1), ONE, 2.0),
    "zero3": (deep, ZeRO(3), ONE, 2.0),
    "accumulated": (deep, DataParallel(accumulate=2), ONE, 2.0),
    "tensor": (wide, TensorParallel(), ONE, 2.0),
    "data x tensor": (wide, Parallel(tensor=2), ONE, 2.0),
    "unequal groups": (wide, Heterogeneous([(0, 1), (2,), (3,)], (2, 1, 1)), (1, 1, 1, 2), 2.0),
    "2 stages": (functools.partial(deep, 6), Pipeline(2, 4), (1, 2), 1.6),
    "4 stages": (functools.partial(deep, 28), Pipeline(4, 8), ONE, 1.7),
    "2 stages x data": (functools.partial(deep, 14), Pipeline(2, 4, data=2), ONE, 1.8),
}
LONG = {*CASES} - {"data, two slow", "2 stages"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[night] * (name in LONG)) for name in CASES])
def test_a_step_comes_near_the_best_that_slow_ranks_allow(name, monkeypatch):
    model, strategy, slow, before = CASES[name]
    alike = [1] * len(slow)
    (*_, healthy), _, _ = steps_of(monkeypatch, model, strategy, len(slow), lambda step: alike, 2, every=None)
    turn, steps = 14, 44

    def factors(step):
        return slow if step < turn else alike

    found, losses, look = steps_of(monkeypatch, model, strategy, len(slow), factors, steps, profile=PROFILE)
    optimum = len(slow) / sum(1 / factor for factor in slow)
    assert found[2] >= before * healthy * 0.99
    assert found[turn - 1] <= 1.15 * optimum * healthy
    assert found[-1] <= 1.01 * healthy  # the rank has recovered
    assert len(look.events) == 2 and look.factors == alike
    graph, feeds = model()
    alone = ht.Executor(graph)
    wanted = [float(alone.run("train", feeds[k % len(feeds)])[0]) for k in range(steps)]
    np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)


CHANGES = {  # how slow the ranks are before step 14, and from then on
    "later": ((1, 1, 1, 1), ONE),
    "another": (ONE, (1, 2, 1, 1)),
    "a second": (ONE, (2, 1, 2, 1)),
    "slower": (ONE, (1, 1, 4, 1)),
    "not so slow": ((1, 1, 4, 1), ONE),
}
PLANS = {
    "data": (deep, DataParallel()),
    "data x tensor": (wide, Parallel(tensor=2)),
    "2 stages x data": (functools.partial(deep, 8), Pipeline(2, 4, data=2)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("plan", [pytest.param(name, marks=[night] * (name != "data")) for name in PLANS])
def test_ranks_change_their_speed_more_than_once(plan, change, monkeypatch):
    (model, strategy), (first, then) = PLANS[plan], CHANGES[change]
    (*_, healthy), _, _ = steps_of(monkeypatch, model, strategy, 4, lambda step: (1,) * 4, 2, every=None)
    found, _, look = steps_of(
        monkeypatch, model, strategy, 4, lambda step: first if step < 14 else then, 34, profile=PROFILE
    )
    assert found[-1] <= 1.15 * healthy * 4 / sum(1 / factor for factor in then)
    np.testing.assert_allclose(look.factors, then, rtol=1e-6)


@pytest.mark.parametrize("model", [n if n == "cnn" else pytest.param(n, marks=night) for n in MODELS])
def test_batch_norm_and_dropout_are_those_of_the_whole_batch(model, monkeypatch):
    profile = MachineProfile(DeviceFigures(flops=1e9, bandwidth=1e12, launch=1e-9), NETWORK)  # the models are tiny
    _, losses, look = steps_of(monkeypatch, MODELS[model], DataParallel(), 4, lambda step: ONE, 8, profile=profile)
    assert len(look.events) == 1 and "rank 2 takes 2.00 times as long" in look.events[0]
    np.testing.assert_allclose(losses, trained(MODELS[model]), atol=1e-5, rtol=0)


def test_batches_of_other_sizes_go_by_the_same_shares(monkeypatch):
    def model():
        graph, feeds = deep()
        return graph, [feeds[0], {name: value[:50] for name, value in feeds[1].items()}, feeds[2]]

    found, losses, look = steps_of(monkeypatch, model, DataParallel(), 4, lambda step: ONE, 30, profile=PROFILE)
    assert len(look.events) == 1 and found[27] < 0.6 * found[0]
    graph, feeds = model()
    alone = ht.Executor(graph)
    wanted = [float(alone.run("train", feeds[k % 3])[0]) for k in range(30)]
    np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)


@pytest.mark.nightly
def test_a_machine_that_chooses_is_asked_again(monkeypatch):
    auto = ht.plan.auto(batch_size=112, profile=PROFILE, hints={"stages": 1, "tensor": 1})
    found, _, look = steps_of(monkeypatch, deep, auto, 4, lambda step: ONE, 14, auto=auto)
    assert len(look.events) == 1 and ": now dp4, rows by speed; " in look.events[0]
    assert found[-1] < 0.6 * found[2]
    # Without it, what it has chosen is varied.
    found, _, look = steps_of(monkeypatch, deep, auto, 4, lambda step: ONE, 14, profile=PROFILE)
    assert len(look.events) == 1 and found[-1] < 0.6 * found[2]


# -- when it leaves things as they are ---------------------------------------------------------------------------------

QUIET = {
    "healthy": lambda step: (1, 1, 1, 1),
    "all slow": lambda step: (3, 3, 3, 3),
    "a little": lambda step: (1, 1, 1.15, 1),
    "now and then": lambda step: (1, 1, 2 if step % ROUNDS else 1, 1),
    "in turn": lambda step: tuple(3 if step % 4 == rank else 1 for rank in range(4)),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", QUIET)
def test_what_does_not_last_or_is_small_changes_nothing(name, monkeypatch):
    _, losses, look = steps_of(monkeypatch, deep, DataParallel(), 4, QUIET[name], 20, profile=PROFILE)
    assert not look.events and look.factors == [1.0] * 4
    _, same, _ = steps_of(monkeypatch, deep, DataParallel(), 4, QUIET[name], 20, every=None)
    assert losses == same  # timed steps compute the same bits


def test_a_switch_is_made_when_it_pays(monkeypatch):
    """A first step that takes 40 says what a switch costs, and one saves 0.85 of each that is to come."""
    when = {}
    for first in (1, 40):
        found, *_ = steps_of(
            monkeypatch, deep, DataParallel(), 4, lambda step, f=first: ONE if step else (f,) * 4, 60, profile=PROFILE
        )
        when[first] = next(step for step, seconds in enumerate(found) if step and seconds < 0.6 * found[5])
    assert when[1] == 1 + ROUNDS
    assert 1 <= (when[40] - 1) / (40 / (2 - 8 / 7)) < 1.15


def test_a_step_is_timed_once_in_so_many(monkeypatch):
    begun = []
    monkeypatch.setattr(TimedSteps, "begin", lambda self, programs: begun.append(self.comm.step))
    steps_of(monkeypatch, deep, DataParallel(), 2, lambda step: (1, 1), 9, profile=PROFILE, every=4)
    assert sorted(begun) == [2, 2, 6, 6]  # the one behind it is


def test_a_user_may_switch_meanwhile(monkeypatch):
    monkeypatch.setattr(core_executor, "Program", SlowedProgram)

    def run(comm):
        (graph, feeds), clock = deep(), SlowedClock(comm, lambda step: ONE)
        executor = ht.Executor(graph, strategy="dp", comm=clock)
        look = ht.plan.rebalance(executor, every=1, profile=PROFILE)
        for number in range(20):
            executor.run("train", feeds[0])
            if number < 12 and number % 4 == 3:
                executor.switch(ZeRO(1) if executor.strategy == DataParallel() else DataParallel())
            look()
            assert number > 12 or not look.events  # a rank is seen five times at equal work
        return len(look.events)

    assert run_ranks(4, run) == [1] * 4


def test_programs_are_left_as_they_were():
    def run(comm):
        graph, feeds = deep()
        executor = ht.Executor(graph, strategy="dp", comm=comm)
        look = ht.plan.rebalance(executor, every=3, profile=PROFILE)
        executor.run("train", feeds[0])
        program = executor.program("train", feeds[0])
        before = program.calls
        look()
        look()
        assert program.calls is not before
        executor.run("train", feeds[0])
        look()
        return program.calls is before and sum(look.timed.took.values()) > 0

    assert all(run_ranks(2, run))


def test_an_error_in_a_timed_step_names_the_line(monkeypatch):
    def run(comm):
        ids = ht.placeholder("ids", (None,), "int64")
        loss = ht.mean(ht.nn.Embedding(4, 3)(ids) ** 2)
        executor = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy="dp", comm=comm)
        look = ht.plan.rebalance(executor, every=1)
        executor.run({ids: [0, 1]})
        look()
        executor.run({ids: [7, 7]})

    with pytest.raises(ht.errors.HetuError, match="7") as caught:
        run_ranks(2, run)
    assert "test_stragglers.py" in str(caught.value)


# -- speeds ------------------------------------------------------------------------------------------------------------


class Work:
    """Stands for a program."""


EVEN, UNEVEN, IDLE = [1.0] * 4, [1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 1.0, 1e-3]
SEEN = {  # how much each rank has to do, how slow it is in each step, and what is thought of it in the end
    "from the beginning": (EVEN, [[1, 1, 1.3, 1]] * 5, [1, 1, 1.3, 1]),
    "other work": (UNEVEN, [[1, 1.3, 1, 1]] * 5, [1, 1.3, 1, 1]),
    "later": (UNEVEN, [[1, 1, 1, 1]] * 5 + [[1, 1, 4 / 3, 1]] * 5, [1, 1, 4 / 3, 1]),
    "back again": (UNEVEN, [[1, 1, 2, 1]] * 5 + [[1, 1, 1, 1]] * 5, EVEN),
    "back again before it is known how much there is to do": (UNEVEN, [[1, 1, 1.3, 1]] * 2 + [[1] * 4] * 5, EVEN),
    "the median of what is seen": (EVEN, [[1, 1, f, 1] for f in (1.5, 2, 2.5, 2.1, 9)], [1, 1, 2.1, 1]),
    "four of five": (EVEN, [[1, 1, 2, 1]] * 4 + [[1, 1, 1, 1]] + [[1, 1, 2, 1]] * 4, EVEN),
    "one that is idle": (IDLE, [[1, 1, 1, 1]] * 9 + [[1, 1, 1, 3]] * 5, [1, 1, 1, 3]),
    "all by as much": (UNEVEN, [[1] * 4] * 5 + [[3] * 4] * 9, EVEN),
    "a little slower and a little faster": (
        EVEN, [[1, 2, 1, 1]] * 5 + [[1.15, 1.7, 1, 1]] * 5, [1, 1.7, 1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_speeds(name):
    work, steps, wanted = SEEN[name]
    speeds, program = Speeds(4), Work()
    for slow in steps:
        equal = np.array(slow, float)
        noise = 1.0 if work is not IDLE else np.array([1, 1, 1, 1 + len(speeds.seen)])  # nothing tells little
        speeds.add(program, equal * work * noise, equal if speeds.unsure(program) else np.zeros(4))
    np.testing.assert_allclose(speeds.factors, wanted)
    assert speeds.unsure(program) is (work is IDLE)


# -- any speeds, at any moment -----------------------------------------------------------------------------------------

SHAPES = {
    "data": (deep, DataParallel(), 2),
    "zero3": (deep, ZeRO(3), 3),
    "tensor": (wide, TensorParallel(), 2),
    "data x tensor": (wide, Parallel(tensor=2), 4),
    "stages": (functools.partial(deep, 12), Pipeline(2, 8), 2),
}
SETTLED = 50  # steps by which a job has seen a change, and what a switch costs is paid


def drawn_speeds(draw, ranks):
    slow = [1.0 if draw.random() < 0.5 else draw.uniform(1.2, 4) for _ in range(ranks)]
    return [s / min(slow) for s in slow]


def drawn_job(number, changes, noisy, comm):
    """Speeds that change again and again, some right behind a switch. For each that lasts for a while, how many times
    as long as the best there is a step takes in the end; and the number of switches."""
    model, strategy, ranks = SHAPES[[*SHAPES][number % len(SHAPES)]]
    (graph, feeds), draw, own = model(), random.Random(number), random.Random(f"{number}, {comm.rank}")
    speeds, noise, found, switches, left, lasts = [1.0] * ranks, 1.0, [], 0, SETTLED, True
    clock = SlowedClock(comm, lambda step: [noise * factor for factor in speeds])
    executor = ht.Executor(graph, strategy=strategy, comm=clock)
    look = ht.plan.rebalance(executor, every=1, profile=PROFILE)
    while True:
        noise = own.uniform(0.93, 1.07) * (4 if own.random() < 0.1 else 1) if noisy and 1 < left < SETTLED else 1.0
        began = clock.now
        executor.run("train", feeds[0])
        clock.barrier()
        seconds, left = clock.now - began, left - 1
        healthy = seconds if not found and left == SETTLED - 1 else healthy  # noqa: F821
        look()
        if len(look.events) > switches and changes and draw.random() < 0.6:
            left, lasts = min(left, draw.randrange(ROUNDS + 2)), False
        switches = len(look.events)
        if left <= 0:
            found += [seconds / healthy * sum(1 / factor for factor in speeds) / ranks] * lasts
            if not changes:
                return found, switches
            speeds, left, lasts, changes = drawn_speeds(draw, ranks), SETTLED, True, changes - 1


@pytest.mark.sampled(16)
@pytest.mark.parametrize("number", range(40))
def test_speeds_that_change_at_any_moment(number, monkeypatch):
    monkeypatch.setattr(core_executor, "Program", SlowedProgram)
    ranks = [*SHAPES.values()][number % len(SHAPES)][2]
    for found, switches in run_ranks(ranks, functools.partial(drawn_job, number, 4, False), deadline=60.0):
        assert max(found) <= 1.15 and switches <= 5


@pytest.mark.sampled(8)
@pytest.mark.parametrize("changes", [0, 3])
@pytest.mark.parametrize("number", range(10))
def test_noise_makes_no_job_switch_again_and_again(number, changes, monkeypatch):
    monkeypatch.setattr(core_executor, "Program", SlowedProgram)
    ranks = [*SHAPES.values()][number % len(SHAPES)][2]
    for found, switches in run_ranks(ranks, functools.partial(drawn_job, number, changes, True), deadline=60.0):
        assert max(found) <= 1.25 and switches <= 2 * changes


# -- how plans are regrouped -------------------------------------------------------------------------------------------

MESH = Mesh((4,), ("data",))
PLAIN = Strategy(MESH.layout(), {}, {name: MESH.layout(data=0) for name in "xt"})


class Halves(Builder):
    """A builder that knows nothing of those of hetu: the weights of two pairs of ranks are in halves."""

    def build(self, outputs, world_size):
        mesh = Mesh((2, world_size // 2), ("rows", "columns"))
        names = {n.name: n for n in topological(outputs) if n.role is Role.VARIABLE and n.name.endswith("weight")}
        split = {name: Kept(*[mesh.layout(columns=1)] * 2) for name, n in names.items()}
        feeds = {n.name: mesh.layout(rows=0) for n in topological(outputs) if n.role is Role.PLACEHOLDER}
        return Strategy(mesh.layout(), split, feeds)


class Noted(Builder):
    """A builder of builders that adds what no strategy says."""

    def __init__(self, builder, note="mine"):
        self.builder, self.note = builder, note

    def build(self, outputs, world_size):
        return self.builder.build(outputs, world_size)

    def regrouped(self, outputs, world_size, to):
        return self.but(builder=self.builder.regrouped(outputs, world_size, to))


LAYERS = LayerCosts([f"deep/layer{k}" for k in range(8)], [1.0] * 8, *[[0] * 8] * 5, [{}, *({k: 0} for k in range(7))])
GROUPED = {
    "data": (DataParallel(), ONE, ["0 | 1 | 2 | 3 share as 2:2:1:2", "0 | 1 | 3 | 2 share as 2:2:2:1"]),
    "data, one that gets nothing": (DataParallel(), (1, 1, 1, 1000), []),
    "tensor": (
        TensorParallel({"*weight": 1}),
        ONE,
        ["0+1+2+3", "0+1+3+2", "0+1 | 3 | 2 share as 4:2:1"],
    ),
    "tensor, two slow": (
        Parallel(tensor=2, split={"*weight": 1}),
        (2, 1, 2, 1),
        ["0+1 | 2+3 share as 1:1", "1+3 | 0+2 share as 2:1", "1+3 | 0 | 2 share as 4:1:1"],
    ),
    "stages": (Pipeline(4, 2), ONE, ["0 -> 1 -> 2 -> 3, layers 2, 2, 1, 3", "0 -> 1 -> 3 -> 2, layers 2, 2, 3, 1"]),
    "stages x data": (
        Pipeline(2, 2, data=2),
        ONE,
        [
            "0 -> 2 | 1 -> 3 share as 3:4, layers 6, 2 | 4, 4",  # with two micro-batches all layers are waited for
            "0 -> 1 | 3 -> 2 share as 4:3, layers 4, 4 | 6, 2",
        ],
    ),
    "within memory": (Within(DataParallel(), 1 << 20), ONE, ["0 | 1 | 2 | 3 share as 2:2:1:2"]),
    "plain data": (
        Strategy(Mesh((4,), ("data",)).layout(), {}, {"x": Mesh((4,), ("data",)).layout(data=0)}),
        ONE,
        ["0 | 1 | 2 | 3 share as 2:2:1:2"],
    ),
    "a stranger's": (Halves(), ONE, ["0+1 | 2+3 share as 2:1", "0+1 | 3+2 share as 2:1", "0+1 | 3 | 2 share as 4:2:1"]),
    "a stranger's of builders": (Noted(ZeRO(3)), ONE, ["0 | 1 | 2 | 3 share as 2:2:1:2"]),
}


@pytest.mark.parametrize("name", GROUPED)
def test_slow_ranks_stay_or_come_together_or_leave_their_group(name):
    builder, slow, wanted = GROUPED[name]
    graph, _ = deep(8)
    outputs = [graph["train"][0], *graph["train"][1].values()]
    built = builder.build(outputs, 4)

    def cut(factors):
        return cut_stages(LAYERS, factors, 2, Link(0.0, math.inf), sizes=(1,))[::2]

    made = regrouped(builder, built, outputs, slow, 420, cut if len(built.grids()) > 1 else None)
    found = {plan.name: plan.builder for plan in made}
    assert [*found][: len(wanted)] == wanted and (wanted or not found)
    for plan in found.values():
        strategy = plan.build(outputs, 4)
        strategy.check(outputs, 4)
        assert type(plan) is (type(builder) if hasattr(builder, "builder") else type(built))
        assert strategy.microbatches == built.microbatches and type(strategy) is type(built)


STRANGERS = {
    "a builder": Halves(),
    "a builder of builders": Noted(ZeRO(1)),
    "plain data": PLAIN,
    "one that keeps variables elsewhere": PS(),
    "one that gives each a part": PartitionedAR(),
    "one that counts hosts": AllReduce(2, hosts=[(0, 1), (2, 3)]),
    "a plan": Plan("mine", PLAIN, memory=1 << 26),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", STRANGERS)
def test_whoever_wrote_a_strategy_its_ranks_share_by_their_speed(name, monkeypatch):
    strategy = STRANGERS[name]
    found, losses, look = steps_of(monkeypatch, deep, strategy, 4, lambda step: ONE, 9, profile=PROFILE)
    assert len(look.events) == 1 and found[-1] <= 0.68 * found[2]  # of halves, sums are not shared
    graph, feeds = deep()
    alone = ht.Executor(graph)
    wanted = [float(alone.run("train", feeds[k % 3])[0]) for k in range(9)]
    np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)
    if isinstance(strategy, Noted):
        assert look.executor.strategy.note == strategy.note  # is still what it was


def rows_second(batch=96):
    """Sequences of three whose batch is the second axis, each of which counts as much as a third feed says."""
    x, t = (ht.placeholder(name, (3, None, WIDTH)) for name in "xt")
    weight, h = ht.placeholder("weight", (None,)), x
    with ht.scope("sequences"):
        for number in range(4):
            h = ht.tanh(h * ht.variable(f"scale{number}", np.ones(WIDTH, "float32")))
        loss = ht.mean((h - t) ** 2 * ht.reshape(weight, (1, -1, 1)))
    rng = np.random.default_rng(0)
    shapes = {"weight": (batch,), "x": (3, batch, WIDTH), "t": (3, batch, WIDTH)}
    feeds = [{name: rng.random(shape, np.float32) for name, shape in shapes.items()} for _ in range(3)]
    return {"train": [loss, ht.optim.Momentum(0.05).minimize(loss)]}, feeds


def of_rows(mesh, **whole):
    return Strategy(mesh(**whole), {}, {"x": mesh(data=1), "t": mesh(data=1), "weight": mesh(data=0)})


AXES = {
    "a mesh": of_rows(MESH.layout),
    "pairs": of_rows(Mesh((2, 2), ("tensor", "data")).layout),
    "shares": of_rows(Groups([(0,), (1,), (2,), (3,)], (1, 2, 3, 2)).layout),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", AXES)
def test_ranks_share_a_batch_along_whatever_axis_it_has(name, monkeypatch):
    assert shared_axes(AXES[name]) == {"x": 1, "t": 1, "weight": 0}
    monkeypatch.setattr(stragglers, "GAIN", 0.0)
    found, losses, look = steps_of(monkeypatch, rows_second, AXES[name], 4, lambda step: ONE, 30, profile=PROFILE)
    assert len(look.events) == 1 and " share as " in look.events[0] and found[-1] < found[2]
    graph, feeds = rows_second()
    alone = ht.Executor(graph)
    wanted = [float(alone.run("train", feeds[k % 3])[0]) for k in range(30)]
    np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)


def test_work_that_is_equal_is_of_a_part_of_a_batch_says_nothing_and_goes(monkeypatch, recwarn):
    made, plain = [], EqualWork.__init__

    def init(self, outputs, *of):
        plain(self, outputs, *of)
        made.append(weakref.ref(self))
        assert max(int(n.shape[0]) for n in topological(outputs) if n.type.shape) == 1024

    monkeypatch.setattr(EqualWork, "__init__", init)

    def model():
        x = ht.placeholder("x", (None, 64))
        loss = ht.mean((ht.sum(ht.log(x), axis=1) * ht.variable("w", np.ones(1, "float32"))) ** 2)
        return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}, [{"x": np.full((4096, 64), 2.0, "float32")}]

    steps_of(monkeypatch, model, DataParallel(), 4, lambda step: (1,) * 4, 3 + ROUNDS, profile=PROFILE)
    assert len(made) == 4 and not any(each() for each in made) and not recwarn.list


REFUSED = {
    "experts": (
        lambda comm: ExpertParallel({"*weight": 0}),
        "weight' is divided among those that share a batch",
        "pass auto=",
    ),
    "parts that are fed": (lambda comm: DataParallel(local_feeds=True), "ranks are fed parts of", "whole batches"),
    "no batch": (lambda comm: Strategy(Mesh((2,), ("ranks",)).layout()), "they share no batch", "pass auto="),
    "no strategy": (lambda comm: None, "without a strategy has nothing to divide", "give it one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_anew_is_told_at_once(name):
    strategy, match, fix = REFUSED[name]

    def run(comm):
        executor = ht.Executor(deep()[0], strategy=strategy(comm), comm=comm)
        with pytest.raises(ArgumentError, match=match) as caught:
            ht.plan.rebalance(executor)
        assert fix in caught.value.fix

    run_ranks(2, run)


def test_stages_that_divide_a_batch_otherwise_are_told():
    loss, updates = deep()[0]["train"]
    strategy = UnevenStages([(1, 1), (2, 1)], 2).build([loss, *updates.values()], 3)
    with pytest.raises(ArgumentError, match="unequal numbers of ranks"):
        pipelines_of(strategy)


def test_what_does_not_train_and_what_survives_losses_is_refused():
    def run(comm):
        graph, _ = deep()
        loss = graph["train"][0]
        looks = [loss] if not comm.elastic else graph["train"]
        executor = ht.Executor(looks, strategy="dp", comm=comm)
        with pytest.raises(ArgumentError, match="updates anything|survives losses"):
            ht.plan.rebalance(executor)

    run_ranks(2, run)
    run_ranks(2, run, most=2, die_at={0: 10**6})


# -- real ranks --------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_real_ranks():
    job = heturun("-w", 4, sys.executable, "-m", "tests.plan.test_stragglers")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("losses equal those of one process") == 4
    (line,) = job.stderr.splitlines()
    assert line.startswith(
        "[rank 0] hetu: rank 2 takes 2.00 times as long: now 0 | 1 | 2 | 3 share as 2:2:1:2; a step is"
    )


def main() -> None:
    """Four data-parallel processes of which one is slow, by the clock of operations."""
    core_executor.Program = SlowedProgram
    job = world(deadline=60.0)
    clock, (graph, feeds) = SlowedClock(job, lambda step: ONE), deep()
    executor = ht.Executor(graph, strategy="dp", comm=clock)
    look = ht.plan.rebalance(executor, every=1, profile=PROFILE)
    seconds, losses, began = [], [], [clock.now]

    def after(step, loss):
        clock.barrier()
        seconds.append(clock.now - began[-1])
        losses.append(loss)
        look(step, loss)
        began.append(clock.now)

    loader = [(feed["x"], feed["t"]) for feed in feeds]
    ht.fit(executor, loader, epochs=4, inputs=["x", "t"], after_step=after, progress=False)
    assert seconds[-1] < 0.6 * seconds[2]
    assert job.recorder.event == look.events[0]
    alone = ht.Executor(graph, comm=SerialComm())
    wanted = [float(alone.run("train", feeds[k % 3])[0]) for k in range(12)]
    np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)
    print(f"rank {job.rank}: losses equal those of one process")


if __name__ == "__main__":
    main()
