"""A small convolution, a bias, a relu and a 2x2 max-pooling as one matrix product, for images with the batch innermost.

The four pixels of a pooling window need one common patch, one pixel larger than the kernel. Columns of such patches
times the kernel at its four places ("phases") give the four convolution values of every window side by side, and the
pooling is the maximum of four contiguous blocks. All but the pooling is linear, and the ops come in pairs of adjoints.

Gain: see `conv_pool.py`, the pass that makes these operators. Off by leaving `fuse_conv_pool` out of `passes=` or
`HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..core.errors import ShapeError
from ..core.kernels import Call
from ..core.op import op
from ..core.types import TensorType
from ..ops.window import Pair

LEAST = 1 << 18  # elements of a lane
STRIP = 16  # images transposed at a time: more would fall on the same cache lines
PHASES = ((0, 0), (0, 1), (1, 0), (1, 1))  # row-major, as max_pool2d numbers the taps of a window


def _pooled(size: Pair, kernel: Pair, padding: Any) -> Pair:
    """Rows and columns after convolution and pooling; an odd last row of the convolution is never computed."""
    return tuple((s + sum(p) - k + 1) // 2 for s, p, k in zip(size, padding, kernel))


def _frame(size: Pair, padding: Any) -> tuple[Pair, tuple[slice, slice]]:
    """The padded size, and where the image lies in it."""
    padded = tuple(s + sum(p) for s, p in zip(size, padding))
    rows, columns = (slice(before, before + s) for s, (before, _) in zip(size, padding))
    return padded, (rows, columns)


def _taps(kernel: Pair, pooled: Pair) -> Iterator[tuple[slice, slice]]:
    """For each pixel of the patch, in row order, the padded rows and columns it meets."""
    for i in range(kernel[0] + 1):
        for j in range(kernel[1] + 1):
            yield slice(i, i + 2 * pooled[0] - 1, 2), slice(j, j + 2 * pooled[1] - 1, 2)


def _patch(kernel: Pair) -> int:
    return (kernel[0] + 1) * (kernel[1] + 1)


def _columns_type(x: TensorType, *, kernel: Pair, padding: Any) -> TensorType:
    rows, columns = _pooled(x.shape[1:3], kernel, padding)
    return TensorType((x.shape[0] * _patch(kernel) + 1, rows * columns * x.shape[3]), x.dtype)


@op(infer=_columns_type, differentiable=False)
def phase_columns(xp: ModuleType, x: Any, *, kernel: Pair, padding: Any) -> Any:
    """Patches of images x (c, h, w, n) as columns: (c patch + 1, pooled rows x pooled columns x n); the last row is 1.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (1, 28, 28, 32))
    >>> phase_columns(x, kernel=(5, 5), padding=((2, 2), (2, 2))).shape == (37, 14 * 14 * 32)
    True
    """
    pooled = _pooled(x.shape[1:3], kernel, padding)
    padded, inner = _frame(x.shape[1:3], padding)
    frame = xp.zeros((x.shape[0], *padded, x.shape[3]), dtype=x.dtype)
    frame[:, inner[0], inner[1], :] = x
    parts = xp.stack([frame[:, rows, columns, :] for rows, columns in _taps(kernel, pooled)], axis=1)
    parts = xp.reshape(parts, (x.shape[0] * _patch(kernel), -1))
    return xp.concat([parts, xp.ones((1, parts.shape[1]), dtype=x.dtype)], axis=0)


@phase_columns.bind
def phase_columns_bind(xp: ModuleType, out: Any, x: Any, *, kernel: Pair, padding: Any) -> list[Call] | None:
    if xp is not np:
        return None
    pooled = _pooled(x.shape[1:3], kernel, padding)
    columns = out[:-1].reshape(x.shape[0], kernel[0] + 1, kernel[1] + 1, *pooled, x.shape[3])
    ones = out[-1].reshape(*pooled, x.shape[3])

    def build(part: slice) -> list[Call]:
        frame, calls = _framed(x, slice(2 * part.start, 2 * part.stop + kernel[0] - 1), padding)
        windows = _windows(frame, columns[:, :, :, part].shape)
        return [*calls, partial(np.copyto, columns[:, :, :, part], windows), partial(ones[part].fill, 1)]

    return build(slice(0, pooled[0]))


def _framed(x: np.ndarray, rows: slice, padding: Any) -> tuple[np.ndarray, list[Call]]:
    """The given rows of the padded images, and the calls that copy the images there; none if `x` can serve itself."""
    padded, (down, right) = _frame(x.shape[1:3], padding)
    if padded == x.shape[1:3] and x.strides[3] == x.itemsize:
        return x[:, rows], []
    # windows of a transposed image would be slow to copy
    frame = np.zeros((x.shape[0], rows.stop - rows.start, padded[1], x.shape[3]), x.dtype)
    first, last = max(rows.start, down.start), min(rows.stop, down.stop)
    place = frame[:, first - rows.start : last - rows.start, right]
    source = x[:, first - down.start : last - down.start]
    strips = [slice(k, k + STRIP) for k in range(0, x.shape[3], STRIP)]
    return frame, [partial(np.copyto, place[..., s], source[..., s]) for s in strips]


def _windows(frame: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The pixels (c, i, j, rows, columns, n) that taps i, j meet, as a view of the frame (c, h, w, n)."""
    c, h, w, item = frame.strides
    return as_strided(frame, shape, (c, h, w, 2 * h, 2 * w, item))


def _images_type(d: TensorType, *, size: Pair, kernel: Pair, padding: Any) -> TensorType:
    rows, columns = _pooled(size, kernel, padding)
    return TensorType((d.shape[0] // _patch(kernel), *size, d.shape[1] // (rows * columns)), d.dtype)


@op(infer=_images_type, differentiable=False)
def phase_columns_dx(xp: ModuleType, d: Any, *, size: Pair, kernel: Pair, padding: Any) -> Any:
    """The adjoint of `phase_columns` without its last row: columns d added back to images (c, *size, n).

    >>> import hetu as ht
    >>> d = ht.placeholder("d", (36, 14 * 14 * 32))
    >>> phase_columns_dx(d, size=(28, 28), kernel=(5, 5), padding=((2, 2), (2, 2))).shape
    (1, 28, 28, 32)
    """
    pooled = _pooled(size, kernel, padding)
    padded, inner = _frame(size, padding)
    parts = xp.reshape(d, (d.shape[0] // _patch(kernel), _patch(kernel), *pooled, -1))
    frame = xp.zeros((parts.shape[0], *padded, parts.shape[4]), dtype=d.dtype)
    for tap, (rows, columns) in enumerate(_taps(kernel, pooled)):
        frame[:, rows, columns, :] += parts[:, tap, ...]
    return frame[:, inner[0], inner[1], :]


@phase_columns_dx.bind
def phase_columns_dx_bind(
    xp: ModuleType, out: Any, d: Any, *, size: Pair, kernel: Pair, padding: Any
) -> list[Call] | None:
    if xp is not np or not d.flags.c_contiguous:
        return None
    padded, inner = _frame(size, padding)
    frame = out if padded == size else np.empty((out.shape[0], *padded, out.shape[3]), out.dtype)
    columns = d.reshape(out.shape[0], kernel[0] + 1, kernel[1] + 1, *_pooled(size, kernel, padding), out.shape[3])

    def build(part: slice) -> list[Call]:
        calls: list[Call] = [partial(frame[part].fill, 0)]
        for i in range(0, kernel[0] + 1, 2):  # four taps at a time: their pixels lie apart
            for j in range(0, kernel[1] + 1, 2):
                added = columns[part, i : i + 2, j : j + 2]
                place = _windows(frame[part, i:, j:], added.shape)
                calls.append(partial(np.add, place, added, place))
        if frame is not out:
            calls.append(partial(np.copyto, out[part], frame[part, inner[0], inner[1]]))
        return calls

    return build(slice(0, len(out)))


def _weights_type(w: TensorType, b: TensorType) -> TensorType:
    if w.ndim != 4 or b.shape != w.shape[:1]:
        raise ShapeError(f"got {w} and {b}, wanted (o, c, i, j) and (o,)", fix="one bias an output channel")
    return TensorType((4 * w.shape[0], w.shape[1] * _patch(w.shape[2:]) + 1), w.dtype)


@op(infer=_weights_type, differentiable=False)
def phase_weights(xp: ModuleType, w: Any, b: Any) -> Any:
    """Kernels w (o, c, i, j) at their four places in the patch, and the bias b (o,) last: (4 o, c patch + 1).

    >>> import hetu as ht
    >>> phase_weights(ht.placeholder("w", (16, 6, 5, 5)), ht.placeholder("b", (16,))).shape
    (64, 217)
    """
    o, c, i, j = w.shape
    places = xp.zeros((4, o, c, i + 1, j + 1), dtype=w.dtype)
    for phase, (down, right) in enumerate(PHASES):
        places[phase, :, :, down : down + i, right : right + j] = w
    bias = xp.broadcast_to(xp.reshape(b, (1, o, 1)), (4, o, 1))
    return xp.reshape(xp.concat([xp.reshape(places, (4, o, -1)), bias], axis=2), (4 * o, -1))


@phase_weights.bind
def phase_weights_bind(xp: ModuleType, out: Any, w: Any, b: Any) -> list[Call] | None:
    if xp is not np:
        return None
    phases = out.reshape(4, w.shape[0], -1)
    calls: list[Call] = [partial(out.fill, 0)]
    calls += [partial(np.copyto, place, w) for place in _places(out, w.shape)]
    return [*calls, partial(np.copyto, phases[:, :, -1], b)]


def _places(weights: np.ndarray, shape: tuple[int, ...]) -> list[np.ndarray]:
    """Where in the phase weights each of the four copies of a kernel of the given shape lies."""
    o, c, i, j = shape
    row, item = weights.strides
    spread = as_strided(
        weights, (4, o, c, i + 1, j + 1), (o * row, row, (i + 1) * (j + 1) * item, (j + 1) * item, item)
    )
    return [spread[k, :, :, down : down + i, right : right + j] for k, (down, right) in enumerate(PHASES)]


def _kernels_type(d: TensorType, *, kernel: Pair) -> tuple[TensorType, TensorType]:
    o = d.shape[0] // 4
    return TensorType((o, d.shape[1] // _patch(kernel), *kernel), d.dtype), TensorType((o,), d.dtype)


@op(infer=_kernels_type, differentiable=False)
def phase_weights_dx(xp: ModuleType, d: Any, *, kernel: Pair) -> tuple[Any, Any]:
    """The adjoint of `phase_weights`: the gradients of (w, b) from that of the four places.

    >>> import hetu as ht
    >>> [str(t.type) for t in phase_weights_dx(ht.placeholder("d", (64, 217)), kernel=(5, 5))]
    ['f32[16, 6, 5, 5]', 'f32[16]']
    """
    (i, j), o = kernel, d.shape[0] // 4
    phases = xp.reshape(d, (4, o, -1))
    places = xp.reshape(phases[:, :, :-1], (4, o, -1, i + 1, j + 1))
    parts = [places[k, :, :, down : down + i, right : right + j] for k, (down, right) in enumerate(PHASES)]
    return parts[0] + parts[1] + parts[2] + parts[3], xp.sum(phases[:, :, -1], axis=0, dtype=d.dtype)


@phase_weights_dx.bind
def phase_weights_dx_bind(xp: ModuleType, out: Any, d: Any, *, kernel: Pair) -> list[Call] | None:
    if xp is not np:
        return None
    w, b = out
    first, *others = _places(d, w.shape)
    calls: list[Call] = [partial(np.copyto, w, first)]
    calls += [partial(np.add, w, place, w) for place in others]
    return [*calls, partial(np.sum, d[:, -1].reshape(4, len(b)), 0, None, b)]


def _pool_type(z: TensorType) -> tuple[TensorType, TensorType]:
    o, positions = z.shape[0] // 4, z.shape[1]
    return TensorType((o, positions), z.dtype), TensorType((4, o, positions), np.dtype(bool))


@op(infer=_pool_type, differentiable=False)
def phase_pool(xp: ModuleType, z: Any) -> tuple[Any, Any]:
    """relu of the maximum over the four phases z (4 o, positions), and which phase it came from (4, o, positions).

    Of equal values the first counts; where the relu cuts off, none does.

    >>> import hetu as ht
    >>> y, chosen = phase_pool([[-1.0, 2.0], [-1.0, 3.0], [-1.0, 3.0], [-2.0, 0.0]])
    >>> ht.evaluate(y).tolist(), ht.evaluate(chosen)[:, 0, 1].tolist()
    ([[0.0, 3.0]], [False, True, False, False])
    """
    z = xp.reshape(z, (4, z.shape[0] // 4, z.shape[1]))
    a, b = xp.maximum(z[0, ...], z[1, ...]), xp.maximum(z[2, ...], z[3, ...])
    top = xp.maximum(a, b)
    upper, lower = (top > 0) & ~(b > a), (top > 0) & (b > a)
    right, right_below = z[1, ...] > z[0, ...], z[3, ...] > z[2, ...]
    chosen = [upper & ~right, upper & right, lower & ~right_below, lower & right_below]
    return xp.maximum(top, 0), xp.stack(chosen, axis=0)


@phase_pool.bind
def phase_pool_bind(xp: ModuleType, out: Any, z: Any) -> list[Call] | None:
    if xp is not np or not z.flags.c_contiguous:
        return None
    (y, chosen), z = out, z.reshape(out[1].shape)

    def build(part: slice) -> list[Call]:
        return _pool_calls(y[:, part], chosen[..., part], z[..., part])

    return build(slice(0, y.shape[1]))


def _pool_calls(y: np.ndarray, chosen: np.ndarray, z: np.ndarray) -> list[Call]:
    """Maxima and comparisons of pairs; the four masks by bit operations on bytes."""
    below, positive, zeros = np.empty(y.shape, y.dtype), np.empty(y.shape, bool), np.zeros(y.shape[1], y.dtype)
    return [
        partial(np.greater, z[1], z[0], chosen[1]),
        partial(np.greater, z[3], z[2], chosen[3]),
        partial(np.maximum, z[0], z[1], out=y),
        partial(np.maximum, z[2], z[3], out=below),
        partial(np.greater, below, y, chosen[2]),
        partial(np.maximum, y, below, out=y),
        partial(np.maximum, y, zeros, out=y),
        partial(np.greater, y, zeros, positive),
        partial(np.greater, positive, chosen[2], chosen[0]),  # positive and in the upper row
        partial(np.logical_and, positive, chosen[2], chosen[2]),
        partial(np.logical_and, chosen[0], chosen[1], chosen[1]),
        partial(np.logical_and, chosen[2], chosen[3], chosen[3]),
        partial(np.greater, chosen[0], chosen[1], chosen[0]),
        partial(np.greater, chosen[2], chosen[3], chosen[2]),
    ]
