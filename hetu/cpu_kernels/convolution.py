"""Convolution and its gradients by the register tile of `convolution.c`, for images of any layout.

Kernels are packed into panels anew on every call, or where there are few pixels, these are (`few_pixels.c`). Groups of
few outputs go plane by plane in `planes.c`; where channels lie side by side, a kernel for each goes by `depthwise.c`;
3 x 3 taps of many channels go by `winograd.c`, where an infinite pixel makes a NaN of its neighbors, and images that
lie otherwise are copied first. Gain: 3 to 20 times the speed of the forward functions, 0.3 to 1.2 of PyTorch's time;
Winograd's 1.3 to 2 times that of the tile alone, that of few pixels 1.1 to 4. Off with `HETU_KERNELS=0`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.kernels import Call
from ..ops.conv import conv2d, conv2d_dw, conv2d_dx
from ..ops.window import Pair, Window
from .c_calls import all_or_none, c_call
from .depthwise import VECTOR, Tap, along_channels, depthwise_call
from .moves import moved
from .recipes import kernel

FILE = "convolution.c"
STRIP = 32  # output channels of a job, as in `convolution.c`
BAND, BAND_OF_SLOPES = (1 << 18, 1), (1 << 15, 128)  # bytes and least pixels of a band, forward and for slopes
LARGE, MORE = 150_000, 16  # numbers of a group's kernel beyond which it is in no cache; then bands are so much larger
PIXELS = 96  # that a panel of the kernel should meet while it is in the cache
LEAST = 1 << 20  # multiplications that are worth another thread
FEW = 8  # outputs of a group up to which vectors go along pixels, in `planes.c`
SLACK, TAPS = 512, 9  # bytes of the longest tile, and taps of a tile of sums, in `planes.c`
FEW_PIXELS, ROWS = 128, 12  # the most for which a kernel is read in place, and outputs of a job, in `few_pixels.c`
LEAST_KERNEL = 1 << 12  # numbers of such a kernel
PARTS = 8  # of a batch, whose gradients of the kernel are summed apart
ENOUGH = 512  # pixels or tiles of a part, beside which it costs little to add its sums
PLACES, BLOCK = 16, 96  # of a tile, and tiles of a job, in `winograd.c`
CHANNEL, OUTPUT, KERNEL, START, COPY = 64, 45, 300, 12, 50  # what its parts take, and a copy, in multiplications
WORTH = 0.85  # of the multiplications of the taps


def _axis_taps(window: Window, axis: int) -> list[tuple[int, int]]:
    """(distance, place in the kernel) of each tap along an axis, going forward."""
    return [(k * window.dilation[axis] - window.padding[axis][0], k) for k in range(window.kernel[axis])]


def _phase_taps(window: Window, axis: int, phase: int) -> list[tuple[int, int]]:
    """The same going back, of the output pixels at `phase` within a stride: only taps that meet them."""
    step = window.stride[axis]
    met = ((phase - distance, k) for distance, k in _axis_taps(window, axis))
    return sorted((distance // step, k) for distance, k in met if distance % step == 0)


class _Product:
    """A convolution of `x` (n, c, h, w) into `out` (n, o, y, x), both views, by `taps`: the words of its calls."""

    def __init__(
        self,
        out: np.ndarray,
        x: np.ndarray,
        taps: Sequence[Tap],
        steps: Pair,
        groups: int,
        room: Pair,
        scratch: Scratch,
    ) -> None:
        most, self.least = room  # of a band, in bytes, and in pixels
        if len(taps) == 1 and taps[0][:2] == (0, 0) and steps == (1, 1) and _by_pixel(x) and _by_pixel(out):
            most = min(most, max(PIXELS, x[0, 0].size) * (x.shape[1] // groups) * x.itemsize)  # for as many jobs
            x, out = map(_one_image, (x, out))
        self.out, self.x, self.groups, self.size = out, x, groups, x.itemsize
        self.channels, self.outputs, self.taps = x.shape[1] // groups, out.shape[1] // groups, taps
        rows, columns = out.shape[2:]
        downs, rights = [t.down for t in taps] or [0], [t.right for t in taps] or [0]
        top, left = min(downs), min(rights)
        self.wide, self.tall = (columns - 1) * steps[1] + max(rights) - left + 1, max(downs) - top + 1
        near = [x.shape[1] > 1 and a.strides[1] == self.size for a in (x, out)]  # whether channels lie side by side
        self.planes = self.outputs <= FEW and not (near[0] and (groups > 1 or len(taps) == 1))
        line = -(-self.wide // steps[1]) * steps[1] * self.channels * self.size
        self.most = BAND[0] if self.planes else most
        self.band = min(rows, max(self.most // (steps[0] * line), -(-self.least // columns)))
        self.high = self.band - 1 + -(-self.tall // steps[0])
        self.runs = self._runs(top, left, steps)
        self.depth, self.tiles = len(taps) * self.channels, len(x) * -(-rows // 2) * -(-columns // 2)
        grid = [Tap(top + i, left + j, t.place) for (i, j), t in zip(product(range(3), range(3)), taps)]
        square = grid == taps and len(taps) == 9 and steps == (1, 1)
        self.winograd = square and groups == 1 and self._saves(sum(a.size for a, n in zip((x, out), near) if not n))
        sizes = (self.channels, *x.shape[2:], rows, columns, self.outputs, groups, *steps, top, left)
        self.geometry = (*sizes, self.band, self.wide, self.tall, self.runs, self.count, self.depth)
        self.many = max(1, min(len(x), PIXELS // (rows * columns))) if self.band == rows else 1
        self.pixels = (self.high * steps[0] if self.planes else (self.band - 1) * steps[0] + self.tall) * line
        self.strips = -(-self.outputs // STRIP)
        self.scratch, self.bands, self.parts = scratch, -(-rows // self.band), 1

    def _saves(self, copied: int) -> bool:
        """Whether Winograd's tiles take clearly fewer multiplications than taps do, with transforms and copies."""
        pixels, channels, outputs = self.out[:, 0].size, _up(self.channels, VECTOR // 4), _up(self.outputs, STRIP)
        tile = PLACES * (channels + START) * outputs + CHANNEL * channels + OUTPUT * outputs
        numbers = self.channels * self.outputs
        return bool(self.tiles * tile + KERNEL * numbers + COPY * copied < WORTH * 9 * pixels * numbers)

    def _near(self, images: np.ndarray) -> np.ndarray:
        """The images, or room for them, with channels side by side."""
        n, c, rows, columns = images.shape
        lie_so = images.strides[1] == self.size
        return images if lie_so else self.scratch.empty((rows, columns, n, c), images.dtype).transpose(2, 3, 0, 1)

    def _runs(self, top: int, left: int, steps: Pair) -> np.ndarray:
        """(offset, length) of the taps in a band of pixels, neighbors in one.

        A band of planes has one for each pixel of a step, where each tap is apart.
        """
        runs = list[list[int]]()
        pitch = -(-self.wide // steps[1])
        for tap in self.taps:
            if self.planes:
                (i, u), (j, v) = divmod(tap.down - top, steps[0]), divmod(tap.right - left, steps[1])
                runs.append([((u * steps[1] + v) * self.high + i) * pitch + j, 1])
                continue
            offset = ((tap.down - top) * self.wide + tap.right - left) * self.channels
            if runs and sum(runs[-1]) == offset:
                runs[-1][1] += self.channels
            else:
                runs.append([offset, self.channels])
        self.count = len(runs)
        return np.array((runs or [[0, 0]]) + runs[-1:] * (TAPS - 1), np.int64)

    def _panels(self) -> np.ndarray:
        """Room for the kernel, and for each part of its gradient."""
        depth = PLACES * self.channels if self.winograd else self.depth
        return self.scratch.empty((self.parts * self.groups * self.strips * STRIP * depth,), self.x.dtype)

    def _divide(self, summed: int, blocks: int) -> None:
        """Divide what is summed, pixels or tiles, among parts, where strips alone are few jobs."""
        wanted = -(-PARTS // (self.groups * self.strips))
        self.parts = max(1, min(wanted, blocks, summed // ENOUGH))
        self.panels = self._panels()

    def words(self) -> tuple[Any, ...]:
        return *_images(self.out), *_images(self.x), self.panels, *self.geometry, self.many, len(self.x), self.parts

    def kernel_call(self, name: str, w: np.ndarray, outer: int, inner: int) -> Call | None:
        """A call between panels and a kernel, whose axes `outer` and `inner` are outputs and channels."""
        strides, places, of_group = self._kernel(w, outer)
        sizes = (strides[outer], strides[inner], self.outputs, self.channels, places, len(self.taps))
        words, file = (self.panels, w, *sizes, of_group, self.parts), "winograd.c" if self.winograd else FILE
        jobs, grain = self.groups * self.strips, -(-LEAST // max(self.depth * STRIP, 1))
        return c_call(file, name, w.dtype, *words, jobs=jobs, grain=grain)

    def _kernel(self, w: np.ndarray, outer: int) -> tuple[list[int], np.ndarray, int]:
        """The strides of a kernel, the place of each tap's weight, and the stride of groups."""
        strides = [s // self.size for s in w.strides]
        places = np.array([t.place[0] * strides[2] + t.place[1] * strides[3] for t in self.taps] or [0], np.int64)
        return strides, places, strides[0] * (self.outputs if outer == 0 else self.channels)

    def calls(self, w: np.ndarray, outer: int) -> list[Call | None]:
        """Calls for the product with a kernel, whose axis `outer` is that of the outputs."""
        if self.planes:
            return [self._plane_call("convolve_planes", w, w, outer, self.groups * len(self.x) * self.bands)]
        if outer == 0 and self.groups == 1 and self._is_few(w):
            return self._few_calls(w)
        self.panels = self._panels()
        if self.winograd:
            x, out = self.x, self.out
            self.x, self.out = map(self._near, (x, out))
            blocks = self._tile_call("winograd", -(-self.tiles // BLOCK) * self.strips, min(self.tiles, BLOCK) * STRIP)
            kernel = self.kernel_call("transform_kernel", w, outer, 1 - outer)
            return [kernel, *moved(self.x, x), blocks, *moved(out, self.out)]
        return [self.kernel_call("pack_kernel", w, outer, 1 - outer), self.forward()]

    def _is_few(self, w: np.ndarray) -> bool:
        """Whether to gather the pixels takes clearly less time than to pack the kernel."""
        pixels = self.out[:, 0].size
        return w[0].flags.c_contiguous and pixels <= min(FEW_PIXELS, self.outputs // 2) and w.size >= LEAST_KERNEL

    def _few_calls(self, w: np.ndarray) -> list[Call | None]:
        pixels = self.out[:, 0].size
        self.panels = self.scratch.empty((_up(pixels, STRIP) * self.depth,), w.dtype)
        away = np.array([(t.down, t.right) for t in self.taps], np.int64)
        words, file = (*self.words(), w, w.strides[0] // self.size, away), "few_pixels.c"
        jobs, grain = -(-self.outputs // ROWS), -(-LEAST // (ROWS * self.depth * pixels))
        zeros = self.channels * self.size
        return [
            c_call(file, "gather_pixels", w.dtype, *words, jobs=len(self.taps), grain=len(self.taps), scratch=zeros),
            c_call(file, "convolve_few", w.dtype, *words, jobs=jobs, grain=grain),
        ]

    def slope_calls(self, w: np.ndarray) -> list[Call | None]:
        """Calls for the gradient of the kernel, where `out` has the slopes."""
        if self.planes:
            parts = min(len(self.x), PARTS)
            numbers = parts * self.groups * self.outputs * self.channels * (len(self.taps) + TAPS - 1)
            sums = self.scratch.empty((numbers * VECTOR // self.size,), w.dtype)
            return [
                self._plane_call("convolve_planes_slopes", sums, w, 0, self.groups * parts, parts),
                self._plane_call("add_parts", sums, w, 0, self.groups, parts),
            ]
        if self.winograd:
            x, out = self.x, self.out
            self.x, self.out = map(self._near, (x, out))
            self._divide(self.tiles, -(-self.tiles // BLOCK))
            jobs = self.parts * self.strips
            strips = self._tile_call("winograd_slopes", jobs, -(-self.tiles // self.parts) * STRIP)
            return [*moved(self.x, x), *moved(self.out, out), strips, self.kernel_call("gather_kernel", w, 0, 1)]
        return [self.slopes(), self.kernel_call("unpack_kernel", w, 0, 1)]

    def _tile_call(self, name: str, jobs: int, products: int) -> Call | None:
        first, (rows, columns) = self.taps[0], self.out.shape[2:]
        sizes = (self.channels, *self.x.shape[2:], rows, columns, self.outputs, len(self.x), first.down, first.right)
        words = (*_images(self.out), *_images(self.x), self.panels, *sizes, BLOCK, self.parts)
        pixels, sums = BLOCK * (self.channels * self.size + 2 * VECTOR) + VECTOR, (BLOCK + PLACES) * 2 * VECTOR
        grain, scratch = -(-LEAST // (PLACES * products * self.channels)), PLACES * (pixels + sums + 2 * BLOCK)
        return c_call("winograd.c", name, self.x.dtype, *words, jobs=jobs, grain=grain, scratch=scratch)

    def _plane_call(
        self, name: str, weights: np.ndarray, w: np.ndarray, outer: int, jobs: int, parts: int = 1
    ) -> Call | None:
        strides, places, of_group = self._kernel(w, outer)
        kernel = strides[outer], of_group, strides[1 - outer], places, w, len(self.taps) + TAPS - 1
        words = (*_images(self.out), *_images(self.x), weights, *self.geometry, parts, len(self.x), *kernel)
        row = self.band * self.wide * self.size + VECTOR + SLACK
        apart = 2 * VECTOR * self.channels + SLACK  # at most, between and after planes
        work = self.x.size // self.x[0, 0].size * self.out[0, 0].size * len(self.taps) * self.outputs // jobs
        more = {"grain": -(-LEAST // max(work, 1)), "scratch": self.outputs * row + self.pixels + apart}
        return c_call("planes.c", name, w.dtype, *words, jobs=jobs, **more)

    def forward(self) -> Call | None:
        rows, columns = self.out.shape[2:]
        jobs = -(-len(self.x) // self.many) * self.groups * -(-rows // self.band)
        work = self.many * self.band * columns * self.depth * self.outputs
        scratch = 16 * (self.many * self.band * columns + 16) + self.many * self.pixels
        grain = -(-LEAST // max(work, 1))
        return c_call(FILE, "convolve", self.x.dtype, *self.words(), jobs=jobs, grain=grain, scratch=scratch)

    def slopes(self) -> Call | None:
        if self.band == self.out.shape[2]:
            wanted = -(-self.least // self.out[0, 0].size)
            self.many = min(len(self.x), max(self.most // self.pixels, wanted))
        pixels, columns = self.out[:, 0].size, self.out.shape[3]
        self._divide(pixels, -(-len(self.x) // self.many) * self.bands)
        jobs, work = self.parts * self.groups * self.strips, pixels // self.parts * self.depth * STRIP
        band = 16 * self.band + self.band * columns * STRIP * self.size + self.pixels
        scratch = self.many * band + 8 * (self.depth + 32)
        more = {"jobs": jobs, "grain": -(-LEAST // max(work, 1)), "scratch": scratch}
        return c_call(FILE, "convolve_slopes", self.x.dtype, *self.words(), **more)


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _images(x: np.ndarray) -> tuple[Any, ...]:
    return x, *(s // x.itemsize for s in x.strides)


def _by_pixel(x: np.ndarray) -> bool:
    """Whether the images lie pixel by pixel."""
    n, _, _, columns = x.shape
    return bool(n > 1 and x.strides[3] == n * x.strides[0] and x.strides[2] == columns * x.strides[3])


def _one_image(x: np.ndarray) -> np.ndarray:
    """Images that lie pixel by pixel as one, whose rows are neighbors in memory."""
    n, c, rows, columns = x.shape
    return x.transpose(1, 2, 3, 0).reshape(1, c, rows * columns, n)


def _fits(*arrays: np.ndarray) -> bool:
    return all(a.dtype == arrays[0].dtype and a.size for a in arrays)


def _calls(
    out: Any, x: Any, w: Any, outer: int, taps: Sequence[Tap], steps: Pair, groups: int, scratch: Scratch
) -> list[Call | None]:
    if along_channels(out, x, w, groups):
        return [depthwise_call("convolve_channels", out, x, w, taps, steps)]
    return _Product(out, x, taps, steps, groups, BAND, scratch).calls(w, outer)


@kernel(conv2d)
def conv2d_bind(
    xp: ModuleType, out: Any, x: Any, w: Any, *, groups: int, scratch: Scratch, **attrs: Any
) -> list[Call] | None:
    if not _fits(out, x, w):
        return None
    window = Window(w.shape[2:], **attrs)
    taps = [Tap(i, j, (u, v)) for (i, u), (j, v) in product(_axis_taps(window, 0), _axis_taps(window, 1))]
    return all_or_none(_calls(out, x, w, 0, taps, window.stride, groups, scratch))


@kernel(conv2d_dx)
def conv2d_dx_bind(
    xp: ModuleType, out: Any, g: Any, w: Any, *, size: Pair, groups: int, scratch: Scratch, **attrs: Any
) -> list[Call] | None:
    """A product for each phase of the stride, of the pixels of `out` that lie at it."""
    if not _fits(out, g, w):
        return None
    window, calls = Window(w.shape[2:], **attrs), list[Call | None]()
    for phase in product(*map(range, window.stride)):
        part = out[:, :, phase[0] :: window.stride[0], phase[1] :: window.stride[1]]
        pairs = product(*(_phase_taps(window, axis, phase[axis]) for axis in (0, 1)))
        taps = [Tap(i, j, (u, v)) for (i, u), (j, v) in pairs]
        if part.size:
            calls += _calls(part, g, w, 1, taps, (1, 1), groups, scratch)
    return all_or_none(calls)


@kernel(conv2d_dw)
def conv2d_dw_bind(
    xp: ModuleType, out: Any, x: Any, g: Any, *, kernel: Pair, groups: int, scratch: Scratch, **attrs: Any
) -> list[Call] | None:
    if not _fits(out, x, g):
        return None
    window = Window(kernel, **attrs)
    taps = [Tap(i, j, (u, v)) for (i, u), (j, v) in product(_axis_taps(window, 0), _axis_taps(window, 1))]
    if along_channels(g, x, out, groups):
        return all_or_none([depthwise_call("convolve_channels_slopes", g, x, out, taps, window.stride)])
    most, least = BAND_OF_SLOPES
    room = (most * MORE if out.size > groups * LARGE else most, least)
    made = _Product(g, x, taps, window.stride, groups, room, scratch)
    return all_or_none(made.slope_calls(out))
