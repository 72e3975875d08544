"""Launches the kernels of `attention.cu` and `attention_tensor.cu`: attention and its gradient in tiles.

Arrays are (batch, positions, heads, features) with any strides but the last, so that views of projections need no copy.
16-bit floats go to the tensor cores where their features divide into products of 16. Left out: masks other than causal,
dropout of weights.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from ..fuse.line_text import compute_dtype
from .machine import TENSOR, Call, Machine, address
from .source import assemble, file_text

MOST_BLOCKS = 65535  # along the second and third axis of a grid
SHARED = 48 * 1024  # bytes that a block may have without asking


class Launch(NamedTuple):
    """Which text computes, with which numbers at the end of its arguments, and how its blocks are made."""

    text: str
    numbers: tuple[Any, ...]
    block: tuple[int, ...]
    queries: int  # of a block
    keys: int


def takes(dtype: str, *features: int) -> bool:
    """Whether there is a kernel for heads of these features.

    >>> takes("float16", 128, 64), takes("float64", 128, 64)
    (True, False)
    """
    return "float" in dtype and max(features) <= 512 // np.dtype(compute_dtype(dtype)).itemsize


def _launch(machine: Machine, scale: float, causal: bool, q: Any, k: Any, v: Any, *others: Any) -> Launch | None:
    arrays, dtype, (d, e) = (q, k, v, *others), q.dtype.name, (q.shape[3], v.shape[3])
    plain = all(a.dtype == q.dtype and a.size and a.strides[3] == a.itemsize for a in arrays)
    if not plain or not takes(dtype, d, e) or max(q.shape[0], q.shape[2]) > MOST_BLOCKS:
        return None
    numbers = (q.shape[1], k.shape[1], float(scale), np.bool_(causal))
    tensor = machine.capability >= TENSOR and q.itemsize == 2 and scale > 0  # where the highest score has most weight
    if tensor and d % 16 == e % 16 == 0 and all(map(_in_chunks, arrays)):
        rows = 2 if d + e <= 128 else 1  # as many as registers take
        return Launch(text("attention_tensor", dtype, d, e, rows), numbers, (128,), 64 * rows, 64)
    fours = (d + 3) // 4 + (e + 3) // 4 + 2
    rows = 4 if (256 * fours + 2048) * np.dtype(compute_dtype(dtype)).itemsize <= SHARED else 1
    return Launch(text("attention", dtype, d, e, rows), numbers, (32, 8), 8 * rows, 8 * rows)


@cache
def text(file: str, dtype: str, d: int, e: int, rows: int) -> str:
    """The kernels of a file for d features of queries and keys, e of values, and `rows` (or 16 `rows`) rows a warp."""
    sizes = f'const int D = {d}, E = {e}, R = {rows};\n#line 1 "{file}.cu"\n'
    before = file_text("matrices") if file == "attention_tensor" else ""
    return assemble(before + sizes + file_text(file), f"{file}.cu", S=dtype)


def _in_chunks(array: Any) -> bool:
    """Whether every row begins at a multiple of 16 bytes, as copies to shared memory want."""
    steps = [stride for size, stride in zip(array.shape[:3], array.strides) if size > 1]
    return not any(place % 16 for place in (address(array), *steps))


def _placed(*arrays: Any) -> tuple[Any, ...]:
    """Arrays, each with its strides along batch, positions and heads, in elements."""
    return tuple(x for a in arrays for x in (a, *(stride // a.itemsize for stride in a.strides[:3])))


def _grid(array: Any, rows: int) -> tuple[int, ...]:
    n, positions, heads, _ = array.shape
    return -(-positions // rows), heads, n


def tiled(machine: Machine, out: Any, q: Any, k: Any, v: Any, *, scale: float, causal: bool) -> list[Call] | None:
    """`out` is (y, total)."""
    y, total = out
    launch = _launch(machine, scale, causal, q, k, v, y)
    if launch is None:
        return None
    kernel = machine.kernel(launch.text, "attention")
    return [partial(kernel, _grid(q, launch.queries), launch.block, (*_placed(q, k, v, y), total, *launch.numbers))]


def tiled_dx(
    machine: Machine, out: Any, g: Any, q: Any, k: Any, v: Any, y: Any, total: Any, *, scale: float, causal: bool
) -> list[Call] | None:
    """`out` is (dq, dk, dv), or the array in which they lie side by side."""
    dq, dk, dv = out if isinstance(out, tuple) else (out[:, :, i] for i in range(3))
    launch = _launch(machine, scale, causal, q, k, v, g, y, dq, dk, dv)
    if launch is None:
        return None
    shift, given = machine.xp.empty_like(total), _placed(g, q, k, v)
    of_queries = (*given, *_placed(y), total, *_placed(dq), shift, *launch.numbers)
    of_keys = (*given, total, shift, *_placed(dk, dv), *launch.numbers)
    return [
        partial(machine.kernel(launch.text, "attention_dq"), _grid(q, launch.queries), launch.block, of_queries),
        partial(machine.kernel(launch.text, "attention_dkv"), _grid(k, launch.keys), launch.block, of_keys),
    ]
