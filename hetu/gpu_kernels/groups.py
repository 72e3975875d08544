"""Launches the kernels of groups, see `group_text.py`: one each, and few more where a reduction is left in parts.

A single operator with an expression is a group of one line. Axes along which all arrays are laid out alike are merged;
neighbors along the last one are read and written in packs of 16 bytes. Results are contiguous; the memory plan makes no
others. `passes/fuse_kernels.py` decides what goes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import Any

import numpy as np

from ..fuse.form import Form, expression_of, form_of, fused, own_column
from ..fuse.places import merged_axes, strides_in
from .group_text import Geometry, text_of
from .launchers import kernel
from .machine import Call, Machine, address, index_dtype, spread, widest_pack
from .reduce import CHUNK, ROOM, reduced, wide_dtype

DRAWN = 16  # neighbors that one block of random words decides about
LEAST_ROWS = 32  # that a block folds: its part is then small beside what it reads


def cut(rows: int, width: int) -> int:
    """Into how many chunks a row is cut: where there are few, as in `reduce.py`."""
    return 1 if rows >= ROOM else min(-(-width // CHUNK), ROOM)


def single(machine: Machine, op: Any, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> list[Call] | None:
    """Calls of an operator with an expression; None without one, or where these arrays need CuPy."""
    if expression_of(op) is None or not arrays:
        return None
    return launched(machine, out, *arrays, form=form_of(op, arrays, attrs, out.shape))


@kernel(fused)
def launched(machine: Machine, out: Any, *arrays: Any, form: Form) -> list[Call] | None:
    """Calls that compute the results of a form into `out`, or None if these arrays need CuPy."""
    outs, arrays = out if isinstance(out, tuple) else (out,), arrays[: len(form.types)]
    strided = any(s % a.dtype.itemsize for a in arrays for s in a.strides)
    if strided or not all(o.flags.c_contiguous for o in outs):
        return None
    if 0 in form.space:
        return []
    kind = _kind(form)
    split = form.split if kind != "places" else 0
    sizes, strides, outer = _axes(form, arrays, split)
    values = form.values()
    full = [o for o, r in zip(outs, form.results) if not values[r].fold and values[r].shape == form.space]
    layout = _layout(sizes, strides, outer, full, arrays, form, kind)
    rows, width = prod(form.space[:split]), prod(form.space[split:])
    grid, block, counts, parts = _shaped(form, kind, rows, width, layout.span)
    targets, rest = _targets(machine, form, outs, parts)
    text = text_of(form, layout, kind, tuple(t.dtype.name for t in targets))
    numbers = [np.dtype(d).type(v) for d, v in text.numbers]
    words = (*arrays, *map(np.uint64, text.streams), *targets, *numbers, *_counts(layout, counts, sizes, strides))
    return [partial(machine.kernel(text.text, kind), grid, block, words), *rest]


def _kind(form: Form) -> str:
    """Which of the kernels computes a form."""
    values = form.values()
    folds = {v.fold for v in values} - {""}
    if folds == {"rows"}:
        return "columns"
    per_row = any(values[r].rows and values[r].shape != form.space for r in form.results)
    return "rows" if folds or per_row or any(line.op is own_column for line in form.lines) else "places"


def _axes(form: Form, arrays: Sequence[Any], split: int) -> tuple[Sequence[int], list[tuple[int, ...]], int]:
    """(sizes, strides in numbers, axes of rows) of the fewest axes that visit the same places in the same order."""
    strides = strides_in(form, enumerate(arrays))
    if not split:
        return *merged_axes(form.space, strides), 0
    ends = slice(split), slice(split, None)
    rows, columns = (merged_axes(form.space[s], [own[s] for own in strides]) for s in ends)
    return (*rows[0], *columns[0]), [a + b for a, b in zip(rows[1], columns[1])], len(rows[0])


def _shaped(form: Form, kind: str, rows: int, width: int, span: int) -> Any:
    """(grid, block, counts, shape of what each fold leaves) of a kernel."""
    if kind == "places":
        return *spread(width // span), [width], ()
    split = form.split
    if kind == "columns":
        *shaped, chunks = _blocks(rows, width, span)
        return *shaped, (chunks, *form.space[split:])
    waits = any(v.phase for v in form.values())
    *shaped, chunks = _teams(rows, width, span, 1 if waits else cut(rows, width))
    return *shaped, (*form.space[:split], chunks)


def _targets(machine: Machine, form: Form, outs: Sequence[Any], parts: Sequence[int]) -> tuple[list[Any], list[Call]]:
    """Where a kernel writes, and what finishes folds that it leaves in parts."""
    values, targets, calls = form.values(), [], []
    for out, r in zip(outs, form.results):
        rest: tuple[int, ...] = ()
        if values[r].fold:
            line = form.lines[r - len(form.types)]
            axes = (a for a in dict(line.attrs)["axis"] if a < form.split)
            rest = (0,) if values[r].fold == "rows" else (*axes, form.split)
        targets.append(out)
        if any(parts[a] > 1 for a in rest):
            source: Any = values[line.operands[0]].type
            targets[-1] = machine.xp.empty(parts, wide_dtype(source.dtype.name))
            finished: Any = reduced(machine, line.op, out, targets[-1], rest)
            calls += finished
    return targets, calls


def _teams(rows: int, width: int, span: int, chunks: int) -> tuple[tuple[int, ...], tuple[int, int], list[int], int]:
    """Grid, block, counts and chunks of a kernel that folds along rows."""
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


def _layout(
    sizes: Sequence[int],
    strides: Sequence[Sequence[int]],
    outer: int,
    outs: Sequence[Any],
    arrays: Sequence[Any],
    form: Form,
    kind: str,
) -> Geometry:
    """What is compiled in. Neighbors along the last axis are packed where sizes, strides and addresses allow it; those
    of rows of any length, where arrays lie like the results."""
    moves = tuple(tuple(s != 0 for s in axes) for axes in strides)
    unit = all(s[-1] in (0, 1) for s in strides)
    packed = [(a, s) for a, s in zip(arrays, strides) if s[-1]]
    dense = tuple(prod(sizes[a + 1 :]) for a in range(len(sizes)))
    alike = tuple(k for k, s in enumerate(strides) if s == dense)
    large = [*outs, *(arrays[k] for k in alike)]  # which decide how wide a pack is: what else there is lies in caches
    even = gcd(sizes[-1], *(n for _, s in packed for n in s[:-1]), *(address(a) // a.itemsize for a, _ in packed))
    whole = large or [a for a, _ in packed]
    pack = widest_pack(even, *whole) if unit and whole else 1
    span = DRAWN if form.states() and sizes[-1] % DRAWN == 0 else pack
    reach = (sum(abs(s) * n for s, n in zip(axes, sizes)) for axes in strides)
    index, lines = index_dtype(prod(sizes), *reach), kind == "rows" and unit and len(sizes) == outer + 1
    wider = widest_pack(16, *large) if lines and alike else 1  # 16: a row may begin anywhere
    if sizes[-1] % wider:
        return Geometry(moves, outer, unit, wider, wider, index, alike)
    return Geometry(moves, outer, unit, pack, span, index)


def _counts(
    layout: Geometry, first: Sequence[int], sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> list[Any]:
    """The last arguments of a kernel, in its index type."""
    geometry = [*(sizes[a] for a in layout.sizes()), *(strides[k][a] for k, a in layout.strides())]
    return [np.dtype(layout.index).type(n) for n in (*first, *geometry)]
