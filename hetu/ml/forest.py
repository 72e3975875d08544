"""Decision trees and random forests, of classes and of numbers.

All trees are grown from the same bins of columns (`trees/`). Where no column has more distinct values than bins a tree
is exact: it is CART by Gini impurity or squared error. L. Breiman et al., "Classification and Regression Trees", 1984;
L. Breiman, "Random Forests", 2001. Left out: other criteria, pruning, several targets of one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np

from ..core.errors import ShapeError
from ..ranges import AtLeast0, AtLeast1, Count, OneOf, Range, Seed, Share
from .estimator import Classifier, Estimator, Regressor
from .inputs import check_places
from .trees.bins import MOST_BINS, BinnedRows, binned, mean_of_all, rows_of_all, whole
from .trees.grow import Grower, GrowthRules
from .trees.tree import Trees, joined
from .workers import total

MaxFeatures = Annotated[int, Range(1)] | Share | Annotated[str, OneOf("sqrt", "log2")] | None
TOGETHER = 1 << 26  # bytes of trees that grow side by side
LOWEST = float(np.finfo(np.float64).min)


def columns_of(asked: MaxFeatures, columns: int) -> int:
    """How many columns a cut looks at: that number, that share, the root, the logarithm, or all of them.

    >>> [columns_of(asked, 30) for asked in (7, 0.5, "sqrt", "log2", None)]
    [7, 15, 5, 4, 30]
    """
    if isinstance(asked, str):
        return max(1, int(math.sqrt(columns) if asked == "sqrt" else math.log2(columns)))
    return max(1, int(asked * columns)) if isinstance(asked, float) else min(asked or columns, columns)


class OfTrees(Estimator):
    """What predicts by `trees_`, which are all nodes as arrays."""

    trees_: Trees

    def _counted(
        self, X: Any, y: Any, sample_weight: Any, numbers: Callable[[Any, int], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
        """Rows, what `numbers` makes of targets, and weights, of the rows that have a weight; the unit of weights."""
        rows = self._begin(X)
        target, (weight, unit) = numbers(y, len(rows)), self._relative(self._weights(sample_weight, len(rows)))
        counted = weight > 0
        return rows[counted], target[counted], weight[counted], unit

    @property
    def feature_importances_(self) -> np.ndarray:
        """(columns,): the share that each column has in what cuts improved, in the mean of the trees."""
        self._check_fitted()
        return self.trees_.importances(self.n_features_in_)

    def apply(self, X: Any) -> np.ndarray:
        """(rows, trees): the number of the leaf to which each row comes, among the nodes of all trees."""
        rows = self._rows(X)
        return self.trees_.leaves(rows)

    def text(self, names: Sequence[str] = (), tree: Count = 0) -> str:
        """One tree as lines: the rows that came by each node, and what it would predict or add. ShapeError for other
        than a name for each column, ValueRangeError for a tree that is not there."""
        self._check_fitted()
        names = names if len(names) else getattr(self, "feature_names_in_", ())
        if len(names) not in (0, self.n_features_in_):
            raise ShapeError(f"{len(names)} names", fix=f"pass one for each of {self.n_features_in_} columns")
        check_places(np.array([tree]), len(self.trees_.roots), "tree")
        return self.trees_.text(names, tree, self._shown)

    def _shown(self, value: np.ndarray) -> str:
        return f"{value[0]:+.4g}"


def indicators(numbers: np.ndarray, classes: int) -> np.ndarray:
    """(rows, classes), or of two classes (rows, 1) for the second: whether a row is of each."""
    asked = np.arange(classes) if classes > 2 else np.array([1])
    return numbers[:, None] == asked


@dataclass(eq=False, repr=False)
class _Grown(OfTrees):
    """What predicts by trees: one, or a forest whose trees differ.

    Each cut looks at `max_features` columns, and at others if these have none. A cut must improve the mean loss of all
    rows by `min_impurity_decrease`. Of rows whose weights differ, a leaf has as many as its share of the weight tells.
    Columns have `max_bins` bins at most.
    """

    max_depth: AtLeast1 | None = None
    min_samples_split: Annotated[int, Range(2)] = 2
    min_samples_leaf: AtLeast1 = 1
    max_features: MaxFeatures = None
    max_leaf_nodes: Annotated[int, Range(2)] | None = None
    min_impurity_decrease: AtLeast0 = 0.0
    max_bins: Annotated[int, Range(2, MOST_BINS)] = MOST_BINS
    random_state: Seed = 0

    def _grow(self, rows: np.ndarray, target: np.ndarray, weight: np.ndarray) -> None:
        """Grow `trees_`."""
        table = binned(self.workers, rows, self.max_bins)
        least = self.min_impurity_decrease * total(self.workers, [weight.sum()])[0] * self._told()
        bounds = self.max_depth, self.max_leaf_nodes, self.min_samples_split, self.min_samples_leaf
        rules = GrowthRules(*bounds, least_gain=least or LOWEST, features=columns_of(self.max_features, rows.shape[1]))
        before, everywhere = rows_of_all(self.workers, len(rows))
        of_tree = everywhere * (rows.shape[1] + 64)  # bytes of rows that may come to all workers, and their values
        step, grown = max(1, TOGETHER // of_tree), []
        for first in range(0, self._count(), step):
            draws = [np.random.default_rng([self.random_state, k]) for k in range(first, self._count())[:step]]
            times = np.stack([self._times(rng, everywhere)[before : before + len(rows)] for rng in draws])
            grown.append(self._trees(table, target, weight * times, rules, draws))
        self.trees_ = joined(grown)

    def _trees(
        self, table: BinnedRows, target: np.ndarray, weights: np.ndarray, rules: GrowthRules, draws: Sequence[Any]
    ) -> Trees:
        """Grow trees of these weights (trees, rows)."""
        values, units = zip(*(self._channels(target, weight) for weight in weights))
        rows = [np.flatnonzero(weight) for weight in weights]
        return Grower(self.workers, table, np.stack(values), np.stack(units), rules, draws, rows, target).grow()

    def _count(self) -> int:
        return 1

    def _told(self) -> float:
        """The share of the decrease of impurity that sums over channels tell."""
        return 1.0

    def _times(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        """How often each of the rows of all workers is in a tree."""
        return np.ones(rows, np.int64)

    def _channels(self, target: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """G and H of each row as whole numbers, (rows, channels), and the units of both."""
        raise NotImplementedError


class _OfClasses(_Grown, Classifier):
    """Leaves have the shares of the classes, of two classes that of the second."""

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """X (rows, columns) and y (rows,), the class of each row; DataError for a single class."""
        rows, numbers, weight, _ = self._counted(X, y, sample_weight, self._classes)
        self._grow(rows, numbers.astype(np.float64), weight)
        return self

    def _channels(self, target: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        weights, units = whole(self.workers, weight[:, None])
        return np.concatenate([indicators(target, len(self.classes_)) * weights, weights], axis=1), units[[0, 0]]

    def _told(self) -> float:
        return 0.5 if len(self.classes_) == 2 else 1.0  # the other class, which has no channel, tells as much

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, classes): the share of each class in the row's leaf, in the mean of the trees."""
        rows = self._rows(X)
        return self._shares(self.trees_.summed(rows) / len(self.trees_.roots))

    def _shares(self, values: np.ndarray) -> np.ndarray:
        return np.concatenate([1 - values, values], axis=1) if len(self.classes_) == 2 else values

    def _shown(self, value: np.ndarray) -> str:
        shares = self._shares(value[None])[0]
        return f"{self.classes_[shares.argmax()]} ({shares.max():.0%})"


class _OfNumbers(_Grown, Regressor):
    """Leaves have the means of their rows, less that of all rows."""

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """X (rows, columns) and y (rows,), numbers."""
        rows, target, weight, _ = self._counted(X, y, sample_weight, self._numbers)
        self.mean_ = float(mean_of_all(self.workers, target[:, None], weight)[0])
        self._grow(rows, target - self.mean_, weight)
        return self

    def _channels(self, target: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return whole(self.workers, np.stack([target * weight, weight], axis=1))

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the mean of the row's leaf, in the mean of the trees."""
        rows = self._rows(X)
        return self.trees_.summed(rows)[:, 0] / len(self.trees_.roots) + self.mean_

    def _shown(self, value: np.ndarray) -> str:
        return f"{value[0] + self.mean_:.4g}"


@dataclass(eq=False, repr=False)
class DecisionTreeClassifier(_OfClasses):
    """One tree of classes, each cut of which makes Gini's impurity smallest.

    Without bounds it grows until the rows of a leaf are of one class. `trees_` are its nodes as arrays.

    >>> from hetu.ml import DecisionTreeClassifier
    >>> X, y = [[0, 1], [1, 9], [2, 5], [3, 4]], ["a", "a", "b", "b"]
    >>> tree = DecisionTreeClassifier().fit(X, y)
    >>> print(tree.text(["size", "price"]))
    4 rows, a (50%)
    size <= 1.5: 2 rows, a (100%)
    size > 1.5: 2 rows, b (100%)
    >>> tree.predict([[9, 9]]).tolist(), tree.feature_importances_.tolist()
    (['b'], [1.0, 0.0])
    """


@dataclass(eq=False, repr=False)
class DecisionTreeRegressor(_OfNumbers):
    """One tree of numbers, each cut of which makes the squared error smallest.

    >>> from hetu.ml import DecisionTreeRegressor
    >>> tree = DecisionTreeRegressor(max_leaf_nodes=2).fit([[0], [1], [2], [3]], [1, 1, 4, 6])
    >>> tree.predict([[0.5], [7]]).tolist()
    [1.0, 5.0]
    """


@dataclass(eq=False, repr=False)
class _Forest(_Grown):
    """Trees of rows that are drawn with replacement, as many as there are, and of columns that differ from cut to cut.

    What is drawn follows from the seed, the number of the tree and that of the row among the rows of all workers.
    """

    n_estimators: AtLeast1 = 100
    bootstrap: bool = True

    def _count(self) -> int:
        return self.n_estimators

    def _times(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        if not self.bootstrap:
            return super()._times(rng, rows)
        return np.bincount(rng.integers(0, rows, rows), minlength=rows)


@dataclass(eq=False, repr=False)
class RandomForestClassifier(_Forest, _OfClasses):
    """The mean of many trees of classes.

    >>> from hetu.ml import RandomForestClassifier
    >>> X, y = np.arange(20.0)[:, None], np.arange(20) > 9
    >>> RandomForestClassifier(n_estimators=10).fit(X, y).predict([[3], [14]]).tolist()
    [False, True]
    """

    max_features: MaxFeatures = "sqrt"


@dataclass(eq=False, repr=False)
class RandomForestRegressor(_Forest, _OfNumbers):
    """The mean of many trees of numbers.

    >>> from hetu.ml import RandomForestRegressor
    >>> X = np.arange(20.0)[:, None]
    >>> RandomForestRegressor(n_estimators=10).fit(X, X[:, 0]).predict([[3]]).round().tolist()
    [3.0]
    """

    max_features: MaxFeatures = 1.0
