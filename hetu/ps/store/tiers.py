"""Rows of which some lie in memory and the others in a file: arrays of both, read and written by the numbers of rows.

Whoever trains rows brings them into memory, in the place of some that were trained longest ago, as far as can be told
from a few: a hand goes round, and of the rows that it meets next, more than are needed, the oldest give way. There is
no list, and nothing is sorted (the hand is that of the "clock" of F. Corbato, "A Paging Experiment with the Multics
System", 1968). The file has no name and is gone with the process, because snapshots hold all rows. Its blocks are
reserved when it is made, so that a full disk is told then, and ends no server later.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np

from .messages import RefusedError

WINDOW = 4  # rows that the hand meets for each that is needed


class Tiers:
    """Where rows lie, `hot` of them in memory, in all arrays that it makes.

    >>> tiers = Tiers(rows=5, hot=2)
    >>> rows = tiers.zeros((5, 2), np.dtype("f4"))
    >>> rows[np.array([4, 0])] = np.array([[1, 2], [3, 4]])
    >>> tiers.warm(np.array([4]), score=np.array([9, 8, 0, 0, 9]))
    >>> tiers.in_file(np.arange(5)).tolist(), np.take(rows, [0, 4, 3], axis=0).tolist()
    ([False, True, True, True, False], [[3.0, 4.0], [1.0, 2.0], [0.0, 0.0]])
    """

    def __init__(self, rows: int, hot: int) -> None:
        self.places = np.arange(rows, dtype="<i4")  # of all rows, of which those below `hot` are in memory
        self.rows, self.hand = np.arange(hot, dtype="<i4"), 0  # the rows there, and the next place that is looked at
        self.arrays = list[TieredRows]()

    def zeros(self, shape: tuple[int, int], dtype: np.dtype) -> TieredRows:
        """An array of zeros, one row for each."""
        self.arrays.append(TieredRows(self, shape, dtype))
        return self.arrays[-1]

    def in_file(self, rows: np.ndarray) -> np.ndarray:
        """Which of the rows lie there."""
        found: np.ndarray = self.places.take(rows, mode="clip") >= len(self.rows)
        return found

    def warm(self, rows: np.ndarray, score: np.ndarray) -> None:
        """Bring distinct rows into memory, as far as others can give way, those of low scores."""
        hot, places = len(self.rows), self.places[rows]
        cold = np.flatnonzero(places >= hot)
        if not len(cold):
            return
        met = (self.hand + np.arange(min(hot, WINDOW * len(cold) + len(rows)))) % hot
        self.hand = int(met[-1] + 1) % hot
        met = met[~np.isin(met, places)]
        if len(met) > len(cold):
            met = met[np.argpartition(score[self.rows[met]], len(cold))[: len(cold)]]
        come, below = rows[cold[: len(met)]], places[cold[: len(met)]]
        for array in self.arrays:
            array.hot[met], array.cold[below - hot] = array.cold[below - hot], array.hot[met]
        self.places[self.rows[met]], self.places[come] = below, met
        self.rows[met] = come


class TieredRows:
    """What is read and written as an array by numbers of rows, wherever they lie."""

    def __init__(self, tiers: Tiers, shape: tuple[int, int], dtype: np.dtype) -> None:
        self.tiers, self.shape, self.dtype, self.itemsize = tiers, shape, dtype, dtype.itemsize
        self.hot = np.zeros((len(tiers.rows), shape[1]), dtype)
        self.cold = _in_file((shape[0] - len(self.hot), shape[1]), dtype)

    def take(self, rows: Any, axis: int = 0, out: np.ndarray | None = None, mode: str = "raise") -> np.ndarray:
        """What `np.take` of an array does; numbers below 0 give any row."""
        places = self.tiers.places.take(rows, mode="clip")
        found = np.take(self.hot, places, axis=0, out=out, mode="clip")
        if len(below := np.flatnonzero(places >= len(self.hot))):
            found[below] = self.cold[places[below] - len(self.hot)]
        return found

    def __setitem__(self, rows: np.ndarray, values: Any) -> None:
        places, values = self.tiers.places[rows], np.broadcast_to(values, (len(rows), self.shape[1]))
        below = places >= len(self.hot)
        self.hot[places[~below]] = values[~below]
        self.cold[places[below] - len(self.hot)] = values[below]


class Picked:
    """Some rows of an array, which are copied as they are read, few at a time where there is no memory for all."""

    def __init__(self, array: Any, rows: np.ndarray) -> None:
        self.array, self.rows, self.dtype, self.shape = array, rows, array.dtype, (len(rows), *array.shape[1:])
        self.nbytes = int(np.prod(self.shape)) * array.itemsize

    def __getitem__(self, some: slice) -> np.ndarray:
        return np.take(self.array, self.rows[some], axis=0)

    def copy(self) -> np.ndarray:
        """All of them."""
        return self[:]


def _in_file(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Zeros in a file without a name; RefusedError if the disk has no room."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    try:
        with tempfile.TemporaryFile() as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.memmap(file, dtype, "r+" if hasattr(os, "posix_fallocate") else "w+", shape=shape)
    except OSError as error:
        text = f"a file of {nbytes} bytes in {tempfile.gettempdir()!r} for rows that find no room in memory: {error}"
        raise RefusedError("memory", text, fix="make room there, or set $TMPDIR to another folder") from None
