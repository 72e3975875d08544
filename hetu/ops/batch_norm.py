"""Batch normalization and its gradient.

`batch_norm_train` and `batch_norm_dx` are operators because a few passes over whole channels beat their composition.
Each also has the composition as its `decompose` rule, used where the batch is split. Images in 16 bits are normalized
in float32, as their squares overflow, and so their statistics are float32 at least.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from ..core.errors import ArgumentError, ShapeError, public
from ..core.graph import OPS, Node
from ..core.op import as_node, as_nodes, op
from ..core.operators import cast_to, if_training, with_updates
from ..core.types import TensorType, compatible, is_float, normalize_axis, product, promote, require_float, show_shape
from .elementwise import wide_type, widened
from .reduction import mean

__all__ = ["batch_norm"]


def check_vectors(size: Any, **vectors: TensorType) -> None:
    if size == 0:
        raise ShapeError("nothing is to be normalized: there is no channel or feature", fix="give x one at least")
    for name, vector in vectors.items():
        if vector.ndim != 1 or not compatible(vector.shape[0], size):
            raise ShapeError(
                f"{name} has shape {show_shape(vector.shape)}, wanted ({size},)",
                fix="one number for each channel or feature",
            )


def gradient_type(x: TensorType, vector: TensorType) -> TensorType:
    """The type of the gradient of a vector that is computed beside `x`; autodiff casts it to that of the vector."""
    return TensorType(vector.shape, promote(x.dtype, vector.dtype))


def _others(ndim: int, axis: int) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if i != axis)


def _along(ndim: int, axis: int) -> tuple[int, ...]:
    """The shape in which a vector broadcasts along `axis`."""
    return tuple(-1 if i == axis else 1 for i in range(ndim))


def lift(vector: Node, x: Node, axis: int) -> Node:
    """The vector with axes of size 1 where it needs them in order to broadcast along `axis` of `x`."""
    return vector if axis == x.ndim - 1 else OPS["expand_dims"](vector, axis=tuple(range(1, x.ndim - axis)))


def _batch_attrs(x: TensorType, *_: TensorType, axis: int, epsilon: float) -> dict[str, Any]:
    return {"axis": normalize_axis(axis, x.ndim), "epsilon": epsilon}


def _batch_type(x: TensorType, scale: TensorType, bias: TensorType, *, axis: int, **_: Any) -> tuple[TensorType, ...]:
    require_float(x, scale, bias)
    check_vectors(x.shape[axis], scale=scale, bias=bias)
    if 0 in x.shape:
        raise ShapeError(f"{x} has no samples, and so no mean and no variance", fix="leave an empty batch out")
    if all(size == 1 for i, size in enumerate(x.shape) if i != axis):
        fix = "train on batches of two rows at least, such as DataLoader makes without its remainder"
        raise ShapeError(f"{x} has one sample, whose variance is 0", fix=fix)
    promote(x.dtype, scale.dtype, bias.dtype)  # which refuses two kinds of 16 bits
    vector = TensorType((x.shape[axis],), wide_type(x.dtype, scale.dtype))
    return x, vector, vector


def _batch_dims(*types: TensorType, axis: int, **_: Any) -> str:
    """Sharding rule: channels may be split, other axes may not."""
    axes = "".join(chr(ord("d") + i) + "!" if i != axis else "c" for i in range(types[0].ndim))
    return f"{','.join('c' if t.ndim == 1 else axes for t in types)}->{axes},c,c"


@op(precision=(0,), dims=_batch_dims, infer=_batch_type)
def batch_norm_train(
    xp: ModuleType, x: Any, scale: Any, bias: Any, *, axis: int = 1, epsilon: float = 1e-5
) -> tuple[Any, Any, Any]:
    """(y, mean, var): `x` normalized by its own mean and variance (over all axes but `axis`), scaled and shifted.

    y = scale (x - mean) / sqrt(var + epsilon) + bias; var divides by the count. See `batch_norm`.

    >>> import hetu as ht
    >>> y, mean, var = batch_norm_train([[1.0], [3.0]], [1.0], [0.0])
    >>> ht.evaluate(mean).tolist(), ht.evaluate(var).tolist()
    ([2.0], [1.0])
    """
    others, shape, wide = _others(x.ndim, axis), _along(x.ndim, axis), widened(xp, x, scale)
    mean = xp.mean(wide, axis=others)
    centered = wide - xp.reshape(mean, shape)
    var = xp.mean(centered * centered, axis=others)
    factor = scale / xp.sqrt(var + epsilon)
    y = centered * xp.reshape(factor, shape) + xp.reshape(bias, shape)
    return xp.astype(y, x.dtype, copy=False), mean, var


batch_norm_train.normalize(_batch_attrs)


@batch_norm_train.decompose
def batch_norm_parts(x: Node, scale: Node, bias: Node, *, axis: int, epsilon: float) -> tuple[Node, Node, Node]:
    others, wide = _others(x.ndim, axis), cast_to(x, wide_type(x.dtype, scale.dtype))
    center = mean(wide, axis=others)
    centered = wide - lift(center, x, axis)
    var = mean(OPS["square"](centered), axis=others)
    y = centered * lift(scale * OPS["rsqrt"](var + epsilon), x, axis) + lift(bias, x, axis)
    return cast_to(y, x.dtype), center, var


@batch_norm_train.grad
def batch_norm_train_grad(
    g: list[Node | None], out: tuple[Node, ...], x: Node, scale: Node, bias: Node, **attrs: Any
) -> Any:
    if g[1] is None and g[2] is None:
        return batch_norm_dx(g[0], x, scale, out[1], out[2], **attrs)
    return NotImplemented


def _batch_dx_type(
    g: TensorType, x: TensorType, scale: TensorType, *kept: TensorType, **_: Any
) -> tuple[TensorType, ...]:
    promote(*(t.dtype for t in (g, x, scale, *kept)))  # which refuses two kinds of 16 bits
    vector = gradient_type(x, scale)
    return x, vector, vector


@op(precision=(0, 1), dims=_batch_dims, infer=_batch_dx_type)
def batch_norm_dx(
    xp: ModuleType, g: Any, x: Any, scale: Any, mean: Any, var: Any, *, axis: int = 1, epsilon: float = 1e-5
) -> tuple[Any, Any, Any]:
    """The gradients of `batch_norm_train` with respect to (x, scale, bias), given that of y, and its mean and var.

    Ioffe and Szegedy 2015, section 3.

    >>> import hetu as ht
    >>> x, scale, bias = (ht.placeholder(n, s) for n, s in (("x", (8, 3)), ("scale", (3,)), ("bias", (3,))))
    >>> ht.gradients(ht.sum(batch_norm_train(x, scale, bias)[0]), [x])[0].type.shape
    (8, 3)
    """
    others, shape, arrays = _others(x.ndim, axis), _along(x.ndim, axis), (g, x, scale, mean, var)
    g, wide, _, mean, var = (widened(xp, a, *arrays) for a in arrays)
    inverse = 1 / xp.sqrt(var + epsilon)
    normal = (wide - xp.reshape(mean, shape)) * xp.reshape(inverse, shape)
    dscale, dbias = xp.sum(g * normal, axis=others), xp.sum(g, axis=others)
    count = max(1, math.prod(x.shape[i] for i in others))  # the mean of nothing is added to nothing
    centered = g - xp.reshape(dbias / count, shape) - normal * xp.reshape(dscale / count, shape)
    dx, vector = centered * xp.reshape(scale * inverse, shape), xp.result_type(x, scale)
    made = (dx, x.dtype), (dscale, vector), (dbias, vector)
    return tuple(xp.astype(a, dtype, copy=False) for a, dtype in made)


batch_norm_dx.normalize(_batch_attrs)


@batch_norm_dx.decompose
def batch_norm_dx_parts(
    g: Node, x: Node, scale: Node, center: Node, var: Node, *, axis: int, epsilon: float
) -> tuple[Node, Node, Node]:
    others, wide = _others(x.ndim, axis), wide_type(*(n.dtype for n in (g, x, scale, center, var)))
    kept, vector = x.dtype, gradient_type(x.tensor, scale.tensor).dtype
    g, x, center, var = (cast_to(n, wide) for n in (g, x, center, var))
    inverse = OPS["rsqrt"](var + epsilon)
    normal = (x - lift(center, x, axis)) * lift(inverse, x, axis)
    dscale, dbias = OPS["sum"](g * normal, axis=others), OPS["sum"](g, axis=others)
    count = product(x.shape[i] for i in others)
    along = lift(dbias / count, x, axis) + normal * lift(dscale / count, x, axis)
    dx = cast_to((g - along) * lift(scale * inverse, x, axis), kept)
    return dx, cast_to(dscale, vector), cast_to(dbias, vector)


@public
def batch_norm(
    x: Any,
    scale: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    *,
    momentum: float = 0.1,
    epsilon: float = 1e-5,
    axis: int = 1,
) -> Node:
    """Normalize along `axis` (channels): by the batch in training, by the running statistics in evaluation.

    `scale`, `bias` and the two running variables have one number per channel. Wherever the result is trained,
    running = (1 - momentum) running + momentum batch, with the unbiased variance (count / (count - 1)).
    S. Ioffe and C. Szegedy, "Batch Normalization", 2015, algorithms 1 and 2.

    >>> import hetu as ht
    >>> one, zero = (ht.variable(n, v, (3,)) for n, v in (("scale", 1.0), ("bias", 0.0)))
    >>> mean, var = (ht.variable(n, v, (3,), trainable=False) for n, v in (("mean", 0.0), ("var", 1.0)))
    >>> batch_norm(ht.placeholder("x", (None, 3, 8, 8)), one, zero, mean, var).shape[1:]
    (3, 8, 8)
    """
    y, fixed, *news = both_ways(x, scale, bias, running_mean, running_var, momentum, epsilon, axis)
    return if_training(with_updates(y, dict(zip((running_mean, running_var), news))), fixed)


def both_ways(
    x: Any, scale: Any, bias: Any, running_mean: Node, running_var: Node, momentum: float, epsilon: float, axis: int
) -> tuple[Node, Node, Node, Node]:
    """What `batch_norm` gives in training, and in evaluation; the running statistics after a step of training."""
    if not 0 <= momentum <= 1:
        raise ArgumentError(f"batch_norm: momentum={momentum!r}", fix="pass the share of the new batch, 0 to 1")
    x, scale, bias = as_nodes((x, scale, bias))
    scale, bias = (cast_to(v, wide_type(v.dtype)) if is_float(v.dtype) else v for v in (scale, bias))
    axis = normalize_axis(axis, x.ndim)
    y, center, var = batch_norm_train(x, scale, bias, axis=axis, epsilon=epsilon)
    count = OPS["astype"](as_node(product(x.shape[i] for i in _others(x.ndim, axis))), dtype="float64")
    unbiased = var * OPS["astype"](count / OPS["maximum"](count - 1, 1.0), dtype=var.dtype)
    mean, other = (
        cast_to(running * (1 - momentum) + batch * momentum, running.dtype)
        for running, batch in ((running_mean, center), (running_var, unbiased))
    )
    factor = scale * OPS["rsqrt"](running_var + epsilon)
    fixed = cast_to(x * lift(factor, x, axis) + lift(bias - running_mean * factor, x, axis), y.dtype)
    return y, fixed, mean, other
