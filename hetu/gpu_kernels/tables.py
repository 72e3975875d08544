"""Launches the kernels of `tables.cu` and `scatter.cu`: take, and the sums of rows that are its gradient."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from .machine import Call, Machine, contiguous, spread
from .source import kernel_file


def take(machine: Machine, out: Any, x: Any, indices: Any, *, axis: int) -> list[Call] | None:
    if not contiguous(x, indices, out):
        return None
    inner = prod(x.shape[axis + 1 :])
    kernel = machine.kernel(kernel_file("tables", S=x.dtype.name, I=indices.dtype.name), "gather")
    return [partial(kernel, *spread(out.size), (x, indices, out, out.size, indices.size, x.shape[axis], inner))]


def scatter_rows(machine: Machine, out: Any, like: Any, ids: Any, rows: Any) -> list[Call] | None:
    """Zeros, then the rows added."""
    if not contiguous(ids, rows, out):
        return None
    added = added_rows(machine, out, ids, rows)
    return None if added is None else [partial(out.fill, 0), *added]


def scatter_add(machine: Machine, out: Any, x: Any, ids: Any, updates: Any) -> list[Call] | None:
    if not contiguous(ids, updates, out):
        return None
    added = added_rows(machine, out, ids, updates)
    if added is None:
        return None
    return added if out is x else [partial(machine.xp.copyto, out, x), *added]


def added_rows(machine: Machine, out: Any, ids: Any, rows: Any, *, ordered: bool | None = None) -> list[Call] | None:
    """Calls for `out[ids] += rows`: by sorting if `ordered`, else by atomics; None sorts 16-bit floats only.

    Atomics exist for float32 and float64. A sorted sum gives the same digits in every run.
    """
    dtype = out.dtype.name
    if "float" not in dtype or rows.dtype != out.dtype:
        return None
    length, inner = out.shape[0], prod(out.shape[1:])
    text = kernel_file("scatter", S=dtype, I=ids.dtype.name)
    if ordered is None:
        ordered = dtype not in ("float32", "float64")
    if not ordered:
        kernel = machine.kernel(text, "scatter_atomic")
        return [partial(kernel, *spread(rows.size), (rows, ids, out, rows.size, length, inner))]
    order = machine.xp.empty(ids.size, "int64")
    grid, block = (-(-ids.size // 8),), (32, 8)
    kernel = machine.kernel(text, "scatter_sorted")
    return [
        sorting(machine, ids, order),
        partial(kernel, grid, block, (rows, ids, order, out, ids.size, length, inner)),
    ]


def sorting(machine: Machine, ids: Any, order: Any) -> Call:
    """A call that writes the stable sorting order of the flattened ids."""
    flat, xp = ids.reshape(-1), machine.xp

    def sort() -> None:
        order[...] = xp.argsort(flat, kind="stable")

    return sort
