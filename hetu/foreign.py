"""Arrays of other libraries, read where they lie: of DLPack, `__array__` or the buffer protocol, alone or in lists.

What cannot be read is told in the words of its library. Left out: masks, which would be lost, and GPUs of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .core.backend import READ, Unfit, array_from

FIX = (
    "pass an array of numbers; detach a tensor of another library first, and have it dense, on the host, in float32: "
    "tensor.detach().to_dense().cpu().float()"
)
TOLD = BufferError, MemoryError, RuntimeError, TypeError, ValueError  # by what cannot be read; others are mistakes


def read(value: Any, unfit: Unfit) -> np.ndarray:
    """`value` as an array; raises `unfit(reason, fix)` if it is none.

    >>> array_from(memoryview(b"ab")).tolist()
    [97, 98]
    """
    try:
        nested = isinstance(value, list | tuple) and _holds_arrays(value)
        if not nested:
            alone = not hasattr(value, "__array__") and hasattr(value, "__dlpack__")
            array = np.from_dlpack(value) if alone else np.asanyarray(value)
            if not (hasattr(array, "filled") or hasattr(value, "filled")):  # to import `numpy.ma` for it takes 25 ms
                return np.asarray(array)
    except Exception as error:
        if isinstance(value, list | tuple) and isinstance(error, ValueError):
            raise unfit("got rows of different lengths", "pad or cut them to one length") from None
        told = str(error).partition(chr(10))[0] or type(error).__name__
        said = f"got a {type(value).__name__} whose numbers cannot be read: {told}"
        raise unfit(said, FIX) from None if isinstance(error, TOLD) else error
    if nested:
        return array_from([array_from(row, unfit) for row in value], unfit)
    raise unfit("is masked, and a mask is not taken", "fill it: array.filled(0), and feed the mask as well")


def _holds_arrays(rows: Sequence[Any]) -> bool:
    """Whether there are arrays in a list that NumPy would not read as `read` does."""
    if not rows or isinstance(rows[0], int | float | np.generic):
        return False
    others = any(hasattr(of, "__dlpack__") or hasattr(of, "filled") for of in {*map(type, rows)} - {np.ndarray})
    return others or any(_holds_arrays(row) for row in rows if isinstance(row, list | tuple))


READ.append(read)
