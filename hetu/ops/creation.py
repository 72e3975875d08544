"""Arrays made from numbers alone: filled, counting, and the triangles of a matrix.

`init.py` has the numbers that initialize variables, `random.py` random ones.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import dtype_in
from ..core.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError, public
from ..core.graph import Node
from ..core.leaf import filled
from ..core.op import Role, as_node, op, weak_dtype
from ..core.operators import broadcast_like
from ..core.types import Dim, Shape, TensorType, as_dtype
from ..ranges import AnyFloat

__all__ = ["arange", "full", "full_like", "tril", "triu"]


def require_held(dtype: np.dtype, *numbers: Any) -> None:
    """ValueRangeError for a number that an integer or boolean dtype does not hold: beyond it, fractional or NaN."""
    if dtype.kind not in "biu":
        return
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for number in numbers:
        if not isinstance(number, Dim) and not (low <= number <= high and number == int(number)):
            raise ValueRangeError(f"{dtype} does not hold {number!r}", fix='choose another dtype, such as "float32"')


@op(role=Role.MOVE, infer=lambda *, shape, dtype, **_: TensorType(shape, as_dtype(dtype)), differentiable=False)
def full(xp: ModuleType, *, shape: int | Shape, fill_value: bool | AnyFloat, dtype: Any = None) -> Any:
    """An array of one value, which the dtype holds. The dtype follows it (float32, int64 or bool) unless given.

    >>> import hetu as ht
    >>> ht.evaluate(full((2,), 3.0)).tolist()
    [3.0, 3.0]
    """
    return xp.full(shape, fill_value, dtype=dtype_in(xp, dtype))


@full.normalize
def full_attrs(*, shape: Any, fill_value: float, dtype: str | None) -> dict[str, Any]:
    shape, wanted = shape if isinstance(shape, tuple) else (shape,), as_dtype(dtype or weak_dtype(fill_value, ()))
    require_held(wanted, fill_value)
    return {"shape": shape, "fill_value": fill_value, "dtype": wanted.name}


full.into(lambda xp, out, *, shape, fill_value, dtype: out.fill(fill_value))
full.simplify(lambda node: filled(node, node.attrs["fill_value"]))  # in one place of memory, whatever the size


@public
def full_like(x: Any, fill_value: bool | AnyFloat) -> Node:
    """An array of one value in the shape and dtype of `x`.

    >>> import hetu as ht
    >>> ht.evaluate(full_like([1.0, 2.0], 3)).tolist()
    [3.0, 3.0]
    """
    x = as_node(x)
    return broadcast_like(full(shape=(), fill_value=fill_value, dtype=x.dtype), x)


def _arange_type(*, start: Any, stop: Any, step: Any, dtype: str) -> TensorType:
    if any(isinstance(v, Dim) for v in (start, stop, step)):
        if not all(isinstance(v, int | Dim) for v in (start, stop, step)):
            raise ArgumentError(
                f"from {start} to {stop} by {step} with a size that is not known yet",
                fix="count in whole numbers and multiply, such as ht.arange(n) * 0.5",
            )
        count = stop - start if step == 1 else (stop - start + (step - 1)) // step
    else:
        steps = (stop - start) / step
        if not math.isfinite(steps):
            raise ArgumentError(
                f"from {start} to {stop} by {step} are {steps} numbers", fix="pass finite numbers, and a larger step"
            )
        count = max(0, math.ceil(steps))
    wanted = as_dtype(dtype)
    if wanted.kind in "iu" and count != 0:  # a fraction of a step is lost in each of them
        require_held(wanted, start, start + (count - 1) * step)
        require_held(np.dtype("int64"), step)
    if wanted.kind == "b":
        raise DTypeError("arange of booleans", fix="compare an arange of integers, such as ht.arange(5) > 0")
    return TensorType((count,), wanted)


@op(name="arange", infer=_arange_type, differentiable=False)
def _arange(xp: ModuleType, *, start: float | Dim, stop: float | Dim, step: float, dtype: str) -> Any:
    """start, start + step, ... below `stop`; all attributes given, sizes may be unknown.

    >>> import hetu as ht
    >>> ht.evaluate(arange(0.0, 1.0, 0.5)).tolist()
    [0.0, 0.5]
    """
    return xp.arange(start, stop, step, dtype=dtype_in(xp, dtype))


@public
def arange(start: float | Dim, stop: float | Dim | None = None, step: float = 1, dtype: Any = None) -> Node:
    """start, start + step, ... up to, but not including, `stop`; with one argument 0, 1, ... below it.

    int64 for integers and sizes (also unknown ones), else float32, unless a dtype is given.

    >>> import hetu as ht
    >>> ht.evaluate(arange(2, 8, 3)).tolist()
    [2, 5]
    >>> arange(ht.placeholder("x", (None, 3)).shape[0]).ndim
    1
    """
    start, stop = (0, start) if stop is None else (start, stop)
    if isinstance(step, int | float) and step == 0:
        raise ArgumentError("arange got step=0", fix="pass a step other than 0")
    if dtype is None:
        dtype = "float32" if any(isinstance(v, float) for v in (start, stop, step)) else "int64"
    return _arange(start=start, stop=stop, step=step, dtype=dtype)


def _triangle_type(x: TensorType, *, k: int) -> TensorType:
    if x.ndim < 2:
        raise ShapeError(f"got {x.ndim} axes, wanted at least 2", fix="add one with ht.expand_dims")
    return x


@op(precision="wide", role=Role.MOVE, infer=_triangle_type, dims="...m!n!->...m!n!", linear=(0,))
def tril(xp: ModuleType, x: Any, *, k: int = 0) -> Any:
    """`x` with zeros above diagonal `k` of its last two axes; k=0 is the main diagonal, k>0 lies above it.

    >>> import hetu as ht
    >>> ht.evaluate(tril([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 0.0], [3.0, 4.0]]
    """
    return xp.tril(x, k=k)


tril.grad(lambda g, y, x, *, k: tril(g, k=k))


@op(precision="wide", role=Role.MOVE, infer=_triangle_type, dims="...m!n!->...m!n!", linear=(0,))
def triu(xp: ModuleType, x: Any, *, k: int = 0) -> Any:
    """`x` with zeros below diagonal `k` of its last two axes.

    >>> import hetu as ht
    >>> ht.evaluate(triu([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[1.0, 2.0], [0.0, 4.0]]
    """
    return xp.triu(x, k=k)


triu.grad(lambda g, y, x, *, k: triu(g, k=k))
