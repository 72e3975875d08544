"""Nearest neighbors, exact: each worker finds the nearest of its own rows for all queries, and the best of all count.

Products of matrices find the candidates, with the error that rounding may have; the distances of these are computed
one by one, and equal ones go by the number of the row. So any division of the rows gives the same neighbors. The rows
do not travel: of each query every worker answers k distances (J. Jiang et al., "Angel", NSR 2018, top-k). Left out:
trees, which many columns leave no faster; sparse rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np

from ..core.errors import ArgumentError, DataError
from ..ranges import AtLeast1, OneOf
from .estimator import Classifier, Estimator, Regressor
from .workers import Workers

BLOCK = 1 << 22  # distances of a block of queries that are held at once
PAIRS = 1 << 20  # numbers of rows whose distances are computed one by one
GROUP = 32  # at most so many rows share one least distance, by which candidates are told


@dataclass(eq=False, repr=False)
class Neighbors(Estimator):
    """Base class: the rows stay where they were fitted, and all the workers that have them are asked together."""

    n_neighbors: AtLeast1 = 5
    weights: Annotated[str, OneOf("uniform", "distance")] = "uniform"
    metric: Annotated[str, OneOf("euclidean", "manhattan")] = "euclidean"

    def _keep(self, rows: np.ndarray, answers: np.ndarray) -> None:
        """The rows of this worker, and what each of them answers."""
        at: Workers = self.workers
        counts = at.gather(np.array([len(rows)]))
        self._rows_at, self._fitted, self._answers = at, rows, answers
        self._first, self.n_samples_fit_ = int(counts[: at.rank].sum()), int(counts.sum())

    def kneighbors(
        self, X: Any, n_neighbors: AtLeast1 | None = None, return_distance: bool = True
    ) -> tuple[np.ndarray, np.ndarray] | np.ndarray:
        """Distances and numbers of the nearest rows, both (rows, neighbors), the nearest first.

        Rows are counted through all workers, which call this together, each with queries of its own. ArgumentError for
        more neighbors than rows.
        """
        distances, numbers, _ = self._nearest(self._rows(X), n_neighbors or self.n_neighbors)
        return (distances, numbers) if return_distance else numbers

    def _nearest(self, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distances, numbers and answers of the k nearest rows of all workers."""
        if k > self.n_samples_fit_:
            raise ArgumentError(
                f"Expected n_neighbors <= n_samples_fit, but n_neighbors = {k}, n_samples_fit = {self.n_samples_fit_}",
                fix="ask for fewer",
            )
        at = self._rows_at
        counts = at.gather(np.array([len(queries)]))
        asked = at.gather(queries)
        distances, places = nearest(asked, self._fitted, k, self.metric)
        lacking = ((0, 0), (0, k - distances.shape[1]))
        parts = [
            np.pad(distances, lacking, constant_values=np.inf),
            np.pad(places + self._first, lacking, constant_values=self.n_samples_fit_),
            np.pad(self._answers[places], (*lacking, *[(0, 0)] * (self._answers.ndim - 1))),
        ]
        if at.world_size > 1:
            mine = slice(int(counts[: at.rank].sum()), int(counts[: at.rank + 1].sum()))
            parts = [_of_all(at, part, mine) for part in parts]
            best = np.lexsort((parts[1], parts[0]), axis=1)[:, :k]
            parts = [part[np.arange(len(queries))[:, None], best] for part in parts]
        distances, numbers, answers = parts
        return distances, numbers, answers

    def _shares(self, distances: np.ndarray) -> np.ndarray:
        """(rows, neighbors): how much each neighbor counts; those at no distance are all that do."""
        if self.weights == "uniform":
            return np.full(distances.shape, 1 / distances.shape[1])
        with np.errstate(divide="ignore"):
            shares = 1 / distances
        there = np.isinf(shares)
        shares = np.where(there.any(axis=1, keepdims=True), there, shares)
        return shares / shares.sum(axis=1, keepdims=True)


def _of_all(at: Workers, part: np.ndarray, mine: slice) -> np.ndarray:
    """What all workers found for the queries of this one, side by side."""
    found = at.gather(part).reshape(at.world_size, *part.shape)[:, mine]
    return np.concatenate([*found], axis=1)


@dataclass(eq=False, repr=False)
class KNeighborsClassifier(Neighbors, Classifier):
    """The class that most of the `n_neighbors` nearest rows have, or those of most `weights`: 1 / "distance".

    `metric` is "euclidean" or "manhattan". Fitted: `classes_`, `n_samples_fit_`. T. Cover, P. Hart, "Nearest Neighbor
    Pattern Classification", 1967.

    >>> model = KNeighborsClassifier(n_neighbors=3).fit([[0.0], [1.0], [2.0], [8.0], [9.0]], [0, 0, 0, 1, 1])
    >>> model.predict([[1.4], [7.0]]).tolist(), model.kneighbors([[8.4]], 2)[1].tolist()
    ([0, 1], [[3, 4]])
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Rows X (rows, columns) and their classes y (rows,); DataError for fewer than two classes."""
        rows = self._begin(X)
        self._keep(rows, self._classes(y, len(rows)))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """(rows, classes): the share of each class among the neighbors. All workers call this together."""
        distances, _, classes = self._nearest(self._rows(X), self.n_neighbors)
        shares, k = self._shares(distances), len(self.classes_)
        places = np.arange(len(shares))[:, None] * k + classes
        return np.bincount(places.ravel(), shares.ravel(), len(shares) * k).reshape(-1, k)


@dataclass(eq=False, repr=False)
class KNeighborsRegressor(Neighbors, Regressor):
    """The mean of the targets that the `n_neighbors` nearest rows have; `weights` and `metric` as the classifier's.

    y is (rows,) or (rows, outputs).

    >>> KNeighborsRegressor(n_neighbors=2).fit([[0.0], [1.0], [5.0]], [0.0, 2.0, 7.0]).predict([[0.4]]).tolist()
    [1.0]
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Rows X (rows, columns) and their targets y (rows,) or (rows, outputs)."""
        rows = self._begin(X)
        self._keep(rows, self._numbers(y, len(rows), outputs=True))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """(rows,) or (rows, outputs): the mean over the neighbors. All workers call this together."""
        distances, _, targets = self._nearest(self._rows(X), self.n_neighbors)
        return np.einsum("qk,qk...->q...", self._shares(distances), targets)


# -- the nearest of the rows that are here -----------------------------------------------------------------------------


def nearest(queries: np.ndarray, rows: np.ndarray, k: int, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """Distances and places of the k nearest rows, or of all if these are fewer, for each query: (queries, k) each.

    >>> distances, places = nearest(np.array([[0.0]]), np.array([[3.0], [1.0], [-1.0]]), 2, "euclidean")
    >>> distances.tolist(), places.tolist()
    ([[1.0, 1.0]], [[1, 2]])
    """
    k = min(k, len(rows))
    group = min(GROUP, max(1, len(rows) // (4 * k)))
    found = [_nearest_of(*part, rows, k, group, metric) for part in _near(queries, rows, group, metric)]
    distances, places = zip(*found)
    return np.concatenate(distances), np.concatenate(places)


def _near(
    queries: np.ndarray, rows: np.ndarray, group: int, metric: str
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks of queries; what orders rows as their distances do; and how far rounding may move what it compares.

    The rows are filled up to whole groups by others that are infinitely far.
    """
    eps, columns, count = np.finfo(float).eps, rows.shape[1], -(-len(rows) // group) * group
    largest = max(np.abs(queries).max(initial=0), np.abs(rows).max())
    if metric == "euclidean" and largest > np.sqrt(np.finfo(float).max / columns) / 8:
        raise DataError(f"numbers up to {largest:g}, whose squares have no end", fix="scale X, as its standard scores")
    sizes = np.linalg.norm(rows, 2 if metric == "euclidean" else 1, axis=1).max()
    filled = np.zeros((columns + 1, count))
    filled[:columns, : len(rows)] = rows.T if metric == "manhattan" else -2 * rows.T
    filled[columns, : len(rows)] = 0 if metric == "manhattan" else np.einsum("rc,rc->r", rows, rows)
    for some in np.array_split(queries, -(-len(queries) * count // BLOCK)):
        if metric == "euclidean":
            near = np.hstack([some, np.ones((len(some), 1))]) @ filled
            doubt = 4 * eps * (columns + 4) * (np.linalg.norm(some, axis=1) + sizes) ** 2
        else:
            near = np.repeat(filled[columns:], len(some), axis=0)
            for query, row in zip(some.T, filled):
                near += np.abs(query[:, None] - row)
            doubt = 4 * eps * (columns + 4) * (np.abs(some).sum(axis=1) + sizes)
        near[:, len(rows) :] = np.inf  # no number of a product, where it would warn
        yield some, near, doubt


def _nearest_of(
    queries: np.ndarray, near: np.ndarray, doubt: np.ndarray, rows: np.ndarray, k: int, group: int, metric: str
) -> tuple[np.ndarray, np.ndarray]:
    """The k nearest rows of a block of queries: each lies in a group whose least is not above the k-th of these."""
    groups = near.reshape(len(near), group, -1)
    least = groups.min(axis=1)
    bound = np.partition(least, k - 1, axis=1)[:, k - 1] + doubt
    of, column = np.nonzero(least <= bound[:, None])
    which, inside = np.nonzero(groups[of, :, column] <= bound[of, None])
    of, places = of[which], inside * groups.shape[2] + column[which]
    step = max(1, PAIRS // rows.shape[1])
    exact = np.concatenate(
        [_distances(queries[of[k : k + step]], rows[places[k : k + step]], metric) for k in range(0, len(of), step)]
    )
    order = np.lexsort((places, exact, of))
    order = order[np.searchsorted(of[order], np.arange(len(queries)))[:, None] + np.arange(k)]
    return exact[order], places[order]


def _distances(a: np.ndarray, b: np.ndarray, metric: str) -> np.ndarray:
    apart = a - b
    return np.abs(apart).sum(axis=1) if metric == "manhattan" else np.sqrt((apart**2).sum(axis=1))
