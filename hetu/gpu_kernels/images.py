"""Launches the kernels of `images.cu`: pooling, and convolution as products of unfolded images (by cuBLAS).

Ignored on purpose: implicit products and Winograd's transform, which need no columns in memory but tensor cores to pay.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from .machine import Call, Machine, contiguous, spread
from .source import kernel_file

CHUNK = 1 << 26  # elements of the column buffer, which images share: 256 MB of float32

Pair = tuple[int, int]


def _window(size: Pair, positions: Pair, kernel: Pair, stride: Pair, padding: Any, dilation: Pair = (1, 1)) -> tuple:
    """The arguments of a kernel after its arrays and their size."""
    return (*size, *positions, *kernel, *stride, padding[0][0], padding[1][0], *dilation)


def _pooling(
    name: str,
    machine: Machine,
    arrays: tuple[Any, ...],
    result: Any,
    size: Pair,
    positions: Pair,
    attrs: dict[str, Any],
) -> list[Call] | None:
    if not contiguous(*arrays):
        return None
    kernel = machine.kernel(kernel_file("images", S=result.dtype.name), name)
    return [partial(kernel, *spread(result.size), (*arrays, result.size, *_window(size, positions, **attrs)))]


def max_pool2d(machine: Machine, out: Any, x: Any, **attrs: Any) -> list[Call] | None:
    return _pooling("max_pool2d", machine, (x, *out), out[0], x.shape[2:], out[0].shape[2:], attrs)


def max_pool2d_dx(machine: Machine, out: Any, g: Any, taps: Any, *, size: Pair, **attrs: Any) -> list[Call] | None:
    return _pooling("max_pool2d_dx", machine, (g, taps, out), out, size, g.shape[2:], attrs)


def max_pool2d_pick(machine: Machine, out: Any, x: Any, taps: Any, **attrs: Any) -> list[Call] | None:
    return _pooling("max_pool2d_pick", machine, (x, taps, out), out, x.shape[2:], out.shape[2:], attrs)


def avg_pool2d(machine: Machine, out: Any, x: Any, **attrs: Any) -> list[Call] | None:
    return _pooling("avg_pool2d", machine, (x, out), out, x.shape[2:], out.shape[2:], attrs)


def avg_pool2d_dx(machine: Machine, out: Any, g: Any, *, size: Pair, **attrs: Any) -> list[Call] | None:
    return _pooling("avg_pool2d_dx", machine, (g, out), out, size, g.shape[2:], attrs)


# -- convolution -----------------------------------------------------------------------------------------------------


class _Columns:
    """The column buffer of as many images as fit `CHUNK`, as matrices (images, groups, channels x taps, positions)."""

    def __init__(
        self, machine: Machine, dtype: Any, images: int, channels: int, size: Pair, positions: Pair, kernel: Pair,
        stride: Pair, padding: Any, dilation: Pair, groups: int,
    ) -> None:  # fmt: skip
        self.arguments = _window(size, positions, kernel, stride, padding, dilation)
        self.text, self.machine = kernel_file("images", S=dtype.name), machine
        each = channels * prod(kernel) * prod(positions)
        self.step = max(1, min(images, CHUNK // each))
        self.buffer = machine.xp.empty((self.step, groups, channels // groups * prod(kernel), prod(positions)), dtype)
        self.chunks = [(a, min(a + self.step, images)) for a in range(0, images, self.step)]

    def unfold(self, x: Any) -> tuple[Call, Any]:
        """The call that fills the buffer from some images, and what it then holds."""
        columns = self.buffer[: len(x)]
        kernel = self.machine.kernel(self.text, "unfold")
        return partial(kernel, *spread(columns.size), (x, columns, columns.size, *self.arguments)), columns

    def fold(self, x: Any) -> tuple[Call, Any]:
        """The call that adds the buffer up into images, and the part of the buffer it reads."""
        columns = self.buffer[: len(x)]
        kernel = self.machine.kernel(self.text, "fold")
        return partial(kernel, *spread(x.size), (columns, x, x.size, *self.arguments)), columns


def _matrices(images: Any, groups: int) -> Any:
    n, channels = images.shape[:2]
    return images.reshape(n, groups, channels // groups, -1)


def _same(*arrays: Any) -> bool:
    return contiguous(*arrays) and all(a.dtype == arrays[0].dtype for a in arrays)


def conv2d(machine: Machine, out: Any, x: Any, w: Any, *, groups: int, **attrs: Any) -> list[Call] | None:
    if not _same(x, w, out):
        return None
    columns = _Columns(
        machine, x.dtype, len(x), x.shape[1], x.shape[2:], out.shape[2:], w.shape[2:], groups=groups, **attrs
    )
    weights, results, calls = w.reshape(groups, w.shape[0] // groups, -1), _matrices(out, groups), []
    for low, high in columns.chunks:
        unfold, matrices = columns.unfold(x[low:high])
        calls += [unfold, partial(machine.xp.matmul, weights, matrices, out=results[low:high])]
    return calls


def conv2d_dx(
    machine: Machine, out: Any, g: Any, w: Any, *, size: Pair, groups: int, **attrs: Any
) -> list[Call] | None:
    if not _same(g, w, out):
        return None
    columns = _Columns(machine, g.dtype, len(g), out.shape[1], size, g.shape[2:], w.shape[2:], groups=groups, **attrs)
    weights = w.reshape(groups, w.shape[0] // groups, -1).swapaxes(1, 2)
    slopes, calls = _matrices(g, groups), []
    for low, high in columns.chunks:
        fold, matrices = columns.fold(out[low:high])
        calls += [partial(machine.xp.matmul, weights, slopes[low:high], out=matrices), fold]
    return calls


def conv2d_dw(
    machine: Machine, out: Any, x: Any, g: Any, *, kernel: Pair, groups: int, **attrs: Any
) -> list[Call] | None:
    if not _same(x, g, out):
        return None
    columns = _Columns(machine, x.dtype, len(x), x.shape[1], x.shape[2:], g.shape[2:], kernel, groups=groups, **attrs)
    slopes, xp = _matrices(g, groups), machine.xp
    total = out.reshape(groups, g.shape[1] // groups, -1)
    each, part = xp.empty((columns.step, *total.shape), out.dtype), xp.empty_like(total)
    calls: list[Call] = []
    for low, high in columns.chunks:
        unfold, matrices = columns.unfold(x[low:high])
        products = each[: high - low]
        calls += [unfold, partial(xp.matmul, slopes[low:high], matrices.swapaxes(2, 3), out=products)]
        calls.append(partial(xp.sum, products, axis=0, out=part if low else total))
        calls += [partial(xp.add, total, part, total)] if low else []
    return calls
