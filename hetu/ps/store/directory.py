"""Which slot a 64-bit key has: a hash table with open addressing, on arrays of keys at once.

Cells hold slots, and the keys lie by slot, so a key takes 8 bytes and 5 to 12 of cells. The way through the cells
begins where the mixed key says and goes on by a step of its own, which is odd, so that it meets all of them (D. Knuth,
"The Art of Computer Programming", vol. 3, section 6.4, algorithm D). All keys of a call take a step at a time, and
those that have arrived leave, so there is no loop over keys. Left out: more than 2**31 slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ops.random import GOLDEN, words_of

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
