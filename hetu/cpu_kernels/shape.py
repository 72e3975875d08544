"""The sum over leading axes, as in the gradient of a bias, as a product with a vector of ones.

Gain: not measured apart. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..core.types import product
from ..ops.shape import broadcast_axes, sum_to_like
from . import blas
from .recipes import kernel


@kernel(sum_to_like)
def sum_to_like_bind(xp: ModuleType, out: Any, x: Any, like: Any) -> Call | None:
    """The sum over leading axes, as in the gradient of a bias, is a product with a vector of ones."""
    axes = broadcast_axes(x.shape, like.shape)
    if axes != tuple(range(len(axes))) or not x.flags.c_contiguous or not out.flags.c_contiguous:
        return None
    rows = product(x.shape[: len(axes)])
    if rows < 2 or out.size < 2:
        return None
    return blas.gemv(x.reshape(rows, out.size).T, np.ones(rows, x.dtype), out.reshape(-1))
