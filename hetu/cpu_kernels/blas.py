"""Calls into BLAS, with every argument converted once.

`np.matmul` copies where strides are unusual, and converts its arguments on every call. Here a call is bound to its
arrays when a program is made: as one of a table that C walks, or without a compiler as a `functools.partial` of a C
function, which costs about 0.5 us. Each function returns None whenever BLAS cannot do exactly what was asked (no
library, dtypes, strides, overlap); the caller then takes its numpy path. Left out: complex numbers, factors.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.kernels import Call
from .c_calls import CCall, c_call
from .openblas import CValue, address_of, alone, function_of, get_threads

Routine = tuple[str, Callable[..., Any], type[CValue], type[CValue]]  # a C function, its types of integers and numbers

ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112  # codes of BLAS
LEAST = 1 << 21  # multiplications that are worth another thread
DIVIDED = {"gemm": 1 << 18, "gemv": 9216, "ger": 1 << 15}  # from so many on OpenBLAS itself takes several threads
BLOCK = 24  # rows of a job, as in `blas.c`
PRECISIONS = {np.dtype(np.float32): ("s", ctypes.c_float), np.dtype(np.float64): ("d", ctypes.c_double)}


def gemm(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Call | None:
    """A call that computes `out = a @ b`, or None where BLAS cannot.

    Shapes (m, k), (k, n), (m, n), none of them 0; all float32 or all float64. Each array is row- or column-major
    with any leading dimension: C and Fortran order, transposes, column slices of a wider buffer.

    >>> a, b, out = np.ones((2, 3)), np.ones((3, 2)), np.zeros((2, 2))
    >>> call = gemm(a, b, out) or functools.partial(np.matmul, a, b, out)
    >>> _ = call(); print(out)
    [[3. 3.]
     [3. 3.]]
    """
    if not (a.ndim == b.ndim == out.ndim == 2) or out.shape != (a.shape[0], b.shape[1]) or a.shape[1] != b.shape[0]:
        return None
    if not _usable(a, b, out=out):
        return None
    leading_out = _leading(out)
    if leading_out is None:  # column-major: out^T = b^T a^T is the row-major form of the same work
        return gemm(b.T, a.T, out.T) if _leading(out.T) is not None else None
    left, right = _matrix(a), _matrix(b)
    if left is None or right is None:
        return None
    (trans_a, leading_a), (trans_b, leading_b) = left, right
    values = (*out.shape, a.shape[1], 1.0, a, leading_a, b, leading_b, 0.0, out, leading_out)
    codes = (ROW_MAJOR, trans_a, trans_b)
    jobs, grain = _division(len(out), -(-LEAST // (BLOCK * out.shape[1] * a.shape[1])))
    return _bind("gemm", codes, *values, jobs=jobs, grain=grain)


def _division(rows: int, grain: int) -> tuple[int, int]:
    """Jobs of BLOCK rows, and how many are worth a thread. Fewer rows at the end are a job of their own, so that parts
    are more alike, where a part has two jobs at least; else the last job has them, too.
    """
    whole, apart = rows // BLOCK, -(-rows // BLOCK)
    grain = max(grain, whole // (2 * (get_threads() or 1)))  # each part packs all columns
    alike = apart // max(2, grain) >= whole // grain
    return (apart, max(2, grain)) if alike else (max(1, whole), grain)


def gemms(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> Call | None:
    """A call that computes `out = a @ b` for batches of at most three axes, or None where BLAS cannot.

    Without a table it is NumPy's.

    Shapes (..., m, k), (..., k, n), (..., m, n); axes of the batches are broadcast. The rest is as in `gemm`.

    >>> a, b, out = np.ones((2, 1, 3)), np.ones((3, 1)), np.zeros((2, 1, 1))
    >>> call = gemms(a, b, out) or functools.partial(np.matmul, a, b, out)
    >>> _ = call(); print(out.ravel())
    [3. 3.]
    """
    if min(a.ndim, b.ndim) < 2 or out.ndim > 5 or not out.size or not a.size or not _usable(a, b, out=out):
        return None
    batch = (*(1,) * (5 - out.ndim), *out.shape[:-2])
    a, b = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    out = out.reshape((*batch, *out.shape[-2:]))
    left, right, leading = _matrix(a[0, 0, 0]), _matrix(b[0, 0, 0]), _leading(out[0, 0, 0])
    if left is None or right is None or leading is None:
        return None
    strides = [s // x.itemsize for x in (a, b, out) for s in x.strides[:3]]
    if any(s % x.itemsize for x in (a, b, out) for s in x.strides):
        return None
    (trans_a, leading_a), (trans_b, leading_b) = left, right
    shape = (*out.shape[-2:], a.shape[-1])
    values = (*shape, a, leading_a, b, leading_b, out, leading, *batch, *strides)
    jobs, work = math.prod(batch), math.prod(shape)
    codes = (ROW_MAJOR, trans_a, trans_b)
    found = _found("gemm", *values)
    row = found and _row(found, "gemms", codes, *values, jobs=jobs, grain=-(-LEAST // work))
    return row or (found and alone(functools.partial(np.matmul, a, b, out), work, DIVIDED["gemm"]))


def gemv(a: np.ndarray, x: np.ndarray, out: np.ndarray) -> Call | None:
    """A call that computes `out = a @ x` for a matrix and a vector, or None where BLAS cannot.

    Shapes (m, n), (n,), (m,); vectors may have any positive stride. With `x` full of ones it is a row sum at the
    speed of memory, about four times faster than `a.sum(axis=1)`. The rest is as in `gemm`.

    >>> a, ones, sums = np.eye(2), np.ones(2), np.zeros(2)
    >>> call = gemv(a, ones, sums) or functools.partial(np.matmul, a, ones, sums)
    >>> _ = call(); print(sums)
    [1. 1.]
    """
    if (a.ndim, x.ndim, out.ndim) != (2, 1, 1) or a.shape != (out.size, x.size) or not _usable(a, x, out=out):
        return None
    matrix, step_x, step_out = _matrix(a), _increment(x), _increment(out)
    if matrix is None or step_x is None or step_out is None:
        return None
    trans, leading = matrix
    stored = a.shape if trans is NO_TRANSPOSE else a.shape[::-1]
    return _bind("gemv", (ROW_MAJOR, trans), *stored, 1.0, a, leading, x, step_x, 0.0, out, step_out)


def ger(x: np.ndarray, y: np.ndarray, out: np.ndarray) -> Call | None:
    """A call that computes `out += x y^T` for vectors of any positive stride, or None where BLAS cannot.

    Shapes (m,), (n,), (m, n). With `x` full of ones it adds `y` to every row, in a third of the time of
    `out += y`.

    >>> out = np.zeros((2, 2))
    >>> call = ger(np.ones(2), np.array([1.0, 2.0]), out)
    >>> call is None or (call(), out.tolist())[1] == [[1.0, 2.0], [1.0, 2.0]]
    True
    """
    if (x.ndim, y.ndim, out.ndim) != (1, 1, 2) or out.shape != (x.size, y.size) or not _usable(x, y, out=out):
        return None
    step_x, step_y, leading = _increment(x), _increment(y), _leading(out)
    if step_x is None or step_y is None or leading is None:
        return None
    return _bind("ger", (ROW_MAJOR,), *out.shape, 1.0, x, step_x, y, step_y, out, leading)


def _bind(name: str, codes: Sequence[int], *arguments: object, jobs: int = 1, grain: int = 1) -> Any:
    """The C function `name` as a call without arguments: of a table where C can walk it, else of Python.

    `codes` say how matrices lie, `arguments` are Python values in the order C wants them.
    """
    found = _found(name, *arguments)
    call = found and _row(found, name, codes, *arguments, jobs=jobs, grain=grain)
    if call is not None or found is None:
        return call
    _, function, integer, real = found
    values = (_c_value(value, integer, real) for value in arguments)
    made = functools.partial(function, *map(ctypes.c_int.from_param, codes), *values)
    made.arguments = arguments  # C holds bare addresses; this keeps the arrays alive
    sizes = [size for size in arguments[: 3 if name == "gemm" else 2] if isinstance(size, int)]
    return alone(made, math.prod(sizes), DIVIDED[name])


def _row(found: Routine, row: str, codes: Sequence[int], *arguments: object, jobs: int, grain: int) -> CCall | None:
    """The function `row` of blas.c, which calls the C function that was found, as a row of a table."""
    name, _, integer, real = found
    number = "long long" if integer is ctypes.c_int64 else "int"
    words = address_of(name), *codes, *arguments, jobs
    return c_call("blas.c", row, np.dtype(real), *words, jobs=jobs, grain=grain, INT=number)


def _found(name: str, *arguments: object) -> Routine | None:
    """The C function, or None where it cannot take these arguments."""
    dtype = next(value.dtype for value in arguments if isinstance(value, np.ndarray))
    letter, real = PRECISIONS[dtype]
    full = f"cblas_{letter}{name}"
    found = function_of(full)
    if found is None:
        return None
    for value in arguments:
        if isinstance(value, int) and found[1](value).value != value:  # for a build with 32-bit integers
            return None
    return full, *found, real


def _c_value(value: object, integer: type[CValue], real: type[CValue]) -> CValue:
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p.from_param(value.ctypes.data)
    return integer.from_param(value) if isinstance(value, int) else real.from_param(value)


def _usable(*inputs: np.ndarray, out: np.ndarray) -> bool:
    """Whether dtypes are the same real one, memory is aligned, nothing is empty and `out` lies apart from inputs."""
    arrays = (*inputs, out)
    if out.dtype not in PRECISIONS or any(array.dtype != out.dtype for array in arrays):
        return False
    if not out.flags.writeable or any(not array.flags.aligned or array.size == 0 for array in arrays):
        return False
    return not any(_overlap(array, out) for array in inputs)


def _overlap(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays share an element; bounds alone would refuse column slices of one buffer."""
    try:
        return np.may_share_memory(x, y) and np.shares_memory(x, y, max_work=100_000)
    except np.exceptions.TooHardError:
        return True


def reads(x: np.ndarray) -> bool:
    """Whether BLAS can read the matrices of a batch, which is not empty, as they lie."""
    return _matrix(x[(0,) * (x.ndim - 2)]) is not None


def _matrix(x: np.ndarray) -> tuple[int, int] | None:
    """(transposed or not, leading dimension) of a matrix as BLAS sees it."""
    for trans, array in ((NO_TRANSPOSE, x), (TRANSPOSE, x.T)):
        leading = _leading(array)
        if leading is not None:
            return trans, leading
    return None


def _leading(x: np.ndarray) -> int | None:
    """Leading dimension of a row-major matrix, or None if it is not one.

    The stride of an axis of size 1 means nothing. `max(stride, columns)` would be wrong elsewhere: it turns a
    broadcast row (stride 0) or overlapping rows into a read of foreign memory.
    """
    (rows, columns), (row_stride, column_stride) = x.shape, x.strides
    if columns > 1 and column_stride != x.itemsize:
        return None
    if rows == 1:
        return columns
    if row_stride % x.itemsize or row_stride < columns * x.itemsize:
        return None
    return row_stride // x.itemsize


def _increment(x: np.ndarray) -> int | None:
    """Step between the elements of a vector, or None if it is not positive."""
    if x.size == 1:
        return 1
    (stride,) = x.strides
    return None if stride <= 0 or stride % x.itemsize else stride // x.itemsize
