"""The arithmetic of batch normalization on a CPU, where channels come last: two sweeps over pieces that fit the cache.

The first sums up every piece while it is there (its own mean and squared deviations, joined exactly afterward), the
second writes the result. T. Chan, G. Golub, R. LeVeque, "Algorithms for Computing the Sample Variance", 1983.

Gain: 2.3 times the speed of the forward function. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from ..core.backend import Scratch
from ..core.kernels import Call
from . import blas, lanes

PIECE = 1 << 16  # numbers: three arrays of such pieces stay in the second-level cache
WIDE = 1 << 11  # numbers of a row, of several pixels side by side: vectors are repeated so often


class _Pieces:
    """Matrices (pixels, channels) cut into pieces of rows, with the sums of each over its pixels."""

    def __init__(self, pixels: int, channels: int, dtype: np.dtype) -> None:
        self.pixels, self.channels, self.dtype = pixels, channels, dtype
        self.side = next(k for k in range(max(1, min(pixels, WIDE // channels)), 0, -1) if pixels % k == 0)
        self.rows = pixels // self.side
        self.step = min(self.rows, max(1, PIECE // (self.side * channels)))
        self.count = -(-self.rows // self.step)
        self.ones = np.ones(self.step * self.side, dtype)

    def slices(self, part: slice) -> Iterator[tuple[int, slice]]:
        """The number and the rows of the pieces of a part."""
        for k in range(part.start, part.stop):
            yield k, slice(k * self.step, min((k + 1) * self.step, self.rows))

    def wide(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.rows, -1)

    def repeated(self, copies: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Room for vectors over a wide row: as what is written, and as what is read."""
        room = np.empty((copies, self.side * self.channels), self.dtype)
        return room.reshape(copies, self.side, self.channels), room

    def sums(self) -> np.ndarray:
        return np.empty((self.count, self.channels), self.dtype)

    def total(self, piece: np.ndarray, out: np.ndarray, mean: bool = False) -> Call:
        """The sum, or the mean, of the pixels of a piece."""
        matrix = piece.reshape(-1, self.channels)
        share = 1 / len(matrix) if mean else 1.0
        call = blas.gemv(matrix.T, self.ones[: len(matrix)], out, share)
        return call or partial(np.einsum, "nc,n->c", matrix, np.full(len(matrix), share, self.dtype), out=out)

    def over(self, build: Callable[[slice], list[Call]]) -> list[Call]:
        made = lanes.over(self.count, build, least=2)
        assert made is not None
        return made


def normalized(
    out: tuple[np.ndarray, ...], x: np.ndarray, scale: np.ndarray, bias: np.ndarray, epsilon: float, scratch: Scratch
) -> list[Call]:
    """Calls for (y, mean, var): y = scale (x - mean) / sqrt(var + epsilon) + bias."""
    y, mean, var = out
    pieces = _Pieces(x.size // scale.size, scale.size, x.dtype)
    xs, ys = pieces.wide(x), pieces.wide(y)
    means, squares = pieces.sums(), pieces.sums()
    counts = np.array([[(s.stop - s.start) * pieces.side] for _, s in pieces.slices(slice(0, pieces.count))], x.dtype)
    set_line, (factor, shift) = pieces.repeated(2)

    def measure(part: slice) -> list[Call]:
        (spread, (line,)), calls = pieces.repeated(), list[Call]()
        term = scratch.empty((pieces.step, line.size), x.dtype)
        for k, rows in pieces.slices(part):
            t = term[: rows.stop - rows.start]
            calls += [
                pieces.total(xs[rows], means[k], mean=True),
                partial(np.copyto, spread[0], means[k]),
                partial(np.subtract, xs[rows], line, t),
                partial(np.multiply, t, t, t),
                pieces.total(t, squares[k]),
            ]
        return calls

    def join() -> None:
        np.divide((counts * means).sum(0), pieces.pixels, mean)
        np.divide((squares + counts * np.square(means - mean)).sum(0), pieces.pixels, var)
        steep = scale / np.sqrt(var + epsilon)
        set_line[0], set_line[1] = steep, bias - mean * steep

    def apply(part: slice) -> list[Call]:
        calls: list[Call] = []
        for _, rows in pieces.slices(part):
            calls += [partial(np.multiply, xs[rows], factor, ys[rows]), partial(np.add, ys[rows], shift, ys[rows])]
        return calls

    return [*pieces.over(measure), join, *pieces.over(apply)]


class Slopes:
    """The gradients (dx, dscale, dbias)."""

    def __init__(
        self,
        out: tuple[np.ndarray, ...],
        g: np.ndarray,
        x: np.ndarray,
        scale: np.ndarray,
        mean: np.ndarray,
        var: np.ndarray,
        epsilon: float,
        scratch: Scratch,
    ) -> None:
        self.pieces = _Pieces(x.size // scale.size, scale.size, x.dtype)
        self.g, self.x, self.dx = (self.pieces.wide(a) for a in (g, x, out[0]))
        self.dscale, self.dbias, self.scale, self.mean, self.var, self.epsilon = *out[1:], scale, mean, var, epsilon
        self.steep, self.flat = self.pieces.sums(), self.pieces.sums()
        self.set_line, (self.center, self.factor, self.slope, self.shift) = self.pieces.repeated(4)
        self.scratch = scratch
        self.terms: dict[int, np.ndarray] = {}  # of each lane, for both sweeps

    def calls(self) -> list[Call]:
        start = partial(np.copyto, self.set_line[0], self.mean)
        return [start, *self.pieces.over(self._measure), self._join, *self.pieces.over(self._apply)]

    def _term(self, part: slice) -> np.ndarray:
        if part.start not in self.terms:
            self.terms[part.start] = self.scratch.empty((self.pieces.step, self.center.size), self.x.dtype)
        return self.terms[part.start]

    def _measure(self, part: slice) -> list[Call]:
        t, calls = self._term(part), list[Call]()
        for k, rows in self.pieces.slices(part):
            slope, some = self.g[rows], t[: rows.stop - rows.start]
            calls += [
                self.pieces.total(slope, self.flat[k]),
                partial(np.subtract, self.x[rows], self.center, some),
                partial(np.multiply, some, slope, some),
                self.pieces.total(some, self.steep[k]),
            ]
        return calls

    def _join(self) -> None:
        inverse = 1 / np.sqrt(self.var + self.epsilon)
        np.multiply(self.steep.sum(0), inverse, self.dscale)
        self.flat.sum(0, out=self.dbias)
        steep, count = self.scale * inverse, self.pieces.pixels
        self.set_line[1] = steep
        self.set_line[2] = steep * inverse * self.dscale / -count
        self.set_line[3] = steep * self.dbias / -count - self.set_line[2] * self.mean

    def _apply(self, part: slice) -> list[Call]:
        t, calls = self._term(part), list[Call]()
        for _, rows in self.pieces.slices(part):
            some, made = t[: rows.stop - rows.start], self.dx[rows]
            calls += [
                partial(np.multiply, self.x[rows], self.slope, some),
                partial(np.add, some, self.shift, some),
                partial(np.multiply, self.g[rows], self.factor, made),
                partial(np.add, made, some, made),
            ]
        return calls
