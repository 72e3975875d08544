"""Launches the kernels of `tables.cu` and `scatter.cu`: gathering by ids, and the sums that are its gradients."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from .machine import Call, Machine, address, contiguous, index_dtype, spread
from .source import kernel_file

MOST_IN_TURN = 64  # elements of one column that a thread adds one after the other


def _kernel(machine: Machine, file: str, name: str, ids: Any, *arrays: Any) -> Any:
    dtypes = {"S": arrays[0].dtype.name, "I": ids.dtype.name, "Index": index_dtype(*(a.size for a in arrays))}
    return machine.kernel(kernel_file(file, **dtypes), name)


def take(machine: Machine, out: Any, x: Any, indices: Any, *, axis: int) -> list[Call] | None:
    if not contiguous(x, indices, out):
        return None
    inner, length = prod(x.shape[axis + 1 :]), x.shape[axis]
    row_bytes = inner * x.dtype.itemsize
    if row_bytes % 8 == 0 and (address(x) | address(out)) % 8 == 0:  # bits are moved, 8 bytes a thread
        x, out, inner = x.reshape(-1).view("int64"), out.reshape(-1).view("int64"), row_bytes // 8
    kernel, sizes = _kernel(machine, "tables", "gather", indices, x, out), (out.size, indices.size, length, inner)
    return [partial(kernel, *spread(out.size), (x, indices, out, *sizes))]


def take_along_axis(machine: Machine, out: Any, x: Any, indices: Any, *, axis: int) -> list[Call] | None:
    if not contiguous(x, indices, out):
        return None
    sizes = (out.size, indices.shape[axis], x.shape[axis], prod(x.shape[axis + 1 :]))
    kernel = _kernel(machine, "tables", "gather_along", indices, x, out)
    return [partial(kernel, *spread(out.size), (x, indices, out, *sizes))]


def put_along_axis_add(
    machine: Machine, out: Any, like: Any, indices: Any, values: Any, *, axis: int
) -> list[Call] | None:
    """Column by column where that keeps a GPU busy, which gives the same digits in every run; else by atomics."""
    if not contiguous(indices, values, out) or values.dtype != out.dtype or "float" not in out.dtype.name:
        return None
    count, inner = indices.shape[axis], prod(indices.shape[axis + 1 :])
    columns = indices.size // count
    in_turn = count <= max(MOST_IN_TURN, columns // 64)
    if not in_turn and not has_atomics(out.dtype):
        return None
    kernel = _kernel(machine, "scatter", "add_along" if in_turn else "add_along_atomic", indices, values, out)
    threads = columns if in_turn else indices.size
    sizes = (threads, count, out.shape[axis], inner)
    return [partial(out.fill, 0), partial(kernel, *spread(threads), (values, indices, out, *sizes))]


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


def has_atomics(dtype: Any) -> bool:
    """Whether the memory of a GPU adds numbers of this dtype by itself."""
    return dtype.name in ("float32", "float64")


def added_rows(machine: Machine, out: Any, ids: Any, rows: Any, *, ordered: bool | None = None) -> list[Call] | None:
    """Calls for `out[ids] += rows`: by sorting if `ordered`, else by atomics; None sorts where there are no atomics.

    Sorting gives the same digits in every run, but takes some ten launches more.
    """
    dtype = out.dtype.name
    if "float" not in dtype or rows.dtype != out.dtype:
        return None
    length, inner = out.shape[0], prod(out.shape[1:])
    if ordered is None:
        ordered = not has_atomics(out.dtype)
    if not ordered:
        kernel = _kernel(machine, "scatter", "scatter_atomic", ids, rows)
        return [partial(kernel, *spread(rows.size), (rows, ids, out, rows.size, length, inner))]
    order = machine.xp.empty(ids.size, "int64")
    grid, block = (-(-ids.size // 8),), (32, 8)
    kernel = _kernel(machine, "scatter", "scatter_sorted", ids, rows)
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
