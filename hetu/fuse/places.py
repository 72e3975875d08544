"""Where the numbers of arrays lie in the space of a form, in as few axes as visit the same places in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .form import Form


def strides_in(form: Form, arrays: Iterable[tuple[int, Any]]) -> list[tuple[int, ...]]:
    """The strides, in numbers, of values by number; 0 along axes of the space that a value lacks."""
    states = form.states()
    return [form.aligned(n, () if n in states else _own(x), 0) for n, x in arrays]


def _own(x: Any) -> list[int]:
    return [0 if n == 1 else s // x.dtype.itemsize for n, s in zip(x.shape, x.strides)]


def fewest_axes(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The fewest axes that visit the same places in the same order; none where there is one place.

    >>> fewest_axes((2, 1, 3, 4), [(12, 12, 4, 1), (0, 0, 0, 1)])
    ([6, 4], [[4, 1], [0, 1]])
    """
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(k[-1] == s[axis] * size for k, s in zip(kept, strides)):
            sizes[-1] *= size
            for k, s in zip(kept, strides):
                k[-1] = s[axis]
        else:
            sizes.append(size)
            for k, s in zip(kept, strides):
                k.append(s[axis])
    return sizes, kept


def merged_axes(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The same as tuples, with one axis at least."""
    sizes, kept = fewest_axes(shape, strides)
    return tuple(sizes) or (1,), [tuple(k) or (0,) for k in kept]
