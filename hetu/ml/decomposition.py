"""Rows as sums of a few components: principal ones, by singular values; and the singular values of many rows.

Left out: kernels, components that are sparse, a number of components by maximum likelihood.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np

from ..core.errors import ArgumentError
from ..ranges import AtLeast1, OneOf, Range, Seed
from .clusters import blocks
from .estimator import Transformer
from .inputs import Sparse, matrix
from .workers import Workers, total

EXTRA = 10  # directions beside those asked for, as Halko et al. advise
PASSES = 7  # over the rows and back


@dataclass(frozen=True)
class Shifted:
    """`rows` less the outer product of two vectors, which stays apart so that zeros of sparse rows need no place."""

    rows: Any
    left: np.ndarray
    right: np.ndarray

    @property
    def T(self) -> Shifted:
        """The transpose."""
        return Shifted(self.rows.T, self.right, self.left)

    def __matmul__(self, other: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.rows @ other - np.outer(self.left, self.right @ other)
        return found


def leading(workers: Workers, rows: Any, shape: tuple[int, int], size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The greatest `size` singular values of the rows of all workers, of `shape`, and right vectors (size, columns).

    A random space of a few more directions is turned towards them by products with the rows and their transpose
    (N. Halko, P. Martinsson, J. Tropp, "Finding structure with randomness", 2011, algorithms 4.4 and 5.1). Values
    below 1e-8 of the greatest one are not exact.
    """
    space = np.random.default_rng(seed).normal(size=(shape[1], min(size + EXTRA, *shape)))
    for _ in range(PASSES):
        (turned,) = workers.sum(rows.T @ (rows @ space))
        space = np.linalg.qr(turned).Q
    _, values, vectors = np.linalg.svd(workers.triangle(rows @ space), full_matrices=False)
    return values[:size], signed(vectors[:size] @ space.T)


def signed(vectors: np.ndarray) -> np.ndarray:
    """Each with the sign for which its greatest entry is above 0."""
    greatest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1)
    found: np.ndarray = vectors * np.where(greatest < 0, -1, 1)
    return found


@dataclass(eq=False, repr=False)
class PCA(Transformer):
    """Principal components: the directions in which rows vary most (K. Pearson, 1901; H. Hotelling, 1933).

    `n_components` may be a share of the variance that components have to explain. Solvers: "full" is exact, by a QR
    decomposition of the rows of all workers; "covariance_eigh" has half the digits and is faster for many rows;
    "randomized" is for few of many components, and the one for sparse rows. "auto" chooses as scikit-learn does.

    Fitted: `components_` (n_components, columns), orthogonal, of length 1, the greatest entry above 0; `mean_`,
    `explained_variance_`, `explained_variance_ratio_`, `singular_values_`, `n_components_`. ArgumentError for more
    components than rows or columns.

    >>> import numpy as np
    >>> model = PCA(1).fit(np.array([[0.0, 0.0], [1.0, 2.0], [2.0, 4.0]]))
    >>> (model.components_ / model.components_[0, 0]).round(6).tolist(), model.explained_variance_ratio_.round(6)
    ([[1.0, 2.0]], array([1.]))
    """

    sparse = True

    n_components: AtLeast1 | Annotated[float, Range(0, 1, open="both")] | None = None
    whiten: bool = False
    svd_solver: Annotated[str, OneOf("auto", "full", "covariance_eigh", "randomized")] = "auto"
    random_state: Seed = 0

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Rows (rows, columns), of this worker; y is not looked at."""
        rows = self._begin(X)
        weight = self._weights(sample_weight, len(rows))
        count, whole = total(self.workers, [len(rows), weight.sum()])
        most = min(int(count), rows.shape[1])
        if isinstance(self.n_components, int) and self.n_components > most:
            raise ArgumentError(
                f"n_components={self.n_components} must be between 1 and min(n_samples, n_features)={most}",
                fix="ask for fewer components",
            )
        (summed,) = self.workers.sum(rows.T @ weight[:, None])
        self.mean_ = summed[:, 0] / whole
        values, vectors, spread = self._solved(rows, np.sqrt(weight), int(count), most)
        shares = values**2 / (spread or 1)
        size = self.n_components or most
        if isinstance(size, float):
            size = min(int(np.searchsorted(np.cumsum(shares), size)) + 1, most)
        self.n_components_, self.components_, self.singular_values_ = size, vectors[:size], values[:size]
        self.explained_variance_ = self.singular_values_**2 / max(whole - 1, 1)
        self.explained_variance_ratio_ = shares[:size]
        return self

    def _solver(self, rows: Any, count: int, most: int) -> str:
        if isinstance(rows, Sparse):
            if self.svd_solver not in ("auto", "randomized"):
                raise ArgumentError(f"PCA of sparse rows with svd_solver={self.svd_solver!r}", fix="use 'randomized'")
            return "randomized"
        width = rows.shape[1]
        if self.svd_solver != "auto":
            return self.svd_solver
        if width <= 1000 and count >= 10 * width:
            return "covariance_eigh"
        few = isinstance(self.n_components, int) and self.n_components < 0.8 * most
        return "randomized" if few and max(count, width) > 500 else "full"

    def _solved(self, rows: Any, roots: np.ndarray, count: int, most: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Singular values of the rows of all workers, centered and times `roots`; right vectors; the sum of squares."""
        solver, width = self._solver(rows, count, most), rows.shape[1]
        if solver == "covariance_eigh":
            products = np.zeros((width, width))
            for block in blocks(len(rows), width):
                part = (rows[block] - self.mean_) * roots[block, None]
                products += part.T @ part
            (products,) = self.workers.sum(products)
            squares, vectors = np.linalg.eigh(products)
            return np.sqrt(squares.clip(0)[::-1][:most]), signed(vectors.T[::-1][:most]), float(np.trace(products))
        centered: Any
        if isinstance(rows, Sparse):
            heavy = Sparse(rows.starts, rows.columns, rows.values * roots[rows.rows], rows.shape)
            own = heavy.values @ heavy.values - (roots @ roots) * (self.mean_ @ self.mean_)
            centered = Shifted(heavy, roots, self.mean_)
        else:
            centered = (rows - self.mean_) * roots[:, None]
            own = np.vdot(centered, centered)
        spread = total(self.workers, [own])[0]
        if solver == "full":
            _, values, vectors = np.linalg.svd(self.workers.triangle(centered), full_matrices=False)
            return values[:most], signed(vectors[:most]), spread
        size = most if self.n_components is None or isinstance(self.n_components, float) else self.n_components
        return *leading(self.workers, centered, (count, width), size, self.random_state), spread

    def transform(self, X: Any) -> np.ndarray:
        """(rows, n_components): the place of each row along the components."""
        rows, components = self._rows(X), self.components_.T
        if self.whiten:
            components = components / np.sqrt(self.explained_variance_).clip(np.finfo(float).tiny)
        found: np.ndarray = rows @ components - self.mean_ @ components
        return found

    def inverse_transform(self, X: Any) -> np.ndarray:
        """(rows, columns) of places (rows, n_components) along the components."""
        self._check_fitted()
        scales = np.sqrt(self.explained_variance_) if self.whiten else 1
        found: np.ndarray = (np.asarray(matrix(X)) * scales) @ self.components_ + self.mean_
        return found
