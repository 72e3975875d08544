"""Launches generated elementwise kernels: one for any number of steps, any broadcasting and any strides.

Axes along which all arrays are laid out alike are merged first; what lies flat in memory is then read and written in
packs of 16 bytes. Ignored on purpose: results that are not contiguous; the memory plan makes none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from .machine import Call, Machine, address, spread
from .source import Layout, Step, common_dtype, elementwise_text

PACK_BYTES = 16  # the widest load of one thread


def single_step(
    expression: str, names: Sequence[str], arrays: Sequence[Any], attrs: Mapping[str, Any], out: Any
) -> Step:
    """The step of one operator on these arrays; attributes that are no numbers do not appear in expressions."""
    numbers = tuple((k, v) for k, v in attrs.items() if isinstance(v, bool | int | float))
    pairs = tuple((name, k) for k, name in enumerate(names))
    return make_step(expression, pairs, numbers, [a.dtype.name for a in arrays], out.dtype.name)


def make_step(
    expression: str,
    inputs: tuple[tuple[str, int], ...],
    numbers: tuple[tuple[str, float], ...],
    dtypes: Sequence[str],
    dtype: str,
) -> Step:
    """A step whose inputs have `dtypes`. They meet in the dtype of the result, or for a predicate in their own."""
    return Step(expression, inputs, numbers, common_dtype(dtypes) if dtype == "bool" else dtype, dtype)


def elementwise(machine: Machine, steps: Sequence[Step], out: Any, arrays: Sequence[Any]) -> list[Call] | None:
    """Calls that evaluate the steps on every element; `arrays` broadcast to `out`, which must be contiguous.

    >>> from hetu.gpu_kernels.machine import Recorder
    >>> x, y = np.arange(3.0), np.empty(3)
    >>> square = make_step("y = x * x", (("x", 0),), (), ["float64"], "float64")
    >>> len(elementwise(Recorder(), [square], y, [x]))
    1
    """
    if not out.flags.c_contiguous or any(s % a.dtype.itemsize for a in arrays for s in a.strides):
        return None
    if out.size == 0:
        return []
    sizes, strides = merged_axes(out.shape, [_strides(a, out.shape) for a in arrays])
    flat = len(sizes) == 1 and all(s[0] in (0, 1) for s in strides)
    moves = tuple(tuple(s != 0 for s in axes) for axes in strides)
    if not flat and len(sizes) == 1:  # a stride that is neither 0 nor 1: an outer axis of one turn makes it strided
        sizes, strides = (1, *sizes), [(0, *s) for s in strides]
        moves = tuple((False, *m) for m in moves)
    pack = _pack(out, [a for a, m in zip(arrays, moves) if m[0]]) if flat else 1
    reach = max([out.size, *(sum(abs(s) * n for s, n in zip(axes, sizes)) for axes in strides)])
    index = np.dtype("int32" if reach < 1 << 30 else "int64")
    text = elementwise_text(steps, [a.dtype.name for a in arrays], Layout(moves, pack, index.name))
    numbers = [out.size]
    if not flat:
        numbers += [*sizes[1:], *(s for axes in strides for s in axes if s)]
    arguments = (*arrays, out, *(index.type(n) for n in numbers))
    return [partial(machine.kernel(text, "elementwise"), *spread(out.size // pack), arguments)]


def _strides(array: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements once the array is broadcast to `shape`."""
    lead = len(shape) - array.ndim
    own = (0 if n == 1 else s // array.dtype.itemsize for n, s in zip(array.shape, array.strides))
    return (*(0,) * lead, *own)


def merged_axes(
    shape: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The fewest axes that visit the same places in the same order.

    >>> merged_axes((2, 1, 3, 4), [(12, 12, 4, 1), (0, 0, 0, 1)])
    ((6, 4), [(4, 1), (0, 1)])
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
    if not sizes:
        return (1,), [(0,) for _ in strides]
    return tuple(sizes), [tuple(k) for k in kept]


def _pack(out: Any, arrays: Sequence[Any]) -> int:
    """How many neighbours one thread handles: as many as fit 16 bytes of the widest dtype, size and addresses."""
    whole = (out, *arrays)
    pack = PACK_BYTES // max(a.dtype.itemsize for a in whole)
    while pack > 1 and (out.size % pack or any(address(a) % (a.dtype.itemsize * pack) for a in whole)):
        pack //= 2
    return pack
