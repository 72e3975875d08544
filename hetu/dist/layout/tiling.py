"""How pieces lie in the box that they make up: mostly as equal tiles in rows, which one copy takes apart or joins.

Then a thousand ranks cost no more Python than two. Pieces of other sizes, or in another order, are copied one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.types import Box, Shape
from .boxes import sizes, volume, within
from .layout import Piece


@dataclass(frozen=True, repr=False)
class Tiling:
    """The pieces of `box` as blocks of `most` elements each: equal tiles of shape `tile`, `counts` along each axis.

    Without `tile` the pieces are what `boxes` says.
    """

    box: Box
    boxes: tuple[Box, ...]
    most: int
    counts: Shape = ()
    tile: Shape | None = None

    @classmethod
    def of(cls, pieces: Sequence[Piece], box: Box) -> Tiling:
        """Of pieces that cover the box once."""
        boxes = tuple(piece.box for piece in pieces)
        most, tile, whole = max(map(volume, boxes)), sizes(boxes[0]), sizes(box)
        counts = tuple(n // size if size else 0 for n, size in zip(whole, tile))
        places = np.ndindex(*counts) if math.prod(counts) == len(boxes) else ()
        wanted = tuple(
            tuple((low + k * n, low + (k + 1) * n) for k, n, (low, _) in zip(place, tile, box)) for place in places
        )
        return cls(box, boxes, most, counts, tile) if wanted == boxes else cls(box, boxes, most)

    def __repr__(self) -> str:
        return f"{sizes(self.box)} in {self.boxes if self.tile is None else ' x '.join(map(str, self.counts))}"

    @property
    def in_line(self) -> bool:
        """Whether the blocks, one after the other, are the whole array as it lies."""
        if self.tile is None:
            return False
        split = [axis for axis, n in enumerate(self.counts) if n > 1]
        return all(n == 1 for n in self.tile[: split[-1]]) if split else True

    def pairs(self, blocks: np.ndarray, whole: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The same elements in the blocks and in the whole, as views to copy from one to the other."""
        if self.tile is None:
            for block, box in zip(blocks, self.boxes):
                yield block[: volume(box)].reshape(sizes(box)), whole[within(box, self.box)]
            return
        ndim = len(self.tile)
        split = whole.reshape([n for pair in zip(self.counts, self.tile) for n in pair])  # dividing an axis is a view
        yield blocks.reshape(*self.counts, *self.tile), split.transpose(*range(0, 2 * ndim, 2), *range(1, 2 * ndim, 2))
