"""Ids and counts in fewer bytes than their int64 have: a base, then what follows from it, in 1, 2 or 4 bytes each.

Ids increase, so steps from one to the next are small; counts, such as versions, lie above the least of them. Numbers
that do not fit, or few of them, stay as they are. Of what a cache of rows of 8 floats moves, 43 % were such numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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
