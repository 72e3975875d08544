"""Launches the kernels of `attention.cu`: attention and its gradient, without a matrix of scores in memory.

They need no more than (y, total) from the forward pass, total being log(sum(exp(scores))) of each query; the operator
`attention` keeps the scores for its gradient, so these functions stand beside it, not behind it. Ignored on purpose:
masks other than causal, dropout of weights, tensor cores.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from .machine import Call, Machine, contiguous
from .source import compute_dtype, kernel_file


def _fits(q: Any, k: Any, v: Any, *others: Any) -> bool:
    most = 512 // np.dtype(compute_dtype(q.dtype.name)).itemsize
    same = all(a.dtype == q.dtype for a in (k, v, *others))
    batch = prod(q.shape[:-2])
    return same and contiguous(q, k, v, *others) and max(q.shape[-1], v.shape[-1]) <= most and batch <= 65535


def _sizes(q: Any, k: Any, v: Any, scale: float, causal: bool) -> tuple[Any, ...]:
    return (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], float(scale), np.bool_(causal))


def attention(machine: Machine, out: Any, q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> list[Call] | None:
    """`out` is (y, total): y as `scaled_dot_product_attention`, total (..., queries) in the dtype of computation."""
    if not _fits(q, k, v, out[0]):
        return None
    kernel = machine.kernel(kernel_file("attention", S=q.dtype.name), "attention")
    grid = (-(-q.shape[-2] // 8), prod(q.shape[:-2]))
    return [partial(kernel, grid, (32, 8), (q, k, v, *out, *_sizes(q, k, v, scale, causal)))]


def attention_dx(
    machine: Machine, out: Any, g: Any, q: Any, k: Any, v: Any, y: Any, total: Any, *, scale: float, causal: bool
) -> list[Call] | None:
    """`out` is (dq, dk, dv)."""
    if not _fits(q, k, v, g, y, *out):
        return None
    text, shift = kernel_file("attention", S=q.dtype.name), machine.xp.empty_like(total)
    sizes, batch = _sizes(q, k, v, scale, causal), prod(q.shape[:-2])
    dq, dkv = machine.kernel(text, "attention_dq"), machine.kernel(text, "attention_dkv")
    return [
        partial(dq, (-(-q.shape[-2] // 8), batch), (32, 8), (g, q, k, v, y, total, out[0], shift, *sizes)),
        partial(dkv, (-(-k.shape[-2] // 8), batch), (32, 8), (g, q, k, v, total, shift, *out[1:], *sizes)),
    ]
