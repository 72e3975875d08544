"""Operators that work element by element, with broadcasting: conversion, arithmetic, and what their kind shares.

A ufunc-like operator names its ufunc and needs no other rule to run in place and without allocation. The planner may
write a result over any of its operands. Functions of real numbers turn integers into float32, division is true
division, and booleans are not numbers. Left out: complex numbers.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Concatenate

import numpy as np

from ..core.errors import DTypeError, ValueRangeError
from ..core.graph import OPS, Node
from ..core.kernels import Call
from ..core.op import DEFAULT_FLOAT, Decorator, Op, P, Role, elementwise, float_elementwise, op
from ..core.types import TensorType, as_dtype, dtype_in, is_float, promote

__all__ = ["abs", "astype", "reciprocal", "sign", "square"]

# -- what the operators here share -----------------------------------------------------------------------------


def dtype_of(array: Any) -> np.dtype:
    """The NumPy dtype of an array of any array module."""
    dtype = array.dtype  # NumPy's own, or an object that prints as `module.float32`
    return dtype if isinstance(dtype, np.dtype) else np.dtype(str(dtype).rpartition(".")[2])


def to_dtype(xp: ModuleType, array: Any, dtype: np.dtype) -> Any:
    """`array` in the given dtype; itself when it has it already."""
    return array if dtype_of(array) == dtype else xp.astype(xp.asarray(array), dtype_in(xp, dtype.name))


def common(xp: ModuleType, *arrays: Any) -> Sequence[Any]:
    """The arrays in the dtype of their elementwise result, as array modules disagree about mixed kinds."""
    if builtins.all(a.dtype == arrays[0].dtype for a in arrays):
        return arrays
    dtype = promote(*map(dtype_of, arrays))
    return [to_dtype(xp, a, dtype) for a in arrays]


def floats(xp: ModuleType, *arrays: Any) -> Sequence[Any]:
    """As `common`, and integers become the default float."""
    alike = common(xp, *arrays)
    return alike if is_float(dtype_of(alike[0])) else [to_dtype(xp, a, DEFAULT_FLOAT) for a in alike]


def numbers(*types: TensorType, **_: Any) -> TensorType:
    """Type rule of arithmetic: as `elementwise`, but booleans alone are a DTypeError."""
    result = elementwise(*types)
    if result.dtype.kind == "b":
        raise DTypeError(
            "got booleans, wanted numbers",
            fix='convert with ht.astype(x, "float32"), or combine truth values with ht.logical_and and ht.logical_or',
        )
    return result


def float_function(**rules: Any) -> Decorator[Node]:
    """An operator of one float input that may be overwritten. `y` and `x` are the variables of `cuda`."""

    def decorate(forward: Callable[Concatenate[ModuleType, P], Any]) -> Op[P, Node]:
        made = op(infer=float_elementwise, dims="...->...", inplace={0: (0,)}, **rules)(forward)

        @made.bind
        def convert_first(xp: ModuleType, out: Any, x: Any, **attrs: Any) -> Call | None:
            """Ufuncs would compute small integers in half precision."""
            return None if x.dtype == out.dtype else lambda: xp.copyto(out, forward(xp, x, **attrs))

        return made

    return decorate


# -- conversion -------------------------------------------------------------------------------------------------


@op(role=Role.MOVE, infer=lambda x, *, dtype: TensorType(x.shape, as_dtype(dtype)), dims="...->...", cuda="y = x")
def astype(xp: ModuleType, x: Any, *, dtype: str) -> Any:
    """`x` converted to another dtype; floats are cut off toward 0 when they become integers.

    >>> import hetu as ht
    >>> ht.evaluate(astype([1.7, -1.7], "int32")).tolist()
    [1, -1]
    """
    return xp.astype(xp.asarray(x), dtype_in(xp, dtype))


@astype.grad
def astype_grad(g: Node, y: Node, x: Node, *, dtype: str) -> Node:
    return g


@astype.view
def astype_view(xp: ModuleType, x: Any, *, dtype: str) -> Any:
    return x if x.dtype == dtype else None


@astype.into
def astype_into(xp: ModuleType, out: Any, x: Any, *, dtype: str) -> None:
    xp.copyto(out, x, casting="unsafe")


def cast_to(x: Node, dtype: np.dtype) -> Node:
    """`x` in the given dtype; itself when it has it already."""
    return x if x.dtype == dtype else astype(x, dtype=dtype.name)


# -- arithmetic --------------------------------------------------------------------------------------------------


@op(infer=numbers, dims="...,...->...", linear="joint", ufunc="add", inplace={0: (0, 1)}, cuda="y = a + b")
def add(xp: ModuleType, a: Any, b: Any) -> Any:
    """a + b.

    >>> import hetu as ht
    >>> ht.evaluate(add([1.0, 2.0], 1)).tolist()
    [2.0, 3.0]
    """
    return xp.add(*common(xp, a, b))


@add.grad
def add_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    return g, g


@op(infer=numbers, dims="...,...->...", linear="joint", ufunc="subtract", inplace={0: (0, 1)}, cuda="y = a - b")
def subtract(xp: ModuleType, a: Any, b: Any) -> Any:
    """a - b.

    >>> import hetu as ht
    >>> ht.evaluate(subtract([1.0, 2.0], 1)).tolist()
    [0.0, 1.0]
    """
    return xp.subtract(*common(xp, a, b))


@subtract.grad
def subtract_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    return g, negative(g)


@op(infer=numbers, dims="...,...->...", linear=(0, 1), ufunc="multiply", inplace={0: (0, 1)}, cuda="y = a * b")
def multiply(xp: ModuleType, a: Any, b: Any) -> Any:
    """a * b.

    >>> import hetu as ht
    >>> ht.evaluate(multiply([1.0, 2.0], 3)).tolist()
    [3.0, 6.0]
    """
    return xp.multiply(*common(xp, a, b))


@multiply.grad
def multiply_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    return g * b, g * a


@op(
    precision="wide",
    infer=float_elementwise,
    dims="...,...->...",
    linear=(0,),
    ufunc="divide",
    inplace={0: (0, 1)},
    cuda="y = (T)a / (T)b",
)
def divide(xp: ModuleType, a: Any, b: Any) -> Any:
    """a / b, a true division: integers give float32.

    >>> import hetu as ht
    >>> ht.evaluate(divide([1, 2], 4)).tolist()
    [0.25, 0.5]
    """
    return xp.divide(*floats(xp, a, b))


@divide.grad
def divide_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    return g / b, negative(g * y / b)


@op(infer=numbers, dims="...,...->...", ufunc="floor_divide", inplace={0: (0, 1)}, differentiable=False)
def floor_divide(xp: ModuleType, a: Any, b: Any) -> Any:
    """The integer below a / b, as Python's `//`; integers stay integers. No gradient passes.

    >>> import hetu as ht
    >>> ht.evaluate(floor_divide([7, -7], 2)).tolist()
    [3, -4]
    """
    return xp.floor_divide(*common(xp, a, b))


@op(infer=numbers, dims="...,...->...", ufunc="remainder", inplace={0: (0, 1)})
def remainder(xp: ModuleType, a: Any, b: Any) -> Any:
    """a - b * (a // b), as Python's `%`: it has the sign of b. Integers stay integers.

    >>> import hetu as ht
    >>> ht.evaluate(remainder([7.5, -7.5], 2)).tolist()
    [1.5, 0.5]
    """
    return xp.remainder(*common(xp, a, b))


@remainder.grad
def remainder_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node, Node]:
    return g, negative(g * floor_divide(a, b))


def _check_divisor(xp: ModuleType, a: Any, b: Any) -> None:
    """Integers have no infinity and no NaN to answer with."""
    if not is_float(dtype_of(a)) and not is_float(dtype_of(b)) and bool(xp.any(b == 0)):
        raise ValueRangeError("an integer was divided by 0", fix='convert the operands with ht.astype(x, "float32")')


for _division in (floor_divide, remainder):
    _division.check(_check_divisor)


@op(
    precision="wide", infer=numbers, dims="...,...->...", ufunc="power", inplace={0: (0, 1)}, cuda="y = pow((T)a, (T)b)"
)
def power(xp: ModuleType, a: Any, b: Any) -> Any:
    """a to the power of b. Integers stay integers; for them a negative exponent is a ValueRangeError at run time.

    >>> import hetu as ht
    >>> ht.evaluate(power([1.0, 2.0, 3.0], 2)).tolist()
    [1.0, 4.0, 9.0]
    """
    return xp.pow(*common(xp, a, b))


@power.check
def power_check(xp: ModuleType, a: Any, b: Any) -> None:
    """Integer powers stay integers, which a negative exponent cannot give."""
    if not is_float(dtype_of(a)) and dtype_of(b).kind == "i" and bool(xp.any(b < 0)):
        raise ValueRangeError(
            "power: an integer got a negative exponent", fix='convert the base with ht.astype(x, "float32")'
        )


@power.grad
def power_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node | None, Node | None]:
    if b.role is Role.CONSTANT and b.ndim == 0:
        return _fixed_power_grad(g, a, b.attrs["value"].item()), None
    where, equal, greater, log = (OPS[name] for name in ("where", "equal", "greater", "log"))
    slope = where(equal(b, 0), 0, b * power(a, b - 1))  # a ** 0 is flat, even where 0 ** -1 is infinite
    grows = greater(a, 0)  # below 0 a power exists for single exponents only, so it has no slope in b
    return g * slope, g * y * where(grows, log(where(grows, a, 1)), 0)


def _fixed_power_grad(g: Node, a: Node, exponent: float) -> Node | None:
    if exponent == 0:
        return None
    return g * (a * 2 if exponent == 2 else power(a, exponent - 1) * exponent)


@op(infer=numbers, dims="...->...", linear=(0,), ufunc="negative", inplace={0: (0,)}, cuda="y = -x")
def negative(xp: ModuleType, x: Any) -> Any:
    """-x.

    >>> import hetu as ht
    >>> ht.evaluate(negative([1.0, -2.0])).tolist()
    [-1.0, 2.0]
    """
    return xp.negative(x)


@negative.grad
def negative_grad(g: Node, y: Node, x: Node) -> Node:
    return negative(g)


@op(infer=numbers, dims="...->...", ufunc="absolute", inplace={0: (0,)}, cuda="y = x < 0 ? -x : x")
def abs(xp: ModuleType, x: Any) -> Any:
    """The absolute value; its slope at 0 is 0.

    >>> import hetu as ht
    >>> ht.evaluate(abs([1.0, -2.0])).tolist()
    [1.0, 2.0]
    """
    return xp.abs(x)


@abs.grad
def abs_grad(g: Node, y: Node, x: Node) -> Node:
    return g * sign(x)


@op(
    infer=numbers,
    dims="...->...",
    ufunc="sign",
    inplace={0: (0,)},
    cuda="y = x != x ? x : (T)((x > 0) - (x < 0))",
    differentiable=False,
)
def sign(xp: ModuleType, x: Any) -> Any:
    """-1, 0 or 1. A step function, so no gradient passes.

    >>> import hetu as ht
    >>> ht.evaluate(sign([3.0, 0.0, -2.0])).tolist()
    [1.0, 0.0, -1.0]
    """
    return xp.sign(x)


@op(precision="wide", infer=numbers, dims="...->...", ufunc="square", inplace={0: (0,)}, cuda="y = x * x")
def square(xp: ModuleType, x: Any) -> Any:
    """x * x.

    >>> import hetu as ht
    >>> ht.evaluate(square([1.0, -2.0])).tolist()
    [1.0, 4.0]
    """
    return xp.square(x)


@square.grad
def square_grad(g: Node, y: Node, x: Node) -> Node:
    return g * (x * 2)


@float_function(ufunc="reciprocal", cuda="y = (T)1 / x", precision="wide")
def reciprocal(xp: ModuleType, x: Any) -> Any:
    """1 / x.

    >>> import hetu as ht
    >>> ht.evaluate(reciprocal([4, 2])).tolist()
    [0.25, 0.5]
    """
    return xp.reciprocal(*floats(xp, x))


@reciprocal.grad
def reciprocal_grad(g: Node, y: Node, x: Node) -> Node:
    return negative(g * square(y))
