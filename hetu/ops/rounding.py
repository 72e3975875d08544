"""Operators that bring each number to the nearest that is allowed: `round` to integers, `clip` to bounds."""

from __future__ import annotations

import builtins
import math
from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, DTypeError
from ..core.op import op
from ..core.types import TensorType, numbers
from .elementwise import equal

__all__ = ["clip", "round"]


@op(infer=numbers, dims="...->...", inplace={0: (0,)}, code="y = rint(x)", differentiable=False)
def round(xp: ModuleType, x: Any) -> Any:
    """The nearest integer, halves to the even one; no gradient passes.

    >>> import hetu as ht
    >>> ht.evaluate(round([0.5, 1.5, 2.4])).tolist()
    [0.0, 2.0, 2.0]
    """
    return xp.round(x)


round.into(lambda xp, out, x: xp.round(x, out=out))


@op(infer=numbers, dims="...->...", inplace={0: (0,)}, code="y = x < min ? min : x > max ? max : x")
def clip(xp: ModuleType, x: Any, *, min: float | None = None, max: float | None = None) -> Any:
    """x limited to [min, max], numbers or None for no bound. The gradient passes where x lies within, bounds included.

    >>> import hetu as ht
    >>> ht.evaluate(clip([-2.0, 0.5, 3.0], min=0, max=1)).tolist()
    [0.0, 0.5, 1.0]
    """
    return xp.clip(x, min, max)


@clip.normalize
def clip_normalize(x: TensorType, *, min: float | None, max: float | None) -> dict[str, Any]:
    """No bound is the last number of the dtype, as is one beyond, so that kernels know one form."""
    low, high = -math.inf if min is None else min, math.inf if max is None else max
    if low != low or high != high:
        raise ArgumentError(f"the bounds are {low} and {high}", fix="pass numbers, or None for no bound")
    if x.dtype.kind in "iu":
        if not builtins.all(math.isinf(bound) or bound == int(bound) for bound in (low, high)):
            raise DTypeError(f"got {x} and a fractional bound", fix='convert with ht.astype(x, "float32")')
        limits = np.iinfo(x.dtype)
        low, high = (int(builtins.max(limits.min, builtins.min(limits.max, b))) for b in (low, high))
    else:
        low, high = float(low), float(high)
    if low > high:
        raise ArgumentError(f"min {low} lies above max {high}", fix="swap them")
    return {"min": low, "max": high}


clip.grad(lambda g, y, x, **_: g * equal(x, y))
clip.into(lambda xp, out, x, *, min, max: xp.clip(x, min, max, out=out))
