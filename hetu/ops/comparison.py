"""Operators that compare, round, bound and choose, element by element with broadcasting.

Comparisons and logic give booleans and pass no gradient. Logic takes booleans only: a number is neither true nor
false.
"""

from __future__ import annotations

import builtins
import math
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import common
from ..core.errors import ArgumentError, DTypeError
from ..core.graph import Node
from ..core.leaf import filling
from ..core.op import op
from ..core.types import TensorType, broadcast_shapes, numbers, promote
from .elementwise import predicate

__all__ = [
    "ceil",
    "clip",
    "equal",
    "floor",
    "isfinite",
    "isnan",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "not_equal",
    "round",
    "where",
]


# -- rounding and bounds -----------------------------------------------------------------------------------------


@op(infer=numbers, dims="...->...", ufunc="floor", inplace={0: (0,)}, cuda="y = floor(x)", differentiable=False)
def floor(xp: ModuleType, x: Any) -> Any:
    """The next integer below; no gradient passes.

    >>> import hetu as ht
    >>> ht.evaluate(floor([1.5, -1.5])).tolist()
    [1.0, -2.0]
    """
    return xp.floor(x)


@op(infer=numbers, dims="...->...", ufunc="ceil", inplace={0: (0,)}, cuda="y = ceil(x)", differentiable=False)
def ceil(xp: ModuleType, x: Any) -> Any:
    """The next integer above; no gradient passes.

    >>> import hetu as ht
    >>> ht.evaluate(ceil([1.5, -1.5])).tolist()
    [2.0, -1.0]
    """
    return xp.ceil(x)


@op(infer=numbers, dims="...->...", inplace={0: (0,)}, cuda="y = rint(x)", differentiable=False)
def round(xp: ModuleType, x: Any) -> Any:
    """The nearest integer, halves to the even one; no gradient passes.

    >>> import hetu as ht
    >>> ht.evaluate(round([0.5, 1.5, 2.4])).tolist()
    [0.0, 2.0, 2.0]
    """
    return xp.round(x)


@round.into
def round_into(xp: ModuleType, out: Any, x: Any) -> None:
    xp.round(x, out=out)


@op(infer=numbers, dims="...->...", inplace={0: (0,)}, cuda="y = x < min ? min : x > max ? max : x")
def clip(xp: ModuleType, x: Any, *, min: float | None = None, max: float | None = None) -> Any:
    """x limited to [min, max], numbers or None for no bound. The gradient passes where x lies within, bounds included.

    >>> import hetu as ht
    >>> ht.evaluate(clip([-2.0, 0.5, 3.0], min=0, max=1)).tolist()
    [0.0, 0.5, 1.0]
    """
    return xp.clip(x, min, max)


@clip.normalize
def clip_normalize(x: TensorType, *, min: float | None, max: float | None) -> dict[str, Any]:
    """No bound is the last number of the dtype, so that kernels know one form."""
    if x.dtype.kind in "iu":
        if not builtins.all(bound is None or bound == int(bound) for bound in (min, max)):
            raise DTypeError(f"got {x} and a fractional bound", fix='convert with ht.astype(x, "float32")')
        limits = np.iinfo(x.dtype)
        low: float
        high: float
        low, high = int(limits.min if min is None else min), int(limits.max if max is None else max)
    else:
        low, high = float(-math.inf if min is None else min), float(math.inf if max is None else max)
    if low > high:
        raise ArgumentError(f"min {low} lies above max {high}", fix="swap them")
    return {"min": low, "max": high}


@clip.grad
def clip_grad(g: Node, y: Node, x: Node, *, min: float, max: float) -> Node:
    return g * equal(x, y)


@clip.into
def clip_into(xp: ModuleType, out: Any, x: Any, *, min: float, max: float) -> None:
    xp.clip(x, min, max, out=out)


@op(infer=numbers, dims="...,...->...", ufunc="minimum", inplace={0: (0, 1)}, cuda="y = a <= b || a != a ? a : b")
def minimum(xp: ModuleType, a: Any, b: Any) -> Any:
    """The smaller one; NaN wins. At a tie the gradient goes to `a`.

    >>> import hetu as ht
    >>> ht.evaluate(minimum([1.0, 5.0], 3)).tolist()
    [1.0, 3.0]
    """
    return xp.minimum(*common(xp, a, b))


@minimum.grad
def minimum_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    return g * less_equal(a, b), g * greater(a, b)


@op(infer=numbers, dims="...,...->...", ufunc="maximum", inplace={0: (0, 1)}, cuda="y = a >= b || a != a ? a : b")
def maximum(xp: ModuleType, a: Any, b: Any) -> Any:
    """The larger one; NaN wins. At a tie the gradient goes to `a`.

    >>> import hetu as ht
    >>> ht.evaluate(maximum([1.0, 5.0], 3)).tolist()
    [3.0, 5.0]
    """
    return xp.maximum(*common(xp, a, b))


@maximum.grad
def maximum_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    return g * greater_equal(a, b), g * less(a, b)


# -- comparison and logic: booleans, without gradients -----------------------------------------------------------


@op(infer=predicate, dims="...,...->...", ufunc="equal", cuda="y = a == b", differentiable=False)
def equal(xp: ModuleType, a: Any, b: Any) -> Any:
    """Where a and b are equal. `==` on nodes asks something else: whether they are the same node.

    >>> import hetu as ht
    >>> ht.evaluate(equal([1, 2, 3], 2)).tolist()
    [False, True, False]
    """
    return xp.equal(*common(xp, a, b))


@op(infer=predicate, dims="...,...->...", ufunc="not_equal", cuda="y = a != b", differentiable=False)
def not_equal(xp: ModuleType, a: Any, b: Any) -> Any:
    """a != b.

    >>> import hetu as ht
    >>> ht.evaluate(not_equal([1, 2, 3], 2)).tolist()
    [True, False, True]
    """
    return xp.not_equal(*common(xp, a, b))


@op(infer=predicate, dims="...,...->...", ufunc="less", cuda="y = a < b", differentiable=False)
def less(xp: ModuleType, a: Any, b: Any) -> Any:
    """a < b.

    >>> import hetu as ht
    >>> ht.evaluate(less([1, 2, 3], 2)).tolist()
    [True, False, False]
    """
    return xp.less(*common(xp, a, b))


@op(infer=predicate, dims="...,...->...", ufunc="less_equal", cuda="y = a <= b", differentiable=False)
def less_equal(xp: ModuleType, a: Any, b: Any) -> Any:
    """a <= b.

    >>> import hetu as ht
    >>> ht.evaluate(less_equal([1, 2, 3], 2)).tolist()
    [True, True, False]
    """
    return xp.less_equal(*common(xp, a, b))


@op(infer=predicate, dims="...,...->...", ufunc="greater", cuda="y = a > b", differentiable=False)
def greater(xp: ModuleType, a: Any, b: Any) -> Any:
    """a > b.

    >>> import hetu as ht
    >>> ht.evaluate(greater([1, 2, 3], 2)).tolist()
    [False, False, True]
    """
    return xp.greater(*common(xp, a, b))


@op(infer=predicate, dims="...,...->...", ufunc="greater_equal", cuda="y = a >= b", differentiable=False)
def greater_equal(xp: ModuleType, a: Any, b: Any) -> Any:
    """a >= b.

    >>> import hetu as ht
    >>> ht.evaluate(greater_equal([1, 2, 3], 2)).tolist()
    [False, True, True]
    """
    return xp.greater_equal(*common(xp, a, b))


def truth_values(*types: TensorType, **_: Any) -> TensorType:
    """Type rule of logic: only booleans are true or false."""
    for type_ in types:
        if type_.dtype.kind != "b":
            raise DTypeError(f"got {type_}, wanted booleans", fix="compare first, for example ht.not_equal(x, 0)")
    return predicate(*types)


@op(
    infer=truth_values,
    dims="...,...->...",
    ufunc="logical_and",
    inplace={0: (0, 1)},
    cuda="y = a && b",
    differentiable=False,
)
def logical_and(xp: ModuleType, a: Any, b: Any) -> Any:
    """Whether both hold; `a & b` on nodes.

    >>> import hetu as ht
    >>> ht.evaluate(logical_and([True, True, False], [True, False, False])).tolist()
    [True, False, False]
    """
    return xp.logical_and(a, b)


@op(
    infer=truth_values,
    dims="...,...->...",
    ufunc="logical_or",
    inplace={0: (0, 1)},
    cuda="y = a || b",
    differentiable=False,
)
def logical_or(xp: ModuleType, a: Any, b: Any) -> Any:
    """Whether at least one holds; `a | b` on nodes.

    >>> import hetu as ht
    >>> ht.evaluate(logical_or([True, True, False], [True, False, False])).tolist()
    [True, True, False]
    """
    return xp.logical_or(a, b)


@op(
    infer=truth_values,
    dims="...,...->...",
    ufunc="logical_xor",
    inplace={0: (0, 1)},
    cuda="y = a != b",
    differentiable=False,
)
def logical_xor(xp: ModuleType, a: Any, b: Any) -> Any:
    """Whether exactly one holds.

    >>> import hetu as ht
    >>> ht.evaluate(logical_xor([True, True, False], [True, False, False])).tolist()
    [False, True, False]
    """
    return xp.logical_xor(a, b)


@op(infer=truth_values, dims="...->...", ufunc="logical_not", inplace={0: (0,)}, cuda="y = !x", differentiable=False)
def logical_not(xp: ModuleType, x: Any) -> Any:
    """Whether it does not hold; `~x` on nodes.

    >>> import hetu as ht
    >>> ht.evaluate(logical_not([True, False])).tolist()
    [False, True]
    """
    return xp.logical_not(x)


@op(precision="wide", infer=predicate, dims="...->...", ufunc="isnan", cuda="y = isnan((T)x)", differentiable=False)
def isnan(xp: ModuleType, x: Any) -> Any:
    """Whether x is not a number.

    >>> import hetu as ht
    >>> ht.evaluate(isnan([1.0, float("nan"), float("inf")])).tolist()
    [False, True, False]
    """
    return xp.isnan(x)


@op(
    precision="wide",
    infer=predicate,
    dims="...->...",
    ufunc="isfinite",
    cuda="y = isfinite((T)x)",
    differentiable=False,
)
def isfinite(xp: ModuleType, x: Any) -> Any:
    """Whether x is neither infinite nor NaN.

    >>> import hetu as ht
    >>> ht.evaluate(isfinite([1.0, float("nan"), float("inf")])).tolist()
    [True, False, False]
    """
    return xp.isfinite(x)


# -- choice ------------------------------------------------------------------------------------------------------


def _where_type(condition: TensorType, a: TensorType, b: TensorType) -> TensorType:
    truth_values(condition)
    return TensorType(broadcast_shapes(condition.shape, a.shape, b.shape), promote(a.dtype, b.dtype))


@op(infer=_where_type, dims="...,...,...->...", inplace={0: (2,)}, cuda="y = condition ? a : b")
def where(xp: ModuleType, condition: Any, a: Any, b: Any) -> Any:
    """`a` where `condition` holds, else `b`; all three broadcast. `condition` is boolean.

    >>> import hetu as ht
    >>> ht.evaluate(where([True, False], [1.0, 2.0], 0)).tolist()
    [1.0, 0.0]
    """
    return xp.where(condition, *common(xp, a, b))


@where.grad
def where_grad(g: Node, y: Node, condition: Node, a: Node, b: Node) -> tuple[None, Node, Node]:
    return None, where(condition, g, 0), where(condition, 0, g)


@where.simplify
def where_simplify(node: Node, condition: Node, a: Node, b: Node) -> Node | None:
    chosen = filling(condition)
    return None if chosen is None else a if chosen else b
