"""Measures of quality: streaming ones in NumPy, fed batch by batch, and graph functions for use inside a step.

A streaming metric has `update(...)` for a batch, `result()` over all batches since `reset()`. Left out: multi-label
tasks and sample weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .answers import AnswersCalls, answer_calls
from .core.backend import array_from
from .core.errors import ArgumentError, DataError, DTypeError, ShapeError, ValueRangeError, public
from .core.graph import Node
from .core.op import as_node
from .core.types import compatible, show_shape
from .ops import argmax, astype, equal, mean
from .ranges import AtLeast0, Positive

__all__ = ["AUC", "Accuracy", "ConfusionMatrix", "FScore", "Mean", "Metric", "Precision", "Recall", "accuracy"]


@public
def accuracy(logits: Any, labels: Any) -> Node:
    """Fraction of rows of `logits` (..., classes) whose largest entry is at `labels` (...), as a float32 node.

    >>> import hetu as ht
    >>> float(ht.evaluate(accuracy([[0.1, 0.9], [0.8, 0.2]], [1, 1])))
    0.5
    """
    logits, labels = as_node(logits), as_node(labels)
    wanted = logits.shape[:-1]
    if logits.ndim < 1 or labels.ndim != len(wanted) or not all(map(compatible, labels.shape, wanted)):
        raise ShapeError(
            f"accuracy got logits {logits.type} and labels {labels.type}",
            fix="pass one row of scores and one class id per example",
        )
    return mean(astype(equal(argmax(logits, axis=-1), labels), "float32"))


class Metric(AnswersCalls):
    """Base class. `len(metric)` is the number of examples seen since the last `reset()`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.count = 0

    def update(self, *batch: Any) -> None:
        """Count one batch."""
        raise NotImplementedError

    def result(self) -> Any:
        """The value over everything seen since `reset()`; DataError when that is nothing."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.count

    def _require_data(self) -> None:
        if not self.count:
            raise DataError(f"{type(self).__name__} has seen no examples", fix="call update(...) before result()")

    def __repr__(self) -> str:
        shown = f"{self.result():.4f}" if self.count else "nothing yet"
        return f"<{type(self).__name__} {shown}, {self.count} examples>"


class Mean(Metric):
    """Mean of values, such as losses of batches weighted by their sizes.

    >>> loss = Mean()
    >>> loss.update(1.0, weight=3); loss.update(5.0); loss.result()
    2.0
    """

    def reset(self) -> None:
        super().reset()
        self.total, self.weight = 0.0, 0.0

    def update(self, values: Any, weight: AtLeast0 = 1.0) -> None:
        """Take in a number or an array; `weight` counts for each value."""
        values = np.asarray(array_from(values), np.float64)
        self.total += float(values.sum()) * weight
        self.weight += values.size * weight
        self.count += values.size

    def result(self) -> float:
        self._require_data()
        return self.total / self.weight


class Accuracy(Metric):
    """Fraction of examples whose predicted class is the label.

    >>> metric = Accuracy()
    >>> metric.update([[0.1, 0.9], [0.8, 0.2]], [1, 1]); metric.result()
    0.5
    """

    def reset(self) -> None:
        super().reset()
        self.right = 0

    def update(self, predicted: Any, labels: Any) -> None:
        """`predicted` are scores (n, classes) or class ids (n,); `labels` are class ids (n,)."""
        predicted, labels = _classes(predicted, labels)
        self.right += int((predicted == labels).sum())
        self.count += labels.size

    def result(self) -> float:
        self._require_data()
        return self.right / self.count


class AUC(Metric):
    """Area under the receiver operating characteristic, exact: the chance that a positive outranks a negative.

    Ties count one half. Keeps all scores. J. Hanley, B. McNeil, Radiology 143, 1982 (the Wilcoxon statistic).

    >>> metric = AUC()
    >>> metric.update([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]); metric.result()
    0.75
    """

    def reset(self) -> None:
        super().reset()
        self.scores: list[np.ndarray] = []
        self.labels: list[np.ndarray] = []

    def update(self, scores: Any, labels: Any) -> None:
        """`scores` (n,) in any scale, higher for class 1; `labels` (n,) of 0 and 1."""
        scores, labels = np.array(scores, np.float64), np.array(labels)
        if scores.shape != labels.shape:
            raise ShapeError(
                f"scores {show_shape(scores.shape)} against labels {show_shape(labels.shape)}",
                fix="pass one score per label; take a column with scores[:, 1]",
            )
        if not np.isin(labels, (0, 1)).all():
            raise ValueRangeError("AUC labels must be 0 or 1", fix="compare with the class you look for: labels == k")
        if np.isnan(scores).any():
            raise ValueRangeError("a score is NaN and has no rank", fix="find its origin with ht.debug_nans()")
        self.scores.append(scores.ravel())
        self.labels.append(labels.ravel() == 1)
        self.count += labels.size

    def result(self) -> float:
        self._require_data()
        scores, positive = np.concatenate(self.scores), np.concatenate(self.labels)
        positives = int(positive.sum())
        negatives = positive.size - positives
        if not positives or not negatives:
            raise DataError("AUC needs examples of both classes", fix="pass more examples, or shuffle the data")
        _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
        ranks = np.cumsum(counts) - (counts - 1) / 2  # equal scores share their mean rank
        above = ranks[place][positive].sum() - positives * (positives + 1) / 2
        return float(above / (positives * negatives))


class ConfusionMatrix(Metric):
    """Counts (classes, classes): row = label, column = prediction. Prints as a table.

    >>> matrix = ConfusionMatrix(2)
    >>> matrix.update([0, 1, 1], [0, 0, 1]); print(matrix)
    label \\ predicted  0  1
                    0  1  1
                    1  0  1
    """

    def __init__(self, classes: int) -> None:
        if not isinstance(classes, int) or classes < 2:
            raise ArgumentError(f"classes is {classes!r}", fix="pass the number of classes, at least 2")
        self.classes = classes
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.matrix = np.zeros((self.classes, self.classes), np.int64)

    def update(self, predicted: Any, labels: Any) -> None:
        """`predicted` are scores (n, classes) or class ids (n,); `labels` are class ids (n,)."""
        predicted, labels = _classes(predicted, labels)
        for what, ids in (("predictions", predicted), ("labels", labels)):
            if ids.size and not 0 <= ids.min() <= ids.max() < self.classes:
                raise ValueRangeError(
                    f"{what} reach from {ids.min()} to {ids.max()}, the metric was made for {self.classes} classes",
                    fix=f"pass class ids from 0 to {self.classes - 1}",
                )
        pairs = labels * self.classes + predicted
        self.matrix += np.bincount(pairs, minlength=self.classes**2).reshape(self.matrix.shape)
        self.count += labels.size

    def result(self) -> Any:
        return self.matrix.copy()

    def __str__(self) -> str:
        corner = "label \\ predicted"
        width = max(len(str(self.matrix.max())), len(str(self.classes - 1))) + 2
        rows: list[tuple[str, Iterable[int]]] = [(corner, range(self.classes))]
        rows += [(str(i), row) for i, row in enumerate(self.matrix)]
        return "\n".join(f"{head:>{len(corner)}}" + "".join(f"{n:>{width}}" for n in cells) for head, cells in rows)

    def __repr__(self) -> str:
        return str(self)


class _OfCounts(ConfusionMatrix):
    """A measure of the counts of one class; over more than two classes, the unweighted mean of all."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__(classes)

    def result(self) -> float:
        self._require_data()
        true = np.diagonal(self.matrix).astype(np.float64)
        per_class = self._measure(true, self.matrix.sum(axis=0) - true, self.matrix.sum(axis=1) - true)
        return float(per_class[1] if self.classes == 2 else per_class.mean())

    def _measure(self, true: np.ndarray, false: np.ndarray, missed: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    __str__ = __repr__ = Metric.__repr__


class Precision(_OfCounts):
    """The share of predictions of a class that are right: of class 1 of two, else the mean over classes. 0 / 0 is 0.

    >>> metric = Precision()
    >>> metric.update([1, 1, 0, 1], [1, 0, 1, 1]); round(metric.result(), 3)
    0.667
    """

    def _measure(self, true: np.ndarray, false: np.ndarray, missed: np.ndarray) -> np.ndarray:
        return _ratio(true, true + false)


class Recall(_OfCounts):
    """The share of a class that is found: of class 1 of two, else the mean over classes. 0 / 0 is 0.

    >>> metric = Recall()
    >>> metric.update([1, 1, 0, 0], [1, 0, 1, 1]); round(metric.result(), 3)
    0.333
    """

    def _measure(self, true: np.ndarray, false: np.ndarray, missed: np.ndarray) -> np.ndarray:
        return _ratio(true, true + missed)


class FScore(_OfCounts):
    """(1 + beta^2) precision recall / (beta^2 precision + recall), per class as in `Precision`. 0 / 0 is 0.

    >>> metric = FScore()
    >>> metric.update([1, 1, 0, 0], [1, 0, 1, 1]); round(metric.result(), 3)
    0.4
    """

    def __init__(self, classes: int = 2, beta: Positive = 1.0) -> None:
        super().__init__(classes)
        self.beta = beta

    def _measure(self, true: np.ndarray, false: np.ndarray, missed: np.ndarray) -> np.ndarray:
        weight = self.beta**2
        return _ratio((1 + weight) * true, (1 + weight) * true + weight * missed + false)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _classes(predicted: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true class ids as flat integer arrays of one length."""
    predicted, labels = array_from(predicted), array_from(labels)
    if predicted.ndim == labels.ndim + 1:
        predicted = predicted.argmax(axis=-1)
    if predicted.shape != labels.shape:
        raise ShapeError(
            f"predictions {show_shape(predicted.shape)} against labels {show_shape(labels.shape)}",
            fix="pass labels (n,), and scores (n, classes) or class ids (n,)",
        )
    for what, ids in (("predictions", predicted), ("labels", labels)):
        if ids.dtype.kind not in "biu":
            raise DTypeError(f"{what} are {ids.dtype.name}, wanted class ids", fix="use (scores > 0.5) or .astype(int)")
    return predicted.ravel().astype(np.int64), labels.ravel().astype(np.int64)


answer_calls(__name__)
