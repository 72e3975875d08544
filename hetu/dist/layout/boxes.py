"""Boxes: index ranges of a tensor, one (low, high) per dimension, and how they cut one another.

A box is dense: it has no strides.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ...core.types import Box


def cut(low: int, high: int, start: int, stop: int, total: int) -> tuple[int, int]:
    """Shares [start, stop) of `total` of the range [low, high), with floor boundaries.

    >>> [cut(0, 7, i, i + 1, 3) for i in range(3)]
    [(0, 2), (2, 4), (4, 7)]
    """
    return low + (high - low) * start // total, low + (high - low) * stop // total


def volume(box: Box) -> int:
    """Number of elements in a box."""
    return math.prod(sizes(box))


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(high - low for low, high in box)


def within(box: Box, outer: Box) -> tuple[Any, ...]:
    """The index of `box` in the array that holds `outer`."""
    return (*(slice(low - start, high - start) for (low, high), (start, _) in zip(box, outer)), ...)


def intersect(a: Box, b: Box) -> Box:
    """The common part of two boxes; of size 0 where they do not meet."""
    return tuple((max(p, r), max(min(q, s), max(p, r))) for (p, q), (r, s) in zip(a, b))


def contains(outer: Box, box: Box) -> bool:
    """Whether `box` lies in `outer`."""
    return all(start <= low and high <= stop for (low, high), (start, stop) in zip(box, outer))


def hull(boxes: Sequence[Box]) -> Box:
    """The smallest box around those that are not empty."""
    full = [box for box in boxes if volume(box)] or boxes
    return tuple((min(low for low, _ in spans), max(high for _, high in spans)) for spans in zip(*full))


def cells(boxes: Iterable[Box], wanted: Iterable[Box]) -> dict[Box, list[Box]]:
    """Each wanted box -> its cells, cut at the boundaries of all `boxes`; an empty box has none.

    >>> cells([((0, 2),), ((2, 4),)], [((1, 4),)])
    {((1, 4),): [((1, 2),), ((2, 4),)]}
    """
    wanted = list(dict.fromkeys(wanted))
    edges = [{edge for span in spans for edge in span} for spans in zip(*boxes, *wanted)]
    found = {}
    for box in wanted:
        inside = [sorted(e for e in cuts if low <= e <= high) for (low, high), cuts in zip(box, edges)]
        found[box] = list(itertools.product(*map(itertools.pairwise, inside)))
    return found
