"""Random numbers drawn straight into their place, by a generator that is made once.

The numbers are those of the forward function. Gain: 2.6 times the speed of the forward function of dropout, little for
others. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..core.types import Shape
from ..ops.random import AxisWindows, Stream, _dropout, _kept, _scale, _values, random
from .recipes import kernel


@kernel(random)
def random_bind(
    xp: ModuleType, out: Any, state: Any, *, kind: str, shape: Shape, dtype: str, a: float, b: float, stream: int
) -> list[Call] | None:
    """Plain uniform and normal numbers are drawn straight into their place."""
    numbers = Stream(stream)
    if out.dtype.char in "fd" and out.flags.c_contiguous and kind in ("uniform", "normal"):
        draw = numbers.generator.random if kind == "uniform" else numbers.generator.standard_normal
        scale, shift = (b - a, a) if kind == "uniform" else (b, a)
        calls: list[Call] = [partial(numbers.at, state), partial(draw, None, out.dtype, out)]
        calls += [partial(np.multiply, out, out.dtype.type(scale), out)] if scale != 1 else []
        return calls + ([partial(np.add, out, out.dtype.type(shift), out)] if shift != 0 else [])
    return [lambda: np.copyto(out, _values(numbers, state, kind, shape, out.dtype, a, b))]


@kernel(_dropout)
def dropout_bind(
    xp: ModuleType, out: Any, x: Any, state: Any, *, rate: float, stream: int, channels: bool, window: AxisWindows
) -> Call | None:
    numbers, scale = Stream(stream), x.dtype.type(_scale(rate))

    def run() -> None:
        kept = _kept(numbers, state, x.shape, rate, channels, window)
        np.multiply(x, scale, out)
        np.multiply(out, kept, out)

    return run
