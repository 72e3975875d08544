"""The long short-term memory in C: all steps in one call, with weights packed once and gates made in the cache.

Gain: 2 to 4 times the speed of a product by BLAS and gates by NumPy in each step. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.kernels import Call
from ..ops.lstm import _lstm, lstm_dx
from .blas import all_or_none
from .c_calls import c_call
from .recipes import kernel

LEAST = 1 << 23  # multiplications that are worth another thread
BLOCK, DEEP, STRIP, SOME = 48, 192, 32, 4  # of lstm.c, the last at its most
PAD = 32  # what a row of scratch may have beside its numbers


def _fast(*arrays: np.ndarray) -> bool:
    dtype = arrays[0].dtype
    return dtype.char in "fd" and all(
        a.dtype == dtype and a.size and not any(s % a.itemsize for s in a.strides) for a in arrays
    )


def _strides(array: np.ndarray) -> list[int]:
    return [s // array.itemsize for s in array.strides]


def _grain(work: int) -> int:
    """Jobs of so many multiplications that are worth another thread."""
    return LEAST // work + 1


def _packed(scratch: Scratch, *matrices: np.ndarray) -> tuple[np.ndarray, list[Call | None]]:
    """Panels of the matrices, one below the other, and the calls that make them."""
    dtype, columns, depth = matrices[0].dtype, matrices[0].shape[1], sum(map(len, matrices))
    calls: list[Call | None] = []
    strips, start = -(-columns // STRIP), 0
    panels = scratch.empty((strips * depth * STRIP,), dtype)
    for matrix in matrices:
        words = (panels, matrix, *matrix.shape, *_strides(matrix), depth, start)
        calls.append(c_call("lstm.c", "lstm_pack", dtype, *words, jobs=strips, grain=_grain(len(matrix) * STRIP)))
        start += len(matrix)
    return panels, calls


@kernel(_lstm)
def lstm_bind(
    xp: ModuleType, out: Any, x: Any, w: Any, u: Any, b: Any, h: Any, c: Any, *, scratch: Scratch
) -> list[Call] | None:
    if not _fast(*out, x, w, u, b, h, c):
        return None
    (n, steps, f), k = x.shape, len(u)
    panels, calls = _packed(scratch, b[None], w, u)
    words = (*out, x, panels, h, c, steps, f, k, *_strides(x), *_strides(h), *_strides(c))
    size = BLOCK * (1 + f + 6 * k + 3 * PAD) * x.itemsize
    grain = _grain(steps * (1 + f + k) * 4 * k)
    calls.append(c_call("lstm.c", "lstm", x.dtype, *words, jobs=n, grain=grain, scratch=size))
    return all_or_none(calls)


@kernel(lstm_dx)
def lstm_dx_bind(
    xp: ModuleType,
    out: Any,
    gh: Any,
    dh: Any,
    dc: Any,
    x: Any,
    w: Any,
    u: Any,
    b: Any,
    h: Any,
    c: Any,
    *kept: Any,
    scratch: Scratch,
) -> list[Call] | None:
    if not _fast(*out, gh, dh, dc, x, w, u, h, c, *kept) or not all(a.flags.c_contiguous for a in kept):
        return None
    (n, steps, f), k, (hs, cs, tops, gates) = x.shape, len(u), kept
    dz, dw, du, db, dh_first, dc_first = out
    panels, calls = _packed(scratch, u.T)
    seeds = (a for seed in (gh, dh, dc, c) for a in _strides(seed))
    words = (dz, dh_first, dc_first, gh, dh, dc, c, cs, tops, gates, panels, steps, k, *seeds)
    size, grain = BLOCK * (5 * k + 3 * PAD) * x.itemsize, _grain(steps * 4 * k * k)
    calls.append(c_call("lstm.c", "lstm_back", x.dtype, *words, jobs=n, grain=grain, scratch=size))
    strips = -(-4 * k // STRIP)
    sums = scratch.empty((strips * STRIP * (1 + f + k + SOME),), x.dtype)
    words = (dw, du, db, sums, dz, x, h, hs, n, steps, f, k, *_strides(x), *_strides(h))
    size, grain = DEEP * (1 + f + k + 2 * PAD) * x.itemsize, _grain(n * steps * (1 + f + k) * STRIP)
    calls.append(c_call("lstm.c", "lstm_weights", x.dtype, *words, jobs=strips, grain=grain, scratch=size))
    return all_or_none(calls)
