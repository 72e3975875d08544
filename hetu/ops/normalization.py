"""Normalization of single samples: layer, RMS and group; batch norm is passed on from `batch_norm.py`.

Layer and RMS norm and their gradients are operators because few passes in cache beat their composition; each also has
the composition as its `decompose` rule. Activations in 16 bits are computed in float32, as their squares overflow, and
rounded where they are stored. Instance norm is group norm with one channel per group. Left out: spectral and weight
norm.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from ..core.errors import ShapeError, public
from ..core.graph import OPS, Node
from ..core.op import as_nodes, op
from ..core.operators import cast_to
from ..core.types import TensorType, is_float, product, require_float
from .batch_norm import batch_norm, check_vectors, gradient_type, lift
from .elementwise import rounded, wide_type, widened
from .reduction import mean

__all__ = ["batch_norm", "group_norm", "layer_norm", "rms_norm"]


def _wide_nodes(scale: Node, *activations: Node) -> tuple[Node, ...]:
    return tuple(cast_to(x, wide_type(x.dtype, scale.dtype)) for x in activations)


def _layer_type(x: TensorType, scale: TensorType, bias: TensorType, **_: Any) -> TensorType:
    require_float(x, scale, bias)
    if x.ndim == 0:
        raise ShapeError("x is one number, wanted features on the last axis", fix="pass an array of at least one axis")
    check_vectors(x.shape[-1], scale=scale, bias=bias)
    return x


@op(infer=_layer_type, dims="...v!,v!,v!->...v!")
def layer_norm(xp: ModuleType, x: Any, scale: Any, bias: Any, *, epsilon: float = 1e-5) -> Any:
    """Each row (last axis) brought to mean 0 and variance 1, then scaled and shifted by the vectors `scale` and `bias`.

    J. L. Ba et al., "Layer Normalization", 2016.

    >>> import hetu as ht
    >>> ht.evaluate(layer_norm([[1.0, 3.0]], [1.0, 1.0], [0.0, 0.0], epsilon=0.0)).tolist()
    [[-1.0, 1.0]]
    """
    wide = widened(xp, x, scale)
    centered = wide - xp.mean(wide, axis=-1, keepdims=True)
    var = xp.mean(centered * centered, axis=-1, keepdims=True)
    return rounded(xp, centered / xp.sqrt(var + epsilon) * scale + bias, x)


@layer_norm.decompose
def layer_norm_parts(x: Node, scale: Node, bias: Node, *, epsilon: float) -> Node:
    (wide,) = _wide_nodes(scale, x)
    return cast_to(_normal_rows(wide, epsilon)[0] * scale + bias, x.dtype)


def _normal_rows(x: Node, epsilon: float) -> tuple[Node, Node]:
    """(normalized rows, 1 / standard deviation)."""
    centered = x - mean(x, axis=-1, keepdims=True)
    inverse = OPS["rsqrt"](mean(OPS["square"](centered), axis=-1, keepdims=True) + epsilon)
    return centered * inverse, inverse


def _layer_dx_type(g: TensorType, x: TensorType, scale: TensorType, **_: Any) -> tuple[TensorType, ...]:
    check_vectors(x.shape[-1], scale=scale)
    vector = gradient_type(x, scale)
    return x, vector, vector


@op(infer=_layer_dx_type, dims="...v!,...v!,v!->...v!,v!,v!")
def layer_norm_dx(xp: ModuleType, g: Any, x: Any, scale: Any, *, epsilon: float = 1e-5) -> tuple[Any, Any, Any]:
    """The gradients of `layer_norm` with respect to (x, scale, bias), given that of its result.

    >>> import hetu as ht
    >>> x, scale, bias = (ht.placeholder(n, s) for n, s in (("x", (8, 3)), ("scale", (3,)), ("bias", (3,))))
    >>> ht.gradients(ht.sum(layer_norm(x, scale, bias)), [scale])[0].type.shape
    (3,)
    """
    g, wide = (widened(xp, a, scale) for a in (g, x))
    centered = wide - xp.mean(wide, axis=-1, keepdims=True)
    inverse = 1 / xp.sqrt(xp.mean(centered * centered, axis=-1, keepdims=True) + epsilon)
    normal, scaled, batch = centered * inverse, g * scale, tuple(range(x.ndim - 1))
    along = xp.mean(scaled, axis=-1, keepdims=True) + normal * xp.mean(scaled * normal, axis=-1, keepdims=True)
    vectors = (xp.sum(v, axis=batch) for v in (g * normal, g))
    return rounded(xp, (scaled - along) * inverse, x), *_narrowed(xp, vectors, x, scale)


def _narrowed(xp: ModuleType, vectors: Iterable[Any], x: Any, scale: Any) -> tuple[Any, ...]:
    """Gradients of vectors in the dtype of `gradient_type`."""
    return tuple(xp.astype(v, xp.result_type(x, scale), copy=False) for v in vectors)


layer_norm.grad(lambda g, y, x, scale, bias, *, epsilon: layer_norm_dx(g, x, scale, epsilon=epsilon))


@layer_norm_dx.decompose
def layer_norm_dx_parts(g: Node, x: Node, scale: Node, *, epsilon: float) -> tuple[Node, Node, Node]:
    kept, vector = x.dtype, gradient_type(x.tensor, scale.tensor).dtype
    g, x = _wide_nodes(scale, g, x)
    (normal, inverse), scaled, batch = _normal_rows(x, epsilon), g * scale, tuple(range(x.ndim - 1))
    weighed = mean(scaled * normal, axis=-1, keepdims=True)
    dx = (scaled - mean(scaled, axis=-1, keepdims=True) - normal * weighed) * inverse
    dscale, dbias = (cast_to(OPS["sum"](v, axis=batch), vector) for v in (g * normal, g))
    return cast_to(dx, kept), dscale, dbias


# -- root mean square ------------------------------------------------------------------------------------------


def _rms_type(x: TensorType, scale: TensorType, **_: Any) -> TensorType:
    require_float(x, scale)
    check_vectors(x.shape[-1] if x.ndim else 1, scale=scale)
    return x


@op(infer=_rms_type, dims="...v!,v!->...v!")
def rms_norm(xp: ModuleType, x: Any, scale: Any, *, epsilon: float = 1e-6) -> Any:
    """Each row (last axis) divided by its root mean square, then scaled by the vector `scale`.

    B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", 2019.

    >>> import hetu as ht
    >>> ht.evaluate(rms_norm([[2.0, 2.0]], [1.0, 3.0], epsilon=0.0)).tolist()
    [[1.0, 3.0]]
    """
    wide = widened(xp, x, scale)
    y = wide / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + epsilon) * scale
    return rounded(xp, y, x)


@rms_norm.decompose
def rms_norm_parts(x: Node, scale: Node, *, epsilon: float) -> Node:
    (wide,) = _wide_nodes(scale, x)
    return cast_to(wide * _inverse_rms(wide, epsilon) * scale, x.dtype)


def _inverse_rms(x: Node, epsilon: float) -> Node:
    return OPS["rsqrt"](mean(OPS["square"](x), axis=-1, keepdims=True) + epsilon)


@op(infer=lambda *types, **attrs: _layer_dx_type(*types, **attrs)[:2], dims="...v!,...v!,v!->...v!,v!")
def rms_norm_dx(xp: ModuleType, g: Any, x: Any, scale: Any, *, epsilon: float = 1e-6) -> tuple[Any, Any]:
    """The gradients of `rms_norm` with respect to (x, scale), given that of its result.

    >>> import hetu as ht
    >>> x, scale = ht.placeholder("x", (8, 3)), ht.placeholder("scale", (3,))
    >>> ht.gradients(ht.sum(rms_norm(x, scale)), [scale])[0].type.shape
    (3,)
    """
    g, wide = (widened(xp, a, scale) for a in (g, x))
    inverse = 1 / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    normal, scaled = wide * inverse, g * scale
    dx = (scaled - normal * xp.mean(scaled * normal, axis=-1, keepdims=True)) * inverse
    dscale = xp.sum(g * normal, axis=tuple(range(x.ndim - 1)))
    return rounded(xp, dx, x), *_narrowed(xp, [dscale], x, scale)


rms_norm.grad(lambda g, y, x, scale, *, epsilon: rms_norm_dx(g, x, scale, epsilon=epsilon))


@rms_norm_dx.decompose
def rms_norm_dx_parts(g: Node, x: Node, scale: Node, *, epsilon: float) -> tuple[Node, Node]:
    kept, vector = x.dtype, gradient_type(x.tensor, scale.tensor).dtype
    g, x = _wide_nodes(scale, g, x)
    inverse = _inverse_rms(x, epsilon)
    normal, scaled = x * inverse, g * scale
    dx = (scaled - normal * mean(scaled * normal, axis=-1, keepdims=True)) * inverse
    return cast_to(dx, kept), cast_to(OPS["sum"](g * normal, axis=tuple(range(x.ndim - 1))), vector)


# -- compositions ----------------------------------------------------------------------------------------------


@public
def group_norm(x: Any, scale: Any, bias: Any, *, groups: int, epsilon: float = 1e-5) -> Node:
    """Each group of neighboring channels (axis 1) of each sample brought to mean 0 and variance 1, then scaled and
    shifted by the vectors `scale` and `bias`, one number per channel.

    Y. Wu and K. He, "Group Normalization", 2018.

    >>> import hetu as ht
    >>> x, vector = ht.placeholder("x", (None, 6, 8, 8)), ht.placeholder("v", (6,))
    >>> group_norm(x, vector, vector, groups=3).shape[1:]
    (6, 8, 8)
    """
    x, scale, bias = as_nodes((x, scale, bias))
    channels = x.shape[1] if x.ndim > 1 else 0
    if not isinstance(groups, int) or groups < 1 or (isinstance(channels, int) and (channels < 1 or channels % groups)):
        raise ShapeError(f"group_norm: {channels} channels do not divide into {groups} groups", fix="change groups")
    check_vectors(channels, scale=scale.tensor, bias=bias.tensor)
    rows = OPS["reshape"](x, shape=(x.shape[0], groups, product(x.shape[1:]) // groups))
    (wide,) = _wide_nodes(scale, rows)
    normal = OPS["reshape"](_normal_rows(wide, epsilon)[0], shape=x.shape)
    return cast_to(normal * lift(scale, x, 1) + lift(bias, x, 1), x.dtype if is_float(x.dtype) else wide.dtype)
