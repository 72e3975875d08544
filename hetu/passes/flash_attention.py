"""Attention on (batch, positions, heads, features), as projections make it.

Only `attention.py` of this folder makes them, after autodiff, where a room of kernels takes the sizes. This file says
what they mean, in terms of `attention`. Masks broadcast to (batch, heads, queries, keys).
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import OPS
from ..core.op import op
from ..core.types import TensorType
from ..ops.attention import check_keys
from ..ops.elementwise import wide

__all__ = ["flash_attention", "flash_attention_dx"]


def _type(q: TensorType, k: TensorType, v: TensorType, *_: Any, **__: Any) -> tuple[TensorType, ...]:
    n, s, heads = q.shape[:3]
    check_keys(q.shape, k.shape, 1)
    return TensorType((n, s, heads, v.shape[3]), q.dtype), TensorType((n, heads, s), np.dtype(wide(np, q.dtype)))


def _heads(xp: ModuleType, *arrays: Any) -> list[Any]:
    """(n, heads, positions, features), in a dtype that one may compute in."""
    return [xp.permute_dims(xp.astype(a, wide(xp, a.dtype)), (0, 2, 1, 3)) for a in arrays]


@op(infer=_type, differentiable=False)
def flash_attention(
    xp: ModuleType, q: Any, k: Any, v: Any, *masks: Any, scale: float, causal: bool = False
) -> tuple[Any, Any]:
    """`attention` of q (n, s, heads, d), k (n, t, heads, d), v (n, t, heads, e): y (n, s, heads, e) and total.

    total (n, heads, s) is log(sum(exp(scores))) of each query, in float32 where the others are float16. T. Dao,
    "FlashAttention-2", 2023.

    >>> import hetu as ht
    >>> q = ht.placeholder("q", (2, 10, 4, 16))
    >>> [str(o.type) for o in flash_attention(q, q, q, scale=0.25)]
    ['f32[2, 10, 4, 16]', 'f32[2, 4, 10]']
    """
    y, total = OPS["attention"].forward(xp, *_heads(xp, q, k, v), *masks, scale=scale, causal=causal)
    return xp.astype(xp.permute_dims(y, (0, 2, 1, 3)), q.dtype), total


def _operations(q: TensorType, k: TensorType, v: TensorType) -> int:
    """The scores and their product with the values."""
    return 2 * math.prod(map(int, q.shape[:3])) * int(k.shape[1]) * (int(q.shape[3]) + int(v.shape[3]))


flash_attention.flops(lambda out, q, k, v, *_, **__: _operations(q, k, v))


def _dx_type(g: TensorType, q: TensorType, k: TensorType, v: TensorType, *_: Any, **__: Any) -> Any:
    if not (q.shape == k.shape == v.shape):
        return q, k, v
    n, s, heads, d = q.shape
    return TensorType((n, s, 3, heads, d), q.dtype)


@op(infer=_dx_type, differentiable=False)
def flash_attention_dx(
    xp: ModuleType, g: Any, q: Any, k: Any, v: Any, y: Any, total: Any, *masks: Any, scale: float, causal: bool = False
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
    g, queries, keys, values, y = _heads(xp, g, q, k, v, y)
    parts = OPS["attention_dx"].forward(xp, g, queries, keys, values, y, total, *masks, scale=scale, causal=causal)
    made = tuple(xp.astype(xp.permute_dims(p, (0, 2, 1, 3)), q.dtype) for p in parts)
    return xp.stack(made, axis=2) if q.shape == k.shape == v.shape else made


flash_attention_dx.flops(lambda out, g, q, k, v, *_, **__: 2 * _operations(q, k, v))
