"""Operators that rename, add or repeat axes without arithmetic: reshaping and broadcasting.

Where the memory layout allows it the result is a view and costs nothing. Joining and tiling are in `join.py`, cutting
in `slicing.py`, new arrays in `creation.py`, transposes in `linalg.py`.

The grammar of `dims` rules, for all operators: one term per input, `->`, one term per output, terms joined by commas;
in a term, one item per axis, without spaces:
    a       a factor; equal letters are the same split in all terms, one that is missing on the right is reduced
    a!      a factor that may not be split; the letter may then stand for a size that exists on one side only
    a@      a factor that may be split if the kernel is told its slice: an attribute `window=None` of the operator
            gets (low, high, size) of each such factor, in the order in which the rule names them
    (ab)    an axis of several factors merged in row-major order; only the first, the major one, may be split
    1       an axis of size 1, which has no factor
    ...     any number of axes, aligned at the last as in broadcasting
A letter that stands on the right only is a new axis of repeated or made values: any slice of it can be computed.
Where axes are marked that attributes choose, the attribute `axis` names them, or a tuple has an entry for each axis.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from ..core.errors import AxisError, ShapeError, public
from ..core.graph import Node
from ..core.op import Role, as_node, op
from ..core.operators import moved_simplify, sum_to_like
from ..core.types import (
    Shape,
    Size,
    TensorType,
    axis_letters,
    compatible,
    normalize_axes,
    normalize_axis,
    product,
    show_shape,
)

__all__ = ["broadcast_to", "expand_dims", "flatten", "reshape", "squeeze"]


# -- reshape ---------------------------------------------------------------------------------------------------


def _reshape_attrs(x: TensorType, *, shape: Any) -> dict[str, Any]:
    """Replace a -1 by the size that is left."""
    shape = (shape,) if not isinstance(shape, tuple) else shape
    unknown = [i for i, s in enumerate(shape) if isinstance(s, int) and s == -1]
    if len(unknown) > 1:
        raise ShapeError(f"shape {show_shape(shape)} has several -1", fix="leave at most one size open")
    rest = product(s for i, s in enumerate(shape) if i not in unknown)
    if unknown:
        if rest == 0 or (isinstance(rest, int) and isinstance(x.size, int) and x.size % rest):
            raise ShapeError(f"{x.size} elements do not divide into {show_shape(shape)}", fix="check the sizes")
        filled = x.size // rest
        shape = tuple(filled if i in unknown else s for i, s in enumerate(shape))
    elif not compatible(rest, x.size):
        raise ShapeError(f"{x.size} elements do not fill {show_shape(shape)}", fix="use -1 for one size")
    return {"shape": shape}


def reshape_dims(x: TensorType, *, shape: Shape) -> str:
    """Sharding rule: sizes of both shapes are taken apart into common factors, major ones first.

    >>> import numpy as np
    >>> reshape_dims(TensorType((6, 4), np.dtype("float32")), shape=(2, 3, 4))
    '(ab)c->abc'
    """
    letters = iter(string.ascii_letters)
    left, right = ["1"] * x.ndim, ["1"] * len(shape)
    sides = [[i for i, s in enumerate(sizes) if s != 1] for sizes in (x.shape, shape)]
    for axes, other_axes in _equal_blocks(x.shape, shape, *sides):
        names = _common_factors([x.shape[i] for i in axes], [shape[i] for i in other_axes], letters)
        for terms, places, found in zip((left, right), (axes, other_axes), names):
            for axis, name in zip(places, found):
                terms[axis] = name
    return f"{''.join(left)}->{''.join(right)}"


def _equal_blocks(a: Shape, b: Shape, left: list[int], right: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The shortest runs of axes of both shapes that hold equally many elements."""
    while left or right:
        lengths = ((i, n - i) for n in range(2, len(left) + len(right) + 1) for i in range(1, n))
        equal = ((i, j) for i, j in lengths if product(a[k] for k in left[:i]) == product(b[k] for k in right[:j]))
        i, j = next(equal, (len(left), len(right)))
        yield left[:i], right[:j]
        left, right = left[i:], right[j:]


def _common_factors(left: list[Size], right: list[Size], letters: Iterator[str]) -> tuple[list[str], list[str]]:
    """The item of every axis; where sizes do not divide one another none of the axes may be split."""
    names = [""] * len(left), [""] * len(right)
    a, b = list(left), list(right)  # what is still to be named of each size
    i = j = 0
    while i < len(left) and j < len(right) and (_divides(a[i], b[j]) or _divides(b[j], a[i])):
        letter = next(letters)
        names[0][i] += letter
        names[1][j] += letter
        done, other_done = _divides(a[i], b[j]), _divides(b[j], a[i])
        a[i], b[j] = (1 if done else a[i] // b[j]), (1 if other_done else b[j] // a[i])
        i, j = i + done, j + other_done
    if (i, j) != (len(left), len(right)):
        return [f"{next(letters)}!" for _ in left], [f"{next(letters)}!" for _ in right]
    first, second = ([n if len(n) == 1 else f"({n})" for n in side] for side in names)
    return first, second


def _divides(small: Size, large: Size) -> bool:
    """Provably a divisor."""
    return small != 0 and large != 0 and (large // small) * small == large


@op(role=Role.MOVE, infer=lambda x, *, shape: TensorType(shape, x.dtype), dims=reshape_dims, linear=(0,))
def reshape(xp: ModuleType, x: Any, *, shape: Shape) -> Any:
    """The same elements, in row-major order, in another shape; one size may be -1.

    ShapeError when the number of elements differs.

    >>> import hetu as ht
    >>> reshape(ht.placeholder("x", (None, 28, 28)), (-1, 784)).shape[1]
    784
    """
    return xp.reshape(x, shape)


reshape.normalize(_reshape_attrs)
reshape.grad(lambda g, y, x, **_: reshape(g, shape=x.shape))


@reshape.simplify
def reshape_simplify(node: Node, x: Node) -> Node | None:
    """Of two reshapes the second."""
    if x.op is reshape:
        x = x.inputs[0]
        return x if x.type == node.type else reshape(x, shape=node.shape)
    return moved_simplify(node, x)


@reshape.view
def reshape_view(xp: ModuleType, x: Any, *, shape: Shape) -> Any:
    try:
        return xp.reshape(x, shape, copy=False)
    except ValueError:  # the elements would have to move
        return None


@public
def flatten(x: Any, start_axis: int = 0, end_axis: int = -1) -> Node:
    """`x` with the axes from `start_axis` to `end_axis` merged into one.

    >>> import hetu as ht
    >>> flatten(ht.placeholder("x", (2, 3, 4)), 1).shape
    (2, 12)
    """
    x = as_node(x)
    if x.ndim == 0:
        return reshape(x, shape=(1,))
    first, last = normalize_axis(start_axis, x.ndim), normalize_axis(end_axis, x.ndim)
    if first > last:
        raise AxisError(f"flatten: axis {start_axis} lies behind axis {end_axis}", fix="swap start_axis and end_axis")
    merged = product(x.shape[first : last + 1])
    return reshape(x, shape=(*x.shape[:first], merged, *x.shape[last + 1 :]))


@public
def squeeze(x: Any, axis: int | Iterable[int]) -> Node:
    """`x` without the axes `axis`, each of size 1 (ShapeError otherwise).

    >>> import hetu as ht
    >>> squeeze(ht.placeholder("x", (3, 1, 4)), 1).shape
    (3, 4)
    """
    x = as_node(x)
    axes = normalize_axes(axis, x.ndim)
    for place in axes:
        if not compatible(x.shape[place], 1):
            raise ShapeError(
                f"squeeze: axis {place} of {x.type} has size {x.shape[place]}, wanted 1", fix="name others"
            )
    return reshape(x, shape=tuple(s for i, s in enumerate(x.shape) if i not in axes))


def _expand_attrs(x: TensorType, *, axis: Any) -> dict[str, Any]:
    count = 1 if isinstance(axis, int) else len(axis)
    return {"axis": normalize_axes(axis, x.ndim + count)}


def _expand_type(x: TensorType, *, axis: tuple[int, ...]) -> TensorType:
    return TensorType(tuple(_with_ones(x.shape, axis)), x.dtype)


def _with_ones(items: Iterable[Any], axis: tuple[int, ...], one: Any = 1) -> Iterator[Any]:
    """The items, with `one` put in so that it stands at the places `axis` of the result."""
    rest = list(items)
    source = iter(rest)
    return (one if i in axis else next(source) for i in range(len(rest) + len(axis)))


def expand_dims_dims(x: TensorType, *, axis: tuple[int, ...]) -> str:
    letters = axis_letters(x.ndim)
    return f"{''.join(letters)}->{''.join(_with_ones(letters, axis, '1'))}"


@op(role=Role.MOVE, infer=_expand_type, dims=expand_dims_dims, linear=(0,))
def expand_dims(xp: ModuleType, x: Any, *, axis: Any) -> Any:
    """`x` with new axes of size 1 at the places `axis` of the result.

    >>> import hetu as ht
    >>> expand_dims(ht.placeholder("x", (3, 4)), 1).shape
    (3, 1, 4)
    """
    for place in axis:
        x = xp.expand_dims(x, axis=place)
    return x


expand_dims.normalize(_expand_attrs)
expand_dims.grad(lambda g, y, x, **_: reshape(g, shape=x.shape))
expand_dims.simplify(moved_simplify)
expand_dims.view(lambda xp, x, *, axis: xp.expand_dims(x, axis))


# -- broadcasting and its inverse ------------------------------------------------------------------------------


def _broadcast_type(x: TensorType, *, shape: Shape) -> TensorType:
    extra = len(shape) - x.ndim
    if extra < 0 or not all(s == 1 or compatible(s, t) for s, t in zip(x.shape, shape[extra:])):
        raise ShapeError(
            f"shape {show_shape(x.shape)} does not broadcast to {show_shape(shape)}",
            fix="aligned at the last axis, each size must be equal or 1; ht.expand_dims adds an axis of size 1",
        )
    return TensorType(shape, x.dtype)


def broadcast_to_dims(x: TensorType, *, shape: Shape) -> str:
    letters = axis_letters(len(shape))
    extra = len(shape) - x.ndim
    left = [c if s == t else "1" for c, s, t in zip(letters[extra:], x.shape, shape[extra:])]
    return f"{''.join(left)}->{''.join(letters)}"


@op(role=Role.MOVE, infer=_broadcast_type, dims=broadcast_to_dims, linear=(0,))
def broadcast_to(xp: ModuleType, x: Any, *, shape: Shape) -> Any:
    """`x` repeated along new leading axes and along axes of size 1, so that it has the given shape.

    >>> import hetu as ht
    >>> ht.evaluate(broadcast_to([1.0, 2.0], (2, 2))).tolist()
    [[1.0, 2.0], [1.0, 2.0]]
    """
    return xp.broadcast_to(x, shape)


broadcast_to.normalize(lambda x, *, shape: {"shape": shape if isinstance(shape, tuple) else (shape,)})
broadcast_to.grad(lambda g, y, x, **_: sum_to_like(g, x))
broadcast_to.simplify(moved_simplify)
broadcast_to.view(lambda xp, x, *, shape: xp.broadcast_to(x, shape))
