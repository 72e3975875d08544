"""Attention on heads that stay where the projections put them: (batch, positions, heads, features), no transposes.

Each head is a matrix with distant rows, which BLAS multiplies as it is. The gradients of queries, keys and values lie
side by side, as the packed projection wants them. Where a query may not see later keys, blocks that lie wholly in the
future are not computed.

Pattern: `attention` and `attention_dx` of transposed views of (batch, positions, heads, features). Gain: 1.06 on a GPT,
where the noise is 0.08. Off by leaving `fuse_attention` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import OPS, Node
from ..core.kernels import Call
from ..core.op import op
from ..core.types import TensorType
from ..passes.attention import in_place
from . import blas

CHUNK = 1 << 17  # scores handled at a time, which stay in the second-level cache
ROWS = 64  # queries of a block: large enough for BLAS, small enough to skip much of the future


LEAST_SCORES = 1 << 10  # of a head; for fewer, one call per head costs more than copies


def fuse_attention(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`attention` and `attention_dx` on heads in place."""
    return in_place(outputs, attention_rows, attention_rows_dx, _suits)


def _suits(q: TensorType, k: TensorType, v: TensorType) -> bool:
    return q == k == v and q.dtype.char in "fd" and int(q.shape[2]) ** 2 >= LEAST_SCORES


def _rows_type(q: TensorType, k: TensorType, v: TensorType, **_: Any) -> tuple[TensorType, ...]:
    (n, s, heads), t = q.shape[:3], k.shape[1]
    return (
        TensorType((n, s, heads, v.shape[3]), q.dtype),
        TensorType((n, heads, s, t), q.dtype),
        TensorType((n, s, heads, 1), q.dtype),
    )


def _heads_first(xp: ModuleType, *arrays: Any) -> list[Any]:
    return [xp.permute_dims(a, (0, 2, 1, 3)) for a in arrays]


@op(infer=_rows_type, differentiable=False)
def attention_rows(
    xp: ModuleType, q: Any, k: Any, v: Any, *, scale: float, causal: bool = False
) -> tuple[Any, Any, Any]:
    """`attention` of q (n, s, heads, d), k and v (n, t, heads, d).

    Returns y (n, s, heads, d), powers (n, heads, s, t) and inverse (n, s, heads, 1).

    >>> import hetu as ht
    >>> q = ht.placeholder("q", (2, 10, 4, 16))
    >>> [o.shape for o in attention_rows(q, q, q, scale=0.25)]
    [(2, 10, 4, 16), (2, 4, 10, 10), (2, 10, 4, 1)]
    """
    q, k, v = _heads_first(xp, q, k, v)
    y, powers, inverse = OPS["attention"].forward(xp, q, k, v, scale=scale, causal=causal)
    y, inverse_rows = _heads_first(xp, y, inverse)
    return y, powers, inverse_rows


def _fast(xp: ModuleType, *arrays: np.ndarray) -> bool:
    dtype = arrays[0].dtype
    return xp is np and dtype.char in "fd" and all(a.dtype == dtype and a.size for a in arrays)


def _chunks(powers: np.ndarray) -> Iterator[slice]:
    """Ranges of the batch whose scores fit the cache."""
    step = max(1, CHUNK // powers[0].size)
    return (slice(start, min(start + step, len(powers))) for start in range(0, len(powers), step))


def _blocks(s: int, t: int, causal: bool) -> list[tuple[slice, slice, slice]]:
    """Blocks of rows, with the keys that some row of it sees and the rows that see some key of the same place."""
    step = ROWS if causal else max(s, t)
    blocks = [(start, min(start + step, s)) for start in range(0, s, step)]
    return [(slice(a, b), slice(0, b if causal else t), slice(a if causal else 0, s)) for a, b in blocks]


class _Products:
    """Collects BLAS calls for every head of some samples; `missing` is set where BLAS cannot do one."""

    def __init__(self) -> None:
        self.missing = False

    def __call__(self, a: np.ndarray, b: np.ndarray, out: np.ndarray, alpha: float = 1.0) -> list[Call]:
        """`out = alpha a @ b` over two leading axes."""
        heads = [*np.ndindex(*out.shape[:2])]
        calls = [call for i in heads if (call := blas.gemm(a[i], b[i], out[i], alpha))]
        self.missing = self.missing or len(calls) < len(heads)
        return calls


def _matrices(x: np.ndarray) -> np.ndarray:
    """(n, s, heads, d) seen as (n, heads, s, d)."""
    return x.transpose(0, 2, 1, 3)


@attention_rows.bind
def attention_rows_bind(
    xp: ModuleType, out: Any, q: Any, k: Any, v: Any, *, scale: float, causal: bool
) -> list[Call] | None:
    if not _fast(xp, *out, q, k, v):
        return None
    future = np.triu(np.full((ROWS, ROWS), -np.inf, q.dtype), 1)
    ones, products, calls = np.ones(k.shape[1], q.dtype), _Products(), []
    for chunk in _chunks(out[1]):
        powers, queries, keys, values = out[1][chunk], *(_matrices(a[chunk]) for a in (q, k, v))
        y, inverse = _matrices(out[0][chunk]), _matrices(out[2][chunk])
        for rows, seen, _ in _blocks(q.shape[1], k.shape[1], causal):
            scores, hidden = powers[:, :, rows, seen], powers[:, :, rows, seen.stop :]
            row = np.empty((*scores.shape[:3], 1), q.dtype)
            calls += products(queries[:, :, rows], keys[:, :, seen].swapaxes(2, 3), scores, scale)
            if causal:
                corner, size = scores[..., rows], rows.stop - rows.start
                calls.append(partial(np.add, corner, future[:size, :size], corner))
            calls += [
                partial(np.max, scores, -1, row, True),
                partial(np.subtract, scores, row, scores),
                partial(np.exp, scores, scores),
                partial(np.matmul, scores, ones[seen], row[..., 0]),
                partial(np.reciprocal, row, inverse[:, :, rows]),
            ]
            if hidden.size:
                calls.append(partial(np.copyto, hidden, q.dtype.type(0)))
            calls += products(scores, values[:, :, seen], y[:, :, rows])
        calls.append(partial(np.multiply, out[0][chunk], out[2][chunk], out[0][chunk]))
    return None if products.missing else calls


def _packed_type(g: TensorType, q: TensorType, *_: TensorType, **__: Any) -> TensorType:
    n, s, heads, d = q.shape
    return TensorType((n, s, 3, heads, d), q.dtype)


@op(infer=_packed_type, differentiable=False)
def attention_rows_dx(
    xp: ModuleType,
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    y: Any,
    powers: Any,
    inverse: Any,
    *,
    scale: float,
    causal: bool = False,
) -> Any:
    """The gradients of q, k and v side by side, (n, s, 3, heads, d), given that of y and what `attention_rows` made.

    All of q, k and v are (n, s, heads, d). T. Dao et al., "FlashAttention", 2022, appendix B.2.

    >>> import hetu as ht
    >>> q = ht.placeholder("q", (2, 10, 4, 16))
    >>> attention_rows_dx(q, q, q, q, *attention_rows(q, q, q, scale=0.25), scale=0.25).shape
    (2, 10, 3, 4, 16)
    """
    g, q, k, v, y, inverse = _heads_first(xp, g, q, k, v, y, inverse)
    scaled = g * inverse
    shift = xp.sum(scaled * y, axis=-1, keepdims=True, dtype=y.dtype)
    slope = (xp.matmul(scaled, xp.matrix_transpose(v)) - shift) * powers * scale
    dq, dk = xp.matmul(slope, k), xp.matmul(xp.matrix_transpose(slope), q)
    dv = xp.matmul(xp.matrix_transpose(powers), scaled)
    return xp.stack(_heads_first(xp, dq, dk, dv), axis=2)


@attention_rows_dx.bind
def attention_rows_dx_bind(
    xp: ModuleType,
    out: Any,
    g: Any,
    q: Any,
    k: Any,
    v: Any,
    y: Any,
    powers: Any,
    inverse: Any,
    *,
    scale: float,
    causal: bool,
) -> list[Call] | None:
    if not _fast(xp, out, g, q, k, v, y, powers, inverse):
        return None
    products, calls = _Products(), list[Call]()
    for chunk in _chunks(powers):
        power, slope = powers[chunk], np.empty(powers[chunk].shape, q.dtype)
        queries, keys, values = (_matrices(a[chunk]) for a in (q, k, v))
        dq, dk, dv = (_matrices(out[chunk, :, i]) for i in range(3))
        scaled = np.empty(g[chunk].shape, q.dtype)
        heads, shift = _matrices(scaled), np.empty((*power.shape[:3], 1), q.dtype)
        calls += [
            partial(np.multiply, g[chunk], inverse[chunk], scaled),
            partial(np.einsum, "bshe,bshe->bhs", scaled, y[chunk], out=shift[..., 0]),
        ]
        for rows, seen, _ in _blocks(q.shape[1], k.shape[1], causal):
            part = slope[:, :, rows, seen]
            calls += [
                *products(heads[:, :, rows], values[:, :, seen].swapaxes(2, 3), part),
                partial(np.subtract, part, shift[:, :, rows], part),
                partial(np.multiply, part, power[:, :, rows, seen], part),
                *products(part, keys[:, :, seen], dq[:, :, rows], scale),
            ]
        for place, _, later in _blocks(k.shape[1], q.shape[1], causal):
            calls += products(slope[:, :, later, place].swapaxes(2, 3), queries[:, :, later], dk[:, :, place], scale)
            calls += products(power[:, :, later, place].swapaxes(2, 3), heads[:, :, later], dv[:, :, place])
    return None if products.missing else calls
