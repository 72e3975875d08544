"""Partial reduce as a plan: what groups are worth, when the planner takes them, and how it sees that ranks are slow."""

from __future__ import annotations

import heapq
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu import plan
from hetu.core.errors import ArgumentError
from hetu.dist import DataParallel, Link, run_ranks
from hetu.dist.launch.options import job_of, parse, told
from hetu.plan import Cluster, MachineProfile, Plan, simulate
from hetu.plan.costs import speeds
from hetu.plan.simulation.partners import play
from hetu.ps import Controller
from hetu.strategies import Connected, PartialReduce

from ..dist.models import BATCH, MODELS, mlp
from ..dist.test_launch import heturun
from ..pairs import nightly

NEAR, FAR = Link(1e-7, 1e11), Link(1e-3, 1e7)
SLOW = [[1, 1, 1, 2], [1, 1, 1, 3], [1, 1, 1, 6], [1, 2, 3, 4], [1, 1, 3], [1, 1, 1, 1, 1, 1, 1, 3]]
EVEN = [[1, 1, 1, 1], [1, 1.2, 1.1, 1.3], [1, 1, 1]]


def profile(factors, link=NEAR) -> MachineProfile:
    return MachineProfile(cluster=Cluster(inner=link, outer=link), speeds=dict(enumerate(factors)))


def chosen(factors, link=NEAR, model=mlp, batch=24 * BATCH, **options) -> Plan:
    """What the planner chooses on ranks that are so slow, with servers."""
    hints = {"tensor": 1, "stages": 1}  # or there are more candidates to simulate
    auto = {"batch_size": batch, "profile": profile(factors, link), "exact": False, "hints": hints, **options}
    plans = run_ranks(len(factors), lambda comm: plan.auto(**auto).choose(model()[0], Connected(comm)), deadline=120)
    assert all(p == plans[0] and str(p.why()) == str(plans[0].why()) for p in plans)
    return plans[0]


def partial(found: Plan) -> list:
    return [r for r in found.why().rated if isinstance(r.builder, PartialReduce)]


# -- what groups are worth -----------------------------------------------------------------------------------------


def trained(seconds, group: int, rate: float, limit: float) -> float:
    """Seconds until every rank's model of a noisy quadratic of 8 curvatures is near its optimum, averaged over many."""
    rng, ranks, curves = np.random.default_rng(1), len(seconds), np.linspace(0.1, 1, 8)
    x, iterations, controller = np.ones((ranks, 64, 8)), [0] * ranks, Controller(ranks, group)
    coming = [(each, rank) for rank, each in enumerate(seconds)]
    heapq.heapify(coming)
    while (event := heapq.heappop(coming))[0] < limit:
        now, rank = event
        if (made := controller.add(rank, iterations[rank], now)) is None:
            continue
        members = [*made.members]
        x[members] -= rate * (x[members] * curves + rng.standard_normal((len(members), 64, 8)))
        x[members] = np.tensordot(made.weights, x[members], 1)
        for member in members:
            iterations[member] = made.iteration + 1
            heapq.heappush(coming, (now + seconds[member], member))
        if (x**2 * curves).sum(-1).mean(-1).max() < 0.05 * curves.sum():
            return now
    return np.inf


@pytest.mark.sampled(2)
@pytest.mark.parametrize("factors", [SLOW[1], EVEN[0], *nightly([(f,) for f in (SLOW[0], *SLOW[2:5])])], ids=str)
def test_what_a_step_of_groups_is_worth_is_what_training_takes(factors):
    """Each at the best of its rates. The formula knows one curvature and one rate."""

    def best(group):
        return min(trained(factors, group, rate, 300 * max(factors)) for rate in (0.05, 0.1, 0.15, 0.2, 0.3))

    whole = best(len(factors))
    for group in {2, len(factors) - 1}:
        played = play(factors, group, 0.5, lambda members: 0.0)
        told = played.seconds * played.noise / max(factors)
        assert 0.7 < best(group) / whole / told < 1.45, (group, told, best(group) / whole)


def test_groups_on_a_clock():
    whole = play([1, 1, 1], 3, 0.5, lambda members: 0.25)
    assert (round(whole.seconds, 9), round(whole.noise, 2), [*whole.met]) == (1.25, 1.0, [(0, 1, 2)])
    for factors in SLOW:
        slow, even = (play(f, len(f) - 1, 0.5, lambda members: 0.0) for f in (factors, [1] * len(factors)))
        assert slow.seconds * slow.noise < 0.8 * max(factors) and even.seconds * even.noise > 1.05


# -- when they are taken -------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("factors", SLOW[1:], ids=str)
def test_slow_ranks_have_partial_reduce_chosen_if_it_is_allowed(factors):
    found = chosen(factors)
    assert found.name.startswith("partial reduce, groups of") and found.strategy.kind == "partial reduce"
    assert Plan.from_json(found.to_json()) == found and found.strategy.group < len(factors)
    text = " ".join(str(found.why()).split())
    least = min(factors)
    assert ", ".join(f"{r} ({f / least:.2f} times)" for r, f in enumerate(factors) if f > least) in text
    assert "trains otherwise than one process" in text and "times the noise" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"exact": True}, {"hints": {"zero": 3, "tensor": 1, "stages": 1}}], ids=str)
def test_it_is_not_proposed_against_what_was_said(options):
    assert not partial(chosen([1, 1, 1, 3], **options))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
def test_it_is_taken_exactly_where_it_is_told_to_be_faster(seed):
    """Whatever the ranks, the model, its batch and the link."""
    rng = np.random.default_rng(seed)
    factors = rng.choice([1, 1, 1.2, 1.6, 2, 4], rng.integers(3, 6)).tolist()
    link = Link(10.0 ** rng.uniform(-7, -3), 10.0 ** rng.uniform(7, 11))
    found = chosen(factors, link, MODELS[("mlp", "cnn")[seed % 2]], batch=60 * int(rng.integers(1, 20)))
    ours, all_of_them = partial(found), [r for r in found.why().rated if r.valid]
    assert bool(ours) == (max(factors) > 1.5 * min(factors))
    best = min(all_of_them, key=lambda r: r.seconds)
    assert found.name == best.name and (found.strategy.kind == "partial reduce") == (best in ours)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("factors", "link"), [*itertools.product(EVEN, (NEAR, FAR))], ids=str)
def test_it_is_never_proposed_among_equal_ranks(factors, link):
    assert not partial(chosen(factors, link))


def test_it_is_proposed_but_not_taken_where_a_step_is_all_messages():
    found = chosen([1, 1, 1, 3], FAR, hints={})
    assert partial(found) and found.name == "each rank alone"


def test_no_plan_is_beyond_the_budget():
    free = chosen([1, 1, 1, 3])
    tight = chosen([1, 1, 1, 3], budget=max(free.why().cost.peak) - 1)
    assert max(tight.why().cost.peak) < max(free.why().cost.peak) and tight.name != free.name


def test_the_cost_of_partial_reduce_by_hand():
    """One layer, of which each rank computes the same part as under data parallelism."""
    graph, _ = mlp()
    shapes = {"x": (48, 10), "t": (48,)}
    costs = [
        simulate(graph["train"], strategy, profile([1, 1, 1, 2.0]), world_size=4, shapes=shapes)
        for strategy in (PartialReduce(3), DataParallel())
    ]
    ours, theirs = costs
    seconds = {e.name: e.end - e.start for e in ours.timeline.events if e.rank == 3}
    assert seconds["step"] == pytest.approx(2 * ours.timeline.overlap(0).compute)
    assert seconds["step"] == pytest.approx(theirs.time, rel=0.2) and ours.time < theirs.time
    assert sum(ours.sent.values()) > 0 and max(ours.peak) == pytest.approx(max(theirs.peak), rel=0.2)


# -- how ranks are seen to be slow ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "wanted"),
    [
        ([[1, 1, 1, 3]] * 7, [1, 1, 1, 3]),
        ([[1, 1, 1, 1.4]] * 7, [1, 1, 1, 1]),
        ([[9, 1, 1, 3], [1, 8, 1, 2.5], *[[1, 1, 1, 3]] * 5], [1, 1, 1, 2.5]),
        ([[1, 1, 1, 9]] * 6 + [[1, 1, 1, 1]], [1, 1, 1, 1]),  # now and then
        ([[9, 9, 9, 9]] * 2 + [[1, 1, 1, 1]] * 5, [1, 1, 1, 1]),
    ],
)
def test_a_rank_is_slow_if_it_is_so_whenever_one_looks(rounds, wanted, monkeypatch):
    def body(comm):
        mine = iter([1.0, 1.0, 1.0, *(float(row[comm.rank]) for row in rounds)])
        shapes = {"x": (24, 10), "t": (24,)}
        graph = mlp()[0]["train"]
        sub = ht.core.subgraph.SubGraph("train", graph)
        clocks[comm.rank] = mine
        return speeds.measured_seconds(comm, sub.entries, sub.placeholders, shapes)

    clocks = {}

    def counted(executor, feed, steps):
        return next(clocks[executor.placement.comm.rank])

    monkeypatch.setattr(speeds, "_seconds", counted)
    for found in run_ranks(4, body):
        np.testing.assert_allclose(found, wanted)


def test_a_model_that_cannot_be_split_is_not_measured():
    def body(comm):
        sub = ht.core.subgraph.SubGraph("train", mlp()[0]["train"])
        return speeds.measured_seconds(comm, sub.entries, sub.placeholders, {"x": (23, 10), "t": (24,)})

    assert run_ranks(2, body) == [[], []]


def test_the_launcher_names_the_strategy():
    with pytest.raises(ArgumentError, match="--auto-inexact without a server"):
        job_of(parse(["-w", "4", "--auto-inexact", "python", "x.py"])[1])
    for flag, name in (("--auto", "auto"), ("--auto-inexact", "auto-inexact")):
        assert told(parse([flag, "python", "x.py"])[1])["HETU_STRATEGY"] == name
    assert not {"HETU_STRATEGY", "HETU_TRIALS"} & told(parse(["python", "x.py"])[1]).keys()


def test_the_launcher_says_how_many_plans_are_tried(capsys):
    assert told(job_of(parse(["--auto", "--trials", "4", "python", "x.py"])[1]))["HETU_TRIALS"] == "4"
    with pytest.raises(ArgumentError, match=r"--trials 4 with servers[\s\S]*fix: leave out -s, or --trials"):
        job_of(parse(["-s", "1", "--auto", "--trials", "4", "python", "x.py"])[1])
    for given in (["--trials", "4"], ["--auto", "--trials", "1"]):
        with pytest.raises(SystemExit):
            parse([*given, "python", "x.py"])
        assert f"--trials {given[-1]}: try 2 plans at least, those of --auto" in capsys.readouterr().err


SCRIPT = """
import itertools, json, sys, time
import numpy as np
import hetu as ht
from hetu.dist import DataParallel, world

rank, beat = world().rank, 0.05 * (3 if world().rank == 3 else 1)

@ht.op(infer=lambda x: x, dims="...->...")
def machine(xp, x):
    time.sleep(beat * len(x) / 100)
    return x.copy()

machine.grad(lambda g, y, x: g)
rng = np.random.default_rng(0)
X = rng.standard_normal((400, 20)).astype("f")
T = X @ rng.standard_normal(20).astype("f")
x, t = ht.placeholder("x", (None, 20)), ht.placeholder("t", (None,))
w = ht.variable("w", np.zeros(20, "f"))
loss = ht.mean((ht.sum(machine(x) * w, axis=1) - t) ** 2)
updates = ht.optim.SGD(0.05).minimize(loss)
executor = ht.Executor({"train": [loss, updates]}, strategy=DataParallel() if "all" in sys.argv else None)
executor.program("train", {x: X, t: T})
world().barrier()
began, reached, placement = time.perf_counter(), None, executor.placement
for step in itertools.count():
    if getattr(placement, "iteration", step) >= (60 if "all" in sys.argv else 180):
        break
    executor.run("train", {x: X, t: T})
    if reached is None and ((X @ executor.state["w"] - T) ** 2).mean() < 0.1:
        reached = round(time.perf_counter() - began, 3), step
if "all" not in sys.argv:
    placement.agree({})
print(json.dumps([reached, getattr(placement.strategy, "group", 0)]), flush=True)
"""


@pytest.mark.nightly
def test_real_ranks_one_of_them_slow_are_given_partial_reduce_and_are_sooner_at_a_loss(tmp_path: Path):
    script, found = tmp_path / "train.py", {}
    script.write_text(SCRIPT)
    for how in ("all", "planned"):
        job = heturun("-w", 4, "-s", 1, "--auto-inexact", sys.executable, str(script), how)
        assert job.returncode == 0, job.stderr
        found[how] = [json.loads(line[line.index("]") + 1 :]) for line in job.stdout.splitlines() if line.endswith("]")]
    assert len(found["planned"]) == 4 and all(group in (2, 3) for _, group in found["planned"]), found
    assert max(row[0][0] for row in found["planned"]) <= 0.67 * max(row[0][0] for row in found["all"]), found
