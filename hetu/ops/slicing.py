"""Cutting by integers and slices, and the inverse, which is its gradient.

A cut is a view. Its key is kept as plain data, one entry per axis: an integer, `"new"` for a new axis of size 1, or
`("slice", start, stop, step)`. On an axis of unknown size a slice is taken to lie inside: `x[1:]` has `dim + -1`
elements, `x[:5]` has 5. For index arrays and masks see `index.py` and `where`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

from ..core.errors import ArgumentError, AxisError, ShapeError, public
from ..core.graph import Node
from ..core.op import Role, as_node, op
from ..core.types import Dim, Size, TensorType, axis_letters, compatible, normalize_axes, normalize_axis
from .sequence import flipped

__all__ = ["flip", "split"]


WHOLE = ("slice", None, None, 1)


def _getitem_attrs(x: TensorType, *, key: Any) -> dict[str, Any]:
    """One entry per axis; places on an axis of known size become non-negative, others wait until it is known."""
    entries = [key] if _is_slice(key) or not isinstance(key, tuple) else list(key)
    used = sum(not (_is_new(e) or e is Ellipsis) for e in entries)
    if used > x.ndim:
        raise AxisError(f"{used} indices for an array of {x.ndim} axes", fix="leave some out")
    dots = [i for i, e in enumerate(entries) if e is Ellipsis]
    if len(dots) > 1:
        raise ArgumentError("a key has several ...", fix="leave one")
    place = dots[0] if dots else len(entries)
    entries[place : place + 1] = [slice(None)] * (x.ndim - used)
    sizes = iter(x.shape)
    return {"key": tuple("new" if _is_new(e) else _entry(e, next(sizes)) for e in entries)}


def _is_new(entry: Any) -> bool:
    return entry is None or (isinstance(entry, str) and entry == "new")


def _is_slice(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 4 and entry[0] == "slice"


def _entry(entry: Any, size: Size) -> Any:
    """The canonical form of an index or slice of an axis of the given size."""
    if isinstance(entry, slice) or _is_slice(entry):
        parts = (entry.start, entry.stop, entry.step) if isinstance(entry, slice) else entry[1:]
        return _slice_entry(parts, size)
    if isinstance(entry, bool) or not isinstance(entry, int | Dim):
        raise ArgumentError(
            f"{type(entry).__name__} {entry!r:.40} cannot be an index",
            fix="gather with ht.take(x, ids, axis=...), choose with ht.where(mask, a, b)",
        )
    if isinstance(entry, Dim) or isinstance(size, Dim):
        return entry
    if not -size <= entry < size:
        raise AxisError(f"index {entry} lies outside an axis of size {size}", fix=f"use {-size} to {size - 1}")
    return entry % size


def _slice_entry(parts: tuple[Any, Any, Any], size: Size) -> tuple[Any, ...]:
    for part in parts:
        if not (part is None or isinstance(part, Dim) or hasattr(part, "__index__")):
            raise ArgumentError(f"a slice has the bound {part!r}", fix="use integers, sizes or nothing")
    start, stop, step = (p if p is None or isinstance(p, Dim) else operator.index(p) for p in parts)
    step = 1 if step is None else step
    if isinstance(step, Dim) or step == 0:
        raise ArgumentError(f"a slice has the step {step!r}", fix="use an integer other than 0")
    if any(isinstance(v, Dim) for v in (size, start, stop)):
        return "slice", start, stop, step
    inside = range(*slice(start, stop, step).indices(size))
    if inside == range(size):
        return WHOLE  # not its size, so that it is right for a shard too
    if not inside:
        return "slice", 0, 0, step
    return "slice", inside.start, None if inside.stop < 0 else inside.stop, step


def _slice_size(size: Size, start: Size | None, stop: Size | None, step: int) -> Size:
    """Number of elements. A slice of an unknown axis is taken to lie inside, so that the result is exact."""
    if not any(isinstance(v, Dim) for v in (size, start, stop)):
        return len(range(*slice(start, stop, step).indices(size)))
    first_end, first = _place(start, (0, 0) if step > 0 else (1, -1))
    last_end, last = _place(stop, (1, 0) if step > 0 else (0, -1))
    span = size * (last_end - first_end) + (last - first)
    span, width = (span, step) if step > 0 else (span * -1, -step)
    count = span if width == 1 else (span + (width - 1)) // width
    return max(count, 0) if isinstance(count, int) else count


def _place(value: Size | None, default: tuple[int, int]) -> tuple[int, Size]:
    """(1 if counted from the end, offset): only so do equal unknown sizes cancel."""
    if value is None:
        return default
    return (1 if isinstance(value, int) and value < 0 else 0), value


def _getitem_type(x: TensorType, *, key: tuple[Any, ...]) -> TensorType:
    sizes, shape = iter(x.shape), []
    for entry in key:
        size = 1 if entry == "new" else next(sizes)
        if entry == "new" or _is_slice(entry):
            shape.append(1 if entry == "new" else _slice_size(size, *entry[1:]))
    return TensorType(tuple(shape), x.dtype)


def _getitem_terms(x: TensorType, key: tuple[Any, ...]) -> tuple[str, str]:
    """Terms of the whole and of the part: an axis that is kept whole may be split, one that is cut may not."""
    letters = iter(axis_letters(2 * x.ndim))
    whole, part = [], []
    for entry in key:
        if entry == "new":
            part.append("1")
            continue
        letter = next(letters)
        if entry == WHOLE:
            whole.append(letter)
            part.append(letter)
            continue
        whole.append(f"{letter}!")
        if _is_slice(entry):
            part.append(f"{next(letters)}!")
    return "".join(whole), "".join(part)


def _python_key(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an array understands. The final `...` makes a single element an array too."""
    return (*(None if e == "new" else slice(*e[1:]) if _is_slice(e) else e for e in key), ...)


@op(role=Role.MOVE, infer=_getitem_type, dims=lambda x, *, key: "->".join(_getitem_terms(x, key)), linear=(0,))
def getitem(xp: ModuleType, x: Any, *, key: Any) -> Any:
    """`x[key]` for integers, slices (also with steps), `None` for a new axis, and `...`; a view.

    AxisError when an index lies outside, ArgumentError for index arrays and masks.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 4, 5))
    >>> x[:, -1, ::2].shape[1], x[-3:].shape
    (3, (3, 4, 5))
    """
    return x[_python_key(key)]


getitem.normalize(_getitem_attrs)
getitem.view(lambda xp, x, *, key: x[_python_key(key)])


def _slice_scatter_type(values: TensorType, like: TensorType, *, key: tuple[Any, ...]) -> TensorType:
    part = _getitem_type(like, key=key)
    if part.ndim != values.ndim or not all(map(compatible, part.shape, values.shape)):
        raise ShapeError(f"got {values}, the key takes {part}", fix="pass values of the shape of like[key]")
    return TensorType(like.shape, values.dtype)


def slice_scatter_dims(values: TensorType, like: TensorType, *, key: tuple[Any, ...]) -> str:
    whole, part = _getitem_terms(like, key)
    return f"{part},{whole}->{whole}"


@op(role=Role.MOVE, infer=_slice_scatter_type, dims=slice_scatter_dims, like=(1,), linear=(0,))
def slice_scatter(xp: ModuleType, values: Any, like: Any, *, key: Any) -> Any:
    """Zeros in the shape of `like`, with `values` at `[key]`; the gradient of slicing.

    >>> import hetu as ht
    >>> ht.evaluate(slice_scatter([5.0], [0.0, 0.0, 0.0], key=slice(1, 2))).tolist()
    [0.0, 5.0, 0.0]
    """
    out = xp.zeros(like.shape, dtype=values.dtype)
    out[_python_key(key)] = values
    return out


getitem.grad(lambda g, y, x, *, key: slice_scatter(g, x, key=key))
slice_scatter.normalize(lambda values, like, *, key: _getitem_attrs(like, key=key))
slice_scatter.grad(lambda g, y, values, like, *, key: (getitem(g, key=key), None))


@slice_scatter.into
def slice_scatter_into(xp: ModuleType, out: Any, values: Any, like: Any, *, key: Any) -> None:
    out.fill(0)
    out[_python_key(key)] = values


def cut_along(x: Node, axis: int, cut: slice) -> Node:
    """`x` cut along one axis."""
    return getitem(x, key=(*[slice(None)] * axis, cut))


@public
def split(x: Any, indices_or_sections: int | Sequence[Size], axis: int = 0) -> list[Node]:
    """`x` cut along `axis` into equal sections (an integer), or before each of the given places, as in NumPy.

    ShapeError when the size does not divide into equal sections.

    >>> import hetu as ht
    >>> [part.shape for part in split(ht.placeholder("x", (5, 2)), [1, 3])]
    [(1, 2), (2, 2), (2, 2)]
    """
    x = as_node(x)
    axis = normalize_axis(axis, x.ndim)
    size = x.shape[axis]
    if isinstance(indices_or_sections, int):
        count = indices_or_sections
        if count < 1 or (isinstance(size, int) and size % count):
            raise ShapeError(
                f"split: axis {axis} of {x.type} does not divide into {count}", fix="pass places to cut at"
            )
        ends: list[Size] = [i * (size // count) for i in range(count)] + [size]
    else:
        ends = [0, *indices_or_sections, size]
    return [cut_along(x, axis, slice(a, b)) for a, b in pairwise(ends)]


@public
def flip(x: Any, axis: int | Iterable[int] | None = None, *, lengths: Any = None) -> Node:
    """`x` in reverse order along `axis`, all axes by default; a view.

    With `lengths` (n,) that is done within the first `lengths[i]` places of each x[i] along one axis, and copies.
    ValueRangeError for a length beyond the axis.

    >>> import hetu as ht
    >>> ht.evaluate(flip([1.0, 2.0, 3.0])).tolist()
    [3.0, 2.0, 1.0]
    >>> ht.evaluate(flip([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], 1, lengths=[3, 2])).tolist()
    [[3.0, 2.0, 1.0], [5.0, 4.0, 6.0]]
    """
    x = as_node(x)
    axes = normalize_axes(axis, x.ndim)
    if lengths is not None:
        return flipped(x, axes, as_node(lengths))
    return getitem(x, key=tuple(slice(None, None, -1) if i in axes else slice(None) for i in range(x.ndim)))
