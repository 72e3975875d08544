"""Products of matrices in C, with a bias at the store.

Gain: 1.05 to 1.2 times the speed of OpenBLAS where `pays` says so, up to 1.5 with a bias or few columns; a step of a
GPT or a small MLP 1.05 to 1.1. Where there is more to pack BLAS is as fast. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

import numpy as np

from .c_calls import CCall, c_call
from .compiler import compiler

LEAST = 1 << 21  # multiplications that are worth another thread
STRIP, HIGH, MOST, DEEP = 32, 192, 12, 2048  # of panels.h and products.c, at their most; the last in bytes


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray, bias: np.ndarray | None = None) -> CCall | None:
    """A call that computes `out = a @ b + bias` for matrices and a row, or None where it is not for C or doesn't pay.

    Shapes (m, k), (k, n), (m, n) and (n,), all float32 or all float64; `out` lies apart from the others. a is row- or
    column-major, and so is `out` where there is no bias.

    >>> out = np.empty((256, 64))
    >>> call = product(np.ones((256, 128)), np.ones((128, 64)), out, np.ones(64))
    >>> call is None or bool((call(), out[0, 0])[1] == 129)
    True
    """
    arrays = [x for x in (a, b, out, bias) if x is not None]
    if out.dtype.char not in "fd" or any(x.dtype != out.dtype or not x.flags.aligned for x in arrays):
        return None
    if out.strides[1] != out.itemsize and bias is None:
        a, b, out = b.T, a.T, out.T
    (m, k), n = a.shape, b.shape[1]
    if (
        out.strides[1] != out.itemsize
        or out.itemsize not in a.strides
        or (bias is not None and bias.strides[0] != out.itemsize)
    ):
        return None
    if not pays(m, n, k):
        return None
    strips, pitch = -(-n // STRIP), DEEP // out.itemsize + 1
    strides = [s // out.itemsize for s in (out.strides[0], *a.strides, *b.strides)]
    words = (out, a, b, 0 if bias is None else bias, m, n, k, *strides)
    size = (strips * STRIP * k + (HIGH + MOST) * pitch + (MOST + 1) * STRIP) * out.itemsize + strips
    jobs, grain = strips * -(-m // HIGH), LEAST // (min(m, HIGH) * STRIP * k) + 1
    return c_call("products.c", "product", out.dtype, *words, jobs=jobs, grain=grain, scratch=size)


def pays(m: int, n: int, k: int) -> bool:
    """Whether the tile is faster than BLAS: what is packed stays in the cache, and is read by many rows.

    With vectors of 256 bits neither is 5 % faster than the other.
    """
    whole = -(-n // STRIP) * STRIP <= 1.1 * n  # few columns only fill the last panel
    enough = m >= 64 and k >= 16 and k * n <= 1 << 19 and m * n * k >= 1 << 21
    made_by = compiler()
    return whole and enough and made_by is not None and "__AVX512F__" in made_by.macros
