"""How long a trial may learn, and which go on: most configurations are seen to be bad before they have learned all.

A schedule proposes what is to run next: a new configuration with a small budget, or one that did well with a larger
one, which goes on from the trial before. Budgets are epochs, rows, trees: what the objective takes them for. As
samplers do, schedules keep nothing: they look at the trials. Left out: stopping within a trial.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from ..core.errors import ArgumentError
from ..ranges import AtLeast1, Count, Positive, Range, Share
from .space import Config, Space
from .trials import Trial

Factor = Annotated[float, Range(1, open="low")]


@dataclass(frozen=True)
class Proposal:
    """What is to run: a configuration, until a budget, from where trial `parent` ended or from nothing.

    >>> Proposal({"x": 0.5}, budget=9.0, parent=3).budget
    9.0
    """

    config: Config
    budget: Positive = 1.0
    parent: Count | None = None
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Standing:
    """What a schedule is asked with: the trials, the space, a random generator, and `new`, a sampler's proposal."""

    trials: Sequence[Trial]
    space: Space
    rng: np.random.Generator
    new: Callable[[], Config]


class BudgetSchedule(ABC):
    """Base class; one of your own is a subclass with `propose`."""

    most: float = 1.0  # the largest budget

    def __post_init__(self) -> None:
        if (least := getattr(self, "least", 0.0)) > self.most:
            raise ArgumentError(f"{type(self).__name__} from {least} to {self.most}", fix="pass least up to most")

    @abstractmethod
    def propose(self, asked: Standing) -> Proposal | None:
        """What is to run next; None while that depends on trials that run, or where all is done."""

    def left(self, trials: Sequence[Trial]) -> bool:
        """Whether there is more to come."""
        return True


@dataclass(frozen=True)
class WholeBudget(BudgetSchedule):
    """Each trial has the whole budget: no schedule at all.

    >>> from hetu.automl import Float, search
    >>> found = search(lambda run: run.budget, {"x": Float(0.0, 1.0)}, trials=2, schedule=WholeBudget(5.0))
    >>> [trial.budget for trial in found.trials]
    [5.0, 5.0]
    """

    most: Positive = 1.0

    def propose(self, asked: Standing) -> Proposal | None:
        return Proposal(asked.new(), self.most)


def rungs(least: float, most: float, factor: float) -> list[float]:
    """Budgets from `least` to `most`, each `factor` times the one before, the last one cut.

    >>> rungs(1, 20, 3)
    [1, 3, 9, 20]
    """
    found = [least]
    while found[-1] * factor < most * (1 - 1e-9):
        found.append(found[-1] * factor)
    return found + [most] * (most > least)


def _first(trials: Sequence[Trial], rung: int) -> list[Trial]:
    """The trials of a rung that ended, the best first."""
    ended = [trial for trial in trials if trial.notes.get("rung") == rung and trial.ended]
    return sorted(ended, key=lambda trial: (trial.cost, trial.number))


def _promoted(trials: Sequence[Trial]) -> set[int | None]:
    return {trial.parent for trial in trials}


@dataclass(frozen=True)
class ASHA(BudgetSchedule):
    """Whenever somebody asks, the best of a rung goes on if it is among a `factor`-th of it; else one begins anew.

    L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, algorithm 2. Nobody waits.

    >>> from hetu.automl import Float, search
    >>> found = search(lambda run: run["x"], {"x": Float(0.0, 1.0)}, trials=6, schedule=ASHA(1.0, 4.0, factor=2.0))
    >>> [trial.budget for trial in found.trials]
    [1.0, 1.0, 2.0, 1.0, 1.0, 2.0]
    """

    least: Positive = 1.0
    most: Positive = 27.0
    factor: Factor = 3.0

    def propose(self, asked: Standing) -> Proposal | None:
        budgets, promoted = rungs(self.least, self.most, self.factor), _promoted(asked.trials)
        for rung in range(len(budgets) - 2, -1, -1):
            best = _first(asked.trials, rung)
            for trial in best[: int(len(best) / self.factor)]:
                if trial.number not in promoted and trial.ok:
                    return Proposal(trial.config, budgets[rung + 1], trial.number, {"rung": rung + 1})
        return Proposal(asked.new(), budgets[0], None, {"rung": 0})


@dataclass(frozen=True)
class Halving(BudgetSchedule):
    """`count` configurations begin; when all of a rung have ended, a `factor`-th of them goes on, until one is left.

    K. Jamieson, A. Talwalkar, "Non-stochastic Best Arm Identification", AISTATS 2016.

    >>> from hetu.automl import Float, search
    >>> found = search(lambda run: run["x"], {"x": Float(0.0, 1.0)}, schedule=Halving(4, 1.0, 4.0, factor=2.0))
    >>> [trial.budget for trial in found.trials]
    [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0]
    """

    count: AtLeast1 = 27
    least: Positive = 1.0
    most: Positive = 27.0
    factor: Factor = 3.0

    def sizes(self) -> list[int]:
        """How many run in each rung."""
        steps = len(rungs(self.least, self.most, self.factor))
        return [max(1, int(self.count / self.factor**rung)) for rung in range(steps)]

    def _open(self, trials: Sequence[Trial]) -> tuple[int, bool] | None:
        """The first rung that is not done, and whether one more is to begin there; None when all are."""
        before: list[Trial] = []
        for rung, size in enumerate(self.sizes()):
            begun = [trial for trial in trials if trial.notes.get("rung") == rung]
            can = size if rung == 0 else min(size, sum(trial.ok for trial in before))
            if len(begun) < can or not all(trial.ended for trial in begun):
                return rung, len(begun) < can
            before = begun
        return None

    def propose(self, asked: Standing) -> Proposal | None:
        rung, more = self._open(asked.trials) or (0, False)
        if not more:
            return None
        budget = rungs(self.least, self.most, self.factor)[rung]
        if rung == 0:
            return Proposal(asked.new(), budget, None, {"rung": 0})
        promoted = _promoted(asked.trials)
        best = next(trial for trial in _first(asked.trials, rung - 1) if trial.number not in promoted)
        return Proposal(best.config, budget, best.number, {"rung": rung})

    def left(self, trials: Sequence[Trial]) -> bool:
        return self._open(trials) is not None


@dataclass(frozen=True)
class Hyperband(BudgetSchedule):
    """`Halving` again and again: from many configurations with small budgets to few with the whole one.

    L. Li et al., "Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization", JMLR 2018, algorithm 1.

    >>> [Hyperband(1.0, 9.0, factor=3.0).bracket(number).sizes() for number in range(3)]
    [[9, 3, 1], [5, 1], [3]]
    """

    least: Positive = 1.0
    most: Positive = 27.0
    factor: Factor = 3.0

    def bracket(self, number: Count) -> Halving:
        """The rungs of a bracket; they come again after all have been."""
        deepest = int(math.log(self.most / self.least) / math.log(self.factor) + 1e-9)
        depth = deepest - number % (deepest + 1)
        count = math.ceil((deepest + 1) / (depth + 1) * self.factor**depth)
        return Halving(count, self.most / self.factor**depth, self.most, self.factor)

    def propose(self, asked: Standing) -> Proposal | None:
        number = 0
        while True:
            own = [trial for trial in asked.trials if trial.notes.get("bracket") == number]
            if self.bracket(number).left(own):
                found = self.bracket(number).propose(Standing(own, asked.space, asked.rng, asked.new))
                return found and replace(found, notes=found.notes | {"bracket": number})
            number += 1


@dataclass(frozen=True)
class Population(BudgetSchedule):
    """`size` members learn `step` at a time; one of the worst `share` goes on as a copy of one of the best, changed.

    M. Jaderberg et al., "Population Based Training of Neural Networks", 2017, section 3. Numbers of the copy move by
    about a fifth of their range. The trial that goes on finds in `run.before` what its parent has kept.

    >>> from hetu.automl import Float, search
    >>> found = search(lambda run: run["x"], {"x": Float(0.0, 1.0)}, schedule=Population(2, step=1.0, most=2.0))
    >>> [(trial.notes["member"], trial.budget) for trial in found.trials]
    [(0, 1.0), (1, 1.0), (0, 2.0), (1, 2.0)]
    """

    size: AtLeast1 = 8
    step: Positive = 1.0
    most: Positive = 10.0
    share: Share = 0.25

    def _members(self, trials: Sequence[Trial]) -> list[Trial | None]:
        """The last trial of each member."""
        last: dict[int, Trial] = {trial.notes["member"]: trial for trial in trials if "member" in trial.notes}
        return [last.get(member) for member in range(self.size)]

    def propose(self, asked: Standing) -> Proposal | None:
        last = self._members(asked.trials)
        ranked = sorted((t for t in last if t is not None and t.ended), key=lambda t: t.cost)
        some = math.ceil(self.share * self.size)
        for member in sorted(range(self.size), key=lambda m: own.budget if (own := last[m]) else 0.0):
            trial, notes = last[member], {"member": member}
            if trial is None:
                return Proposal(asked.new(), self.step, None, notes)
            if not trial.ended or trial.budget >= self.most:
                continue
            config, on = trial.config, trial
            if not trial.ok or (len(ranked) == self.size and trial in ranked[-some:]):
                good = [each for each in ranked[:some] if each.ok and each.budget < self.most]
                if good:
                    on = good[asked.rng.integers(len(good))]
                    config = asked.space.near(on.config, asked.rng)
                elif not trial.ok:
                    return Proposal(asked.new(), self.step, None, notes)
            return Proposal(config, min(on.budget + self.step, self.most), on.number, notes)
        return None

    def left(self, trials: Sequence[Trial]) -> bool:
        return any(t is None or not t.ended or t.budget < self.most for t in self._members(trials))
