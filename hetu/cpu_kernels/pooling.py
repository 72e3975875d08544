"""Pooling plane by plane in `pooling.c`.

Gain: 4 to 100 times the speed of the forward functions. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..ops.pooling import _max_pool2d, avg_pool2d, avg_pool2d_dx, max_pool2d_dx, max_pool2d_pick
from ..ops.window import Pair, Window
from .c_calls import c_call
from .moves import moved
from .recipes import kernel

LEAST = 1 << 17  # taps that are worth another thread


def _calls(
    function: str,
    outs: tuple[np.ndarray, ...],
    arrays: tuple[np.ndarray, ...],
    image: np.ndarray,
    pooled: Pair,
    window: Window,
) -> list[Call] | None:
    """Calls on the planes of `image`, which may have any strides if it is read; other arrays are copied if they do."""
    if not all(out.flags.c_contiguous for out in outs):
        return None
    copies = [a if a is image or a.flags.c_contiguous else np.empty(a.shape, a.dtype) for a in arrays]
    strides = [s // image.itemsize for s in image.strides]
    before = [first for first, _ in window.padding]
    geometry = (*image.shape[1:], *pooled, *strides, *window.kernel, *window.stride, *before)
    work = max(1, pooled[0] * pooled[1] * window.kernel[0] * window.kernel[1])
    planes, scratch = image.shape[0] * image.shape[1], 24 * window.kernel[1] + 8 * pooled[0] * pooled[1]
    more = {"jobs": planes, "grain": -(-LEAST // work), "scratch": scratch}
    call = c_call("pooling.c", function, image.dtype, *outs, *copies, *geometry, **more)
    made = [call for copy, a in zip(copies, arrays) if copy is not a for call in moved(copy, a)]
    return None if call is None else [*made, call]


@kernel(_max_pool2d)
def max_pool2d_bind(xp: ModuleType, out: Any, x: Any, **attrs: Any) -> list[Call] | None:
    return _calls("max_pool", out, (x,), x, out[0].shape[2:], Window(**attrs))


@kernel(max_pool2d_dx)
def max_pool2d_dx_bind(xp: ModuleType, out: Any, g: Any, taps: Any, *, size: Pair, **attrs: Any) -> list[Call] | None:
    return _calls("max_pool_dx", (out,), (g, taps), out, g.shape[2:], Window(**attrs))


@kernel(max_pool2d_pick)
def max_pool2d_pick_bind(xp: ModuleType, out: Any, x: Any, taps: Any, **attrs: Any) -> list[Call] | None:
    return _calls("max_pool_pick", (out,), (x, taps), x, taps.shape[2:], Window(**attrs))


@kernel(avg_pool2d)
def avg_pool2d_bind(xp: ModuleType, out: Any, x: Any, **attrs: Any) -> list[Call] | None:
    return _calls("avg_pool", (out,), (x,), x, out.shape[2:], Window(**attrs))


@kernel(avg_pool2d_dx)
def avg_pool2d_dx_bind(xp: ModuleType, out: Any, g: Any, *, size: Pair, **attrs: Any) -> list[Call] | None:
    return _calls("avg_pool_dx", (out,), (g,), out, g.shape[2:], Window(**attrs))
