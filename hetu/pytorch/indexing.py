"""What functions of PyTorch mean that read and write at places, which tensors hold."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.operators import cast_to
from ..core.types import broadcast_shapes, product
from ..onnx import indexing
from ..onnx.meaning import known
from .meanings import Lacks, means

means("index_select")(lambda x, dim, index: ops.take(x, index, axis=dim))
means("gather")(lambda x, dim, index: indexing.gather_elements(x, index, axis=dim))
means("scatter_add")(lambda x, dim, index, src: put_along(x, dim, index, src, "add"))
means("scatter.src", "scatter.value")(
    lambda x, dim, index, src=None, value=None: put_along(x, dim, index, src, "none", value)
)
REDUCTIONS = {"amax": "max", "amin": "min", "prod": "mul", "sum": "add", "mean": "add", "add": "add", "multiply": "mul"}


@means("scatter_reduce.two", "scatter.reduce")
def scatter_reduce(x: Node, dim: int, index: Node, src: Node, reduce: str, include_self: bool = True) -> Node:
    """Of what is written and, with `include_self`, of what is there."""
    first = x
    if not include_self:
        start = {"max": indexing.end(x.dtype, -1), "min": indexing.end(x.dtype, 1), "mul": 1, "add": 0}
        first = put_along(x, dim, index, None, "none", start[REDUCTIONS[reduce]])
    made = put_along(first, dim, index, src, REDUCTIONS[reduce])
    if reduce != "mean":
        return made
    count = put_along(ops.full_like(x, int(include_self)), dim, index, None, "add", 1)
    return made / ops.maximum(count, 1)


def put_along(x: Node, dim: int, index: Node, src: Any, reduction: str, value: Any = None) -> Node:
    if src is None:
        src = cast_to(ops.full_like(index, value) if isinstance(value, int) else ops.zeros_like(index) + value, x.dtype)
    src = src[tuple(slice(0, size) for size in index.shape)] if index.ndim else src
    return indexing.scatter_elements(x, index, cast_to(src, x.dtype), axis=dim, reduction=reduction)


def placed(index: Node) -> list[Node]:
    """Places; those of truths if they are known."""
    if index.dtype.kind != "b":
        return [index]
    if (truths := known(index, {})) is None:
        raise Lacks("picks by truths")
    return [ops.constant(value=of_axis) for of_axis in np.nonzero(truths)]


def in_rows(x: Node, indices: Any) -> tuple[Node, Node, list[int], int]:
    """`x` with the axes that are picked from joined in front, the places in it, the order, and where results go."""
    indices = [i for each in indices for i in ([each] if each is None else placed(each))]
    picked = [i for i, each in enumerate(indices) if each is not None]
    given = [indices[i] for i in picked]
    order = picked + [i for i in range(x.ndim) if i not in picked]
    rows = ops.permute_dims(x, tuple(order))
    shape = broadcast_shapes(*(each.shape for each in given))
    place = reduce(
        lambda total, pair: total * pair[1] + indexing.one_of(pair[0], pair[1]),
        zip(given, rows.shape),
        ops.full(shape=(), fill_value=0, dtype="int64"),
    )
    rows = ops.reshape(rows, (product(rows.shape[: len(picked)]), *rows.shape[len(picked) :]))
    side_by_side = picked == list(range(picked[0], picked[-1] + 1))
    return rows, ops.broadcast_to(place, shape), order, picked[0] if side_by_side else 0


@means("index", "_unsafe_index")
def item(x: Node, indices: Any) -> Node:
    """Of tensors of places, one an axis, or None; what they pick lies where they stand side by side, else in front."""
    rows, place, _, at = in_rows(x, indices)
    made = ops.take(rows, place, axis=0)
    order = list(range(place.ndim, made.ndim))
    order[at:at] = range(place.ndim)
    return ops.permute_dims(made, tuple(order))


@means("index_put", "_unsafe_index_put")
def put(x: Node, indices: Any, values: Node, accumulate: bool = False) -> Node:
    (first, *others) = indices
    if not others and first is not None and first.dtype.kind == "b" and values.ndim == 0 and not accumulate:
        return ops.where(ops.reshape(first, (*first.shape, *[1] * (x.ndim - first.ndim))), cast_to(values, x.dtype), x)
    rows, place, order, at = in_rows(x, indices)
    shape = [*rows.shape[1:]]
    shape[at:at] = place.shape
    values = ops.broadcast_to(cast_to(values, x.dtype), tuple(shape))
    front = [*range(at, at + place.ndim), *(i for i in range(values.ndim) if not at <= i < at + place.ndim)]
    updates = ops.reshape(ops.permute_dims(values, tuple(front)), (product(place.shape), *rows.shape[1:]))
    made = indexing.scattered(rows, ops.reshape(place, (-1,)), updates, "add" if accumulate else "none")
    made = ops.reshape(made, tuple(x.shape[i] for i in order))
    return ops.permute_dims(made, tuple(np.argsort(order).tolist()))
