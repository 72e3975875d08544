"""Factorization machines: a linear model, and for each pair of columns the product of their vectors.

S. Rendle, "Factorization Machines", ICDM 2010. Left out: products of three columns, vectors for fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from .. import ops
from ..core.graph import Node
from ..ranges import AtLeast0, AtLeast1
from .estimator import Regressor
from .gradient import Dense, Learner, Loss
from .inputs import Sparse
from .margins import ByOdds, line, logistic_loss, logistic_targets

SPREAD = 0.01  # of the first vectors


def _margins(x: Dense, coef: Node, factors: Node, intercept: Node | None = None) -> Node:
    """(rows, outputs), of `factors` (columns, outputs * n_factors)."""
    outputs = int(coef.shape[1])
    shape = -1, outputs, int(factors.shape[1]) // outputs
    sums, squares = ops.reshape(x.times(factors), shape), ops.reshape(x.squares(factors), shape)
    return line(x, coef, intercept) + ops.pairs_of_sums(sums, squares)


@dataclass(eq=False, repr=False)
class _Machine(Learner):
    """intercept + X coef + the sum of x_i x_j <v_i, v_j> over pairs of columns, by equation 5 in linear time."""

    sparse = True

    n_factors: AtLeast1 = 8
    alpha: AtLeast0 = 1e-4
    alpha_factors: AtLeast0 = 1e-2
    fit_intercept: bool = True
    max_iter: AtLeast1 = dataclasses.field(default=200, kw_only=True)

    def _fitted(self, rows: np.ndarray | Sparse, targets: np.ndarray, weight: np.ndarray, loss: Loss, n: int) -> Self:
        """Fit `n` outputs."""
        shape, rng = (rows.shape[1], n * self.n_factors), np.random.default_rng(self.random_state)
        begin: dict[str, tuple[np.ndarray, float]] = {"coef": (np.zeros((rows.shape[1], n)), self.alpha)}
        begin["factors"] = rng.normal(scale=SPREAD, size=shape), self.alpha_factors
        if self.fit_intercept:
            begin["intercept"] = np.zeros(n), 0.0
        found = self._learn(rows, targets, weight, _margins, loss, begin)
        self.coef_ = np.ascontiguousarray(found["coef"].T)
        self.factors_ = found["factors"].reshape(-1, n, self.n_factors).transpose(1, 0, 2)
        self.intercept_ = found.get("intercept", np.zeros(n))
        return self

    def _foretold(self, X: Any) -> np.ndarray:
        """(rows, outputs)."""
        rows = self._rows(X)
        squares = dataclasses.replace(rows, values=rows.values**2) if isinstance(rows, Sparse) else rows**2
        made = [np.sum((rows @ v) ** 2 - squares @ v**2, axis=1) for v in self.factors_]
        return rows @ self.coef_.T + self.intercept_ + 0.5 * np.stack(made, axis=1)


@dataclass(eq=False, repr=False)
class FactorizationMachineClassifier(_Machine, ByOdds):
    """A factorization machine of two classes by logistic loss, of more by softmax.

    Minimizes the mean of log losses, `alpha` / 2 |coef|^2 and `alpha_factors` / 2 |factors|^2.

    `coef_` (1 or classes, columns), `factors_` (1 or classes, columns, n_factors), `intercept_`, `n_iter_`, `classes_`.

    >>> X = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    >>> FactorizationMachineClassifier(alpha_factors=1e-3).fit(X, [0, 1, 1, 0]).predict(X).tolist()
    [0, 1, 1, 0]
    """

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """X (rows, columns), dense or sparse, and y (rows,), the class of each row; DataError for a single class."""
        rows = self._begin(X)
        numbers = self._classes(y, len(rows))
        weight = self._weights(sample_weight, len(rows))
        return self._fitted(rows, logistic_targets(numbers, self.outputs), weight, logistic_loss, self.outputs)


@dataclass(eq=False, repr=False)
class FactorizationMachineRegressor(_Machine, Regressor):
    """A factorization machine that foretells numbers.

    Minimizes the mean of half the squared errors, `alpha` / 2 |coef|^2 and `alpha_factors` / 2 |factors|^2.

    `coef_` (1, columns), `factors_` (1, columns, n_factors), `intercept_` (1,), `n_iter_`.

    >>> X = [[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]]
    >>> model = FactorizationMachineRegressor(alpha=0.0, alpha_factors=0.0).fit(X, [1.0, 2.0, 2.0, 6.0])
    >>> model.predict(X).round(2).tolist()
    [1.0, 2.0, 2.0, 6.0]
    """

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """X (rows, columns), dense or sparse, and y (rows,)."""
        rows = self._begin(X)
        targets, weight = self._numbers(y, len(rows))[:, None], self._weights(sample_weight, len(rows))
        return self._fitted(rows, targets, weight, _squared_loss, 1)

    def predict(self, X: Any) -> np.ndarray:
        return self._foretold(X)[:, 0]


def _squared_loss(margins: Node, y: Node) -> Node:
    return 0.5 * ops.sum(ops.square(margins - y), axis=1)
