"""Einsum of two operands as one product of matrices, of more by the order that NumPy finds.

Gain: 1.1 times the speed of the forward function, 16 times that of tiny products. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import OPS
from ..core.kernels import Call
from ..ops.einsum import _einsum, terms_of
from .moves import moved
from .recipes import kernel


@kernel(_einsum)
def einsum_bind(xp: ModuleType, out: Any, *operands: Any, equation: str) -> list[Call] | None:
    found = as_product(xp, out, operands, *terms_of(equation))
    if found is None and out.dtype.isbuiltin != 1:  # NumPy's own function takes no dtype of others, such as bfloat16
        return None
    if found is None:
        return [partial(np.einsum, equation, *operands, out=out, optimize=len(operands) > 2)]
    before, (a, b, y), after = found
    return [*before, *OPS["matmul"].bound(xp, y, [a, b], {}), *after]


def as_product(
    xp: ModuleType, out: Any, operands: Sequence[Any], terms: Sequence[str], right: str
) -> tuple[list[Call], list[Any], list[Call]] | None:
    """Two operands and the result as views for one (batched) matrix product; where axes cannot be merged in place, it
    comes with the copies before and after it. None where a letter of one operand is missing on the right."""
    if len(operands) != 2 or out.size == 0 or any(c not in right for c in set(terms[0]) ^ set(terms[1])):
        return None
    first, second = terms
    batch = "".join(c for c in right if c in first and c in second)
    rows = "".join(c for c in right if c not in second)
    columns = "".join(c for c in right if c not in first)
    inner = "".join(c for c in first if c in second and c not in right)
    a, a_copy, a_original = _grouped(xp, operands[0], first, batch, rows, inner)
    b, b_copy, b_original = _grouped(xp, operands[1], second, batch, inner, columns)
    y, y_copy, y_original = _grouped(xp, out, right, batch, rows, columns)
    pairs = ((a_copy, a_original), (b_copy, b_original))
    before = [call for copy, x in pairs for call in moved(copy, x)]
    return before, [a, b, y], moved(y_original, y_copy)


def _grouped(xp: ModuleType, x: Any, term: str, *groups: str) -> tuple[Any, Any, Any]:
    """`x` with a leading axis for each batch letter and one axis for each other group, and what it is a view of.

    Where strides do not allow the merge it is a view of a buffer of its own, to be copied to or from `x`.
    """
    order = "".join(groups)
    original = x.transpose([term.index(c) for c in order])
    sizes = dict(zip(order, original.shape))
    shape = [*(sizes[c] for c in groups[0]), *(int(np.prod([sizes[c] for c in group])) for group in groups[1:])]
    try:
        return original.reshape(shape, copy=False), original, original
    except ValueError:
        buffer = xp.empty(original.shape, x.dtype)
        return buffer.reshape(shape), buffer, original
