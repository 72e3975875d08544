"""Rows as sums of a few components: orthogonal ones (PCA), and ones without negative numbers (NMF).

Left out: kernels, components that are sparse, a number of components by maximum likelihood, other losses of NMF.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np

from ..core.errors import ArgumentError
from ..ranges import AtLeast0, AtLeast1, OneOf, Range, Seed
from .clusters import blocks, squares_of
from .estimator import Transformer
from .inputs import Sparse, matrix
from .workers import Workers, total

EXTRA = 10  # directions beside those asked for, as Halko et al. advise
PASSES = 6  # over the rows and back


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
        return self.rows @ other - np.outer(self.left, self.right @ other)


def leading(workers: Workers, rows: Any, shape: tuple[int, int], size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The greatest `size` singular values of the rows of all workers, of `shape`, and right vectors (size, columns).

    A random space of a few more directions is turned towards them by products with the rows and their transpose
    (N. Halko, P. Martinsson, J. Tropp, "Finding structure with randomness", 2011, algorithms 4.4 and 5.1), and the best
    is taken of all that it was on the way (C. Musco, C. Musco, "Randomized Block Krylov Methods", NeurIPS 2015), which
    comes closer where values are alike. Values below 1e-8 of the greatest one are not exact.
    """
    space, found = np.random.default_rng(seed).normal(size=(shape[1], min(size + EXTRA, *shape))), list[np.ndarray]()
    for _ in range(PASSES):
        (turned,) = workers.sum(rows.T @ (rows @ space))
        space = np.linalg.qr(turned).Q
        found.append(space)
    space = np.linalg.qr(np.concatenate(found, axis=1)).Q
    _, values, vectors = np.linalg.svd(workers.triangle(rows @ space), full_matrices=False)
    return values[:size], signed(vectors[:size] @ space.T)


def scaled(rows: Any, by: np.ndarray) -> Any:
    """Each row times a number."""
    if isinstance(rows, Sparse):
        return Sparse(rows.starts, rows.columns, rows.values * by[rows.rows], rows.shape)
    return rows * by[:, None]


def signed(vectors: np.ndarray) -> np.ndarray:
    """Each with the sign for which its greatest entry is above 0."""
    greatest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=1)[:, None], axis=1)
    return vectors * np.where(greatest < 0, -1, 1)


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

    n_components: AtLeast1 | Annotated[float, Range(0, 1, open="both")] | None = None
    whiten: bool = False
    svd_solver: Annotated[str, OneOf("auto", "full", "covariance_eigh", "randomized")] = "auto"
    random_state: Seed = 0

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        """Whether the solver takes sparse rows."""
        return self.svd_solver in ("auto", "randomized")

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
                part = scaled(rows[block] - self.mean_, roots[block])
                products += part.T @ part
            (products,) = self.workers.sum(products)
            squares, vectors = np.linalg.eigh(products)
            return np.sqrt(squares.clip(0)[::-1][:most]), signed(vectors.T[::-1][:most]), float(np.trace(products))
        centered: Any
        if isinstance(rows, Sparse):
            heavy = scaled(rows, roots)
            own = heavy.values @ heavy.values - (roots @ roots) * (self.mean_ @ self.mean_)
            centered = Shifted(heavy, roots, self.mean_)
        else:
            centered = scaled(rows - self.mean_, roots)
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
        return rows @ components - self.mean_ @ components

    def inverse_transform(self, X: Any) -> np.ndarray:
        """(rows, columns) of places (rows, n_components) along the components."""
        self._check_fitted()
        scales = np.sqrt(self.explained_variance_) if self.whiten else 1
        return (np.asarray(matrix(X)) * scales) @ self.components_ + self.mean_


@dataclass(eq=False, repr=False)
class NMF(Transformer):
    """Rows and components without negative numbers: X = W H, by coordinate descent on squared errors.

    A. Cichocki, A.-H. Phan, "Fast local algorithms for large scale nonnegative matrix and tensor factorizations", 2009.
    It starts from singular vectors, zeros of which are filled with the mean (C. Boutsidis, E. Gallopoulos, "SVD based
    initialization", 2008, NNDSVDa), or with more components than rows or columns at random, and ends where the
    slopes that are left are `tol` of the first step's.

    Fitted: `components_` (n_components, columns), that is H; `n_components_`, as many as columns if none are asked
    for; `n_iter_`; `reconstruction_err_`, the root of the sum of squared errors of all workers. `transform` gives W
    (rows, n_components). DataError for negative numbers.

    >>> import numpy as np
    >>> X = np.outer([1.0, 2.0, 3.0], [2.0, 0.0, 1.0])
    >>> model = NMF(1).fit(X)
    >>> model.inverse_transform(model.transform(X[:1])).round(3).tolist()
    [[2.0, 0.0, 1.0]]
    """

    sparse, positive = True, True

    n_components: AtLeast1 | None = None
    tol: AtLeast0 = 1e-4
    max_iter: AtLeast1 = 200
    random_state: Seed = 0

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Rows (rows, columns), of this worker; y is not looked at."""
        rows = self._begin(X)
        weight, unit = self._relative(self._weights(sample_weight, len(rows)))
        self.n_components_ = self.n_components or rows.shape[1]
        shares, parts = self._start(rows, weight)
        slopes: list[float] = []
        while len(slopes) < self.max_iter and (not slopes or slopes[-1] > self.tol * slopes[0]):
            own = _descend(shares, parts @ parts.T, rows @ parts.T, weight)
            heavy = shares * weight
            slope, squares, products = self.workers.sum(own, heavy @ shares.T, rows.T @ heavy.T)
            slopes.append(float(slope + _descend(parts, squares, products)))
        self.n_iter_ = len(slopes)
        self.components_ = parts
        squared = total(self.workers, [weight @ squares_of(rows)])[0]
        error = squared - 2 * np.vdot(products, parts.T) + np.vdot(squares, parts @ parts.T)
        self.reconstruction_err_ = float(np.sqrt(max(error, 0)) * np.sqrt(unit))
        return self

    def _start(self, rows: Any, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """W of this worker's rows, transposed, and H."""
        size, width = self.n_components_, rows.shape[1]
        count, summed, whole = total(self.workers, [len(rows), (rows.T @ weight[:, None]).sum(), weight.sum()])
        mean = summed / (whole * width)
        if size > min(count, width):
            noise = np.random.default_rng(self.random_state).normal(size=(size, width))
            return np.zeros((size, len(rows))), np.sqrt(mean / size) * np.abs(noise)
        heavy = scaled(rows, np.sqrt(weight))
        values, right = leading(self.workers, heavy, (int(count), width), size, self.random_state)
        left = (rows @ right.T).T / np.where(values > 0, values, 1)[:, None]
        left, right = (np.stack([np.maximum(each, 0), np.maximum(-each, 0)]) for each in (left, right))
        (squares,) = self.workers.sum(left**2 @ weight)
        norms = np.sqrt(squares), np.sqrt((right**2).sum(axis=2))
        better = (norms[0] * norms[1]).argmax(axis=0), np.arange(size)  # the positive halves, or the negative ones
        one, other = (np.maximum(norm[better], 1e-100) for norm in norms)
        shares = left[better] * np.sqrt(values * other / one)[:, None]
        parts = right[better] * np.sqrt(values * one / other)[:, None]
        return np.where(shares < 1e-6, mean, shares), np.where(parts < 1e-6, mean, parts)

    def transform(self, X: Any) -> np.ndarray:
        """(rows, n_components): the shares W of components in each row."""
        rows, parts = self._rows(X), self.components_
        shares = np.zeros((len(parts), len(rows)))
        squares, products = parts @ parts.T, rows @ parts.T
        slopes: list[float] = []
        while len(slopes) < self.max_iter and (not slopes or slopes[-1] > self.tol * slopes[0]):
            slopes.append(float(_descend(shares, squares, products)))
        return shares.T

    def inverse_transform(self, X: Any) -> np.ndarray:
        """(rows, columns) of shares (rows, n_components)."""
        self._check_fitted()
        return np.asarray(matrix(X)) @ self.components_


def _descend(shares: Any, squares: np.ndarray, products: np.ndarray, weight: np.ndarray | None = None) -> np.ndarray:
    """One step for each of `shares` (components, n), in place; the sum of the slopes that were left, by weight."""
    left, products = np.zeros(()), np.ascontiguousarray(products.T)
    for block in blocks(shares.shape[1], 2 * len(shares)):
        own = shares[:, block]
        for at, wanted in enumerate(products[:, block]):
            slope = squares[at] @ own - wanted
            slopes = np.abs(np.where(own[at] > 0, slope, np.minimum(slope, 0)))
            left += slopes.sum() if weight is None else slopes @ weight[block]
            if squares[at, at] > 0:
                np.maximum(own[at] - slope / squares[at, at], 0, out=own[at])
    return left
