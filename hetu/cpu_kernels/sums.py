"""Sums over the axes around some others, or between them, in `sums.c`; over the last or the first they are groups.

Gain: 2 to 5 times the speed of NumPy's sum. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

import math
from itertools import groupby
from operator import itemgetter
from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import OPS
from ..core.kernels import Call
from .c_calls import c_call
from .groups import single
from .recipes import kernel

LEAST = 1 << 18  # numbers that are worth another thread


@kernel(OPS["sum"])
def sum_bind(xp: ModuleType, out: Any, x: Any, *, axis: tuple[int, ...], keepdims: bool) -> Call | list[Call] | None:
    order = sorted(range(x.ndim), key=lambda a: -x.strides[a])  # a sum takes numbers as they lie
    kept = [a for a in order if a not in axis]
    if not out.flags.c_contiguous or kept != sorted(kept):
        return single(OPS["sum"], out, [x], {"axis": axis, "keepdims": keepdims})
    x, axis = x.transpose(order), tuple(k for k, a in enumerate(order) if a in axis)
    made = single(
        OPS["sum"],
        out.reshape([n for k, n in enumerate(x.shape) if k not in axis]),
        [x],
        {"axis": axis, "keepdims": False},
    )
    return made or _inside(out, x, axis)


def _inside(out: np.ndarray, x: np.ndarray, axis: tuple[int, ...]) -> Call | None:
    """A call for axes that lie around others or between them."""
    summed = [k in axis for k in range(x.ndim)]
    runs = [(s, math.prod(n for _, n in run)) for s, run in groupby(zip(summed, x.shape), itemgetter(0))]
    if len(runs) != 3 or x.dtype.char not in "fd" or out.dtype != x.dtype or not x.flags.c_contiguous:
        return None
    sizes = [size for _, size in runs]
    jobs, function = (sizes[1], "sum_around") if runs[0][0] else (sizes[0], "sum_between")
    return c_call("sums.c", function, x.dtype, out, x, *sizes, jobs=jobs, grain=-(-LEAST * jobs // max(1, x.size)))
