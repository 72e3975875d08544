"""Trial runs: the log is kept, joined and read, and what is learned from it orders plans better or is left out."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

import hetu as ht
from hetu import plan
from hetu.core.errors import ArgumentError
from hetu.dist import DataParallel, Link, Pipeline, TensorParallel, ZeRO, run_ranks
from hetu.plan import Cluster, MachineProfile, TrialRun, read_trials, simulate
from hetu.plan.simulation.trials import FEATURES, factor, features_of, learned, machine_of

from ..dist.models import BATCH, mlp


def on(factor: float) -> MachineProfile:
    """A machine whose link takes so many times the seconds of another one's."""
    link = Link(latency=2e-5 * factor, bandwidth=1e9 / factor)
    return MachineProfile(cluster=Cluster(inner=link, outer=link))


HERE, NOTHING = machine_of(on(1.0)), np.zeros(len(FEATURES) + 4)


def models():
    """Dense, looked-up and deep models of several sizes: their entries and shapes."""
    for k, (rows, features, layers) in enumerate([(0, 32, 1), (0, 512, 1), (500, 32, 1), (4000, 128, 1), (0, 64, 3)]):
        x = ht.placeholder("x", (96, 8) if rows else (96, features), "int64" if rows else "float32")
        with ht.scope(f"model_{k}"):
            h = ht.mean(ht.nn.Embedding(rows, features)(x), axis=1) if rows else x
            for n in range(layers):
                h = ht.nn.Linear(features, 2 * features, activation=ht.relu, name=f"up_{n}")(h)
                h = ht.nn.Linear(2 * features, features, name=f"down_{n}")(h)
            loss = ht.mean(h**2)
            yield f"model {k}", [loss, ht.optim.Adam(0.01).minimize(loss)]


SPLIT = {"*up_?/weight": 1, "*up_?/bias": 0, "*down_?/weight": 0}
WAYS = [DataParallel(), ZeRO(1), ZeRO(3), TensorParallel(SPLIT), DataParallel().but(accumulate=4)]


def simulated_world() -> list[TrialRun]:
    """What plans take by the simulator on a link that is three times slower than the one by which they are told."""
    found, told, real = [], on(1.0), on(3.0)
    for name, entries in models():
        loss, updates = entries
        for ranks in (2, 4):
            for k, way in enumerate([*WAYS, *(Pipeline(2, count, data=ranks // 2) for count in (2, 8))]):
                strategy = way.build([loss, *updates.values()], ranks)
                cost, measured = (simulate(entries, strategy, profile, world_size=ranks) for profile in (told, real))
                features = features_of(cost, strategy, told)
                found.append(TrialRun(f"way {k}", name, HERE, features, cost.time, measured.time))
    return found


def drawn_world(seed: int = 0, plans: int = 50) -> list[TrialRun]:
    """Plans at random, of five models, whose communication takes three times what is told."""
    rng, found = np.random.default_rng(seed), []
    for k in range(plans):
        compute, wire = 1e-3 * 3.0 ** (k % 5) * rng.uniform(0.5, 1), 1e-3 * 3.0 ** (k % 5) * rng.uniform(0.05, 1)
        hidden = rng.uniform(0, 0.3) * min(compute, wire)
        sizes = {"ranks": 2, "stages": 1, "parts": 2, "microbatches": 1, "messages": rng.integers(1, 30), "peak": 1e6}
        features = {**dict.fromkeys(FEATURES, 0.0), "compute": compute, "communication": wire, "hidden": hidden}
        told, real = compute + wire - hidden, compute + 3 * wire - 3 * hidden
        features |= sizes
        found.append(TrialRun(f"plan {k}", f"model {k % 5}", HERE, features, told, real))
    return found


@pytest.fixture
def slow() -> list[TrialRun]:
    return drawn_world()


def ordered(trials: list[TrialRun], numbers: np.ndarray) -> int:
    """Pairs of plans of one model on as many ranks that are in order, by plain loops."""
    told = [t.analytic * factor(numbers, t.features, t.analytic) for t in trials]
    return sum(
        (told[i] < told[j])
        for i, a in enumerate(trials)
        for j, b in enumerate(trials)
        if (a.model, a.features["ranks"]) == (b.model, b.features["ranks"]) and b.seconds > 1.1 * a.seconds
    )


@pytest.mark.parametrize(
    "world",
    [
        *(functools.partial(drawn_world, k) for k in range(3)),
        pytest.param(simulated_world, marks=[pytest.mark.nightly]),
    ],
)
def test_slow_communication_is_learned_and_orders_the_plans_of_a_model_that_was_held_out(world):
    trials, before, after = world(), 0, 0
    assert len(trials) >= 50
    for held in {t.model for t in trials}:
        inside, others = ([t for t in trials if (t.model == held) is wanted] for wanted in (True, False))
        numbers = learned(others, HERE)
        before, after = before + ordered(inside, NOTHING), after + ordered(inside, numbers)
        told, better = (
            np.log([t.analytic * factor(of, t.features, t.analytic) / t.seconds for t in inside])
            for of in (NOTHING, numbers)
        )
        assert np.abs(better).mean() < 0.5 * np.abs(told).mean()
    assert after > 1.05 * before


def exact(slow, noise: float = 0.0, seed: int = 0):
    factors = np.exp(noise * np.random.default_rng(seed).normal(size=len(slow)))
    return [replace(t, seconds=t.analytic * f) for t, f in zip(slow, factors)]


NOISY = [functools.partial(exact, noise=0.03, seed=k) for k in range(5)]  # too little to change an order


@pytest.mark.parametrize("world", [exact, *NOISY, lambda slow: slow[:7], lambda slow: []])
def test_without_anything_to_learn_all_stays_as_it_is(slow, world):
    numbers = learned(world(slow), HERE)
    assert not numbers.any() and {factor(numbers, t.features, t.analytic) for t in slow} == {1.0}


def test_what_is_learned_goes_no_further_than_what_was_seen(slow):
    numbers, logs = learned(slow, HERE), [np.log(t.seconds / t.analytic) for t in slow]
    assert numbers.any()
    for t in slow:
        far = {**t.features, "messages": 1e9, "communication": 1e3 * t.features["communication"]}
        assert min(logs) - 1e-9 <= np.log(factor(numbers, far, t.analytic)) <= max(logs) + 1e-9


def test_trials_of_another_machine_are_left_out(slow):
    others = [replace(t, machine="there", seconds=100.0) for t in slow]
    with pytest.warns(RuntimeWarning, match=f"{len(slow)} of {2 * len(slow)} trials are of another machine or profile"):
        numbers = learned([*slow, *others], HERE)
    assert np.array_equal(numbers, learned(slow, HERE))
    with pytest.warns(RuntimeWarning, match="another machine or profile and left out"):
        assert not learned(slow, "nowhere").any()


# -- the planner ---------------------------------------------------------------------------------------------------


def written(path: Path, trials: list[TrialRun]) -> Path:
    path.write_text("".join(json.dumps(asdict(t)) + "\n" for t in trials), "utf-8")
    return path


def chosen(log: Path | None, ranks: int = 2):
    def choose(comm):
        auto = plan.auto(batch_size=BATCH, profile=on(1.0), learned=log, hints={"stages": 1})
        return auto.choose(mlp()[0], comm)

    plans = run_ranks(ranks, choose, deadline=120)
    assert all(p == plans[0] and str(p.why()) == str(plans[0].why()) for p in plans)
    return plans[0].why()


def test_the_planner_corrects_its_seconds_by_a_log(slow, tmp_path):
    plain, why = chosen(None), chosen(written(tmp_path / "log", slow))
    times = {r.name: (r.seconds, s.seconds) for r, s in zip(plain.rated, why.rated) if r.valid and r.name == s.name}
    assert len(times) > 3 and times["dp2"][1] > 1.5 * times["dp2"][0]
    assert " times the " in str(why) and " ms that are simulated" in str(why) and "by trial runs" not in str(plain)


@pytest.mark.parametrize("kept", [lambda slow: slow[:7], exact])
def test_the_planner_is_as_it_was_where_a_log_teaches_nothing(slow, tmp_path, kept):
    why, plain = chosen(written(tmp_path / "log", kept(slow))), chosen(None)
    assert str(why) == str(plain) and [r.seconds for r in why.rated] == [r.seconds for r in plain.rated]


def test_the_fastest_of_the_plans_that_were_tried_is_taken_and_the_log_has_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HETU_TRIALS", "2")
    monkeypatch.setenv("HETU_STRATEGY", "auto")
    log, auto_of = tmp_path / "log", {"batch_size": BATCH, "profile": on(1.0), "hints": {"stages": 1}}
    log.touch()  # as a kill leaves it

    def choose(comm):
        return plan.auto(learned=log, **auto_of).choose(mlp()[0], comm)

    mine, other = run_ranks(2, choose, deadline=120)
    tried = mine.why().tried
    assert mine == other and [(r.name, seconds) for r, seconds in tried] == [
        (t.name, t.seconds) for t in read_trials(log)
    ]
    assert len(tried) == 2 and (mine.name, min(s for _, s in tried)) in [(r.name, s) for r, s in tried]
    assert [r.seconds for r, _ in tried] == sorted(r.seconds for r, _ in tried)  # those predicted to be the fastest
    head, *rows = str(mine.why()).split("fastest of 2 plans that were run\n")[1].splitlines()
    assert (
        head.split() == ["plan", "predicted", "measured"]
        and len(rows) == 2
        and str(mine.why()) in capsys.readouterr().err
    )
    monkeypatch.setenv("HETU_TRIALS", "")
    assert plan.auto().trials == 0


@pytest.mark.parametrize(
    ("of", "asked", "text"),
    [
        ({"trials": -1}, {}, "trials"),
        ({"trials": 2}, {"world_size": 4}, "trial runs on 4 ranks, of which 1 are there"),
        (
            {"trials": 2, "profile": replace(on(1.0), device=replace(on(1.0).device, host_bandwidth=1e9))},
            {},
            "trial runs on a GPU[\\s\\S]*fix: leave out trials=",
        ),
        ({}, {}, "HETU_TRIALS is 'some'"),
    ],
)
def test_where_no_plan_can_be_tried_it_is_said(of, asked, text, monkeypatch, tmp_path):
    monkeypatch.setenv("HETU_TRIALS", "some")
    with pytest.raises(ArgumentError, match=text):
        plan.auto(**{"batch_size": BATCH, "profile": on(1.0), "learned": tmp_path / "log"} | of).choose(
            mlp()[0]["train"], **asked
        )


# -- the log -------------------------------------------------------------------------------------------------------


def test_a_trial_is_measured_by_all_ranks_and_logged_once(tmp_path):
    graph, feeds = mlp(hidden=256)  # large enough for what is kept of it to be more than what calls are bound to
    log, profile = tmp_path / "log", on(1.0)

    def work(comm):
        found = []
        for way in (DataParallel(), Pipeline(2, 3), ZeRO(3)):
            found.append(plan.trial(graph["train"], way, feeds[0], log=log, profile=profile, comm=comm, steps=3))
        return found

    mine, other = run_ranks(2, work, deadline=120)
    assert mine == other == read_trials(log)
    assert {(t.model, t.machine) for t in mine} == {(mine[0].model, machine_of(profile))}
    data, pipeline, zero = (t.features for t in mine)
    assert [tuple(f) for f in (data, pipeline, zero)] == [FEATURES] * 3
    assert [(f["ranks"], f["stages"], f["parts"], f["microbatches"]) for f in (data, pipeline, zero)] == [
        (2, 1, 2, 1),
        (2, 2, 1, 3),
        (2, 1, 2, 1),
    ]
    assert zero["messages"] > data["messages"] > 0 and zero["peak"] < data["peak"] and data["inner"] > data["outer"]


GOOD = TrialRun("dp2", "m", "here", dict.fromkeys(FEATURES, 1.0), 1e-3, 2e-3)
WRONG = [
    ('{"version": 1, "na', "JSONDecodeError"),
    ("[1]", "TypeError"),
    ('"text"', "TypeError"),
    ("", "JSONDecodeError"),
    ("\ufffd", "JSONDecodeError"),
    (json.dumps(asdict(GOOD) | {"version": 2}), "version 2, wanted 1"),
    (json.dumps(asdict(GOOD) | {"more": 2}), "more"),
    (json.dumps(asdict(GOOD) | {"features": {"compute": 1.0}}), "communication"),
    (json.dumps(asdict(GOOD) | {"features": dict.fromkeys(FEATURES, -2.0)}), "TrialRun got features="),
    (json.dumps(asdict(GOOD) | {"features": 3}), "TypeError"),
    (json.dumps(asdict(GOOD) | {"seconds": 0}), "TrialRun got seconds=0"),
    (json.dumps(asdict(GOOD) | {"seconds": "1"}), "TrialRun got seconds=.*1"),
    (json.dumps(asdict(GOOD) | {"analytic": float("nan")}), "TrialRun got analytic=nan"),
    (json.dumps({k: v for k, v in asdict(GOOD).items() if k != "machine"}), "machine"),
]


@pytest.mark.parametrize(("line", "text"), WRONG)
def test_a_line_that_is_no_trial_is_left_out_and_said(tmp_path, line, text):
    log = tmp_path / "log"
    whole = json.dumps(asdict(GOOD))
    log.write_text(f"{whole}\n{line}\n{whole}\n", "utf-8")
    with pytest.warns(RuntimeWarning, match=rf"1 of 3 lines are no trials and left out; line 2: .*{text}"):
        assert read_trials(log) == [GOOD, GOOD]
    log.write_text(f"{line}\n", "utf-8")
    with pytest.raises(ArgumentError, match=rf"no trials in .*log: line 1: .*{text}[\s\S]*fix: make some"):
        read_trials(log)


def test_logs_are_joined_and_go_on_behind_what_a_kill_cut_off(tmp_path):
    graph, feeds = mlp()
    first, second = written(tmp_path / "a", [GOOD]), written(tmp_path / "b", [replace(GOOD, seconds=3.0)])
    first.write_bytes(first.read_bytes() + second.read_bytes() + second.read_bytes()[:40])
    more = plan.trial(graph["train"], DataParallel(), feeds[0], log=first, profile=on(1.0), steps=1)
    with pytest.warns(RuntimeWarning, match="1 of 4 lines are no trials and left out; line 3: JSONDecodeError"):
        assert read_trials(first) == [GOOD, replace(GOOD, seconds=3.0), more]


@pytest.mark.parametrize(
    ("make", "text"), [(Path.touch, "it is empty"), (Path.mkdir, "directory"), (id, "No such file")]
)
def test_what_is_no_log_is_said(tmp_path, make, text):
    make(tmp_path / "log")
    with pytest.raises(ArgumentError, match=r"folder '.*nowhere' does not exist[\s\S]*fix: create it first"):
        plan.trial(mlp()[0]["train"], DataParallel(), {}, log=tmp_path / "nowhere" / "log")
    with pytest.raises(ArgumentError, match=f"no trials in .*log: .*{text}[\\s\\S]*fix: make some"):
        chosen(tmp_path / "log", 1)
