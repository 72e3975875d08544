"""Operators on the bits of numbers: logic and shifts of integers, and the bits of one dtype taken for those of another.

No gradient passes.
"""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from ..core.backend import dtype_in
from ..core.errors import DTypeError
from ..core.op import op
from ..core.types import TensorType, as_dtype, elementwise
from .elementwise import binary, unary

__all__ = [
    "bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor",
]  # fmt: skip


def whole_numbers(*types: TensorType, **_: Any) -> TensorType:
    """Type rule of what works on bits: as `elementwise`, of integers alone."""
    for type_ in types:
        if type_.dtype.kind not in "iu":
            raise DTypeError(f"got {type_}, wanted integers", fix='convert with ht.astype(x, "int64")')
    return elementwise(*types)


# fmt: off
bits = partial(binary, infer=whole_numbers)
bitwise_and = bits("bitwise_and", "The bits that both have.", "[12, 10], 6 -> [4, 2]", "")
bitwise_or = bits("bitwise_or", "The bits that one has at least.", "[12, 10], 6 -> [14, 14]", "")
bitwise_xor = bits("bitwise_xor", "The bits that exactly one has.", "[12, 10], 6 -> [10, 12]", "")
bitwise_left_shift = bits("bitwise_left_shift", "a 2^b, without the bits that leave the dtype.",
                          "[3, 5], 2 -> [12, 20]", "")
bitwise_right_shift = bits("bitwise_right_shift", "The integer below a / 2^b.", "[13, -13], 2 -> [3, -4]", "")
bitwise_invert = unary("bitwise_invert", "The bits that x has not.", "[0, 5] -> [-1, -6]", "", infer=whole_numbers)
# fmt: on


def _same_bits(x: TensorType, *, dtype: str) -> TensorType:
    if (wanted := as_dtype(dtype)).itemsize != x.dtype.itemsize:
        raise DTypeError(f"got {x}, whose elements {dtype} has not the bits for", fix="choose a dtype of as many bits")
    return TensorType(x.shape, wanted)


@op(infer=_same_bits, dims="...->...", differentiable=False)
def bitcast(xp: ModuleType, x: Any, *, dtype: Any) -> Any:
    """The bits of x taken for those of another dtype of the same size.

    >>> import hetu as ht
    >>> ht.evaluate(bitcast([1.0, -2.0], dtype="int32")).tolist()
    [1065353216, -1073741824]
    """
    return x.view(dtype_in(xp, dtype))
