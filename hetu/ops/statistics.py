"""Means, variances, norms and sums of exponentials: plain functions of reductions.

Their gradients and their sharding follow from the parts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, public
from ..core.graph import OPS, Node
from ..core.op import as_node
from ..core.operators import cast_to
from ..core.types import DEFAULT_FLOAT, Dim, Size, is_float, normalize_axes, product
from .elementwise import abs as absolute
from .elementwise import equal, exp, isfinite, log, sqrt, square, where
from .reduction import Axis, max, reduced_shape, sum

__all__ = ["logsumexp", "mean", "norm", "var"]


def _count(x: Node, axis: Axis) -> Size:
    return product(x.shape[i] for i in normalize_axes(axis, x.ndim))


@public
def mean(x: Any, axis: Axis = None, keepdims: bool = False) -> Node:
    """Mean over `axis` (all axes by default): the sum over the number of elements. Integers give float32.

    The sum of 16-bit floats is one of float32, and that of long integers of float64, so that it does not overflow.

    >>> import hetu as ht
    >>> ht.evaluate(mean([[1.0, 2.0], [3.0, 4.0]], axis=0)).tolist()
    [2.0, 3.0]
    """
    x = as_node(x)
    return _narrowed(sum(_widened(x), axis=axis, keepdims=keepdims) / _count(x, axis), x)


def _widened(x: Node) -> Node:
    """What is averaged in a dtype in which sums of many do not overflow."""
    if is_float(x.dtype):
        return cast_to(x, DEFAULT_FLOAT) if x.dtype.itemsize == 2 else x
    return cast_to(x, np.dtype("float64")) if x.dtype.itemsize > 2 else x


def _narrowed(made: Node, x: Node) -> Node:
    """The mean of `x` in its dtype, of integers in float32."""
    return cast_to(made, x.dtype if is_float(x.dtype) else DEFAULT_FLOAT)


@public
def var(x: Any, axis: Axis = None, correction: float = 0, keepdims: bool = False) -> Node:
    """Variance over `axis` (all axes by default), squares divided by their number minus `correction`.

    >>> import hetu as ht
    >>> float(ht.evaluate(var([1.0, 3.0], correction=1)))
    2.0
    """
    x = as_node(x)
    count: Any = _count(x, axis)
    count -= correction
    if not isinstance(count, Dim) and count <= 0:
        raise ArgumentError(f"var: correction {correction} leaves no element of {x!r}", fix="use correction=0")
    wide = _widened(x)
    made: Node = sum(square(wide - mean(wide, axis, keepdims=True)), axis=axis, keepdims=keepdims) / count
    return _narrowed(made, x)


@public
def logsumexp(x: Any, axis: Axis = None, keepdims: bool = False) -> Node:
    """log(sum(exp(x))) over `axis` (all axes by default), without overflow.

    >>> import hetu as ht
    >>> float(ht.evaluate(logsumexp([1000.0, -1000.0])))
    1000.0
    """
    x = as_node(x)
    top = OPS["stop_gradient"](max(x, axis=axis, keepdims=True))
    top = where(isfinite(top), top, 0)  # infinity minus infinity is NaN
    total = log(sum(exp(x - top), axis=axis, keepdims=True)) + top
    return (
        total if keepdims else OPS["reshape"](total, shape=reduced_shape(x.shape, normalize_axes(axis, x.ndim), False))
    )


@public
def norm(x: Any, axis: Axis = None, ord: float = 2, keepdims: bool = False) -> Node:
    """Length of the vectors along `axis` (all axes by default): `ord` is 1, 2 or infinity. Its slope at 0 is 0.

    Squares are added as the mean adds numbers, so that those of 16-bit floats and of integers do not overflow.

    >>> import hetu as ht
    >>> float(ht.evaluate(norm([3.0, 4.0])))
    5.0
    """
    x = as_node(x)
    if ord == 1:
        return sum(absolute(x), axis=axis, keepdims=keepdims)
    if ord == math.inf:
        return max(absolute(x), axis=axis, keepdims=keepdims)
    if ord != 2:
        raise ArgumentError(f"norm: ord is {ord!r}", fix='use 1, 2 or float("inf")')
    wide = _widened(x)
    wide = wide if is_float(wide.dtype) else cast_to(wide, DEFAULT_FLOAT)
    total = sum(square(wide), axis=axis, keepdims=keepdims)
    zero = equal(total, 0)
    return _narrowed(where(zero, 0, sqrt(where(zero, 1, total))), x)
