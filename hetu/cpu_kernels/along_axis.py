"""Gathering and adding one element per index along an axis, in `rows.c`.

Gain: 2 to 6 times the speed of the forward functions. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from ..core.kernels import Call
from ..ops.along_axis import put_along_axis_add, take_along_axis
from ..ops.index import RowWindow
from .index import low_of, on_rows
from .recipes import kernel


@kernel(take_along_axis)
def take_along_axis_bind(
    xp: ModuleType, out: Any, x: Any, indices: Any, *, axis: int, window: RowWindow
) -> list[Call] | None:
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    count, size = indices.shape[axis], x.shape[axis]
    return on_rows("take_along", (out, x), indices, (count, size, inner, low_of(window)), outer * count, out.nbytes)


@kernel(put_along_axis_add)
def put_along_axis_add_bind(
    xp: ModuleType, out: Any, like: Any, indices: Any, values: Any, *, axis: int, window: RowWindow
) -> list[Call] | None:
    outer, inner = math.prod(out.shape[:axis]), math.prod(out.shape[axis + 1 :])
    sizes, work = (indices.shape[axis], out.shape[axis], inner, low_of(window)), out.nbytes + values.nbytes
    return on_rows("add_along", (out, values), indices, sizes, outer * inner, work)
