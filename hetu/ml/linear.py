"""Linear models of numbers, by exact least squares: from one triangle of all rows, or, of a sparse X, step by step.

Left out: positive coefficients, a penalty for each output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from ..ranges import AtLeast0
from .estimator import Regressor
from .inputs import Sparse
from .workers import Workers

CONSTANT = 1e-12  # the share of a column that may be rounding: one which varies no more is constant
NEAR = 1e-12  # what is left of the right side where conjugate gradients end


@dataclass(eq=False, repr=False)
class _LeastSquares(Regressor):
    """Minimizes the sum of squares of X coef + intercept - y, and alpha |coef|^2."""

    sparse = True

    fit_intercept: bool = dataclasses.field(default=True, kw_only=True)

    alpha: ClassVar[float] = 0.0

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """X (rows, columns) and y (rows,) or (rows, outputs)."""
        rows = self._begin(X)
        y = self._numbers(y, len(rows), outputs=True)
        weight = self._weights(sample_weight, len(rows))[:, None]
        columns = y.reshape(len(y), -1)
        solve = _stepwise if isinstance(rows, Sparse) else _exact
        coef, intercept = solve(self.workers, rows, columns, weight, self.alpha, self.fit_intercept)
        self.coef_: np.ndarray = coef.T if y.ndim == 2 else coef[:, 0]
        self.intercept_: Any = intercept if y.ndim == 2 else float(intercept[0])
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(rows,) or (rows, outputs)."""
        found: np.ndarray = self._rows(X) @ np.atleast_2d(self.coef_).T + self.intercept_
        return found if np.ndim(self.coef_) == 2 else found[:, 0]


def _exact(
    workers: Workers, X: np.ndarray, y: np.ndarray, weight: np.ndarray, alpha: float, intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    """By QR: behind a column of ones, X and y lie in the triangle without their means."""
    width = X.shape[1]
    whole = np.concatenate([*[np.ones((len(X), 1))] * intercept, X, y], axis=1)
    triangle = workers.triangle(whole if (weight == 1).all() else np.multiply(whole, np.sqrt(weight), out=whole))
    means, size = np.zeros(width + y.shape[1]), np.linalg.norm(triangle, axis=0)
    if intercept:
        means, size, triangle = triangle[0, 1:] / triangle[0, 0], size[1:], triangle[1:, 1:]
    left, right, coef = triangle[:, :width], triangle[:, width:], np.zeros((width, y.shape[1]))
    varies = np.linalg.norm(left, axis=0) > CONSTANT * size[:width]
    coef[varies] = _smallest(left[:, varies], right, alpha)
    return coef, means[width:] - means[:width] @ coef


def _smallest(left: np.ndarray, right: np.ndarray, alpha: float) -> np.ndarray:
    """Coefficients of the least squares, and of equally good ones the smallest.

    Columns are scaled first, as else those of large numbers would drown the others. Only where these leave no one
    answer does it matter which is the smallest, and of which numbers.
    """
    if alpha:
        left = np.concatenate([left, np.sqrt(alpha) * np.eye(left.shape[1])])
        right = np.concatenate([right, np.zeros((left.shape[1], right.shape[1]))])
    sizes = np.linalg.norm(left, axis=0)
    found, _, rank, _ = np.linalg.lstsq(left / sizes, right, rcond=None)
    coef: np.ndarray = found / sizes[:, None]
    return coef if rank == left.shape[1] else np.linalg.lstsq(left, right, rcond=None)[0]


def _stepwise(
    workers: Workers, X: Sparse, y: np.ndarray, weight: np.ndarray, alpha: float, intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    """By conjugate gradients; columns are scaled, and X - means is never made, which would not be sparse."""
    every = weight[X.rows, 0] * X.values
    sums = [np.bincount(X.columns, each, X.shape[1]) for each in (every, every * X.values)]
    first, second, level, size = workers.sum(*sums, (weight * y).sum(axis=0), weight.sum(axis=0))
    means, level = intercept * first / size, intercept * level / size
    spread = second - size * means**2
    varies = spread > CONSTANT * second
    scale = np.sqrt(varies / np.where(varies, spread + alpha, 1))[:, None]

    def back(errors: np.ndarray) -> np.ndarray:
        """(X - means)' errors, of all workers' rows."""
        return scale * workers.sum(X.back(errors) - np.outer(means, errors.sum(axis=0)))[0]

    def squared(coef: np.ndarray) -> np.ndarray:
        """The matrix of the normal equations, times scaled coefficients."""
        scaled = scale * coef
        return back(weight * (X @ scaled - means @ scaled)) + alpha * scale * scaled

    coef = scale * _conjugate(squared, back(weight * (y - level)))
    return coef, level - means @ coef


def _conjugate(times: Callable[[np.ndarray], np.ndarray], right: np.ndarray) -> np.ndarray:
    """x, of which a symmetric matrix makes `right`. J. Nocedal, S. Wright, "Numerical Optimization", 2006, alg. 5.2."""
    x, left, way = np.zeros_like(right), right, right
    square = first = float(np.sum(right * right))
    for _ in range(10 * right.size):
        if square <= NEAR**2 * first:
            break
        product = times(way)
        step = square / np.sum(way * product)
        x, left = x + step * way, left - step * product
        square, before = float(np.sum(left * left)), square
        way = left + (square / before) * way
    return x


@dataclass(eq=False, repr=False)
class LinearRegression(_LeastSquares):
    """Ordinary least squares, weighted by rows; of equally good coefficients the smallest.

    `coef_` (columns,) or (outputs, columns), `intercept_`. X may be sparse: then of coefficients of scaled columns.

    >>> model = LinearRegression().fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> model.predict([[10.0]]).round(6).tolist()
    [21.0]
    """


@dataclass(eq=False, repr=False)
class Ridge(_LeastSquares):
    """Least squares with a penalty alpha |coef|^2. A. Hoerl, R. Kennard, "Ridge Regression", Technometrics 1970.

    `coef_` (columns,) or (outputs, columns), `intercept_`, which is not penalized. X may be sparse.

    >>> model = Ridge(alpha=2.0).fit([[0.0], [1.0], [2.0]], [1.0, 3.0, 5.0])
    >>> model.coef_.round(6).tolist(), round(model.intercept_, 6)
    ([1.0], 2.0)
    """

    alpha: AtLeast0 = 1.0  # type: ignore[misc]
