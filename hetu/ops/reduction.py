"""Operators that shrink axes: sums, extrema, norms and logical reductions. `scan.py` has those that go along one.

What composes well is a plain function (`mean`, `var`, `logsumexp`, `norm`): its gradient and its sharding follow from
the parts.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import dtype_of
from ..core.errors import ArgumentError, DTypeError, ShapeError, public
from ..core.graph import OPS, Node
from ..core.leaf import filled, filling
from ..core.op import Op, as_node, op
from ..core.operators import cast_to
from ..core.types import (
    DEFAULT_FLOAT,
    Dim,
    Shape,
    Size,
    TensorType,
    axis_letters,
    is_float,
    normalize_axes,
    normalize_axis,
    product,
)
from .elementwise import abs as absolute
from .elementwise import equal, exp, isfinite, log, power, sqrt, square, where

Axis = int | tuple[int, ...] | None

__all__ = ["all", "any", "logsumexp", "max", "mean", "min", "norm", "prod", "sum", "var"]


# -- what the operators here share -----------------------------------------------------------------------------


def reduced_shape(shape: Shape, axis: tuple[int, ...], keepdims: bool) -> Shape:
    """`shape` without the (normalized) axes, or with 1 in their place."""
    if keepdims:
        return tuple(1 if i in axis else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in axis)


def reduction(x: TensorType, *, axis: tuple[int, ...], keepdims: bool, **_: Any) -> TensorType:
    """The first input without the reduced axes; the dtype stays."""
    return TensorType(reduced_shape(x.shape, axis, keepdims), x.dtype)


def reduction_axes(x: TensorType, *, axis: Any, **attrs: Any) -> dict[str, Any]:
    """`normalize` of reductions: None means all axes."""
    return {"axis": normalize_axes(axis, x.ndim), **attrs}


def reduction_dims(x: TensorType, *, axis: tuple[int, ...], keepdims: bool, **_: Any) -> str:
    """Sharding rule: every axis has its own factor, reduced ones vanish (or stay as size 1)."""
    letters = axis_letters(x.ndim)
    kept = [("1" if keepdims else "") if i in axis else c for i, c in enumerate(letters)]
    return f"{''.join(letters)}->{''.join(kept)}"


def whole_reduction_dims(x: TensorType, *, axis: tuple[int, ...], keepdims: bool) -> str:
    """As `reduction_dims`, but no reduced axis may be split."""
    left, right = reduction_dims(x, axis=axis, keepdims=keepdims).split("->")
    return f"{''.join(f'{c}!' if i in axis else c for i, c in enumerate(left))}->{right}"


def along_axis_dims(x: TensorType, *, axis: int, **_: Any) -> str:
    """Sharding rule of what keeps the shape but needs all of one axis at once."""
    marked = "".join(f"{c}!" if i == axis else c for i, c in enumerate(axis_letters(x.ndim)))
    return f"{marked}->{marked}"


def one_axis(x: TensorType, *, axis: int | None, **attrs: Any) -> dict[str, Any]:
    """`normalize` of operators along one axis, which may be left out where there is no other."""
    if axis is None and x.ndim == 1:
        axis = 0
    if not isinstance(axis, int):
        raise ArgumentError(
            f"axis is {axis!r}, wanted one integer",
            fix="name one axis, such as axis=-1, or flatten first: ht.flatten(x)",
        )
    return {"axis": normalize_axis(axis, x.ndim), **attrs}


def restore_axes(g: Node, x: Node, axis: tuple[int, ...], keepdims: bool) -> Node:
    """Give a reduced value its size-1 axes back, so that it broadcasts against `x`."""
    return g if keepdims or not axis else OPS["expand_dims"](g, axis=axis)


# -- sums ------------------------------------------------------------------------------------------------------


def total_type(x: TensorType, *, axis: tuple[int, ...], keepdims: bool) -> TensorType:
    """Small integers and truth values are counted in 64 bits, or their sum would overflow."""
    wide = np.dtype("int64") if not is_float(x.dtype) and x.dtype != np.uint64 else x.dtype
    return TensorType(reduced_shape(x.shape, axis, keepdims), wide)


def total_dtype(xp: ModuleType, x: Any) -> Any:
    dtype = dtype_of(x)
    return x.dtype if is_float(dtype) or dtype == np.uint64 else xp.int64


@op(infer=total_type, dims=reduction_dims, linear=(0,))
def sum(xp: ModuleType, x: Any, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Sum over `axis` (all axes by default). Floats keep their dtype, integers and booleans give int64.

    >>> import hetu as ht
    >>> ht.evaluate(sum([[1.0, 2.0], [3.0, 4.0]], axis=0)).tolist()
    [4.0, 6.0]
    """
    if dtype_of(x).kind == "b":
        x = xp.astype(x, xp.int64)
    return xp.sum(x, axis=axis, keepdims=keepdims, dtype=total_dtype(xp, x))


sum.normalize(reduction_axes)
sum.grad(lambda g, y, x, *, axis, keepdims: OPS["broadcast_like"](restore_axes(g, x, axis, keepdims), x))
sum.into(lambda xp, out, x, *, axis, keepdims: xp.sum(x, axis=axis, keepdims=keepdims, out=out, dtype=out.dtype))


@sum.simplify
def sum_simplify(node: Node, x: Node) -> Node | None:
    if filling(x) == 0:
        return filled(node, 0)
    return None if node.attrs["axis"] else x


@op(infer=total_type, dims=whole_reduction_dims)
def prod(xp: ModuleType, x: Any, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Product over `axis` (all axes by default). The dtype follows the rule of `sum`.

    Gradients of every order are right where factors are 0; each one beyond the first takes the square of the memory.

    >>> import hetu as ht
    >>> float(ht.evaluate(prod([2.0, 3.0, 4.0])))
    24.0
    """
    return xp.prod(x, axis=axis, keepdims=keepdims, dtype=total_dtype(xp, x))


prod.normalize(reduction_axes)


@prod.grad
def prod_grad(g: Node, y: Node, x: Node, *, axis: tuple[int, ...], keepdims: bool) -> Node:
    """Over one axis, behind the others: the numbers of all axes of the product side by side."""
    rest = tuple(i for i in range(x.ndim) if i not in axis)
    order, kept = (*rest, *axis), tuple(x.shape[i] for i in rest)
    rows = OPS["reshape"](OPS["permute_dims"](x, order), shape=(*kept, product(x.shape[i] for i in axis)))
    slopes = prod_dx(OPS["reshape"](g, shape=(*kept, 1)), rows)
    back = tuple(order.index(i) for i in range(x.ndim))
    return OPS["permute_dims"](OPS["reshape"](slopes, shape=tuple(x.shape[i] for i in order)), back)


@op(infer=lambda g, x: x, dims="...1,...k!->...k!")
def prod_dx(xp: ModuleType, g: Any, x: Any) -> Any:
    """g (..., 1) times the product of all other numbers of each row of x (..., n): those before it by those behind.

    >>> import hetu as ht
    >>> ht.evaluate(prod_dx([[1.0]], [[0.0, 3.0, 4.0]])).tolist()
    [[12.0, 0.0, 0.0]]
    """
    running = getattr(xp, "cumulative_prod", None) or xp.cumprod  # as CuPy calls it
    ones, behind = xp.ones((*x.shape[:-1], 1), dtype=x.dtype), xp.flip(x, axis=-1)
    before, after = (running(xp.concat([ones, n[..., :-1]], axis=-1), axis=-1, dtype=x.dtype) for n in (x, behind))
    return g * before * xp.flip(after, axis=-1) if x.size else x


@prod_dx.grad
def prod_dx_grad(h: Node, y: Node, g: Node, x: Node) -> tuple[Node, Node]:
    """With the rows of the matrix that has 1 on its diagonal and x beside: the slopes of each number are a product."""
    places = OPS["arange"](start=0, stop=x.shape[-1], step=1, dtype="int64")
    own = equal(OPS["expand_dims"](places, axis=1), places)
    others = where(own, 1, OPS["expand_dims"](x, axis=-2))
    slopes = prod_dx(OPS["expand_dims"](h * g, axis=-1), others)
    return sum(h * prod_dx(OPS["ones_like"](g), x), axis=-1, keepdims=True), sum(where(own, 0, slopes), axis=-2)


prod.into(lambda xp, out, x, *, axis, keepdims: xp.prod(x, axis=axis, keepdims=keepdims, out=out, dtype=out.dtype))


# -- extrema ---------------------------------------------------------------------------------------------------


def extremum_type(x: TensorType, *, axis: tuple[int, ...], keepdims: bool) -> TensorType:
    for i in axis:
        if isinstance(x.shape[i], int) and x.shape[i] == 0:
            raise ShapeError(f"axis {i} of {x} is empty and has no extremum", fix="give it at least one element")
    if x.dtype.kind == "b":
        raise DTypeError(f"got {x}, wanted numbers", fix="use ht.any or ht.all for booleans")
    return reduction(x, axis=axis, keepdims=keepdims)


def _identity(xp: ModuleType, x: Any, axis: tuple[int, ...], keepdims: bool, largest: bool) -> Any:
    """The extremum of no elements, which an empty shard has: the last number of the dtype."""
    dtype = dtype_of(x)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    value = (limits.max if largest else limits.min) if limits else (math.inf if largest else -math.inf)
    return xp.full(reduced_shape(x.shape, axis, keepdims), value, dtype=x.dtype)


def _extremum_grad(g: Node, y: Node, x: Node, *, axis: tuple[int, ...], keepdims: bool) -> Node:
    """Elements that tie share the gradient equally."""
    chosen = OPS["astype"](equal(x, restore_axes(y, x, axis, keepdims)), dtype=x.dtype)
    return chosen * (restore_axes(g, x, axis, keepdims) / sum(chosen, axis=axis, keepdims=True))


@op(infer=extremum_type, dims=reduction_dims, reduce="max")
def max(xp: ModuleType, x: Any, *, axis: Any = None, keepdims: bool = False) -> Any:
    """Largest element along `axis` (all axes by default); ties share the gradient equally.

    >>> import hetu as ht
    >>> ht.evaluate(max([[1.0, 5.0], [3.0, 4.0]], axis=1)).tolist()
    [5.0, 4.0]
    """
    if builtins.any(x.shape[i] == 0 for i in axis):
        return _identity(xp, x, axis, keepdims, largest=False)
    return xp.max(x, axis=axis, keepdims=keepdims)


@op(infer=extremum_type, dims=reduction_dims, reduce="min")
def min(xp: ModuleType, x: Any, *, axis: Any = None, keepdims: bool = False) -> Any:
    """Smallest element along `axis` (all axes by default); ties share the gradient equally.

    >>> import hetu as ht
    >>> ht.evaluate(min([[1.0, 5.0], [3.0, 4.0]], axis=1)).tolist()
    [1.0, 3.0]
    """
    if builtins.any(x.shape[i] == 0 for i in axis):
        return _identity(xp, x, axis, keepdims, largest=True)
    return xp.min(x, axis=axis, keepdims=keepdims)


def _extremum_into(extremum: Op[..., Node]) -> Callable[..., None]:
    """`into` of max and min: NumPy knows no extremum of no elements."""

    def into(xp: ModuleType, out: Any, x: Any, **attrs: Any) -> None:
        if x.size:
            getattr(xp, extremum.name)(x, **attrs, out=out)
        else:
            out[...] = extremum.forward(xp, x, **attrs)

    return into


for _extremum in (max, min):
    _extremum.normalize(reduction_axes)
    _extremum.grad(_extremum_grad)
    _extremum.into(_extremum_into(_extremum))


# -- truth -----------------------------------------------------------------------------------------------------


def _truth_type(x: TensorType, *, axis: tuple[int, ...], keepdims: bool) -> TensorType:
    if x.dtype.kind != "b":
        raise DTypeError(f"got {x}, wanted booleans", fix="compare first, for example ht.not_equal(x, 0)")
    return reduction(x, axis=axis, keepdims=keepdims)


@op(infer=_truth_type, dims=reduction_dims, reduce="max", differentiable=False)
def any(xp: ModuleType, x: Any, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether at least one holds along `axis` (all axes by default). Booleans only.

    >>> import hetu as ht
    >>> ht.evaluate(any([[True, False], [False, False]], axis=1)).tolist()
    [True, False]
    """
    return xp.any(x, axis=axis, keepdims=keepdims)


@op(infer=_truth_type, dims=reduction_dims, reduce="min", differentiable=False)
def all(xp: ModuleType, x: Any, *, axis: Axis = None, keepdims: bool = False) -> Any:
    """Whether all hold along `axis` (all axes by default). Booleans only.

    >>> import hetu as ht
    >>> ht.evaluate(all([[True, False], [True, True]], axis=1)).tolist()
    [False, True]
    """
    return xp.all(x, axis=axis, keepdims=keepdims)


any.normalize(reduction_axes)
all.normalize(reduction_axes)


# -- compositions ----------------------------------------------------------------------------------------------


def as_floats(x: Node) -> Node:
    """Integers and booleans in the default float: differences of them wrap, as does the absolute value of the least."""
    return x if is_float(x.dtype) else cast_to(x, DEFAULT_FLOAT)


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
    count = _count(x, axis)
    if not isinstance(count, Dim) and count <= correction:
        raise ArgumentError(f"var: correction {correction} leaves no element of {x!r}", fix="use correction=0")
    wide = _widened(x)
    total = sum(square(wide - mean(wide, axis, keepdims=True)), axis=axis, keepdims=keepdims)
    number = as_node(count, [total.dtype]) if isinstance(count, Dim) else count  # its correction may be a fraction
    return _narrowed(total / (number - correction), x)


@public
def logsumexp(x: Any, axis: Axis = None, keepdims: bool = False) -> Node:
    """log(sum(exp(x))) over `axis` (all axes by default), without overflow.

    >>> import hetu as ht
    >>> float(ht.evaluate(logsumexp([1000.0, -1000.0])))
    1000.0
    """
    given = as_node(x)
    x = as_floats(_widened(given))
    top = OPS["stop_gradient"](max(x, axis=axis, keepdims=True))
    top = where(isfinite(top), top, 0)  # infinity minus infinity is NaN
    total = log(sum(exp(x - top), axis=axis, keepdims=True)) + top
    shape = reduced_shape(x.shape, normalize_axes(axis, x.ndim), keepdims)
    return _narrowed(total if keepdims else OPS["reshape"](total, shape=shape), given)


@public
def norm(x: Any, axis: Axis = None, ord: float = 2, keepdims: bool = False) -> Node:
    """Length of the vectors along `axis` (all axes by default): (sum of |x|^ord)^(1/ord), or for infinity the greatest.
    Its slope at 0 is 0.

    It adds as the mean does, so that 16-bit floats and integers do not overflow; integers give float32.

    >>> import hetu as ht
    >>> float(ht.evaluate(norm([3.0, 4.0])))
    5.0
    """
    x = as_node(x)
    wide = as_floats(_widened(x))
    if ord == 1:
        return _narrowed(sum(absolute(wide), axis=axis, keepdims=keepdims), x)
    if ord == math.inf:
        return _narrowed(max(absolute(wide), axis=axis, keepdims=keepdims), x)
    if not ord > 0:
        raise ArgumentError(f"norm: ord is {ord!r}", fix='use a number above 0, or float("inf")')
    total = sum(square(wide) if ord == 2 else power(absolute(wide), ord), axis=axis, keepdims=keepdims)
    zero = equal(total, 0)
    total = where(zero, 1, total)
    return _narrowed(where(zero, 0, sqrt(total) if ord == 2 else power(total, 1 / ord)), x)
