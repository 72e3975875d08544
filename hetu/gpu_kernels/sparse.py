"""Launches the kernels of `sparse.cu`: products of a sparse matrix, a list of entries, and a dense one.

Entries whose places never change are sorted once, on the host, when they are bound; fed ones in every step. Several
products with the same matrix do not share one sorted copy.
"""

from __future__ import annotations

from functools import partial
from math import isqrt
from typing import Any

import numpy as np

from ..core.backend import fixed_value
from ..fuse.line_text import compute_dtype
from ..ops import sparse
from .launchers import kernel
from .machine import Call, Machine, contiguous, spread, threads_of_row, widest_pack
from .source import assemble, file_text
from .tables import sorting

CUT = 256  # entries of one segment: enough to pay for the warp, few enough that the longest row does not decide
EACH = 4  # entries of the sampled product that a thread takes part in, one after the other


@kernel(sparse.sparse_matmul)
def sparse_matmul(
    machine: Machine, out: Any, rows: Any, columns: Any, values: Any, x: Any, *, size: int
) -> list[Call] | None:
    if not contiguous(rows, columns, values, x, out) or any(a.dtype != out.dtype for a in (values, x)):
        return None
    if rows.dtype != columns.dtype:
        return None
    at = fixed_value(rows), fixed_value(columns)
    if at[0] is not None and at[1] is not None:
        return _sorted_once(machine, out, *at, values, x)
    return _sorted_each_step(machine, out, rows, columns, values, x)


@kernel(sparse.sampled_matmul)
def sampled_matmul(machine: Machine, out: Any, rows: Any, columns: Any, a: Any, b: Any) -> list[Call] | None:
    if not contiguous(rows, columns, a, b, out) or any(x.dtype != out.dtype for x in (a, b)):
        return None
    if rows.dtype != columns.dtype:
        return None
    features, entries = a.shape[1], rows.size
    pack = widest_pack(features, a, b)
    lanes = threads_of_row(features, pack)
    launch = machine.kernel(text(out.dtype.name, rows.dtype.name, lanes, pack), "entries_sampled")
    grid, sizes = (-(-entries // (8 * EACH * 32 // lanes)),), (entries, len(a), features, len(b))
    return [partial(launch, grid, (32, 8), (rows, columns, a, b, out, *sizes))]


def text(dtype: str, index: str, lanes: int, pack: int) -> str:
    """The kernels for values of `dtype` and columns of dtype `index`."""
    early = f"constexpr int LANES = {lanes}, PACK = {pack}, EACH = {EACH};\n"
    return assemble(early + file_text("sparse"), "sparse.cu", S=dtype, I=index)


def _product(
    machine: Machine, out: Any, starts: Any, target: Any, columns: Any, weights: Any, x: Any, parts: Any
) -> Call:
    features, segments = out.shape[1], len(target)
    pack = widest_pack(features, x, out)
    lanes = threads_of_row(features, pack)
    launch = machine.kernel(text(out.dtype.name, columns.dtype.name, lanes, pack), "segments_product")
    grid, sizes = (-(-segments // 8), -(-features // (lanes * pack))), (segments, features, len(x))
    return partial(launch, grid, (32, 8), (starts, target, columns, weights, x, out, parts, *sizes))


def _sorted_once(machine: Machine, out: Any, rows: np.ndarray, columns: np.ndarray, values: Any, x: Any) -> list[Call]:
    asarray, empty = machine.xp.asarray, machine.xp.empty
    order = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[order], np.arange(len(out) + 1))  # rows outside the matrix fall off at both ends
    cuts = _Cuts(starts)
    narrow = "int32" if len(x) <= np.iinfo("int32").max else "int64"
    places = asarray(np.where((columns >= 0) & (columns < len(x)), columns, -1)[order].astype(narrow))
    weights, reorder = _weights(machine, values, order)
    parts = empty((max(1, cuts.parts), out.shape[1]), compute_dtype(out.dtype.name))
    first = _product(machine, out, asarray(cuts.starts), asarray(cuts.target), places, weights, x, parts)
    calls = [*reorder, first]
    if len(cuts.rows):
        launch = machine.kernel(text(out.dtype.name, narrow, 32, 1), "join_segments")
        n = len(cuts.rows) * out.shape[1]
        where = asarray(cuts.rows), asarray(cuts.first)
        calls.append(partial(launch, *spread(n), (parts, *where, out, n, out.shape[1])))
    return calls


def _weights(machine: Machine, values: Any, order: np.ndarray) -> tuple[Any, list[Call]]:
    """The values in the order of the rows, and the calls that bring them there in each step."""
    asarray = machine.xp.asarray
    fixed = fixed_value(values)
    if fixed is not None:
        return asarray(fixed[order]), []
    weights = machine.xp.empty_like(values)
    return weights, [partial(machine.xp.take, values, asarray(order), out=weights)]


class _Cuts:
    """Rows that begin at `starts` cut into segments, so that neither these nor the parts of a row become many."""

    def __init__(self, starts: np.ndarray) -> None:
        lengths = np.diff(starts)
        cut = max(CUT, isqrt(int(lengths.max())))
        counts = np.maximum(1, -(-lengths // cut))
        begin = np.cumsum(counts) - counts  # of each row's segments
        row = np.repeat(np.arange(len(lengths)), counts)
        self.starts = np.append(starts[row] + cut * (np.arange(len(row)) - begin[row]), starts[-1])
        several = counts[row] > 1
        self.parts = int(several.sum())
        self.target = np.where(several, -np.cumsum(several), row)
        self.rows = np.flatnonzero(counts > 1)
        self.first = np.append(0, np.cumsum(counts[self.rows]))


def _sorted_each_step(machine: Machine, out: Any, rows: Any, columns: Any, values: Any, x: Any) -> list[Call]:
    """By sorting; a long row is not cut, as how many there are is not known."""
    xp, order = machine.xp, machine.xp.empty(rows.size, "int64")
    ids = rows if rows.dtype == "int64" else xp.empty(rows.size, "int64")  # others may not count up to `len(out)`
    ordered = [xp.empty_like(a) for a in (ids, columns, values)]
    starts, ends = xp.empty(len(out) + 1, "int64"), xp.arange(len(out) + 1, dtype="int64")

    def find() -> None:
        starts[...] = xp.searchsorted(ordered[0], ends)

    none = xp.empty((1, out.shape[1]), compute_dtype(out.dtype.name))
    gathers = [partial(xp.take, a, order, out=b) for a, b in zip((ids, columns, values), ordered)]
    target = xp.arange(len(out), dtype="int64")
    return [
        *([] if ids is rows else [partial(xp.copyto, ids, rows)]),
        sorting(machine, ids, order),
        *gathers,
        find,
        _product(machine, out, starts, target, *ordered[1:], x, none),
    ]
