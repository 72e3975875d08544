"""What all estimators share, in scikit-learn's convention: parameters, input, and what is known once they are fitted.

An estimator is a dataclass: its fields are its parameters, `fit` makes attributes whose names end in "_". A fit on
many workers (`comm=`) is the same fit of all their rows. L. Buitinck et al., "API design for machine learning
software", 2013. Left out: parameters of estimators inside of estimators, metadata that is routed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ..core.errors import ArgumentError, DataError, HetuError, ShapeError, UnknownNameError, did_you_mean
from ..dist.comm.comm import Comm
from ..ps.wire.client import Client
from .inputs import Sparse, as_labels, as_numbers, matrix, vector, weights
from .workers import Workers, total, workers_of

ORDINARY = 32  # powers of two, by which weights may be larger or smaller than 1


def _all_or_nothing(fit: Callable[..., Any]) -> Callable[..., Any]:
    """A method after whose failure the estimator is as it was before."""

    @functools.wraps(fit)
    def fit_or_restore(self: Estimator, *args: Any, **kwargs: Any) -> Any:
        before = {**vars(self)}
        try:
            return fit(self, *args, **kwargs)
        except BaseException:
            vars(self).clear()
            vars(self).update(before)
            raise

    return fit_or_restore


def shown(made: Any) -> str:
    """A dataclass of parameters as a call with those that are not as they are by default.

    >>> from hetu.ml import KMeans
    >>> shown(KMeans(n_clusters=3))
    'KMeans(n_clusters=3)'
    """
    said = {f.name: (repr(getattr(made, f.name)), repr(f.default)) for f in dataclasses.fields(made) if f.init}
    changed = [f"{name}={value}" for name, (value, default) in said.items() if value != default]
    return f"{type(made).__name__}({', '.join(changed)})"


class NotFittedError(HetuError, ValueError, AttributeError):
    """An estimator that is asked for what only `fit` knows."""


@dataclass(eq=False, repr=False)
class Estimator:
    """Base class. A subclass is a dataclass of parameters, and writes `fit`, which returns itself.

    A `fit` that fails, or a `partial_fit`, leaves what was there before: no model, or the earlier one.
    `sparse` says that X may be a sparse matrix, `positive` that it may have no negative numbers.

    >>> from hetu.ml import KMeans
    >>> KMeans(n_clusters=3).set_params(tol=1e-3).get_params()["tol"]
    0.001
    """

    kind: ClassVar[str] = ""
    sparse: ClassVar[bool] = False
    positive: ClassVar[bool] = False

    comm: Comm | Client | None = dataclasses.field(default=None, kw_only=True)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in {"fit", "partial_fit"} & {*vars(cls)}:
            setattr(cls, name, _all_or_nothing(vars(cls)[name]))

    # -- parameters ------------------------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters by their names."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def set_params(self, **params: Any) -> Self:
        """Set parameters by their names; UnknownNameError for others. Nothing is set unless all can be."""
        known = self.get_params()
        for name in params:
            if name not in known:
                raise UnknownNameError(
                    f"{type(self).__name__} has no parameter {name!r}", fix=did_you_mean(name, known)
                )
        type(self)(**known | params)  # which answers what does not fit
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        return shown(self)

    # -- what comes in ---------------------------------------------------------------------------------------

    @property
    def workers(self) -> Workers:
        return workers_of(self.comm)

    def _begin(self, X: Any, least: int = 1) -> Any:
        """The rows to fit, of which the number of columns and their names are kept."""
        names = getattr(X, "columns", None)
        rows = self._checked(X, least)
        self.n_features_in_ = rows.shape[1]
        vars(self).pop("feature_names_in_", None)
        if names is not None and all(isinstance(name, str) for name in names):
            self.feature_names_in_ = np.asarray(names, object)
        return rows

    def _checked(self, X: Any, least: int = 1) -> np.ndarray | Sparse:
        rows = matrix(X, sparse=self.sparse, least=least)
        if self.positive and ((rows.values if isinstance(rows, Sparse) else rows) < 0).any():
            raise DataError(f"Negative values in data passed to {type(self).__name__}", fix="shift X to 0 and more")
        return rows

    def _rows(self, X: Any) -> Any:
        """Rows for a model that is fitted; NotFittedError, or ShapeError for rows of other columns."""
        self._check_fitted()
        names, known = getattr(X, "columns", None), getattr(self, "feature_names_in_", None)
        if names is not None and known is not None and not isinstance(X, Sparse) and [*names] != [*known]:
            raise ArgumentError(
                "The feature names should match those that were passed during fit: "
                f"got {[*names]!s:.80}, wanted {[*known]!s:.80}", fix="select the columns of fit, in their order"
            )  # fmt: skip
        rows = self._checked(X)
        if rows.shape[1] != self.n_features_in_:
            name, wanted = type(self).__name__, self.n_features_in_
            raise ShapeError(
                f"X has {rows.shape[1]} features, but {name} is expecting {wanted} features as input.",
                fix="pass the columns of fit",
            )
        return rows

    def _check_fitted(self) -> None:
        if not hasattr(self, "n_features_in_"):
            raise NotFittedError(
                f"This {type(self).__name__} instance is not fitted yet. Call 'fit' with appropriate arguments before "
                "using this estimator.",
                fix="call fit(X), or fit(X, y), before",
            )

    def _target(self, y: Any, rows: int, outputs: bool = False) -> np.ndarray:
        if y is None:
            raise ArgumentError(
                f"{type(self).__name__} requires y to be passed, but the target y is None.",
                fix="pass y, one for each row",
            )
        return vector(y, rows, outputs=outputs)

    def _weights(self, sample_weight: Any, rows: int) -> np.ndarray:
        """How often each row counts; DataError where all workers together have none that does."""
        found = weights(sample_weight, rows)
        if not self.workers.most(np.array(found.max(initial=0.0))):
            raise DataError("Sample weights must contain at least one non-zero number.", fix="pass one above 0")
        return found

    def _relative(self, weight: np.ndarray) -> tuple[np.ndarray, float]:
        """Weights, and the unit that these are in: 1, or a power of two where the largest of all workers is that far
        from 1 that sums might be too small or large. For what does not depend on the unit of weights."""
        power = int(np.frexp(self.workers.most(np.array(weight.max(initial=0.0))))[1]) - 1
        unit = float(np.ldexp(1.0, power)) if abs(power) > ORDINARY else 1.0
        return weight / unit, unit

    # -- what scikit-learn asks ------------------------------------------------------------------------------

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_features_in_")

    def __sklearn_tags__(self) -> Any:
        from sklearn import utils

        targets = utils.TargetTags(required=isinstance(self, Classifier | Regressor))
        tags = utils.Tags(estimator_type=self.kind or None, target_tags=targets)
        tags.input_tags.sparse, tags.input_tags.positive_only = self.sparse, self.positive
        if isinstance(self, Classifier):
            tags.classifier_tags = utils.ClassifierTags()
        if isinstance(self, Regressor):
            tags.regressor_tags = utils.RegressorTags()
        if isinstance(self, Transformer):
            tags.transformer_tags = utils.TransformerTags()
        return tags


class Classifier(Estimator):
    """Predicts classes, of any dtype that can be sorted. A subclass has `predict_proba`: the probability of each class,
    (rows, classes); or a `predict` of its own.

    >>> from hetu.ml import GaussianNB
    >>> model = GaussianNB().fit([[0.0], [1.0], [8.0], [9.0]], ["low", "low", "high", "high"])
    >>> model.predict([[2.0], [8.0]]).tolist(), model.score([[2.0], [8.0]], ["low", "low"], [3.0, 1.0])
    (['low', 'high'], 0.75)
    """

    kind = "classifier"

    def _labels(self, y: Any, rows: int) -> np.ndarray:
        return as_labels(self._target(y, rows))

    def _classes(self, y: Any, rows: int) -> np.ndarray:
        """The number of each row's class among `classes_`, those of all workers; DataError for fewer than two."""
        y = self._labels(y, rows)
        self.classes_ = self.workers.unique(y)
        if len(self.classes_) < 2:
            raise DataError(
                f"{type(self).__name__} needs samples of at least 2 classes in the data, but the data contains only "
                f"one class: {self.classes_[0]!r}",
                fix="pass rows of another class too",
            )
        return np.searchsorted(self.classes_, y)

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the likeliest class."""
        self._check_fitted()
        return np.take(self.classes_, np.argmax(self.predict_proba(X), axis=1))  # type: ignore[attr-defined]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The share of rows, of all workers, whose class is predicted."""
        found = self.predict(X)
        weight = self._weights(sample_weight, len(found))
        right, all_of_them = total(self.workers, [weight[found == self._labels(y, len(found))].sum(), weight.sum()])
        return right / all_of_them


class Regressor(Estimator):
    """Predicts numbers. A subclass has `predict`.

    >>> from hetu.ml import LinearRegression
    >>> model = LinearRegression().fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> round(model.score([[3.0], [4.0]], [7.0, 9.0], [1.0, 2.0]), 6)
    1.0
    """

    kind = "regressor"

    def _numbers(self, y: Any, rows: int, outputs: bool = False) -> np.ndarray:
        return as_numbers(self._target(y, rows, outputs))

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the number foretold."""
        raise NotImplementedError

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R^2 over the rows of all workers: 1 less the share of the variance that is left."""
        found = self.predict(X)
        y = self._numbers(y, len(found), outputs=True)
        weight = self._weights(sample_weight, len(found)).reshape(-1, *[1] * (y.ndim - 1))
        size, summed = self.workers.sum(weight.sum(keepdims=True), (weight * y).sum(axis=0, keepdims=True))
        mean = summed / size
        left, all_of_it = self.workers.sum(
            (weight * (y - found) ** 2).sum(axis=0), (weight * (y - mean) ** 2).sum(axis=0)
        )
        return float(np.mean(np.where(all_of_it > 0, 1 - left / np.where(all_of_it > 0, all_of_it, 1), left == 0)))


class Transformer(Estimator):
    """Makes other columns. A subclass has `transform`.

    >>> from hetu.ml import PCA
    >>> PCA(1).fit_transform([[0.0, 0.0], [3.0, 4.0]]).round(6).tolist()
    [[-2.5], [2.5]]
    """

    kind = "transformer"

    def transform(self, X: Any) -> np.ndarray:
        """(rows, components)."""
        raise NotImplementedError

    def fit_transform(self, X: Any, y: Any = None, sample_weight: Any = None) -> np.ndarray:
        """`fit`, and `transform` of the same rows."""
        weight = () if sample_weight is None else (sample_weight,)
        return self.fit(X, y, *weight).transform(X)  # type: ignore[attr-defined]


class Clusterer(Estimator):
    """Finds groups. A subclass has `predict`, and `labels_` of the rows that it was fitted on.

    >>> from hetu.ml import KMeans
    >>> labels = KMeans(2).fit_predict([[0.0], [1.0], [10.0]])
    >>> bool(labels[0] == labels[1] != labels[2])
    True
    """

    kind = "clusterer"

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> np.ndarray:
        """`fit`, and the group of each row."""
        return self.fit(X, y, sample_weight).labels_  # type: ignore[attr-defined]
