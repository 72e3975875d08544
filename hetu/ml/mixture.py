"""A mixture of normal distributions, fitted by expectation-maximization (A. Dempster, N. Laird, D. Rubin, 1977).

A step is one pass over blocks of rows: the share that each component has in each row, and sums of rows by shares.
Left out: priors (variational mixtures), sparse rows.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        whole, count = total(self.workers, [weight.sum(), len(rows)])
        if count < self.n_components:
            text = f"Expected n_samples >= n_components but got n_components = {self.n_components}"
            raise DataError(f"{text}, n_samples = {int(count)}", fix="ask for fewer components")
        runs = [self._climb(rows, weight, whole, start) for start in range(self.n_init)]
        bounds = np.array([run["lower_bound_"] for run in runs])
        vars(self).update(runs[int(np.argmax(bounds >= bounds.max() - ROUNDING * np.abs(bounds.max())))])
        return self

    def _climb(self, rows: np.ndarray, weight: np.ndarray, whole: float, start: int) -> dict[str, Any]:
        """What is known at the end of one start, by the names of attributes."""
        clusters = KMeans(self.n_components, random_state=self.random_state + start, comm=self.comm)
        self.means_ = clusters.fit(rows, sample_weight=weight).cluster_centers_
        self._maximize(*self._sums(rows, weight, clusters.labels_)[1:])
        self.lower_bound_, self.converged_, self.n_iter_ = -np.inf, False, 0
        while self.n_iter_ < self.max_iter and not self.converged_:
            likelihood, *sums = self._sums(rows, weight)
            self._maximize(*sums)
            before, self.lower_bound_ = self.lower_bound_, float(likelihood) / whole
            self.converged_ = abs(self.lower_bound_ - before) < self.tol
            self.n_iter_ += 1
        return {name: value for name, value in vars(self).items() if name not in self.get_params()}

    @property
    def _diagonal(self) -> bool:
        return self.covariance_type in ("diag", "spherical")

    def _apart(self, rows: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        """Blocks of rows, less the mean of each component: (n_components, rows, columns). So no digits are lost."""
        for block in blocks(len(rows), self.means_.size):
            yield block, rows[block] - self.means_[:, None]

    def _sums(self, rows: np.ndarray, weight: np.ndarray, labels: np.ndarray | None = None) -> list[np.ndarray]:
        """Over the rows of all workers: of log-densities; for each component, to which rows belong by their shares or
        their labels, of what they count, of what they are apart from its mean, and of the products of that."""
        size, width = self.means_.shape
        sums = [np.zeros(shape) for shape in ((), size, (size, width), (size, width, *[width] * (not self._diagonal)))]
        for block, apart in self._apart(rows):
            if labels is None:
                likely, shares = _shared(self._logs(apart))
                sums[0] += weight[block] @ likely
            else:
                shares = np.eye(size)[labels[block]]
            shares = (shares * weight[block, None]).T[:, None]
            sums[1] += shares.sum(axis=(1, 2))
            sums[2] += (shares @ apart)[:, 0]
            sums[3] += (shares @ apart**2)[:, 0] if self._diagonal else (apart.swapaxes(1, 2) * shares) @ apart
        return self.workers.sum(*sums)

    def _maximize(self, counts: np.ndarray, sums: np.ndarray, products: np.ndarray) -> None:
        counts = counts + 10 * np.finfo(float).eps
        self.weights_, moves = counts / counts.sum(), sums / counts[:, None]
        self.means_ = self.means_ + moves
        if self._diagonal:
            found = products / counts[:, None] - moves**2 + self.reg_covar
            found = found if self.covariance_type == "diag" else found.mean(axis=1)
        else:
            found = products / counts[:, None, None] - moves[:, :, None] * moves[:, None]
            found = np.tensordot(self.weights_, found, 1) if self.covariance_type == "tied" else found
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
        found, width = self.covariances_, self.means_.shape[1]
        if not self._diagonal:
            return np.linalg.cholesky(found.reshape(-1, width, width))
        if (found <= 0).any():
            raise np.linalg.LinAlgError
        lower = np.sqrt(found.reshape(len(found), -1)) * np.ones(width)
        return lower

    def _logs(self, apart: np.ndarray) -> np.ndarray:
        """(rows, n_components): the log-density with their component of rows that are so far apart from the means."""
        roots = self._roots
        if self._diagonal:
            squares, sizes = (apart**2 @ roots[:, :, None] ** 2)[:, :, 0].T, np.log(roots).sum(axis=1)
        else:
            places, sizes = apart @ roots, np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)
            squares = np.einsum("knd,knd->nk", places, places)
        return np.log(self.weights_) + sizes - 0.5 * (squares + apart.shape[2] * np.log(2 * np.pi))

    def _foretold(self, X: Any) -> np.ndarray:
        """The same of rows."""
        return np.concatenate([self._logs(apart) for _, apart in self._apart(self._rows(X))])

    def score_samples(self, X: Any) -> np.ndarray:
        """(rows,): the log-density of each row."""
        return _shared(self._foretold(X))[0]

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, n_components): the share of each component in each row."""
        return _shared(self._foretold(X))[1]

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the component with the greatest share."""
        return self._foretold(X).argmax(axis=1)

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
