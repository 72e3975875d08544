"""Operators of ONNX that make, rename, join and cut axes, and those that ask for sizes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import ops
from ..core.errors import DataError
from ..core.graph import Node
from ..core.op import as_node
from ..core.operators import cast_to
from ..core.types import Dim, Size, broadcast_shapes, normalize_axis, product
from .known import bounded
from .meaning import DType, KnownArray, OutputCount, meaning, meanings

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


@meaning("Constant")
def constant(
    *,
    value: Any = None,
    value_float: float | None = None,
    value_floats: Any = None,
    value_int: int | None = None,
    value_ints: Any = None,
) -> Node:
    given = [(value_float, np.float32), (value_floats, np.float32), (value_int, np.int64), (value_ints, np.int64)]
    made = [np.array(number, dtype) for number, dtype in given if number is not None]
    return ops.constant(value=made[0] if made else value)


meanings(
    {
        "Shape": lambda data, *, start=0, end=None: sizes(data.shape[start:end]),
        "Size": lambda data: as_node(product(data.shape)),
        "Concat": lambda *inputs, axis: ops.concat(inputs, axis=axis),
        "Transpose": lambda data, *, perm=None: ops.permute_dims(data, perm or tuple(range(data.ndim))[::-1]),
    }
)
meanings(
    {
        "Expand": lambda data, shape: ops.broadcast_to(data, broadcast_shapes(data.shape, tuple(whole(shape)))),
        "Reshape": lambda data, shape, *, allowzero=0: ops.reshape(
            data, tuple(data.shape[i] if s == 0 and not allowzero else s for i, s in enumerate(whole(shape)))
        ),
        "Tile": lambda x, repeats: ops.tile(x, whole(repeats)),
        "Trilu": lambda x, k=None, *, upper=1: (ops.triu if upper else ops.tril)(x, k=sum(whole(k))),
        "Unsqueeze": lambda data, axes: ops.expand_dims(data, axis=tuple(whole(axes))),
    },
    known=1,
)


@meaning("Flatten")
def flatten(x: Node, *, axis: int = 1) -> Node:
    axis = axis + x.ndim if axis < 0 else axis
    return ops.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))


@meaning("Squeeze")
def squeeze(data: Node, axes: KnownArray = None) -> Node:
    if axes is None:  # all that are 1, which is not known of open ones
        axes = [i for i, s in enumerate(data.shape) if int(s) == 1]
    return ops.squeeze(data, tuple(whole(axes)))


@meaning("ConstantOfShape")
def constant_of_shape(shape: KnownArray, *, value: Any = None) -> Node:
    value = np.zeros(1, np.float32) if value is None else value
    return ops.full(shape=tuple(whole(shape)), fill_value=value.flat[0].item(), dtype=value.dtype)


@meaning("Range")
def range_(start: KnownArray, limit: KnownArray, delta: KnownArray) -> Node:
    first, end, step = (whole(v)[0] for v in (start, limit, delta))
    return ops.arange(first, end, step, np.asarray(delta).dtype)


@meaning("EyeLike")
def eye_like(x: Node, *, k: int = 0, dtype: DType = None) -> Node:
    rows, columns = x.shape
    return cast_to(ops.equal(ops.expand_dims(ops.arange(rows), axis=1) + k, ops.arange(columns)), dtype or x.dtype)


@meaning("Split")
def split(
    x: Node, split: KnownArray = None, *, axis: int = 0, num_outputs: int | None = None, outputs: OutputCount = 1
) -> tuple[Node, ...]:
    parts: list[Any] = whole(split)
    if split is None:
        step = (x.shape[axis] + outputs - 1) // outputs
        parts = [step] * (outputs - 1)
        parts.append(x.shape[axis] - step * (outputs - 1))
    unequal = isinstance(x.shape[axis], int) and (sum(parts) != x.shape[axis] or min(parts) < 0)
    if len(parts) != outputs or num_outputs not in (None, outputs) or unequal:
        said = f"cuts {x.shape[axis]} into {outputs} parts of {parts}, where {num_outputs or outputs} are wanted"
        raise DataError(said, fix="write the model again: onnx.checker.check_model")
    ends = np.cumsum(parts[:-1], dtype=object).tolist()
    return tuple(ops.split(x, ends, axis=axis))


@meaning("Slice")
def slice_(data: Node, starts: KnownArray, ends: KnownArray, axes: KnownArray = None, steps: KnownArray = None) -> Node:
    chosen = whole(axes) if axes is not None else range(len(whole(starts)))
    key = [slice(None)] * data.ndim
    each = chosen, whole(starts), whole(ends), whole(steps) or [1] * len(whole(starts))
    for axis, start, stop, step in zip(*each, strict=True):
        axis = normalize_axis(axis, data.ndim)
        key[axis] = _slice(start, stop, step, data.shape[axis])
    return data[tuple(key)]


def _slice(start: Any, stop: Any, step: int, size: Size) -> slice:
    """As ONNX clamps it: whatever lies before the first place of a step back is that place."""
    if not any(isinstance(v, Dim) for v in (start, stop, size)):
        low, high = (0, size) if step > 0 else (-1, size - 1)
        start, stop = (min(max(v + size * (v < 0), low), high) for v in (start, stop))
        return slice(max(start, 0), None if stop < 0 else stop, step) if size else slice(0, 0)
    first, last = (start, stop) if step > 0 else (stop, start)
    first = None if isinstance(first, int) and first <= -FAR else first
    last = None if isinstance(last, int) and last >= FAR else last
    return slice(first, last, step) if step > 0 else slice(last, first, step)


def _is_cut(width: Any) -> bool:
    """Open widths are taken to be borders."""
    return isinstance(width, int) and width < 0


MODES: dict[str, Any] = {mode: mode for mode in ("reflect", "edge", "wrap")}  # NumPy calls them alike


@meaning("Pad")
def pad(
    data: Node, pads: KnownArray, value: KnownArray = None, axes: KnownArray = None, *, mode: str = "constant"
) -> Node:
    """Borders of a value, or of numbers of `data` by their places; negative ones are cut off."""
    numbers = whole(pads)
    chosen = [normalize_axis(a, data.ndim) for a in whole(axes)] if axes is not None else list(range(data.ndim))
    pairs = dict(zip(chosen, zip(numbers[: len(chosen)], numbers[len(chosen) :], strict=True), strict=True))
    key = [slice(None)] * data.ndim
    added = {axis: tuple(0 if _is_cut(n) else n for n in pair) for axis, pair in pairs.items()}
    for axis, (before, after) in pairs.items():
        key[axis] = slice(-before if _is_cut(before) else 0, after if _is_cut(after) else None)
    x = data[tuple(key)]
    if mode == "constant":
        filling = 0 if value is None else np.ravel(value)[0].item() + 0  # a number, also of a boolean
        return ops.pad(x, pad_width=tuple(added.get(i, (0, 0)) for i in range(x.ndim)), value=filling)
    if mode not in MODES:
        raise DataError(f"pads by the mode {mode!r}", fix=f"export with one of constant, {', '.join(MODES)}")
    for axis, width in added.items():
        if any(width):
            bounded(sum(width))
            x = ops.take(x, np.pad(np.arange(int(x.shape[axis])), width, MODES[mode]), axis=axis)
    return x
