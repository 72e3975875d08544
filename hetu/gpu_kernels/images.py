"""Launches the kernels of `images.cu`: pooling, and convolution as products of unfolded images (by cuBLAS).

Convolutions are those that `convolution.py` leaves: groups, dilations, few results, float64. Implicit products are left
out: they need no columns in memory, but pay only with tensor cores.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from ..ops import conv, pooling
from .launchers import kernel
from .machine import Call, Machine, Size2d, contiguous, index_dtype, spread
from .source import kernel_file

LAST = (2, 3, 0, 1)  # images with their channels last, and back
CHUNK = 1 << 24  # elements of the columns of some images: in 16 bits they stay in the second-level cache of an H100


def _window(
    size: Size2d, positions: Size2d, kernel: Size2d, stride: Size2d, padding: Any, dilation: Size2d = (1, 1)
) -> tuple:
    """The arguments of a kernel after its arrays and their size."""
    return (*size, *positions, *kernel, *stride, padding[0][0], padding[1][0], *dilation)


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


@kernel(pooling.max_pool2d_pick)
def max_pool2d_pick(machine: Machine, out: Any, x: Any, taps: Any, **attrs: Any) -> list[Call] | None:
    return _pooling("max_pool2d_pick", machine, (x, taps, out), out, x.shape[2:], out.shape[2:], attrs)


@kernel(pooling.avg_pool2d)
def avg_pool2d(machine: Machine, out: Any, x: Any, **attrs: Any) -> list[Call] | None:
    return _pooling("avg_pool2d", machine, (x, out), out, x.shape[2:], out.shape[2:], attrs)


def pool_dx(name: str, machine: Machine, out: Any, *read: Any, size: Size2d, **attrs: Any) -> list[Call] | None:
    """What is read is copied where it lies in another order than the result."""
    order, copies, inputs = (0, 1, 2, 3) if contiguous(out) else LAST, list[Call](), list[Any]()
    for x in read:
        if not x.transpose(order).flags.c_contiguous:
            laid = machine.xp.empty([x.shape[k] for k in order], x.dtype).transpose(order)
            copies.append(partial(machine.xp.copyto, laid, x))
            x = laid
        inputs.append(x)
    made = _pooling(name, machine, (*inputs, out), out, size, read[0].shape[2:], attrs)
    return made and [*copies, *made]


for _op in (pooling.max_pool2d_dx, pooling.avg_pool2d_dx):
    kernel(_op)(partial(pool_dx, _op.name))


# -- convolution -----------------------------------------------------------------------------------------------------


class _Matrices:
    """The operands of a convolution as matrices (groups, channels x taps, images x positions).

    They hold as many images as fit `CHUNK`. All lie in one matrix: CuPy would multiply them one by one, and first copy
    what is transposed. cuBLAS adds products of 16 bits up in float32.
    """

    def __init__(
        self, machine: Machine, x: Any, w: Any, y: Any, *, stride: Size2d, padding: Any, dilation: Size2d, groups: int
    ) -> None:
        self.machine, self.groups, self.positions = machine, groups, prod(y.shape[2:])
        self.rows, self.channels = x.shape[1] * prod(w.shape[2:]), x.shape[1]
        step = max(1, min(len(x), CHUNK // (self.rows * self.positions)))
        self.chunks = [slice(a, min(a + step, len(x))) for a in range(0, len(x), step)]
        self.arguments = _window(x.shape[2:], y.shape[2:], w.shape[2:], stride, padding, dilation)
        index = index_dtype(step * self.rows * self.positions, step * prod(x.shape[1:]))
        self.text = kernel_file("images", S=x.dtype.name, Index=index)
        sizes = (step * rows * self.positions for rows in (self.rows, y.shape[1]))
        self.columns, self.results = (machine.xp.empty(size, x.dtype) for size in sizes)

    def unfolded(self, x: Any) -> tuple[Call, Any]:
        """The columns of some images, and the call that writes them there."""
        columns = self._cut(self.columns, len(x), self.rows)
        return self._launch("unfold", x, columns, len(x)), columns

    def folded(self, x: Any) -> tuple[Any, Call]:
        """Columns, and the call that adds them up into some images."""
        columns = self._cut(self.columns, len(x), self.rows)
        return columns, self._launch("fold", columns, x, len(x))

    def turned(self, y: Any, back: bool = False) -> tuple[Call, Any]:
        """A matrix of results of some images, and the call that copies them there, or from there `back`."""
        matrix, images = self._cut(self.results, len(y), y.shape[1]), y.reshape(len(y), self.groups, -1, self.positions)
        view = matrix.reshape(self.groups, -1, len(y), self.positions).transpose(2, 0, 1, 3)
        return partial(self.machine.xp.copyto, *((images, view) if back else (view, images))), matrix

    def product(self, a: Any, b: Any, out: Any) -> Call:
        if self.groups == 1:
            a, b, out = a[0], b[0], out[0]
        return partial(self.machine.xp.matmul, a, b, out=out)

    def _cut(self, buffer: Any, images: int, rows: int) -> Any:
        return buffer[: images * rows * self.positions].reshape(self.groups, rows // self.groups, -1)

    def _launch(self, name: str, source: Any, target: Any, images: int) -> Call:
        launch = self.machine.kernel(self.text, name)
        arguments = (source, target, target.size, images, self.channels, *self.arguments)
        return partial(launch, *spread(target.size), arguments)


def _weights(w: Any, groups: int) -> Any:
    return w.reshape(groups, w.shape[0] // groups, -1)


def _same(*arrays: Any) -> bool:
    return contiguous(*arrays) and all(a.dtype == arrays[0].dtype for a in arrays)


def _is_plain(w: Any, *, stride: Size2d, padding: Any, groups: int, **_: Any) -> bool:
    """Whether images are their own columns: a product of each with the weights, and nothing is copied."""
    return w.shape[2:] == stride == (1, 1) and groups == 1 and not any(p for side in padding for p in side)


def _flat(images: Any) -> Any:
    return images.reshape(*images.shape[:2], -1)


@kernel(conv.conv2d)
def conv2d(machine: Machine, out: Any, x: Any, w: Any, **attrs: Any) -> list[Call] | None:
    if not _same(x, w, out):
        return None
    if _is_plain(w, **attrs):
        return [partial(machine.xp.matmul, w.reshape(w.shape[:2]), _flat(x), out=_flat(out))]
    matrices, calls = _Matrices(machine, x, w, out, **attrs), []
    for part in matrices.chunks:
        (unfold, columns), (turn, results) = matrices.unfolded(x[part]), matrices.turned(out[part], back=True)
        calls += [unfold, matrices.product(_weights(w, attrs["groups"]), columns, results), turn]
    return calls


@kernel(conv.conv2d_dx)
def conv2d_dx(machine: Machine, out: Any, g: Any, w: Any, *, size: Size2d, **attrs: Any) -> list[Call] | None:
    if not _same(g, w, out):
        return None
    if _is_plain(w, **attrs):
        return [partial(machine.xp.matmul, w.reshape(w.shape[:2]).T, _flat(g), out=_flat(out))]
    matrices, calls = _Matrices(machine, out, w, g, **attrs), []
    for part in matrices.chunks:
        (turn, slopes), (columns, fold) = matrices.turned(g[part]), matrices.folded(out[part])
        weights = _weights(w, attrs["groups"]).swapaxes(1, 2)
        calls += [turn, matrices.product(weights, slopes, columns), fold]
    return calls


@kernel(conv.conv2d_dw)
def conv2d_dw(machine: Machine, out: Any, x: Any, g: Any, *, kernel: Size2d, **attrs: Any) -> list[Call] | None:
    """The transpose, as of the two operands the results are the smaller to copy, where there are groups."""
    if not _same(x, g, out):
        return None
    matrices, calls, xp = _Matrices(machine, x, out, g, **attrs), [], machine.xp
    result = _weights(out, attrs["groups"]).swapaxes(1, 2)
    total, more = (xp.empty(result.shape, out.dtype) for _ in range(2))
    for part in matrices.chunks:
        (unfold, columns), (turn, slopes) = matrices.unfolded(x[part]), matrices.turned(g[part])
        calls += [unfold, turn, matrices.product(columns, slopes.swapaxes(1, 2), more if part.start else total)]
        calls += [partial(xp.add, total, more, total)] if part.start else []
    return [*calls, partial(xp.copyto, result, total)]
