"""Images in blocks: rows and columns that convolutions handle at a time, so that what they unfold fits the cache."""

from __future__ import annotations

from collections.abc import Iterator

from ..ops.window import Pair

Slices = tuple[slice, slice]


def blocks(size: Pair, numbers: int, most: int) -> list[Slices]:
    """Ranges of rows and columns, of pixels of `numbers` each, that have about `most` numbers in all."""
    pixels = max(1, most // numbers)
    columns = min(size[1], pixels)
    rows = min(size[0], max(1, pixels // columns))
    return [(down, right) for down in _ranges(size[0], rows) for right in _ranges(size[1], columns)]


def _ranges(size: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, size)) for start in range(0, size, step))


def extent(block: Slices) -> Pair:
    """How many rows and columns a block has."""
    return tuple(part.stop - part.start for part in block)
