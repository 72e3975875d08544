"""Operators whose arrays have floats of several sizes: computed in the widest, rounded where a result is stored.

`passes/mixed_precision.py` and `gpu_kernels/passes/absorb_casts.py` insert them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import DTypeError
from ..core.graph import OPS, Node
from ..core.types import TensorType, as_dtype, dtype_in, is_float


def widened(xp: ModuleType, x: Any, other: Any) -> Any:
    """The values in the dtype in which they are computed beside `other`."""
    return xp.astype(x, xp.result_type(x, other), copy=False)


def cast_to(x: Node, dtype: np.dtype) -> Node:
    return x if x.dtype == dtype else OPS["astype"](x, dtype=dtype.name)


def stored_attrs(*_: TensorType, dtype: str | None, **attrs: Any) -> dict[str, Any]:
    """`normalize` of operators with the attribute `dtype`, that in which results are stored; None is that of x."""
    if dtype is not None and not is_float(as_dtype(dtype)):
        raise DTypeError(f"got dtype={dtype!r}, wanted one of floats", fix='leave it out, or use such as "float32"')
    return {**attrs, "dtype": dtype}


def stored(x: TensorType, dtype: str | None) -> TensorType:
    return x if dtype is None else TensorType(x.shape, as_dtype(dtype))


def rounded(xp: ModuleType, y: Any, x: Any, dtype: str | None) -> Any:
    return xp.astype(y, x.dtype if dtype is None else dtype_in(xp, dtype), copy=False)
