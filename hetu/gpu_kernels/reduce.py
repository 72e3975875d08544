"""Launches the kernels of `reduce.cu`: sums, products, extrema and truth values over any axes.

An array is seen as groups of neighboring axes that are reduced or kept; the last reduced group goes first. CuPy
reduces arrays that are not contiguous, and finds the places of extrema.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import groupby
from typing import Any

from ..fuse.form import FOLDS
from ..fuse.line_text import compute_dtype
from .launchers import kernel
from .machine import Call, Machine, contiguous
from .source import assemble, file_text

# What folds of integers begin with, in the place of what floats begin with.
LIMITS = {
    ("-INFINITY", "int64"): "-9223372036854775807LL - 1",
    ("-INFINITY", "uint64"): "0",
    ("INFINITY", "int64"): "9223372036854775807LL",
    ("INFINITY", "uint64"): "~0ULL",
}
CHUNK = 4096  # elements that one team reduces, where there are fewer rows than a GPU has room for
ROOM = 1024  # teams that keep a large GPU busy


def definitions(op: Any, wide: str) -> str:
    """The functions of a fold of elements of type S, computing in T, which is the dtype `wide`."""
    combine, neutral = FOLDS[op]
    return (
        f"__device__ inline T combine(T a, T b) {{ return {combine}; }}\n"
        f"__device__ inline T identity() {{ return {LIMITS.get((neutral, wide), neutral)}; }}\n"
    )


def wide_dtype(dtype: str) -> str:
    """The dtype of partial results: 64 bits for integers and truth values."""
    if "float" in dtype:
        return compute_dtype(dtype)
    return "uint64" if dtype == "uint64" else "int64"


def _text(op: Any, stored: str, result: str, wide: str) -> str:
    """The kernels for one fold of elements `stored`, computing in `wide`."""
    body = definitions(op, wide) + file_text("reduce")
    return assemble(body, "reduce.cu", S=stored, T=wide, O=result)


def reduced(machine: Machine, op: Any, out: Any, x: Any, axes: tuple[int, ...]) -> list[Call] | None:
    """Calls that write the reduction of `x` over `axes` into `out`, of any shape with as many elements."""
    if not contiguous(x, out) or not any(x.shape[a] > 1 for a in axes):
        return None
    wide = wide_dtype(x.dtype.name)
    marked = [(n, i in axes) for i, n in enumerate(x.shape) if n > 1]
    groups = [[math.prod(n for n, _ in group), key] for key, group in groupby(marked, key=lambda pair: pair[1])]
    calls: list[Call] = []
    while any(key for _, key in groups):
        k = max(i for i, (_, key) in enumerate(groups) if key)
        outer, n, inner = math.prod(s for s, _ in groups[:k]), groups[k][0], math.prod(s for s, _ in groups[k + 1 :])
        chunks = 1 if outer * -(-inner // 32) >= ROOM else min(-(-n // CHUNK), ROOM)
        last = chunks == 1 and sum(key for _, key in groups) == 1
        target = out if last else machine.xp.empty(outer * chunks * inner, wide)
        calls.append(_stage(machine, op, target, x, outer, n, inner, chunks, wide))
        x, groups[k : k + 1] = target, [[chunks, True]] if chunks > 1 else []
    return calls


def _stage(machine: Machine, op: Any, out: Any, x: Any, outer: int, n: int, inner: int, chunks: int, wide: str) -> Call:
    text = _text(op, x.dtype.name, out.dtype.name, wide)
    if inner > 1:
        grid = (-(-inner // 32), min(outer * chunks, 65535))
        return partial(machine.kernel(text, "reduce_columns"), grid, (32, 8), (x, out, outer, n, inner, chunks))
    narrow = -(-n // chunks) <= 1024
    grid = (-(-outer * chunks // 8) if narrow else outer * chunks,)
    block = (32, 8) if narrow else (256, 1)
    return partial(machine.kernel(text, "reduce_rows"), grid, block, (x, out, outer, n, chunks))


def along_axes(op: Any, machine: Machine, out: Any, x: Any, *, axis: tuple[int, ...], **_: Any) -> list[Call] | None:
    return reduced(machine, op, out, x, axis)


for _op in FOLDS:
    kernel(_op)(partial(along_axes, _op))
