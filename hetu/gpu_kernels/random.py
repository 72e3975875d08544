"""Launches the kernels of `random.cu`: dropout of channels and evenly spread numbers, the same ones as on a CPU.

Normal numbers are left out: NumPy draws them by rejection, one after the other, which no GPU follows.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy as np

from ..ops import random
from .launchers import kernel
from .machine import Call, Machine, contiguous, spread
from .source import kernel_file


@kernel(random._dropout)
def dropout(
    machine: Machine, out: Any, x: Any, state: Any, *, rate: float, stream: int, channels: bool = False
) -> list[Call] | None:
    """Of channels; of elements a group draws, see `group_text.py`."""
    if not channels or not contiguous(x, state, out) or x.dtype != out.dtype:
        return None
    options = (np.uint64(stream), random._threshold(rate), random._scale(rate))
    launch = machine.kernel(kernel_file("random", S=x.dtype.name), "dropout_channels")
    return [partial(launch, *spread(x.size), (x, state, out, x.size, prod(x.shape[2:]), *options))]


@kernel(random.random)
def numbers(
    machine: Machine, out: Any, state: Any, *, kind: str, a: float, b: float, stream: int, **_: Any
) -> list[Call] | None:
    if kind not in ("uniform", "bernoulli") or not contiguous(state, out):
        return None
    name = out.dtype.name
    terms = (float(b - a), float(a)) if kind == "uniform" else (float(a),)
    drawn = "float64" if name == "float64" else "float32"
    launch = machine.kernel(kernel_file("random", S=name, T=drawn), kind)
    return [partial(launch, *spread(-(-out.size // 4)), (state, out, out.size, np.uint64(stream), *terms))]
