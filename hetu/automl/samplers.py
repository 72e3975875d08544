"""What to try next: a sampler proposes a configuration, from the trials so far and from a random generator alone.

As it keeps nothing, a search goes on from its log, and any number of processes ask. Trials that have not ended stand
with the mean loss, so that nobody tries what is being tried ("constant mean": D. Ginsbourger et al., 2010).
Samplers of parts, which build upon these, are in `blocks.py`. Left out: several objectives.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..ml import RandomForestRegressor
from ..ranges import AtLeast1, Share
from .gaussian import GaussianProcess
from .space import Active, Categorical, Config, Space, drawn_from
from .trials import Trial

CANDIDATES = 256  # at which a surrogate looks
LEAST = 0.01  # standard deviations, an improvement that is worth a trial (D. Lizotte, 2008)


class Sampler(ABC):
    """Base class; one of your own is a subclass with `propose`.

    >>> from hetu.automl import Float, search
    >>> class Same(Sampler):
    ...     def propose(self, space, trials, rng):
    ...         return {"x": 0.5}
    >>> search(lambda run: run["x"], {"x": Float(0.0, 1.0)}, trials=2, sampler=Same()).best.loss
    0.5
    """

    @abstractmethod
    def propose(self, space: Space, trials: Sequence[Trial], rng: np.random.Generator) -> Config:
        """The configuration to try next."""


@dataclass(frozen=True)
class RandomSampler(Sampler):
    """Each configuration is as likely as any other: J. Bergstra, Y. Bengio, JMLR 2012. What others must beat.

    >>> from hetu.automl import Float
    >>> RandomSampler().propose(Space({"x": Float(0.0, 1.0)}), [], np.random.default_rng(0))
    {'x': 0.6369616873214543}
    """

    def propose(self, space: Space, trials: Sequence[Trial], rng: np.random.Generator) -> Config:
        return space.drawn(rng)


def losses(trials: Sequence[Trial]) -> np.ndarray:
    """The loss of each trial: of one that failed as large as the largest, of one that has not ended the mean."""
    known = [trial.cost for trial in trials if trial.ok]
    most, mean = (max(known), float(np.mean(known))) if known else (0.0, 0.0)
    return np.array([trial.cost if trial.ok else most if trial.ended else mean for trial in trials])


def opening(space: Space, trials: Sequence[Trial], first: int, rng: np.random.Generator) -> Config | None:
    """A start of the space that was not tried, then a random configuration up to `first` trials, then None."""
    tried = [trial.config for trial in trials]
    start = next((config for config in space.starts() if config not in tried), None)
    return start or (space.drawn(rng) if len(trials) < first else None)


@dataclass(frozen=True)
class TPE(Sampler):
    """Draws what is likely among the best trials and unlikely among the others.

    J. Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NIPS 2011, section 4: the best of `candidates`
    by l(x) / g(x), which are Parzen windows of the better `share` of the trials and of the rest; of all names at once
    as in S. Falkner et al., "BOHB", ICML 2018. The first are the space's starts, and random up to `first`.

    >>> from hetu.automl import Int, search
    >>> found = search(lambda run: run["x"] ** 2, {"x": Int(-5, 5)}, trials=20, sampler=TPE(first=5))
    >>> abs(found.best.config["x"]) <= 1
    True
    """

    first: AtLeast1 = 10
    share: Share = 0.15
    candidates: AtLeast1 = 24

    def propose(self, space: Space, trials: Sequence[Trial], rng: np.random.Generator) -> Config:
        trials = [*{repr(trial.config): trial for trial in trials}.values()]  # or the best would be one, many times
        if (config := opening(space, trials, self.first, rng)) is not None:
            return config
        order = np.argsort(losses(trials), kind="stable")
        count = max(2, math.ceil(self.share * len(trials)))
        good, bad = (Windows(space, [trials[i].config for i in part]) for part in (order[:count], order[count:]))
        drawn = [good.drawn(rng) for _ in range(self.candidates)]
        return max(drawn, key=lambda config: good.density(config) - bad.density(config))


class Windows:
    """A density over a space: a window around each configuration, and one over everything."""

    SPREAD = 0.2  # of a choice, the chance that a window gives to other options
    ANYWHERE = 0.1  # the weight of the window over everything; the same for few and many, or emptiness looks good

    def __init__(self, space: Space, configs: Sequence[Config]) -> None:
        self.space, self.configs = space, configs
        numbers = {each.name: each.domain for each in space.open if not isinstance(each.domain, Categorical)}
        shrinks = max(len(configs), 1) ** (-1 / (len(numbers) + 4))  # D. Scott, 1992, eq. 6.42
        self.places = {
            name: np.array([domain.place(c[name]) if name in c else np.nan for c in configs])
            for name, domain in numbers.items()
        }
        self.widths = {name: self._width(at[~np.isnan(at)]) * shrinks for name, at in self.places.items()}
        self.masses = {  # logarithms of the part of a window that lies between 0 and 1
            name: np.log(below((1 - at) / w) - below(-at / w)) + math.log(w * math.sqrt(2 * math.pi))
            for (name, at), w in zip(self.places.items(), self.widths.values())
        }

    def _width(self, at: np.ndarray) -> float:
        return float(np.clip(at.std() if len(at) > 1 else 0.3, 0.1, 0.5))

    def drawn(self, rng: np.random.Generator) -> Config:
        """A configuration near one of those that have windows, or anywhere."""
        which = int(rng.integers(0, len(self.configs)))
        center = {} if rng.random() < self.ANYWHERE else self.configs[which]

        def value_of(each: Active) -> object:
            if each.name not in center:
                return drawn_from(each.domain, rng)
            if isinstance(each.domain, Categorical):
                return drawn_from(each.domain, rng) if rng.random() < self.SPREAD else center[each.name]
            place = abs(self.places[each.name][which] + self.widths[each.name] * rng.normal())
            return each.domain.at(place if place <= 1 else 2 - place)  # thrown back at the ends, which attract nothing

        return self.space.made(value_of)

    def density(self, config: Config) -> float:
        """The logarithm of the density of a configuration."""
        found = np.zeros(len(self.configs) + 1)
        for each in self.space.open:
            if each.name not in config:
                continue
            if isinstance(each.domain, Categorical):
                chance = self.SPREAD / len(each.domain.options)
                same = np.array([c.get(each.name, self) == config[each.name] for c in self.configs], bool)
                found[:-1] += np.log(np.where(same, 1 - self.SPREAD + chance, chance))
                found[-1] -= math.log(len(each.domain.options))
            else:
                width = self.widths[each.name]
                away = (each.domain.place(config[each.name]) - self.places[each.name]) / width
                window = -0.5 * away * away - self.masses[each.name]
                found[:-1] += np.where(np.isnan(window), 0.0, window)
        weights = np.append(np.full(len(self.configs), (1 - self.ANYWHERE) / max(len(self.configs), 1)), self.ANYWHERE)
        most = found.max()
        return float(most + np.log(weights @ np.exp(found - most)))


def below(z: np.ndarray) -> np.ndarray:
    """The chance that a standard normal number is below."""
    half: np.ndarray = 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(z / math.sqrt(2)))
    return half


class Surrogate(Protocol):
    """A model of the loss that is quick to ask: mean and standard deviation at vectors of a space."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> object: ...

    def foretell(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


def expected_improvement(mean: np.ndarray, std: np.ndarray, best: float) -> np.ndarray:
    """By how much less than `best` a normal number is on average, if it is less.

    J. Močkus, 1975; D. Jones et al., "Efficient Global Optimization of Expensive Black-Box Functions", 1998, eq. 15.

    >>> expected_improvement(np.array([0.0]), np.array([1.0]), 0.0).round(4).tolist()
    [0.3989]
    """
    std = np.maximum(std, 1e-12)
    z = (best - mean) / std
    gain: np.ndarray = (best - mean) * below(z) + std * np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return gain


class Forest:
    """A surrogate of trees, which takes options and many names lightly: F. Hutter et al., "SMAC", LION 2011, section 4.

    >>> x = np.linspace(0, 1, 30)[:, None]
    >>> model = Forest()
    >>> model.fit(x, x[:, 0] ** 2)
    >>> mean, std = model.foretell(np.array([[0.5]]))
    >>> bool(abs(mean[0] - 0.25) < 0.1 and std[0] < 0.1)
    True
    """

    def __init__(self) -> None:
        self.model = RandomForestRegressor(n_estimators=30, max_features=0.8, min_samples_leaf=2)

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """To the values y (points,) at x (points, columns)."""
        self.model.fit(x, y)

    def foretell(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of what the trees say at (points, columns)."""
        said, trees = self.model.predict(x), self.model.trees_
        return said, trees.values[trees.leaves(x)][..., 0].std(axis=1)


@dataclass(frozen=True)
class Bayesian(Sampler):
    """The configuration of which a surrogate expects most improvement: a Gaussian process, or any of `Surrogate`.

    J. Snoek et al., "Practical Bayesian Optimization of Machine Learning Algorithms", NIPS 2012. The first are the
    space's starts, and random up to `first`; afterwards one looks at random configurations, and from the best of them
    at ever nearer ones. `surrogate` may be `ht.automl.Forest`.

    >>> from hetu.automl import Int, search
    >>> search(lambda run: run["x"] ** 2, {"x": Int(-5, 5)}, trials=10, sampler=Bayesian(first=4)).best.config
    {'x': 0}
    """

    surrogate: Callable[[], Surrogate] = GaussianProcess
    first: AtLeast1 = 5

    def propose(self, space: Space, trials: Sequence[Trial], rng: np.random.Generator) -> Config:
        if (config := opening(space, trials, self.first, rng)) is not None:
            return config
        x = np.array([space.vector(trial.config) for trial in trials])
        y = losses(trials)
        middle = np.median(y)
        y = np.clip(y, None, middle + 2 * (middle - y.min()) + 1e-9)  # how bad the worst are tells little
        y = (y - y.mean()) / (y.std() or 1.0)
        model = self.surrogate()
        model.fit(x, y)
        said = model.foretell(x)[0]  # free of the noise, by which the best that was seen looks better than it is
        best = [trials[i].config for i in np.argsort(said, kind="stable")[:5]]
        looked = [space.drawn(rng) for _ in range(CANDIDATES)] + [space.near(c, rng) for c in best for _ in range(20)]
        for step in (0.1, 0.03, 0.01):
            foretold = model.foretell(np.array([space.vector(config) for config in looked]))
            gain = expected_improvement(*foretold, said.min() - LEAST)
            top = [looked[i] for i in np.argsort(-gain, kind="stable")[:8]]
            looked = top + [space.near(config, rng, step) for config in top for _ in range(16)]
        tried = {*map(repr, (trial.config for trial in trials))}
        return next((config for config in top if repr(config) not in tried), None) or space.drawn(rng)
