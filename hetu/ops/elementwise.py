"""Operators that work element by element, with broadcasting: arithmetic, functions, comparisons, logic, choice.

Most are functions of the array module, declared by one row each; they run in place and without allocation. Functions of
real numbers turn integers into float32, division is true division, and booleans are not numbers: arithmetic takes none,
and logic nothing else. Comparisons and logic give booleans and pass no gradient. Left out: complex numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import common, dtype_of, to_dtype
from ..core.errors import DTypeError, ValueRangeError
from ..core.graph import Node
from ..core.kernels import Call
from ..core.leaf import filled, filling
from ..core.op import Decorator, Op, Role, op
from ..core.types import DEFAULT_FLOAT, TensorType, broadcast_shapes, elementwise, is_float, numbers, promote

__all__ = [
    "abs", "atan", "ceil", "cos", "equal", "exp", "expm1", "floor", "isfinite", "isnan", "log", "log1p",
    "logical_and", "logical_not", "logical_or", "logical_xor", "maximum", "minimum", "not_equal", "reciprocal",
    "rsqrt", "sign", "sin", "sqrt", "square", "tanh", "where",
]  # fmt: skip

# -- what the operators here share -----------------------------------------------------------------------------


def float_elementwise(*types: TensorType, **_: Any) -> TensorType:
    """As `elementwise`, but integers become the default float."""
    result = elementwise(*types)
    return result if is_float(result.dtype) else TensorType(result.shape, DEFAULT_FLOAT)


def predicate(*types: TensorType, **_: Any) -> TensorType:
    """As `elementwise` with a boolean result."""
    return TensorType(broadcast_shapes(*(t.shape for t in types)), np.dtype(bool))


def floats(xp: ModuleType, *arrays: Any) -> Sequence[Any]:
    """As `common`, and integers become the default float."""
    alike = common(xp, *arrays)
    return alike if is_float(dtype_of(alike[0])) else [to_dtype(xp, a, DEFAULT_FLOAT) for a in alike]


def wide(xp: ModuleType, dtype: Any) -> Any:
    """The float in which squares and sums of floats of this dtype are computed, which would overflow 16 bits."""
    return xp.float64 if dtype == xp.float64 else xp.float32


def widened(xp: ModuleType, x: Any, *others: Any) -> Any:
    """An array in the dtype in which it is computed beside `others`."""
    return xp.astype(x, wide(xp, xp.result_type(*(a.dtype for a in (x, *others)))), copy=False)


def in_full(xp: ModuleType, ids: Any) -> Any:
    """Ids in 64 bits: those of fewer may number less than there is, and what is counted beside them would wrap."""
    return xp.astype(ids, xp.int64, copy=False)


def wide_type(*dtypes: np.dtype) -> np.dtype:
    """That of floats together, as `wide` says."""
    together: np.dtype = np.dtype(wide(np, promote(*dtypes)))
    return together


def rounded(xp: ModuleType, y: Any, x: Any) -> Any:
    """The array `y` in the dtype of `x`."""
    return xp.astype(y, x.dtype, copy=False)


def comparable(xp: ModuleType, a: Any, b: Any) -> Sequence[Any]:
    """As `common`, but integers of two dtypes as they are, as no float may hold both."""
    return (a, b) if {dtype_of(a).kind, dtype_of(b).kind} <= {"i", "u"} else common(xp, a, b)


def truth_values(*types: TensorType, **_: Any) -> TensorType:
    """Type rule of logic: only booleans are true or false."""
    for type_ in types:
        if type_.dtype.kind != "b":
            raise DTypeError(f"got {type_}, wanted booleans", fix="compare first, for example ht.not_equal(x, 0)")
    return predicate(*types)


def float_function(**rules: Any) -> Decorator[Node]:
    """An operator of one float input that may be overwritten. `y` and `x` are the variables of `code`."""
    return op(infer=float_elementwise, dims="...->...", inplace={0: (0,)}, **rules)


# -- rows ------------------------------------------------------------------------------------------------------
# The name in the array module, the meaning, "arguments -> result" of a call, the C expression or "", and the gradient.

Rule = Callable[..., Any]
TypeRule = Callable[..., TensorType]


def unary(
    name: str, meaning: str, example: str, code: str, grad: Rule | None = None, infer: TypeRule = numbers, **rules: Any
) -> Op[[Any], Node]:
    """The operator of a function of one array `x`."""
    convert = floats if infer is float_elementwise else common

    def forward(xp: ModuleType, x: Any) -> Any:
        return getattr(xp, name)(*convert(xp, x))

    def convert_first(xp: ModuleType, out: Any, x: Any) -> Call | None:
        """Ufuncs would compute small integers in half precision."""
        return None if x.dtype == out.dtype else lambda: xp.copyto(out, forward(xp, x))

    made = _row(forward, name, meaning, example, code, grad, infer, **rules)
    if infer is float_elementwise:
        made.bind(convert_first)
    return made


def binary(
    name: str, meaning: str, example: str, code: str, grad: Rule | None = None, infer: TypeRule = numbers, **rules: Any
) -> Op[[Any, Any], Node]:
    """The operator of a function of two arrays `a` and `b`."""
    convert = floats if infer is float_elementwise else comparable if infer is predicate else common

    def forward(xp: ModuleType, a: Any, b: Any) -> Any:
        return getattr(xp, name)(*convert(xp, a, b))

    return _row(forward, name, meaning, example, code, grad, infer, **rules)


def _row(
    forward: Rule, name: str, meaning: str, example: str, code: str, grad: Rule | None, infer: TypeRule, **rules: Any
) -> Op[..., Node]:
    """The result may be written over an operand; the truth value of a comparison does not fit there."""
    given, _, result = example.partition(" -> ")
    forward.__doc__ = f"{meaning}\n\n>>> import hetu as ht\n>>> ht.evaluate({name}({given})).tolist()\n{result}\n"
    operands = range(forward.__code__.co_argcount - 1)
    rules |= {"dims": f"{','.join('...' for _ in operands)}->...", "code": code or None}
    rules["inplace"] = {} if infer is predicate else {0: tuple(operands)}
    made: Op[..., Node] = op(name=name, ufunc=name, infer=infer, differentiable=grad is not None, **rules)(forward)
    if grad is not None:
        made.grad(grad)
    return made


real = partial(unary, infer=float_elementwise)
compare = partial(binary, infer=predicate)

# fmt: off
subtract = binary("subtract", "a - b.", "[1.0, 2.0], 1 -> [0.0, 1.0]", "y = a - b",
                  lambda g, y, a, b: (g, -g), linear="joint")
multiply = binary("multiply", "a * b.", "[1.0, 2.0], 3 -> [3.0, 6.0]", "y = a * b",
                  lambda g, y, a, b: (g * b, g * a), linear=(0, 1))
divide = binary("divide", "a / b, a true division: integers give float32.", "[1, 2], 4 -> [0.25, 0.5]",
                "y = (T)a / (T)b", lambda g, y, a, b: (g / b, -(g * y / b)),
                infer=float_elementwise, linear=(0,), precision="wide")
floor_divide = binary("floor_divide", "The integer below a / b, as Python's `//`; integers stay integers. No gradient "
                      "passes.", "[7, -7], 2 -> [3, -4]", "")
remainder = binary("remainder", "a - b * (a // b), as Python's `%`: it has the sign of b. Integers stay integers.",
                   "[7.5, -7.5], 2 -> [1.5, 0.5]", "", lambda g, y, a, b: (g, -(g * floor_divide(a, b))))
maximum = binary("maximum", "The larger one; NaN wins. At a tie the gradient goes to `a`.",
                 "[1.0, 5.0], 3 -> [3.0, 5.0]", "y = b != b ? b : a < b ? b : a",
                 lambda g, y, a, b: (g * (a >= b), g * (a < b)), reduce="max")
minimum = binary("minimum", "The smaller one; NaN wins. At a tie the gradient goes to `a`.",
                 "[1.0, 5.0], 3 -> [1.0, 3.0]", "y = b != b ? b : a > b ? b : a",
                 lambda g, y, a, b: (g * (a <= b), g * (a > b)), reduce="min")

negative = unary("negative", "-x.", "[1.0, -2.0] -> [-1.0, 2.0]", "y = -x", lambda g, y, x: -g, linear=(0,))
sign = unary("sign", "-1, 0 or 1. A step function, so no gradient passes.", "[3.0, 0.0, -2.0] -> [1.0, 0.0, -1.0]",
             "y = x != x ? x : (T)((x > 0) - (x < 0))")
abs = unary("abs", "The absolute value; its slope at 0 is 0.", "[1.0, -2.0] -> [1.0, 2.0]",
            "y = x > (T)0 ? x : (T)0 - x", lambda g, y, x: g * sign(x))
square = unary("square", "x * x.", "[1.0, -2.0] -> [1.0, 4.0]", "y = x * x", lambda g, y, x: g * (x * 2),
               precision="wide")
floor = unary("floor", "The next integer below; no gradient passes.", "[1.5, -1.5] -> [1.0, -2.0]", "y = floor(x)")
ceil = unary("ceil", "The next integer above; no gradient passes.", "[1.5, -1.5] -> [2.0, -1.0]", "y = ceil(x)")
reciprocal = real("reciprocal", "1 / x.", "[4, 2] -> [0.25, 0.5]", "y = (T)1 / x",
                  lambda g, y, x: -(g * square(y)), precision="wide")

# -- functions of one real number

exp = real("exp", "e to the power of x.", "0.0 -> 1.0", "y = exp(x)", lambda g, y, x: g * y, precision="wide")
expm1 = real("expm1", "exp(x) - 1, accurate near 0.", "0.0 -> 0.0", "y = expm1(x)", lambda g, y, x: g * (y + 1),
             precision="wide")
log = real("log", "The natural logarithm.", "1.0 -> 0.0", "y = log(x)", lambda g, y, x: g / x, precision="wide")
log1p = real("log1p", "log(1 + x), accurate near 0.", "0.0 -> 0.0", "y = log1p(x)", lambda g, y, x: g / (x + 1),
             precision="wide")
sqrt = real("sqrt", "The square root. Its slope at 0 is infinite.", "9.0 -> 3.0", "y = sqrt(x)",
            lambda g, y, x: g * 0.5 / y, precision="wide")
cos = real("cos", "The cosine; x in radians.", "0.0 -> 1.0", "y = cos(x)", lambda g, y, x: -(g * sin(x)))
sin: Op[[Any], Node] = real("sin", "The sine; x in radians.", "0.0 -> 0.0", "y = sin(x)", lambda g, y, x: g * cos(x))
atan = real("atan", "The angle whose tangent x is, from -pi / 2 to pi / 2.", "0.0 -> 0.0", "",
            lambda g, y, x: g / (1 + square(x)))
tanh = real("tanh", "The hyperbolic tangent.", "0.0 -> 0.0", "y = tanh(x)", lambda g, y, x: g * (1 - square(y)))

# -- comparisons and logic

equal = compare("equal", "Where a and b are equal. `==` on nodes asks something else: whether they are the same node.",
                "[1, 2, 3], 2 -> [False, True, False]", "y = a == b")
not_equal = compare("not_equal", "a != b.", "[1, 2, 3], 2 -> [True, False, True]", "y = a != b")
less = compare("less", "a < b.", "[1, 2, 3], 2 -> [True, False, False]", "y = a < b")
less_equal = compare("less_equal", "a <= b.", "[1, 2, 3], 2 -> [True, True, False]", "y = a <= b")
greater = compare("greater", "a > b.", "[1, 2, 3], 2 -> [False, False, True]", "y = a > b")
greater_equal = compare("greater_equal", "a >= b.", "[1, 2, 3], 2 -> [False, True, True]", "y = a >= b")
isnan = unary("isnan", "Whether x is not a number.", '[1.0, float("nan"), float("inf")] -> [False, True, False]',
              "y = x != x", infer=predicate, precision="wide")
isfinite = unary("isfinite", "Whether x is neither infinite nor NaN.",
                 '[1.0, float("nan"), float("inf")] -> [True, False, False]',
                 "y = x - x == 0", infer=predicate, precision="wide")
logical_and = binary("logical_and", "Whether both hold; `a & b` on nodes.",
                     "[True, True, False], [True, False, False] -> [True, False, False]", "y = a && b",
                     infer=truth_values, reduce="min")
logical_or = binary("logical_or", "Whether at least one holds; `a | b` on nodes.",
                    "[True, True, False], [True, False, False] -> [True, True, False]", "y = a || b",
                    infer=truth_values, reduce="max")
logical_xor = binary("logical_xor", "Whether exactly one holds.",
                     "[True, True, False], [True, False, False] -> [False, True, False]", "y = a != b",
                     infer=truth_values)
logical_not = unary("logical_not", "Whether it does not hold; `~x` on nodes.", "[True, False] -> [False, True]",
                    "y = !x", infer=truth_values)
# fmt: on


def _check_divisor(xp: ModuleType, a: Any, b: Any) -> None:
    """Integers have no infinity and no NaN to answer with."""
    if not is_float(dtype_of(a)) and not is_float(dtype_of(b)) and bool(xp.any(b == 0)):
        raise ValueRangeError("an integer was divided by 0", fix='convert the operands with ht.astype(x, "float32")')


def _nothing_to_check(a: Any, b: Any) -> list[Any] | None:
    """No id lies in a range; floats need no check."""
    return [] if is_float(a.dtype) or is_float(b.dtype) else None


for _division in (floor_divide, remainder):
    _division.check(_check_divisor)
    _division.ranges(_nothing_to_check)


@op(precision="wide", infer=numbers, dims="...,...->...", inplace={0: (0, 1)}, code="y = pow((T)a, (T)b)")
def power(xp: ModuleType, a: Any, b: Any) -> Any:
    """a to the power of b. Integers stay integers; for them a negative exponent is a ValueRangeError at run time.

    >>> import hetu as ht
    >>> ht.evaluate(power([1.0, 2.0, 3.0], 2)).tolist()
    [1.0, 4.0, 9.0]
    """
    a, b = common(xp, a, b)
    shape = broadcast_shapes(a.shape, b.shape)
    exponents = xp.zeros(shape or (1,), dtype=b.dtype) + b  # for a single 0.5 NumPy would take roots, of -infinity too
    return xp.reshape(xp.pow(a, exponents), shape)


@power.check
def power_check(xp: ModuleType, a: Any, b: Any) -> None:
    """Integer powers stay integers, which a negative exponent cannot give."""
    if not is_float(dtype_of(a)) and dtype_of(b).kind == "i" and bool(xp.any(b < 0)):
        raise ValueRangeError(
            "power: an integer got a negative exponent", fix='convert the base with ht.astype(x, "float32")'
        )


power.ranges(_nothing_to_check)


@power.grad
def power_grad(g: Node, y: Node, a: Node, b: Node) -> tuple[Node | None, Node | None]:
    if b.role is Role.CONSTANT and b.ndim == 0:
        return _fixed_power_grad(g, a, b.attrs["value"].item()), None
    slope = where(equal(b, 0), 0, b * power(a, b - 1))  # a ** 0 is flat, even where 0 ** -1 is infinite
    grows = greater(a, 0)  # below 0 a power exists for single exponents only, so it has no slope in b
    return g * slope, g * y * where(grows, log(where(grows, a, 1)), 0)


def _fixed_power_grad(g: Node, a: Node, exponent: float) -> Node | None:
    if exponent == 0:
        return None
    return g * (a * 2 if exponent == 2 else power(a, exponent - 1) * exponent)


@float_function(code="y = rsqrt(x)", precision="wide")
def rsqrt(xp: ModuleType, x: Any) -> Any:
    """1 / sqrt(x).

    >>> import hetu as ht
    >>> float(ht.evaluate(rsqrt(4.0)))
    0.5
    """
    return xp.reciprocal(xp.sqrt(*floats(xp, x)))


rsqrt.grad(lambda g, y, x: g * (y * square(y)) * -0.5)


# -- choice ------------------------------------------------------------------------------------------------------


def _where_type(condition: TensorType, a: TensorType, b: TensorType) -> TensorType:
    truth_values(condition)
    return TensorType(broadcast_shapes(condition.shape, a.shape, b.shape), promote(a.dtype, b.dtype))


@op(infer=_where_type, dims="...,...,...->...", inplace={0: (2,)}, code="y = condition ? a : b")
def where(xp: ModuleType, condition: Any, a: Any, b: Any) -> Any:
    """`a` where `condition` holds, else `b`; all three broadcast. `condition` is boolean.

    >>> import hetu as ht
    >>> ht.evaluate(where([True, False], [1.0, 2.0], 0)).tolist()
    [1.0, 0.0]
    """
    return xp.where(condition, *common(xp, a, b))


where.grad(lambda g, y, condition, a, b: (None, where(condition, g, 0), where(condition, 0, g)))


# -- simpler forms -----------------------------------------------------------------------------------------------
# A constant 0 times anything is 0, of infinity and NaN too, and 0 divided by what is not known: gradients have many.


@subtract.simplify
def subtract_simplify(node: Node, a: Node, b: Node) -> Node | None:
    if filling(b) == 0:
        return a
    return negative(b) if filling(a) == 0 else None


@multiply.simplify
def multiply_simplify(node: Node, a: Node, b: Node) -> Node | None:
    for x, factor in ((a, filling(b)), (b, filling(a))):
        if factor in (0, 1):
            return x if factor else filled(node, 0)
    return None


@divide.simplify
def divide_simplify(node: Node, a: Node, b: Node) -> Node | None:
    if filling(b) == 1:
        return a
    return filled(node, 0) if filling(a) == 0 and filling(b) != 0 else None


@power.simplify
def power_simplify(node: Node, a: Node, b: Node) -> Node | None:
    exponent = filling(b) if is_float(a.dtype) else None
    if exponent in (2, 4):
        return square(a) if exponent == 2 else square(square(a))
    return square(a) * a if exponent == 3 else None


@negative.simplify
def negative_simplify(node: Node, x: Node) -> Node | None:
    if x.op is negative:
        return x.inputs[0]
    value = filling(x)
    return filled(node, -value) if value == 0 else None


@where.simplify
def where_simplify(node: Node, condition: Node, a: Node, b: Node) -> Node | None:
    chosen = filling(condition)
    return None if chosen is None else a if chosen else b
