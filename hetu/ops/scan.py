"""Operators that go along one axis, number by number: running sums and the places of extrema."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import OPS, Node
from ..core.op import as_node, op
from ..core.types import TensorType
from .elementwise import equal, isnan, logical_or, where
from .reduction import along_axis_dims, extremum_type, max, min, one_axis, total_dtype, total_type, whole_reduction_dims
from .shape import flatten

__all__ = ["argmax", "argmin", "cumsum"]


@op(infer=lambda x, *, axis, reverse: total_type(x, axis=(), keepdims=True), dims=along_axis_dims, linear=(0,))
def cumsum(xp: ModuleType, x: Any, *, axis: int | None = None, reverse: bool = False) -> Any:
    """Running sum along `axis` (of a vector: its only one), from its end with `reverse`. Its dtype is that of `sum`.

    >>> import hetu as ht
    >>> ht.evaluate(cumsum([1.0, 2.0, 3.0])).tolist()
    [1.0, 3.0, 6.0]
    """
    dtype = total_dtype(xp, x)
    if not reverse:
        return xp.cumulative_sum(x, axis=axis, dtype=dtype)
    return xp.flip(xp.cumulative_sum(xp.flip(x, axis=axis), axis=axis, dtype=dtype), axis=axis)


cumsum.normalize(one_axis)
cumsum.grad(lambda g, y, x, *, axis, reverse: cumsum(g, axis=axis, reverse=not reverse))


@cumsum.into
def cumsum_into(xp: ModuleType, out: Any, x: Any, *, axis: int, reverse: bool) -> None:
    if reverse:
        x, out = xp.flip(x, axis=axis), xp.flip(out, axis=axis)  # views: the sum is written back to front
    if out.dtype.name == "bfloat16":  # which CuPy cannot add up
        xp.copyto(out, xp.cumsum(x, axis=axis, dtype="float32"))
    else:
        xp.cumsum(x, axis=axis, dtype=out.dtype, out=out)


def _argument_attrs(x: TensorType, *, axis: int | None, **attrs: Any) -> dict[str, Any]:
    return {"axis": None, **attrs} if axis is None and x.ndim != 1 else one_axis(x, axis=axis, **attrs)


def _argument_type(x: TensorType, *, axis: int | None, keepdims: bool) -> TensorType:
    return TensorType(extremum_type(x, axis=_axes(x, axis), keepdims=keepdims).shape, np.dtype("int64"))


def _argument_dims(x: TensorType, *, axis: int | None, keepdims: bool) -> str:
    return whole_reduction_dims(x, axis=_axes(x, axis), keepdims=keepdims)


def _axes(x: TensorType, axis: int | None) -> tuple[int, ...]:
    return tuple(range(x.ndim)) if axis is None else (axis,)


@op(infer=_argument_type, dims=_argument_dims, differentiable=False)
def argmax(xp: ModuleType, x: Any, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """Place of the largest element along `axis` (by default in all of `x`, row by row), the first at a tie. int64.

    >>> import hetu as ht
    >>> ht.evaluate(argmax([[1.0, 5.0], [3.0, 2.0]], axis=1)).tolist()
    [1, 0]
    """
    return xp.argmax(x, axis=axis, keepdims=keepdims)


@op(infer=_argument_type, dims=_argument_dims, differentiable=False)
def argmin(xp: ModuleType, x: Any, *, axis: int | None = None, keepdims: bool = False) -> Any:
    """Place of the smallest element along `axis` (by default in all of `x`, row by row), the first at a tie. int64.

    >>> import hetu as ht
    >>> ht.evaluate(argmin([[1.0, 5.0], [3.0, 2.0]], axis=1)).tolist()
    [0, 1]
    """
    return xp.argmin(x, axis=axis, keepdims=keepdims)


def _place(extremum: Callable[..., Node]) -> Callable[..., Node]:
    """`decompose` of argmax and argmin: the smallest place of the extremum or of NaN, also if the axis is split."""

    def places(x: Node, *, axis: int | None, keepdims: bool) -> Node:
        if axis is None:
            found = places(flatten(x), axis=0, keepdims=False)
            return OPS["reshape"](found, shape=(1,) * x.ndim) if keepdims else found
        size = x.shape[axis]
        shape = tuple(size if i == axis else 1 for i in range(x.ndim))
        numbered = OPS["reshape"](OPS["arange"](start=0, stop=size, step=1, dtype="int64"), shape=shape)
        here = logical_or(equal(x, extremum(x, axis=axis, keepdims=True)), isnan(x))
        return min(where(here, numbered, as_node(size)), axis=axis, keepdims=keepdims)

    return places


def _of_a_row(node: Node, x: Node) -> Node | None:
    """Kernels know one axis."""
    if node.attrs["axis"] is not None:
        return None
    found = node.op(flatten(x), axis=0)
    return OPS["reshape"](found, shape=(1,) * x.ndim) if node.attrs["keepdims"] else found


for _argument, _extremum in ((argmax, max), (argmin, min)):
    _argument.normalize(_argument_attrs)
    _argument.decompose(_place(_extremum))
    _argument.simplify(_of_a_row)
