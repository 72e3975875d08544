"""Gradient boosting: trees that each take a step down a loss, of which the gradient and the curvature are a hetu graph.

A loss is a function of nodes, so one of your own works as those that are here: its derivatives are made by
`ht.gradients`. In each round G is the negative gradient and H the curvature of every row, as whole numbers of 32 bits:
a node's histograms are 8 bytes a bin and column on the way to other workers. J. Friedman, "Greedy function
approximation", Annals of Statistics 2001; T. Chen, C. Guestrin, "XGBoost", KDD 2016; G. Ke et al., "LightGBM", 2017.
Left out: missing values, categories, losses without a curvature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Self

import numpy as np

from .. import ops
from ..core.autodiff import gradients
from ..core.errors import DataError
from ..core.executor import Executor
from ..core.graph import Node
from ..core.leaf import placeholder
from ..dist.comm.comm import SerialComm
from ..ranges import AtLeast0, AtLeast1, Positive, Range, Seed, Share
from .estimator import Regressor
from .forest import OfTrees, columns_of, indicators
from .gradient import Loss
from .margins import ByOdds
from .trees.bins import MOST_BINS, BinnedRows, binned, mean_of_all, narrowed, rows_of_all, whole
from .trees.grow import Grower, GrowthRules
from .trees.tree import Trees, joined
from .workers import Workers

CURVED = "boost a loss that is convex in its first argument, and curved, such as the squared error"
LEAST_CURVATURE = 1e-3  # that both sides of a cut have


def squared_error(raw: Node, y: Node) -> Node:
    """(rows, 1), (rows, 1) -> (rows, 1)."""
    return 0.5 * ops.square(raw - y)


def log_loss(raw: Node, y: Node) -> Node:
    """(rows, outputs), shares of classes -> (rows,): of two classes `raw` is the log of the odds of the second."""
    if raw.shape[1] == 1:
        return ops.sum(ops.binary_cross_entropy_with_logits(raw, y), axis=1)
    return -ops.sum(y * ops.log_softmax(raw), axis=1)


class Derivatives:
    """A loss, its gradient and the diagonal of its curvature, at raw predictions and targets (rows, outputs)."""

    def __init__(self, loss: Loss, outputs: int) -> None:
        raw, y = (placeholder(name, (None, outputs), "float64") for name in ("raw", "y"))
        each = loss(raw, y)
        (slope,) = gradients(ops.sum(each), [raw])
        of_each = [gradients(ops.sum(slope[:, k]), [raw], allow_unused=True)[0] for k in range(outputs)]
        curvature = ops.concat([bent[:, k : k + 1] for k, bent in enumerate(of_each)], axis=1)
        self.places = raw, y
        self.executor = Executor({"loss": [each], "step": [slope, curvature]}, comm=SerialComm())  # this worker's own

    def loss(self, raw: np.ndarray, y: np.ndarray) -> np.ndarray:
        """(rows,)."""
        (each,) = self.executor.run("loss", dict(zip(self.places, (raw, y))))
        return each.sum(axis=tuple(range(1, each.ndim)))

    def step(self, workers: Workers, raw: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        """Gradient and curvature, both (rows, outputs). DataError where the loss is not convex."""
        slope, curvature = self.executor.run("step", dict(zip(self.places, (raw, y))))
        wrong = not (np.isfinite(slope).all() and np.isfinite(curvature).all()) or (curvature < 0).any()
        if workers.most(np.array(wrong, np.int64)):
            raise DataError("the second derivative of the loss is negative or no number", fix=CURVED)
        return [slope, curvature]


@dataclass(eq=False, repr=False)
class _Boosted(OfTrees):
    """Adds up trees, for `max_iter` rounds.

    Each cut looks at a share `max_features` of the columns. A leaf has `min_samples_leaf` rows, as far as its share of
    the curvature tells. With `early_stopping` a share `validation_fraction` of the rows stays apart, and rounds end
    when the loss of these has not fallen by `tol` in `n_iter_no_change` of them.
    """

    learning_rate: Positive = 0.1
    max_iter: AtLeast1 = 100
    max_leaf_nodes: Annotated[int, Range(2)] | None = 31
    max_depth: AtLeast1 | None = None
    min_samples_leaf: AtLeast1 = 20
    l2_regularization: AtLeast0 = 0.0
    max_features: Share = 1.0
    max_bins: Annotated[int, Range(2, MOST_BINS)] = MOST_BINS
    early_stopping: bool = False
    validation_fraction: Annotated[float, Range(0, 1, open="both")] = 0.1
    n_iter_no_change: AtLeast1 = 10
    tol: AtLeast0 = 1e-7
    random_state: Seed = 0

    def _boost(self, rows: np.ndarray, target: np.ndarray, weight: np.ndarray, unit: float, loss: Loss) -> None:
        """Grow `trees_` for targets (rows, outputs), in turn for each output, from `baseline_` on."""
        loss_of, l2 = Derivatives(loss, target.shape[1]), self.l2_regularization / unit
        apart = self._apart(len(rows))
        held = [each[apart] for each in (rows, target, weight)]
        rows, target, weight = (each[~apart] for each in (rows, target, weight))
        table = binned(self.workers, rows, self.max_bins)
        self.baseline_ = self._baseline(loss_of, target, weight)
        raw, held_raw = (np.tile(self.baseline_, (len(each), 1)) for each in (target, held[1]))
        trees: list[Trees] = []
        self.validation_score_ = []
        for number in range(self.max_iter):
            slope, curvature = loss_of.step(self.workers, raw, target)
            pairs = np.stack([-slope, curvature], axis=2) * weight[:, None, None]
            trees.append(self._round(table, pairs, raw, l2, number))
            held_raw += trees[-1].summed(held[0], target.shape[1])
            if self.early_stopping:
                losses = loss_of.loss(held_raw, held[1])[:, None]
                self.validation_score_.append(-float(mean_of_all(self.workers, losses, held[2])[0]))
                if self._is_enough():
                    break
        self.trees_, self.n_iter_ = joined(trees), len(trees)

    def _apart(self, own: int) -> np.ndarray:
        """Which rows of this worker only tell when to stop, by their numbers among those of all workers."""
        if not self.early_stopping:
            return np.zeros(own, bool)
        before, rows = rows_of_all(self.workers, own)
        if rows < 2:
            raise DataError("early_stopping=True with a single row", fix="pass more, or early_stopping=False")
        count = min(max(1, round(self.validation_fraction * rows)), rows - 1)
        chosen = np.zeros(rows, bool)
        chosen[np.random.default_rng(self.random_state).permutation(rows)[:count]] = True
        return chosen[before : before + own]

    def _is_enough(self) -> bool:
        recent, earlier = (
            self.validation_score_[-self.n_iter_no_change :],
            self.validation_score_[: -self.n_iter_no_change],
        )
        return bool(earlier) and max(recent) < max(earlier) + self.tol

    def _baseline(self, loss: Derivatives, target: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """(outputs,): the constant of the least loss, by Newton's method, each step halved until the loss falls."""

        def mean(at: np.ndarray) -> float:
            each = loss.loss(np.tile(at, (len(target), 1)), target)[:, None]
            return float(mean_of_all(self.workers, each, weight)[0])

        at = np.zeros(target.shape[1])
        now, last = mean(at), np.inf
        for _ in range(100):
            found = loss.step(self.workers, np.tile(at, (len(target), 1)), target)
            slope, curvature = np.split(mean_of_all(self.workers, np.concatenate(found, axis=1), weight), 2)
            if not at.any() and not curvature.any():
                raise DataError("the second derivative of the loss is 0 everywhere", fix=CURVED)
            step = slope / np.where(curvature > 0, curvature, 1)
            while not (then := mean(at - step)) <= now and (step / 2 + at != at).any():
                step = step / 2
            at, moved, fell, now = at - step, np.abs(step).max(), then < now, then
            if moved <= 1e-12 * np.abs(at).max() or not (fell or moved < last):  # which is rounding, at 0
                break
            last = moved
        return at

    def _round(self, table: BinnedRows, pairs: np.ndarray, raw: np.ndarray, l2: float, number: int) -> Trees:
        """A tree for each output, of G and H (rows, outputs, 2), which adds what its leaves say to the raw predictions.

        Cuts are found by numbers of 32 bits; leaves are sums of those of 64.
        """
        outputs = raw.shape[1]
        bounds = self.max_depth, self.max_leaf_nodes, 2, self.min_samples_leaf, LEAST_CURVATURE
        features, tiny = columns_of(self.max_features, table.bins.shape[1]), float(np.finfo(float).tiny)
        rules = GrowthRules(*bounds, least_gain=tiny, l2=l2, features=features)
        numbers, units = whole(self.workers, pairs.reshape(len(raw), 2 * outputs))
        short, coarse = narrowed(self.workers, numbers, units)
        np.maximum(short[:, 1::2], 1, out=short[:, 1::2])  # cuts go between rows that have a sum, so all have one
        numbers, short = (each.reshape(pairs.shape).swapaxes(0, 1) for each in (numbers, short))
        draws = [np.random.default_rng([self.random_state, number, k]) for k in range(outputs)]
        rows = [np.arange(len(raw))] * outputs
        grower = Grower(self.workers, table, short, coarse.reshape(-1, 2), rules, draws, rows)
        trees, leaves = grower.grow(), grower.leaves()
        sums = np.zeros((len(trees.lefts), 2), np.int64)
        for channel in range(2):
            np.add.at(sums[:, channel], leaves, numbers[..., channel])
        (sums,) = self.workers.sum(sums)
        g, h = (sums * units.reshape(-1, 2)[trees.numbers()]).T
        values = np.where(h > 0, g / np.where(h > 0, h + l2, 1), trees.values[:, 0]) * self.learning_rate
        raw += values[leaves].T
        return replace(trees, values=values[:, None])

    def _foretold(self, X: Any) -> np.ndarray:
        """(rows, outputs): the sums of what trees add."""
        rows = self._rows(X)
        return self.trees_.summed(rows, len(self.baseline_)) + self.baseline_


@dataclass(eq=False, repr=False)
class GradientBoostingRegressor(_Boosted, Regressor):
    """Numbers by gradient boosting. `loss` is the squared error, or a function of nodes.

    It takes predictions and targets, both (rows, 1), to the loss of each row. `trees_` are the nodes of all trees,
    `n_iter_` their number, `validation_score_` the negative losses of the rows that stay apart.

    >>> import hetu as ht
    >>> X = np.linspace(-3, 3, 60)[:, None]
    >>> y = np.sin(X[:, 0])
    >>> fast = {"max_iter": 20, "learning_rate": 0.3, "min_samples_leaf": 3}
    >>> round(ht.ml.GradientBoostingRegressor(**fast).fit(X, y).score(X, y), 2)
    1.0
    >>> poisson = lambda raw, y: ht.exp(raw) - y * raw  # foretells the log of the mean of counts
    >>> model = ht.ml.GradientBoostingRegressor(loss=poisson, **fast).fit(X, np.exp(2 + y))
    >>> round(model.score(X, 2 + y), 2)
    1.0
    """

    loss: Loss = squared_error

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """X (rows, columns) and y (rows,), numbers; DataError for a loss that is not convex and curved."""
        rows, y, weight, unit = self._counted(X, y, sample_weight, self._numbers)
        self._boost(rows, y[:, None], weight, unit, self.loss)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(rows,)."""
        return self._foretold(X)[:, 0]


@dataclass(eq=False, repr=False)
class GradientBoostingClassifier(_Boosted, ByOdds):
    """Classes by gradient boosting of the log loss: one tree a round for two classes, else one for each class.

    Attributes are those of `GradientBoostingRegressor`; of several classes the trees of one round stand together.

    >>> import hetu as ht
    >>> X = np.linspace(-1, 1, 200)[:, None]
    >>> model = ht.ml.GradientBoostingClassifier(max_leaf_nodes=3).fit(X, abs(X[:, 0]) > 0.5)
    >>> model.predict([[-0.9], [0.1]]).tolist()
    [True, False]
    >>> print(model.text())  # of the first tree
    200 rows, +0
    x0 <= -0.5025: 50 rows, +0.2
    x0 > -0.5025: 150 rows, -0.06667
    |   x0 <= 0.5025: 100 rows, -0.2
    |   x0 > 0.5025: 50 rows, +0.2
    """

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """X (rows, columns) and y (rows,), the class of each row; DataError for a single class."""
        rows, numbers, weight, unit = self._counted(X, y, sample_weight, self._classes)
        self._boost(rows, indicators(numbers, len(self.classes_)).astype(np.float64), weight, unit, log_loss)
        return self
