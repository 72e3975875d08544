"""Launches the kernels of `images.cu`: max pooling and its gradient. CuPy adds up means of windows.

Convolutions that `convolution.py` leaves, those of groups, dilations, few results or float64, are CuPy's: copies of
what their windows see, and products of cuBLAS.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from ..ops import pooling
from .launchers import kernel
from .machine import Call, Machine, Size2d, contiguous, index_dtype, spread
from .source import kernel_file

LAST = (2, 3, 0, 1)  # images with their channels last, and back


def _window(size: Size2d, positions: Size2d, kernel: Size2d, stride: Size2d, padding: Any) -> tuple:
    """The arguments of a kernel after its arrays and their size."""
    return (*size, *positions, *kernel, *stride, padding[0][0], padding[1][0])


def _pooling(
    name: str,
    machine: Machine,
    arrays: tuple[Any, ...],
    result: Any,
    size: Size2d,
    positions: Size2d,
    attrs: dict[str, Any],
) -> list[Call] | None:
    if contiguous(*arrays):
        side = 1
    elif contiguous(*(a.transpose(LAST) for a in arrays)):
        side = prod(result.shape[:2])
    else:
        return None
    index = index_dtype(result.size, *(a.size for a in arrays))
    launch = machine.kernel(kernel_file("images", S=result.dtype.name, Index=index), name)
    return [partial(launch, *spread(result.size), (*arrays, result.size, side, *_window(size, positions, **attrs)))]


@kernel(pooling._max_pool2d)
def max_pool2d(machine: Machine, out: Any, x: Any, **attrs: Any) -> list[Call] | None:
    return _pooling("max_pool2d", machine, (x, *out), out[0], x.shape[2:], out[0].shape[2:], attrs)


@kernel(pooling.max_pool2d_dx)
def max_pool2d_dx(machine: Machine, out: Any, *read: Any, size: Size2d, **attrs: Any) -> list[Call] | None:
    """What is read is copied where it lies in another order than the result."""
    order, copies, inputs = (0, 1, 2, 3) if contiguous(out) else LAST, list[Call](), list[Any]()
    for x in read:
        if not x.transpose(order).flags.c_contiguous:
            laid = machine.xp.empty([x.shape[k] for k in order], x.dtype).transpose(order)
            copies.append(partial(machine.xp.copyto, laid, x))
            x = laid
        inputs.append(x)
    made = _pooling("max_pool2d_dx", machine, (*inputs, out), out, size, read[0].shape[2:], attrs)
    return made and [*copies, *made]
