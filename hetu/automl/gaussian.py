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
LEARNED = 200  # points that lengths are learned from at most: each of dozens of steps takes the cube of their number


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
        some = slice(None, None, len(x) // LEARNED + 1)
        self.squares = self._squares(x[some])

        def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
            value, slope = self._likelihood(theta, y[some])
            away = (theta - start) / prior
            return value + 0.5 * float(away @ away), slope + away / prior

        self.theta, self.squares = minimize(loss, start, max_iter=60).x, self._squares(x)
        self.weights = self._factored(self.theta, y)[0]

    def foretell(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the function at (points, columns)."""
        places = self._places(x)
        a, b = places / np.exp(self.theta[:-2]), self.x / np.exp(self.theta[:-2])
        squares = (a * a).sum(axis=1)[:, None] + (b * b).sum(axis=1) - 2 * a @ b.T
        kernel, _ = self._kernel(self.theta, np.maximum(squares, 0))
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

    def _squares(self, x: np.ndarray) -> np.ndarray:
        """(pairs of points, columns): of all differences."""
        found: np.ndarray = ((x[:, None] - x) ** 2).reshape(-1, x.shape[1])
        return found

    def _kernel(self, theta: np.ndarray, squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """s (1 + r + r^2 / 3) exp(-r) with r^2 = 5 sum of squares of differences by lengths; and what slopes share."""
        r = np.sqrt(5 * squares)
        falls = math.exp(theta[-2]) * np.exp(-r)
        return falls * (1 + r + r * r / 3), falls * (1 + r) * 5 / 3

    def _factored(self, theta: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Factor the kernel of the points: its inverse by y, itself, and what slopes share."""
        squares = (self.squares @ np.exp(-2 * theta[:-2])).reshape(len(y), len(y))
        kernel, shared = self._kernel(theta, squares)
        self.triangle = np.linalg.cholesky(kernel + (math.exp(theta[-1]) + JITTER) * np.eye(len(y)))
        return np.linalg.solve(self.triangle.T, np.linalg.solve(self.triangle, y)), kernel, shared

    def _likelihood(self, theta: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """The negative logarithm of the marginal likelihood, and its gradient (eq. 5.9)."""
        try:
            weights, kernel, shared = self._factored(theta, y)
        except np.linalg.LinAlgError:
            return math.inf, np.zeros_like(theta)
        root = np.linalg.inv(self.triangle)
        outer = root.T @ root - np.outer(weights, weights)
        lengths = np.exp(-2 * theta[:-2]) * ((outer * shared).ravel() @ self.squares)
        slope = 0.5 * np.array([*lengths, (outer * kernel).sum(), math.exp(theta[-1]) * np.trace(outer)])
        return 0.5 * float(y @ weights) + float(np.log(np.diag(self.triangle)).sum()), slope
