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
from .space import Categorical, Config, Space
from .trials import Trial

CANDIDATES = 256  # at which a surrogate looks
CHANCE = 0.15  # of proposals, the share that asks no model, or what it takes for bad by mistake is never seen again
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
    """A start of the space that was not tried, then a random configuration up to `first` trials, then mostly None.

    One in seven stays random, as in S. Falkner et al., "BOHB", ICML 2018, section 3: those that trust their model alone
    settle on one algorithm of several too early.
    """
    tried = [trial.config for trial in trials]
    start = next((config for config in space.starts() if config not in tried), None)
    return start or (space.drawn(rng) if len(trials) < first or rng.random() < CHANCE else None)


@dataclass(frozen=True)
class TPE(Sampler):
    """Draws what is likely among the best trials and unlikely among the others.

    J. Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NIPS 2011, section 4: the best of `candidates`
    by l(x) / g(x), which are Parzen windows of the better `share` of the trials and of the rest, of all names at once.
    The first are the space's starts, and random up to `first`, as one in seven is later.

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
        places = space.places([trial.config for trial in trials])
        good, bad = (Windows(space, places[part]) for part in (order[:count], order[count:]))
        drawn = good.drawn(self.candidates, rng)
        return space.config(drawn[np.argmax(good.density(drawn) - bad.density(drawn))])


class Windows:
    """A density over a space: a window around each of some places (windows, names), and one over everything.

    The one over everything weighs as much as any other, and so does one trial of each option beside those of a choice:
    of few trials, which tell little, the windows are wide.
    """

    def __init__(self, space: Space, places: np.ndarray) -> None:
        self.space, self.places = space, places
        sizes = np.array([len(d.options) if isinstance(d, Categorical) else 0 for d in space.domains.values()])
        self.choice, self.spread = sizes > 0, sizes / (sizes + max(len(places), 1))
        self.anywhere = 1 / (len(places) + 1)
        shrinks = max(len(places), 1) ** (-1 / ((~self.choice).sum() + 4))  # D. Scott, 1992, eq. 6.42
        self.widths = np.array([self._width(at[~np.isnan(at)]) for at in places.T]) * shrinks

    def _width(self, at: np.ndarray) -> float:
        return float(np.clip(at.std() if len(at) > 1 else 0.3, 0.1, 0.5))

    def drawn(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """(count, names): places near one of those that have windows, or anywhere."""
        near = self.places[rng.integers(0, len(self.places), count)]
        near[rng.random(count) < self.anywhere] = np.nan
        moved = np.abs(near + self.widths * rng.normal(size=near.shape))
        moved = np.where(moved <= 1, moved, 2 - moved)  # thrown back at the ends, which attract nothing
        kept = np.where(rng.random(near.shape) < self.spread, np.nan, near)
        found = np.where(self.choice, kept, moved)
        return self.space.settled(np.where(np.isnan(found), rng.random(found.shape), found))

    def density(self, places: np.ndarray) -> np.ndarray:
        """The logarithm of the density at places (many, names)."""
        found = np.zeros((len(places), len(self.places) + 1))
        each_of = zip(self.space.all, places.T[:, :, None], self.places.T, self.widths, self.spread)
        for each, asked, at, width, spread in each_of:
            if isinstance(each.domain, Categorical):
                size, active = len(each.domain.options), ~np.isnan(asked)
                same = each.domain.numbers(asked) == each.domain.numbers(at)
                window = np.log(np.where(same, 1 - spread, 0) + spread / size)
                found += np.where(active, np.append(window, np.full_like(asked, -math.log(size)), axis=1), 0)
            else:
                mass = np.log(width * math.sqrt(2 * math.pi) * (below((1 - at) / width) - below(-at / width)))
                found[:, :-1] += np.nan_to_num(-0.5 * ((asked - at) / width) ** 2 - mass)
        most = found.max(axis=1)  # all windows weigh alike
        return most + np.log(np.exp(found - most[:, None]).mean(axis=1))


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
        self.model = RandomForestRegressor(n_estimators=30, max_features=0.8)

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
    space's starts, and random up to `first`, as one in seven is later; one looks at random configurations, and from the
    best of them at ever nearer ones. `surrogate` may be `ht.automl.Forest`.

    >>> from hetu.automl import Int, search
    >>> search(lambda run: run["x"] ** 2, {"x": Int(-5, 5)}, trials=10, sampler=Bayesian(first=4)).best.config
    {'x': 0}
    """

    surrogate: Callable[[], Surrogate] = GaussianProcess
    first: AtLeast1 = 10

    def propose(self, space: Space, trials: Sequence[Trial], rng: np.random.Generator) -> Config:
        if (config := opening(space, trials, self.first, rng)) is not None:
            return config
        places = space.places([trial.config for trial in trials])
        y = losses(trials)
        middle = np.median(y)
        y = np.clip(y, None, middle + 2 * (middle - y.min()) + 1e-9)  # how bad the worst are tells little
        y = (y - y.mean()) / (y.std() or 1.0)
        model, x = self.surrogate(), space.vectors(places)
        model.fit(x, y)
        said = model.foretell(x)[0]  # free of the noise, by which the best that was seen looks better than it is
        top, looked = places[np.argsort(said, kind="stable")[:5]], space.scattered(CANDIDATES, rng)
        for step in (0.2, 0.1, 0.03, 0.01):
            looked = np.concatenate([looked, space.moved(np.repeat(top, 20, axis=0), rng, step)])
            gain = expected_improvement(*model.foretell(space.vectors(looked)), said.min() - LEAST)
            looked = top = looked[np.argsort(-gain, kind="stable")[:8]]
        tried = {*map(repr, (trial.config for trial in trials))}
        new = (config for config in map(space.config, top) if repr(config) not in tried)
        return next(new, None) or space.drawn(rng)
