"""Operators on floats of 16 bits, which C reads nowhere, in float32 between copies in working memory.

Their forward functions would take several whole arrays beside the arena, of which no plan knows, to compute the same.
Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.kernels import Call
from ..core.types import is_float
from . import recipes


def is_half(array: Any) -> bool:
    return bool(array.dtype.itemsize == 2 and is_float(array.dtype))


def widened(
    op: Any, xp: Any, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any], scratch: Scratch
) -> list[Call] | None:
    """Calls that compute an operator in float32; None where it is not of 16 bits, or nothing computes it so either."""
    outs, used = out if isinstance(out, tuple) else (out,), scratch.used
    if not any(map(is_half, (*outs, *arrays))):
        return None
    wide = [scratch.empty(x.shape, np.dtype(np.float32)) if is_half(x) else x for x in (*outs, *arrays)]
    results = wide[: len(outs)]
    made = recipes.KERNELS.bound(
        op, xp, tuple(results) if isinstance(out, tuple) else results[0], wide[len(outs) :], attrs, scratch
    )
    if made is None and not scratch.counts:  # a plan does not know whether arrays lie so that BLAS reads them
        scratch.used = used
        return None
    before = [partial(np.copyto, w, x) for w, x in zip(wide[len(outs) :], arrays) if w is not x]
    return [
        *before,
        *(made or ()),
        *(partial(np.copyto, x, w, casting="unsafe") for w, x in zip(results, outs) if w is not x),
    ]
