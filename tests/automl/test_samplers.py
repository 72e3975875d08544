"""Samplers and schedules on functions whose answers are known."""

import math

import numpy as np
import pytest

import hetu as ht
from hetu.automl import (
    ASHA,
    TPE,
    Alternating,
    Bayesian,
    Categorical,
    Conditioning,
    Float,
    GaussianProcess,
    Halving,
    Hyperband,
    Population,
    RandomSampler,
    Space,
    Trial,
    search,
)
from hetu.automl.samplers import Windows
from hetu.automl.schedules import rungs


def branin(run):
    x, y = run["x"], run["y"]
    bend = y - 5.1 / (4 * math.pi**2) * x * x + 5 / math.pi * x - 6
    return bend**2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


PLANE = {"x": Float(-5.0, 10.0), "y": Float(0.0, 15.0)}
LEAST = 0.397887


def regrets(sampler, seeds, trials=40):
    found = [search(branin, PLANE, trials=trials, sampler=sampler, seed=seed) for seed in seeds]
    return np.array([each.value(each.best) - LEAST for each in found])


def test_bayesian_search_finds_the_least_of_branin():
    assert regrets(Bayesian(), range(3)).max() <= 0.05


def test_windows_beat_chance():
    assert regrets(TPE(), range(12)).mean() < 0.8 * regrets(RandomSampler(), range(12)).mean()


def test_windows_are_asked_from_the_first_trial_on():
    assert len(search(branin, PLANE, trials=4, sampler=TPE(first=1, share=1.0)).trials) == 4


def test_a_gaussian_process_is_the_textbooks():
    """Of fixed hyperparameters, beside the formula with an inverse; its slopes beside differences."""
    rng = np.random.default_rng(0)
    x, y, new = rng.random((12, 3)), rng.normal(size=12), rng.random((5, 3))
    model = GaussianProcess()
    model.fit(x, y)
    lengths, scale, noise = np.exp(model.theta[:-2]), np.exp(model.theta[-2]), np.exp(model.theta[-1]) + 1e-8

    def kernel(a, b):
        r = np.sqrt(5) * np.linalg.norm((a[:, None] - b) / lengths, axis=-1)
        return scale * (1 + r + r**2 / 3) * np.exp(-r)

    inverse = np.linalg.inv(kernel(x, x) + noise * np.eye(12))
    mean, std = model.foretell(new)
    np.testing.assert_allclose(mean, kernel(new, x) @ inverse @ y, rtol=1e-6, atol=1e-8)
    variance = scale - np.einsum("ij,jk,ik->i", kernel(new, x), inverse, kernel(new, x))
    np.testing.assert_allclose(std**2, np.maximum(variance, 1e-12), rtol=1e-5, atol=1e-9)
    _, slope = model._likelihood(model.theta, y)
    for k in range(5):
        step = 1e-5 * (np.arange(5) == k)
        up, down = (model._likelihood(model.theta + sign * step, y)[0] for sign in (1, -1))
        assert slope[k] == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-6)


def test_of_many_points_some_tell_a_gaussian_process_its_lengths(monkeypatch):
    sizes, cholesky = list[int](), np.linalg.cholesky
    monkeypatch.setattr(np.linalg, "cholesky", lambda a: sizes.append(len(a)) or cholesky(a))
    monkeypatch.setattr("hetu.automl.gaussian.LEARNED", 40)
    x, new = np.random.default_rng(0).random((150, 2)), np.random.default_rng(1).random((50, 2))
    model = GaussianProcess()
    model.fit(x, np.sin(6 * x[:, 0]))
    assert max(sizes[:-1]) <= 40 and sizes[-1] == 150
    assert np.abs(model.foretell(new)[0] - np.sin(6 * new[:, 0])).max() < 0.01


def test_windows_are_a_density():
    """Over all configurations of a space they sum to 1, also with options that have numbers of their own."""
    space = Space({"model": Categorical(net={"x": Float(0.0, 1.0)}, none={}), "y": Categorical(1, 2, 3)})
    windows = Windows(space, space.scattered(4, np.random.default_rng(0)))
    x = (np.arange(1000) + 0.5) / 1000
    places = [[model, at, y] for model, line in ((0.25, x), (0.75, [np.nan])) for at in line for y in (0.1, 0.5, 0.9)]
    chances = np.exp(windows.density(np.array(places))) / np.where(np.array(places)[:, 0] < 0.5, len(x), 1)
    assert chances.sum() == pytest.approx(1, abs=1e-5)
    drawn = windows.drawn(4000, np.random.default_rng(1))
    assert (drawn[:, 0] > 0.5).mean() == pytest.approx(chances[-3:].sum(), abs=0.03)


@pytest.mark.parametrize("sampler", [TPE(), Bayesian()], ids=str)
def test_what_a_model_takes_for_bad_is_tried_again(sampler):
    """Its losses may have been those of bad numbers: a share of the proposals asks no model."""
    space = Space({"model": Categorical(good={"x": Float(0.0, 1.0)}, unlucky={"x": Float(0.0, 1.0)})})
    rng = np.random.default_rng(0)
    drawn = [space.drawn(rng) for _ in range(20)]
    losses = [("unlucky" in c["model"]) + (c[f"model.{c['model']}.x"] - 0.3) ** 2 for c in drawn]
    trials = [Trial(k, config, loss=loss) for k, (config, loss) in enumerate(zip(drawn, losses))]
    again = [sampler.propose(space, trials, np.random.default_rng(k))["model"] == "unlucky" for k in range(30)]
    assert 1 <= sum(again) <= 10


NESTED = {
    "model": Categorical(
        good={"x": Float(0.0, 1.0)}, bad={"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)}, worse={"z": Float(0.0, 1.0)}
    ),
    "scale": Float(0.1, 10.0, log=True),
}


def nested(run):
    base = {"good": 0.0, "bad": 0.5, "worse": 2.0}[run["model"]]
    return base + sum((value - 0.3) ** 2 for value in run.inside("model").values()) + math.log(run["scale"]) ** 2


@pytest.mark.parametrize(
    "sampler",
    [Conditioning("model"), Alternating(["scale"]), Conditioning("model", Alternating(["scale"], TPE())), TPE()],
    ids=str,
)
def test_blocks_search_spaces_of_parts(sampler):
    found = search(nested, NESTED, trials=60, sampler=sampler, seed=1)
    assert found.best.config["model"] == "good" and found.value(found.best) < 0.1


def test_an_option_that_cannot_win_leaves():
    found = search(nested, NESTED, trials=60, sampler=Conditioning("model"), seed=0)
    counts = {name: sum(t.config["model"] == name for t in found.trials) for name in ("good", "bad", "worse")}
    assert counts["worse"] <= counts["bad"] < counts["good"]
    assert Conditioning("model").playing(found.space, found.trials) == ["good"]


@pytest.mark.parametrize("sampler", [Bayesian(), TPE(), Conditioning("model")], ids=str)
def test_samplers_begin_with_the_defaults_wherever_the_search_is_broken_off(sampler):
    space = NESTED | {"scale": Float(0.1, 10.0, log=True, default=1.0)}
    rng, starts, trials = np.random.default_rng(0), Space(space).starts(), []
    for number in range(5):
        trials.append(Trial(number, sampler.propose(Space(space), trials, rng), loss=1.0))
    found = [trial.config for trial in trials]
    assert len(starts) == 3 and sorted(map(repr, found[:3])) == sorted(map(repr, starts))
    assert found[3] not in starts and sampler.propose(Space(space), trials[1:], rng) == found[0]


# -- schedules -------------------------------------------------------------------------------------------------


def learning(run):
    """A loss that falls with epochs to what its configuration allows; it goes on where it was."""
    kept = run.before / "epochs" if run.before else None
    learned = int(kept.read_text()) if kept else 0
    assert learned == int(run.learned) < run.budget
    (run.folder / "epochs").write_text(str(int(run.budget)))
    spent.append(run.budget - learned)
    return (run["x"] - 0.3) ** 2 + math.exp(-run.budget / 5)


spent: list[float] = []
LINE = {"x": Float(0.0, 1.0)}


@pytest.mark.parametrize(
    "schedule",
    [ASHA(1, 27), Halving(27, 1, 27), Hyperband(1, 27), Population(6, 3, 27)],
    ids=lambda s: type(s).__name__,
)
def test_schedules_find_the_best_in_fewer_epochs(schedule):
    spent.clear()
    found = search(learning, LINE, trials=100, sampler=RandomSampler(), schedule=schedule)
    assert found.best.budget == 27 and abs(found.best.config["x"] - 0.3) < 0.1
    begun = sum(trial.parent is None for trial in found.trials)
    assert sum(spent) <= (0.4 if begun > 6 else 1) * 27 * begun


def test_halving_keeps_the_best_of_each_rung():
    found = search(learning, LINE, trials=100, sampler=RandomSampler(), schedule=Halving(9, 1, 9))
    sizes = [sum(trial.budget == budget for trial in found.trials) for budget in rungs(1, 9, 3)]
    assert sizes == [9, 3, 1] and len(found.trials) == 13
    first = sorted((trial for trial in found.trials if trial.budget == 1), key=lambda trial: trial.loss)
    assert {t.parent for t in found.trials if t.budget == 3} == {t.number for t in first[:3]}


def test_hyperbands_brackets_are_the_papers():
    """Table 1 of the paper, R = 81, eta = 3."""
    brackets = [Hyperband(1, 81).bracket(k) for k in range(5)]
    assert [(each.count, round(each.least)) for each in brackets] == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    assert brackets[0].sizes() == [81, 27, 9, 3, 1]


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: ASHA(factor=1.0), "factor as a number above 1"),
        (lambda: Halving(factor=0.5), "factor as a number above 1"),
        (lambda: Hyperband(9.0, 3.0), r"Hyperband from 9.0 to 3.0(.|\n)*pass least up to most"),
    ],
)
def test_schedules_without_an_end_are_told(make, told):
    with pytest.raises(ht.errors.ArgumentError, match=told):
        make()


def test_members_of_a_population_take_over_what_the_best_has_learned():
    found = search(learning, LINE, trials=200, sampler=RandomSampler(), schedule=Population(6, 3, 27))
    lines = [trial for trial in found.trials if trial.parent is not None]
    copies = [t for t in lines if t.notes["member"] != found.trials[t.parent].notes["member"]]
    assert copies and all(t.config != found.trials[t.parent].config for t in copies)
    assert all(t.budget == found.trials[t.parent].budget + 3 for t in lines)


def test_what_fails_is_written_down_and_avoided():
    def fails(run):
        if run["x"] > 0.5:
            raise ValueError("too large")
        return (run["x"] - 0.4) ** 2

    found = search(fails, LINE, trials=30)
    failed = [trial for trial in found.trials if not trial.ok]
    assert failed and all("ValueError: too large\n  at test_samplers.py:" in trial.error for trial in failed)
    assert len(failed) < 12 and abs(found.best.config["x"] - 0.4) < 0.05
    assert f"{len(failed)} failed" in str(found)
    with pytest.raises(ht.errors.DataError, match="all of the first 5 trials failed"):
        search(lambda run: run["y"], LINE)


def test_a_search_can_tell_what_mattered():
    space = {"much": Float(0.0, 1.0), "little": Float(0.0, 1.0), "none": Categorical("a", "b")}
    space["only"] = Categorical("one")
    found = search(lambda run: 10 * run["much"] ** 2 + run["little"], space, trials=30, sampler=RandomSampler())
    why = found.why()
    assert (
        next(iter(why)) == "much"
        and why["much"] > 0.8
        and why["only"] == 0
        and why["none"] < 0.02 < 0.001 + why["little"] + 0.02
    )
    with pytest.raises(ht.errors.DataError, match="3 trials"):
        search(branin, PLANE, trials=3).why()


@pytest.mark.parametrize("seed", range(6))
def test_shares_of_names_are_shares(seed):
    """Also of names that matter together alone, that seldom matter, and of noise."""
    rng = np.random.default_rng(seed)
    space = {"a": Float(0.0, 1.0), "b": Float(0.0, 1.0), "c": Categorical(x={"d": Float(0.0, 1.0)}, y={})}
    turn = rng.normal(size=4)

    def objective(run):
        parts = run["a"], run["b"], (run["a"] > 0.5) == (run["b"] > 0.5), 9 * run.get("d", 0.0) ** 8
        return float(turn @ parts) + 0.01 * rng.normal()

    why = search(objective, space, trials=25, sampler=RandomSampler(), seed=seed).why()
    shares = [*why.values()]
    assert shares == sorted(shares, reverse=True) and min(shares) >= 0 and 0 < sum(shares) <= 1 + 1e-9


def test_a_search_is_seen():
    found = search(lambda run: -branin(run), PLANE, trials=12, maximize=True)
    assert found.so_far() == sorted(found.so_far()) and found.value(found.best) == max(map(found.value, found.trials))
    assert repr(found) == f"<Search: 12 trials, best {found.value(found.best):.5g}>"
    assert "best so far" in found.svg()
    assert str(found).splitlines()[0].split() == ["trial", "value", "seconds", "configuration"]
    assert str(found).splitlines()[1].split()[0] == str(found.best.number)
