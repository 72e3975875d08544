"""Operators of ONNX that compute with numbers: element by element, over axes or along one, and in steps of integers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np

from .. import ops
from ..core.graph import OPS, Node
from ..core.op import as_node
from ..core.operators import cast_to
from ..core.types import is_float, normalize_axis
from ..ops.batch_norm import lift
from ..ops.reduction import as_floats
from ..ops.slicing import cut_along
from .indexing import end, places, whole
from .meaning import Exact, KnownArray, meaning, meanings
from .standard import broken, dtype_of

FLOAT = np.dtype("float32")


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
meanings(**{name: OPS[own] for name, own in SAME.items()})
meanings(**{name: OPS[name.lower()] for name in ("Ceil", "Elu", "Floor", "MatMul", "Round", "Softmax", "Where")})
meanings(
    Identity=lambda x: x,
    LogSoftmax=ops.log_softmax,
    Max=lambda *data: reduce(ops.maximum, data),
    Min=lambda *data: reduce(ops.minimum, data),
    Sum=lambda *data: reduce(OPS["add"], data),
    Mean=lambda *data: reduce(OPS["add"], data) / len(data),
    BitShift=lambda x, y, *, direction: OPS[f"bitwise_{direction.lower()}_shift"](x, y),
    Celu=lambda x, *, alpha=1.0: ops.elu(x / alpha) * alpha,
    Gelu=lambda x, *, approximate="none": ops.gelu(x, approximate),
    LeakyRelu=lambda x, *, alpha=0.01: (
        ops.leaky_relu(x, slope=alpha) if 0 <= alpha <= 1 else ops.where(x < 0, x * alpha, x)
    ),
    IsInf=lambda x, *, detect_negative=1, detect_positive=1: ops.logical_or(
        ops.logical_and(ops.equal(x, -math.inf), bool(detect_negative)),
        ops.logical_and(ops.equal(x, math.inf), bool(detect_positive)),
    ),
    Cast=lambda x, *, to: converted(x, dtype_of(to)),
    BitCast=lambda x, *, to: OPS["bitcast"](x, dtype=dtype_of(to)),
    # functions of angles, by those that there are
    Tan=lambda x: ops.sin(x) / ops.cos(x),
    Asin=lambda x: OPS["atan"](x * ops.rsqrt((1 - x) * (1 + x))),
    Acos=lambda x: 2 * OPS["atan"](ops.sqrt((1 - x) / (1 + x))),
    Sinh=wide(lambda x: (ops.exp(x) - ops.exp(-x)) / 2),
    Cosh=wide(lambda x: (ops.exp(x) + ops.exp(-x)) / 2),
    Asinh=wide(inverse_sinh),
    Acosh=wide(lambda x: ops.log(x + ops.sqrt((x - 1) * (x + 1)))),
    Atanh=lambda x: ops.log1p(2 * x / (1 - x)) / 2,
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


@meaning("Clip")
def clip(x: Node, min: Node | None = None, max: Node | None = None) -> Node:
    x = x if min is None else ops.maximum(x, min)
    return x if max is None else ops.minimum(x, max)


def converted(x: Node, dtype: np.dtype) -> Node:
    """Numbers are true unless 0."""
    return ops.not_equal(x, 0) if dtype.kind == "b" and x.dtype.kind != "b" else cast_to(x, dtype)


@meaning("CastLike")
def cast_like(x: Node, like: Exact) -> Node:
    return converted(x, like.dtype)


@meaning("Dropout")
def dropout(x: Node, ratio: KnownArray = None, training: KnownArray = None) -> tuple[Node, Node]:
    """What hetu's own does: nothing, except where a graph trains."""
    rate = 0.5 if ratio is None else float(ratio)
    return ops.dropout(x, rate) if rate else x, OPS["greater_equal"](ops.zeros_like(x), 0)


# -- over axes, and along one --------------------------------------------------------------------------------------


def reduction(
    function: Callable[..., Node], of_booleans: Callable[..., Node] | None = None, sign: int = 0
) -> Callable[..., Node]:
    """Over all axes where none are given, or over none with `noop_with_empty_axes`; of no numbers the `end` of sign."""

    def reduced(x: Node, axes: KnownArray = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Node:
        what = of_booleans if of_booleans and x.dtype.kind == "b" else function
        given = tuple(whole(axes))
        among: dict[str, Any] = dict(axis=given if given or noop_with_empty_axes else None, keepdims=bool(keepdims))
        if sign and what is function and 0 in x.shape:
            return ops.full_like(cast_to(ops.sum(x, **among), x.dtype), end(x.dtype, sign))
        return what(x, **among)

    return reduced


meanings(
    ReduceSum=reduction(ops.sum),
    ReduceMean=reduction(ops.mean),
    ReduceProd=reduction(ops.prod),
    ReduceMax=reduction(ops.max, ops.any, -1),
    ReduceMin=reduction(ops.min, ops.all, 1),
    ReduceL1=reduction(partial(ops.norm, ord=1)),
    ReduceL2=reduction(ops.norm),
    ReduceLogSumExp=reduction(ops.logsumexp, None, -1),
    GlobalAveragePool=lambda x: ops.mean(x, axis=tuple(range(2, x.ndim)), keepdims=True),
    GlobalMaxPool=lambda x: ops.max(x, axis=tuple(range(2, x.ndim)), keepdims=True),
    GlobalLpPool=lambda x, *, p=2: ops.norm(x, tuple(range(2, x.ndim)), p, keepdims=True),
    LpNormalization=lambda x, *, axis=-1, p=2: x / not_0(ops.norm(x, axis, p, keepdims=True)),
    Hardmax=lambda x, *, axis=-1: cast_to(
        ops.equal(places(x.shape[axis], x.ndim, axis % x.ndim), ops.argmax(x, axis=axis, keepdims=True)), x.dtype
    ),
)


def not_0(x: Node) -> Node:
    return ops.where(ops.equal(x, 0), 1, x)


def place(
    extremum: Callable[..., Node], x: Node, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0
) -> Node:
    """The first place of an extremum, or the last."""
    found = partial(extremum, axis=axis, keepdims=bool(keepdims))
    return as_node(x.shape[axis] - 1) - found(ops.flip(x, axis)) if select_last_index else found(x)


meanings(ArgMax=partial(place, ops.argmax), ArgMin=partial(place, ops.argmin))


@meaning("TopK")
def topk(x: Node, k: KnownArray, *, axis: int = -1, largest: int = 1) -> tuple[Node, Node]:
    count, size = whole(k)[0], x.shape[axis]
    if isinstance(size, int) and not 0 <= count <= size:
        raise broken(f"takes {count} of {size}")
    order = ops.argsort(x, axis=axis, descending=bool(largest))
    first = cut_along(order, axis % x.ndim, slice(0, count))
    return ops.take_along_axis(x, first, axis=axis), first


def moved(x: Node, axis: int, steps: int, reverse: int, value: float) -> Node:
    """Numbers as many steps further along an axis, where `value` comes in their places."""
    axis, width = normalize_axis(axis, x.ndim), [(0, 0)] * x.ndim
    width[axis] = (0, steps) if reverse else (steps, 0)
    cut = slice(steps, None) if reverse else slice(0, -steps)
    return cut_along(ops.pad(x, pad_width=tuple(width), value=value), axis, cut)


meanings(
    known=1,
    CumSum=lambda x, axis, *, exclusive=0, reverse=0: ops.cumsum(
        moved(x, whole(axis)[0], 1, reverse, 0) if exclusive else x, axis=whole(axis)[0], reverse=bool(reverse)
    ),
)


@meaning("CumProd")
def running_product(x: Node, axis: KnownArray, *, exclusive: int = 0, reverse: int = 0) -> Node:
    """By doubling: after each step a place holds the product of twice as many before it."""
    axis, steps = whole(axis)[0], 1
    y = moved(x, axis, 1, reverse, 1) if exclusive else x
    while steps < int(x.shape[axis]):
        y, steps = y * moved(y, axis, steps, reverse, 1), 2 * steps
    return y


# -- in steps of integers ------------------------------------------------------------------------------------------


def on_axis(vector: Node, x: Node, axis: int, block: int = 0) -> Node:
    """A scale or zero for each place of an axis, for each block of places, or for all, so that it fits `x`."""
    if block:
        return ops.repeat(vector, block, axis=axis)[tuple(slice(0, size) for size in x.shape)]
    if vector.ndim == 1 and vector.shape != (1,):
        return lift(vector, x, axis % x.ndim)
    return vector[0] if vector.ndim == 1 else vector


def shifted(x: Node, zero: Node | None, axis: int, block: int = 0) -> Node:
    """x - zero in 32 bits."""
    wide = cast_to(x, np.dtype("float32" if is_float(x.dtype) else "int32"))
    return wide if zero is None else wide - cast_to(on_axis(zero, x, axis, block), wide.dtype)


@meaning("QuantizeLinear")
def quantize(
    x: Node, scale: Node, zero: Exact = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Node:
    """round(x / scale) + zero within the numbers that its dtype holds. No gradient passes."""
    dtype = zero.dtype if zero is not None else dtype_of(output_dtype) if output_dtype else np.dtype("uint8")
    steps = ops.round(cast_to(x, FLOAT) / cast_to(on_axis(scale, x, axis, block_size), FLOAT))
    if zero is not None:
        steps = steps + cast_to(on_axis(zero, x, axis, block_size), FLOAT)
    return cast_to(ops.clip(steps, float(end(dtype, -1)), float(end(dtype, 1))), dtype)


@meaning("DequantizeLinear")
def dequantize(
    x: Node, scale: Node, zero: Node | None = None, *, axis: int = 1, block_size: int = 0, output_dtype: int = 0
) -> Node:
    """(x - zero) scale."""
    made = as_floats(shifted(x, zero, axis, block_size)) * on_axis(scale, x, axis, block_size)
    return cast_to(made, dtype_of(output_dtype) if output_dtype else scale.dtype)


def quantized(product: Callable[..., Node], axis: int) -> Callable[..., Node]:
    """A product of steps as one of numbers, given and made in steps; rows, and places of `axis`, may have scales."""

    def made(
        a: Node, a_scale: Node, a_zero: Node, b: Node, b_scale: Node, b_zero: Node, *out: Node, **how: Any
    ) -> Node:
        y_scale, y_zero, *bias = out
        y = cast_to(product(a, b, a_zero, b_zero, **how), np.dtype("int32"))
        y = y + lift(bias[0], y, 1) if bias else y
        scales = on_axis(cast_to(a_scale, FLOAT), y, -2) * on_axis(cast_to(b_scale, FLOAT), y, axis)
        return quantize(cast_to(y, FLOAT) * scales, y_scale, y_zero)

    return made
