"""Matrix products by the tile of products.c where that pays, else as calls of BLAS and a bias as an outer product.

A product whose left has rows only is one call, or one for each of few rows; those of a batch are one row of a table,
which needs a compiler. Gain: that of products.py, 2 to 3 times the speed of two or three rows, and C makes the calls
without Python. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..ops.linalg import linear, matmul
from . import blas
from .c_calls import all_or_none
from .moves import moved
from .products import product
from .recipes import kernel

FEW, DEEP = 3, 16  # rows or columns that go one by one, and the least depth of such a product


@kernel(matmul)
def matmul_bind(xp: ModuleType, out: Any, a: Any, b: Any) -> list[Call] | None:
    if min(a.ndim, b.ndim) < 2:  # matrices come of them where `simplify` runs
        return None
    made = _product(a, b, out)
    if made is None and a.size and b.size:
        (a, first), (b, second) = _readable(a), _readable(b)
        made = _product(a, b, out) if first or second else None
        return made and [*first, *second, *made]
    return made


def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> list[Call] | None:
    rows = _rows(a, out) if b.ndim == 2 else None
    if rows is None:
        call = blas.gemms(a, b, out)
    elif made := _vectors(rows[0], b, rows[1]):
        return made
    else:
        call = product(rows[0], b, rows[1]) or blas.gemm(rows[0], b, rows[1])
    return call and [call]


def _readable(x: np.ndarray) -> tuple[np.ndarray, list[Call]]:
    """Matrices as BLAS reads them, copies where they lie in another way, and the calls that copy.

    NumPy would copy them, too, but make the product with threads that BLAS divides it among, which changes its bits.
    """
    if blas.reads(x):
        return x, []
    copy = np.empty(x.shape, x.dtype)
    return copy, moved(copy, x)


def _vectors(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> list[Call] | None:
    """A product of few rows or columns, one by one: BLAS would pack the whole matrix for them."""
    if a.shape[1] < DEEP:
        return None
    if len(out) <= FEW:
        return all_or_none(blas.gemv(b.T, row, to) for row, to in zip(a, out))
    return all_or_none(blas.gemv(a, column, to) for column, to in zip(b.T, out.T)) if out.shape[1] <= FEW else None


def _rows(a: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as matrices, or None where their rows do not lie at equal distances."""
    try:
        made = [x.reshape((-1, x.shape[-1]), copy=False) for x in (a, out) if x.size]
    except ValueError:
        return None
    return (made[0], made[1]) if len(made) == 2 else None


@kernel(linear)
def linear_bind(xp: ModuleType, out: Any, x: Any, w: Any, b: Any) -> list[Call] | None:
    rows = _rows(x, out)
    together = None if rows is None else product(rows[0], w, rows[1], b)
    if together is not None:
        return [together]
    if (apart := matmul_bind(xp, out, x, w)) is None:
        return None
    flat = out.reshape(-1, out.shape[-1]) if out.flags.c_contiguous and out.size else None
    add_bias = None if flat is None else blas.ger(np.ones(len(flat), out.dtype), b, flat)
    return [*apart, add_bias or partial(xp.add, out, b, out)]
