"""Convolution of 3x3 kernels with stride 1 in 4/9 of the multiplications: Winograd's F(2x2, 3x3).

Every 4x4 tile of the padded images, two pixels after the last one, is transformed by additions; each of the 16 places
is then an ordinary matrix product over channels, and a transform back gives 2x2 pixels. Images are (rows, columns, n,
channels) here: a pixel of all images is one long run of memory, so that tiles are read where they lie. The error is
below that of the direct form. A. Lavin, S. Gray, "Fast Algorithms for Convolutional Neural Networks", CVPR 2016,
section 4.1. Few channels go without it, as the transforms cost more than they save. Tiles of 4x4 results are left out:
at the best points known (0, 3/4, 3/2 and their negatives) they are 4 to 6 times less exact, worse than PyTorch. Their
transforms take twice as many additions and multiplications, so by a count of operations they gain next to nothing
beside a BLAS for AVX-512.

Gain: see `conv_last.py`. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ..core.backend import Scratch
from ..core.kernels import Call
from ..ops.window import Pair, Window
from . import blas, lanes
from .blocks import Slices, blocks, extent

TransformRule = tuple[tuple[np.ufunc | None, int, int], ...]  # four results, each of two numbers, or of one
LEAST_CHANNELS = 32  # of images and result
CHUNK = 1 << 15  # numbers of one transformed place handled at a time
LEAST_TILES = 256  # rows of a product: fewer would leave BLAS waiting for memory
SMALL, LEAST_SMALL = 10**6, 128  # numbers multiplied by which BLAS does not pack them, if rows or depth are no fewer
LEAST_PLACES = 1 << 18  # numbers of all places that a lane transforms
LEAST_KERNEL = 1 << 12  # numbers of a kernel that a lane transforms
MOST_TURNED = 1 << 14  # numbers of a kernel that is turned to be read along its rows: more cost more than they save
# G of the paper; the signs of B and A differ in the last place, where they cancel
KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
B: TransformRule = (
    (np.subtract, 0, 2),
    (np.add, 1, 2),
    (np.subtract, 2, 1),
    (np.subtract, 3, 1),
)  # transposed: of 4 pixels
A: TransformRule = ((None, 0, 0), (np.add, 0, 1), (np.subtract, 0, 1), (None, 1, 1))  # of 2 pixels


def suits(channels: Pair, size: Pair, window: Window, groups: int) -> bool:
    """Whether a convolution between two numbers of channels, of images of a size, is for this file."""
    plain = (window.kernel, window.stride, window.dilation, groups) == ((3, 3), (1, 1), (1, 1), 1)
    return plain and min(channels) >= LEAST_CHANNELS and min(size) > 1 and max(map(max, window.padding)) <= 2


def correlate(x: np.ndarray, w: np.ndarray, out: np.ndarray, window: Window, scratch: Scratch) -> list[Call]:
    """Calls for out = conv2d(x, w): x (h, w, n, c), w (o, c, 3, 3), out (y, x, n, o)."""
    return _correlate(x, w, out, _corner(window), scratch, adjoint=False)


def correlate_back(g: np.ndarray, w: np.ndarray, out: np.ndarray, window: Window, scratch: Scratch) -> list[Call]:
    """Calls for the gradient of the images: the same with the kernel turned round and a frame that fills up."""
    return _correlate(g, w, out, tuple(2 - p for p in _corner(window)), scratch, adjoint=True)


def weight_gradient(x: np.ndarray, g: np.ndarray, out: np.ndarray, window: Window, scratch: Scratch) -> list[Call]:
    """Calls for the gradient of the kernel: x (h, w, n, c), g (y, x, n, o), out (o, c, 3, 3)."""
    pieces, totals = _pieces(g, max(out.shape[:2])), []

    def build(part: slice) -> list[Call]:
        images = _Tiles(pieces[part], x, B, _corner(window), scratch)
        slopes = _Tiles(pieces[part], g, A, (0, 0), scratch)
        total = scratch.empty((16, *out.shape[:2]), x.dtype)
        aside = scratch.empty(total.shape, x.dtype) if total[0].size * LEAST_SMALL <= SMALL else None
        totals.append(total)
        calls: list[Call] = [] if aside is None else [partial(total.fill, 0)]
        for piece in pieces[part]:
            factors = slopes.matrices(piece).mT, images.matrices(piece)
            starts = aside is None and piece is pieces[part][0]
            calls += [*slopes.load(piece), *images.load(piece)]
            calls += _products(*factors, total) if starts else _added(*factors, total, aside)
        return calls

    def finish(part: slice) -> list[Call]:
        taps, (total, *others) = out[part].reshape(-1, 9).T, (t[:, part].reshape(16, -1) for t in totals)
        return [*(partial(np.add, total, t, total) for t in others), blas.product(transform.T, total, taps)]

    calls, transform = _over(len(pieces), build), np.kron(KERNEL, KERNEL).astype(x.dtype)
    return calls + _over(len(out), finish, -(-LEAST_KERNEL * len(out) // out[..., 0, 0].size))


def _over(size: int, build: Callable[[slice], list[Call]], least: int = 1) -> list[Call]:
    """`lanes.over`; as it stands within another, so that only what has no piece beside it is cut further."""
    made = lanes.over(size, build, least)
    assert made is not None
    return made


def _least(places: np.ndarray) -> int:
    """How many images give a lane enough to do, of places (4, 4, rows, columns, n, channels)."""
    return -(-LEAST_PLACES * places.shape[4] // places.size)


def _corner(window: Window) -> Pair:
    """Pixels of padding above and left of the images."""
    return tuple(before for before, _ in window.padding)


def _pieces(images: np.ndarray, channels: int) -> list[Slices]:
    """The rows and columns of tiles of 2x2 pixels that are handled at a time."""
    grid = tuple(-(-s // 2) for s in images.shape[:2])
    return blocks(grid, images.shape[2] * channels, max(CHUNK, LEAST_TILES * channels))


def _correlate(
    x: np.ndarray, w: np.ndarray, out: np.ndarray, corner: Pair, scratch: Scratch, adjoint: bool
) -> list[Call]:
    calls: list[Call] = []
    kernels, pieces = _kernels(w, adjoint, scratch, calls), _pieces(out, max(w.shape[:2]))

    def build(part: slice) -> list[Call]:
        images, results = _Tiles(pieces[part], x, B, corner, scratch), _Results(pieces[part], out, scratch)
        calls: list[Call] = []
        for piece in pieces[part]:
            products = _products(images.matrices(piece), kernels, results.matrices(piece))
            calls += [*images.load(piece), *products, *results.store(piece)]
        return calls

    return calls + _over(len(pieces), build)


def _kernels(w: np.ndarray, adjoint: bool, scratch: Scratch, calls: list[Call]) -> np.ndarray:
    """G w G^T as 16 matrices (channels of the images, those of the result)."""
    o, c = w.shape[:2]
    transform, made = np.kron(KERNEL, KERNEL).astype(w.dtype), scratch.empty((16, o, c), w.dtype)
    taps = transform[:, ::-1].copy() if adjoint else transform  # a kernel turned by half a circle is one read backward
    turns = not adjoint and o * c <= MOST_TURNED
    turned = scratch.empty((16, c, o), w.dtype) if turns else made.mT

    def build(part: slice) -> list[Call]:
        product = blas.product(taps, w[part].reshape(-1, 9).T, made[:, part].reshape(16, -1))
        return [product, partial(np.copyto, turned[:, :, part], made[:, part].mT)] if turns else [product]

    calls += _over(o, build, -(-LEAST_KERNEL // c))
    return made if adjoint else turned


def _products(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> list[Call]:
    """Calls for out = a @ b at all places: few, for between two a thread has to wait for the interpreter."""
    (_, m, k), n = a.shape, b.shape[2]
    rows = SMALL // (k * n)
    parts = _even(m, rows) if LEAST_SMALL <= rows < m else [slice(0, m)]
    least = -(-lanes.LEAST_PRODUCT // (m * k * n))
    return _over(16, lambda at: [partial(np.matmul, a[at, r], b[at], out[at, r]) for r in parts], least)


def _added(a: np.ndarray, b: np.ndarray, out: np.ndarray, aside: np.ndarray | None) -> list[Call]:
    """Calls for out += a @ b at all places; `aside` is room for the products if those are small, and else None."""
    if aside is None:
        return [blas.product(*factors, beta=1.0) for factors in zip(a, b, out)]
    parts = _even(a.shape[2], SMALL // out[0].size)
    pairs = [(partial(np.matmul, a[:, :, d], b[:, d], aside), partial(np.add, out, aside, out)) for d in parts]
    return [call for pair in pairs for call in pair]


def _even(size: int, most: int) -> list[slice]:
    """A range in as few parts as do, about equal and whole vectors long, of at most `most` each."""
    step = min(most, -(-size // -(-size // most) // 16) * 16)
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


class _Tiles:
    """Tiles of images that begin at -corner, under a transform of rows and columns to 4x4 places, a piece at a time."""

    def __init__(
        self, pieces: list[Slices], x: np.ndarray, rule: TransformRule, corner: Pair, scratch: Scratch
    ) -> None:
        self.x, self.rule, self.corner = x, rule, corner
        pixel, (rows, columns) = x[0, 0].size, extent(pieces[0])
        self.half = scratch.empty((4 * rows * (2 * columns + 2) * pixel,), x.dtype)
        self.places = scratch.empty((16 * rows * columns * pixel,), x.dtype)

    def matrices(self, piece: Slices) -> np.ndarray:
        """The 16 places of some tiles as matrices (tiles, channels)."""
        return self._at(piece).reshape(16, -1, self.x.shape[3])

    def _at(self, piece: Slices) -> np.ndarray:
        return _cut(self.places, (4, 4, *extent(piece), *self.x.shape[2:]))

    def load(self, piece: Slices) -> list[Call]:
        """Calls that fill the places of some tiles; of several images side by side if no piece is beside this one."""
        return _over(self.x.shape[2], partial(self._load, piece), _least(self._at(piece)))

    def _load(self, piece: Slices, part: slice) -> list[Call]:
        rows, columns = piece
        first = [2 * p.start - c for p, c in zip(piece, self.corner)]
        left, right = max(0, first[1]), min(self.x.shape[1], 2 * columns.stop - self.corner[1] + 2)
        shape = (4, rows.stop - rows.start, right - left, *self.x.shape[2:])
        half, calls = _cut(self.half, shape)[..., part, :], list[Call]()
        for out, (ufunc, *taps) in zip(half, self.rule):
            _combine(ufunc, out, self.x[:, left:right, part], *(first[0] + tap for tap in taps), calls)
        lines = np.moveaxis(half, 2, 0)
        for out, (ufunc, *taps) in zip(np.moveaxis(self._at(piece)[..., part, :], (1, 3), (0, 1)), self.rule):
            _combine(ufunc, out, lines, *(first[1] - left + tap for tap in taps), calls)
        return calls


class _Results:
    """The places of results, and A^T m A: the 2x2 pixels of each tile."""

    def __init__(self, pieces: list[Slices], out: np.ndarray, scratch: Scratch) -> None:
        rows, columns = extent(pieces[0])
        self.out, self.buffer = out, scratch.empty((16 * rows * columns * out[0, 0].size,), out.dtype)

    def _places(self, piece: Slices) -> np.ndarray:
        return _cut(self.buffer, (4, 4, *extent(piece), *self.out.shape[2:]))

    def matrices(self, piece: Slices) -> np.ndarray:
        """The 16 places of some tiles as matrices (tiles, channels)."""
        return self._places(piece).reshape(16, -1, self.out.shape[3])

    def store(self, piece: Slices) -> list[Call]:
        """Calls for the pixels of some tiles, as in `load`. Overwrites the places."""
        return _over(self.out.shape[2], partial(self._store, piece), _least(self._places(piece)))

    def _store(self, piece: Slices, part: slice) -> list[Call]:
        m, (rows, columns), calls = self._places(piece)[..., part, :], piece, list[Call]()
        _gather(m, m[0], m[1], calls)
        for down in range(2):
            lines = self.out[2 * rows.start + down : 2 * rows.stop : 2, 2 * columns.start : 2 * columns.stop, part]
            _gather(m[down][:, : len(lines)], lines[:, 0::2], lines[:, 1::2], calls)
        return calls


def _cut(buffer: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The front of a flat buffer in a shape."""
    return buffer[: int(np.prod(shape))].reshape(shape)


def _combine(
    ufunc: np.ufunc | None, out: np.ndarray, x: np.ndarray, first: int, second: int, calls: list[Call]
) -> None:
    """out[t] = ufunc(x[2 t + first], x[2 t + second]), or x[2 t + first] without one; x is zero outside."""
    count = len(out)
    one, two = (range(max(0, -(tap // 2)), min(count, (len(x) - tap + 1) // 2)) for tap in (first, second))
    start, stop = max(one.start, two.start), max(one.start, two.start, min(one.stop, two.stop))
    stop = min(stop, count)
    if start < stop:
        a, b = (x[2 * start + tap : 2 * (stop - 1) + tap + 1 : 2] for tap in (first, second))
        target = out[start:stop]
        calls.append(partial(np.copyto, target, a) if ufunc is None else partial(ufunc, a, b, target))
    for t in (*range(min(start, count)), *range(max(start, stop), count)):
        if t in one:
            calls.append(partial(np.copyto, out[t], x[2 * t + first]))
        elif t in two:
            calls.append(partial(np.negative if ufunc is np.subtract else np.positive, x[2 * t + second], out[t]))
        else:
            calls.append(partial(out[t].fill, 0))


def _gather(m: np.ndarray, first: np.ndarray, second: np.ndarray, calls: list[Call]) -> None:
    """Four numbers to two, by A^T; `m` is overwritten, and the results may lie on its first two."""
    last = m[..., : second.shape[-3], :, :]
    calls += [
        partial(np.add, m[0], m[1], m[0]),
        partial(np.add, m[0], m[2], first),
        partial(np.subtract, last[1], last[2], last[1]),
        partial(np.add, last[1], last[3], second),
    ]
