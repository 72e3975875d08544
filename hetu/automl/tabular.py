"""An estimator that chooses itself: features, algorithm and their numbers, searched on rows that were held back.

What a search has tried is not lost: models whose predictions are best together answer together (R. Caruana et al.,
"Ensemble Selection from Libraries of Models", ICML 2004). Left out: cross-validation; the rows held back are the same
for all trials.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np

from .. import metrics
from ..core.errors import ArgumentError, DataError
from ..core.state import FilePath
from ..ml import (
    BernoulliNB,
    Estimator,
    GaussianNB,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    KNeighborsClassifier,
    KNeighborsRegressor,
    LogisticRegression,
    NotFittedError,
    RandomForestClassifier,
    RandomForestRegressor,
    Ridge,
)
from ..ml.estimator import shown
from ..ml.inputs import as_labels, as_numbers, vector
from ..ranges import AtLeast1, Endless, OneOf, Seed, Share
from .features import FEATURES, Columns, Features, TableReader
from .samplers import Sampler
from .schedules import BudgetSchedule
from .search import Attempt, search
from .space import Categorical, Float, Int

RowsScore = Callable[[np.ndarray, np.ndarray], float]
LIBRARY = 30  # of the best trials, of which an ensemble is made


class Algorithm(NamedTuple):
    """What makes an estimator, `make(**numbers)`, and the space of the numbers."""

    make: Callable[..., Any]
    space: Mapping[str, Any]


_TREES = {
    "learning_rate": Float(0.01, 1.0, log=True, default=0.1), "max_iter": Int(10, 300, log=True, default=100),
    "max_leaf_nodes": Int(2, 127, log=True, default=31), "min_samples_leaf": Int(1, 200, log=True, default=20),
    "l2_regularization": Float(1e-6, 100.0, log=True, default=1e-3), "max_features": Float(0.1, 1.0, default=1.0),
}  # fmt: skip
_FOREST = {
    "n_estimators": Int(10, 100, log=True, default=100), "min_samples_leaf": Int(1, 100, log=True, default=5),
    "max_features": Float(0.02, 1.0, log=True, default=0.3),
}  # fmt: skip
_NEAR = {"n_neighbors": Int(1, 200, log=True, default=20), "weights": Categorical("uniform", "distance")}
CLASSIFIERS = {
    "boosting": Algorithm(GradientBoostingClassifier, _TREES),
    "forest": Algorithm(RandomForestClassifier, _FOREST),
    "logistic": Algorithm(LogisticRegression, {"C": Float(1e-5, 1e4, log=True, default=1.0)}),
    "neighbors": Algorithm(KNeighborsClassifier, _NEAR),
    "gaussian": Algorithm(GaussianNB, {"var_smoothing": Float(1e-9, 10.0, log=True, default=1e-9)}),
    "bernoulli": Algorithm(BernoulliNB, {"alpha": Float(1e-3, 100.0, log=True, default=1.0)}),
}
REGRESSORS = {
    "boosting": Algorithm(GradientBoostingRegressor, _TREES),
    "forest": Algorithm(RandomForestRegressor, _FOREST),
    "ridge": Algorithm(Ridge, {"alpha": Float(1e-5, 1e5, log=True, default=1.0)}),
    "neighbors": Algorithm(KNeighborsRegressor, _NEAR),
}


def auc(y: np.ndarray, shares: np.ndarray) -> float:
    """The area under the curve of two classes, or the mean over classes of each against the rest."""
    each = [metrics.AUC() for _ in range(y.shape[1])]
    for k, metric in enumerate(each):
        metric.update(shares[:, k], y[:, k])
    return float(np.mean([metric.result() for metric in each]))


def accuracy(y: np.ndarray, shares: np.ndarray) -> float:
    """The share of rows whose likeliest class is theirs."""
    return float((y.argmax(axis=1) == shares.argmax(axis=1)).mean())


def log_loss(y: np.ndarray, shares: np.ndarray) -> float:
    """The mean logarithm of the probability of what was: the larger the better."""
    return float(np.log(np.maximum((y * shares).sum(axis=1), 1e-15)).mean())


def r2(y: np.ndarray, found: np.ndarray) -> float:
    """The share of the variance that is told."""
    return float(1 - ((y - found) ** 2).sum() / max(((y - y.mean(axis=0)) ** 2).sum(), 1e-300))


METRICS: dict[str, RowsScore] = {"auc": auc, "accuracy": accuracy, "log_loss": log_loss, "r2": r2}
MetricName = Annotated[str, OneOf(*METRICS)]


@dataclass(eq=False, repr=False)
class _Automatic:
    """What both kinds share. After `fit`: `search_`, `ensemble_` as (configuration, weight), and `why()`."""

    seconds: Endless = 600.0
    trials: AtLeast1 = 100
    metric: MetricName | RowsScore = ""
    categorical: Collection[str | int] = ()
    algorithms: Mapping[str, Algorithm] | None = None
    sampler: Sampler | None = None
    schedule: BudgetSchedule | None = None
    held: Share = 0.25
    members: AtLeast1 = 20
    log: FilePath | None = None
    random_state: Seed = 0
    progress: bool | None = None
    _models: list[tuple[Features, Any, float]] = field(default_factory=list, init=False)

    def __repr__(self) -> str:
        return shown(self)

    def fit(self, X: Any, y: Any) -> Self:
        """Search, choose an ensemble, and fit its members on all rows. X is a table as `TableReader` takes it."""
        self.reader_ = TableReader(self.categorical)
        table = self.reader_.read(X)
        targets = self._targets(y, len(table))
        kept, held = self._divided(targets)
        with tempfile.TemporaryDirectory() as own:
            log = Path(self.log) if self.log is not None else Path(own) / "search.jsonl"
            folders = log.with_name(f"{log.name}.kept")

            def objective(run: Attempt) -> float:
                some = kept[: max(2, round(run.budget * len(kept)))]
                features, model = self._fitted(run, table[some], targets[some])
                shares = self._answer(model, features.transform(table[held]))
                np.save(run.folder / "held.npy", shares)
                return self._score()(targets[held], shares)

            self.search_ = search(
                objective, self.space(), trials=self.trials, maximize=True, sampler=self.sampler,
                schedule=self.schedule, seconds=self.seconds, log=log, seed=self.random_state, progress=self.progress,
                task=self._task(table, targets),
            )  # fmt: skip
            library = [t for t in self.search_.ranked if t.budget == self.search_.best.budget][:LIBRARY]
            shares = [np.load(folders / str(trial.number) / "held.npy") for trial in library]
        weights = chosen_together(shares, targets[held], self._score(), self.members)
        self.ensemble_ = [(trial.config, weight) for trial, weight in zip(library, weights) if weight]
        self._models = [
            (*self._fitted(Attempt(config, 1.0, Path()), table, targets), weight) for config, weight in self.ensemble_
        ]
        return self

    def _task(self, table: Columns, targets: np.ndarray) -> str:
        """What trials of one log have in common beside their space."""
        data = zlib.crc32(targets.tobytes(), zlib.crc32(table.numbers.tobytes()))
        metric = getattr(self.metric, "__name__", self.metric) or self._default()
        return f"{len(targets)} rows {data:08x}, {self.held} held back, {metric}"

    def space(self) -> dict[str, Any]:
        """What is searched: plain data."""
        models = {name: algorithm.space for name, algorithm in self._algorithms().items()}
        return {"model": Categorical(**models), **FEATURES}

    def why(self) -> dict[str, float]:
        """What mattered in the search, as `Search.why`."""
        self._check_fitted()
        return self.search_.why()

    def _check_fitted(self) -> None:
        if not self._models:
            raise NotFittedError(f"This {type(self).__name__} instance is not fitted yet.", fix="call fit first")

    def _algorithms(self) -> Mapping[str, Algorithm]:
        return self.algorithms or self._all()

    def _score(self) -> RowsScore:
        name = self.metric or self._default()
        return name if callable(name) else METRICS[name]

    def _divided(self, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows to learn from and rows held back, each class in both."""
        order = np.random.default_rng(self.random_state).permutation(len(targets))
        if not 1 <= round(self.held * len(order)) < len(order):
            raise ArgumentError(f"held={self.held} of {len(order)} rows", fix="hold back some, not all")
        back = np.zeros(len(order), bool)
        for own in targets[order].T > 0 if self._classes else [np.ones(len(order), bool)]:
            count = own.sum()
            back[np.flatnonzero(own)[: min(max(1, round(self.held * count)), count - 1)]] = True
        return order[~back], order[back]

    def _fitted(self, run: Attempt, table: Columns, targets: np.ndarray) -> tuple[Features, Any]:
        features = Features(run["numbers"], run["words"], run["keep"], self.random_state)
        x = features.fit_transform(table, targets)
        model = self._algorithms()[run["model"]].make(**run.inside("model"))
        if isinstance(model, Estimator) and "random_state" in model.get_params():
            model.set_params(random_state=self.random_state)
        return features, model.fit(x, targets.argmax(axis=1) if self._classes else targets[:, 0])

    def _together(self, X: Any) -> np.ndarray:
        self._check_fitted()
        table = self.reader_.read(X)
        return sum(weight * self._answer(model, f.transform(table)) for f, model, weight in self._models)  # type: ignore[return-value]

    # what a kind says
    _classes = False

    def _all(self) -> Mapping[str, Algorithm]:
        raise NotImplementedError

    def _default(self) -> str:
        raise NotImplementedError

    def _targets(self, y: Any, rows: int) -> np.ndarray:
        raise NotImplementedError

    def _answer(self, model: Any, x: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def chosen_together(shares: list[np.ndarray], y: np.ndarray, score: RowsScore, most: int) -> list[float]:
    """The weight of each model in the ensemble: again and again the one is added with which the mean is best.

    >>> y = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> chosen_together([np.full((2, 2), 0.5), y], y, log_loss, 4)
    [0.0, 1.0]
    """
    counts, best = np.zeros(len(shares), int), (-np.inf, np.zeros(len(shares), int))
    summed = np.zeros_like(shares[0])
    for size in range(1, most + 1):
        scores = [score(y, (summed + each) / size) for each in shares]
        pick = int(np.argmax(scores))
        summed = summed + shares[pick]
        counts[pick] += 1
        if scores[pick] > best[0]:
            best = scores[pick], counts.copy()
    return [float(each) for each in best[1] / best[1].sum()]


class AutoClassifier(_Automatic):
    """Finds features, an algorithm and its numbers for classes, within `seconds` and `trials`.

    `metric` is "auc" (the default for two classes), "accuracy", "log_loss", or a function of targets and probabilities,
    both (rows, classes), that is to be large. `log` is a file, by which several processes search together (`hetu search
    run`) and a broken-off search goes on. `algorithms` are those of `CLASSIFIERS`, or yours.

    >>> from hetu.ml import GaussianNB
    >>> X, y = np.random.default_rng(0).normal(size=(80, 2)), np.arange(80) % 2
    >>> model = AutoClassifier(trials=3, algorithms={"bayes": Algorithm(GaussianNB, {})}).fit(X + 3 * y[:, None], y)
    >>> bool((model.predict(X + 3 * y[:, None]) == y).mean() > 0.9)
    True
    """

    _classes = True

    def _all(self) -> Mapping[str, Algorithm]:
        return CLASSIFIERS

    def _default(self) -> str:
        return "auc" if len(self.classes_) == 2 else "accuracy"

    def _targets(self, y: Any, rows: int) -> np.ndarray:
        self.classes_, numbers = np.unique(as_labels(vector(y, rows)), return_inverse=True)
        counts = np.bincount(numbers)
        if len(counts) < 2 or counts.min() < 2:
            raise DataError(
                f"classes of {counts.tolist()!s:.60} rows", fix="pass two classes at least, each of two rows"
            )
        return np.eye(len(counts))[numbers]

    def _answer(self, model: Any, x: np.ndarray) -> np.ndarray:
        shares = np.zeros((len(x), len(self.classes_)))
        shares[:, model.classes_] = model.predict_proba(x)  # of few rows some classes may be unknown
        return shares

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, classes), in the order of `classes_`."""
        return self._together(X)

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the likeliest class."""
        best = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[best])

    def score(self, X: Any, y: Any) -> float:
        """The metric on other rows; DataError for a class that fit has not seen."""
        shares = self.predict_proba(X)
        y = as_labels(vector(y, len(shares)))
        if not np.isin(y, self.classes_).all():
            raise DataError("a class that fit has not seen", fix=f"its classes are {self.classes_!s:.80}")
        return self._score()(np.eye(len(self.classes_))[np.searchsorted(self.classes_, y)], shares)


class AutoRegressor(_Automatic):
    """As `AutoClassifier`, for numbers; `metric` is "r2" or a function of targets and predictions, both (rows, 1).

    >>> from hetu.ml import Ridge
    >>> X = np.random.default_rng(0).normal(size=(80, 2))
    >>> model = AutoRegressor(trials=3, algorithms={"ridge": Algorithm(Ridge, {})}).fit(X, X[:, 0])
    >>> bool(model.score(X, X[:, 0]) > 0.9), model.predict(X).shape
    (True, (80,))
    """

    def _all(self) -> Mapping[str, Algorithm]:
        return REGRESSORS

    def _default(self) -> str:
        return "r2"

    def _targets(self, y: Any, rows: int) -> np.ndarray:
        return as_numbers(vector(y, rows))[:, None]

    def _answer(self, model: Any, x: np.ndarray) -> np.ndarray:
        found: np.ndarray = model.predict(x)[:, None]
        return found

    def predict(self, X: Any) -> np.ndarray:
        """(rows,)."""
        return self._together(X)[:, 0]

    def score(self, X: Any, y: Any) -> float:
        """The metric on other rows."""
        found = self.predict(X)[:, None]
        return self._score()(self._targets(y, len(found)), found)
