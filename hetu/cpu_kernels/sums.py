"""Sums over the axes around some others in `sums.c`; over the last or the first axes they are groups.

Gain: 2 to 5 times the speed of NumPy's sum. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from ..core.graph import OPS
from ..core.kernels import Call
from .c_calls import c_call
from .groups import single
from .recipes import kernel

LEAST = 1 << 18  # numbers that are worth another thread


@kernel(OPS["sum"])
def sum_bind(xp: ModuleType, out: Any, x: Any, *, axis: tuple[int, ...], **attrs: Any) -> Call | list[Call] | None:
    made = single(OPS["sum"], out, [x], {"axis": axis, **attrs})
    kept = [k for k in range(x.ndim) if k not in axis]
    around = kept and kept == [*range(kept[0], kept[-1] + 1)] and x.flags.c_contiguous and out.dtype == x.dtype
    if made is not None or not around or x.dtype.char not in "fd" or not out.flags.c_contiguous:
        return made
    sizes = [
        math.prod(x.shape[part]) for part in (slice(kept[0]), slice(kept[0], kept[-1] + 1), slice(kept[-1] + 1, None))
    ]
    grain = -(-LEAST // max(1, sizes[0] * sizes[2]))
    return c_call("sums.c", "sum_around", x.dtype, out, x, *sizes, jobs=sizes[1], grain=grain)
