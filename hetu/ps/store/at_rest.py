"""Rows that lie on a server in fewer bytes: they are decoded as they are read, and coded again as they are updated.

A row is rounded up or down by chance, so that it is right in the mean: an update below half a step, which rounding to
the nearest would lose each time, moves its number once in a while (S. Gupta et al., "Deep Learning with Limited
Numerical Precision", ICML 2015; J. Zhang et al., "Training with Low-Precision Embedding Tables", NeurIPS workshop on
systems for ML 2018). Chance is counted, not drawn: it follows from a seed, the row's id in the whole, its version, and
the place in the row, by SplitMix64 (G. Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
So rows have the same bits on any number of servers, in a replay, and after a restart.

A chance has 16 bits. They leave a float16 right in the mean to the last bit of a float32, and lose of a byte what is
below 2**-17 of a step, which the largest float32 of the row would lose too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...codec import Rounding
from ...ops.random import words_of

_LIFE = 0xFFFFFFFF  # of a version; above are the lives of a server, see `wire/snapshot.py`


class RowsAtRest:
    """Bytes that are read and written as an array of floats, by ids or slices of rows.

    `ids` are those of the rows in the whole, `versions` the versions that rows have when they are written.

    >>> from hetu.codec import codec
    >>> rows = RowsAtRest(codec("int8"), (3, 4), np.dtype("<f4"), range(3), np.zeros(3, int))
    >>> rows[np.array([1])] = np.array([[1.0, -1.0, 0.5, 0.0]])
    >>> rows.stored.nbytes, np.take(rows, [1], axis=0).round(1).tolist()
    (24, [[1.0, -1.0, 0.5, 0.0]])
    """

    def __init__(
        self, codec: Rounding, shape: tuple[int, int], dtype: np.dtype, ids: range, versions: np.ndarray, seed: int = 0
    ) -> None:
        self.codec, self.shape, self.dtype, self.itemsize = codec, shape, dtype, dtype.itemsize
        self.ids, self.versions, self.seed = ids, versions, np.uint64((seed ^ seed >> 64) % 2**64)
        self.stored = np.zeros((shape[0], codec.width(shape[1])), np.uint8)  # zeros stand for zeros

    @property
    def nbytes(self) -> int:
        """Bytes of all rows as floats."""
        return self.shape[0] * self.shape[1] * self.itemsize

    def bytes_of(self, where: Any) -> np.ndarray:
        """Rows as they lie."""
        return self.stored[where] if isinstance(where, slice) else np.take(self.stored, where, axis=0)

    def __getitem__(self, where: Any) -> np.ndarray:
        return self.codec.decode(self.bytes_of(where), self.shape[1]).astype(self.dtype, copy=False)

    def take(self, ids: np.ndarray, axis: int = 0, out: np.ndarray | None = None, mode: str = "raise") -> np.ndarray:
        """What `np.take` of an array does; ids that have been checked need no `mode`."""
        if out is None:
            return self[ids]
        np.copyto(out, self[ids])
        return out

    def __setitem__(self, where: Any, values: np.ndarray) -> None:
        places = np.arange(*where.indices(self.shape[0])) if isinstance(where, slice) else where
        ids = self.ids.start + self.ids.step * np.asarray(places)
        chance = chances(self.seed, ids, self.versions[where], self.shape[1])
        self.stored[where] = self.codec.encode(values, chance)


def chances(seed: np.uint64, ids: np.ndarray, versions: np.ndarray, count: int) -> np.ndarray:
    """Numbers above 0 and below 1, as many for each row: (rows, count)."""
    rows = words_of(versions & _LIFE, words_of(ids, seed))
    words = words_of(np.arange(1, -(-count // 4) + 1), rows[:, None])
    bits = words.view("<u2")[:, :count]
    return (bits.astype("<f4") + np.float32(0.5)) * np.float32(2.0**-16)
