"""Numbers in fewer bytes than they have: ids and counts as they travel, and rows as they lie on a server.

Ids and counts travel as a base, then what follows from it, in 1, 2 or 4 bytes each. Ids increase, so steps from one to
the next are small; counts, such as versions, lie above the least of them. Numbers that do not fit, or few of them, stay
as they are. Of what a cache of rows of 8 floats moves, 43 % were such numbers.

Rows are decoded as they are read, and coded again as they are updated. A number is rounded up or down by chance, so
that it is right in the mean: an update below half a step, which rounding to the nearest would lose each time, moves its
number once in a while (S. Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015; J. Zhang et al.,
"Training with Low-Precision Embedding Tables", NeurIPS workshop on systems for ML 2018). Chance is counted, not drawn:
it follows from a seed, the row's id in the whole, its version, and the place in the row, by SplitMix64 (G. Steele et
al., "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). So rows have the same bits on any number of
servers, in a replay, and after a restart. A chance has 16 bits. They leave a float16 right in the mean to the last bit
of a float32, and lose of a byte what is below 2**-17 of a step, which the largest float32 of the row would lose too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...codec import Rounding
from ...ops.random import words_of

PACKED = 32  # numbers from which on packing is worth its time
WIDTHS = (8, 1, 2, 4)  # bytes of a number, by the code of two bits that a header holds; 8: they lie as they are
NUMBER = np.dtype("<i8")


def packed(ids: np.ndarray | None, counts: np.ndarray | None) -> tuple[list[Any], int]:
    """What travels of ids, counts or both, and the codes of their widths, those of counts above those of ids.

    >>> made, codes = packed(np.arange(7000, 7100), np.full(100, 1 << 40))
    >>> [len(part) for part in made], codes
    ([112, 112], 5)
    """
    made: list[Any] = []
    codes = 0
    for shift, part in ((0, ids), (2, counts)):
        if part is None:
            continue
        base = part[0] if part is ids else part.min()
        above = (np.diff(part, prepend=base) if part is ids else part - base).view("<u8")  # modulo 2**64
        most = above.max()
        code = next((c for c in (1, 2, 3) if most < 256 ** WIDTHS[c]), 0)
        if code:
            small = np.zeros(size(len(part), code), "u1")
            small[: NUMBER.itemsize].view(NUMBER)[0] = base
            small[NUMBER.itemsize :].view(f"<u{WIDTHS[code]}")[: len(part)] = above
            part = small
        made.append(part)
        codes |= code << shift
    return made, codes


def unpacked(head: memoryview, rows: int, start: int, code: int, *, steps: bool = False) -> np.ndarray:
    """Ids, which are `steps`, or counts. A sum beyond int64 comes out as another number, as if that had been sent."""
    if not code:
        return np.frombuffer(head, NUMBER, rows, start)
    base = np.frombuffer(head, NUMBER, 1, start)
    above = np.frombuffer(head, f"<u{WIDTHS[code]}", rows, start + NUMBER.itemsize)
    found: np.ndarray = base + (np.cumsum(above, dtype=NUMBER) if steps else above)
    return found


def size(rows: int, code: int) -> int:
    """Bytes of so many numbers, a multiple of 8, so that values behind them lie aligned."""
    words = 1 + -(-rows * WIDTHS[code] // NUMBER.itemsize) if code else rows
    return NUMBER.itemsize * words


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
