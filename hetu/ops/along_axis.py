"""Gathering one element for every index along an axis, and its gradient, which sums duplicates.

Ids as in `index.py`. For whole rows `take` is faster.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..core.errors import ShapeError
from ..core.graph import Node
from ..core.op import Role, op
from ..core.types import Size, TensorType, axis_letters, compatible, show_shape, unify
from .index import RowWindow, axis_attrs, find_inside, in_range, masked, require_indices, whole_size

__all__ = ["take_along_axis"]


def _along_type(x: TensorType, indices: TensorType, *, axis: int, **_: Any) -> TensorType:
    require_indices(indices)
    if x.ndim != indices.ndim or any(
        not compatible(s, t) for i, (s, t) in enumerate(zip(x.shape, indices.shape)) if i != axis
    ):
        raise ShapeError(
            f"indices {show_shape(indices.shape)} do not fit {show_shape(x.shape)} beside axis {axis}",
            fix="give both the same axes; all sizes but that of the axis must be equal",
        )
    shape: list[Size] = [t if i == axis else unify(s, t) for i, (s, t) in enumerate(zip(x.shape, indices.shape))]
    return TensorType(tuple(shape), x.dtype)


def _along_terms(ndim: int, axis: int) -> tuple[str, str]:
    """Terms of the array and of the indices, which differ in the letter of the axis."""
    letters = axis_letters(ndim + 1)
    whole, part = ([*letters[:axis], name, *letters[axis + 1 : ndim]] for name in (f"{letters[axis]}@", letters[-1]))
    return "".join(whole), "".join(part)


def take_along_axis_dims(x: TensorType, indices: TensorType, *, axis: int, **_: Any) -> str:
    whole, part = _along_terms(x.ndim, axis)
    return f"{whole},{part}->{part}"


@op(precision="wide", role=Role.MOVE, infer=_along_type, dims=take_along_axis_dims, linear=(0,))
def take_along_axis(xp: ModuleType, x: Any, indices: Any, *, axis: int = -1, window: RowWindow = None) -> Any:
    """One element of `x` along `axis` for every index: y[i, j] = x[i, indices[i, j]] for the last of two axes.

    ValueRangeError for an index outside the axis.

    >>> import hetu as ht
    >>> ht.evaluate(take_along_axis([[1.0, 2.0], [3.0, 4.0]], [[1], [0]])).tolist()
    [[2.0], [3.0]]
    """
    if window is None:
        return xp.take_along_axis(x, indices, axis=axis)
    places, inside = find_inside(xp, indices, window)
    return masked(xp, xp.take_along_axis(x, places, axis=axis), inside)


take_along_axis.normalize(axis_attrs)


in_range(take_along_axis, lambda x, indices, *, axis, window: [(indices, whole_size(x.shape[axis], window), "index")])


def _put_type(like: TensorType, indices: TensorType, values: TensorType, *, axis: int, **_: Any) -> TensorType:
    taken = _along_type(like, indices, axis=axis)
    if values.ndim != taken.ndim or not all(map(compatible, values.shape, taken.shape)):
        raise ShapeError(f"got values {values} for indices {indices}", fix="pass one value for every index")
    return TensorType(like.shape, values.dtype)


def put_along_axis_add_dims(like: TensorType, indices: TensorType, values: TensorType, *, axis: int, **_: Any) -> str:
    whole, part = _along_terms(like.ndim, axis)
    return f"{whole},{part},{part}->{whole}"


@op(infer=_put_type, dims=put_along_axis_add_dims, like=(0,), linear=(2,))
def put_along_axis_add(
    xp: ModuleType, like: Any, indices: Any, values: Any, *, axis: int = -1, window: RowWindow = None
) -> Any:
    """Zeros in the shape of `like`, plus `values` at `indices` along `axis`; the gradient of `take_along_axis`.

    >>> import hetu as ht
    >>> ht.evaluate(put_along_axis_add([[0.0, 0.0]], [[1, 1]], [[2.0, 3.0]])).tolist()
    [[0.0, 5.0]]
    """
    out = xp.zeros(like.shape, dtype=values.dtype)
    if window is not None:
        indices, inside = find_inside(xp, indices, window)
        values = masked(xp, values, inside)
    grids = xp.meshgrid(*(xp.arange(s) for s in indices.shape), indexing="ij")
    xp.add.at(out, tuple(indices if i == axis else grid for i, grid in enumerate(grids)), values)
    return out


take_along_axis.grad(lambda g, y, x, indices, *, axis, **_: (put_along_axis_add(x, indices, g, axis=axis), None))
put_along_axis_add.normalize(axis_attrs)
put_along_axis_add.flops(lambda out, like, indices, values, **_: int(values.size))


@put_along_axis_add.grad
def put_along_axis_add_grad(
    g: Node, y: Node, like: Node, indices: Node, values: Node, *, axis: int, **_: Any
) -> tuple[None, None, Node]:
    return None, None, take_along_axis(g, indices, axis=axis)
