"""Convolution of 3x3 kernels with stride 1 in 4/9 of the multiplications: Winograd's F(2x2, 3x3).

Every 4x4 tile of the padded images, two pixels after the last one, is transformed by additions; each of the 16
places is then an ordinary matrix product over channels, and a transform back gives 2x2 pixels. Channels come last
inside, so that all additions run over contiguous memory. The error is below that of the direct form. A. Lavin,
S. Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016, section 4.1. Ignored on purpose: larger
tiles, which lose a digit or more; other kernels; few channels, for which the transforms cost more than they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from .. import blas
from .window import Pair, Window

__all__: list[str] = []

Call = Callable[[], Any]
LEAST_CHANNELS = 32  # of images and result
CHUNK = 1 << 15  # numbers of one transformed place, of all images handled at a time: 16 of them fit the cache
LEAST_TILES = 128  # rows of a product: fewer would leave BLAS waiting for memory
STRIP = 16  # channels moved at a time from the second to the last axis: more would fall on the same cache lines
KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])  # G of the paper


def suits(images: np.ndarray, kernels: tuple[int, ...], window: Window, groups: int) -> bool:
    """Whether the convolution of `images` (n, c, h, w) with `kernels` of a shape (o, c, i, j) is for this file."""
    plain = (window.kernel, window.stride, window.dilation, groups) == ((3, 3), (1, 1), (1, 1), 1)
    large = min(kernels[:2]) >= LEAST_CHANNELS and min(images.shape[2:]) > 1
    return plain and large and max(map(max, window.padding)) <= 2


def correlate(x: np.ndarray, w: np.ndarray, out: np.ndarray, window: Window) -> list[Call]:
    """Calls for out = conv2d(x, w): x (n, c, h, w), w (o, c, 3, 3), out (n, o, y, x)."""
    return _correlate(x, w, out, _corner(window), adjoint=False)


def correlate_back(g: np.ndarray, w: np.ndarray, out: np.ndarray, window: Window) -> list[Call]:
    """Calls for the gradient of the images: the same with the kernel turned round and a frame that fills up."""
    return _correlate(g, w, out, tuple(2 - p for p in _corner(window)), adjoint=True)


def weight_gradient(x: np.ndarray, g: np.ndarray, out: np.ndarray, window: Window) -> list[Call]:
    """Calls for the gradient of the kernel: x (n, c, h, w), g (n, o, y, x), out (o, c, 3, 3)."""
    (o, c), chunks = out.shape[:2], _Chunks(len(g), g.shape[2:], max(x.shape[1], g.shape[1]))
    images, slopes = _Tiles(chunks, c, x.dtype), _Tiles(chunks, o, x.dtype)
    total = np.empty((16, o, c), x.dtype)
    calls: list[Call] = []
    for part in chunks:
        calls += [*images.load(x[part], _corner(window)), *slopes.load_gradient(g[part])]
        pairs = zip(total, slopes.matrices(len(g[part])), images.matrices(len(g[part])))
        calls += [_product(m.T, v, t, beta=0.0 if part.start == 0 else 1.0) for t, m, v in pairs]
    transform = np.kron(KERNEL, KERNEL).astype(x.dtype)
    return [*calls, _product(transform.T, total.reshape(16, -1), out.reshape(-1, 9).T)]


def _corner(window: Window) -> Pair:
    """Pixels of padding above and left of the images."""
    return tuple(before for before, _ in window.padding)


def _correlate(x: np.ndarray, w: np.ndarray, out: np.ndarray, corner: Pair, adjoint: bool) -> list[Call]:
    o, c = w.shape[:2]
    chunks = _Chunks(len(out), out.shape[2:], max(o, c))
    images, results = _Tiles(chunks, x.shape[1], x.dtype), _Tiles(chunks, out.shape[1], x.dtype)
    transform = np.kron(KERNEL, KERNEL).astype(x.dtype)
    kernels = np.empty((16, o, c), x.dtype)
    taps = transform[:, ::-1].copy() if adjoint else transform  # a kernel turned by half a circle is one read backwards
    calls: list[Call] = [_product(taps, w.reshape(-1, 9).T, kernels.reshape(16, -1))]
    for part in chunks:
        count = len(out[part])
        calls += images.load(x[part], corner)
        triples = zip(images.matrices(count), kernels, results.matrices(count))
        calls += [_product(v, u if adjoint else u.T, m) for v, u, m in triples]
        calls += results.store(out[part])
    return calls


def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray, beta: float = 0.0) -> Call:
    """A call for out = a @ b + beta out, with beta 0 or 1."""
    call = blas.gemm(a, b, out, beta=beta)
    if call is not None:
        return call
    return (lambda: np.add(out, a @ b, out)) if beta else partial(np.matmul, a, b, out)


class _Chunks:
    """Ranges of `n` images whose tiles fit the cache; iterating gives slices."""

    def __init__(self, n: int, size: Pair, channels: int) -> None:
        self.n, self.grid = n, tuple(-(-s // 2) for s in size)
        tiles = self.grid[0] * self.grid[1]
        self.step = min(n, max(1, CHUNK // (tiles * channels), -(-LEAST_TILES // tiles)))

    def __iter__(self) -> Iterator[slice]:
        return (slice(start, min(start + self.step, self.n)) for start in range(0, self.n, self.step))


class _Tiles:
    """Images of one chunk, transformed: (4, 4, images, rows, columns, channels), with the buffers on the way there."""

    def __init__(self, chunks: _Chunks, channels: int, dtype: np.dtype) -> None:
        self.grid, self.channels = chunks.grid, channels
        rows, columns = self.grid
        self.buffer = np.empty(16 * chunks.step * rows * columns * channels, dtype)
        self.frame = np.zeros((chunks.step, 2 * rows + 2, 2 * columns + 2, channels), dtype)
        self.half = np.empty((4, chunks.step, rows, 2 * columns + 2, channels), dtype)

    def _places(self, count: int) -> np.ndarray:
        shape = (4, 4, count, *self.grid, self.channels)
        return self.buffer[: int(np.prod(shape))].reshape(shape)

    def matrices(self, count: int) -> np.ndarray:
        """The 16 places as matrices (tiles, channels)."""
        return self._places(count).reshape(16, -1, self.channels)

    def load(self, x: np.ndarray, corner: Pair) -> list[Call]:
        """B^T d B for the 4x4 tiles of images (count, channels, h, w) that lie at `corner` of a frame of zeros."""
        frame, half, places = self.frame[: len(x)], self.half[:, : len(x)], self._places(len(x))
        top, left = corner
        inner = frame[:, top : top + x.shape[2], left : left + x.shape[3]]
        rows, columns = self.grid
        lines = [frame[:, k : k + 2 * rows - 1 : 2] for k in range(4)]
        points = [half[:, :, :, k : k + 2 * columns - 1 : 2] for k in range(4)]
        return [*_channels_last(inner, x), *_spread(half, *lines), *_spread(places.swapaxes(0, 1), *points)]

    def load_gradient(self, g: np.ndarray) -> list[Call]:
        """A g A^T for the 2x2 tiles of gradients (count, channels, y, x): the adjoint of `store`."""
        rows, columns = self.grid
        frame, places = self.frame[: len(g), : 2 * rows, : 2 * columns], self._places(len(g))
        half = self.half[:, : len(g), :, : 2 * columns]
        return [
            *_channels_last(frame[:, : g.shape[2], : g.shape[3]], g),
            *_double(half, frame[:, 0::2], frame[:, 1::2]),
            *_double(places.swapaxes(0, 1), half[:, :, :, 0::2], half[:, :, :, 1::2]),
        ]

    def store(self, out: np.ndarray) -> list[Call]:
        """A^T m A: the 2x2 pixels of each tile into images (count, channels, y, x)."""
        rows, columns = self.grid
        frame, m = self.frame[: len(out), : 2 * rows, : 2 * columns], self._places(len(out))
        calls = _gather(m, m[0], m[1])
        for down in range(2):
            lines = frame[:, down::2]
            calls += _gather(m[down], lines[:, :, 0::2], lines[:, :, 1::2])
        pixels = frame[:, : out.shape[2], : out.shape[3]].transpose(0, 3, 1, 2)
        return [*calls, partial(np.copyto, out, pixels)]


def _channels_last(target: np.ndarray, x: np.ndarray) -> list[Call]:
    """Copies of (n, c, h, w) into (n, h, w, c)."""
    strips = [slice(k, k + STRIP) for k in range(0, x.shape[1], STRIP)]
    return [partial(np.copyto, target[..., s], x[:, s].transpose(0, 2, 3, 1)) for s in strips]


def _spread(out: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> list[Call]:
    """Four numbers in a row, by B^T."""
    return [
        partial(np.subtract, a, c, out[0]),
        partial(np.add, b, c, out[1]),
        partial(np.subtract, c, b, out[2]),
        partial(np.subtract, b, d, out[3]),
    ]


def _double(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[Call]:
    """Two numbers to four, by A."""
    return [
        partial(np.copyto, out[0], a),
        partial(np.add, a, b, out[1]),
        partial(np.subtract, a, b, out[2]),
        partial(np.negative, b, out[3]),
    ]


def _gather(m: np.ndarray, first: np.ndarray, second: np.ndarray) -> list[Call]:
    """Four numbers to two, by A^T; `m` is overwritten, and the results may lie on its first two."""
    return [
        partial(np.add, m[0], m[1], m[0]),
        partial(np.add, m[0], m[2], first),
        partial(np.subtract, m[1], m[2], m[1]),
        partial(np.subtract, m[1], m[3], second),
    ]
