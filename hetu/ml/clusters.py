"""k-means, by all rows in each step or by a few of them.

Rows are drawn by their place among the rows of all workers, so that the start, and every batch, is the same wherever
they lie. Left out: bounds that save distances (C. Elkan, ICML 2003).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self

import numpy as np

from ..core.errors import DataError, ShapeError
from ..ranges import AtLeast0, AtLeast1, OneOf, Seed
from .estimator import Clusterer, Transformer
from .inputs import Sparse, matrix
from .workers import Workers, total

PATIENCE = 10  # batches without a better mean inertia, after which a fit by batches ends
ROUNDING = 1e-9  # share of a sum over rows: of starts that are as good the first counts, on any number of workers
CACHED = 2**17  # numbers of a block of rows and of what is computed of them


def blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices of rows, of which what is `width` numbers each stays in a core's cache."""
    step = max(CACHED // width, 64)
    return (slice(start, start + step) for start in range(0, rows, step))


class Lots:
    """Rows of all workers to draw by weight: which of this worker's a lot falls on.

    The rows of all workers lie in a line, each as long as its weight, so lots fall on the same rows on any number
    of workers.

    >>> import numpy as np
    >>> from hetu.ml.workers import Workers
    >>> Lots(Workers(), np.array([1.0, 0.0, 3.0])).fall(np.array([0.1, 0.5])).tolist()
    [0, 2]
    """

    def __init__(self, workers: Workers, weights: np.ndarray) -> None:
        self.ends = np.cumsum(weights)
        self.bounds = np.cumsum(workers.gather(self.ends[-1:]))
        self.rank = workers.rank

    def fall(self, lots: np.ndarray) -> np.ndarray:
        """Indices of this worker's rows on which `lots`, from 0 to below 1, fall."""
        places = lots * self.bounds[-1]
        owners = np.minimum(np.searchsorted(self.bounds, places, side="right"), len(self.bounds) - 1)
        own = places[owners == self.rank] - (self.bounds[self.rank] - self.ends[-1])
        last = np.searchsorted(self.ends, self.ends[-1])
        return np.minimum(np.searchsorted(self.ends, own, side="right"), last)


def _distances(rows: Any, centers: np.ndarray, squares: np.ndarray | None = None) -> np.ndarray:
    """(centers, rows): squared. `squares` are the sums of squares of rows, if they are known."""
    sparse = isinstance(rows, Sparse)
    found: np.ndarray = (rows @ (-2 * centers.T)).T if sparse else (-2 * centers) @ rows.T
    found += squares_of(rows) if squares is None else squares
    found += (centers**2).sum(axis=1)[:, None]
    np.maximum(found, 0, out=found)
    return found


def squares_of(rows: Any) -> np.ndarray:
    """(rows,): the sum of the squares of each."""
    if isinstance(rows, Sparse):
        return np.bincount(rows.rows, rows.values**2, len(rows))
    return (rows**2).sum(axis=1)


def _apart(rows: Any, centers: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(rows,): the squared distance of each to its own center."""
    if not isinstance(rows, Sparse):
        return squares_of(rows - centers[labels])
    products = np.bincount(rows.rows, rows.values * centers[labels[rows.rows], rows.columns], len(rows))
    return np.maximum(squares_of(rows) - 2 * products + squares_of(centers)[labels], 0)


def _taken(rows: Any, at: np.ndarray) -> np.ndarray:
    """A few of the rows, which are made dense."""
    return rows[at].dense() if isinstance(rows, Sparse) else rows[at]


def _with_ones(rows: Any) -> Any:
    """With a last column of ones."""
    if not isinstance(rows, Sparse):
        return np.column_stack([rows, np.ones(len(rows))])
    ends, (count, width) = rows.starts[1:], rows.shape
    columns, values = np.insert(rows.columns, ends, width), np.insert(rows.values, ends, 1.0)
    return Sparse(rows.starts + np.arange(count + 1), columns, values, (count, width + 1))


def _assign(rows: Any, weight: np.ndarray, centers: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """Write each row's nearest center into `labels`; how that changes the sums of clusters, and for how many rows.

    The last of the columns of `rows` are ones, so the last sums are the weights of clusters. A label of -1 is none.
    """
    size, width = len(centers), rows.shape[1]
    scales = np.vstack([-2 * centers.T, (centers**2).sum(axis=1)])
    member = np.eye(size + 1, size)
    if isinstance(rows, Sparse):
        near = (rows @ scales).argmin(axis=1)
        shares, moved = (member[near] - member[labels]) * weight[:, None], np.array([(near != labels).sum()])
        labels[:] = near
        return [(rows.T @ shares).T, moved]
    changes, moved = np.zeros((size, width)), np.zeros(1, np.int64)
    for block in blocks(len(rows), width + size):
        near, old = (rows[block] @ scales).argmin(axis=1), labels[block]
        if len(new := np.flatnonzero(near != old)):
            shares = (member[near[new]] - member[old[new]]).T
            changes += shares @ (rows[block][new] * weight[block][new, None])
            old[new] = near[new]
            moved += len(new)
    return [changes, moved]


@dataclass(eq=False, repr=False)
class KMeans(Clusterer, Transformer):
    """k-means (S. Lloyd, 1982) from k-means++ (D. Arthur, S. Vassilvitskii, SODA 2007); the best of `n_init` starts.

    With `batch_size` each step moves centers by so many rows, drawn by the weights of all, at rates of 1 over the
    rows that a center has seen (D. Sculley, WWW 2010), for `max_iter` passes at most, until the inertia of batches
    falls no more. `init` may also be "random", or centers (n_clusters, columns). A cluster that loses all its rows
    begins anew at the row that is farthest from its center. A sparse X stays so; the digits of distances are then those
    of its numbers, not of what these are beyond the mean.

    Fitted: `cluster_centers_` (n_clusters, columns), `labels_` (rows,), `inertia_`, the sum over the rows of all
    workers of the squared distances to their centers, `n_iter_`. DataError for fewer rows than clusters.

    >>> import numpy as np
    >>> model = KMeans(2).fit(np.array([[0.0], [1.0], [10.0], [11.0]]))
    >>> sorted(model.cluster_centers_.ravel().tolist()), model.inertia_
    ([0.5, 10.5], 1.0)
    """

    n_clusters: AtLeast1 = 8
    init: Annotated[str, OneOf("k-means++", "random")] | np.ndarray = "k-means++"
    n_init: AtLeast1 = 1
    max_iter: AtLeast1 = 300
    tol: AtLeast0 = 1e-4
    batch_size: AtLeast1 | None = None
    random_state: Seed = 0
    sparse = True

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Rows (rows, columns), of this worker; y is not looked at."""
        rows = self._begin(X)
        weight = self._weights(sample_weight, len(rows))
        count = int(total(self.workers, [len(rows)])[0])
        if count < self.n_clusters:
            raise DataError(f"n_samples={count} should be >= n_clusters={self.n_clusters}.", fix="ask for fewer")
        middle = np.zeros(rows.shape[1])
        if not isinstance(rows, Sparse):
            summed, whole = self.workers.sum(weight @ rows, weight.sum(keepdims=True))
            middle = summed / whole
            rows = rows - middle  # digits of distances
        runs = [self._run(rows, weight, middle, start) for start in range(self.n_init)]
        enough = min(run[0] for run in runs) * (1 + ROUNDING)
        self.inertia_, centers, self.labels_, self.n_iter_ = next(run for run in runs if run[0] <= enough)
        self.cluster_centers_ = centers + middle
        return self

    def _run(self, rows: Any, weight: Any, middle: Any, start: int) -> tuple[float, np.ndarray, np.ndarray, int]:
        """Inertia, centers, labels and steps of one start."""
        rng = np.random.default_rng([self.random_state, start])
        centers = self._start(rows, weight, middle, rng)
        if self.batch_size is None:
            centers, labels, steps = self._lloyd(rows, weight, centers)
        else:
            centers, labels, steps = self._batches(rows, weight, centers, rng, self.batch_size)
        inertia = total(self.workers, [weight @ _apart(rows, centers, labels)])[0]
        return inertia, centers, labels, steps

    def _start(self, rows: Any, weight: np.ndarray, middle: np.ndarray, rng: Any) -> np.ndarray:
        if not isinstance(self.init, str):
            given: np.ndarray = np.asarray(matrix(self.init, name="init"))
            if given.shape != (self.n_clusters, rows.shape[1]):
                raise ShapeError(
                    f"The shape of the initial centers {given.shape} does not match the number of clusters "
                    f"{self.n_clusters} and features {rows.shape[1]}",
                    fix="pass a row for each cluster, with the columns of X",
                )
            given = given - middle
            return given
        if self.init == "random":
            return self._drawn(rows, weight, rng.random(self.n_clusters))
        trials = 2 + int(np.log(self.n_clusters))  # the best of which is taken, as the authors' program does
        centers = self._drawn(rows, weight, rng.random(1))
        squares = squares_of(rows)
        nearest = _distances(rows, centers, squares)[0]
        while len(centers) < self.n_clusters:
            candidates = self._drawn(rows, weight * nearest, rng.random(trials))
            distances = np.minimum(nearest, _distances(rows, candidates, squares))
            (potentials,) = self.workers.sum(distances @ weight)
            best = int(potentials.argmin())
            nearest = distances[best]
            centers = np.concatenate([centers, candidates[best : best + 1]])
        return centers

    def _drawn(self, rows: Any, weight: np.ndarray, lots: np.ndarray) -> np.ndarray:
        """(lots, columns): the rows of all workers that are drawn, in the order of where they lie."""
        return self.workers.gather(_taken(rows, Lots(self.workers, weight).fall(np.sort(lots))))

    def _lloyd(self, rows: Any, weight: Any, centers: Any) -> tuple[Any, Any, int]:
        """Centers, labels, steps. Sums are kept, and changed by the rows that change their cluster."""
        rows, width = _with_ones(rows), rows.shape[1]
        summed, squares = self.workers.sum(rows.T @ weight[:, None], weight @ squares_of(rows))
        means, mean = summed[:, 0] / summed[-1], squares / summed[-1, 0]
        least = self.tol * float(mean - means @ means) / width
        labels = np.full(len(rows), -1)
        sums = np.zeros((self.n_clusters, rows.shape[1]))
        for step in range(1, self.max_iter + 1):
            changes, moved = self.workers.sum(*_assign(rows, weight, centers, labels))
            if not moved.any():
                return centers, labels, step
            sums += changes
            before, centers = centers, self._means(rows, weight, centers, labels, sums)
            if ((centers - before) ** 2).sum() <= least:
                break
        _assign(rows, weight, centers, labels)
        return centers, labels, step

    def _means(self, rows: Any, weight: Any, centers: Any, labels: Any, sums: np.ndarray) -> np.ndarray:
        empty = np.flatnonzero(sums[:, -1] < 1e-9 * sums[:, -1].max())
        if len(empty):
            sums = sums.copy()
            far = np.where(weight > 0, _apart(rows, _with_ones(centers), labels), -1)
            own = np.argsort(-far, kind="stable")[: len(empty)]
            told = np.column_stack([far[own], labels[own], weight[own], _taken(rows, own)])
            told = self.workers.gather(told)
            for cluster, (_, label, heavy, *row) in zip(empty, told[np.argsort(-told[:, 0], kind="stable")]):
                sums[cluster] = heavy * np.array(row)
                sums[int(label)] -= sums[cluster]
        held = sums[:, -1:] > 0
        return np.where(held, sums[:, :-1] / np.where(held, sums[:, -1:], 1), centers)

    def _batches(self, rows: Any, weight: Any, centers: Any, rng: Any, size: int) -> tuple[Any, Any, int]:
        """Centers, labels, passes begun."""
        lots, count = Lots(self.workers, weight), int(total(self.workers, [len(rows)])[0])
        rows = _with_ones(rows)
        seen, share = np.zeros((self.n_clusters, 1)), min(2 * size / (count + 1), 1)
        steps, smooth, best, worse = 0, 0.0, np.inf, 0
        while worse < PATIENCE and steps * size < self.max_iter * count:
            steps += 1
            batch = _taken(rows, lots.fall(rng.random(size)))
            labels = np.full(len(batch), -1)
            sums, _ = _assign(batch, np.ones(len(batch)), centers, labels)
            error = _apart(batch[:, :-1], centers, labels).sum()
            sums, error = self.workers.sum(sums, error)
            seen += sums[:, -1:]
            centers = centers + (sums[:, :-1] - centers * sums[:, -1:]) / np.maximum(seen, 1)
            smooth += (float(error) - smooth) * (share if steps > 1 else 1)
            worse = 0 if smooth < best else worse + 1
            best = min(best, smooth)
        labels = np.full(len(rows), -1)
        _assign(rows, weight, centers, labels)
        return centers, labels, -(-steps * size // count)

    def _squares(self, X: Any) -> np.ndarray:
        """(n_clusters, rows): squared distances to the centers."""
        rows, centers = self._rows(X), self.cluster_centers_
        middle = 0.0 if isinstance(rows, Sparse) else centers.mean(axis=0)
        return _distances(rows if isinstance(rows, Sparse) else rows - middle, centers - middle)

    def transform(self, X: Any) -> np.ndarray:
        """(rows, n_clusters): the distance to each center."""
        return np.sqrt(self._squares(X).T)

    def predict(self, X: Any) -> np.ndarray:
        """(rows,): the number of the nearest center."""
        return self._squares(X).argmin(axis=0)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """Less the inertia of these rows, of all workers: higher is better."""
        nearest = self._squares(X).min(axis=0)
        return -total(self.workers, [self._weights(sample_weight, len(nearest)) @ nearest])[0]
