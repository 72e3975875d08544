"""Mixture of experts: each slot takes its token, so that the result is written once, in order.

Gain: 2.5 to 14 times the speed of the forward functions. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.kernels import Call
from ..ops.routing import moe_combine, moe_dispatch, moe_products
from .recipes import kernel


def _fits(xp: ModuleType, *arrays: Any) -> bool:
    return all(a.flags.c_contiguous and a.size and a.dtype == arrays[0].dtype for a in arrays)


class _Reading:
    """Instructions that bring the rows of the slots into `rows` (tokens, k, features)."""

    def __init__(self, y: np.ndarray, slots: np.ndarray, scratch: Scratch) -> None:
        self.y, self.slots = y.reshape(-1, y.shape[2]), slots
        self.rows = scratch.empty((*slots.shape, y.shape[2]), y.dtype)
        self.empty = scratch.empty(slots.shape, np.dtype(bool))

    def run(self) -> None:
        self.y.take(self.slots, 0, self.rows, "clip")
        np.less(self.slots, 0, self.empty)
        np.copyto(self.rows, 0, where=self.empty[:, :, None])  # a product with 0 would leave a NaN of slot 0


@kernel(moe_dispatch)
def moe_dispatch_bind(
    xp: ModuleType, out: Any, x: Any, slots: Any, weights: Any, *, experts: int, capacity: int
) -> list[Call] | None:
    """Each slot takes its token: the result is written once, in order."""
    if not _fits(xp, out, x, weights):
        return None
    flat, count = out.reshape(-1, x.shape[1]), experts * capacity
    token = np.arange(len(x))[:, None]
    source, factor, empty = np.empty(count + 1, np.intp), np.empty(count + 1, x.dtype), np.empty(count, bool)

    def find() -> None:
        source.fill(-1)
        source[slots], factor[slots] = token, weights  # -1 is the place after all slots
        np.less(source[:-1], 0, empty)

    return [
        find,
        partial(x.take, source[:-1], 0, flat, "clip"),
        partial(np.multiply, flat, factor[:-1, None], flat),
        partial(np.copyto, flat, 0, where=empty[:, None]),
    ]


@kernel(moe_combine)
def moe_combine_bind(
    xp: ModuleType, out: Any, y: Any, slots: Any, weights: Any, *, scratch: Scratch
) -> list[Call] | None:
    if not _fits(xp, out, y, weights):
        return None
    reading = _Reading(y, slots, scratch)
    return [reading.run, partial(np.matmul, weights[:, None, :], reading.rows, out[:, None, :])]


@kernel(moe_products)
def moe_products_bind(xp: ModuleType, out: Any, x: Any, y: Any, slots: Any, *, scratch: Scratch) -> list[Call] | None:
    if not _fits(xp, out, x, y):
        return None
    reading = _Reading(y, slots, scratch)
    return [reading.run, partial(np.matmul, reading.rows, x[:, :, None], out[:, :, None])]
