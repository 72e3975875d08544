"""Operators that put elements beside elements: concat, stack, pad, roll, tile, repeat.

Padding is by a constant only; `slicing.py` cuts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from types import ModuleType
from typing import Any

from ..core.errors import ArgumentError, ShapeError, public
from ..core.graph import Node
from ..core.op import Role, as_node, as_nodes, op
from ..core.operators import astype
from ..core.types import (
    Shape,
    Size,
    TensorType,
    axis_letters,
    compatible,
    normalize_axis,
    promote,
    same_type,
    show_type,
    unify,
)
from .creation import require_held
from .shape import broadcast_to, expand_dims, flatten, reshape
from .slicing import cut_along, getitem

__all__ = ["concat", "pad", "repeat", "roll", "stack", "tile"]

# -- joining ---------------------------------------------------------------------------------------------------


def _concat_attrs(*types: TensorType, axis: int) -> dict[str, Any]:
    if not types:
        raise ArgumentError("got no arrays", fix="pass a list of at least one")
    return {"axis": normalize_axis(axis, types[0].ndim)}


def _concat_type(*types: TensorType, axis: int) -> TensorType:
    first = types[0]
    shape = list(first.shape)
    for type_ in types[1:]:
        fits = type_.ndim == first.ndim and all(
            compatible(s, t) for i, (s, t) in enumerate(zip(shape, type_.shape)) if i != axis
        )
        if not fits or type_.dtype != first.dtype:
            raise ShapeError(
                f"{show_type(type_)} does not continue {show_type(first)} along axis {axis}",
                fix="all axes but the joined one, and the dtypes, must be equal",
            )
        shape = [s + t if i == axis else unify(s, t) for i, (s, t) in enumerate(zip(shape, type_.shape))]
    return TensorType(tuple(shape), first.dtype)


def concat_dims(*types: TensorType, axis: int) -> str:
    """Every input has its own size along the joined axis, and so its own letter, which may not be split."""
    letters = axis_letters(types[0].ndim + len(types) + 1)
    kept, own = letters[: types[0].ndim], letters[types[0].ndim :]
    terms = ["".join([*kept[:axis], f"{letter}!", *kept[axis + 1 :]]) for letter in own]
    return f"{','.join(terms[:-1])}->{terms[-1]}"


@op(role=Role.MOVE, name="concat", infer=_concat_type, dims=concat_dims, linear="joint")
def _concat(xp: ModuleType, *arrays: Any, axis: int) -> Any:
    """`arrays`, of one dtype, one behind the other along `axis`.

    >>> import hetu as ht
    >>> ht.evaluate(concat([[1.0], [2.0, 3.0]])).tolist()
    [1.0, 2.0, 3.0]
    """
    return xp.concat(arrays, axis=axis)


_concat.normalize(_concat_attrs)


@_concat.grad
def concat_grad(g: Node, y: Node, *arrays: Node, axis: int) -> tuple[Node, ...]:
    ends: list[Size] = [0]
    for array in arrays:
        ends.append(ends[-1] + array.shape[axis])
    return tuple(cut_along(g, axis, slice(a, b)) for a, b in pairwise(ends))


_concat.into(lambda xp, out, *arrays, axis: xp.concatenate(arrays, axis=axis, out=out))


@public
def concat(arrays: Iterable[Any], axis: int = 0) -> Node:
    """The arrays one behind the other along an axis they have. Other sizes must agree; dtypes are promoted.

    >>> import hetu as ht
    >>> concat([ht.placeholder("x", (None, 3)), ht.placeholder("y", (4, 3))], axis=0).shape[1]
    3
    """
    if isinstance(arrays, Node):
        raise ArgumentError(f"concat got one node {arrays!r}", fix="pass a list: ht.concat([a, b], axis=0)")
    nodes = as_nodes(list(arrays))
    dtype = promote(*(n.dtype for n in nodes)) if nodes else None
    return _concat(*(n if n.dtype == dtype else astype(n, dtype=dtype) for n in nodes), axis=axis)


@public
def stack(arrays: Iterable[Any], axis: int = 0) -> Node:
    """Arrays of one shape joined along a new axis.

    >>> import hetu as ht
    >>> ht.evaluate(stack([[1.0, 2.0], [3.0, 4.0]], axis=1)).tolist()
    [[1.0, 3.0], [2.0, 4.0]]
    """
    nodes = as_nodes(list(arrays))
    for node in nodes[1:]:
        if node.ndim != nodes[0].ndim or not all(map(compatible, node.shape, nodes[0].shape)):
            raise ShapeError(f"stack: {node.type} differs from {nodes[0].type}", fix="stack arrays of one shape")
    return concat([expand_dims(n, axis=axis) for n in nodes], axis=axis)


# -- padding and rolling ---------------------------------------------------------------------------------------


def _pad_attrs(x: TensorType, *, pad_width: Any, value: float) -> dict[str, Any]:
    """A pair per axis."""
    pairs: Any = (pad_width, pad_width) if isinstance(pad_width, int) else pad_width
    if pairs and not any(isinstance(p, tuple) for p in pairs):
        pairs = (pairs,) * x.ndim
    if len(pairs) != x.ndim or any(not isinstance(p, tuple) or len(p) != 2 for p in pairs):
        raise ShapeError(f"pad_width {pad_width} for {x}", fix="pass n, (before, after), or such a pair for every axis")
    if any(isinstance(n, int) and n < 0 for pair in pairs for n in pair):
        raise ShapeError(f"pad_width {pad_width} is negative", fix="cut with a slice: x[1:-1]")
    require_held(x.dtype, value)
    return {"pad_width": pairs, "value": value}


def _pad_type(x: TensorType, *, pad_width: Any, value: float) -> TensorType:
    return TensorType(tuple(before + s + after for s, (before, after) in zip(x.shape, pad_width)), x.dtype)


def pad_dims(x: TensorType, *, pad_width: Any, value: float) -> str:
    letters = axis_letters(2 * x.ndim)
    left = [c if p == (0, 0) else f"{c}!" for c, p in zip(letters, pad_width)]
    right = [c if p == (0, 0) else f"{c}!" for c, p in zip(_renamed(letters, pad_width), pad_width)]
    return f"{''.join(left)}->{''.join(right)}"


def _renamed(letters: list[str], pad_width: Any) -> list[str]:
    """A padded axis has another size, and so another letter, than before."""
    return [letters[i if p == (0, 0) else i + len(pad_width)] for i, p in enumerate(pad_width)]


@op(role=Role.MOVE, infer=_pad_type, dims=pad_dims)
def pad(xp: ModuleType, x: Any, *, pad_width: Any, value: float = 0.0) -> Any:
    """`x` with a border of `value`. `pad_width` is n, (before, after), or such a pair for every axis.

    ValueRangeError for a value that the dtype does not hold.

    >>> import hetu as ht
    >>> ht.evaluate(pad([1.0, 2.0], (1, 0))).tolist()
    [0.0, 1.0, 2.0]
    """
    out = xp.full(_pad_type(x, pad_width=pad_width, value=value).shape, value, dtype=x.dtype)
    out[_inner(x.shape, pad_width)] = x
    return out


def _inner(shape: Shape, pad_width: Any) -> tuple[Any, ...]:
    return (*(slice(before, before + s) for s, (before, _) in zip(shape, pad_width)), ...)


pad.normalize(_pad_attrs)
pad.grad(lambda g, y, x, *, pad_width, value: getitem(g, key=_inner(x.shape, pad_width)))


@pad.into
def pad_into(xp: ModuleType, out: Any, x: Any, *, pad_width: Any, value: float) -> None:
    out.fill(value)
    out[_inner(x.shape, pad_width)] = x


def _roll_attrs(x: TensorType, *, shift: Any, axis: Any) -> dict[str, Any]:
    if axis is None:
        if not isinstance(shift, int):
            raise ArgumentError(f"shift={shift!r} without an axis", fix="pass one axis for every shift")
        return {"shift": shift, "axis": None}
    axes = (axis,) if isinstance(axis, int) else axis
    shifts = (shift,) * len(axes) if isinstance(shift, int) else shift
    if len(shifts) != len(axes):
        raise ArgumentError(f"{len(shifts)} shifts for {len(axes)} axes", fix="pass one shift for every axis")
    return {"shift": shifts, "axis": tuple(normalize_axis(a, x.ndim) for a in axes)}


def roll_dims(x: TensorType, *, shift: Any, axis: Any) -> str:
    term = "".join(f"{c}!" if axis is None or i in axis else c for i, c in enumerate(axis_letters(x.ndim)))
    return f"{term}->{term}"


@op(role=Role.MOVE, infer=same_type, dims=roll_dims, linear=(0,))
def roll(xp: ModuleType, x: Any, *, shift: int | tuple[int, ...], axis: int | tuple[int, ...] | None = None) -> Any:
    """`x` shifted along `axis`; what leaves at one end comes in at the other. Without an axis `x` counts as flat.

    >>> import hetu as ht
    >>> ht.evaluate(roll([1.0, 2.0, 3.0], 1)).tolist()
    [3.0, 1.0, 2.0]
    """
    return xp.roll(x, shift, axis=axis)


roll.normalize(_roll_attrs)


@roll.grad
def roll_grad(g: Node, y: Node, x: Node, *, shift: Any, axis: Any) -> Node:
    return roll(g, shift=-shift if isinstance(shift, int) else tuple(-s for s in shift), axis=axis)


# -- repetition: compositions of the above ---------------------------------------------------------------------


@public
def tile(x: Any, repetitions: int | Iterable[int]) -> Node:
    """`x` as a whole repeated `repetitions[i]` times along axis i; missing leading axes are added.

    >>> import hetu as ht
    >>> ht.evaluate(tile([1.0, 2.0], 2)).tolist()
    [1.0, 2.0, 1.0, 2.0]
    """
    x = as_node(x)
    counts = (repetitions,) if isinstance(repetitions, int) else tuple(repetitions)
    rank = max(x.ndim, len(counts))
    counts, shape = (1,) * (rank - len(counts)) + counts, (1,) * (rank - x.ndim) + x.shape
    pairs = reshape(x, shape=tuple(v for s in shape for v in (1, s)))
    pairs = broadcast_to(pairs, shape=tuple(v for c, s in zip(counts, shape) for v in (c, s)))
    return reshape(pairs, shape=tuple(c * s for c, s in zip(counts, shape)))


@public
def repeat(x: Any, repeats: int, axis: int | None = None) -> Node:
    """Every element along `axis` repeated `repeats` times in a row; without an axis `x` is flattened first.

    >>> import hetu as ht
    >>> ht.evaluate(repeat([1.0, 2.0], 2)).tolist()
    [1.0, 1.0, 2.0, 2.0]
    """
    if not isinstance(repeats, int) or repeats < 0:
        raise ArgumentError(f"repeat got repeats={repeats!r}, wanted one integer >= 0", fix="use ht.take for others")
    x = flatten(x) if axis is None else as_node(x)
    place = 0 if axis is None else normalize_axis(axis, x.ndim)
    before, after = x.shape[: place + 1], x.shape[place + 1 :]
    wide = broadcast_to(reshape(x, shape=(*before, 1, *after)), shape=(*before, repeats, *after))
    return reshape(wide, shape=(*before[:-1], before[-1] * repeats, *after))
