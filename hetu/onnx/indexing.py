"""Operators of ONNX that make, join and cut axes and ask for sizes, and that read and write by index.

Negative places count from the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np

from .. import ops
from ..core.errors import DataError
from ..core.graph import OPS, Node
from ..core.op import as_node
from ..core.operators import cast_to
from ..core.types import Dim, Size, broadcast_shapes, is_float, normalize_axis, product
from ..ops.sparse import row_maxima
from .meaning import KnownArray, OutputCount, bounded, meaning, meanings
from .standard import broken, dtype_of

ZERO = np.zeros(1, np.float32)
FAR = 1 << 31  # slices of open sizes that reach so far go to the end


def whole(values: Any) -> list[Any]:
    """Numbers, and sizes that are open, of a known array of any axes."""
    return [] if values is None else np.ravel(values).tolist()


def sizes(given: Iterable[Size]) -> Node:
    """Sizes as a vector, of which some may be open."""
    entries = list(given)
    if not any(isinstance(s, Dim) for s in entries):
        return ops.constant(value=np.array(entries, np.int64))
    return ops.stack([as_node(s) for s in entries])


def places(size: Size, ndim: int, axis: int) -> Node:
    """0, 1, ... along one of so many axes."""
    return ops.reshape(ops.arange(size), (-1,) + (1,) * (ndim - axis - 1))


meanings(
    Concat=lambda *inputs, axis: ops.concat(inputs, axis=axis),
    Gather=lambda data, indices, *, axis=0: ops.take(data, placed(indices, data.shape[axis]), axis=axis),
    Flatten=lambda x, *, axis=1: ops.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:]))),
    EyeLike=lambda x, *, k=0, dtype=0: cast_to(
        ops.equal(places(x.shape[0], 2, 0) + k, places(x.shape[1], 2, 1)), dtype_of(dtype) if dtype else x.dtype
    ),
    Shape=lambda data, *, start=0, end=None: sizes(data.shape[start:end]),
    Size=lambda data: as_node(product(data.shape)),
    Transpose=lambda data, *, perm=None: ops.permute_dims(data, perm or tuple(range(data.ndim))[::-1]),
)
meanings(
    known=1,
    Expand=lambda data, shape: ops.broadcast_to(data, broadcast_shapes(data.shape, tuple(whole(shape)))),
    Reshape=lambda data, shape, *, allowzero=0: ops.reshape(
        data, tuple(data.shape[i] if s == 0 and not allowzero else s for i, s in enumerate(whole(shape)))
    ),
    Squeeze=lambda data, axes=None: ops.squeeze(
        data, [i for i, size in enumerate(data.shape) if int(size) == 1] if axes is None else whole(axes)
    ),
    Tile=lambda x, repeats: ops.tile(x, whole(repeats)),
    Trilu=lambda x, k=None, *, upper=1: (ops.triu if upper else ops.tril)(x, k=sum(whole(k))),
    Unsqueeze=lambda data, axes: ops.expand_dims(data, axis=tuple(whole(axes))),
)
meanings(
    known=0,
    ConstantOfShape=lambda shape, *, value=ZERO: ops.full(
        shape=tuple(whole(shape)), fill_value=value.flat[0].item(), dtype=value.dtype
    ),
    Range=lambda start, limit, delta: ops.arange(
        whole(start)[0], whole(limit)[0], whole(delta)[0], np.asarray(delta).dtype
    ),
)


@meaning("Constant")
def constant(
    *, value: Any = None, value_float: Any = None, value_floats: Any = None, value_int: Any = None,
    value_ints: Any = None,
) -> Node:  # fmt: skip
    given = zip((value_float, value_floats, value_int, value_ints), ("float32", "float32", "int64", "int64"))
    return ops.constant(value=next((np.array(number, dtype) for number, dtype in given if number is not None), value))


@meaning("Split")
def split(
    x: Node, split: KnownArray = None, *, axis: int = 0, num_outputs: int | None = None, outputs: OutputCount = 1
) -> tuple[Node, ...]:
    parts: list[Any] = whole(split)
    if split is None:
        step = (x.shape[axis] + outputs - 1) // outputs
        parts = [*[step] * (outputs - 1), x.shape[axis] - step * (outputs - 1)]
    unequal = isinstance(x.shape[axis], int) and (sum(parts) != x.shape[axis] or min(parts) < 0)
    if len(parts) != outputs or num_outputs not in (None, outputs) or unequal:
        said = f"cuts {x.shape[axis]} into {outputs} parts of {parts}, where {num_outputs or outputs} are wanted"
        raise broken(said)
    ends = np.cumsum(parts[:-1], dtype=object).tolist()
    return tuple(ops.split(x, ends, axis=axis))


@meaning("Slice")
def slice_(data: Node, starts: KnownArray, ends: KnownArray, axes: KnownArray = None, steps: KnownArray = None) -> Node:
    count, key = len(whole(starts)), [slice(None)] * data.ndim
    each = whole(axes) or range(count), whole(starts), whole(ends), whole(steps) or [1] * count
    for axis, start, stop, step in zip(*each, strict=True):
        axis = normalize_axis(axis, data.ndim)
        key[axis] = _slice(start, stop, step, data.shape[axis])
    return data[tuple(key)]


def _slice(start: Any, stop: Any, step: int, size: Size) -> slice:
    """As NumPy's, but that whatever lies before the first place of a step back is that place."""
    if step < 0 and isinstance(start, int) and isinstance(size, int):
        start = max(start, -size)
    way = 1 if step > 0 else -1
    start = None if isinstance(start, int) and -start * way >= FAR else start
    return slice(start, None if isinstance(stop, int) and stop * way >= FAR else stop, step)


MODES: dict[str, Any] = {mode: mode for mode in ("reflect", "edge", "wrap")}  # NumPy calls them alike


@meaning("Pad")
def pad(
    data: Node, pads: KnownArray, value: KnownArray = None, axes: KnownArray = None, *, mode: str = "constant"
) -> Node:
    """Borders of a value, or of numbers of `data` by their places; negative ones are cut off, open ones are borders."""
    chosen = [normalize_axis(a, data.ndim) for a in (range(data.ndim) if axes is None else whole(axes))]
    pairs = np.reshape(np.array(whole(pads), object), (2, len(chosen))).T
    key, widths = [slice(None)] * data.ndim, [(0, 0)] * data.ndim
    for axis, pair in zip(chosen, pairs):
        cut = [-n if isinstance(n, int) and n < 0 else 0 for n in pair]
        key[axis] = slice(cut[0], -cut[1] or None)
        widths[axis] = pair[0] + cut[0], pair[1] + cut[1]
    x = data[tuple(key)]
    if mode == "constant":
        filling = 0 if value is None else np.ravel(value)[0].item() + 0  # a number, also of a boolean
        return ops.pad(x, pad_width=tuple(widths), value=filling)
    if mode not in MODES:
        raise DataError(f"pads by the mode {mode!r}", fix=f"export with one of constant, {', '.join(MODES)}")
    for axis, width in enumerate(widths):
        if any(width):
            bounded(sum(width))
            x = ops.take(x, np.pad(np.arange(int(x.shape[axis])), width, MODES[mode]), axis=axis)
    return x


# -- by index ------------------------------------------------------------------------------------------------------


def placed(indices: Node, size: Size) -> Node:
    """Places that are not negative."""
    wide = cast_to(indices, np.dtype("int64"))
    return ops.where(wide < 0, wide + size, wide)


def joined(along: Iterable[Any], sizes: Iterable[Size]) -> Any:
    """The place among all numbers of an array of what lies at these places along its axes."""
    return reduce(lambda total, axis: total * axis[1] + axis[0], zip(along, sizes), 0)


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
    leading = (places(size, indices.ndim - 1, axis) for axis, size in enumerate(shape[:batch]))
    named = (one_of(indices[..., k], size) for k, size in enumerate(shape[batch:]))
    made: Node = joined((*leading, *named), shape)
    return made


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
    ids = joined(
        (one_of(indices, s) if i == axis else places(indices.shape[i], data.ndim, i) for i, s in enumerate(data.shape)),
        data.shape,
    )
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


# Here sizes of results follow from what is known when the graph is built.
meanings(known=0, NonZero=lambda x: ops.constant(value=np.array(np.nonzero(np.atleast_1d(x)), np.int64)))
meanings(
    known=1,
    Compress=lambda x, condition, *, axis=None: ops.take(
        ops.flatten(x) if axis is None else x, np.nonzero(condition)[0], axis=axis or 0
    ),
)


@meaning("Unique")
def unique(x: KnownArray, *, axis: int | None = None, sorted: int = 1) -> tuple[Node, ...]:
    values, first, inverse, counts = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    order = np.arange(len(first)) if sorted else np.argsort(first)
    values = np.take(values, order, axis=axis or 0)
    found = values, first[order], np.argsort(order)[np.ravel(inverse)], counts[order]
    return tuple(ops.constant(value=np.ascontiguousarray(part)) for part in found)
