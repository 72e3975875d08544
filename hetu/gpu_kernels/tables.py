"""Launches the kernels of `tables.cu` and `scatter.cu`: gathering by ids, and the sums that are its gradients.

No kernel of this folder adds numbers by atomics: what meets in one place is sorted and added in that order, so a step
gives the same digits in every run, for the price of a sort, some ten launches. Atomics are not used, even where they
would be faster.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from ..fuse.line_text import compute_dtype
from ..ops import along_axis, index
from .launchers import kernel
from .machine import Call, Machine, address, contiguous, index_dtype, spread, spread_rows, widest_pack
from .source import assemble, file_text, kernel_file

MOST_IN_TURN = 64  # elements of one column that a thread adds one after the other
PIECE = 64  # rows of one id that a thread adds one after the other; more are added in pieces


def _dtypes(ids: Any, *arrays: Any) -> dict[str, str]:
    return {"S": arrays[0].dtype.name, "I": ids.dtype.name, "Index": index_dtype(*(a.size for a in arrays))}


def _kernel(machine: Machine, name: str, ids: Any, *arrays: Any) -> Any:
    return machine.kernel(kernel_file("tables", **_dtypes(ids, *arrays)), name)


def with_runs(name: str) -> str:
    """The hand-written file `name` after that of the sums by id; both need PACK."""
    files = "".join(f'#line 1 "{file}.cu"\n{file_text(file)}' for file in ("runs", name))
    return f"constexpr int PIECE = {PIECE};\n{files}"


def scatter_text(pack: int, **dtypes: str) -> str:
    return assemble(f"constexpr int PACK = {pack};\n{with_runs('scatter')}", "scatter.cu", **dtypes)


@kernel(index.take)
def take(machine: Machine, out: Any, x: Any, indices: Any, *, axis: int) -> list[Call] | None:
    if not contiguous(x, indices, out):
        return None
    inner, length = prod(x.shape[axis + 1 :]), x.shape[axis]
    row_bytes = inner * x.dtype.itemsize
    if row_bytes % 8 == 0 and (address(x) | address(out)) % 8 == 0:  # bits are moved, 8 bytes a thread
        x, out, inner = x.reshape(-1).view("int64"), out.reshape(-1).view("int64"), row_bytes // 8
    launch, sizes = _kernel(machine, "gather", indices, x, out), (out.size, indices.size, length, inner)
    return [partial(launch, *spread(out.size), (x, indices, out, *sizes))]


@kernel(along_axis.take_along_axis)
def take_along_axis(machine: Machine, out: Any, x: Any, indices: Any, *, axis: int) -> list[Call] | None:
    if not contiguous(x, indices, out):
        return None
    sizes = (out.size, indices.shape[axis], x.shape[axis], prod(x.shape[axis + 1 :]))
    launch = _kernel(machine, "gather_along", indices, x, out)
    return [partial(launch, *spread(out.size), (x, indices, out, *sizes))]


@kernel(along_axis.put_along_axis_add)
def put_along_axis_add(
    machine: Machine, out: Any, like: Any, indices: Any, values: Any, *, axis: int
) -> list[Call] | None:
    """Column by column where that keeps a GPU busy, else as rows of one element."""
    if not contiguous(indices, values, out) or values.dtype != out.dtype or "float" not in out.dtype.name:
        return None
    count, inner = indices.shape[axis], prod(indices.shape[axis + 1 :])
    columns, text = indices.size // count, scatter_text(1, **_dtypes(indices, values, out))
    sizes = (count, out.shape[axis], inner)
    if count <= max(MOST_IN_TURN, columns // 64):
        launch = machine.kernel(text, "add_along")
        return [partial(out.fill, 0), partial(launch, *spread(columns), (values, indices, out, columns, *sizes))]
    places, launch = machine.xp.empty(indices.size, "int64"), machine.kernel(text, "places_along")
    find = partial(launch, *spread(indices.size), (indices, places, indices.size, *sizes))
    return [partial(out.fill, 0), find, *added_rows(machine, out.reshape(-1), places, values.reshape(-1))]


@kernel(index.scatter_rows)
def scatter_rows(machine: Machine, out: Any, like: Any, ids: Any, rows: Any) -> list[Call] | None:
    """Zeros, then the rows added."""
    if not contiguous(ids, rows, out):
        return None
    added = added_rows(machine, out, ids, rows)
    return None if added is None else [partial(out.fill, 0), *added]


@kernel(index.scatter_add)
def scatter_add(machine: Machine, out: Any, x: Any, ids: Any, updates: Any) -> list[Call] | None:
    if not contiguous(ids, updates, out):
        return None
    added = added_rows(machine, out, ids, updates)
    if added is None:
        return None
    return added if out is x else [partial(machine.xp.copyto, out, x), *added]


def added_rows(machine: Machine, out: Any, ids: Any, rows: Any) -> list[Call] | None:
    """Calls for `out[ids] += rows`."""
    if "float" not in out.dtype.name or rows.dtype != out.dtype:
        return None
    sizes = count, _, inner = ids.size, out.shape[0], prod(out.shape[1:])
    pack = widest_pack(inner, rows, out)
    text = scatter_text(pack, **_dtypes(ids, out))
    runs, calls = summed(machine, text, ids, rows, inner, pack)
    launch = machine.kernel(text, "add_rows")
    return [*calls, partial(launch, *spread_rows(count, inner, pack), (*runs, out, *sizes))]


def summed(
    machine: Machine, text: str, ids: Any, rows: Any, inner: int, pack: int
) -> tuple[tuple[Any, ...], list[Call]]:
    """The sorted ids, the rows, the order of both and the sums of the pieces of long runs; the calls that find them.

    Ids are brought in order once, so that the kernels read them in a row, and not each by a chain of two loads.
    """
    xp, flat, pieces = machine.xp, ids.reshape(-1), (ids.size - 1) // PIECE
    ordered, order = xp.empty_like(flat), xp.empty(ids.size, "int64")
    parts = xp.empty((pieces + 1, inner), compute_dtype(rows.dtype.name))
    runs = ordered, rows, order, parts
    calls: list[Call] = [sorting(machine, ids, order), partial(xp.take, flat, order, out=ordered)]
    if pieces:
        launch = machine.kernel(text, "sum_pieces")
        calls.append(partial(launch, *spread_rows(pieces, inner, pack), (*runs, ids.size, inner)))
    return runs, calls


def sorting(machine: Machine, ids: Any, order: Any) -> Call:
    """A call that writes the stable sorting order of the flattened ids."""
    flat, xp = ids.reshape(-1), machine.xp

    def sort() -> None:
        order[...] = xp.argsort(flat, kind="stable")

    return sort
