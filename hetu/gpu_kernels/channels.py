"""Launches the kernels of `channels.cu`: batch normalization in training, and its gradient."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from .machine import Call, Machine, contiguous, index_dtype, spread
from .source import compute_dtype, kernel_file

CHUNK = 8192  # elements of a channel that one block reads: 32 KB of float32 stay cached for the second pass


def _geometry(x: Any, axis: int) -> tuple[int, int, int, int]:
    """(before, channels, after, chunks). Every chunk has an element."""
    before, channels, after = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
    chunks = -(-before * after // CHUNK)
    return before, channels, after, chunks


def batch_norm_train(
    machine: Machine, out: Any, x: Any, scale: Any, bias: Any, *, axis: int, epsilon: float
) -> list[Call] | None:
    y, mean, var = out
    if not contiguous(x, scale, bias, *out) or any(a.dtype != x.dtype for a in (scale, bias, *out)):
        return None
    before, channels, after, chunks = _geometry(x, axis)
    wide, text = compute_dtype(x.dtype.name), kernel_file("channels", S=x.dtype.name, Index=index_dtype(x.size))
    parts, exact = machine.xp.empty((channels, chunks, 2), wide), machine.xp.empty((channels, 2), wide)
    moments, join, normalize = (machine.kernel(text, n) for n in ("moments_of_chunks", "join_moments", "normalize"))
    return [
        partial(moments, (chunks, channels), (256,), (x, parts, before, after)),
        partial(join, (-(-channels // 32),), (32,), (parts, mean, var, exact, channels, chunks, before * after)),
        partial(normalize, *spread(x.size), (x, exact, scale, bias, y, x.size, channels, after, float(epsilon))),
    ]


def batch_norm_dx(
    machine: Machine, out: Any, g: Any, x: Any, scale: Any, mean: Any, var: Any, *, axis: int, epsilon: float
) -> list[Call] | None:
    dx, dscale, dbias = out
    arrays = (g, x, scale, mean, var, *out)
    if not contiguous(*arrays) or any(a.dtype != x.dtype for a in arrays):
        return None
    before, channels, after, chunks = _geometry(x, axis)
    wide, text = compute_dtype(x.dtype.name), kernel_file("channels", S=x.dtype.name, Index=index_dtype(x.size))
    parts, exact = machine.xp.empty((channels, chunks, 2), wide), machine.xp.empty((channels, 2), wide)
    slopes, join, normalize = (machine.kernel(text, n) for n in ("slopes_of_chunks", "join_slopes", "normalize_dx"))
    sizes = (x.size, channels, after, float(epsilon))
    return [
        partial(slopes, (chunks, channels), (256,), (g, x, mean, var, parts, before, after, float(epsilon))),
        partial(join, (-(-channels // 32),), (32,), (parts, dscale, dbias, exact, channels, chunks)),
        partial(normalize, *spread(x.size), (g, x, scale, mean, var, exact, dx, *sizes)),
    ]
