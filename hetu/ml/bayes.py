"""Naive Bayes: in each class the columns are taken to be independent, so counts and sums by classes are the model.

One base adds up what the rows of each class have, over batches (`partial_fit`) and workers; a subclass says what that
is and what it makes of a row. C. D. Manning et al., "Introduction to Information Retrieval", 2008, chapter 13. Left
out: columns of different kinds in one model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..core.errors import ArgumentError, DataError
from ..ranges import AtLeast0, Finite, Positive
from .estimator import Classifier
from .inputs import Sparse


class NaiveBayes(Classifier):
    """Base class: fitting by sums over the rows of each class, and probabilities from joint log-likelihoods."""

    class_count_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Rows X (rows, columns) and their classes y (rows,); DataError for fewer than two classes."""
        rows = self._begin(X)
        return self._add(rows, self._classes(y, len(rows)), self._weights(sample_weight, len(rows)), first=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Rows in addition to those before; the first call names all `classes` there will be, in sorted order.

        ArgumentError without them, or for others later; DataError for a class that is not among them.
        """
        first = not hasattr(self, "classes_")
        if first and classes is None:
            raise ArgumentError(
                "classes must be passed on the first call to partial_fit.", fix="pass all that there will be"
            )
        known = np.unique(np.asarray(classes)) if classes is not None else self.classes_
        if not first and not np.array_equal(known, self.classes_):
            raise ArgumentError(f"`classes={classes!r:.60}` is not the same as on last call to partial_fit, was: "
                                f"{self.classes_!r:.60}", fix="leave classes= out after the first call")  # fmt: skip
        rows = self._begin(X) if first else self._rows(X)
        y = self._labels(y, len(rows))
        if strange := sorted({*y.tolist()} - {*known.tolist()}):
            raise DataError(
                f"The target label(s) {strange!s:.60} in y do not exist in the initial classes {known}",
                fix="name all classes in the first call of partial_fit",
            )
        self.classes_ = known
        return self._add(rows, np.searchsorted(known, y), self._weights(sample_weight, len(rows)), first)

    def _add(self, rows: Any, y: np.ndarray, weight: np.ndarray, first: bool) -> Self:
        """Add what these rows have to the sums, which are 0 at `first`."""
        raise NotImplementedError

    def predict_joint_log_proba(self, X: Any) -> np.ndarray:
        """(rows, classes): log P(class) + log P(row | class)."""
        raise NotImplementedError

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """(rows, classes): the logarithm of each class's probability."""
        joint = self.predict_joint_log_proba(X)
        return joint - np.logaddexp.reduce(joint, axis=1, keepdims=True)

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, classes): the probability of each class."""
        return np.exp(self.predict_log_proba(X))

    def _prior(self, given: Sequence[float] | None, learned: bool = True) -> np.ndarray:
        """The probabilities of the classes: as `given`, as often as they were seen, or all alike."""
        count = len(self.classes_)
        if given is None:
            return self.class_count_ / self.class_count_.sum() if learned else np.full(count, 1 / count)
        prior = np.asarray(given, np.float64)
        if len(prior) != count:
            raise ArgumentError(
                f"Number of priors must match number of classes: got {len(prior)} of {count}",
                fix=f"pass one for each of {self.classes_}",
            )
        if (prior < 0).any() or not np.isclose(prior.sum(), 1):
            raise ArgumentError(
                f"The sum of the priors should be 1, and none below 0: got {prior}", fix="divide them by their sum"
            )
        return prior


def by_class(rows: np.ndarray | Sparse, y: np.ndarray, weight: np.ndarray, classes: int) -> np.ndarray:
    """(classes, columns): the weighted sums of the rows of each class.

    >>> by_class(np.array([[1.0, 2], [3, 4], [5, 6]]), np.array([1, 0, 1]), np.ones(3), 2).tolist()
    [[3.0, 4.0], [6.0, 8.0]]
    """
    if isinstance(rows, Sparse):
        columns, at = rows.shape[1], rows.rows
        places = y[at] * columns + rows.columns
        return np.bincount(places, rows.values * weight[at], classes * columns).reshape(classes, columns)
    shares = np.zeros((classes, len(y)))
    shares[y, np.arange(len(y))] = weight
    return shares @ rows


@dataclass(eq=False, repr=False)
class GaussianNB(NaiveBayes):
    """In each class a normal law for each column, of the class's mean and variance.

    `priors` (classes,) are the classes' probabilities, else as often as they are seen. `var_smoothing` of the largest
    variance of a column is added to all. Fitted: `theta_` and `var_` (classes, columns), `class_count_`,
    `class_prior_`, `epsilon_`. Batches are merged as T. Chan et al., "Updating Formulae and a Pairwise Algorithm for
    Computing Sample Variances", 1979.

    >>> import numpy as np
    >>> model = GaussianNB().fit([[-2.0], [-1.0], [1.0], [2.0]], ["low", "low", "high", "high"])
    >>> model.predict([[-0.5], [3.0]]).tolist(), model.theta_.tolist()
    (['low', 'high'], [[1.5], [-1.5]])
    """

    priors: Sequence[float] | None = None
    var_smoothing: AtLeast0 = 1e-9

    def _add(self, rows: np.ndarray, y: np.ndarray, weight: np.ndarray, first: bool) -> Self:
        k = len(self.classes_)
        counts, sums = self.workers.sum(np.bincount(y, weight, k), by_class(rows, y, weight, k))
        means = sums / np.maximum(counts, np.finfo(float).tiny)[:, None]
        (squares,) = self.workers.sum(by_class((rows - means[y]) ** 2, y, weight, k))
        if not first:
            old, size = self.class_count_, np.maximum(self.class_count_ + counts, np.finfo(float).tiny)
            apart, share = means - self.theta_, (counts / size)[:, None]
            squares = self._squares + squares + apart**2 * (old[:, None] * share)
            counts, means = old + counts, self.theta_ + apart * share
        self.class_count_ = counts
        self.theta_: np.ndarray = means
        self._squares: np.ndarray = squares
        self._settle()
        return self

    def _settle(self) -> None:
        """The variances, to which a share of the largest that a column has in all rows is added."""
        counts = self.class_count_
        whole = counts @ self.theta_ / counts.sum()
        spread = (self._squares + counts[:, None] * (self.theta_ - whole) ** 2).sum(axis=0) / counts.sum()
        tiny = np.finfo(float).tiny
        self.epsilon_ = self.var_smoothing * spread.max()
        self.var_ = np.maximum(self._squares / np.maximum(counts, tiny)[:, None] + self.epsilon_, tiny)
        self.class_prior_ = self._prior(self.priors)

    def predict_joint_log_proba(self, X: Any) -> np.ndarray:
        rows = self._rows(X)
        with np.errstate(divide="ignore", over="ignore"):  # a class that has not been seen, all columns constant
            constant = np.log(self.class_prior_) - 0.5 * np.log(2 * np.pi * self.var_).sum(axis=1)
            far = [((rows - mean) ** 2 / var).sum(axis=1) for mean, var in zip(self.theta_, self.var_)]
        return constant - 0.5 * np.stack(far, axis=1)


@dataclass(eq=False, repr=False)
class _Counts(NaiveBayes):
    """What the models of counts share: `feature_count_` (classes, columns), sums over the rows of each class."""

    alpha: Positive = 1.0
    fit_prior: bool = True
    class_prior: Sequence[float] | None = None
    sparse = True

    def _add(self, rows: Any, y: np.ndarray, weight: np.ndarray, first: bool) -> Self:
        k, counted = len(self.classes_), self._counted(rows)
        counts, sums = self.workers.sum(np.bincount(y, weight, k), by_class(counted, y, weight, k))
        self.class_count_ = counts if first else self.class_count_ + counts
        self.feature_count_: np.ndarray = sums if first else self.feature_count_ + sums
        with np.errstate(divide="ignore"):  # a class that has not been seen
            self.class_log_prior_ = np.log(self._prior(self.class_prior, self.fit_prior))
        self._settle()
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # where columns are no counts
        return tags

    def _counted(self, rows: Any) -> Any:
        """What of the rows is counted."""
        return rows

    def _settle(self) -> None:
        raise NotImplementedError

    def _joint(self, X: Any, slopes: np.ndarray, constant: np.ndarray) -> np.ndarray:
        return self._counted(self._rows(X)) @ slopes.T + constant


@dataclass(eq=False, repr=False)
class MultinomialNB(_Counts):
    """In each class a law by which the units of a row's counts are drawn, such as the words of a document.

    `alpha` is added to each count (Lidstone). The classes' probabilities are `class_prior`, or with `fit_prior` as
    often as they are seen, or all alike. X has no negative numbers, and may be sparse. Fitted: `feature_count_` and
    `feature_log_prob_` (classes, columns), `class_count_`, `class_log_prior_`.

    >>> model = MultinomialNB().fit([[3, 0], [2, 1], [0, 4]], [0, 0, 1])
    >>> model.predict([[1, 0], [1, 5]]).tolist(), model.feature_count_.tolist()
    ([0, 1], [[5.0, 1.0], [0.0, 4.0]])
    """

    positive = True

    def _settle(self) -> None:
        smoothed = self.feature_count_ + self.alpha
        self.feature_log_prob_ = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))

    def predict_joint_log_proba(self, X: Any) -> np.ndarray:
        self._check_fitted()
        return self._joint(X, self.feature_log_prob_, self.class_log_prior_)


@dataclass(eq=False, repr=False)
class BernoulliNB(_Counts):
    """In each class a probability for each column to be on, that is above `binarize` (None: X is 0 and 1 already).

    Parameters and what is fitted are those of `MultinomialNB`. A sparse X takes a `binarize` of at least 0.

    >>> model = BernoulliNB().fit([[1, 0], [1, 1], [0, 1]], ["a", "a", "b"])
    >>> model.predict([[1, 1], [0, 1]]).tolist()
    ['a', 'b']
    """

    binarize: Finite | None = 0.0

    def _counted(self, rows: Any) -> Any:
        if self.binarize is None:
            return rows
        if not isinstance(rows, Sparse):
            return (rows > self.binarize).astype(np.float64)
        if self.binarize < 0:
            raise ArgumentError(
                f"binarize={self.binarize} of a sparse X, whose zeros would be on", fix="use X.toarray()"
            )
        return Sparse(rows.starts, rows.columns, (rows.values > self.binarize) * 1.0, rows.shape)

    def _settle(self) -> None:
        seen = np.log(self.class_count_ + 2 * self.alpha)[:, None]
        self.feature_log_prob_ = np.log(self.feature_count_ + self.alpha) - seen
        self._off = np.log(self.class_count_[:, None] - self.feature_count_ + self.alpha) - seen

    def predict_joint_log_proba(self, X: Any) -> np.ndarray:
        self._check_fitted()
        constant = self.class_log_prior_ + self._off.sum(axis=1)
        return self._joint(X, self.feature_log_prob_ - self._off, constant)
