"""Sorting along an axis, and the largest elements.

All sorts are stable: equal elements keep their order, on every device. Searching and uniqueness are left out, as their
result shapes depend on values.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import dtype_of, to_dtype
from ..core.errors import ArgumentError, ShapeError
from ..core.graph import OPS, Node
from ..core.op import Role, op
from ..core.types import DEFAULT_FLOAT, TensorType, same_type
from .reduction import along_axis_dims, one_axis

__all__ = ["argsort", "sort", "topk"]


def _comparable(xp: ModuleType, x: Any) -> Any:
    """`x`, or a wider float where NumPy has no order that puts NaN last."""
    return to_dtype(xp, x, DEFAULT_FLOAT) if dtype_of(x).name == "bfloat16" else x


def _order(xp: ModuleType, x: Any, axis: int, descending: bool, **kind: Any) -> Any:
    """The places of the sorted elements. Downward the input is flipped too, or ties would come last first."""
    x = _comparable(xp, x)
    if not descending:
        return xp.argsort(x, axis=axis, **kind)
    backward = xp.argsort(xp.flip(x, axis=axis), axis=axis, **kind)
    return x.shape[axis] - 1 - xp.flip(backward, axis=axis)


@op(
    precision="wide",
    role=Role.MOVE,
    infer=lambda x, **_: TensorType(x.shape, np.dtype("int64")),
    dims=along_axis_dims,
    differentiable=False,
)
def argsort(xp: ModuleType, x: Any, *, axis: int = -1, descending: bool = False) -> Any:
    """The indices that sort `x` along `axis`; ties keep their order. int64.

    >>> import hetu as ht
    >>> ht.evaluate(argsort([3.0, 1.0, 2.0])).tolist()
    [1, 2, 0]
    """
    return _order(xp, x, axis, descending, stable=True)


argsort.normalize(one_axis)


@argsort.into
def argsort_into(xp: ModuleType, out: Any, x: Any, *, axis: int, descending: bool) -> None:
    out[...] = _order(xp, x, axis, descending, kind="stable")


@op(precision="wide", role=Role.MOVE, infer=same_type, dims=along_axis_dims, inplace={0: (0,)})
def sort(xp: ModuleType, x: Any, *, axis: int = -1, descending: bool = False) -> Any:
    """`x` with the elements along `axis` in rising order, or falling with `descending`.

    >>> import hetu as ht
    >>> ht.evaluate(sort([3.0, 1.0, 2.0], descending=True)).tolist()
    [3.0, 2.0, 1.0]
    """
    rising = to_dtype(xp, xp.sort(_comparable(xp, x), axis=axis), dtype_of(x))
    return xp.flip(rising, axis=axis) if descending else rising


sort.normalize(one_axis)


@sort.grad
def sort_grad(g: Node, y: Node, x: Node, *, axis: int, descending: bool) -> Node:
    return OPS["put_along_axis_add"](x, argsort(x, axis=axis, descending=descending), g, axis=axis)


@sort.into
def sort_into(xp: ModuleType, out: Any, x: Any, *, axis: int, descending: bool) -> None:
    wide = _comparable(xp, x)
    if wide is not x:
        xp.copyto(out, xp.sort(wide, axis=axis))
    else:
        if out is not x:
            xp.copyto(out, x)
        out.sort(axis=axis)
    if descending:
        xp.copyto(out, xp.flip(out, axis=axis))


def _topk_type(x: TensorType, *, k: int, axis: int) -> tuple[TensorType, TensorType]:
    if isinstance(x.shape[axis], int) and k > x.shape[axis]:
        raise ShapeError(f"k is {k}, but axis {axis} of {x} has fewer elements", fix="lower k")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return TensorType(shape, x.dtype), TensorType(shape, np.dtype("int64"))


def _topk_dims(x: TensorType, *, k: int, axis: int) -> str:
    """The new axis of k is a factor of its own that nothing splits."""
    left = along_axis_dims(x, axis=axis).split("->")[0]
    right = left.replace("!", "")
    right = f"{right[:axis]}z!{right[axis + 1 :]}"
    return f"{left}->{right},{right}"


@op(precision="wide", role=Role.MOVE, infer=_topk_type, dims=_topk_dims)
def topk(xp: ModuleType, x: Any, *, k: int, axis: int = -1) -> tuple[Any, Any]:
    """The k largest elements along `axis`, falling, and their int64 indices; of equal ones the first.

    >>> import hetu as ht
    >>> values, indices = topk([3.0, 1.0, 2.0], k=2)
    >>> ht.evaluate(values).tolist(), ht.evaluate(indices).tolist()
    ([3.0, 2.0], [0, 2])
    """
    return _largest(xp, x, k, axis, stable=True)


def _largest(xp: ModuleType, x: Any, k: int, axis: int, **kind: Any) -> tuple[Any, Any]:
    head = (slice(None),) * axis + (slice(0, k),)
    places = _order(xp, x, axis, True, **kind)[(*head, ...)]
    return xp.take_along_axis(x, places, axis=axis), places


@topk.normalize
def topk_normalize(x: TensorType, *, k: int, axis: int) -> dict[str, Any]:
    if not isinstance(k, int) or k < 1:
        raise ArgumentError(f"k is {k!r}, wanted a positive integer", fix="pass k=1 for the largest element")
    return one_axis(x, axis=axis, k=k)


topk.grad(lambda g, out, x, *, k, axis: None if g[0] is None else OPS["put_along_axis_add"](x, out[1], g[0], axis=axis))


@topk.into
def topk_into(xp: ModuleType, out: tuple[Any, Any], x: Any, *, k: int, axis: int) -> None:
    out[0][...], out[1][...] = _largest(xp, x, k, axis, kind="stable")
