"""Launches the kernels of `many.cu`, and the chunks of many tensors that other kernels visit too.

`passes/group_checks.py` and `passes/group_updates.py` of this room choose which tensors go together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .machine import BLOCK, Call, Machine, contiguous, widest_pack
from .source import assemble, file_text

CHUNK = 1 << 14  # elements of one block: 64 per thread, and a model of 100 million parameters makes 6,000 blocks
KINDS = {"float16": 1, "bfloat16": 2}  # the number by which a kernel knows the dtype of an array; 0 is its own


def chunks(machine: Machine, rows: Sequence[Sequence[Any]]) -> tuple[Any, Any, tuple[Any, ...]]:
    """Grid, block and `TENSORS` of `tensors.cu`, for tensors of which each has a row of arrays."""
    asarray, sizes = machine.xp.asarray, [row[0].size for row in rows]
    places = [(k, start) for k, size in enumerate(sizes) for start in range(0, size, CHUNK)]
    columns = (
        ([KINDS.get(row[-1].dtype.name, 0) for row in rows], "int32"),
        (sizes, "int64"),
        ([k for k, _ in places], "int32"),
        ([start for _, start in places], "int64"),
    )
    return (
        (len(places),),
        (BLOCK,),
        (machine.table(rows), *(asarray(np.array(c, dtype)) for c, dtype in columns), CHUNK),
    )


def keeping(rows: Sequence[Sequence[Any]], call: Any) -> Any:
    """`call`, a partial, which keeps the arrays alive: a table holds addresses only."""
    call.arrays = rows
    return call


def text(stored: str, pack: int) -> str:
    """The kernel for values of dtype `stored`, of which a thread takes so many at once."""
    body = f"constexpr int PACK = {pack};\n{file_text('tensors')}{file_text('many')}"
    return assemble(body, "many.cu", S=stored)


def all_finite(machine: Machine, out: Any, *arrays: Any) -> list[Call] | None:
    """Whether all values are finite once they are divided by the last array, one number."""
    *arrays, scale = arrays
    stored = scale.dtype.name
    if not contiguous(*arrays) or any(a.dtype.name not in (stored, *KINDS) for a in arrays):
        return None
    rows = [(a,) for a in arrays]
    kernel = machine.kernel(text(stored, widest_pack(CHUNK, *arrays)), "all_finite")
    grid, block, where = chunks(machine, rows)
    return [partial(out.fill, True), keeping(rows, partial(kernel, grid, block, (*where, scale, out)))]
