"""A mixture of normal distributions, fitted by expectation-maximization (A. Dempster, N. Laird, D. Rubin, 1977).

A step is one pass over blocks of rows: the share that each component has in each row, and sums of rows by shares.
Left out: priors (variational mixtures), sparse rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np

from ..core.errors import DataError
from ..ranges import AtLeast0, AtLeast1, OneOf, Seed
from .clusters import ROUNDING, KMeans, blocks
from .estimator import Estimator
from .workers import total


@dataclass(eq=False, repr=False)
class GaussianMixture(Estimator):
    """Normal distributions, mixed: each has covariances of its own ("full"), variances ("diag") or one variance
    ("spherical"), or all have the same covariances ("tied"). It starts from the clusters of `KMeans`.

    Fitted: `weights_` (n_components,), `means_` (n_components, columns), `covariances_` of the shape of their type,
    `converged_` (by less than `tol` in the mean log-likelihood of a row), `n_iter_`, `lower_bound_`. DataError where
    a component has no density: fewer different rows than it needs.

    >>> import numpy as np
    >>> model = GaussianMixture(2).fit(np.array([[0.0], [1.0], [10.0], [11.0]]))
    >>> np.sort(model.means_, axis=0).ravel().round(6).tolist()
    [0.5, 10.5]
    """

    kind = "density_estimator"

    n_components: AtLeast1 = 1
    covariance_type: Annotated[str, OneOf("full", "tied", "diag", "spherical")] = "full"
    tol: AtLeast0 = 1e-3
    reg_covar: AtLeast0 = 1e-6
    max_iter: AtLeast1 = 100
    n_init: AtLeast1 = 1
    random_state: Seed = 0

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Rows (rows, columns), of this worker; y is not looked at."""
        rows = self._begin(X)
        weight, _ = self._relative(self._weights(sample_weight, len(rows)))
        summed, whole = self.workers.sum(weight @ rows, weight.sum(keepdims=True))
        self._middle = summed / whole
        rows = rows - self._middle  # digits of products
        runs = [self._climb(rows, weight, float(whole[0]), start) for start in range(self.n_init)]
        bounds = np.array([run["lower_bound_"] for run in runs])
        vars(self).update(runs[int(np.argmax(bounds >= bounds.max() - ROUNDING * np.abs(bounds.max())))])
        self.means_ = self._means + self._middle
        return self

    def _climb(self, rows: np.ndarray, weight: np.ndarray, whole: float, start: int) -> dict[str, Any]:
        """What is known at the end of one start, by the names of attributes."""
        clusters = KMeans(self.n_components, random_state=self.random_state + start, comm=self.comm)
        shares = np.eye(self.n_components)[clusters.fit(rows, sample_weight=weight).labels_]
        self._maximize(*self.workers.sum(*self._sums(rows, weight[:, None] * shares)))
        self.lower_bound_, self.converged_, self.n_iter_ = -np.inf, False, 0
        while self.n_iter_ < self.max_iter and not self.converged_:
            sums: list[np.ndarray] = []
            for block in blocks(len(rows), self.n_components * (1 if self._diagonal else rows.shape[1])):
                likely, shares = _shared(self._logs(rows[block]))
                found = [weight[block] @ likely, *self._sums(rows[block], shares * weight[block, None])]
                sums = [a + b for a, b in zip(sums, found)] if sums else found
            likelihood, *sums = self.workers.sum(*sums)
            self._maximize(*sums)
            before, self.lower_bound_ = self.lower_bound_, float(likelihood) / whole
            self.converged_ = abs(self.lower_bound_ - before) < self.tol
            self.n_iter_ += 1
        return {name: value for name, value in vars(self).items() if name not in self.get_params()}

    @property
    def _diagonal(self) -> bool:
        return self.covariance_type in ("diag", "spherical")

    def _sums(self, rows: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
        """Of what rows count for each component, of rows, and of their products."""
        if self._diagonal:
            products = shares.T @ rows**2
        else:
            each = shares.T if self.covariance_type == "full" else shares.sum(axis=1)[None]
            products = np.stack([(rows * share[:, None]).T @ rows for share in each])
        return [shares.sum(axis=0), shares.T @ rows, products]

    def _maximize(self, counts: np.ndarray, sums: np.ndarray, products: np.ndarray) -> None:
        counts = counts + 10 * np.finfo(float).eps
        self.weights_, self._means = counts / counts.sum(), sums / counts[:, None]
        means = self._means
        if self._diagonal:
            found = products / counts[:, None] - means**2 + self.reg_covar
            found = found if self.covariance_type == "diag" else found.mean(axis=1)
        else:
            squares = means[:, :, None] * means[:, None]
            if self.covariance_type == "tied":
                found = (products[0] - np.tensordot(counts, squares, 1)) / counts.sum()
            else:
                found = products / counts[:, None, None] - squares
            found = found + self.reg_covar * np.eye(found.shape[-1])
        self.covariances_ = found
        try:
            self._roots = 1 / self._lower() if self._diagonal else np.swapaxes(np.linalg.inv(self._lower()), -1, -2)
        except np.linalg.LinAlgError:
            raise DataError(
                "Fitting the mixture model failed because some components have ill-defined covariances",
                fix="decrease the number of components, or increase reg_covar",
            ) from None

    def _lower(self) -> np.ndarray:
        """What makes noise of each component of noise of variance 1: (n_components or 1, columns, columns), or scales
        (n_components, columns); LinAlgError where there is no density."""
        found, width = self.covariances_, self._means.shape[1]
        if not self._diagonal:
            lower: np.ndarray = np.linalg.cholesky(found.reshape(-1, width, width))
            return lower
        if (found <= 0).any():
            raise np.linalg.LinAlgError
        lower = np.sqrt(found.reshape(len(found), -1)) * np.ones(width)
        return lower

    def _logs(self, rows: np.ndarray) -> np.ndarray:
        """(rows, n_components): the log-density of rows, less the middle, with their component."""
        roots, means, width = self._roots, self._means, rows.shape[1]
        if self._diagonal:
            squares = rows**2 @ (roots**2).T - 2 * rows @ (means * roots**2).T + ((means * roots) ** 2).sum(axis=1)
            sizes = np.log(roots).sum(axis=1)
        else:
            places = (rows @ np.concatenate([*roots], axis=1)).reshape(len(rows), len(roots), width)
            places = places - (means[:, None] @ roots)[:, 0]
            squares = np.einsum("nkd,nkd->nk", places, places)
            sizes = np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)
        logs: np.ndarray = np.log(self.weights_) + sizes - 0.5 * (squares + width * np.log(2 * np.pi))
        return logs

    def score_samples(self, X: Any) -> np.ndarray:
        """(rows,): the log-density of each row."""
        return _shared(self._logs(self._rows(X) - self._middle))[0]

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, n_components): the share of each component in each row."""
        return _shared(self._logs(self._rows(X) - self._middle))[1]

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the component with the greatest share."""
        best: np.ndarray = self._logs(self._rows(X) - self._middle).argmax(axis=1)
        return best

    def fit_predict(self, X: Any, y: Any = None, sample_weight: Any = None) -> np.ndarray:
        """`fit`, and the component of each row."""
        return self.fit(X, y, sample_weight).predict(X)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The mean log-density of the rows of all workers."""
        logs = self.score_samples(X)
        weight = self._weights(sample_weight, len(logs))
        summed, whole = total(self.workers, [weight @ logs, weight.sum()])
        return summed / whole

    def sample(self, n_samples: AtLeast1 = 1) -> tuple[np.ndarray, np.ndarray]:
        """Rows (n_samples, columns) that the mixture makes, and the component of each, in its order."""
        self._check_fitted()
        rng = np.random.default_rng(self.random_state)
        of = np.repeat(np.arange(self.n_components), rng.multinomial(n_samples, self.weights_))
        noise, lower = rng.normal(size=(n_samples, self.n_features_in_)), self._lower()
        lower = np.broadcast_to(lower, (self.n_components, *lower.shape[1:]))[of]
        noise = noise * lower if self._diagonal else (lower @ noise[:, :, None])[:, :, 0]
        return self.means_[of] + noise, of

    def _free(self) -> int:
        """How many numbers a fit chooses."""
        size, width = self.n_components, int(self.n_features_in_)
        triangle = width * (width + 1) // 2
        of_type: dict[str, int] = {"full": size * triangle, "tied": triangle, "diag": size * width, "spherical": size}
        return of_type[self.covariance_type] + size * width + size - 1

    def bic(self, X: Any) -> float:
        """The Bayesian information criterion of these rows: lower is better (G. Schwarz, 1978)."""
        count = total(self.workers, [len(self._rows(X))])[0]
        return -2 * self.score(X) * count + self._free() * float(np.log(count))

    def aic(self, X: Any) -> float:
        """Akaike's information criterion of these rows: lower is better (H. Akaike, 1974)."""
        return -2 * self.score(X) * total(self.workers, [len(self._rows(X))])[0] + 2 * self._free()


def _shared(logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The log of the sum of exp along the last axis, and the share of each in it."""
    shares = np.exp(logs - (most := logs.max(axis=1, keepdims=True)))
    summed = shares.sum(axis=1, keepdims=True)
    return (most + np.log(summed))[:, 0], shares / summed
