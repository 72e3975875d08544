"""Attention without a matrix of scores in memory, on (batch, positions, heads, features).

The gradient needs no more of the forward pass than its result and one number a query, and makes the weights again. Made
by the pass `tile_attention` only, for GPUs, where `gpu_kernels/attention.py` computes both in tiles; here they are said
plainly, with the scores. Left out: masks other than causal, dropout of weights.

Gain: see `tile_attention.py`. Off by leaving `tile_attention` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ...core.op import op
from ...core.types import TensorType, same
from ...ops.attention import masked_scores
from .. import attention
from ..launchers import kernel


def _type(q: TensorType, k: TensorType, v: TensorType, **_: Any) -> tuple[TensorType, ...]:
    n, s, heads, _ = q.shape
    wide = np.dtype("float64" if q.dtype == np.float64 else "float32")
    return TensorType((n, s, heads, v.shape[3]), q.dtype), TensorType((n, heads, s), wide)


def _heads(xp: ModuleType, *arrays: Any) -> list[Any]:
    """(n, heads, positions, features), in a dtype that one may compute in."""
    wide = xp.float64 if arrays[0].dtype == xp.float64 else xp.float32
    return [xp.permute_dims(xp.astype(a, wide), (0, 2, 1, 3)) for a in arrays]


@op(infer=_type, differentiable=False)
def flash_attention(xp: ModuleType, q: Any, k: Any, v: Any, *, scale: float, causal: bool = False) -> tuple[Any, Any]:
    """`attention` of q (n, s, heads, d), k (n, t, heads, d), v (n, t, heads, e): y (n, s, heads, e) and total.

    total (n, heads, s) is log(sum(exp(scores))) of each query, in float32 where the others are float16. T. Dao,
    "FlashAttention-2", 2023.

    >>> import hetu as ht
    >>> q = ht.placeholder("q", (2, 10, 4, 16))
    >>> [str(o.type) for o in flash_attention(q, q, q, scale=0.25)]
    ['f32[2, 10, 4, 16]', 'f32[2, 4, 10]']
    """
    dtype = q.dtype
    q, k, v = _heads(xp, q, k, v)
    scores = masked_scores(xp, q, k, scale, causal)
    highest = xp.max(scores, axis=-1, keepdims=True)
    powers = xp.exp(scores - highest)
    sums = xp.sum(powers, axis=-1, keepdims=True, dtype=powers.dtype)
    y = xp.permute_dims(xp.matmul(powers / sums, v), (0, 2, 1, 3))
    return xp.astype(y, dtype), xp.squeeze(highest + xp.log(sums), axis=-1)


def _dx_type(g: TensorType, q: TensorType, k: TensorType, v: TensorType, *_: Any, **__: Any) -> Any:
    if not (same(q.shape, k.shape) and same(q.shape, v.shape)):
        return q, k, v
    n, s, heads, d = q.shape
    return TensorType((n, s, 3, heads, d), q.dtype)


@op(infer=_dx_type, differentiable=False)
def flash_attention_dx(
    xp: ModuleType, g: Any, q: Any, k: Any, v: Any, y: Any, total: Any, *, scale: float, causal: bool = False
) -> Any:
    """The gradients (dq, dk, dv) of q, k and v, given that of y and what `flash_attention` made.

    Where all three have one shape they lie side by side, (n, s, 3, heads, d), as a packed projection wants them.
    T. Dao, "FlashAttention-2", 2023, algorithm 2.

    >>> import hetu as ht
    >>> q, k = ht.placeholder("q", (2, 10, 4, 16)), ht.placeholder("k", (2, 7, 4, 16))
    >>> flash_attention_dx(q, q, q, q, *flash_attention(q, q, q, scale=0.25), scale=0.25).shape
    (2, 10, 3, 4, 16)
    >>> [d.shape for d in flash_attention_dx(q, q, k, k, *flash_attention(q, k, k, scale=0.25), scale=0.25)]
    [(2, 10, 4, 16), (2, 7, 4, 16), (2, 7, 4, 16)]
    """
    dtype, packed = q.dtype, q.shape == k.shape == v.shape
    g, q, k, v, y = _heads(xp, g, q, k, v, y)
    weights = xp.exp(masked_scores(xp, q, k, scale, causal) - xp.expand_dims(total, axis=-1))
    shift = xp.sum(g * y, axis=-1, keepdims=True, dtype=y.dtype)
    slope = (xp.matmul(g, xp.matrix_transpose(v)) - shift) * weights * scale
    parts = xp.matmul(slope, k), xp.matmul(xp.matrix_transpose(slope), q), xp.matmul(xp.matrix_transpose(weights), g)
    made = tuple(xp.astype(xp.permute_dims(p, (0, 2, 1, 3)), dtype) for p in parts)
    return xp.stack(made, axis=2) if packed else made


kernel(flash_attention)(attention.tiled)
kernel(flash_attention_dx)(attention.tiled_dx)
