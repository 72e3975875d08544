"""What a cache of rows has done, counted, and whether it is worth having: what `Cache("auto")` goes by.

Bytes are reckoned from counts of rows: the numbers of a row, and `SMALL` for an id, a version or a count, which travel
packed (`packing.py`). No clock is read, so that a run decides as it did before. Left out: what a message costs beside
its rows, which is the same with a cache and without.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass, replace

SMALL = 2  # bytes of an id, a version or a count
LEAST = 0.1  # the share of bytes that a cache must save, as it costs its worker time
WINDOW = 4  # distinct rows looked up for each line, between two decisions
PAUSES = 4, 64  # windows without a cache, after it failed first, and at most; each failure doubles them


@dataclass
class Counters:
    """Rows since the start: requested, distinct in their batch, fetched from the server, pushed to it, evicted, and
    looked up while "auto" kept none. Bytes to and from the server: moved, and what would have been without a cache."""

    lookups: int = 0
    unique: int = 0
    fetched: int = 0
    pushed: int = 0
    evicted: int = 0
    passed: int = 0
    moved: int = 0
    plain: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*map(operator.add, astuple(self), astuple(other)))

    @property
    def hit_rate(self) -> float:
        """The share of distinct rows whose copies were fresh enough."""
        return 1 - self.of_unique if self.unique else 0.0

    @property
    def saved(self) -> float:
        """The share of bytes that the cache saved; below 0 if it moved more than none."""
        return 1 - self.moved / self.plain if self.plain else 0.0

    @property
    def of_lookups(self) -> float:
        """Fetched rows per requested row, to compare with a server that answers every id of a batch."""
        return self.fetched / max(1, self.lookups)

    @property
    def of_unique(self) -> float:
        """Fetched rows per distinct row, to compare with a server that answers every distinct id of a batch."""
        return self.fetched / max(1, self.unique)


class Worth:
    """Whether a cache of so many lines is to be on. The first window after it comes on fills its lines and tells
    nothing; after each further one it stays on if it saved `LEAST` of the bytes. If not, it is tried again after a
    pause, as other rows may have become popular, and after each failure in a row after a longer one.

    >>> worth, seen = Worth(lines=1), Counters()
    >>> def window(moved):
    ...     seen.unique, seen.plain, seen.moved = seen.unique + 4, seen.plain + 100, seen.moved + moved
    ...     return worth.decide(seen)
    >>> [window(moved) for moved in (100, 90, 91)], [window(100) for _ in range(4)]
    ([True, True, False], [False, False, False, True])
    """

    def __init__(self, lines: int) -> None:
        self.window, self.on, self.filled, self.began = WINDOW * lines, True, False, Counters()
        self.pause = self.left = PAUSES[0]

    def due(self, seen: Counters) -> bool:
        """Whether the window has passed."""
        return seen.unique - self.began.unique >= self.window

    def decide(self, seen: Counters) -> bool:
        """Whether the cache is to be on in the next window."""
        moved, plain = seen.moved - self.began.moved, seen.plain - self.began.plain
        self.began = replace(seen)
        if not self.on:
            self.left -= 1
            self.on, self.filled = self.left == 0, False
        elif not self.filled:
            self.filled = True
        elif moved <= (1 - LEAST) * plain:
            self.pause = PAUSES[0]
        else:
            self.on, self.left, self.pause = False, self.pause, min(2 * self.pause, PAUSES[1])
        return self.on
