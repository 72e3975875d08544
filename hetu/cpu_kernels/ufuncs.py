"""Elementwise functions of NumPy in their cheapest form.

Arrays of one shape are passed as one axis, and all positionally: a call of few numbers costs 0.5 us less so. Gain: 1.3
times the speed of products of few numbers and a mask. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..core.op import FEW, ufunc_call


def bound_ufunc(ufunc: Any, arrays: Sequence[Any], out: Any) -> list[Call]:
    """The cheapest calls of a ufunc."""
    calls: list[Call] = []
    if all(a.shape == out.shape and a.flags.c_contiguous for a in (*arrays, out)):
        arrays, out = [a.reshape(-1) for a in arrays], out.reshape(-1)  # one axis, for any shape
        if out.size <= FEW and any(a.dtype == out.dtype != bool for a in arrays):
            masks = {i: np.empty_like(out) for i, a in enumerate(arrays) if a.dtype == bool}
            calls = [partial(np.copyto, mask, arrays[i]) for i, mask in masks.items()]
            arrays = [masks.get(i, a) for i, a in enumerate(arrays)]  # NumPy's own conversion has to be set up
        if out.size == 1 < len(arrays) and any(np.may_share_memory(a, out) for a in arrays):
            aside = np.empty_like(out)  # NumPy has a fast path for one number, but not onto an operand
            return [*calls, partial(ufunc, *arrays, out=aside), partial(np.copyto, out, aside)]
    return [*calls, ufunc_call(ufunc, arrays, out)]
