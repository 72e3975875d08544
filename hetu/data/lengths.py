"""LengthLoader: sequences of several lengths in batches of like ones, so that little is padded.

Batches of a length have one shape, and a strategy that suits it may train on them, as in HotSPa (Hao Ge et al.,
"Enabling Parallelism Hot Switching for Efficient Training of Large Language Models", SOSP 2024). Left out: shards, as
ranks that reduce gradients are fed whole batches; gathering ahead; several sequences in one row (`packed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.backend import array_from
from ..core.errors import DataError
from ..ranges import AtLeast1, Seed
from .dataset import Batch
from .loader import Resumable


class LengthLoader(Resumable):
    """Steps of `batch_size` sequences, each a tuple of batches `(*columns, weights)`; every `for` loop is one epoch.

    Args:
        columns: one or more, each a list of arrays (length, ...); the i-th of all columns are of one length.
        batch_size: sequences of a step.
        lengths: to which sequences are padded with zeros, each to the least of these that holds it.
        tokens: of a batch, padding counted: it has `tokens // length` rows, the last of a length rows of zeros too.
        shuffle: a new order each epoch, drawn from `seed` and the epoch's number.
        drop_last: leave out the last step if it has fewer sequences.

    `weights`, float32 (rows, length), are 0 where there is padding. Elsewhere they are such that sum(weights * losses),
    averaged over the batches of a step as `ht.optim.accumulated` does, is the mean over the tokens of the step: run the
    sub-graph that only adds for each batch, and the one that updates for the last. Lengths rise in every other step and
    fall in those between, so that one step begins with the length that ended the one before.
    DataError for columns that do not fit each other, and for a sequence that is longer than all lengths.

    >>> ids = [1], [2, 3, 4], [5, 6], [7, 8]
    >>> loader = LengthLoader([ids], batch_size=4, lengths=(2, 4), tokens=4)
    >>> for ids, weights in next(iter(loader)):
    ...     print(ids.tolist(), weights.tolist())
    [[1, 0], [5, 6]] [[0.375, 0.0], [0.375, 0.375]]
    [[7, 8], [0, 0]] [[0.375, 0.375], [0.0, 0.0]]
    [[2, 3, 4, 0]] [[0.375, 0.375, 0.375, 0.0]]
    """

    def __init__(
        self,
        columns: Sequence[Sequence[ArrayLike]],
        batch_size: AtLeast1,
        *,
        lengths: Sequence[int],
        tokens: AtLeast1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: Seed = 0,
    ) -> None:
        rows = [[array_from(row) for row in column] for column in columns]
        self.lengths, self.tokens = _checked_lengths(lengths, tokens), tokens
        self.sizes = _checked_sizes(rows, self.lengths[-1])
        if not 1 <= batch_size <= len(self.sizes):
            said = f"batch_size={batch_size} of {len(self.sizes)} sequences"
            raise DataError(said, fix=f"pass a batch_size from 1 to {len(self.sizes)}")
        self.columns = [np.concatenate(column) for column in rows]
        self.starts = np.cumsum(self.sizes) - self.sizes
        self.batch_size, self.shuffle, self.drop_last = batch_size, shuffle, drop_last
        super().__init__(seed)

    def __len__(self) -> int:
        """Steps of an epoch."""
        whole, rest = divmod(len(self.sizes), self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def _batches(self, steps: range) -> Iterator[tuple[Batch, ...]]:  # type: ignore[override]
        order = self._shuffled(len(self.sizes)) if self.shuffle else np.arange(len(self.sizes))
        for step in steps:
            rows = order[step * self.batch_size : (step + 1) * self.batch_size]
            falls = (self._epoch * len(self) + step) % 2
            parts = [*self._parts(rows)][:: -1 if falls else 1]
            counts = np.float32(len(parts) / self.sizes[rows].sum())
            yield tuple(self._padded(part, length, counts) for part, length in parts)

    def _parts(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int]]:
        """The sequences of each batch of a step, and their length."""
        room = np.searchsorted(self.lengths, self.sizes[rows])
        for k, length in enumerate(self.lengths):
            alike, most = rows[room == k], self.tokens // length
            for first in range(0, len(alike), most):
                yield alike[first : first + most], length

    def _padded(self, rows: NDArray[np.int64], length: int, counts: np.float32) -> Batch:
        there = np.arange(length) < self.sizes[rows][:, None]
        source = (self.starts[rows][:, None] + np.arange(length))[there]
        mask = np.zeros((self.tokens // length, length), bool)
        mask[: len(rows)] = there
        made = [np.zeros((*mask.shape, *column.shape[1:]), column.dtype) for column in self.columns]
        for out, column in zip(made, self.columns):
            out[mask] = column[source]
        return *made, mask * counts


def _checked_lengths(lengths: Sequence[int], tokens: int) -> tuple[int, ...]:
    found = tuple(lengths)
    rising = all(a < b for a, b in pairwise((0, *found)))
    if not found or not rising or found[-1] > tokens:
        said = f"lengths={found} for batches of {tokens} tokens"
        raise DataError(said, fix="give one length or more, from short to long, the longest at most `tokens`")
    return found


def _checked_sizes(rows: Sequence[Sequence[NDArray[np.generic]]], longest: int) -> NDArray[np.int64]:
    """The length of each sequence."""
    if not rows or not rows[0] or any(row.ndim == 0 for column in rows for row in column):
        raise DataError("no sequences", fix="pass one column or more, each a list of arrays (length, ...)")
    sizes = [[len(row) for row in column] for column in rows]
    if unlike := next((k for k, of in enumerate(sizes) if of != sizes[0]), 0):
        said = f"column {unlike} has sequences of other lengths than the first"
        raise DataError(said, fix="give each sequence one element per column for each place")
    if (most := max(sizes[0])) > longest or min(sizes[0]) == 0:
        said = f"sequence {sizes[0].index(most)} has {most} places" if most > longest else "a sequence is empty"
        raise DataError(f"{said}, lengths go from 1 to {longest}", fix="cut it, leave it out, or pass a larger length")
    return np.array(sizes[0])
