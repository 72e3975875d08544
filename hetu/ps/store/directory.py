"""Which slot a 64-bit key has: a hash table with open addressing, on arrays of keys at once.

Cells hold slots, and the keys lie by slot, so a key takes 8 bytes and 5 to 12 of cells. The way through the cells
begins where the mixed key says and goes on by a step of its own, which is odd, so that it meets all of them (D. Knuth,
"The Art of Computer Programming", vol. 3, section 6.4, algorithm D). All keys of a call take a step at a time, and
those that have arrived leave, so there is no loop over keys. Left out: more than 2**31 slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ops.random import GOLDEN, mixed_words

FREE, GONE = -1, -2  # cells: never used, and of a key that was taken out
FULL = 0.7  # of the cells, from which on there are twice as many
LEAST = 64  # cells
AT_ONCE = 1 << 16  # keys that are entered at once as cells become more


class Directory:
    """Slots of keys, of which it keeps the keys of at most `slots`.

    >>> directory = Directory(slots=10)
    >>> directory.add(np.array([1 << 40, 7]), np.array([0, 3]))
    >>> directory[np.array([7, 8, 1 << 40])].tolist()
    [3, -1, 0]
    """

    def __init__(self, slots: int) -> None:
        self.keys = np.zeros(slots, "<i8")
        self.cells = np.full(LEAST, FREE, "<i4")
        self.taken = self.used = 0  # cells of keys, and those that are not free

    def __len__(self) -> int:
        return self.taken

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.cells.nbytes

    def __getitem__(self, keys: np.ndarray) -> np.ndarray:
        """The slot of each key, -1 where it has none."""
        slots = np.full(len(keys), FREE, "<i4")
        places, steps = self._ways(keys)
        at, wanted = np.arange(len(keys)), keys
        while len(at):
            found = self.cells[places]
            there = self.keys.take(found, mode="clip") == wanted  # of cells without a slot, those of some other one
            there &= found >= 0
            slots[at[there]] = found[there]
            on = np.flatnonzero(~there & (found != FREE))
            at, wanted, steps = at[on], wanted[on], steps[on]
            places = (places[on] + steps) & (len(self.cells) - 1)
        return slots

    def __setitem__(self, keys: np.ndarray, slots: Any) -> None:
        """As in an array of all keys: slots for keys that have none, or -1 for keys that have one."""
        if isinstance(slots, int) and slots == FREE:
            self.remove(keys)
        else:
            self.add(keys, slots)

    def add(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """Distinct keys that it does not hold, and a slot for each, of no other key."""
        self.keys[slots] = keys
        self.taken += len(keys)
        if self.used + len(keys) > FULL * len(self.cells):
            size = LEAST << max(0, int(np.ceil(np.log2(self.taken / (FULL * LEAST)))))
            old, self.cells, self.used = self.cells, np.full(size, FREE, "<i4"), 0
            for first in range(0, len(old), AT_ONCE):
                some = old[first : first + AT_ONCE]
                self._put(some[some >= 0])
        self._put(slots)

    def remove(self, keys: np.ndarray) -> np.ndarray:
        """Take out keys that it holds; the slots that they had."""
        slots = self[keys]
        places, steps = self._ways(keys)
        wanted = slots
        while len(wanted):
            there = self.cells[places] == wanted
            self.cells[places[there]] = GONE
            on = np.flatnonzero(~there)
            wanted, steps = wanted[on], steps[on]
            places = (places[on] + steps) & (len(self.cells) - 1)
        self.taken -= len(keys)
        return slots

    def _put(self, slots: np.ndarray) -> None:
        """Enter slots. Of those that come to one cell at once, one is in it afterwards, and the others go on."""
        slots = slots.astype("<i4", copy=False)
        places, steps = self._ways(self.keys[slots])
        while len(slots):
            found = self.cells[places]
            open_ = found < 0
            self.cells[places[open_]] = slots[open_]
            in_ = open_ & (self.cells[places] == slots)
            self.used += int(np.count_nonzero(found[in_] == FREE))
            on = np.flatnonzero(~in_)
            slots, steps = slots[on], steps[on]
            places = (places[on] + steps) & (len(self.cells) - 1)

    def _ways(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of each key the first cell, and the step from one to the next."""
        words = mixed_words(keys.astype("<u8") * GOLDEN + GOLDEN)
        return (words & np.uint64(len(self.cells) - 1)).astype("<i8"), ((words >> np.uint64(32)) | 1).astype("<i8")
