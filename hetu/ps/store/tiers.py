"""Where the rows of a table without a bound lie: the slot of each key, and which slots are in memory or in a file.

Slots are found by a hash table with open addressing, on arrays of keys at once. Cells hold slots, and the keys lie by
slot, so a key takes 8 bytes and 5 to 12 of cells. The way through the cells begins where the mixed key says and goes on
by a step of its own, which is odd, so that it meets all of them (D. Knuth, "The Art of Computer Programming", vol. 3,
section 6.4, algorithm D). All keys of a call take a step at a time, and those that have arrived leave, so there is no
loop over keys. Left out: more than 2**31 slots.

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

from ...ops.random import GOLDEN, words_of
from .messages import RefusedError

FREE, GONE = -1, -2  # cells: never used, and of a key that was taken out
FULL = 0.7  # of the cells, from which on there are twice as many
LEAST = 64  # cells
AT_ONCE = 1 << 16  # keys that are entered at once as cells become more


class Directory:
    """Slots of keys, of which it keeps the keys of at most `slots`; written as an array with an element for each key.

    >>> directory = Directory(slots=10)
    >>> directory[np.array([1 << 40, 7])] = np.array([0, 3])
    >>> directory[np.array([7, 8, 1 << 40])].tolist()
    [3, -1, 0]
    """

    def __init__(self, slots: int) -> None:
        self.keys = np.zeros(slots, "<i8")
        self.cells = np.full(LEAST, FREE, "<i4")
        self.taken = self.used = 0  # cells of keys, and those that are not free

    def __len__(self) -> int:
        return self.taken

    def __getitem__(self, keys: np.ndarray) -> np.ndarray:
        """The slot of each key, -1 where it has none."""
        slots: np.ndarray = self.cells[self._cells(keys, FREE)]
        return slots

    def __setitem__(self, keys: np.ndarray, slots: Any) -> None:
        """Slots, of no other key, for distinct keys that have none, or -1 for keys that have one."""
        if np.ndim(slots) == 0:
            self.cells[self._cells(keys, FREE)] = GONE
            self.taken -= len(keys)
            return
        self.keys[slots] = keys
        self.taken += len(keys)
        if self.used + len(keys) > FULL * len(self.cells):
            size = LEAST << max(0, int(np.ceil(np.log2(self.taken / (FULL * LEAST)))))
            old, self.cells, self.used = self.cells, np.full(size, FREE, "<i4"), 0
            for first in range(0, len(old), AT_ONCE):
                some = old[first : first + AT_ONCE]
                self._enter(some[some >= 0])
        self._enter(slots.astype("<i4", copy=False))

    def _enter(self, slots: np.ndarray) -> None:
        """Enter slots of new keys. Of those that come to one cell at once, one is in it then, and the others go on."""
        while len(slots):
            cells = self._cells(self.keys[slots], GONE)
            free = self.cells[cells] == FREE
            self.cells[cells] = slots
            here = self.cells[cells] == slots
            self.used += int(np.count_nonzero(free & here))
            slots = slots[~here]

    def _cells(self, keys: np.ndarray, end: int) -> np.ndarray:
        """Of each key the cell that has its slot, or else the first on its way that is free, or as `end`."""
        words, last = words_of(keys, GOLDEN), len(self.cells) - 1
        cells, steps = (words & np.uint64(last)).astype("<i8"), ((words >> np.uint64(32)) | 1).astype("<i8")
        found, at = np.empty_like(cells), np.arange(len(keys))
        while len(at):
            slots = self.cells[cells]
            there = self.keys.take(slots, mode="clip") == keys  # of cells without a slot, those of some other one
            there = (there & (slots >= 0)) | (slots == FREE) | (slots == end)
            found[at[there]] = cells[there]
            on = np.flatnonzero(~there)
            at, keys, steps = at[on], keys[on], steps[on]
            cells = (cells[on] + steps) & last
        return found


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
