"""Matrix products by cuBLAS, called directly, CuPy with them in the place of its own, and the operators made of them.

Large products of 16 bits whose rows start at no multiple of 16 bytes, such as those of a vocabulary of 50,257 words, go
between copies whose rows do, for which cuBLAS is five times as fast.

CuPy refuses products while a stream is captured, multiplies batches of float16 as float32 and of bfloat16 not at all,
and first copies what is transposed or broadcast. It joins more than 8 arrays by a list of addresses that it copies from
the host, which cannot be captured either. CuPy multiplies vectors and other dtypes than floats. TF32 is never used.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np

from ..fuse.places import merged_axes
from ..ops import linalg
from .launchers import kernel
from .machine import Call, Machine, Size2d
from .source import kernel_file

# What cuBLAS calls the dtypes, and the precision in which it adds up; and the numbers 1 and 0 in that.
KINDS = {"float16": (2, 68), "bfloat16": (14, 68), "float32": (0, 68), "float64": (1, 70)}
ONE = {68: ctypes.byref(ctypes.c_float(1)), 70: ctypes.byref(ctypes.c_double(1))}
ZERO = {68: ctypes.byref(ctypes.c_float(0)), 70: ctypes.byref(ctypes.c_double(0))}
DEFAULT_ALGORITHM = -1
MOST_JOINED = 8  # arrays that CuPy joins without such a list
WORKSPACE = 32 << 20  # bytes, what NVIDIA recommends for an H100
ALIGNED, FITTED = 8, 64  # neighbors of 16 bits, in multiples of which rows should come, and do in copies
# What a copy has to save: on an H100 a product at unaligned rows takes 6.5e-15 s more for each multiplication; to read
# and write an element, at the bandwidth of its memory, takes 1.6e-12 s, and a launch some microseconds.
WORTH, LEAST = 256, 1 << 30

# Memory for cuBLAS, of each stream its own, for products on two may go on at once.
_workspaces: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

MatrixOperand = tuple[Any, bool, int, int]  # an array, whether it lies transposed, and its leading and batch stride


class CuPy:
    """CuPy with a `matmul` and joins that can be captured."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cupy, name)

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """`a @ b`, in `out` if that is given; it shares no memory with `a` and `b`."""
        return product(self.cupy, a, b, out)

    def concatenate(self, arrays: Sequence[Any], axis: int = 0, out: Any = None) -> Any:
        """As that of CuPy; many arrays are joined in groups."""
        parts = list(arrays)
        while len(parts) > MOST_JOINED:
            groups = range(0, len(parts), MOST_JOINED)
            parts = [self.cupy.concatenate(parts[k : k + MOST_JOINED], axis=axis) for k in groups]
        return self.cupy.concatenate(parts, axis=axis, out=out)

    concat = concatenate

    def stack(self, arrays: Sequence[Any], axis: int = 0) -> Any:
        """As that of CuPy."""
        return self.concatenate([self.cupy.expand_dims(a, axis) for a in arrays], axis=axis)


with_products = cache(CuPy)


def product(cupy: Any, a: Any, b: Any, out: Any = None) -> Any:
    """(..., m, k) @ (..., k, n) -> (..., m, n)."""
    if a.ndim < 2 or b.ndim < 2 or not {a.dtype.name, b.dtype.name} <= KINDS.keys() or not (a.size and b.size):
        return cupy.matmul(a, b, out=out)
    dtype = np.promote_types(a.dtype, b.dtype)
    a, b = (x.astype(dtype, copy=False) for x in (a, b))
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    whole = out is not None and out.flags.c_contiguous and out.dtype == dtype
    target = out if whole else cupy.empty(shape, dtype)
    if batch or dtype.itemsize != 2 or not _multiplied_between_copies(cupy, a, b, target):
        _multiply(cupy, _operand(cupy, a, batch), _operand(cupy, b, batch), target)
    if out is None or whole:
        return target
    cupy.copyto(out, target)
    return out


def _multiplied_between_copies(cupy: Any, a: Any, b: Any, out: Any) -> bool:
    """(m, k) @ (k, n) with those sizes rounded up in which rows lie unaligned; False if the copies cost more."""
    (m, k), n = a.shape, b.shape[1]
    sizes = m, k, n
    neighbors = {int(a.strides[1] == a.itemsize), 1 + int(b.strides[1] == b.itemsize), 2}  # of a, b and out
    odd = {axis for axis in neighbors if sizes[axis] % ALIGNED}
    copied = sum(sizes[i] * sizes[j] for i, j in ((0, 1), (1, 2), (0, 2)) if odd & {i, j})
    if not odd or m * k * n < WORTH * copied + LEAST:
        return False
    m, k, n = (-(-size // FITTED) * FITTED if axis in odd else size for axis, size in enumerate(sizes))
    left = _fitted(cupy, a, (m, k)) if odd & {0, 1} else a
    right = _fitted(cupy, b, (k, n)) if odd & {1, 2} else b
    target = cupy.empty((m, n), out.dtype) if odd & {0, 2} else out
    _multiply(cupy, _operand(cupy, left, ()), _operand(cupy, right, ()), target)
    if target is not out:
        _fit(cupy, target, out)
    return True


def _fitted(cupy: Any, x: Any, shape: Size2d) -> Any:
    """A copy of a matrix with zeros behind its rows and below them, in its own order of memory."""
    if x.strides[1] != x.itemsize:
        return _fitted(cupy, cupy.ascontiguousarray(x.T), shape[::-1]).T
    _fit(cupy, x, made := cupy.empty(shape, x.dtype))
    return made


def _fit(cupy: Any, x: Any, out: Any) -> None:
    from .device import gpu

    launch = gpu(cupy.cuda.runtime.getDevice()).kernel(kernel_file("fit", S=x.dtype.name), "fit")
    grid = (len(out), -(-out.shape[1] // 2048))
    launch(grid, (256,), (x, out, *x.shape, x.strides[0] // x.itemsize, out.shape[1]))


def _multiply(cupy: Any, a: MatrixOperand, b: MatrixOperand, out: Any) -> None:
    """What is a row for us is a column for cuBLAS: it makes the transpose of the result from those of `b` and `a`."""
    (left, left_turned, left_row, left_step), (right, right_turned, right_row, right_step) = a, b
    m, n = out.shape[-2:]
    kind, compute = KINDS[out.dtype.name]
    call, handle = cublas(cupy), cupy.cuda.device.get_cublas_handle()
    stream = cupy.cuda.get_current_stream()
    if stream not in _workspaces:
        _workspaces[stream] = cupy.empty(WORKSPACE, "uint8")
    call("SetStream_v2", handle, stream.ptr)
    call("SetWorkspace_v2", handle, _workspaces[stream].data.ptr, WORKSPACE)  # else a graph takes its own
    one, zero, sizes = ONE[compute], ZERO[compute], (int(right_turned), int(left_turned), n, m, left.shape[-1])
    matrices = (right.data.ptr, kind, right_row), (left.data.ptr, kind, left_row), (out.data.ptr, kind, n)
    if out.size == m * n:
        call("GemmEx", handle, *sizes, one, *matrices[0], *matrices[1], zero, *matrices[2], compute, DEFAULT_ALGORITHM)
        return
    first, second, third = (
        (*matrix, step) for matrix, step in zip(matrices, (right_step, left_step, m * n), strict=True)
    )
    count = out.size // (m * n)
    call("GemmStridedBatchedEx", handle, *sizes, one, *first, *second, zero, *third, count, compute, DEFAULT_ALGORITHM)


def _operand(cupy: Any, x: Any, batch: Sequence[int]) -> MatrixOperand:
    """`x` as cuBLAS takes it: one stride from matrix to matrix, one from row (or column) to the next; else a copy."""
    strides = [s // x.itemsize for s in x.strides]
    lead = len(batch) - x.ndim + 2
    own = [0 if n == 1 else s for n, s in zip(x.shape, strides[:-2])]
    steps = merged_axes(batch, [[0] * lead + own])[1][0]
    rows, columns = x.shape[-2:]
    for turned, (size, width, row, column) in enumerate(
        ((rows, columns, *strides[-2:]), (columns, rows, *strides[:-3:-1]))
    ):
        if (column == 1 or width == 1) and (row >= width or size == 1) and len(steps) == 1 and steps[0] >= 0:
            return x, bool(turned), max(row, width), steps[0]
    if len(steps) > 1:
        x = cupy.broadcast_to(x, (*batch, rows, columns))
    return _operand(cupy, cupy.ascontiguousarray(x), batch)


# -- operators -----------------------------------------------------------------------------------------------------


@kernel(linalg.matmul)
def matmul(machine: Machine, out: Any, a: Any, b: Any) -> list[Call]:
    """A batch of rows by one matrix is one product."""
    if b.ndim == 2 < a.ndim and out.size and a.flags.c_contiguous and out.flags.c_contiguous:
        a, out = a.reshape(-1, a.shape[-1]), out.reshape(-1, out.shape[-1])
    return [partial(machine.xp.matmul, a, b, out=out)]


@cache
def cublas(cupy: Any) -> Callable[..., None]:
    """Calls a function of the library that CuPy is linked with; RuntimeError with the status that is not 0."""
    library = ctypes.CDLL(cupy.cuda.cublas.__file__)  # which also has the names of what it is linked with
    pointer, number, stride = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    matrix, sizes = [pointer, number, number], [number] * 5
    apart = [*matrix, stride]
    arguments = {
        "SetStream_v2": [pointer, pointer],
        "SetWorkspace_v2": [pointer, pointer, ctypes.c_size_t],
        "GemmEx": [pointer, *sizes, pointer, *matrix, *matrix, pointer, *matrix, number, number],
        "GemmStridedBatchedEx": [
            pointer, *sizes, pointer, *apart, *apart, pointer, *apart, number, number, number,
        ],
    }  # fmt: skip
    functions = {name: getattr(library, f"cublas{name}") for name in arguments}
    for name, types in arguments.items():
        functions[name].argtypes = types

    def call(name: str, *given: Any) -> None:
        if status := functions[name](*given):
            raise RuntimeError(f"cublas{name} fails with status {status}")

    return call
