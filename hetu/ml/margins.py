"""Linear models of classes, which learn by gradients: logistic and softmax regression, support vectors.

Left out: other penalties than L2 (but those of `ht.optim.FTRL`), kernels, several labels of one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np

from .. import ops
from ..core.graph import Node
from ..ranges import AtLeast1, Endless
from .estimator import Classifier
from .gradient import Dense, Learner, Loss
from .inputs import Sparse
from .workers import total

Curvature = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of margins and targets, all (rows, outputs)
SMALL = 1 << 16  # numbers of all Hessians, which are found sooner than many gradients
ROWS = 8192  # that are looked at together
NOTHING = 1e-12  # by which equal columns differ, as a share


def line(x: Dense, coef: Node, intercept: Node | None = None) -> Node:
    """x coef + intercept: (rows, outputs)."""
    return x.times(coef) if intercept is None else x.times(coef) + intercept


def logistic_loss(margins: Node, y: Node) -> Node:
    """Of each row: of two classes y is (rows, 1), 0 or 1, of more (rows,), the number of the class."""
    if margins.shape[1] == 1:
        return ops.sum(ops.binary_cross_entropy_with_logits(margins, y), axis=1)
    return ops.softmax_cross_entropy(margins, y)


def logistic_targets(numbers: np.ndarray, outputs: int) -> np.ndarray:
    return numbers[:, None].astype(np.float64) if outputs == 1 else numbers


def hinge_loss(margins: Node, y: Node) -> Node:
    """Of each row: the squares by which margins are below 1; y (rows, outputs) is 1 for its own class, else -1."""
    return ops.sum(ops.square(ops.relu(1.0 - y * margins)), axis=1)


def hinge_targets(numbers: np.ndarray, outputs: int) -> np.ndarray:
    return np.where(numbers[:, None] == (np.arange(outputs) if outputs > 1 else np.ones(1)), 1.0, -1.0)


def hinge_curvature(margins: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(y * margins < 1, 2.0, 0.0)


def probabilities(margins: np.ndarray) -> np.ndarray:
    """(rows, 1) or (rows, classes) -> (rows, classes)."""
    margins = np.concatenate([np.zeros_like(margins), margins], axis=1) if margins.shape[1] == 1 else margins
    powers = np.exp(margins - margins.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


class ByMargins(Classifier):
    """Predicts the class of the largest margin, or of two classes by the sign of one. A subclass has `_foretold`."""

    @property
    def outputs(self) -> int:
        """How many margins a row has."""
        return len(self.classes_) if len(self.classes_) > 2 else 1

    def _foretold(self, X: Any) -> np.ndarray:
        """(rows, outputs): the margins."""
        raise NotImplementedError

    def decision_function(self, X: Any) -> np.ndarray:
        """The margins: (rows,) of two classes, the second one above 0, else (rows, classes)."""
        margins = self._foretold(X)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the class of the largest margin."""
        margins = self._foretold(X)
        return np.take(self.classes_, margins.argmax(axis=1) if self.outputs > 1 else margins[:, 0] > 0)


class ByOdds(ByMargins):
    """The same where margins are logs of odds."""

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, classes): the probability of each class."""
        return probabilities(self._foretold(X))


@dataclass(eq=False, repr=False)
class _Linear(Learner, ByMargins):
    """Margins are X coef + intercept. A subclass has `rules`: a loss, what makes its targets of classes, and if outputs
    do not meet in the loss its curvature, which lets few columns be learned by Newton's method."""

    sparse = True
    rules: ClassVar[tuple[Loss, Callable[[np.ndarray, int], np.ndarray], Curvature | None]]

    C: Endless = 1.0
    fit_intercept: bool = True

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """X (rows, columns), dense or sparse, and y (rows,), the class of each row; DataError for a single class."""
        rows = self._begin(X)
        numbers = self._classes(y, len(rows))
        weight = self._weights(sample_weight, len(rows))
        (loss, targets, curvature), outputs, newton = self.rules, self.outputs, None
        summed, y = total(self.workers, [weight.sum()])[0], targets(numbers, outputs)
        penalty = 1 / (self.C * summed)
        if curvature is not None and outputs * rows.shape[1] ** 2 <= SMALL:
            newton = partial(self._newton, curvature, rows, y, weight / summed, penalty)
        begin = {"coef": (np.zeros((rows.shape[1], outputs)), penalty)}
        if self.fit_intercept:
            begin["intercept"] = np.zeros(outputs), 0.0
        found = self._learn(rows, y, weight, line, loss, begin, newton)
        self.coef_ = np.ascontiguousarray(found["coef"].T)
        self.intercept_ = found.get("intercept", np.zeros(outputs))
        return self

    def _newton(
        self, curvature: Curvature, rows: np.ndarray | Sparse, y: np.ndarray, share: np.ndarray, penalty: float,
        x: np.ndarray, gradient: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """The inverse Hessian times the gradient, at x (numbers,): each output has a Hessian of its own."""
        size, outputs = rows.shape[1] + self.fit_intercept, self.outputs
        hessians = np.zeros((outputs, size, size))
        for at in (slice(k, k + ROWS) for k in range(0, len(rows), ROWS)):
            some = rows[at] if isinstance(rows, np.ndarray) else rows[np.arange(len(rows))[at]].dense()
            some = np.column_stack([some, np.ones(len(some))]) if self.fit_intercept else some
            bent = curvature(some @ x.reshape(size, outputs), y[at]) * share[at, None]
            for k, column in enumerate(bent.T):
                (curved,) = np.nonzero(column)
                hessians[k] += (some[curved] * column[curved, None]).T @ some[curved]
        (hessians,) = self.workers.sum(hessians)
        diagonal = np.einsum("kii->ki", hessians)
        diagonal[:, : rows.shape[1]] += penalty
        root = np.sqrt(np.where(diagonal > 0, diagonal, 1))[..., None]  # by which columns are of one scale
        hessians /= root * root.swapaxes(1, 2)
        diagonal += NOTHING
        steps: np.ndarray = np.linalg.solve(hessians, gradient.reshape(size, outputs).T[..., None] / root) / root
        return steps[..., 0].T.reshape(-1)

    def _foretold(self, X: Any) -> np.ndarray:
        return self._rows(X) @ self.coef_.T + self.intercept_


@dataclass(eq=False, repr=False)
class LogisticRegression(_Linear, ByOdds):
    """Logistic regression of two classes, of more softmax regression, with an L2 penalty.

    Minimizes the sum of log losses, each times its weight, and |coef|^2 / (2 C); `C` may be math.inf.

    `coef_` (1 or classes, columns), `intercept_` (1 or classes,), `n_iter_`, `classes_`.

    >>> X, y = [[0.0], [1.0], [2.0], [3.0]], ["no", "no", "yes", "yes"]
    >>> model = LogisticRegression(C=10.0).fit(X, y)
    >>> model.predict([[0.5], [2.5]]).tolist(), model.predict_proba([[1.5]]).round(3).tolist()
    (['no', 'yes'], [[0.5, 0.5]])

    Sparse weights of many rare features, as H. B. McMahan et al. train them (KDD 2013):

    >>> from functools import partial
    >>> import hetu as ht
    >>> rare = LogisticRegression(C=float("inf"), solver=partial(ht.optim.FTRL, 1.0, l1=1e-3), batch_size=2)
    >>> rare.fit(X, y).score(X, y)
    1.0
    """

    rules = logistic_loss, logistic_targets, None


@dataclass(eq=False, repr=False)
class LinearSVC(_Linear):
    """A linear support vector machine with squared hinge losses; of several classes each against all others.

    Minimizes |coef|^2 / 2 and C times the sum of max(0, 1 - margin)^2, where the margin counts from its own side. As
    R.-E. Fan et al., "LIBLINEAR", JMLR 2008, but for the intercept, which is not penalized. Of few columns (256, or 80
    for ten classes) "lbfgs" is Newton's method, whose steps do not depend on the scales of columns (S. Keerthi, D.
    DeCoste, "A modified finite Newton method for fast solution of large scale linear SVMs", JMLR 2005).

    `coef_` (1 or classes, columns), `intercept_` (1 or classes,), `n_iter_`, `classes_`.

    >>> model = LinearSVC().fit([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
    >>> model.predict([[0.5], [2.5]]).tolist()
    [0, 1]
    """

    max_iter: AtLeast1 = dataclasses.field(default=1000, kw_only=True)

    rules = hinge_loss, hinge_targets, hinge_curvature
