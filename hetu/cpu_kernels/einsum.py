"""Einsum of two operands as one BLAS product, of more by the order that NumPy finds.

Gain: not measured apart. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.kernels import Call
from ..ops.einsum import _einsum, as_product, terms_of
from . import blas
from .recipes import kernel


@kernel(_einsum)
def einsum_bind(xp: ModuleType, out: Any, *operands: Any, equation: str) -> list[Call]:
    found = as_product(xp, out, operands, *terms_of(equation))
    if found is None:
        return [partial(np.einsum, equation, *operands, out=out, optimize=len(operands) > 2)]
    before, factors, after = found
    return [*before, blas.product(*factors), *after]
