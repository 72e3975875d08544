"""The planner: what it chooses is feasible, is executed, trains as one process does, and is explained."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu import plan
from hetu.core.errors import ArgumentError, BudgetError, UnknownNameError
from hetu.core.placement import STRATEGY, Alone
from hetu.dist import Link, run_ranks
from hetu.plan import Cluster, MachineProfile, Plan, Within
from hetu.plan.search import planner
from hetu.plan.search.candidates import Hints, Layered, candidates, divisors
from hetu.plan.simulation.simulate import Cost, simulate
from hetu.plan.simulation.timeline import Timeline

from ..dist.models import BATCH, MODELS, losses, mlp
from ..dist.test_launch import heturun
from ..pairs import nightly

SLOW = MachineProfile(cluster=Cluster(inner=Link(latency=1e-6, bandwidth=1e6)))
FAST = MachineProfile(cluster=Cluster(inner=Link(latency=1e-7, bandwidth=1e12)))
STEPS = 3


def chosen(model, ranks: int, profile: MachineProfile = SLOW, **options) -> Plan:
    """What the planner chooses on so many ranks, which must agree."""

    def choose(comm):
        auto = plan.auto(batch_size=BATCH, profile=profile, **options)
        return auto.choose(model()[0], comm)

    plans = run_ranks(ranks, choose, deadline=120)
    assert all(p == plans[0] and str(p.why()) == str(plans[0].why()) for p in plans)
    return plans[0]


@functools.cache
def plain() -> Plan:
    return chosen(mlp, 4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("model", "ranks"), [("mlp", 1), ("mlp", 4), ("cnn", 2), ("transformer", 2)])
def test_what_is_chosen_trains_as_one_process_and_survives_json(model, ranks):
    made = chosen(MODELS[model], ranks)
    again = Plan.from_json(made.to_json())
    assert again == made and again.to_json() == made.to_json()
    wanted = losses(MODELS[model], steps=STEPS)
    for found in run_ranks(ranks, lambda comm: losses(MODELS[model], Plan.from_json(made.to_json()), comm, STEPS)):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_ranks_that_do_not_exist_get_the_plan_that_they_would_choose():
    alone = plan.auto(batch_size=BATCH, profile=SLOW).choose(mlp()[0], world_size=4)
    assert alone == (made := plain()) and str(alone.why()) == str(made.why())
    assert ", 64 ranks: " in str(plan.auto(profile=SLOW).choose(mlp()[0]["train"], world_size=64).why())


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_an_executor_has_its_precision_planned(precision):
    graph, strategy = mlp()[0], plan.auto(batch_size=BATCH, profile=FAST)
    ht.Executor(graph, strategy=strategy, precision=precision)
    found, told = strategy.why(), plan.auto(batch_size=BATCH, profile=FAST)
    told.choose(graph, world_size=1, precision=precision)
    told = str(told.why())
    assert str(found) == told and (told == str(chosen(mlp, 1, FAST).why())) == (precision == "float32")


@pytest.mark.parametrize(("model", "ranks"), [("cnn", 3), *nightly([("mlp", 4), ("transformer", 4)])])
def test_what_plans_spend_adds_up_and_what_decided_would_have_changed_the_choice(model, ranks):
    """The parts of each plan's time, by simulating it again; and what a larger budget would have chosen."""
    graph = MODELS[model]()[0]
    free = plan.auto(batch_size=BATCH, profile=FAST).choose(graph, world_size=ranks).why()
    for r in (r for r in free.rated if r.valid):
        cost = simulate(graph["train"], r.builder, FAST, world_size=ranks, shapes=MODELS[model]()[1][0])
        assert cost.time == pytest.approx(r.seconds) and sum(r.spent) == pytest.approx(r.seconds, rel=1e-6), r.name
        assert r.spent.computing <= r.seconds and min(r.spent) >= -1e-9 * r.seconds
    other = free.next_best[0]
    added = [
        f"{name} {1e3 * (its - ours):+.3f} ms"
        for name, its, ours in zip(other.spent._fields, other.spent, free.best.spent)
    ]
    text = " ".join(str(free).split())
    assert all(each in text for each in added if "0.000" not in each)
    tight = plan.auto(free.best.peak - 1, batch_size=BATCH, profile=FAST).choose(graph, world_size=ranks).why()
    larger = next(r for r in tight.others if r.peak > tight.budget and r.seconds < tight.best.seconds)
    assert f"decided by memory: {larger.name} would take" in " ".join(str(tight).split())
    again = plan.auto(larger.peak, batch_size=BATCH, profile=FAST).choose(graph, world_size=ranks).why()
    assert again.best.seconds <= larger.seconds < tight.best.seconds


def test_the_fastest_that_fits_is_taken_and_the_reason_is_told():
    free = plain()
    why = free.why()
    assert why.best.seconds == min(r.seconds for r in why.rated if r.valid)
    assert "decided by time: it is the fastest of" in str(why) and str(why).count("next best: ") == 2
    names = {r.name for r in why.rated}
    assert names > {c.name for c in candidates(mlp()[0]["train"][:1], 4, Hints(), BATCH)}
    assert free.name == "each rank alone" and "shares nothing" in str(why)  # the link is very slow
    tight = chosen(mlp, 4, budget=why.best.peak - 1)
    reason = tight.why()
    assert reason.best.peak < why.best.peak and reason.best.seconds > why.best.seconds
    assert max(map(len, str(reason).splitlines())) <= 100
    text = " ".join(str(reason).split())
    assert f"decided by memory: {free.name} would take" in text
    assert f"but needs {why.best.peak:,} bytes, 1 more than the budget" in text


@pytest.mark.nightly
def test_every_budget_gives_a_plan_that_fits_or_says_what_is_missing():
    least = min(r.peak for r in chosen(mlp, 2).why().rated if r.valid)
    for budget in (least, least * 5 // 4, least * 2):
        made = chosen(mlp, 2, budget=budget)
        assert max(made.why().cost.peak) <= budget
    with pytest.raises(BudgetError, match=r"no plan fits: the smallest, .*, needs [\d,]+ bytes on a rank, [\d,]+ more"):
        chosen(mlp, 2, budget=100)


SHARES = [("mlp", 0.8, {"zero": 3}), *nightly([("mlp", 0.8, {}), ("transformer", 0.5, {}), ("cnn", 0.25, {"zero": 3})])]


@pytest.mark.parametrize(("model", "share", "hints"), SHARES)
def test_what_is_said_to_help_a_budget_helps(model, share, hints):
    """A larger budget, fewer rows and more ranks, each with the number that it names."""
    graph, hints, n = MODELS[model]()[0], {"stages": 1, "tensor": 1, **hints}, 48

    def choose(budget, rows=n, ranks=2):
        return plan.auto(budget, batch_size=rows, profile=FAST, hints=hints).choose(graph, world_size=ranks).why().best

    with pytest.raises(BudgetError) as caught:
        choose(1)
    least = number(r"raise the budget to ([\d,]+) bytes", caught.value.fix)
    assert 0.9 * least <= choose(least).peak <= least
    with pytest.raises(BudgetError) as caught:
        choose(budget := int(share * least))
    text = f"{caught.value.message}; {caught.value.fix}"
    needs = number(r"needs ([\d,]+) bytes", text)
    assert number(r", ([\d,]+) more than the budget", text) == needs - budget > 0
    assert ("rows a step" in text) or ("ranks instead of 2" in text)
    if "rows a step" in text:
        assert f"instead of {n} " in text and choose(budget, rows=number(r"at most ([\d,]+) rows", text)).peak <= budget
    if "ranks instead" in text:
        assert choose(budget, ranks=number(r"use ([\d,]+) ranks", text)).peak <= budget


def number(pattern: str, text: str) -> int:
    return int(re.search(pattern, text)[1].replace(",", ""))


def wide():
    """Two large layers and a small one: all that counts is their variables and optimizer state."""
    x, t = ht.placeholder("x", (None, 64)), ht.placeholder("t", (None,), "int64")
    with ht.scope("wide"):
        h = ht.nn.Linear(64, 256, activation=ht.relu, name="one")(x)
        y = ht.nn.Linear(8, 4, name="three")(ht.nn.Linear(256, 8, activation=ht.relu, name="two")(h))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        graph = {"train": [loss, ht.optim.Adam(0.01).minimize(loss)]}
    rng = np.random.default_rng(0)
    feed = {"x": rng.normal(size=(BATCH, 64)).astype("float32"), "t": rng.integers(0, 4, BATCH)}
    return graph, [feed] * STEPS


@pytest.mark.compiled
def test_layers_are_sharded_no_further_than_they_must():
    hints = {"data": 2, "tensor": 1, "stages": 1}
    thin = MachineProfile(cluster=Cluster(inner=Link(latency=1e-5, bandwidth=1e7)))  # each byte counts
    rated = {r.name: r for r in chosen(wide, 2, thin, hints=hints).why().rated}
    budget = (rated["dp2"].peak + rated["dp2 zero3"].peak) // 2
    made = chosen(wide, 2, thin, budget=budget, hints=hints)
    layered = next(r for r in made.why().rated if isinstance(r.builder, Layered))
    assert layered.peak <= budget and layered.seconds < rated["dp2 zero3"].seconds
    assert made.name == layered.name == "dp2, layers: 2 at zero0, 1 at zero3"
    wanted = losses(wide, steps=STEPS)
    for found in run_ranks(2, lambda comm: losses(wide, made, comm, STEPS)):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


def deep():
    """Activations are all that counts, of a number of rows that nothing divides."""
    x, t = ht.placeholder("x", (None, 16)), ht.placeholder("t", (None, 16))
    h = x
    with ht.scope("deep"):
        for k in range(6):
            h = ht.nn.Linear(16, 16, activation=ht.tanh, name=f"layer_{k}")(h)
        loss = ht.mean((h - t) ** 2)
        graph = {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}
    rng = np.random.default_rng(0)
    return graph, [dict(zip("xt", rng.normal(size=(2, 769, 16)).astype("float32")))] * STEPS


def test_a_step_is_recomputed_where_nothing_else_fits():
    big = run_ranks(1, lambda comm: plan.auto(batch_size=769, profile=SLOW).choose(deep()[0], comm))[0]
    budget = big.why().best.peak * 2 // 3
    made = run_ranks(1, lambda comm: plan.auto(budget, batch_size=769, profile=SLOW).choose(deep()[0], comm))[0]
    assert made.memory == budget and isinstance(made.why().best.builder, Within)
    assert made.name == "one rank, recomputing" and Plan.from_json(made.to_json()) == made
    assert losses(deep, made, None, STEPS) == losses(deep, None, None, STEPS)


def uneven():
    """Many layers that move bytes, then a few that do as many operations in far less time."""
    x, t = ht.placeholder("x", (None, 1024, 4)), ht.placeholder("t", (None, 16))
    h = x
    with ht.scope("uneven"):
        for k in range(12):
            h = ht.nn.Linear(4, 4, activation=ht.tanh, name=f"thin_{k}")(h)
        h = ht.nn.Linear(4, 512, activation=ht.tanh, name="fat_0")(ht.mean(h, axis=1))
        h = ht.nn.Linear(512, 512, activation=ht.tanh, name="fat_1")(h)
        loss = ht.mean((ht.nn.Linear(512, 16, name="fat_2")(h) - t) ** 2)
        graph = {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}
    rng = np.random.default_rng(0)
    return graph, [{"x": rng.normal(size=(64, 1024, 4)), "t": rng.normal(size=(64, 16))}] * STEPS


@pytest.mark.nightly
def test_a_pipeline_is_cut_by_seconds_where_operations_mislead():
    fast = MachineProfile(cluster=Cluster(inner=Link(latency=1e-6, bandwidth=1e10)))
    hints = {"data": 1, "tensor": 1, "stages": 2}
    made = run_ranks(2, lambda comm: plan.auto(batch_size=64, profile=fast, hints=hints).choose(uneven()[0], comm))[0]
    rated = {r.name: r.seconds for r in made.why().rated}
    default = re.sub(", cut by seconds|, [0-9]+, [0-9]+ layers", "", made.name)  # layers are moved, too
    assert made.name != default and rated[made.name] < 0.9 * rated[default]
    wanted = losses(uneven, steps=STEPS)
    for found in run_ranks(2, lambda comm: losses(uneven, Plan.from_json(made.to_json()), comm, STEPS)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5)


def test_no_other_cut_of_a_pipeline_is_faster():
    """Neither that by operations nor that by seconds knows which sums of gradients hide behind passes."""
    h = ht.placeholder("x", (None, 64))
    with ht.scope("cut"):
        for features, width in itertools.pairwise((64, 64, 16, 256, 16, 1024)):
            h = ht.nn.Linear(features, width, activation=ht.relu)(h)
        loss = ht.mean(h**2)
    entries = [loss, ht.optim.Adam(1e-3).minimize(loss)]
    link = MachineProfile(cluster=Cluster(inner=Link(latency=2e-6, bandwidth=1e10)))
    auto = plan.auto(batch_size=32, profile=link, hints={"stages": 2, "data": 2})
    best = auto.choose(entries, world_size=4).why().best
    assert best.name.startswith("dp2 pp2, 1 micro-batches") and [*best.builder.cut.values()] == [0, 0, 0, 1, 1]
    for k in range(1, 5):
        other = best.builder.but(cut={name: int(n >= k) for n, name in enumerate(best.builder.cut)})
        assert simulate(entries, other, link, world_size=4, shapes={"x": (32, 64)}).time >= best.seconds


def heavy():
    """Enough to compute, over a link that costs nothing, that all ranks are worth it."""
    x, t = ht.placeholder("x", (None, 64)), ht.placeholder("t", (None, 64))
    with ht.scope("heavy"):
        h = ht.nn.Linear(64, 64, activation=ht.relu, name="up")(x)
        loss = ht.mean((ht.nn.Linear(64, 64, name="down")(h) - t) ** 2)
        graph = {"train": [loss, ht.optim.Momentum(0.1).minimize(loss)]}
    rng = np.random.default_rng(0)
    return graph, [{name: rng.normal(size=(1200, 64)) for name in "xt"}] * STEPS


def test_a_slow_rank_gets_fewer_rows():
    slow = replace(FAST, speeds={2: 3.0})
    made = plan.auto(batch_size=1200, profile=slow).choose(heavy()[0], world_size=3)
    assert made.name == "dp3, rows by speed" and "rows of each rank: 515, 514, 171" in str(made.why())
    rated = {r.name: r.seconds for r in made.why().rated}
    assert rated[made.name] < 0.6 * rated["dp3"]  # 7/9 of what two fast ranks take alone, to a third of the slow one's
    wanted = losses(heavy, steps=STEPS)
    for found in run_ranks(3, lambda comm: losses(heavy, Plan.from_json(made.to_json()), comm, STEPS)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5)


def test_rows_by_speed_that_do_not_fit_are_made_to_fit_as_other_plans_are():
    slow = replace(FAST, speeds={2: 3.0})
    free = plan.auto(batch_size=1200, profile=slow).choose(heavy()[0], world_size=3).why().best
    made = plan.auto(free.peak - 1, batch_size=1200, profile=slow).choose(heavy()[0], world_size=3)
    assert made.why().best.peak < free.peak and "dp3, rows by speed" in {r.name for r in made.why().rated}


@pytest.mark.nightly
def test_gradients_accumulate_where_memory_is_short():
    free = plan.auto(batch_size=1200, profile=FAST).choose(heavy()[0], world_size=2).why().best
    made = plan.auto(free.peak * 2 // 3, batch_size=1200, profile=FAST).choose(heavy()[0], world_size=2)
    assert made.name.startswith("dp2") and made.name.endswith("micro-batches"), made.name
    assert f"decided by memory: {free.name} would take" in str(made.why())
    wanted = losses(heavy, steps=STEPS)
    for found in run_ranks(2, lambda comm: losses(heavy, Plan.from_json(made.to_json()), comm, STEPS)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5)


@pytest.mark.nightly
def test_stages_of_unequal_size_are_possible():
    rated = plan.auto(batch_size=12, profile=FAST).choose(mlp()[0], world_size=6).why().rated
    assert not [r.name for r in rated if "ranks" in r.name and not r.valid]


# -- candidates and hints -----------------------------------------------------------------------------------------


def test_candidates_are_all_products_that_the_hints_allow():
    outputs = [mlp()[0]["train"][0]]
    names = [c.name for c in candidates(outputs, 4, Hints())]
    assert len(set(names)) == len(names)
    assert {"dp4", "dp4 zero3", "dp2 tp2 zero1", "tp4", "tp2 pp2, 4 micro-batches", "pp4, 4 micro-batches"} <= {*names}
    assert sum("pp" not in name for name in names) == 3 * (len(divisors(4)) - 1) + 1
    hints = Hints.of({"tensor": 2, "stages": 1, "zero": 3})
    assert [c.name for c in candidates(outputs, 4, hints)] == ["dp2 tp2 zero3"]
    x = ht.placeholder("x", (None, 4))
    plain = [ht.sum(x * ht.variable("nobody_splits_this", ht.init.zeros, ()))]
    assert not any("tp" in c.name for c in candidates(plain, 4, Hints()))


@pytest.mark.parametrize(("best", "most", "asked"), [(64, 64, 6), (16, 64, 5), (4, 64, 3), (2, 64, 4), (2, 12, 3)])
def test_micro_batches_are_searched_up_and_down_from_where_it_begins(monkeypatch, best, most, asked):
    """As many as are fastest are found, and no more are simulated than lie on the way, with a neighbor on each side."""
    simulated = []

    def seconds(search, builder):
        simulated.append(builder.microbatches)
        return Cost(1 + abs(math.log2(builder.microbatches / best)), (1,), {}, Timeline(()))

    monkeypatch.setattr(planner.PlanSearch, "simulated", seconds)
    made = plan.auto(batch_size=most, hints={"stages": 2}).choose(mlp()[0], world_size=2)
    assert made.name.startswith(f"pp2, {best} micro-batches")
    assert len({*simulated}) == asked


def test_no_strategy_is_simulated_twice(monkeypatch):
    """Without optimizer state there is nothing that the first level of sharding could shard."""
    asked, plain = list[str](), planner.PlanSearch.simulated

    def simulated(search, builder):
        asked.append(builder.build(search.outputs, search.world).to_json())
        return plain(search, builder)

    monkeypatch.setattr(planner.PlanSearch, "simulated", simulated)
    x = ht.placeholder("x", (None, 16))
    loss = ht.mean(ht.nn.Linear(16, 16)(x) ** 2)
    made = plan.auto(batch_size=32, profile=FAST).choose([loss, ht.optim.SGD(0.1).minimize(loss)], world_size=2)
    rated = {r.name: r for r in made.why().rated}
    assert rated["dp2"].seconds == rated["dp2 zero1"].seconds
    assert len(asked) == len({*asked}) + 1  # what is chosen once more, for its timeline


def test_hints_that_cannot_be():
    with pytest.raises(ArgumentError, match=r"a hint 'tensr'[\s\S]*did you mean 'tensor'"):
        plan.auto(hints={"tensr": 2})
    with pytest.raises(ArgumentError, match="the hints allow none"):
        chosen(mlp, 2, hints={"data": 3})
    for given in ({"budget": 0}, {"batch_size": 0}):
        ((name, value),) = given.items()
        with pytest.raises(
            ArgumentError, match=rf"auto got {name}={value!r}\n  at test_planner.py[\s\S]*a (whole )?number"
        ):
            plan.auto(**given)
    with pytest.raises(
        ArgumentError, match=r"auto got budget='2G'\n  at test_planner.py[\s\S]*pass budget as a number above 0"
    ):
        plan.auto(budget="2G")
    for name, value in (("stages", "2"), ("data", 0), ("zero", 7)):
        with pytest.raises(ArgumentError, match=f"(the hint {name} is |Hints got {name}=){value!r}"):
            plan.auto(hints={name: value})
    with pytest.raises(ArgumentError, match="nothing is chosen yet"):
        plan.auto().why()
    with pytest.raises(ArgumentError, match="this plan was read, not made"):
        Plan.from_json(chosen(mlp, 1).to_json()).why()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"name": 3}, "not a plan: name is 3: wanted str"),
        ({"memory": 1.5}, "not a plan: memory is 1.5: wanted int"),
        ({"memory": True}, "not a plan: memory is True: wanted int"),
        ({"profile": {}}, "not a plan: profile is {}"),
        ({"strategy": {"kind": "none"}}, r"not a plan: strategy is .*: not a strategy: a kind 'none', wanted one of"),
        ({"more": 1}, "not a plan: wanted name, strategy, memory, profile; wrong or missing: more"),
    ],
)
def test_what_is_wrong_in_the_json_of_a_plan_is_named(wrong, text):
    data = json.loads(chosen(mlp, 1).to_json())
    with pytest.raises(ArgumentError, match=rf"{text}[\s\S]*fix: "):
        Plan.from_json(json.dumps(data | wrong))
    for other in ("{}", "[]", "3", "{"):
        with pytest.raises(ArgumentError, match=r"not a plan: [\s\S]*fix: pass what Plan.to_json wrote"):
            Plan.from_json(other)


# -- explaining ---------------------------------------------------------------------------------------------------


def test_a_notebook_shows_a_table_and_the_timelines_of_a_plan_and_of_the_next_best():
    why = chosen(mlp, 2).why()
    html = why._repr_html_()
    for r in (why.best, why.next_best[0]):
        assert f"{escape(r.name)}: {1e3 * r.seconds:,.3f} ms" in html
    assert html.count("<svg") == 1 and html.count("<tr>") >= 4 and "chosen" in html and "<pre>" in html


# -- where it is asked for ----------------------------------------------------------------------------------------


def test_an_executor_takes_it_by_name_and_from_the_environment(monkeypatch):
    x = ht.placeholder("x", (None, 3))
    named = ht.Executor([x * 2], strategy="auto")
    assert named.run({x: np.ones((2, 3))})[0].tolist() == [[2.0] * 3] * 2
    assert str(named.placement.why()).startswith("one rank, 1 rank: ")
    monkeypatch.setenv(STRATEGY, "auto")
    assert not isinstance(ht.Executor([x * 2]).placement, Alone)
    monkeypatch.setenv(STRATEGY, "autp")
    with pytest.raises(UnknownNameError, match=r"no strategy 'autp'[\s\S]*did you mean 'auto'"):
        ht.Executor([x * 2])


SCRIPT = """
import numpy as np
import hetu as ht
from hetu import dist

x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
with ht.scope("mlp"):
    h = ht.nn.Linear(10, 16, activation=ht.relu, name="up")(x)
    loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(16, 5, name="down")(h), t))
    executor = ht.Executor([loss, ht.optim.Adam(0.01).minimize(loss)])
rng = np.random.default_rng(1)
for _ in range(3):
    value = executor.run({x: rng.normal(size=(12, 10)), t: rng.integers(0, 5, 12)})[0]
    if dist.world().rank == 0:
        print(f"loss {float(value):.5f}", flush=True)
if dist.world().rank == 0 and hasattr(executor.placement, "why"):
    print(executor.placement.why())
"""


def test_real_ranks_are_planned_for_by_the_launcher(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = {k: v for k, v in os.environ.items() if k != STRATEGY}
    alone = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment)
    job = heturun("-w", 2, "--auto", "python", str(script))
    assert (alone.returncode, job.returncode) == (0, 0), alone.stderr + job.stderr
    wanted = alone.stdout.splitlines()
    lines = [line.removeprefix("[rank 0] ") for line in job.stdout.splitlines()]
    assert len(wanted) == 3 and lines[:3] == wanted
    assert ", 2 ranks: " in lines[3] and any(line.startswith("decided by ") for line in lines)
    assert job.stderr.count(lines[3]) == 1  # the plan that it took, told by one rank
