"""Which ids get a row in a table without a bound: those that have come often enough, or by chance."""

from __future__ import annotations

import numpy as np

from ...growth import Growth
from ...ops.random import words_of
from .at_rest import chances

MOST = 254  # that a cell counts to, so that the next update is one that every `after` admits


class Admission:
    """Which ids without a row get one: counts of two cells for each id, the smaller of which is never too small.

    G. Cormode, S. Muthukrishnan, "An Improved Data Stream Summary: The Count-Min Sketch", J. Algorithms 2005; counts
    rise no more than they must, and are halved once half of `after` ids have come for each cell: later, each id would
    be admitted in the end, and sooner, perhaps none, however often it comes.
    """

    def __init__(self, growth: Growth, rows: int, seed: np.uint64) -> None:
        self.after, self.chance, self.seed = growth.after, growth.chance, seed
        self.counts = np.zeros((2, max(64, rows) if growth.after > 1 else 0), "u1")
        self.seen = 0

    def admits(self, ids: np.ndarray, clock: int) -> np.ndarray:
        """Which of these distinct ids, without a row, get one by this update."""
        good = np.ones(len(ids), bool)
        if self.chance < 1:
            good = chances(self.seed, ids, np.full(len(ids), clock), 1)[:, 0] < self.chance
        if self.after > 1:
            halves = words_of(ids, self.seed).view("<u4").reshape(-1, 2).T
            cells = (halves % np.uint32(self.counts.shape[1])).astype("<i8")
            known = np.minimum(np.minimum(*(counts[cell] for counts, cell in zip(self.counts, cells))), MOST) + 1
            for counts, cell in zip(self.counts, cells):
                np.maximum.at(counts, cell, known)
            good &= known >= self.after
            self.seen += len(ids)
            if self.seen > self.after // 2 * self.counts.shape[1]:
                self.counts >>= 1
                self.seen = 0
        return good
