"""Launches the kernels of `convolution.cu`: convolution of images (h, w, n, c) and its gradients on tensor cores.

Result channels come in multiples of 16 bytes; so do the others, but for the images and the weights of a first layer,
whose few channels are unfolded. What else there is, such as float64, is left to CuPy. Winograd's transform is left out:
it saves products, of which tensor cores have plenty.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..passes import conv_last
from .launchers import kernel
from .machine import HOPPER, TENSOR, Call, Machine, Size2d, address, contiguous, index_dtype, spread
from .source import assemble, file_text

DTYPES = ("float16", "bfloat16", "float32")
BUSY = 128  # blocks that a GPU of 132 multiprocessors should have, at least
RESIDENT = 132 * 512  # threads of a weight gradient, which are not more than run at once
NEIGHBORS = (8, 4)  # pixels of a row that a block may own together,
WIDE = 16  # where rows are so long that it would leave out few taps without
LEAST_STEPS = 8  # along its sum that a block of them should take
MOST = 1 << 33  # values of an array, so that its places have 32 bits
FRAMELESS = ((0, 0), (0, 0))  # no padding
MOVED = (2, 3, 0, 1)  # from the channels last to the channels first, and back


class Tile(NamedTuple):
    """What a block has of a product, and who makes it: single warps, or warpgroups."""

    places: int
    results: int
    by_groups: bool = False

    @property
    def block(self) -> tuple[int]:
        """A warp for 16 rows of a group's, for 64 x 32 of the largest tile, for 32 x 32 of others."""
        if self.by_groups:
            return (2 * self.places,)
        return (32 * (self.places // (64 if self[:2] == (128, 128) else 32)) * (self.results // 32),)


TILES = (Tile(128, 128), Tile(128, 64), Tile(64, 64))  # the larger, the less is read twice
GROUP_TILES = (Tile(128, 64, by_groups=True), Tile(64, 64, by_groups=True))


@cache
def text(dtype: str, index: str, tile: Tile) -> str:
    """The kernels for tiles of so many places and results."""
    sizes = f"const int BM = {tile.places}, BN = {tile.results};\n"
    parts = ("tiles", "warpgroups" if tile.by_groups else "warps", "convolution")
    body = "".join(f'#line 1 "{part}.cu"\n{file_text(part)}' for part in parts)
    return assemble(file_text("matrices") + sizes + body, "matrices.cu", S=dtype, Index=index)


class _Window(NamedTuple):
    """A convolution of images x (h, w, n, c) with kernels (o, c, i, j) to y (rows, columns, n, o)."""

    x: Any
    y: Any
    kernel: Size2d
    stride: Size2d
    padding: Any

    @property
    def sizes(self) -> tuple[int, ...]:
        """What both sides of a convolution are called in kernels."""
        (top, _), (side, _) = self.padding
        return (*self.x.shape[:2], *self.y.shape[:2], *self.kernel, *self.stride, top, side)

    @property
    def channels(self) -> tuple[int, int, int]:
        """Images, channels and results."""
        return self.x.shape[2], self.x.shape[3], self.y.shape[3]


class _Axis(NamedTuple):
    """One axis of a product: what `AXIS` names, then the weights of its first tap, and where its pixels of y lie."""

    size: int
    count: int
    step: int
    first: int
    taps: int
    next: int
    tap: int
    apart: int
    origin: int


@kernel(conv_last.conv2d_last)
def conv2d_last(
    machine: Machine, out: Any, x: Any, w: Any, *, stride: Size2d, padding: Any, **rest: Any
) -> list[Call] | None:
    window = _Window(x, out, w.shape[2:], stride, padding)
    if not _takes(machine, window, w, **rest):
        return None
    if not _in_chunks(x):
        unfold, window = _unfolded(machine, window)
        whole = _Window(w.transpose(MOVED), w.reshape(1, 1, len(w), -1), w.shape[2:], (1, 1), FRAMELESS)
        widen, (weights, *_) = _unfolded(machine, whole)  # as images of which a patch is all there is
        return [unfold, widen, _forward(machine, window, weights[0])]
    if not contiguous(x):
        return None
    calls, weights = _arranged(machine, w)
    return [*calls, _forward(machine, window, weights)]


@kernel(conv_last.conv2d_last_dx)
def conv2d_last_dx(
    machine: Machine, out: Any, g: Any, w: Any, *, size: Size2d, stride: Size2d, padding: Any, **rest: Any
) -> list[Call] | None:
    window = _Window(out, g, w.shape[2:], stride, padding)
    if not _takes(machine, window, w, **rest) or not _in_chunks(out):
        return None
    if not contiguous(g):
        return None
    calls, weights = _arranged(machine, w, turned=True)
    return [*calls, *(_product(machine, g, weights, out, *axes) for axes in _classes(window))]


@kernel(conv_last.conv2d_last_dw)
def conv2d_last_dw(
    machine: Machine, out: Any, x: Any, g: Any, *, kernel: Size2d, stride: Size2d, padding: Any, **rest: Any
) -> list[Call] | None:
    window = _Window(x, g, kernel, stride, padding)
    if not _takes(machine, window, out, **rest):
        return None
    calls = []
    if not _in_chunks(x):
        unfold, window = _unfolded(machine, window)
        calls.append(unfold)
    if not contiguous(window.x, g):
        return None
    return [*calls, *_sums(machine, window, out)]


# -- what the kernels take ---------------------------------------------------------------------------------------------


def _takes(machine: Machine, window: _Window, w: Any, *, dilation: Size2d, groups: int) -> bool:
    arrays = (window.x, window.y, w)
    if (
        groups > 1
        or dilation != (1, 1)
        or machine.capability < TENSOR
        or w.dtype.name not in DTYPES
        or not _in_chunks(window.y)
    ):
        return False
    fits = all(a.dtype == w.dtype and 0 < a.size < MOST and address(a) % 16 == 0 for a in arrays)
    return fits and w.flags.c_contiguous


def _in_chunks(a: Any) -> bool:
    return a.shape[3] * a.itemsize % 16 == 0


def _tiles(machine: Machine, a: Any) -> tuple[Tile, ...]:
    """Warpgroups multiply float32 alone, of which each product is three."""
    return GROUP_TILES if a.dtype == "float32" and machine.capability == HOPPER else TILES


def _kernel(machine: Machine, name: str, tile: Tile, *arrays: Any) -> Any:
    return machine.kernel(text(arrays[0].dtype.name, index_dtype(*(a.size for a in arrays)), tile), name)


def _arranged(machine: Machine, w: Any, turned: bool = False) -> tuple[list[Call], Any]:
    """The weights (taps, results, channels) of a product, and what brings them there."""
    o, c, taps = *w.shape[:2], prod(w.shape[2:])
    if taps == 1 and not turned:
        return [], w.reshape(1, o, c)
    rows, columns = (c, o) if turned else (o, c)
    weights = machine.xp.empty((taps, rows, columns), w.dtype)
    arguments = (w, weights, o * c, columns, taps, np.bool_(turned))
    return [partial(_kernel(machine, "arrange", _tiles(machine, w)[-1], w), *spread(o * c), arguments)], weights


def _unfolded(machine: Machine, window: _Window) -> tuple[Call, _Window]:
    """The same convolution with a 1x1 kernel, of more channels, and the call that makes its images."""
    x, y = window.x, window.y
    each = 16 // x.itemsize
    width = -(-x.shape[3] * prod(window.kernel) // each) * each
    patches = machine.xp.empty((*y.shape[:3], width), x.dtype)
    strides = (s // x.itemsize for s in x.strides)
    height, columns, _, y_columns, *others = window.sizes
    numbers = (patches.size, *strides, height, columns, y_columns, *others, *window.channels[:2], width)
    launch = _kernel(machine, "patches", _tiles(machine, x)[-1], patches, x)
    call = partial(launch, *spread(patches.size), (x, patches, *numbers))
    return call, _Window(patches, y, (1, 1), (1, 1), FRAMELESS)


# -- launches ----------------------------------------------------------------------------------------------------------


def _tile(tiles: Sequence[Tile], places: int, results: int) -> Tile:
    """The largest tile of which there are enough."""
    fits = (t for t in tiles if results > t.results // 2 and -(-places // t.places) * -(-results // t.results) >= BUSY)
    return next(fits, tiles[-1])


def _forward(machine: Machine, window: _Window, weights: Any) -> Call:
    axes = []
    for k, unit in enumerate((window.kernel[1], 1)):  # how many taps lie between neighbors
        size, count, first = window.x.shape[k], window.y.shape[k], -window.padding[k][0]
        axes.append(_Axis(size, count, window.stride[k], first, window.kernel[k], unit, 0, 1, 0))
    return _product(machine, window.x, weights, window.y, *axes)


def _classes(window: _Window) -> list[tuple[_Axis, _Axis]]:
    """Pixels that the same taps of a kernel reach lie a stride apart. They meet the taps last to first."""
    axes: tuple[list[_Axis], list[_Axis]] = ([], [])
    for k, unit in enumerate((window.kernel[1], 1)):
        step, size, place = window.stride[k], window.x.shape[k], window.padding[k][0]
        for origin in range(min(step, size)):
            taps = range((origin + place) % step, window.kernel[k], step)
            first = (origin + place) // step - (len(taps) - 1)
            last = taps.start + (len(taps) - 1) * step
            count = len(range(origin, size, step))
            axes[k].append(
                _Axis(window.y.shape[k], count, 1, first, len(taps), -step * unit, last * unit, step, origin)
            )
    return [(row, column) for row in axes[0] for column in axes[1]]


def _product(machine: Machine, x: Any, weights: Any, y: Any, row: _Axis, column: _Axis) -> Call:
    """`convolve`, for the pixels of y that these axes name."""
    (_, width, n, results), channels = y.shape, x.shape[3]
    places = row.count * column.count * n
    tile = _tile(_tiles(machine, x), places, results)
    side = next((s for s in NEIGHBORS if column.count >= WIDE and column.count % s == 0), 1)
    target = (row.apart * width, column.apart, row.origin * width + column.origin)
    numbers = (*row[:6], *column[:6], row.tap + column.tap, *target, n, channels, results, side)
    grid = (-(-places // tile.places), -(-results // tile.results))
    return partial(_kernel(machine, "convolve", tile, x, weights, y), grid, tile.block, (x, weights, y, *numbers))


def _sums(machine: Machine, window: _Window, dw: Any) -> list[Call]:
    """The sum over positions in parts, and the sum of parts."""
    x, g, (n, width, results) = window.x, window.y, window.channels
    fits = (t for t in _tiles(machine, x) if results > t.places // 2 and width > t.results // 2)
    taps, tile = prod(window.kernel), next(fits, _tiles(machine, x)[-1])
    tiles = taps * -(-results // tile.places) * -(-width // tile.results)
    (threads,), steps = tile.block, prod(g.shape[:3]) * x.itemsize // 64
    splits = max(1, min(RESIDENT // (threads * tiles), steps // LEAST_STEPS))
    parts = machine.xp.empty((splits, taps, results, width), "float32")
    add = _kernel(machine, "convolve_dw", tile, x, g, parts)
    join = _kernel(machine, "join_parts", tile, x, g, parts)
    numbers = (dw.size, splits, taps, dw.size // (results * taps), width)
    return [
        partial(add, (tiles, splits), (threads,), (x, g, parts, *window.sizes, n, width, results)),
        partial(join, *spread(dw.size), (parts, dw, *numbers)),
    ]
