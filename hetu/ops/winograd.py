"""Convolution of 3x3 kernels with stride 1 in 4/9 of the multiplications: Winograd's F(2x2, 3x3).

Every 4x4 tile of the padded images, two pixels after the last one, is transformed by additions; each of the 16
places is then an ordinary matrix product over channels, and a transform back gives 2x2 pixels. Images are
(n, rows, columns, channels) here, with any strides. Even and odd rows and columns are first put apart, so that all
additions run over long contiguous memory. The error is below that of the direct form. A. Lavin, S. Gray, "Fast
Algorithms for Convolutional Neural Networks", CVPR 2016, section 4.1. Ignored on purpose: other kernels; few channels,
for which the transforms cost more than they save; tiles of 4x4 results. At the best points known (0, 3/4, 3/2 and their
negatives) those are 4 to 6 times less exact, worse than PyTorch, and their transforms take twice as many additions and
multiplications, so that by a count of operations next to nothing is left to gain beside a BLAS for AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from .. import blas
from ..backend import Scratch
from .window import Pair, Window

__all__: list[str] = []

Call = Callable[[], Any]
LEAST_CHANNELS = 32  # of images and result
CHUNK = 1 << 15  # numbers of one transformed place, of all images handled at a time: 16 of them fit the cache
LEAST_TILES = 128  # rows of a product: fewer would leave BLAS waiting for memory
STRIP = 16  # channels moved at a time between the second and the last axis: more would fall on the same cache lines
# G of the paper; the signs of B and A differ in the last place, where they cancel
KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])


def suits(channels: Pair, size: Pair, window: Window, groups: int) -> bool:
    """Whether a convolution between two numbers of channels, of images of a size, is for this file."""
    plain = (window.kernel, window.stride, window.dilation, groups) == ((3, 3), (1, 1), (1, 1), 1)
    return plain and min(channels) >= LEAST_CHANNELS and min(size) > 1 and max(map(max, window.padding)) <= 2


def correlate(x: np.ndarray, w: np.ndarray, out: np.ndarray, window: Window, scratch: Scratch) -> list[Call]:
    """Calls for out = conv2d(x, w): x (n, h, w, c), w (o, c, 3, 3), out (n, y, x, o)."""
    return _correlate(x, w, out, _corner(window), scratch, adjoint=False)


def correlate_back(g: np.ndarray, w: np.ndarray, out: np.ndarray, window: Window, scratch: Scratch) -> list[Call]:
    """Calls for the gradient of the images: the same with the kernel turned round and a frame that fills up."""
    return _correlate(g, w, out, tuple(2 - p for p in _corner(window)), scratch, adjoint=True)


def weight_gradient(x: np.ndarray, g: np.ndarray, out: np.ndarray, window: Window, scratch: Scratch) -> list[Call]:
    """Calls for the gradient of the kernel: x (n, h, w, c), g (n, y, x, o), out (o, c, 3, 3)."""
    (o, c), chunks = out.shape[:2], _Chunks(len(g), g.shape[1:3], max(x.shape[3], g.shape[3]))
    images, slopes = _Tiles(chunks, c, x.dtype, scratch), _Slopes(chunks, o, x.dtype, scratch)
    total = scratch.empty((16, o, c), x.dtype)
    calls: list[Call] = [partial(images.planes.fill, 0), partial(slopes.planes.fill, 0)]
    for part in chunks:
        calls += [*images.load(x[part], _corner(window)), *slopes.load(g[part])]
        pairs = zip(total, slopes.matrices(len(g[part])), images.matrices(len(g[part])))
        calls += [_product(m.T, v, t, beta=0.0 if part.start == 0 else 1.0) for t, m, v in pairs]
    transform = np.kron(KERNEL, KERNEL).astype(x.dtype)
    return [*calls, _product(transform.T, total.reshape(16, -1), out.reshape(-1, 9).T)]


def _corner(window: Window) -> Pair:
    """Pixels of padding above and left of the images."""
    return tuple(before for before, _ in window.padding)


def _correlate(
    x: np.ndarray, w: np.ndarray, out: np.ndarray, corner: Pair, scratch: Scratch, adjoint: bool
) -> list[Call]:
    o, c = w.shape[:2]
    chunks = _Chunks(len(out), out.shape[1:3], max(o, c))
    images, results = (_Tiles(chunks, a.shape[3], x.dtype, scratch) for a in (x, out))
    transform = np.kron(KERNEL, KERNEL).astype(x.dtype)
    kernels = scratch.empty((16, o, c), x.dtype)
    taps = transform[:, ::-1].copy() if adjoint else transform  # a kernel turned by half a circle is one read backwards
    calls = [partial(images.planes.fill, 0), _product(taps, w.reshape(-1, 9).T, kernels.reshape(16, -1))]
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

    def __init__(self, chunks: _Chunks, channels: int, dtype: np.dtype, scratch: Scratch) -> None:
        self.grid, self.channels = chunks.grid, channels
        rows, columns = chunks.grid
        self.buffer = scratch.empty((16 * chunks.step * rows * columns * channels,), dtype)
        self.planes = scratch.empty((2, 2, chunks.step, rows + 1, columns + 1, channels), dtype)
        self.half = scratch.empty((4, 2, chunks.step, rows + 1, columns, channels), dtype)

    def _places(self, count: int) -> np.ndarray:
        shape = (4, 4, count, *self.grid, self.channels)
        return self.buffer[: int(np.prod(shape))].reshape(shape)

    def matrices(self, count: int) -> np.ndarray:
        """The 16 places as matrices (tiles, channels)."""
        return self._places(count).reshape(16, -1, self.channels)

    def load(self, x: np.ndarray, corner: Pair) -> list[Call]:
        """B^T d B for the 4x4 tiles of images (count, h, w, channels) that lie at `corner` of a frame of zeros."""
        rows, columns = self.grid
        planes, half = self.planes[:, :, : len(x)], self.half[:, :, : len(x)]
        points = [planes[:, k % 2, :, :, k // 2 : k // 2 + columns] for k in range(4)]
        lines = [half[:, k % 2, :, k // 2 : k // 2 + rows] for k in range(4)]
        return [*_apart(planes, x, corner), *_spread(half, *points), *_spread(self._places(len(x)), *lines)]

    def _pixels(self, count: int) -> np.ndarray:
        """Room for whole images, where `half` lies: a result has none."""
        shape = (count, *(2 * s for s in self.grid), self.channels)
        return self.half.reshape(-1)[: int(np.prod(shape))].reshape(shape)

    def store(self, out: np.ndarray) -> list[Call]:
        """A^T m A: the 2x2 pixels of each tile into images (count, y, x, channels). Overwrites the places."""
        m = self._places(len(out))
        whole = out.shape[1:3] == tuple(2 * s for s in self.grid) and out.strides[3] == out.itemsize
        pixels = out if whole else self._pixels(len(out))
        calls = _gather(m, m[0], m[1])
        for down in range(2):
            calls += _gather(m[down], pixels[:, down::2, 0::2], pixels[:, down::2, 1::2])
        return calls if whole else [*calls, *_strips(out, pixels[:, : out.shape[1], : out.shape[2]])]


class _Slopes:
    """Gradients of one chunk, A g A^T for every 2x2 tile: the adjoint of `_Tiles.store`."""

    def __init__(self, chunks: _Chunks, channels: int, dtype: np.dtype, scratch: Scratch) -> None:
        shape = (2, chunks.step, *chunks.grid, channels)
        self.planes = scratch.empty((2, *shape), dtype)
        self.rows = scratch.empty((2, *shape), dtype)  # sums and differences of even and odd rows
        self.columns = scratch.empty((4, *shape), dtype)  # of each kind of rows: those of columns

    def load(self, g: np.ndarray) -> list[Call]:
        planes, rows, columns = (a[:, :, : len(g)] for a in (self.planes, self.rows, self.columns))
        calls = [*_apart(planes, g, (0, 0)), *_sum_and_difference(rows, planes[0], planes[1])]
        for kind, made in zip((planes[0], *rows, planes[1]), columns):
            calls += _sum_and_difference(made, kind[0], kind[1])
        return calls

    def matrices(self, count: int) -> list[np.ndarray]:
        """The 16 places as matrices (tiles, channels)."""
        kinds = (self.planes[0], *self.rows, self.planes[1])
        places = (p for kind, made in zip(kinds, self.columns) for p in (kind[0], *made, kind[1]))
        return [p[:count].reshape(-1, p.shape[-1]) for p in places]


def _apart(planes: np.ndarray, x: np.ndarray, corner: Pair) -> list[Call]:
    """Copies of images at `corner` of a frame, whose pixel (i, j) is planes[i % 2, j % 2, :, i // 2, j // 2]."""
    calls: list[Call] = []
    for parity in np.ndindex(2, 2):
        first = [(p - c) % 2 for p, c in zip(parity, corner)]  # row and column of the images that come first there
        part = x[:, first[0] :: 2, first[1] :: 2]
        start = [(c + f) // 2 for c, f in zip(corner, first)]
        inside = tuple(slice(s, s + size) for s, size in zip(start, part.shape[1:3]))
        calls += _strips(planes[parity][:, inside[0], inside[1]], part)
    return calls


def _strips(target: np.ndarray, x: np.ndarray) -> list[Call]:
    """A copy; where only one of the two has its last axis together, of a few channels at a time."""
    if not x.size:
        return []
    alike = x.strides[3] == target.strides[3]
    if alike and x.strides[3] == x.itemsize:  # a pixel is copied as one thing, without a loop over its channels
        pixel = np.dtype((np.void, x.shape[3] * x.itemsize))
        return [partial(np.copyto, target.view(pixel), x.view(pixel))]
    step = x.shape[3] if alike else STRIP
    return [partial(np.copyto, target[..., k : k + step], x[..., k : k + step]) for k in range(0, x.shape[3], step)]


def _spread(out: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> list[Call]:
    """Four numbers in a row, by B^T."""
    return [
        partial(np.subtract, a, c, out[0]),
        partial(np.add, b, c, out[1]),
        partial(np.subtract, c, b, out[2]),
        partial(np.subtract, d, b, out[3]),
    ]


def _sum_and_difference(out: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[Call]:
    return [partial(np.add, a, b, out[0]), partial(np.subtract, a, b, out[1])]


def _gather(m: np.ndarray, first: np.ndarray, second: np.ndarray) -> list[Call]:
    """Four numbers to two, by A^T; `m` is overwritten, and the results may lie on its first two."""
    return [
        partial(np.add, m[0], m[1], m[0]),
        partial(np.add, m[0], m[2], first),
        partial(np.subtract, m[1], m[2], m[1]),
        partial(np.add, m[1], m[3], second),
    ]
