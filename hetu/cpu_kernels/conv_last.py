"""Convolution of images (h, w, n, c), the operators that the pass `channels_last` makes.

A patch is a few long runs of memory, so that unfolding is a fast copy and every product one BLAS call; 3x3 kernels go
through `winograd.py`. Gain: 1.92 times the speed of ResNet-18, together with that pass. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.kernels import Call
from ..ops.window import Pair, Window
from ..passes.conv_last import conv2d_last, conv2d_last_dw, conv2d_last_dx
from . import blas, lanes, winograd
from .blocks import Slices, blocks, extent
from .recipes import kernel

CHUNK = 1 << 18  # numbers of a column buffer: 1 MB of float32 stays in the second-level cache
LEAST_ROWS = 512  # of a column buffer: fewer would leave BLAS packing kernels most of the time
LEAST_COPY = 1 << 15  # numbers of a kernel that a lane copies
FEW = 8  # channels that are too short a run to be copied as one


class _Patches:
    """Patches of a block of pixels as rows (positions, kernel rows x kernel columns x channels) of one buffer."""

    def __init__(self, pieces: list[Slices], x: np.ndarray, window: Window, scratch: Scratch) -> None:
        self.x, self.window, (rows, columns) = x, window, extent(pieces[0])
        self.numbers = window.kernel[0] * window.kernel[1] * x[0, 0].size
        self.buffer = scratch.empty((rows * columns * self.numbers,), x.dtype)

    def matrix(self, piece: Slices) -> np.ndarray:
        rows, columns = extent(piece)
        pixels, used = rows * columns * self.x.shape[2], self.buffer[: rows * columns * self.numbers]
        return used.reshape(pixels, -1) if self.x.shape[3] >= FEW else used.reshape(-1, pixels).T

    def _taps(self, piece: Slices) -> Iterator[tuple[np.ndarray, np.ndarray, Slices]]:
        """For each tap what the buffer has of it, the pixels that it meets, and which of its places meet any."""
        pixel, channels = self.x.shape[2:]
        if channels >= FEW:
            taps = np.moveaxis(self.matrix(piece).reshape(*extent(piece), pixel, -1, channels), 3, 0)
        else:
            taps = np.moveaxis(self.matrix(piece).T.reshape(-1, channels, *extent(piece), pixel), 1, -1)
        for seen, tap in zip(taps, np.ndindex(self.window.kernel)):
            pairs = [self._meets(axis, t, part) for axis, (t, part) in enumerate(zip(tap, piece))]
            pixels, places = zip(*pairs)
            yield seen, self.x[pixels], places

    def _meets(self, axis: int, tap: int, part: slice) -> tuple[slice, slice]:
        """Along one axis the pixels that a tap meets, and at which positions of a part."""
        step, size, first = self.window.stride[axis], self.x.shape[axis], tap - self.window.padding[axis][0]
        start = min(max(part.start, -(first // step)), part.stop)
        stop = max(start, min(part.stop, (size - 1 - first) // step + 1))
        pixels = slice(start * step + first, (stop - 1) * step + first + 1, step) if start < stop else slice(0)
        return pixels, slice(start - part.start, stop - part.start)

    def gather(self, piece: Slices) -> list[Call]:
        """Calls that fill the buffer from the images."""
        calls: list[Call] = []
        for seen, pixels, (down, right) in self._taps(piece):
            outside = (seen[: down.start], seen[down.stop :], seen[down, : right.start], seen[down, right.stop :])
            calls += [partial(part.fill, 0) for part in outside if part.size]
            if pixels.size:
                calls.append(_copy(seen[down, right], pixels))
        return calls

    def scatter(self, piece: Slices) -> list[Call]:
        """Calls that add the buffer to the images it belongs to, of several images side by side."""
        met = [(pixels, seen[where]) for seen, pixels, where in self._taps(piece) if pixels.size]

        def build(part: slice) -> list[Call]:
            pairs = [(pixels[:, :, part], seen[:, :, part]) for pixels, seen in met]
            return [partial(np.add, pixels, seen, pixels) for pixels, seen in pairs]

        pixel = self.matrix(piece).size // self.x.shape[2]
        return lanes.over(self.x.shape[2], build, -(-CHUNK // pixel))


def _copy(target: np.ndarray, x: np.ndarray) -> Call:
    """A copy of pixels, each as one thing where its channels lie together."""
    if x.strides[3] == target.strides[3] == x.itemsize:
        pixel = np.dtype((np.void, x.shape[3] * x.itemsize))
        return partial(np.copyto, target.view(pixel), x.view(pixel))
    return partial(np.copyto, target, x)


def _pieces(images: np.ndarray, x: np.ndarray, kernel: Pair, most: int) -> list[Slices]:
    """The rows and columns of images whose patches of `x` are handled at a time."""
    width = kernel[0] * kernel[1] * x.shape[3]
    return blocks(images.shape[:2], width * x.shape[2], max(most, width * LEAST_ROWS))


def _together(w: np.ndarray, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """A buffer (o, i x j x c) for kernels (o, c, i, j), as `_Patches` wants them, and the same seen as they are."""
    o, c, i, j = w.shape
    matrix = scratch.empty((o, i * j * c), w.dtype)
    return matrix, matrix.reshape(o, i, j, c).transpose(0, 3, 1, 2)


def _copies(target: np.ndarray, x: np.ndarray) -> list[Call]:
    """Calls for a copy of kernels into another order, side by side."""
    least = -(-LEAST_COPY * len(x) // x.size)
    return lanes.over(len(x), lambda part: [partial(np.copyto, target[part], x[part])], least)


def _binds(xp: ModuleType, out: Any, *arrays: Any) -> bool:
    return out.dtype.char in "fd" and all(a.dtype == out.dtype and a.size for a in (out, *arrays))


def _matrix(images: np.ndarray, piece: Slices) -> np.ndarray:
    """A block of images as a matrix (pixels, channels)."""
    return images[piece].reshape(-1, images.shape[3])


@kernel(conv2d_last)
def conv2d_last_bind(
    xp: ModuleType, out: Any, x: Any, w: Any, *, stride: Pair, padding: Any, scratch: Scratch
) -> list[Call] | None:
    if not _binds(xp, out, x, w) or not w.flags.c_contiguous or not out.flags.c_contiguous:
        return None
    window = Window(w.shape[2:], stride, padding)
    if winograd.suits(w.shape[:2], x.shape[:2], window, 1):
        return winograd.correlate(x, w, out, window, scratch)
    pieces, (kernels, seen) = _pieces(out, x, window.kernel, CHUNK), _together(w, scratch)

    def build(part: slice) -> list[Call]:
        patches, calls = _Patches(pieces[part], x, window, scratch), []
        for piece in pieces[part]:
            calls += [*patches.gather(piece), blas.product(patches.matrix(piece), kernels.T, _matrix(out, piece))]
        return calls

    return [*_copies(seen, w), *lanes.over(len(pieces), build)]


@kernel(conv2d_last_dx)
def conv2d_last_dx_bind(
    xp: ModuleType, out: Any, g: Any, w: Any, *, size: Pair, stride: Pair, padding: Any, scratch: Scratch
) -> list[Call] | None:
    if not _binds(xp, out, g, w) or not w.flags.c_contiguous or not out.flags.c_contiguous:
        return None
    window = Window(w.shape[2:], stride, padding)
    if winograd.suits(w.shape[:2], size, window, 1):
        return winograd.correlate_back(g, w, out, window, scratch)
    if not g.flags.c_contiguous:
        return None
    pieces, (kernels, seen) = _pieces(g, out, window.kernel, CHUNK), _together(w, scratch)
    patches, calls = _Patches(pieces, out, window, scratch), _copies(seen, w)
    calls += lanes.over(len(out), lambda part: [partial(out[part].fill, 0)], -(-CHUNK * len(out) // out.size))
    for piece in pieces:
        calls += [blas.product(_matrix(g, piece), kernels, patches.matrix(piece)), *patches.scatter(piece)]
    return calls


@kernel(conv2d_last_dw)
def conv2d_last_dw_bind(
    xp: ModuleType, out: Any, x: Any, g: Any, *, kernel: Pair, stride: Pair, padding: Any, scratch: Scratch
) -> list[Call] | None:
    if not _binds(xp, out, x, g) or not out.flags.c_contiguous:
        return None
    window = Window(kernel, stride, padding)
    if winograd.suits(out.shape[:2], x.shape[:2], window, 1):
        return winograd.weight_gradient(x, g, out, window, scratch)
    if not g.flags.c_contiguous:
        return None
    pieces, totals, back = _pieces(g, x, kernel, CHUNK), [], []

    def build(part: slice) -> list[Call]:
        patches, (total, seen), calls = _Patches(pieces[part], x, window, scratch), _together(out, scratch), []
        totals.append(total)
        back.append(seen)
        for piece in pieces[part]:
            beta = float(piece is not pieces[part][0])
            factors = _matrix(g, piece).T, patches.matrix(piece)
            calls += [*patches.gather(piece), blas.product(*factors, total, beta)]
        return calls

    calls = lanes.over(len(pieces), build)
    return [*calls, *(partial(np.add, totals[0], other, totals[0]) for other in totals[1:]), *_copies(out, back[0])]
