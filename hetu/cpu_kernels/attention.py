"""Attention in strips of queries whose scores stay in the cache, or of few; heads lie where the projections put them.

The gradient makes the scores again, so that no matrix of them is in memory. `attention.c` computes.

Pattern of the pass: `attention` and `attention_dx` of transposed views of (batch, positions, heads, features).
Gain: 4 times the speed of the forward functions, 1.3 to 2.7 times that of PyTorch; of the pass 1.05 on a GPT whose
projections are one. Off with `HETU_KERNELS=0`; the pass by leaving `fuse_attention` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import Node
from ..core.types import TensorType
from ..ops.attention import attention, attention_dx
from ..passes.attention import in_place
from ..passes.flash_attention import flash_attention, flash_attention_dx
from .c_calls import CCall, Word, c_call
from .recipes import kernel

STRIP, CHUNK, UNIT = 64, 256, 16  # as in `attention.c`: queries and keys at a time, what sizes in scratch divide by
LEAST = 1 << 21  # multiplications that are worth another thread
FEW = 2  # queries that go one by one, in `attention_few.c`
HEADS_FIRST = (0, 2, 1, 3)


def fuse_attention(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`attention` and `attention_dx` on heads in place."""
    return in_place(outputs, _suits)


def _suits(q: TensorType, *_: TensorType) -> bool:
    return q.dtype.char in "fd"


def _words(x: np.ndarray) -> tuple[Word, ...]:
    """A matrix for each place of the leading axes: memory, where they begin, strides of rows and columns."""
    starts, (*leading, row, column) = np.zeros((), np.int64), (stride // x.itemsize for stride in x.strides)
    for size, stride in zip(x.shape, leading):
        starts = starts[..., None] + np.arange(size) * stride
    return x, starts.ravel(), row, column


def _call(
    function: str,
    out: Sequence[np.ndarray],
    *arrays: np.ndarray,
    masks: Sequence[np.ndarray],
    scale: float,
    causal: bool,
) -> CCall | None:
    """`arrays` are q, k, v, total and what else the function reads; `out` what it writes; all with heads first."""
    q, k, v, total, *others = arrays
    (s, d), (t, e) = q.shape[-2:], v.shape[-2:]
    seen, bias = ([m for m in masks if m.dtype == dtype] for dtype in (np.bool_, q.dtype))
    if any(a.dtype != q.dtype or not a.size for a in (*arrays, *out)) or not total.flags.c_contiguous:
        return None
    if len(seen) > 1 or len(bias) > 1 or len(seen) + len(bias) < len(masks):
        return None
    rows, chunk, heads, few = min(s, STRIP), min(t, CHUNK), total.size // s, function == "attention" and s <= FEW
    if few:
        jobs, work, blocks = heads, s * t * (d + e), [(s, t + d), (UNIT, d + e)]
    elif function == "attention":
        jobs, work, blocks = heads * -(-s // STRIP), rows * t * (d + e), [(t, d + e), (rows, max(d, e)), (d + t, rows)]
    else:
        jobs, work = heads, s * t * (3 * d + 2 * e)
        blocks = [(2 * t, d + e), (rows, 2 * d + 2 * e), (d + e + 2 * chunk, rows)]
    scratch = sum(_whole(a) * _whole(b) for a, b in blocks) * q.itemsize
    hidden = ([np.broadcast_to(m, (*q.shape[:-1], t)) for m in kind] for kind in (seen, bias))
    places = (word for kind in hidden for word in (_words(*kind) if kind else (0, 0, 0, 0)))
    words = (*_words(q), *_words(k), *_words(v), *places, total, s, t, d, e, scale, int(causal))
    more = (word for a in (*others, *out) for word in _words(a))
    name = f"{function}_few" if few else function
    file = "attention_few.c" if few else "attention.c"
    return c_call(file, name, q.dtype, *words, *more, jobs=jobs, grain=-(-LEAST // work), scratch=scratch)


def _whole(size: int) -> int:
    return size + 4 * UNIT  # at most four blocks, each with less than UNIT more


def _heads(*arrays: np.ndarray) -> list[np.ndarray]:
    return [a.transpose(HEADS_FIRST) for a in arrays]


@kernel(attention)
def attention_bind(xp: ModuleType, out: Any, q: Any, k: Any, v: Any, *masks: Any, **attrs: Any) -> CCall | None:
    y, total = out
    return _call("attention", [y], q, k, v, total, masks=masks, **attrs)


@kernel(attention_dx)
def attention_dx_bind(
    xp: ModuleType, out: Any, g: Any, q: Any, k: Any, v: Any, y: Any, total: Any, *masks: Any, **attrs: Any
) -> CCall | None:
    return _call("attention_dx", out, q, k, v, total, g, y, masks=masks, **attrs)


@kernel(flash_attention)
def flash_attention_bind(xp: ModuleType, out: Any, q: Any, k: Any, v: Any, *masks: Any, **attrs: Any) -> CCall | None:
    y, total = out
    return _call("attention", _heads(y), *_heads(q, k, v), total, masks=masks, **attrs)


@kernel(flash_attention_dx)
def flash_attention_dx_bind(
    xp: ModuleType, out: Any, g: Any, q: Any, k: Any, v: Any, y: Any, total: Any, *masks: Any, **attrs: Any
) -> CCall | None:
    parts = out if isinstance(out, tuple) else [out[:, :, i] for i in range(3)]
    return _call("attention_dx", _heads(*parts), *_heads(q, k, v), total, *_heads(g, y), masks=masks, **attrs)
