"""The sum of everything, such as of a loss: the bare reduction, which saves most of the call's time.

Gain: 8 times the speed of the forward function on few numbers, 1.1 on many. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..ops.reduction import sum
from .recipes import kernel


@kernel(sum)
def sum_bind(xp: ModuleType, out: Any, x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Call | None:
    """The sum of all elements, as for a loss. A product with ones, or the bare reduction, avoids most of the call."""
    if len(axis) != x.ndim or not x.flags.c_contiguous or x.dtype != out.dtype:
        return None
    if 0 < x.size <= 1024 and x.dtype.char in "fd":  # beyond, NumPy's way to sum is the more accurate one
        return partial(x.reshape(1, -1).dot, np.ones(x.size, x.dtype), out.reshape(1))
    return partial(np.add.reduce, x.reshape(-1), 0, None, out.reshape(()))
