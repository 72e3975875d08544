"""What estimators ask of other workers: sums, and little else; each worker has rows of its own.

The classic algorithms go from one model to the next by sums over rows (C.-T. Chu et al., "Map-Reduce for Machine
Learning on Multicore", NIPS 2006), so an estimator is written once, for any number of workers. All of them call the
same methods in the same order and get the same bits, so that all hold the same model. Left out: rows that move.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise

import numpy as np

from ..dist.comm.comm import Comm
from ..ps.wire.client import Client

APART = 1e-3  # sine of the angle between a column and those before it, below which products lose too many digits


class Workers:
    """The workers of one fit; this one is alone. `rank` is its number, `world_size` how many there are."""

    rank, world_size = 0, 1

    def sum(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sums over workers of arrays that have the same shapes on all."""
        return [*arrays]

    def most(self, array: np.ndarray) -> np.ndarray:
        """The maxima over workers."""
        return array

    def gather(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all workers, in their order, one after the other along the first axis."""
        return array

    def side_by_side(self, array: np.ndarray) -> np.ndarray:
        """(workers, *shape): the arrays of all workers, which have one shape."""
        return array[None]

    def part(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        """The sum over workers of this worker's part of the first axis, and where that begins; parts make the whole."""
        begin, end = edges(len(array), self.world_size)[self.rank : self.rank + 2]
        return self.sum(array)[0][begin:end], begin

    def unique(self, values: np.ndarray) -> np.ndarray:
        """The distinct values of all workers, sorted."""
        return np.unique(self.gather(np.unique(values)))

    def triangle(self, rows: np.ndarray) -> np.ndarray:
        """R of the QR decomposition of all rows, at most as tall as wide: R'R is X'X, with half of the digits lost.

        By Cholesky's decomposition of X'X where every column is far enough from those before it to lose few digits (Y.
        Yamamoto et al., "Roundoff error analysis of the CholeskyQR2 algorithm", 2015), else from blocks of rows (J.
        Demmel et al., "Communication-optimal Parallel and Sequential QR and LU Factorizations", 2012: TSQR).
        """
        if total(self, [len(rows)])[0] > rows.shape[1]:
            (products,) = self.sum(rows.T @ rows)
            with suppress(np.linalg.LinAlgError):
                found: np.ndarray = np.linalg.cholesky(products).T
                if (np.diag(found) > APART * np.sqrt(np.diag(products))).all():
                    return found
        own = _triangle(rows)
        return own if self.world_size == 1 else _triangle(self.gather(own))

    def shared(self, first: np.ndarray, rows: np.ndarray | None = None) -> Shared:
        """A matrix to which all workers add; it begins as the sum of what each has `first`. This one reads `rows`."""
        return Shared(self, first)


def _triangle(rows: np.ndarray) -> np.ndarray:
    """The same of one worker's rows: that of the triangles of blocks, which stay in the cache."""
    size = max(1024, 4 * rows.shape[1])
    blocks = [np.asarray(np.linalg.qr(rows[at : at + size], mode="r")) for at in range(0, len(rows), size)]
    return blocks[0] if len(blocks) == 1 else _triangle(np.concatenate(blocks))


class Shared:
    """A matrix (rows, columns) to which workers add: `values` is the sum, as this worker knows it."""

    def __init__(self, workers: Workers, first: np.ndarray) -> None:
        self.workers = workers
        (self.values,) = workers.sum(first)

    def add(self, change: np.ndarray) -> None:
        """Add this worker's change; what others add in the same step is then in `values` too."""
        (sums,) = self.workers.sum(change)
        self.values = self.values + sums

    def close(self) -> None:
        """Nobody needs it any more; all workers call this."""


class Exchanging(Workers):
    """Several workers. A subclass has `_sum`, `most` and `side_by_side`."""

    def sum(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sums; arrays of one dtype travel together."""
        found = [*map(np.asarray, arrays)]
        for dtype in dict.fromkeys(each.dtype for each in found):
            which = [k for k, each in enumerate(found) if each.dtype == dtype]
            sums = self._sum(np.concatenate([found[k].reshape(-1) for k in which]))
            ends = np.cumsum([found[k].size for k in which])
            for k, one in zip(which, np.split(sums, ends[:-1])):
                found[k] = one.reshape(found[k].shape)
        return found

    def gather(self, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind == "U":  # texts, as numbers of characters
            width = int(self.most(np.array(array.dtype.itemsize // 4)))
            characters = array.astype(f"U{max(width, 1)}").view(np.int32).reshape(len(array), -1)
            return np.ascontiguousarray(self.gather(characters)).view(f"U{max(width, 1)}")[:, 0]
        counts = np.zeros(self.world_size, np.int64)
        counts[self.rank] = len(array)
        (counts,) = self.sum(counts)
        padded = np.zeros((int(counts.max()), *array.shape[1:]), array.dtype)
        padded[: len(array)] = array
        found = self.side_by_side(padded)
        return np.concatenate([rows[:count] for rows, count in zip(found, counts)])

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        """The sums of a vector."""
        raise NotImplementedError


class Reduced(Exchanging):
    """Workers that are ranks of a communicator: what is summed is all-reduced."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        return self._reduced(numbers, "sum")

    def most(self, array: np.ndarray) -> np.ndarray:
        return self._reduced(array, "max")

    def _reduced(self, array: np.ndarray, op: str) -> np.ndarray:
        x = np.asarray(array, order="C")
        self.comm.all_reduce(x, out := np.empty_like(x), op)
        return out

    def side_by_side(self, array: np.ndarray) -> np.ndarray:
        found = np.empty((self.world_size, *array.shape), array.dtype)
        if array.size:
            self.comm.all_gather(array, found)
        return found

    def part(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        array, ends = np.ascontiguousarray(array), edges(len(array), self.world_size)
        begin, end = ends[self.rank : self.rank + 2]
        found = np.empty((self.world_size, *array[begin:end].shape), array.dtype)
        if array.size:  # a reduce_scatter of parts that need not be equal
            sent = [array[low:high].size for low, high in pairwise(ends)]
            self.comm.all_to_all(array, found, (sent, [found[0].size] * self.world_size))
        return found.sum(axis=0, dtype=array.dtype), begin


def edges(length: int, parts: int) -> list[int]:
    """Where equal parts begin, and where the last ends; some are longer by one.

    >>> edges(6, 4)
    [0, 1, 3, 4, 6]
    """
    return [length * part // parts for part in range(parts + 1)]


def workers_of(comm: Comm | Client | None) -> Workers:
    """The workers that an estimator's `comm=` names: ranks, or those of a job's servers."""
    if isinstance(comm, Client):
        from .served import served  # which stands on this file

        return served(comm)
    return Workers() if comm is None or comm.world_size == 1 else Reduced(comm)


def total(workers: Workers, numbers: Iterable[float]) -> list[float]:
    """Sums over workers of a few numbers, in one message.

    >>> total(Workers(), [1, 2.5])
    [1.0, 2.5]
    """
    return [float(each) for each in workers.sum(np.array([*numbers], np.float64))[0]]
