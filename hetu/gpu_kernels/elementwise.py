"""Launches generated kernels: one for any number of steps and results, any broadcasting and any strides.

Axes along which all arrays are laid out alike are merged first; neighbors along the last one are then read and written
in packs of 16 bytes. Results are contiguous; the memory plan makes no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import Any

import numpy as np

from .generated import Expression, Geometry, Work, columns_text, elementwise_text, rows_text
from .machine import Call, Machine, index_dtype, spread, widest_pack
from .reduce import CHUNK, ROOM, reduced, wide_dtype
from .source import common_dtype

DRAWN = 16  # neighbors that one block of random words decides about
LEAST_ROWS = 32  # that a block folds: its part is then small beside what it reads

Draw = tuple[Any, int]  # the state of the random numbers, which lies on the machine, and the stream


def single_step(
    expression: str, names: Sequence[str], arrays: Sequence[Any], attrs: Mapping[str, Any], out: Any
) -> Expression:
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
) -> Expression:
    """A step whose inputs have `dtypes`. They meet in the dtype of the result, or for a predicate in their own."""
    return Expression(expression, inputs, numbers, common_dtype(dtypes) if dtype == "bool" else dtype, dtype)


def elementwise(machine: Machine, steps: Sequence[Expression], out: Any, arrays: Sequence[Any]) -> list[Call] | None:
    """Calls that evaluate the steps on every element; `arrays` broadcast to `out`, which must be contiguous.

    >>> from hetu.gpu_kernels.machine import RecordingMachine
    >>> x, y = np.arange(3.0), np.empty(3)
    >>> square = make_step("y = x * x", (("x", 0),), (), ["float64"], "float64")
    >>> len(elementwise(RecordingMachine(), [square], y, [x]))
    1
    """
    return computed(machine, Work(tuple(steps), (len(arrays) + len(steps) - 1,)), [out], arrays)


def computed(
    machine: Machine, work: Work, outs: Sequence[Any], arrays: Sequence[Any], draws: Sequence[Draw] = ()
) -> list[Call] | None:
    """Calls that write the results of `work` into `outs`, all of the shape to which `arrays` broadcast."""
    if not _fitting(outs, arrays):
        return None
    if outs[0].size == 0:
        return []
    sizes, strides = merged_axes(outs[0].shape, [_strides(a, outs[0].shape) for a in arrays])
    layout = _layout(sizes, strides, 0, outs, arrays, bool(draws))
    kernel = machine.kernel(elementwise_text(work, [a.dtype.name for a in arrays], layout), "elementwise")
    numbers = _numbers(layout, [outs[0].size], sizes, strides)
    return [partial(kernel, *spread(outs[0].size // layout.span), (*arrays, *_flat(draws), *outs, *numbers))]


def folded(
    machine: Machine,
    work: Work,
    outs: Sequence[Any],
    totals: Sequence[Any],
    arrays: Sequence[Any],
    axes: Sequence[int],
    draws: Sequence[Draw] = (),
) -> list[Call] | None:
    """As `computed`, with the folds of `work` over `axes` in `totals`, which have the other axes.

    `axes` have the last axis among them, or are the first ones. What a launch leaves in parts, `reduce.py` finishes.
    """
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    if not _fitting((*outs, *totals), arrays) or 0 in shape:
        return None
    along_rows = len(shape) - 1 in axes
    split = next(a for a in range(len(shape), -1, -1) if a - 1 not in axes) if along_rows else len(axes)
    whole = [_strides(a, shape) for a in arrays]
    outer, inner = (merged_axes(shape[s], [w[s] for w in whole]) for s in (slice(split), slice(split, None)))
    sizes, strides = (*outer[0], *inner[0]), [(*o, *i) for o, i in zip(outer[1], inner[1])]
    layout = _layout(sizes, strides, len(outer[0]), outs, arrays, bool(draws))
    shaped = _teams if along_rows else _blocks
    grid, block, numbers, chunks = shaped(prod(shape[:split]), prod(shape[split:]), layout.span)
    parts, rest = (chunks, *shape[split:]), [0]
    if along_rows:
        parts, rest = (*shape[:split], chunks), [*(a for a in axes if a < split), split]
    dtypes, known = [a.dtype.name for a in arrays], work.dtypes([a.dtype.name for a in arrays])
    targets = totals
    if any(parts[a] > 1 for a in rest):
        targets = [machine.xp.empty(parts, wide_dtype(known[fold.value])) for fold in work.folds]
    write, name = (rows_text, "fold_rows") if along_rows else (columns_text, "fold_columns")
    kernel = machine.kernel(write(work, dtypes, [t.dtype.name for t in targets], layout), name)
    numbers = _numbers(layout, numbers, sizes, strides)
    calls = [partial(kernel, grid, block, (*arrays, *_flat(draws), *outs, *targets, *numbers))]
    if targets is not totals:
        for fold, part, total in zip(work.folds, targets, totals):
            calls += reduced(machine, fold.operation, total, part, tuple(rest))
    return calls


def _teams(rows: int, width: int, span: int) -> tuple[tuple[int, ...], tuple[int, int], list[int], int]:
    """Grid, block, numbers and chunks of a kernel that folds along rows: cut where there are few, as in `reduce.py`."""
    chunks = 1 if rows >= ROOM else min(-(-width // CHUNK), ROOM)
    each = -(-width // (chunks * span)) * span
    chunks = -(-width // each)
    block = (32, 8) if each <= 1024 else (256, 1)
    return (-(-rows * chunks // block[1]),), block, [rows, width, chunks, each], chunks


def _blocks(rows: int, width: int, span: int) -> tuple[tuple[int, ...], tuple[int, int], list[int], int]:
    """As `_teams`, of a kernel that folds columns: as many blocks as a GPU has room for, of 32 rows or more."""
    across = -(-width // (32 * span))
    each = max(-(-rows * across // ROOM), LEAST_ROWS)
    chunks = -(-rows // each)
    return (across, chunks), (32, 8), [rows, width, each], chunks


def _flat(draws: Sequence[Draw]) -> list[Any]:
    return [part for state, stream in draws for part in (state, np.uint64(stream))]


def _fitting(outs: Sequence[Any], arrays: Sequence[Any]) -> bool:
    """Whether results are contiguous, and arrays are strided by whole elements."""
    return all(o.flags.c_contiguous for o in outs) and not any(s % a.dtype.itemsize for a in arrays for s in a.strides)


def _layout(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    outer: int,
    outs: Sequence[Any],
    arrays: Sequence[Any],
    drawing: bool,
) -> Geometry:
    """What is compiled in. Neighbors along the last axis are packed where sizes, strides and addresses allow it."""
    moves = tuple(tuple(s != 0 for s in axes) for axes in strides)
    unit = all(s[-1] in (0, 1) for s in strides)
    packed = [(a, s) for a, s in zip(arrays, strides) if s[-1]]
    whole = [*outs, *(a for a, _ in packed)]
    even = gcd(sizes[-1], *(n for _, s in packed for n in s[:-1]))
    pack = widest_pack(even, *whole) if unit and whole else 1
    span = DRAWN if drawing and sizes[-1] % DRAWN == 0 else pack
    reach = (sum(abs(s) * n for s, n in zip(axes, sizes)) for axes in strides)
    return Geometry(moves, outer, unit, pack, span, index_dtype(prod(sizes), *reach))


def _numbers(
    layout: Geometry, first: Sequence[int], sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[Any]:
    """The last arguments of a kernel, in its index type."""
    geometry = [*(sizes[a] for a in layout.sizes()), *(strides[k][a] for k, a in layout.strides())]
    return [np.dtype(layout.index).type(n) for n in (*first, *geometry)]


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
