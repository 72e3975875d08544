"""Matrix products as calls of BLAS, and a bias added as an outer product.

A product whose left has rows only is one call; those of a batch are one row of a table, which needs a compiler.
Gain: none over NumPy's call by itself, but C makes it without Python. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..ops.linalg import linear, matmul
from . import blas
from .recipes import kernel


@kernel(matmul)
def matmul_bind(xp: ModuleType, out: Any, a: Any, b: Any) -> Call | None:
    if b.ndim != 2:
        return blas.gemms(a, b, out)
    try:
        rows, rows_out = (x.reshape((-1, x.shape[-1]), copy=False) if x.size else None for x in (a, out))
    except ValueError:  # rows that do not lie at equal distances
        return blas.gemms(a, b, out)
    return None if rows is None or rows_out is None else blas.gemm(rows, b, rows_out)


@kernel(linear)
def linear_bind(xp: ModuleType, out: Any, x: Any, w: Any, b: Any) -> list[Call]:
    product = matmul_bind(xp, out, x, w) or partial(xp.matmul, x, w, out=out)
    rows = out.reshape(-1, out.shape[-1]) if out.flags.c_contiguous and out.size else None
    add_bias = None if rows is None else blas.ger(np.ones(len(rows), out.dtype), b, rows)
    return [product, add_bias or partial(xp.add, out, b, out)]
