"""The relu as one pass with vector instructions.

Gain: 2.8 times the speed of the operator. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ..core.kernels import Call
from ..ops.activation import relu
from .recipes import kernel
from .ufuncs import bound_ufunc


@kernel(relu)
def relu_bind(xp: ModuleType, out: Any, x: Any) -> list[Call]:
    """Two arrays go through vector instructions, an array and a number do not: compare with some axes of zeros."""
    axis, length = x.ndim, 1
    while axis and length < 256:
        axis -= 1
        length *= x.shape[axis]
    zeros = xp.zeros(x.shape[axis:], x.dtype)
    return bound_ufunc(xp.maximum, (x, zeros), out)
