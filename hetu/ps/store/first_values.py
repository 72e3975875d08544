"""First values of rows: from an array, or drawn by a law, which is plain data, so that servers draw them themselves.

Whoever draws a row gets the same bits: one process, a worker, or any of some servers, each of which keeps other rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import ArgumentError
from ...init import Law
from .messages import LARGEST

MOST_SERVERS = 1024  # to which the rows of a table may be dealt
MOST_PARTS = 256  # that a message has room for
PIECE = 1 << 18  # elements of an array that are taken at once
PlacedRows = tuple[np.ndarray, np.ndarray]  # places and values


@dataclass(frozen=True)
class Drawn:
    """Rows by a law, from a generator of this seed."""

    law: Law
    shape: tuple[int, ...]
    seed: Sequence[int]

    def made(self) -> Drawn:
        """The same where it may be asked for several times."""
        return self

    def whole(self, dtype: np.dtype) -> np.ndarray:
        """All rows."""
        return self.law.whole(self.shape, dtype, np.random.default_rng(self.seed))

    def blocks(self, dtype: np.dtype, rows: range) -> Iterator[PlacedRows]:
        """Some of the rows: their places in `rows`, and their values."""
        return self.law.blocks(self.shape, dtype, np.random.default_rng(self.seed), rows)

    def data(self) -> dict[str, Any] | None:
        """What a server needs to draw them; None if it cannot."""
        law = self.law.data()
        return None if law is None else {**law, "rows": self.shape[0], "seed": [*map(int, self.seed)]}


@dataclass(frozen=True)
class Given:
    """An array, made when it is wanted."""

    make: Callable[[], np.ndarray]
    shape: tuple[int, ...]

    def made(self) -> Given:
        array = self.make()
        return Given(lambda: array, self.shape)

    def whole(self, dtype: np.dtype) -> np.ndarray:
        return self.make()

    def blocks(self, dtype: np.dtype, rows: range) -> Iterator[PlacedRows]:
        """As of `Drawn`."""
        array, most = self.make(), max(1, PIECE * self.shape[0] // max(1, int(np.prod(self.shape))))
        for a in range(0, len(rows), most):
            some = rows[a : a + most]
            yield np.arange(a, a + len(some)), array[some.start : some.stop : some.step]

    def data(self) -> None:
        """No server can make it."""


FirstValues = Sequence[Drawn | Given]  # of the first rows, those after them, ...


def pieces(parts: FirstValues, dtype: np.dtype, rows: range) -> Iterator[PlacedRows]:
    """The values of some rows of all parts together: their places in `rows`, and their values.

    >>> both = [Given(lambda: np.zeros((3, 1)), (3, 1)), Given(lambda: np.ones((4, 1)), (4, 1))]
    >>> [(places.tolist(), rows.tolist()) for places, rows in pieces(both, np.dtype("f4"), range(1, 7, 3))]
    [([0], [[0.0]]), ([1], [[1.0]])]
    """
    first = 0
    for part in parts:
        yield from pieces_of(part, first, dtype, rows)
        first += part.shape[0]


def pieces_of(part: Drawn | Given, first: int, dtype: np.dtype, rows: range) -> Iterator[PlacedRows]:
    """The same of one part, whose rows begin at `first`."""
    low, high = (bisect_left(rows, edge) for edge in (first, first + part.shape[0]))
    if mine := rows[low:high]:
        local = range(mine.start - first, mine.stop - first, mine.step)
        for places, values in part.blocks(dtype, local):
            yield places + low, values


def data(parts: FirstValues, rows: range) -> dict[str, Any] | None:
    """What a server is told of the first values of its `rows`; None if it cannot draw all of them."""
    told = [part.data() for part in parts]
    return (
        None if None in told or len(told) > MOST_PARTS else {"rows": [rows.start, rows.stop, rows.step], "parts": told}
    )


def drawn(told: dict[str, Any], shape: tuple[int, int], dtype: np.dtype) -> Iterator[PlacedRows]:
    """The values that a server was told of for a table of this shape; ArgumentError unless it can draw them."""
    if told.keys() != {"rows", "parts"} or not _numbers(told["rows"], 3) or type(told["parts"]) is not list:
        raise ArgumentError(f"first values of {[*told]!r:.80}", fix="send rows=[start, stop, step] and parts=[...]")
    start, stop, step = told["rows"]
    if not start < step <= MOST_SERVERS or len(range(start, stop, step)) != shape[0]:
        raise ArgumentError(
            f"first values of rows {told['rows']} of a table of {shape[0]}", fix="send those of the table"
        )
    parts = [parsed_part(part, shape[1], dtype) for part in told["parts"]]
    if sum(part.shape[0] for part in parts) != stop:
        raise ArgumentError(f"first values of {[part.shape[0] for part in parts]} rows, wanted {stop}")
    return pieces(parts, dtype, range(start, stop, step))


def parsed_part(told: Any, cols: int, dtype: np.dtype) -> Drawn:
    """Rows by a law from plain data; ArgumentError unless it can draw."""
    if type(told) is not dict or told.keys() != {"law", "numbers", "rows", "seed"}:
        raise ArgumentError(f"first values {told!r:.80}", fix="send law, numbers, rows and seed")
    if not _numbers([told["rows"]], 1) or not _numbers(told["seed"], range(1, 9), 1 << 256):
        raise ArgumentError(f"{told['rows']!r:.40} rows of seed {told['seed']!r:.80}", fix="send numbers from 0 on")
    return Drawn(Law.parse(told["law"], told["numbers"], dtype), (told["rows"], cols), told["seed"])


def _numbers(told: Any, count: int | Iterable[int], most: int = LARGEST) -> bool:
    counts = [count] if isinstance(count, int) else count
    return type(told) is list and len(told) in counts and all(type(n) is int and 0 <= n <= most for n in told)
