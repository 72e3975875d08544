"""Operators of ONNX that read and write by index. Negative places count from the end."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import ops
from ..core.errors import DataError
from ..core.graph import OPS, Node
from ..core.operators import cast_to
from ..core.types import Size, is_float, normalize_axis, product
from ..ops.sparse import row_maxima
from .meaning import KnownArray, meaning, meanings
from .shapes import places, whole


def placed(indices: Node, size: Size) -> Node:
    """Places that are not negative."""
    wide = cast_to(indices, np.dtype("int64"))
    return ops.where(wide < 0, wide + size, wide)


meanings({"Gather": lambda data, indices, *, axis=0: ops.take(data, placed(indices, data.shape[axis]), axis=axis)})


@meaning("GatherElements")
def gather_elements(data: Node, indices: Node, *, axis: int = 0) -> Node:
    axis = normalize_axis(axis, data.ndim)
    x = data[tuple(slice(None) if i == axis else slice(0, s) for i, s in enumerate(indices.shape))]
    return ops.take_along_axis(x, placed(indices, data.shape[axis]), axis=axis)


def one_of(indices: Node, size: Size) -> Node:
    """As `placed`, for one of several axes: what lies outside of it would be a place of another row."""
    return OPS["within"](placed(indices, size), size=size, what="index")


def rows_of(indices: Node, shape: tuple[Size, ...], batch: int = 0) -> Node:
    """The row that each index names, a vector along the last axis, among all of `shape`, flat."""
    total: Node = ops.zeros_like(placed(indices[..., 0], 1))
    for axis, size in enumerate(shape[:batch]):
        total = total * size + places(size, total.ndim, axis)
    for k, size in enumerate(shape[batch:]):
        total = total * size + one_of(indices[..., k], size)
    return total


@meaning("GatherND")
def gather_nd(data: Node, indices: Node, *, batch_dims: int = 0) -> Node:
    depth = batch_dims + int(indices.shape[-1])
    leading = data.shape[:depth]
    rows = ops.reshape(data, (product(leading), *data.shape[depth:]))
    return ops.take(rows, rows_of(indices, leading, batch_dims), axis=0)


def end(dtype: np.dtype, sign: int) -> float:
    """The last number of a dtype, which joins with others as none does."""
    return sign * math.inf if is_float(dtype) else int(np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min)


JOINED: dict[str, tuple[Any, Any, Any]] = {  # of two, of many, and of none
    "mul": (OPS["multiply"], ops.prod, lambda dtype: 1),
    "max": (ops.maximum, ops.max, lambda dtype: end(dtype, -1)),
    "min": (ops.minimum, ops.min, lambda dtype: end(dtype, 1)),
}


def scattered(rows: Node, ids: Node, updates: Node, reduction: str) -> Node:
    """`rows` with updates at `ids`, in their place or joined with them.

    Products and extrema take the memory of rows times updates.
    """
    if reduction == "add":
        return ops.scatter_add(rows, ids, updates)
    if reduction in JOINED:
        join, whole, nothing = JOINED[reduction]
        here = ops.equal(ops.expand_dims(ops.arange(rows.shape[0]), axis=1), ids)
        shape = (rows.shape[0], ids.shape[0], *(1,) * (rows.ndim - 1))
        made: Node = join(rows, whole(ops.where(ops.reshape(here, shape), updates, nothing(rows.dtype)), axis=1))
        return made
    if reduction != "none":
        raise DataError(f"writes by the reduction {reduction!r}", fix=f"export with none, add, {', '.join(JOINED)}")
    last = row_maxima(ids, ops.arange(ids.shape[0], dtype="float64"), size=rows.shape[0])  # of one place this counts
    source = ops.where(last >= 0, last + rows.shape[0], ops.arange(rows.shape[0]))
    return ops.take(ops.concat([rows, updates]), cast_to(source, np.dtype("int64")), axis=0)


@meaning("ScatterND")
def scatter_nd(data: Node, indices: Node, updates: Node, *, reduction: str = "none") -> Node:
    depth = int(indices.shape[-1])
    leading, rest = data.shape[:depth], data.shape[depth:]
    rows = ops.reshape(data, (product(leading), *rest))
    ids = ops.reshape(rows_of(indices, leading), (-1,))
    made = scattered(rows, ids, ops.reshape(updates, (product(indices.shape[:-1]), *rest)), reduction)
    return ops.reshape(made, data.shape)


@meaning("ScatterElements", "Scatter")
def scatter_elements(data: Node, indices: Node, updates: Node, *, axis: int = 0, reduction: str = "none") -> Node:
    axis = normalize_axis(axis, data.ndim)
    ids = ops.zeros_like(placed(indices, 1))
    for i, size in enumerate(data.shape):
        ids = ids * size + (one_of(indices, size) if i == axis else places(indices.shape[i], data.ndim, i))
    made = scattered(ops.flatten(data), ops.flatten(ids), ops.flatten(updates), reduction)
    return ops.reshape(made, data.shape)


@meaning("TensorScatter")
def tensor_scatter(
    past: Node, update: Node, indices: Node | None = None, *, axis: int = -2, mode: str = "linear"
) -> Node:
    """A cache, the rows of each sample from a place on replaced, around the end with "circular"."""
    axis, n = normalize_axis(axis, past.ndim), past.shape[0]
    first = ops.full(shape=(n,), fill_value=0, dtype="int64") if indices is None else placed(indices, 0)
    steps = ops.reshape(first, (n, 1)) + ops.arange(update.shape[axis])
    steps = steps % past.shape[axis] if mode == "circular" else steps
    shape = tuple(-1 if i == axis else n if i == 0 else 1 for i in range(past.ndim))
    return scatter_elements(past, ops.broadcast_to(ops.reshape(steps, shape), update.shape), update, axis=axis)


@meaning("OneHot")
def one_hot(indices: Node, depth: KnownArray, values: Node, *, axis: int = -1) -> Node:
    count, axis = int(whole(depth)[0]), normalize_axis(axis, indices.ndim + 1)
    there = ops.equal(ops.expand_dims(placed(indices, count), axis), places(count, indices.ndim + 1, axis))
    return ops.where(there, values[1], values[0])


# -- what is known when the graph is built, as the sizes of results follow from it ----------------------------------


meanings({"NonZero": lambda x: ops.constant(value=np.array(np.nonzero(np.atleast_1d(x)), np.int64))}, known=0)


@meaning("Compress")
def compress(x: Node, condition: KnownArray, *, axis: int | None = None) -> Node:
    return ops.take(ops.flatten(x) if axis is None else x, np.nonzero(condition)[0], axis=axis or 0)


@meaning("Unique")
def unique(x: KnownArray, *, axis: int | None = None, sorted: int = 1) -> tuple[Node, ...]:
    values, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    order = np.arange(len(first)) if sorted else np.argsort(first)
    values = np.take(values, order, axis=axis or 0)
    found = values, first[order], np.argsort(order)[np.ravel(inverse)], counts[order]
    return tuple(ops.constant(value=np.ascontiguousarray(part)) for part in found)
