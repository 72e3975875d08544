"""Scaled dot-product attention, in float32 where it is of 16 bits, which scores overflow.

The whole is one operator, so that a room of kernels can keep its scores in the cache, or do without them. With a mask
of floats, which may have a gradient, it is a composition. Left out: dropout of weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import DTypeError, ShapeError, public
from ..core.graph import OPS, Node
from ..core.op import as_node, as_nodes, op
from ..core.operators import cast_to
from ..core.types import (
    Dim,
    Shape,
    TensorType,
    broadcast_shapes,
    compatible,
    elementwise,
    is_float,
    promote,
    require_float,
    show_shape,
)
from .elementwise import wide, wide_type, widened

__all__ = ["scaled_dot_product_attention"]


def _check(q: TensorType, k: TensorType, v: TensorType, causal: bool) -> None:
    require_float(q, k, v)
    if min(q.ndim, k.ndim, v.ndim) < 2:
        raise ShapeError(
            f"attention: got {q}, {k}, {v}, wanted (..., positions, features) each", fix="add the missing axes"
        )
    if not compatible(q.shape[-1], k.shape[-1]):
        raise ShapeError(
            f"attention: queries have {q.shape[-1]} features, keys {k.shape[-1]}", fix="give both the same last axis"
        )
    if not compatible(k.shape[-2], v.shape[-2]):
        raise ShapeError(
            f"attention: there are {k.shape[-2]} keys and {v.shape[-2]} values", fix="give both the same axis -2"
        )
    if isinstance(q.shape[-1], Dim):
        raise ShapeError(
            "attention: the number of features is unknown", fix="give the last axis of the queries a fixed size"
        )
    check_keys(q.shape, k.shape, -2)
    if q.shape[-1] == 0:
        raise ShapeError(f"attention: {q} and {k} have no features to compare", fix="give both one at least")
    if causal and not compatible(q.shape[-2], k.shape[-2]):
        raise ShapeError(
            f"attention: causal, of {q.shape[-2]} queries over {k.shape[-2]} keys",
            fix="give both as many positions, or say which keys each query sees with mask=",
        )


def _attention_type(
    q: TensorType, k: TensorType, v: TensorType, *masks: TensorType, causal: bool, **_: Any
) -> tuple[TensorType, ...]:
    _check(q, k, v, causal)
    if not all(t.ndim == q.ndim and all(map(compatible, q.shape[:-2], t.shape[:-2])) for t in (k, v)):
        raise ShapeError(
            f"the leading axes differ: {show_shape(q.shape)}, {show_shape(k.shape)}, {show_shape(v.shape)}",
            fix="use ht.scaled_dot_product_attention, which broadcasts them",
        )
    dtype = promote(q.dtype, k.dtype, v.dtype)
    return TensorType((*q.shape[:-1], v.shape[-1]), dtype), TensorType(q.shape[:-1], np.dtype(wide(np, dtype)))


def check_keys(queries: Shape, keys: Shape, axis: int) -> None:
    """ShapeError where there are queries, but no keys along `axis`."""
    if keys[axis] == 0 and 0 not in queries:
        raise ShapeError(f"no keys to attend to: {show_shape(keys)}", fix="pass one key at least, if only one of zeros")


def masked_scores(xp: ModuleType, q: Any, k: Any, masks: Sequence[Any], scale: float, causal: bool) -> tuple[Any, Any]:
    """scale q k^T of each head and None, or, where keys are hidden, which queries see none of them.

    The scores are -inf where a query may not see a key, and 0 in the rows of those that see nothing.
    """
    scores, seen = xp.matmul(q * scale, xp.matrix_transpose(k)), None
    if causal:
        seen = xp.tril(xp.ones(scores.shape[-2:], dtype=xp.bool))
    for mask in masks:
        if mask.dtype == xp.bool:
            seen = mask if seen is None else xp.logical_and(seen, mask)
        else:
            scores = scores + mask
    if seen is None:
        return scores, None
    blind = xp.logical_not(xp.any(seen, axis=-1, keepdims=True))
    least, zero = (xp.full((), value, dtype=scores.dtype) for value in (-xp.inf, 0))
    return xp.where(seen, scores, xp.where(blind, zero, least)), blind


def _dims(*types: TensorType, **_: Any) -> str:
    return f"...q!d!,...k!d!,...k!e!{',...q!k!' * (len(types) - 3)}->...q!e!,...q!"


@op(precision="low", infer=_attention_type, dims=_dims)
def attention(
    xp: ModuleType, q: Any, k: Any, v: Any, *masks: Any, scale: float, causal: bool = False
) -> tuple[Any, Any]:
    """(y, total): y = softmax(scores) @ v, total = log(sum(exp(scores))) of each query, computed at least in float32.

    See `scaled_dot_product_attention`; the second output is for the gradient. Masks have at least two axes; those of
    floats get no gradient.

    >>> import hetu as ht
    >>> q = ht.placeholder("q", (2, 4, 10, 16))
    >>> [str(output.type) for output in attention(q, q, q, scale=0.25, causal=True)]
    ['f32[2, 4, 10, 16]', 'f32[2, 4, 10]']
    """
    dtype, (q, k, v) = q.dtype, (widened(xp, a, a) for a in (q, k, v))
    scores, _ = masked_scores(xp, q, k, masks, scale, causal)
    if 0 in scores.shape:  # nobody attends
        return xp.astype(xp.matmul(scores, v), dtype), xp.zeros(scores.shape[:-1], dtype=scores.dtype)
    highest = xp.max(scores, axis=-1, keepdims=True)
    powers = xp.exp(scores - highest)
    sums = xp.sum(powers, axis=-1, keepdims=True)
    return xp.astype(xp.matmul(powers, v) / sums, dtype), xp.squeeze(highest + xp.log(sums), axis=-1)


def _operations(q: TensorType, k: TensorType, v: TensorType) -> int:
    """The scores and their product with the values."""
    return 2 * math.prod(map(int, (*q.shape[:-1], k.shape[-2], q.shape[-1] + v.shape[-1])))


attention.flops(lambda out, q, k, v, *_, **__: _operations(q, k, v))


@attention.grad
def attention_grad(
    g: list[Node | None], out: tuple[Node, ...], q: Node, k: Node, v: Node, *masks: Node, **attrs: Any
) -> tuple[Node | None, ...]:
    # only the first output leaves this file, so only it can have a gradient
    return *attention_dx(g[0], q, k, v, *out, *masks, **attrs), *(None for _ in masks)


def _wide(node: Node) -> Node:
    """In what scores are computed, which overflow 16 bits."""
    return cast_to(node, wide_type(node.dtype))


@op(
    infer=elementwise,
    dims="...,...->...",
    linear="joint",
    ufunc="add",
    inplace={0: (0, 1)},
    code="y = x + mask",
    precision="wide",
)
def add_mask(xp: ModuleType, x: Any, mask: Any) -> Any:
    """x + mask, in float32 where products take 16 bits, which the numbers that hide keys are not in.

    >>> import hetu as ht
    >>> ht.evaluate(add_mask([1.0, 2.0], [0.0, -1e9])).tolist()
    [1.0, -1000000000.0]
    """
    return x + mask


@add_mask.grad
def add_mask_grad(g: Node, y: Node, x: Node, mask: Node) -> tuple[Node, Node]:
    return g, g


def _weights(q: Node, k: Node, masks: Sequence[Node], scale: float, causal: bool) -> Node:
    scores = OPS["matmul"](_wide(q) * scale, OPS["matrix_transpose"](_wide(k)))
    for mask in masks:
        scores = add_mask(scores, mask) if is_float(mask.dtype) else scores
    # finite, so that a row that sees nothing weighs all evenly
    return OPS["softmax"](_hidden(scores, masks, causal, -1e38), axis=-1)


def _hidden(scores: Node, masks: Sequence[Node], causal: bool, value: float) -> Node:
    """The scores with `value` where a query may not see a key: where a mask is False, or -inf."""
    for mask in masks:
        seen = OPS["not_equal"](mask, -math.inf) if is_float(mask.dtype) else mask
        scores = OPS["where"](seen, scores, value)
    return OPS["where"](OPS["tril"](OPS["ones_like"](scores)) > 0, scores, value) if causal else scores


def _dx_dims(*types: TensorType, **_: Any) -> str:
    masks = ",...q!k!" * (len(types) - 6)
    return f"...q!e!,...q!d!,...k!d!,...k!e!,...q!e!,...q!{masks}->...q!d!,...k!d!,...k!e!"


@op(
    precision=(0, 1, 2, 3, 4),
    infer=lambda g, q, k, v, *_, **__: (q, k, v),
    dims=_dx_dims,
)
def attention_dx(
    xp: ModuleType,
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    y: Any,
    total: Any,
    *masks: Any,
    scale: float,
    causal: bool = False,
) -> tuple[Any, Any, Any]:
    """The gradients of `attention` with respect to (q, k, v), given that of y, its outputs and masks.

    T. Dao et al., "FlashAttention", 2022, appendix B.2.

    >>> import hetu as ht
    >>> q = ht.placeholder("q", (2, 4, 10, 16))
    >>> ht.gradients(ht.sum(attention(q, q, q, scale=0.25)[0]), [q])[0].shape
    (2, 4, 10, 16)
    """
    dtypes, (g, q, k, v, y) = (q.dtype, k.dtype, v.dtype), (widened(xp, a, a) for a in (g, q, k, v, y))
    scores, blind = masked_scores(xp, q, k, masks, scale, causal)
    weights = xp.exp(scores - xp.expand_dims(total, axis=-1))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)  # a large total is rounded to more than its last term
    shift = xp.sum(g * y, axis=-1, keepdims=True)
    slope = (xp.matmul(g, xp.matrix_transpose(v)) - shift) * weights * scale
    if blind is not None:
        slope = xp.where(blind, xp.zeros((), dtype=slope.dtype), slope)
    dq, dk = xp.matmul(slope, k), xp.matmul(xp.matrix_transpose(slope), q)
    made = dq, dk, xp.matmul(xp.matrix_transpose(weights), g)
    dq, dk, dv = (xp.astype(slope, dtype) for slope, dtype in zip(made, dtypes))
    return dq, dk, dv


attention_dx.flops(lambda out, g, q, k, v, *_, **__: 2 * _operations(q, k, v))


@attention_dx.decompose
def attention_dx_parts(
    g: Node, q: Node, k: Node, v: Node, y: Node, total: Node, *masks: Node, scale: float, causal: bool
) -> tuple[Node, Node, Node]:
    matmul, transpose, dtypes = OPS["matmul"], OPS["matrix_transpose"], (q.dtype, k.dtype, v.dtype)
    g, q, k, v = map(_wide, (g, q, k, v))
    weights = _weights(q, k, masks, scale, causal)
    slope = matmul(g, transpose(v))
    slope = (slope - OPS["sum"](slope * weights, axis=-1, keepdims=True)) * weights
    slope = _hidden(slope, masks, causal, 0.0)
    made = matmul(slope, k) * scale, matmul(transpose(slope), q) * scale, matmul(transpose(weights), g)
    dq, dk, dv = map(cast_to, made, dtypes)
    return dq, dk, dv


@public
def scaled_dot_product_attention(
    q: Any, k: Any, v: Any, mask: Any = None, *, causal: bool = False, scale: float | None = None
) -> Node:
    """softmax(scale q k^T) v: queries (..., s, d), keys (..., t, d), values (..., t, e) -> (..., s, e).

    `scale` defaults to 1 / sqrt(d). `mask` broadcasts against (..., s, t): booleans say which keys a query sees, floats
    are added to the scores, where -inf hides a key. `causal` lets position i see positions 0 to i. A query that sees
    nothing weighs all evenly.
    A. Vaswani et al., "Attention Is All You Need", 2017, equation 1.

    >>> import hetu as ht
    >>> q = ht.placeholder("q", (None, 4, 10, 16))
    >>> scaled_dot_product_attention(q, q, q, causal=True).shape[1:]
    (4, 10, 16)
    """
    q, k, v = as_nodes((q, k, v))
    _check(q.tensor, k.tensor, v.tensor, causal)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    masks = [] if mask is None else [_checked(as_node(mask, [q.dtype]), q, k)]
    learned = any(is_float(m.dtype) for m in masks)
    if not learned and all(q.shape[:-2] == x.shape[:-2] and q.dtype == x.dtype for x in (k, v)):
        return attention(q, k, v, *masks, scale=scale, causal=causal)[0]
    dtype = promote(q.dtype, k.dtype, v.dtype, *(m.dtype for m in masks if is_float(m.dtype)))
    return cast_to(OPS["matmul"](_weights(q, k, masks, scale, causal), _wide(v)), dtype)


def _checked(mask: Node, q: Node, k: Node) -> Node:
    """The mask with an axis of queries and one of keys."""
    leading = broadcast_shapes(q.shape[:-2], k.shape[:-2])
    scores = (*leading, q.shape[-2], k.shape[-2])
    pairs = zip(reversed(mask.shape), reversed(scores))
    if mask.ndim > len(scores) or not all(m == 1 or compatible(m, s) for m, s in pairs):
        raise ShapeError(
            f"attention: the mask has shape {show_shape(mask.shape)}, the scores {show_shape(scores)}",
            fix="the mask must broadcast to (..., queries, keys); a mask of keys needs axes (batch, 1, 1, keys)",
        )
    if not is_float(mask.dtype) and mask.dtype.kind != "b":
        raise DTypeError(
            f"attention: the mask is {mask.type}, wanted booleans or floats",
            fix="compare it first (mask > 0), True where a query sees a key",
        )
    while mask.ndim < 2:
        mask = OPS["expand_dims"](mask, axis=0)
    return mask
