"""Rows of tables in `rows.c`: taken by their ids, and added where their ids say.

Gain: 5 to 10 times the speed of the forward functions, but none for `take`, which C makes without Python. Off with
`HETU_KERNELS=0`.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..fuse.places import fewest_axes
from ..ops.bags import bag_ids
from ..ops.index import RowWindow, one_hot, scatter_add, scatter_rows, take
from .c_calls import c_call
from .moves import grain_of, in_order, moved
from .recipes import kernel


@kernel(take)
def take_bind(xp: ModuleType, out: Any, x: Any, indices: Any, *, axis: int, window: RowWindow) -> list[Call] | None:
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    sizes = (indices.size, x.shape[axis], math.prod(after), low_of(window))
    return on_rows("take_rows", (out, x), indices, sizes, math.prod(before) * indices.size, out.nbytes)


@kernel(scatter_rows)
def scatter_rows_bind(
    xp: ModuleType, out: Any, like: Any, ids: Any, rows: Any, *, window: RowWindow
) -> list[Call] | None:
    return add_rows(out, ids, rows, window, clear=True)


@kernel(scatter_add)
def scatter_add_bind(xp: ModuleType, out: Any, x: Any, ids: Any, updates: Any) -> list[Call] | None:
    added = add_rows(out, ids, updates)
    return None if added is None else [*moved(out, x), *added]


@kernel(one_hot)
def one_hot_bind(xp: ModuleType, out: Any, ids: Any, *, depth: int, dtype: str) -> list[Call] | None:
    return on_rows("one_hot", (out,), ids, (depth,), ids.size, out.nbytes)


@kernel(bag_ids)
def bag_ids_bind(xp: ModuleType, out: Any, starts: Any, ids: Any) -> list[Call] | None:
    (starts,), calls = in_order(starts, dtype=np.int64)
    words, jobs = (out, starts, len(starts), len(ids)), len(starts)
    made = c_call("rows.c", "bag_ids", "float32", *words, jobs=jobs, grain=grain_of(jobs, out.nbytes))
    return None if made is None else [*calls, made]


def add_rows(
    out: np.ndarray,
    ids: np.ndarray,
    rows: np.ndarray,
    window: RowWindow = None,
    rate: np.ndarray | None = None,
    *,
    clear: bool = False,
) -> list[Call] | None:
    """Calls for `out[ids] += rows`, of an `out` that is 0 before with `clear`; for `-= rate * rows` with a rate."""
    if rows.dtype != out.dtype:
        return None
    lies = _two_axes(ids, rows)
    (rows,), copies = ([rows], []) if lies else in_order(rows)
    inner = math.prod(out.shape[1:])
    sizes = (rows, *(lies or (1, ids.size, 0, inner)), inner, low_of(window), 0 if rate is None else rate, clear)
    made = on_rows("add_rows", (out,), ids, sizes, len(out), rows.nbytes + clear * out.nbytes)
    return made and [*copies, *made]


def _two_axes(ids: np.ndarray, rows: np.ndarray) -> tuple[int, ...] | None:
    """Sizes, and strides in numbers, of two axes along which the rows lie, each of them in order; None for more."""
    if not rows.size or not rows[(0,) * ids.ndim].flags.c_contiguous or any(s % rows.itemsize for s in rows.strides):
        return None
    sizes, (strides,) = fewest_axes(ids.shape, [[s // rows.itemsize for s in rows.strides[: ids.ndim]]])
    missing = 2 - len(sizes)
    return None if len(sizes) > 2 else (*[1] * missing, *sizes, *[0] * missing, *strides)


def low_of(window: RowWindow) -> int:
    """The id of the first row that this rank has."""
    return 0 if window is None else window[0][0]


def on_rows(
    function: str, arrays: tuple[np.ndarray, ...], ids: np.ndarray, sizes: tuple[Any, ...], jobs: int, work: int
) -> list[Call] | None:
    """Calls of a function of `rows.c`, which wants arrays of one dtype that lie in order, and ids of 64 bits.

    `work` are the bytes that all jobs together move. The first of the arrays is written.
    """
    out, *read = arrays
    if any(a.dtype != out.dtype for a in read) or not out.flags.c_contiguous:
        return None
    if not out.size:
        return []
    fit, copies = in_order(*read)
    places, more = in_order(ids, dtype=np.int64)
    call = c_call("rows.c", function, out.dtype, out, *fit, *places, *sizes, jobs=jobs, grain=grain_of(jobs, work))
    return None if call is None else [*copies, *more, call]
