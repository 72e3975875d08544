"""Samplers made of samplers: a large space is searched by parts, and those who gain most have the next turn.

Y. Li et al., "VolcanoML: Speeding up End-to-End AutoML via Scalable Search Space Decomposition", VLDB 2021: a joint
block searches a part by a sampler, a conditioning one has a child for each value of one choice, an alternating one
divides the names into two parts. Here a block is a sampler as any other, and looks at the trials alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.errors import ArgumentError, UnknownNameError, did_you_mean
from ..ranges import AtLeast1
from .samplers import Bayesian, Sampler
from .space import Categorical, Config, Space
from .trials import Trial


@dataclass(frozen=True)
class Conditioning(Sampler):
    """One child for each option of the choice `name`; options are played in turn, and leave when they cannot win.

    An option can reach, in `ahead` more trials, its best loss less what its last `window` trials gained each: if that
    is above the best of another option, it leaves (rising bandits: Y. Li et al., AAAI 2020). Section 3.2.

    >>> from hetu.automl import Categorical, Int, RandomSampler, search
    >>> space = {"model": Categorical(bad={}, good={"x": Int(0, 3)})}
    >>> blocks = Conditioning("model", RandomSampler(), ahead=1, window=2)
    >>> found = search(lambda run: run.get("model.good.x", 9), space, trials=12, sampler=blocks)
    >>> [trial.config["model"] for trial in found.trials[-3:]]
    ['good', 'good', 'good']
    """

    name: str
    inside: Sampler = field(default_factory=lambda: Bayesian(first=5))
    ahead: AtLeast1 = 20
    window: AtLeast1 = 6

    def playing(self, space: Space, trials: Sequence[Trial]) -> list[object]:
        """The options that have not left."""
        domain = space.domains.get(self.name)
        if not isinstance(domain, Categorical):
            raise UnknownNameError(f"{self.name!r} is no choice of the space", fix=did_you_mean(self.name, space.names))
        curves = {each: self._curve(each, trials) for each in domain.options}
        if any(len(curve) < self.window for curve in curves.values()):
            return [each for each, curve in curves.items() if len(curve) == min(map(len, curves.values()))]
        best = min(curve[-1] for curve in curves.values())
        reach = {each: curve[-1] - self.ahead * self._gain(curve) for each, curve in curves.items()}
        playing = [each for each in curves if reach[each] <= best]
        fewest = min(len(curves[each]) for each in playing)
        return [each for each in playing if len(curves[each]) == fewest]

    def _curve(self, option: object, trials: Sequence[Trial]) -> np.ndarray:
        """The best loss after each trial of an option."""
        own = [trial for trial in trials if trial.config.get(self.name) == option]
        return np.minimum.accumulate([trial.cost for trial in own])

    def _gain(self, curve: np.ndarray) -> float:
        """What each of the last trials gained."""
        last = curve[-self.window :]
        gain = float(last[0] - last[-1]) / max(len(last) - 1, 1) if np.isfinite(last[0]) else np.inf
        return gain if np.isfinite(last[-1]) else -np.inf  # it has never ended well

    def propose(self, space: Space, trials: Sequence[Trial], rng: np.random.Generator) -> Config:
        playing = self.playing(space, trials) or [space.domains[self.name].options[0]]
        option = playing[rng.integers(len(playing))]
        own = [trial for trial in trials if trial.config.get(self.name) == option]
        return self.inside.propose(space.with_fixed({self.name: option}), own, rng)


@dataclass(frozen=True)
class Alternating(Sampler):
    """The names `first` and all others in turn, each with the best values of the other part; who gains more goes on.

    Section 3.3: the turn is that of the part whose last `window` trials have improved the best loss by more. `first`
    also means what lies inside of its options.

    >>> from hetu.automl import Float, RandomSampler, search
    >>> space = {"x": Float(0.0, 1.0), "y": Float(0.0, 1.0)}
    >>> parts = Alternating(["x"], RandomSampler(), window=2)
    >>> found = search(lambda run: run["x"] + run["y"], space, trials=6, sampler=parts)
    >>> best = min(found.trials[:5], key=lambda trial: trial.loss).config
    >>> (found.trials[5].config["x"] == best["x"]) != (found.trials[5].config["y"] == best["y"])  # one part moved
    True
    """

    first: Sequence[str]
    inside: Sampler = field(default_factory=Bayesian)
    window: AtLeast1 = 5

    def propose(self, space: Space, trials: Sequence[Trial], rng: np.random.Generator) -> Config:
        for name in self.first:
            if name not in space.names:
                raise UnknownNameError(f"no {name!r} in the space", fix=did_you_mean(name, space.names))
        parts = [], []  # type: tuple[list[str], list[str]]
        for each in space.open:
            parts[not any(f"{each.name}.".startswith(f"{name}.") for name in self.first)].append(each.name)
        if not all(parts):
            raise ArgumentError(f"first={self.first!r} leaves one part empty", fix="name some of the names, not all")
        ok = [trial for trial in trials if trial.ok]
        if len(ok) < 2 * self.window:
            return self.inside.propose(space, trials, rng)
        best = min(ok, key=lambda trial: trial.cost)
        turn = self._turn(space, trials, parts)
        kept = {name: best.config[name] for name in parts[1 - turn] if name in best.config}
        own = [trial for trial in trials if all(trial.config.get(name) == value for name, value in kept.items())]
        return self.inside.propose(space.with_fixed(kept), own, rng)

    def _turn(self, space: Space, trials: Sequence[Trial], parts: tuple[list[str], list[str]]) -> int:
        """The part that gained more when it was moved last; in turn where nobody knows."""
        gains: tuple[list[float], list[float]] = ([], [])
        best: Trial | None = None
        for trial in trials:
            if not trial.ok:
                continue
            if best is not None:
                moved = [any(trial.config.get(n) != best.config.get(n) for n in part) for part in parts]
                if moved[0] != moved[1]:
                    gains[moved[1]].append(max(0.0, best.cost - trial.cost))
            best = trial if best is None or trial.cost < best.cost else best
        recent = [sum(each[-self.window :]) if len(each) >= self.window else np.inf for each in gains]
        return int(recent[1] > recent[0]) if recent[0] != recent[1] else len(gains[0]) > len(gains[1])
