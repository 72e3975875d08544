"""The arithmetic of batch normalisation on a CPU, where channels come last: two sweeps over pieces that fit the cache.

The first sums up every piece while it is there (its own mean and squared deviations, joined exactly afterwards), the
second writes the result, with what follows a normalisation (a sum, a relu) or comes before its gradient (the mask of
the relu) in the same visit. T. Chan, G. Golub, R. LeVeque, "Algorithms for Computing the Sample Variance", 1983.
Ignored on purpose: channels that do not come last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from .. import blas, lanes
from ..backend import Scratch

__all__: list[str] = []

Call = Callable[[], Any]
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
        self.zeros = np.zeros(self.side * channels, dtype)

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
    out: tuple[np.ndarray, ...],
    x: np.ndarray,
    scale: np.ndarray,
    bias: np.ndarray,
    epsilon: float,
    scratch: Scratch,
    added: tuple[np.ndarray, ...] = (),
    relu: bool = False,
) -> list[Call]:
    """Calls for (y, mean, var): y = scale (x - mean) / sqrt(var + epsilon) + bias, plus what is added, then relu."""
    y, mean, var = out
    pieces = _Pieces(x.size // scale.size, scale.size, x.dtype)
    xs, ys, terms = pieces.wide(x), pieces.wide(y), [pieces.wide(a) for a in added]
    means, squares = pieces.sums(), pieces.sums()
    counts = np.array([[(s.stop - s.start) * pieces.side] for _, s in pieces.slices(slice(0, pieces.count))], x.dtype)
    set_line, (factor, shift) = pieces.repeated(2)

    def measure(part: slice) -> list[Call]:
        (spread, (line,)), calls = pieces.repeated(), []
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
            calls += [partial(np.add, ys[rows], t[rows], ys[rows]) for t in terms]
            calls += [partial(np.maximum, ys[rows], pieces.zeros, out=ys[rows])] if relu else []
        return calls

    return [*pieces.over(measure), join, *pieces.over(apply)]


def slopes(
    out: tuple[np.ndarray, ...],
    g: np.ndarray,
    x: np.ndarray,
    scale: np.ndarray,
    mean: np.ndarray,
    var: np.ndarray,
    epsilon: float,
    scratch: Scratch,
    y: np.ndarray | None = None,
) -> list[Call]:
    """Calls for (dx, dscale, dbias); with `y`, the result under a relu, `g` counts where that is positive."""
    dx, dscale, dbias = out
    pieces = _Pieces(x.size // scale.size, scale.size, x.dtype)
    gs, xs, results = (pieces.wide(a) for a in (g, x, dx))
    steep, flat = pieces.sums(), pieces.sums()
    set_line, (center, factor, slope, shift) = pieces.repeated(4)

    def start() -> None:
        set_line[0] = mean

    terms: dict[int, np.ndarray] = {}  # of each lane, for both sweeps

    def term(part: slice) -> np.ndarray:
        if part.start not in terms:
            terms[part.start] = scratch.empty((pieces.step, center.size), x.dtype)
        return terms[part.start]

    def measure(part: slice) -> list[Call]:
        t, mask, calls = term(part), scratch.empty((pieces.step, center.size), np.dtype(bool)), []
        for k, rows in pieces.slices(part):
            slope, number = gs[rows], rows.stop - rows.start
            if y is not None:
                calls.append(partial(np.greater, pieces.wide(y)[rows], pieces.zeros, mask[:number]))
                calls.append(partial(np.multiply, slope, mask[:number], results[rows]))
                slope = results[rows]
            calls += [
                pieces.total(slope, flat[k]),
                partial(np.subtract, xs[rows], center, t[:number]),
                partial(np.multiply, t[:number], slope, t[:number]),
                pieces.total(t[:number], steep[k]),
            ]
        return calls

    def join() -> None:
        inverse = 1 / np.sqrt(var + epsilon)
        np.multiply(steep.sum(0), inverse, dscale)
        flat.sum(0, out=dbias)
        set_line[1] = scale * inverse
        set_line[2] = scale * inverse * inverse * dscale / -pieces.pixels
        set_line[3] = scale * inverse * dbias / -pieces.pixels - set_line[2] * mean

    def apply(part: slice) -> list[Call]:
        t, calls = term(part), []
        for _, rows in pieces.slices(part):
            u, made = t[: rows.stop - rows.start], results[rows]
            calls += [
                partial(np.multiply, xs[rows], slope, u),
                partial(np.add, u, shift, u),
                partial(np.multiply, gs[rows] if y is None else made, factor, made),
                partial(np.add, made, u, made),
            ]
        return calls

    return [start, *pieces.over(measure), join, *pieces.over(apply)]
