"""Activations: functions between the layers of a network, and the softmax over an axis.

None branches on single elements, which is slow. `silu` and `mish` are compositions. Left out: hard variants.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import dtype_of, to_dtype
from ..core.errors import ArgumentError, public
from ..core.graph import OPS, Node
from ..core.op import as_node, op
from ..core.types import DEFAULT_FLOAT, numbers
from ..doubts import makes_shares
from .elementwise import (
    exp,
    float_elementwise,
    float_function,
    floats,
    greater,
    less_equal,
    log,
    minimum,
    reciprocal,
    rounded,
    square,
    tanh,
    widened,
)
from .error_function import normal_distribution
from .reduction import along_axis_dims, as_floats, one_axis
from .reduction import max as maximum_along
from .reduction import sum as sum_along

__all__ = ["elu", "gelu", "leaky_relu", "log_softmax", "mish", "relu", "sigmoid", "silu", "softmax", "softplus"]


# -- pieces of lines -------------------------------------------------------------------------------------------


@op(infer=numbers, dims="...->...", inplace={0: (0,)}, code="y = x > 0 || x != x ? x : (T)0")
def relu(xp: ModuleType, x: Any) -> Any:
    """max(x, 0); its slope at 0 is 0.

    >>> import hetu as ht
    >>> ht.evaluate(relu([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    return xp.maximum(x, 0)


relu.grad(lambda g, y, x: g * greater(y, 0))


def is_relu_mask(node: Node) -> bool:
    """Whether it tells where a relu lets through: x > 0."""
    zero = node.inputs[1] if node.op is OPS["greater"] else None
    return zero is not None and zero.op is OPS["constant"] and not zero.attrs["value"].any()


@float_function(code="y = x > 0 ? x : slope * x")
def leaky_relu(xp: ModuleType, x: Any, *, slope: float = 0.01) -> Any:
    """x where positive, else slope * x; 0 <= slope <= 1.

    >>> import hetu as ht
    >>> ht.evaluate(leaky_relu([-2.0, 2.0], slope=0.5)).tolist()
    [-1.0, 2.0]
    """
    (x,) = floats(xp, x)
    return xp.maximum(x, x * slope)


@leaky_relu.normalize
def leaky_relu_normalize(x: Any, *, slope: float) -> dict[str, Any]:
    if not 0 <= slope <= 1:
        raise ArgumentError(f"slope is {slope}, wanted a number from 0 to 1", fix="the usual slope is 0.01")
    return {"slope": float(slope)}


leaky_relu.grad(lambda g, y, x, *, slope: g * (greater(x, 0) * (1 - slope) + slope))


# -- smooth ----------------------------------------------------------------------------------------------------


@float_function(code="y = x > 0 ? x : alpha * expm1(x)")
def elu(xp: ModuleType, x: Any, *, alpha: float = 1.0) -> Any:
    """x where positive, else alpha * (exp(x) - 1). Clevert et al., 2016.

    >>> import hetu as ht
    >>> ht.evaluate(elu([0.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    (x,) = floats(xp, x)
    y = xp.expm1(xp.minimum(x, 0))
    y *= alpha
    y += xp.maximum(x, 0)
    return y


elu.grad(lambda g, y, x, *, alpha: g * (exp(minimum(x, 0)) * alpha * less_equal(x, 0) + greater(x, 0)))


@float_function(code="y = (T)1 / ((T)1 + exp(-x))")
def sigmoid(xp: ModuleType, x: Any) -> Any:
    """1 / (1 + exp(-x)). Where exp overflows to infinity the result is 0, as it should be.

    >>> import hetu as ht
    >>> ht.evaluate(sigmoid([-1000.0, 0.0, 1000.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    (x,) = floats(xp, x)
    y = xp.exp(-x)
    y += 1
    return 1 / y


sigmoid.grad(lambda g, y, x: g * (y * (1 - y)))


@float_function(code="y = fmax(x, (T)0) + log1p(exp(-fabs(x)))", precision="wide")
def softplus(xp: ModuleType, x: Any) -> Any:
    """log(1 + exp(x)), without overflow; a smooth relu.

    >>> import hetu as ht
    >>> round(float(ht.evaluate(softplus(0.0))), 4)
    0.6931
    """
    (x,) = floats(xp, x)
    y = xp.log1p(xp.exp(-xp.abs(x)))
    y += xp.maximum(x, 0)
    return y


softplus.grad(lambda g, y, x: g * sigmoid(x))


@public
def silu(x: Any) -> Node:
    """x * sigmoid(x), also called swish.

    >>> import hetu as ht
    >>> float(ht.evaluate(silu(0.0)))
    0.0
    """
    node = as_node(x)
    return node * sigmoid(node)


@public
def mish(x: Any) -> Node:
    """x * tanh(softplus(x)). Misra, 2019.

    >>> import hetu as ht
    >>> float(ht.evaluate(mish(0.0)))
    0.0
    """
    node = as_node(x)
    return node * tanh(softplus(node))


# -- gelu ------------------------------------------------------------------------------------------------------

DENSITY = 1 / math.sqrt(2 * math.pi)  # the normal density at 0
RATE, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715  # the tanh form is x sigmoid(RATE (x + CUBIC x^3))


@public
def gelu(x: Any, approximate: str = "none") -> Node:
    """x times the normal distribution function at x. Hendrycks & Gimpel, "Gaussian Error Linear Units", 2016.

    `approximate="none"` is exact (through erf), `"tanh"` the form of GPT-2, which differs by up to 5e-4.

    >>> import hetu as ht
    >>> ht.evaluate(gelu([0.0, 100.0], approximate="tanh")).tolist()
    [0.0, 100.0]
    """
    if approximate not in _FORMS:
        raise ArgumentError(f"gelu: approximate is {approximate!r}", fix='use "none" or "tanh"')
    return _FORMS[approximate](x)


@float_function(code="y = (T)0.5 * x * erfc(x * (T)-0.7071067811865476)")
def gelu_erf(xp: ModuleType, x: Any) -> Any:
    """The exact `gelu`: x (1 + erf(x / sqrt(2))) / 2.

    >>> import hetu as ht
    >>> round(float(ht.evaluate(ht.gelu(1.0))), 4)
    0.8413
    """
    (x,) = floats(xp, x)
    wide = _widened(xp, x)
    y, _ = normal_distribution(xp, wide)
    y *= wide
    return to_dtype(xp, y, dtype_of(x))


def _widened(xp: ModuleType, x: Any) -> Any:
    """Half precision as float32: the coefficients do not fit into it."""
    return to_dtype(xp, x, DEFAULT_FLOAT) if dtype_of(x) == np.float16 else x


@op(
    infer=float_elementwise,
    dims="...,...->...",
    linear=(0,),
    inplace={0: (0, 1)},
    code="y = g * gelu_slope(x)",
)
def gelu_erf_dx(xp: ModuleType, g: Any, x: Any) -> Any:
    """g times the slope of the exact `gelu`: the distribution plus x times the density.

    >>> import hetu as ht
    >>> from hetu.core.graph import OPS
    >>> round(float(ht.evaluate(OPS["gelu_erf_dx"](1.0, 0.0))), 4)
    0.5
    """
    g, x = floats(xp, g, x)
    wide = _widened(xp, x)
    y, density = normal_distribution(xp, wide)
    density *= wide
    density *= DENSITY
    y += density
    y *= _widened(xp, g)
    return to_dtype(xp, y, dtype_of(x))


gelu_erf.grad(lambda g, y, x: gelu_erf_dx(g, x))


@gelu_erf_dx.grad
def gelu_erf_dx_grad(h: Node, y: Node, g: Node, x: Node) -> tuple[Node, Node]:
    xx = square(x)
    return gelu_erf_dx(h, x), h * g * (exp(xx * -0.5) * (2 - xx) * DENSITY)


@float_function(code="y = x / ((T)1 + exp((T)-1.5957691216057308 * (x + (T)0.044715 * x * x * x)))")
def gelu_tanh(xp: ModuleType, x: Any) -> Any:
    """The `gelu` of GPT-2: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, computed with one exp.

    >>> import hetu as ht
    >>> round(float(ht.evaluate(ht.gelu(1.0, "tanh"))), 4)
    0.8412
    """
    (x,) = floats(xp, x)
    return x / _inverse_gate(xp, x, x * x)


def _inverse_gate(xp: ModuleType, x: Any, xx: Any) -> Any:
    u = xx * (-RATE * CUBIC)
    u -= RATE
    u *= x
    u = xp.exp(u)
    u += 1
    return u


@op(
    infer=float_elementwise,
    dims="...,...->...",
    linear=(0,),
    inplace={0: (0, 1)},
    code="y = g / ((T)1 + exp((T)-1.5957691216057308 * (x + (T)0.044715 * x * x * x))) * ((T)1 + "
    "x / ((T)1 + exp((T)1.5957691216057308 * (x + (T)0.044715 * x * x * x))) * (T)1.5957691216057308 * "
    "((T)1 + (T)0.134145 * x * x))",
)
def gelu_tanh_dx(xp: ModuleType, g: Any, x: Any) -> Any:
    """g times the slope of the tanh `gelu`.

    >>> import hetu as ht
    >>> from hetu.core.graph import OPS
    >>> float(ht.evaluate(OPS["gelu_tanh_dx"](1.0, 0.0)))
    0.5
    """
    g, x = floats(xp, g, x)
    xx = x * x
    gate = 1 / _inverse_gate(xp, x, xx)
    xx *= 3 * CUBIC * RATE
    xx += RATE
    xx *= x
    xx *= 1 - gate
    xx += 1
    xx *= gate
    xx *= g
    return xx


gelu_tanh.grad(lambda g, y, x: gelu_tanh_dx(g, x))


@gelu_tanh_dx.grad
def gelu_tanh_dx_grad(h: Node, y: Node, g: Node, x: Node) -> tuple[Node, Node]:
    """With gate s(v(x)): the second slope is 2 s' v' + x (s'' v'^2 + s' v'')."""
    xx = square(x)
    s = sigmoid(x * (xx * (RATE * CUBIC) + RATE))
    slope = s * (1 - s)
    v1, v2 = xx * (3 * RATE * CUBIC) + RATE, x * (6 * RATE * CUBIC)
    second = slope * (v1 * 2 + x * ((1 - s * 2) * square(v1) + v2))
    return gelu_tanh_dx(h, x), h * g * second


_FORMS = {"none": gelu_erf, "tanh": gelu_tanh}


# -- softmax ---------------------------------------------------------------------------------------------------


@op(infer=float_elementwise, dims=along_axis_dims, inplace={0: (0,)})
def softmax(xp: ModuleType, x: Any, *, axis: int = -1) -> Any:
    """exp(x) / sum(exp(x)) along `axis`, without overflow.

    >>> import hetu as ht
    >>> ht.evaluate(softmax([1000.0, 1000.0])).tolist()
    [0.5, 0.5]
    """
    (x,) = floats(xp, x)
    if not x.size:  # nothing has no largest
        return x
    y = xp.exp(widened(xp, x, x) - xp.max(x, axis=axis, keepdims=True))
    y /= xp.sum(y, axis=axis, keepdims=True)
    return rounded(xp, y, x)


softmax.normalize(one_axis)
makes_shares(sigmoid, softmax)


@softmax.grad
def softmax_grad(g: Node, y: Node, x: Node, *, axis: int) -> Node:
    gy = g * y
    return gy - y * sum_along(gy, axis=axis, keepdims=True)


@softmax.decompose
def softmax_parts(x: Node, *, axis: int) -> Node | None:
    if x.shape[axis] == 0:
        return None
    x = as_floats(x)
    e = exp(x - maximum_along(x, axis=axis, keepdims=True))
    return e * reciprocal(sum_along(e, axis=axis, keepdims=True))  # one division a row


@op(infer=float_elementwise, dims=along_axis_dims, inplace={0: (0,)})
def log_softmax(xp: ModuleType, x: Any, *, axis: int = -1) -> Any:
    """The logarithm of `softmax` along `axis`: x - logsumexp(x), without overflow.

    >>> import hetu as ht
    >>> ht.evaluate(log_softmax([0.0, -1000.0])).tolist()
    [0.0, -1000.0]
    """
    (x,) = floats(xp, x)
    if not x.size:
        return x
    y = widened(xp, x, x) - xp.max(x, axis=axis, keepdims=True)
    y -= xp.log(xp.sum(xp.exp(y), axis=axis, keepdims=True))
    return rounded(xp, y, x)


log_softmax.normalize(one_axis)
makes_shares(sigmoid, softmax)
log_softmax.grad(lambda g, y, x, *, axis: g - exp(y) * sum_along(g, axis=axis, keepdims=True))


@log_softmax.decompose
def log_softmax_parts(x: Node, *, axis: int) -> Node | None:
    if x.shape[axis] == 0:
        return None
    x = as_floats(x)
    y = x - maximum_along(x, axis=axis, keepdims=True)
    return y - log(sum_along(exp(y), axis=axis, keepdims=True))
