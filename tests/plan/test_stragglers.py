"""Ranks that become slow get less to do, and more again: on a clock of operations, with the losses of one process."""

from __future__ import annotations

import functools
import sys

import numpy as np
import pytest

import hetu as ht
from hetu.core import executor as core_executor
from hetu.core.errors import ArgumentError
from hetu.dist import (
    DataParallel,
    ExpertParallel,
    Heterogeneous,
    Parallel,
    Pipeline,
    Pipelines,
    SerialComm,
    TensorParallel,
    ZeRO,
    run_ranks,
    world,
)
from hetu.plan import Cluster, DeviceFigures, MachineProfile, Plan, Within
from hetu.plan.costs.observed import ROUNDS, Speeds, TimedSteps
from hetu.plan.regrouped import Regroupable

from ..dist.models import MODELS
from ..dist.models import losses as trained
from ..dist.test_launch import heturun
from .slowed import WIRE, SlowedClock, SlowedProgram, steps_of

pytestmark = pytest.mark.usefixtures("meaning")

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
LONG = {"4 stages", "2 stages x data", "zero1", "unequal groups", "accumulated", "data x tensor"}


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


@pytest.mark.parametrize("model", MODELS)
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

EQUAL, OTHER = [1.0] * 4, [1.0, 2.0, 3.0, 4.0]
SEEN = {  # what steps ought to take, what they take, and the factors
    "equal work, from the beginning": (EQUAL, [[1, 1, 1.3, 1]] * 5, [1, 1, 1.3, 1]),
    "other work, a mistake of the profile": (OTHER, [[1, 2.6, 3, 4]] * 5, EQUAL),
    "other work, too much for a mistake": (OTHER, [[1, 4, 3, 4]] * 5, [1, 2, 1, 1]),
    "other work, later": (OTHER, [[1, 2.6, 3, 4]] * 5 + [[1, 2.6, 4, 4]] * 5, [1, 1, 4 / 3, 1]),
    "back again": (EQUAL, [[1, 1, 2, 1]] * 5 + [[1, 1, 1, 1]] * 5, EQUAL),
    "the median of what is seen": (EQUAL, [[1, 1, f, 1] for f in (1.5, 2, 2.5, 2.1, 9)], [1, 1, 2.1, 1]),
    "four of five": (EQUAL, [[1, 1, 2, 1]] * 4 + [[1, 1, 1, 1]] + [[1, 1, 2, 1]] * 4, EQUAL),
}


@pytest.mark.parametrize("name", SEEN)
def test_speeds(name):
    ought, steps, wanted = SEEN[name]
    speeds = Speeds(4)
    for seconds in steps:
        speeds.add(seconds, ought)
    np.testing.assert_allclose(speeds.factors, wanted)


def test_a_rank_that_recovers_is_healthy_though_nobody_knows_quite_what_its_part_should_take():
    speeds = Speeds(2)
    assert [speeds.add([1, 2], [1, 1]) for _ in range(ROUNDS)][-1] and speeds.factors.tolist() == [1, 2]
    speeds.begin()
    assert not any(speeds.add([1, 1.3], [4 / 3, 2 / 3]) for _ in range(ROUNDS))  # 2 * 2 / 3 is expected
    assert any(speeds.add([1.1, 0.5], [4 / 3, 2 / 3]) for _ in range(ROUNDS)) and speeds.factors.tolist() == [1, 1]


# -- how plans are regrouped -------------------------------------------------------------------------------------------

LAYERS = [f"deep/layer{k}" for k in range(8)]
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
            "0 -> 2 | 1 -> 3 share as 2:3, layers 5, 3 | 4, 4",
            "0 -> 1 | 3 -> 2 share as 3:2, layers 4, 4 | 5, 3",
        ],
    ),
    "within memory": (Within(DataParallel(), 1 << 20), ONE, ["0 | 1 | 2 | 3 share as 2:2:1:2"]),
}


@pytest.mark.parametrize("name", GROUPED)
def test_slow_ranks_stay_or_come_together_or_leave_their_group(name):
    builder, slow, wanted = GROUPED[name]
    graph, _ = deep(8)
    outputs = [graph["train"][0], *graph["train"][1].values()]
    alike = Regroupable.of(builder, outputs, 4)
    found = {plan.name: plan.builder for plan in alike.regrouped(slow, 420, LAYERS, [1.0] * 8)}
    assert [*found][: len(wanted)] == wanted and (wanted or not found)
    for plan in found.values():
        assert type(plan) in (Heterogeneous, Pipelines, Within)
        assert Regroupable.of(plan, outputs, 4).parts == alike.parts


REFUSED = {
    "experts": (lambda comm: ExpertParallel({"*weight": 0}), r"ExpertParallel\(.*divides its work alike", "pass auto="),
    "parts that are fed": (lambda comm: DataParallel(local_feeds=True), "by parts that ranks are fed", "whole batches"),
    "another kind": (lambda comm: Plan("mine", DataParallel().build([], 2)), "divides its work alike", "pass auto="),
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
    seconds, losses = [], []

    def after(step, loss):
        clock.barrier()
        seconds.append(clock.now)
        losses.append(loss)
        look(step, loss)

    loader = [(feed["x"], feed["t"]) for feed in feeds]
    ht.fit(executor, loader, epochs=4, inputs=["x", "t"], after_step=after, progress=False)
    assert seconds[-1] - seconds[-2] < 0.6 * (seconds[2] - seconds[1])
    assert job.recorder.event == look.events[0]
    alone = ht.Executor(graph, comm=SerialComm())
    wanted = [float(alone.run("train", feeds[k % 3])[0]) for k in range(12)]
    np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)
    print(f"rank {job.rank}: losses equal those of one process")


if __name__ == "__main__":
    main()
