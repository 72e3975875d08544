"""A Gaussian process: what is known of a function between the places where it was seen.

C. Rasmussen, C. Williams, "Gaussian Processes for Machine Learning", 2006, algorithm 2.1. The kernel is Matérn 5/2 with
a length for each column; lengths, scale and noise are where the marginal likelihood is greatest, under a prior. Its
lengths grow with the root of the number of columns (C. Hvarfner et al., ICML 2024). Left out: thousands of points.
"""

from __future__ import annotations

import math

import numpy as np

from ..core.errors import ArgumentError, ShapeError
from ..ml.inputs import matrix, vector
from ..ml.lbfgs import minimize

JITTER = 1e-8


class GaussianProcess:
    """A surrogate for a few hundred points with columns from 0 to 1, and values of about mean 0 and deviation 1.

    >>> x = np.linspace(0, 1, 6)[:, None]
    >>> model = GaussianProcess()
    >>> model.fit(x, np.sin(6 * x[:, 0]))
    >>> mean, std = model.foretell(np.array([[0.5]]))
    >>> bool(abs(mean[0] - np.sin(3)) < 0.05 and std[0] < 0.2)
    True
    """

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        """To the values y (points,) at x (points, columns)."""
        self.x = x = np.asarray(matrix(x, name="x"))
        y = vector(y, len(x)).astype(np.float64)
        start = np.log(np.array([*np.full(x.shape[1], 0.5 * math.sqrt(x.shape[1] / 2)), 1.0, 0.01]))
        prior = np.array([*np.full(x.shape[1], 1.0), 1.0, 2.0])  # standard deviations of the logarithms

        def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = self._likelihood(theta, y)
            away = (theta - start) / prior
            return value + 0.5 * float(away @ away), slope + away / prior

        self.theta = minimize(loss, start, max_iter=60).x
        kernel, _ = self._kernel(self.theta, x, x)
        self.triangle = np.linalg.cholesky(kernel + self._noise(self.theta, len(x)))
        self.weights = self._solved(y)

    def foretell(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the function at (points, columns)."""
        places = self._places(x)
        kernel, _ = self._kernel(self.theta, places, self.x)
        half = np.linalg.solve(self.triangle, kernel.T)
        left = math.exp(self.theta[-2]) - (half * half).sum(axis=0)
        return kernel @ self.weights, np.sqrt(np.maximum(left, 1e-12))

    def _places(self, x: np.ndarray) -> np.ndarray:
        """x, checked: ArgumentError before `fit`, ShapeError for other columns."""
        if not hasattr(self, "x"):
            raise ArgumentError("a process that has seen no points", fix="call fit(x, y) before")
        places = np.asarray(matrix(x, name="x"))
        if places.shape[1] != self.x.shape[1]:
            raise ShapeError(f"x of shape {places.shape}", fix=f"pass {self.x.shape[1]} columns, as to fit")
        return places

    def _noise(self, theta: np.ndarray, count: int) -> np.ndarray:
        return (math.exp(theta[-1]) + JITTER) * np.eye(count)

    def _solved(self, y: np.ndarray) -> np.ndarray:
        return np.linalg.solve(self.triangle.T, np.linalg.solve(self.triangle, y))

    def _kernel(self, theta: np.ndarray, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """s (1 + r + r^2 / 3) exp(-r) with r^2 = 5 sum of squares of differences by lengths; and what slopes share."""
        lengths, scale = np.exp(theta[:-2]), math.exp(theta[-2])
        r = math.sqrt(5) * np.sqrt((((a[:, None] - b) / lengths) ** 2).sum(axis=-1))
        falls = scale * np.exp(-r)
        return falls * (1 + r + r * r / 3), falls * (1 + r) * 5 / 3

    def _likelihood(self, theta: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """The negative logarithm of the marginal likelihood, and its gradient (eq. 5.9)."""
        count = len(y)
        kernel, shared = self._kernel(theta, self.x, self.x)
        try:
            self.triangle = np.linalg.cholesky(kernel + self._noise(theta, count))
        except np.linalg.LinAlgError:
            return math.inf, np.zeros_like(theta)
        weights = self._solved(y)
        inverse = np.linalg.inv(kernel + self._noise(theta, count))
        outer = inverse - np.outer(weights, weights)
        squares = ((self.x[:, None] - self.x) / np.exp(theta[:-2])) ** 2
        slope = [0.5 * np.einsum("ij,ij,ijk->k", outer, shared, squares)]
        slope += [0.5 * (outer * kernel).sum()[None], 0.5 * math.exp(theta[-1]) * np.trace(outer)[None]]
        value = 0.5 * float(y @ weights) + float(np.log(np.diag(self.triangle)).sum())
        return value, np.concatenate(slope)
