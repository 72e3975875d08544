"""Rows of which the first lie in memory and the others in a file: an array of both, read and written by slots.

Whoever trains rows brings them into memory, in the place of some that were trained longest ago, as far as can be told
from a few: a hand goes round, and of the slots that it meets next, more than are needed, the oldest give way. There is
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

WINDOW = 4  # slots that the hand meets for each that is needed


class Tiers:
    """Zeros of this shape, of which the rows before `hot` lie in memory.

    >>> rows = Tiers((5, 2), np.dtype("f4"), hot=2)
    >>> rows[np.array([4, 0])] = np.array([[1, 2], [3, 4]])
    >>> np.take(rows, [0, 4, 3], axis=0).tolist(), rows.cold.shape
    ([[3.0, 4.0], [1.0, 2.0], [0.0, 0.0]], (3, 2))
    """

    def __init__(self, shape: tuple[int, int], dtype: np.dtype, hot: int) -> None:
        self.shape, self.dtype, self.itemsize = shape, dtype, dtype.itemsize
        self.hot = np.zeros((hot, shape[1]), dtype)
        self.cold = _in_file((shape[0] - hot, shape[1]), dtype)

    def alike(self) -> Tiers:
        """Others of the same kind."""
        return Tiers(self.shape, self.dtype, len(self.hot))

    def take(self, slots: Any, axis: int = 0, out: np.ndarray | None = None, mode: str = "raise") -> np.ndarray:
        """What `np.take` of an array does; slots below 0 give any row."""
        slots = np.asarray(slots)
        found = np.take(self.hot, slots, axis=0, out=out, mode="clip")
        if len(below := np.flatnonzero(slots >= len(self.hot))):
            found[below] = self.cold[slots[below] - len(self.hot)]
        return found

    def __getitem__(self, slots: np.ndarray) -> np.ndarray:
        return self.take(slots)

    def __setitem__(self, slots: np.ndarray, values: Any) -> None:
        below = slots >= len(self.hot)
        values = np.broadcast_to(values, (len(slots), self.shape[1]))
        self.hot[slots[~below]] = values[~below]
        self.cold[slots[below] - len(self.hot)] = values[below]


def _in_file(shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """Zeros in a file without a name; RefusedError if the disk has no room."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    if not nbytes:
        return np.zeros(shape, dtype)
    try:
        with tempfile.TemporaryFile() as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.memmap(file, dtype, "r+" if hasattr(os, "posix_fallocate") else "w+", shape=shape)
    except OSError as error:
        text = f"a file of {nbytes} bytes in {tempfile.gettempdir()!r} for rows that find no room in memory: {error}"
        raise RefusedError("memory", text, fix="make room there, or set $TMPDIR to another folder") from None


class Hand:
    """Goes round the slots in memory, and finds those that are to give way."""

    def __init__(self, slots: int) -> None:
        self.slots, self.at = slots, 0

    def oldest(self, count: int, score: np.ndarray, stay: np.ndarray) -> np.ndarray:
        """Up to `count` slots of low scores among the next ones, but none of those that `stay`."""
        met = (self.at + np.arange(min(self.slots, WINDOW * count + len(stay)))) % self.slots
        self.at = int(met[-1] + 1) % self.slots
        met = met[~np.isin(met, stay)]
        if len(met) <= count:
            return met
        return met[np.argpartition(score[met], count)[:count]]
