"""Operators of ONNX on images of any number of axes: windows that slide, and what is read between pixels.

Convolutions and pools of two axes are ours where we have them. The others are compositions of taps: for each place of
the window, the numbers that lie under it at each step. Between pixels is read at places that are known, by a matrix for
each axis, or at those that a node gives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from .. import ops
from ..core.autodiff import gradients
from ..core.graph import OPS, Node
from ..core.operators import cast_to
from ..core.types import Dim, is_float, normalize_axis, product
from ..ops.batch_norm import lift
from ..ops.reduction import as_floats
from .arithmetic import quantized, shifted
from .indexing import end, joined, scattered, whole
from .meaning import KnownArray, OutputCount, bounded, few, meaning, meanings
from .standard import broken


class Sliding(NamedTuple):
    """How a window slides along one axis of an image, whose size may be open."""

    size: Any
    kernel: int
    stride: int
    dilation: int
    pads: tuple[int, int]
    ceil: bool = False

    @property
    def extent(self) -> int:
        return (self.kernel - 1) * self.dilation + 1

    @property
    def more(self) -> Any:
        """How far the last step reaches beyond the frame; with `ceil` it begins within the image and may end beyond."""
        if not self.ceil:
            return 0
        room = self.size + sum(self.pads) - self.extent
        more = -room % self.stride
        return more if room + more < self.size + self.pads[0] else more - self.stride

    @property
    def steps(self) -> Any:
        return (self.size + sum(self.pads) + self.more - self.extent) // self.stride + 1

    def cut(self, place: int) -> slice:
        """What a place of the window meets, step by step."""
        first = place * self.dilation
        return slice(first, first + (self.steps - 1) * self.stride + 1, self.stride)


def window_of(
    sizes: Sequence[Any], kernel_shape: Any, strides: Any = None, dilations: Any = None, pads: Any = None,
    auto_pad: str = "NOTSET", ceil_mode: int = 0,
) -> list[Sliding]:  # fmt: skip
    """The attributes of ONNX, for images of these sizes."""
    n = len(sizes)
    strides, dilations, pads = strides or (1,) * n, dilations or (1,) * n, pads or (0,) * 2 * n
    if {len(kernel_shape), len(strides), len(dilations), len(pads) / 2} != {n}:
        said = f"its window has not {n} axes: kernel {kernel_shape}, strides {strides}, dilations {dilations}"
        raise broken(f"{said}, pads {pads}")
    pairs = [(0, 0)] * n if auto_pad == "VALID" else zip(pads[:n], pads[n:])
    window = [Sliding(*axis, bool(ceil_mode)) for axis in zip(sizes, kernel_shape, strides, dilations, pairs)]
    if not auto_pad.startswith("SAME"):
        return window
    ends = [(-(-int(a.size) // a.stride) - 1) * a.stride + a.extent for a in window]
    return [a._replace(pads=halves(max(end - a.size, 0), auto_pad)) for a, end in zip(window, ends)]


def halves(width: int, auto_pad: str) -> tuple[int, int]:
    return (width // 2, width - width // 2) if auto_pad == "SAME_UPPER" else (width - width // 2, width // 2)


def taps(x: Node, window: list[Sliding], value: float, frame: float | None = None) -> list[Node]:
    """For each place of the window, in row order, what it meets in images: of this value are a frame, unless it has its
    own, and what lies beyond."""
    few(math.prod(axis.kernel for axis in window), "places of its window")
    frame = value if frame is None else frame
    x = ops.pad(x, pad_width=((0, 0), (0, 0), *(axis.pads for axis in window)), value=frame)
    x = ops.pad(x, pad_width=((0, 0), (0, 0), *((0, max(axis.more, 0)) for axis in window)), value=value)
    every = (slice(None), slice(None))
    places = itertools.product(*(map(axis.cut, range(axis.kernel)) for axis in window))
    return [x[(*every, *cuts)] for cuts in places]


def ours(window: list[Sliding], x: Node) -> bool:
    """Whether our pools of two axes have it, whose windows touch the image at each step."""
    inside = all(max(axis.pads) < axis.kernel and axis.dilation == 1 and not axis.ceil for axis in window)
    return len(window) == 2 and inside and is_float(x.dtype)


# -- convolutions --------------------------------------------------------------------------------------------------


@meaning("Conv")
def conv(x: Node, w: Node, b: Node | None = None, *, group: int = 1, **slide: Any) -> Node:
    window = window_of(x.shape[2:], **{**slide, "kernel_shape": w.shape[2:]})
    if len(window) <= 2:
        wide = [ops.expand_dims(n, axis=2) if len(window) == 1 else n for n in (x, w)]  # one row
        own = [*[Sliding(1, 1, 1, 1, (0, 0))] * (2 - len(window)), *window]
        stride, dilation, padding = zip(*((axis.stride, axis.dilation, axis.pads) for axis in own))
        y = ops.conv2d(*wide, stride=stride, dilation=dilation, padding=padding, groups=group)
        y = ops.squeeze(y, axis=2) if len(window) == 1 else y
    else:
        y = _conv_by_taps(x, w, window, group)
    return y if b is None else y + lift(b, y, 1)


def _conv_by_taps(x: Node, w: Node, window: list[Sliding], group: int) -> Node:
    n, outputs = x.shape[0], w.shape[0]
    columns = ops.stack(taps(x, window, 0), axis=2)
    columns = ops.reshape(columns, (n, group, product(w.shape[1:]), product(columns.shape[3:])))
    y = ops.matmul(ops.reshape(w, (group, outputs // group, -1)), columns)
    return ops.reshape(y, (n, outputs, *(axis.steps for axis in window)))


@meaning("ConvTranspose")
def conv_transpose(
    x: Node, w: Node, b: Any = None, *, group: int = 1, output_padding: Any = (), output_shape: Any = (), **slide: Any
) -> Node:
    """What reaches the images of a convolution from its result, which is linear in them: their gradient."""
    n, olds, auto_pad = x.ndim - 2, x.shape[2:], slide.pop("auto_pad", "")
    window = window_of(olds, **{**slide, "kernel_shape": w.shape[2:]})
    longest = [(a.size - 1) * a.stride + a.extent + e for a, e in zip(window, output_padding or (0,) * n, strict=True)]
    pairs = [axis.pads for axis in window]
    news = [size - sum(pair) for size, pair in zip(longest, pairs)]
    if auto_pad.startswith("SAME") or output_shape:
        news = output_shape or [axis.size * axis.stride for axis in window]
        pairs = [halves(max(int(size - new), 0), auto_pad) for size, new in zip(longest, news, strict=True)]
    image = ops.full(shape=(x.shape[0], w.shape[1] * group, *news), fill_value=0, dtype=x.dtype)
    read = conv(image, w, group=group, **{**slide, "pads": [*(p[0] for p in pairs), *(p[1] for p in pairs)]})
    read = read[(slice(None), slice(None), *(slice(0, s) for s in olds))]
    y = gradients(ops.sum(read * x), [image])[0]
    return y if b is None else y + lift(b, y, 1)


def conv_integer(x: Node, w: Node, x_zero: Node | None = None, w_zero: Node | None = None, **slide: Any) -> Node:
    """In float64, which holds all sums of products of bytes."""
    return conv(*(cast_to(shifted(n, zero, 0), np.dtype("float64")) for n, zero in ((x, x_zero), (w, w_zero))), **slide)


meanings(ConvInteger=conv_integer, QLinearConv=quantized(conv_integer, axis=1))


# -- pools -----------------------------------------------------------------------------------------------------------


@meaning("MaxPool")
def max_pool(x: Node, *, storage_order: int = 0, outputs: OutputCount = 1, **slide: Any) -> tuple[Node, ...]:
    """The greatest number under the window, and its place among all of the array."""
    window, least = window_of(x.shape[2:], **slide), end(x.dtype, -1)
    if outputs == 1 and ours(window, x):
        kernel, stride, padding = zip(*((axis.kernel, axis.stride, axis.pads) for axis in window))
        return (ops.max_pool2d(x, kernel=kernel, stride=stride, padding=padding),)
    if outputs == 1:
        return (reduce(ops.maximum, taps(x, window, least)),)
    column, sizes = ops.stack(taps(x, window, least), axis=0), [int(axis.size) for axis in window]
    bounded(*sizes)
    image = np.arange(math.prod(sizes)).reshape(1, 1, *sizes, order="F" if storage_order else "C")
    own = ops.stack(taps(ops.constant(value=image), window, -1), axis=0)
    there = ops.logical_and(ops.equal(column, ops.max(column, axis=0)), own >= 0)  # never one of the frame
    tap = ops.argmax(cast_to(there, np.dtype("int8")), axis=0, keepdims=True)
    found = ops.take_along_axis(ops.broadcast_to(own, column.shape), tap, axis=0)[0]
    first = ops.reshape(ops.arange(product(x.shape[:2])) * math.prod(sizes), (*x.shape[:2], *[1] * len(sizes)))
    return ops.max(column, axis=0), found + first


@meaning("AveragePool")
def average_pool(x: Node, *, count_include_pad: int = 0, **slide: Any) -> Node:
    """With `count_include_pad` the frame that was asked for counts, but not what `ceil_mode` adds."""
    window = window_of(x.shape[2:], **slide)
    if ours(window, x) and not any(any(axis.pads) for axis in window):
        return ops.avg_pool2d(x, kernel=[axis.kernel for axis in window], stride=[axis.stride for axis in window])
    ones = ops.full(shape=(1, 1, *x.shape[2:]), fill_value=1, dtype=x.dtype)
    count = reduce(OPS["add"], taps(ones, window, 0, frame=int(bool(count_include_pad))))
    return reduce(OPS["add"], taps(x, window, 0)) / count


meanings(LpPool=lambda x, *, p=2, **slide: ops.norm(ops.stack(taps(x, window_of(x.shape[2:], **slide), 0)), 0, p))


@meaning("MaxUnpool")
def max_unpool(x: Node, places: Node, output_shape: KnownArray = None, **slide: Any) -> Node:
    """Zeros, but for the numbers of a pool at the places that they came from."""
    window = window_of(x.shape[2:], **slide)
    own = [*x.shape[:2], *((int(axis.size) - 1) * axis.stride + axis.kernel - sum(axis.pads) for axis in window)]
    zeros = ops.full(shape=(math.prod(own),), fill_value=0, dtype=x.dtype)
    made = ops.reshape(scattered(zeros, ops.flatten(places), ops.flatten(x), "none"), own)
    return ops.pad(made, pad_width=tuple((0, int(w) - o) for w, o in zip(whole(output_shape) or own, own)))


@meaning("Col2Im")
def columns_to_image(x: Node, image_shape: KnownArray, block_shape: KnownArray, **slide: Any) -> Node:
    """Each place of a block back where it came from, summed: the gradient of what windows meet."""
    sizes, block = whole(image_shape), whole(block_shape)
    image = ops.full(shape=(x.shape[0], int(x.shape[1]) // math.prod(block), *sizes), fill_value=0, dtype=x.dtype)
    columns = ops.stack(taps(image, window_of(sizes, **{**slide, "kernel_shape": block}), 0), axis=2)
    return gradients(ops.sum(columns * ops.reshape(x, columns.shape)), [image])[0]


# -- between pixels ------------------------------------------------------------------------------------------------

NEAREST: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda at: np.ceil(at - 0.5),
    "round_prefer_ceil": lambda at: np.floor(at + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def cubic(d: Any, a: float = -0.75) -> Any:
    """R. Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981."""
    near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return (d <= 1) * near + (d > 1) * ((d < 2) * far)


# What a pixel weighs by its distance, of arrays and nodes alike, and which pixels count, from that before a place on.
KERNELS: dict[str, Any] = {"nearest": lambda d: d * 0 + 1, "linear": lambda d: (d < 1) * (1 - d), "cubic": cubic}
STEPS = {"nearest": (0,), "linear": (0, 1), "cubic": (-1, 0, 1, 2)}


def pixels_at(mode: str, old: int, new: int, scale: float, roi: tuple[float, float]) -> np.ndarray:
    """Where the new pixels of an axis lie among the old ones."""
    y, length, (first, last) = np.arange(new, dtype=float), scale * old, roi
    centers, turn = (y + 0.5) / scale - 0.5, y / (length - 1 or 1)
    return {
        "align_corners": turn * (old - 1),
        "asymmetric": y / scale,
        "half_pixel": centers,
        "half_pixel_symmetric": centers + old / 2 * (1 - new / length),
        "pytorch_half_pixel": centers if length != 1 else y * 0 - 0.5,
        "tf_crop_and_resize": (first + (turn if length != 1 else y + 0.5) * (last - first)) * (old - 1),
        "tf_half_pixel_for_nn": centers + 0.5,
    }[mode]


def weights(
    at: np.ndarray, old: int, kernel: Callable[[Any], Any], reach: int, stretch: float, inside: bool
) -> np.ndarray:
    """The (new, old) matrix whose rows weigh the pixels around places; beyond an end stands its last pixel again."""
    bounded(len(at), old)
    beyond = math.ceil(reach / stretch) + 1
    shares = kernel(np.abs(np.arange(-beyond, old + beyond) - at[:, None]) * stretch)
    made = shares[:, beyond:-beyond].copy()
    if not inside:
        made[:, 0] += shares[:, :beyond].sum(1)
        made[:, -1] += shares[:, -beyond:].sum(1)
    whole: np.ndarray = made / np.maximum(made.sum(1, keepdims=True), 1e-9)  # of none where nothing is near
    return whole


@meaning("Resize")
def resize(
    x: Node, roi: KnownArray = None, scales: KnownArray = None, sizes: KnownArray = None, *, antialias: int = 0,
    axes: Any = None, coordinate_transformation_mode: str = "half_pixel", cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0, extrapolation_value: float = 0.0, keep_aspect_ratio_policy: str = "stretch",
    mode: str = "nearest", nearest_mode: str = "round_prefer_floor",
) -> Node:  # fmt: skip
    chosen = [normalize_axis(a, x.ndim) for a in axes] if axes is not None else list(range(x.ndim))
    olds: list[Any] = [x.shape[axis] for axis in chosen]
    if news := whole(sizes):
        factors = [1.0 if new == old else new / int(old) for old, new in zip(olds, news)]
        if keep_aspect_ratio_policy != "stretch":
            factors = [(min if keep_aspect_ratio_policy == "not_larger" else max)(factors)] * len(chosen)
            news = [int(f * old + 0.5) for old, f in zip(olds, factors)]
    else:
        factors = whole(scales)
        news = [old * int(f) if f == int(f) else int(f * int(old)) for old, f in zip(olds, factors)]
    ends = whole(roi) or [0.0] * len(chosen) + [1.0] * len(chosen)
    crops = coordinate_transformation_mode == "tf_crop_and_resize"
    for k, (axis, scale, old, new) in enumerate(zip(chosen, factors, olds, news)):
        crop = ends[k], ends[len(chosen) + k]
        if new == old and math.isclose(scale, 1) and not (crops and crop != (0, 1)):
            continue
        if isinstance(old, Dim) and mode == "nearest":  # what is so of some sizes is so of all
            few = pixels_at(coordinate_transformation_mode, 8, 8 * int(scale), scale, crop)
            if np.array_equal(NEAREST[nearest_mode](few), np.arange(8).repeat(int(scale))):
                x = ops.repeat(x, int(scale), axis=axis)
                continue
        bounded(new)
        at = pixels_at(coordinate_transformation_mode, int(old), new, scale, crop)
        if mode == "nearest":
            x = ops.take(x, np.clip(NEAREST[nearest_mode](at), 0, old - 1).astype(int), axis=axis)
        else:
            kernel = KERNELS[mode] if mode != "cubic" else partial(cubic, a=cubic_coeff_a)
            matrix = weights(at, old, kernel, STEPS[mode][-1], min(scale, 1) if antialias else 1, bool(exclude_outside))
            order = [*range(axis), *range(axis + 1, x.ndim), axis]  # its own axis last
            turned = ops.permute_dims(as_floats(x), order)
            x = ops.permute_dims(turned @ matrix.T.astype(turned.dtype), np.argsort(order).tolist())
        if crops and (outside := (at < 0) | (at > old - 1)).any():
            x = ops.where(outside.reshape(-1, *(1,) * (x.ndim - axis - 1)), extrapolation_value, x)
    return x


def reflected(at: Node, low: float, high: float) -> Node:
    """Places within [low, high], turned back at either end as often as it takes."""
    way = ops.abs(at - low) % (2 * (high - low)) if high > low else at * 0
    return low + ops.where(way > high - low, 2 * (high - low) - way, way)


@meaning("GridSample")
def grid_sample(
    x: Node, grid: Node, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Node:
    """x (n, c, *sizes) at places (n, *new, axes), from -1 to 1 along each axis, the last axis first."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    sizes = [int(s) for s in x.shape[2:]]
    n, count, new = x.shape[0], len(sizes), grid.shape[1:-1]
    pixels, spots = ops.reshape(x, (n, x.shape[1], math.prod(sizes))), math.prod(new)
    grid = cast_to(ops.reshape(grid, (n, 1, spots, count)), np.dtype("float32"))
    beside = []
    for axis, size in enumerate(sizes):
        span = grid[..., count - 1 - axis] + 1
        at = span * ((size - 1) / 2) if align_corners else (span * size - 1) / 2
        ends = (0.0, size - 1.0) if align_corners else (-0.5, size - 0.5)
        beside.append(list(_beside(at, size, ends, mode, padding_mode)))
    parts = []
    for chosen in itertools.product(*beside):
        spot, shares, inside = zip(*chosen)
        place = ops.broadcast_to(cast_to(joined(spot, sizes), np.dtype("int64")), (n, x.shape[1], spots))
        found = ops.take_along_axis(pixels, place, axis=2) * cast_to(reduce(OPS["multiply"], shares), x.dtype)
        parts.append(ops.where(reduce(ops.logical_and, inside), found, 0))
    return ops.reshape(reduce(OPS["add"], parts), (n, x.shape[1], *new))


def _beside(
    at: Node, size: int, ends: tuple[float, float], mode: str, padding: str
) -> Iterator[tuple[Node, Node, Node]]:
    """The pixels that count for places along one axis, their shares, and whether they lie inside."""
    low = ops.floor(at) if mode != "nearest" else ops.round(at)
    for step in STEPS[mode]:
        pixel = low + step
        share = KERNELS[mode](ops.abs(at - pixel))
        pixel = ops.floor(reflected(pixel, *ends)) if padding == "reflection" else pixel
        clipped = ops.clip(pixel, 0, size - 1)
        inside = ops.equal(pixel, clipped) if padding == "zeros" else ops.equal(clipped, clipped)
        yield clipped, share, inside
