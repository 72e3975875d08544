"""Operators of ONNX that work element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.operators import cast_to
from ..core.types import is_float
from ..ops.batch_norm import lift
from ..ops.reduction import as_floats
from .meaning import DType, Exact, KnownArray, meaning, meanings


def wide(function: Callable[[Node], Node]) -> Callable[[Node], Node]:
    """The operator in float64, in which sums neither cancel nor overflow where those of fewer bits do."""
    return lambda x: function(cast_to(x, np.dtype("float64")))


def inverse_sinh(x: Node) -> Node:
    sign = ops.where(x < 0, -1.0, 1.0)
    return sign * ops.log(sign * x + ops.sqrt(x * x + 1))


# What ONNX has as we do, be it in a file that is read or in one that is written.
NAMES = """Abs Add Cos Equal Erf Exp Greater IsNaN Less Log Reciprocal Relu Sigmoid Sign Sin Softplus Sqrt Tanh
    And=logical_and Atan=atan BitwiseAnd=bitwise_and BitwiseNot=bitwise_invert BitwiseOr=bitwise_or
    BitwiseXor=bitwise_xor GreaterOrEqual=greater_equal LessOrEqual=less_equal Mul=multiply Neg=negative Not=logical_not
    Or=logical_or Pow=power Sub=subtract Xor=logical_xor"""
PAIRS = (entry.partition("=") for entry in NAMES.split())
SAME = {name: own or name.lower() for name, _, own in PAIRS}
meanings({name: OPS[own] for name, own in SAME.items()})
meanings({name: OPS[name.lower()] for name in ("Ceil", "Elu", "Floor", "Round", "Softmax", "Where")})
meanings(
    {
        "Identity": lambda x: x,
        "LogSoftmax": ops.log_softmax,
        "Max": lambda *data: reduce(ops.maximum, data),
        "Min": lambda *data: reduce(ops.minimum, data),
        "Sum": lambda *data: reduce(OPS["add"], data),
        "Mean": lambda *data: reduce(OPS["add"], data) / len(data),
        "BitShift": lambda x, y, *, direction: OPS[f"bitwise_{direction.lower()}_shift"](x, y),
        "Celu": lambda x, *, alpha=1.0: ops.elu(x / alpha) * alpha,
        "Gelu": lambda x, *, approximate="none": ops.gelu(x, approximate),
        "LeakyRelu": lambda x, *, alpha=0.01: (
            ops.leaky_relu(x, slope=alpha) if 0 <= alpha <= 1 else ops.where(x < 0, x * alpha, x)
        ),
        # functions of angles, by those that there are
        "Tan": lambda x: ops.sin(x) / ops.cos(x),
        "Asin": lambda x: OPS["atan"](x * ops.rsqrt((1 - x) * (1 + x))),
        "Acos": lambda x: 2 * OPS["atan"](ops.sqrt((1 - x) / (1 + x))),
        "Sinh": wide(lambda x: (ops.exp(x) - ops.exp(-x)) / 2),
        "Cosh": wide(lambda x: (ops.exp(x) + ops.exp(-x)) / 2),
        "Asinh": wide(inverse_sinh),
        "Acosh": wide(lambda x: ops.log(x + ops.sqrt((x - 1) * (x + 1)))),
        "Atanh": lambda x: ops.log1p(2 * x / (1 - x)) / 2,
    }
)


def upwards(a: Node, b: Node) -> Node:
    """What makes of a quotient that is rounded down one that is rounded up, added to `a` of the other sign than `b`."""
    return (b - ops.sign(b)) * OPS["floor_divide"](1 - ops.sign(a) * ops.sign(b), 2)


@meaning("Div")
def divide(a: Node, b: Node) -> Node:
    """Integers are cut off toward 0, as in C."""
    if is_float(a.dtype):
        return OPS["divide"](a, b)
    return OPS["floor_divide"](a if a.dtype.kind == "u" else a + upwards(a, b), b)


@meaning("Mod")
def modulo(a: Node, b: Node, *, fmod: int = 0) -> Node:
    """With the sign of `b`, or, as in C, that of `a`."""
    if not fmod or a.dtype.kind == "u":
        return OPS["remainder"](a, b)
    if is_float(a.dtype):
        return OPS["remainder"](ops.abs(a), ops.abs(b)) * ops.sign(a)
    return OPS["remainder"](a + (more := upwards(a, b)), b) - more


@meaning("IsInf")
def is_infinite(x: Node, *, detect_negative: int = 1, detect_positive: int = 1) -> Node:
    signs = [sign for sign, asked in ((-1, detect_negative), (1, detect_positive)) if asked]
    return reduce(ops.logical_or, (ops.equal(x, sign * math.inf) for sign in signs), OPS["less"](x, x))


@meaning("Clip")
def clip(x: Node, min: Node | None = None, max: Node | None = None) -> Node:
    x = x if min is None else ops.maximum(x, min)
    return x if max is None else ops.minimum(x, max)


@meaning("Cast")
def cast(x: Node, *, to: DType, saturate: int = 1, round_mode: str = "up") -> Node:
    """Numbers are true unless 0. `saturate` and `round_mode` are about floats of 8 bits, which are not read."""
    return ops.not_equal(x, 0) if to.kind == "b" and x.dtype.kind != "b" else cast_to(x, to)


@meaning("BitCast")
def bitcast(x: Node, *, to: DType) -> Node:
    return OPS["bitcast"](x, dtype=to)


@meaning("CastLike")
def cast_like(x: Node, like: Exact, *, saturate: int = 1, round_mode: str = "up") -> Node:
    return cast(x, to=like.dtype)


# -- rounding to integers and back ---------------------------------------------------------------------------------


def on_axis(vector: Node, x: Node, axis: int, block: int = 0) -> Node:
    """A scale or zero for each place of an axis, for each block of places, or for all, so that it fits `x`."""
    if block:
        return ops.repeat(vector, block, axis=axis)[tuple(slice(0, size) for size in x.shape)]
    if vector.ndim != 1 or vector.shape == (1,):
        return vector if vector.ndim != 1 else vector[0]
    return lift(vector, x, axis % x.ndim)


def shifted(x: Node, zero: Node | None, axis: int, block: int = 0) -> Node:
    """x - zero in 32 bits."""
    wide = cast_to(x, np.dtype("float32" if is_float(x.dtype) else "int32"))
    return wide if zero is None else wide - cast_to(on_axis(zero, x, axis, block), wide.dtype)


@meaning("QuantizeLinear")
def quantize(
    x: Node,
    scale: Node,
    zero: Exact = None,
    *,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: DType = None,
    saturate: int = 1,
    precision: int = 0,
) -> Node:
    """round(x / scale) + zero within the numbers that its dtype holds. No gradient passes."""
    dtype = zero.dtype if zero is not None else output_dtype or np.dtype("uint8")
    limits, wide = np.iinfo(dtype), np.dtype("float32")
    steps = ops.round(cast_to(x, wide) / cast_to(on_axis(scale, x, axis, block_size), wide))
    if zero is not None:
        steps = steps + cast_to(on_axis(zero, x, axis, block_size), wide)
    return cast_to(ops.clip(steps, float(limits.min), float(limits.max)), dtype)


@meaning("DequantizeLinear")
def dequantize(
    x: Node, scale: Node, zero: Node | None = None, *, axis: int = 1, block_size: int = 0, output_dtype: DType = None
) -> Node:
    """(x - zero) scale."""
    made = as_floats(shifted(x, zero, axis, block_size)) * on_axis(scale, x, axis, block_size)
    return cast_to(made, output_dtype or scale.dtype)


@meaning("Dropout")
def dropout(x: Node, ratio: KnownArray = None, training: KnownArray = None, *, seed: int = 0) -> tuple[Node, Node]:
    """What hetu's own does: nothing, except where a graph trains."""
    rate = 0.5 if ratio is None else float(ratio)
    return ops.dropout(x, rate) if rate else x, OPS["greater_equal"](ops.zeros_like(x), 0)
