"""Operators of ONNX whose windows slide over images of one, two or three axes.

Convolutions and pools of two axes are ours where we have them. The others are compositions of taps: for each place of
the window, the numbers that lie under it at each step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from .. import ops
from ..core.autodiff import gradients
from ..core.errors import DataError
from ..core.graph import OPS, Node
from ..core.operators import cast_to
from ..core.types import is_float, product
from ..ops.batch_norm import lift
from .elementwise import dequantize, quantize, shifted
from .indexing import end, scattered
from .known import bounded, few
from .meaning import KnownArray, OutputCount, Slide, meaning
from .shapes import whole


@dataclass(frozen=True)
class Sliding:
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
    def steps(self) -> Any:
        """With `ceil` also one that begins within the image and ends beyond its frame."""
        room = self.size + sum(self.pads) - self.extent
        steps = (-(-room // self.stride) if self.ceil else room // self.stride) + 1
        return steps - 1 if self.ceil and (steps - 1) * self.stride >= self.size + self.pads[0] else steps

    @property
    def more(self) -> int:
        """How far the last step reaches beyond the frame."""
        return max((self.steps - 1) * self.stride + self.extent - self.size - sum(self.pads), 0) if self.ceil else 0

    def cut(self, place: int) -> slice:
        """What a place of the window meets, step by step."""
        first = place * self.dilation
        return slice(first, first + (self.steps - 1) * self.stride + 1, self.stride)


def window_of(
    sizes: Sequence[Any],
    kernel_shape: Any,
    strides: Any = None,
    dilations: Any = None,
    pads: Any = None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
) -> list[Sliding]:
    """The attributes of ONNX, for images of these sizes."""
    n = len(sizes)
    strides, dilations, pads = strides or (1,) * n, dilations or (1,) * n, pads or (0,) * 2 * n
    if {len(kernel_shape), len(strides), len(dilations), len(pads) / 2} != {n}:
        said = f"its window has not {n} axes: kernel {kernel_shape}, strides {strides}, dilations {dilations}"
        raise DataError(f"{said}, pads {pads}", fix="write the model again: onnx.checker.check_model")
    pairs = [(0, 0)] * n if auto_pad == "VALID" else list(zip(pads[:n], pads[n:]))
    if auto_pad.startswith("SAME"):
        extents = [(k - 1) * d + 1 for k, d in zip(kernel_shape, dilations)]
        lack = [max((-(-s // t) - 1) * t + e - s, 0) for s, t, e in zip(map(int, sizes), strides, extents)]
        pairs = [halves(v, auto_pad) for v in lack]
    return [Sliding(*axis, bool(ceil_mode)) for axis in zip(sizes, kernel_shape, strides, dilations, pairs)]


def halves(width: int, auto_pad: str) -> tuple[int, int]:
    return (width // 2, width - width // 2) if auto_pad == "SAME_UPPER" else (width - width // 2, width // 2)


def taps(x: Node, window: list[Sliding], value: float, frame: float | None = None) -> list[Node]:
    """For each place of the window, in row order, what it meets in images: of this value are a frame, unless it has its
    own, and what lies beyond."""
    few(math.prod(axis.kernel for axis in window), "places of its window")
    frame = value if frame is None else frame
    x = ops.pad(x, pad_width=((0, 0), (0, 0), *(axis.pads for axis in window)), value=frame)
    x = ops.pad(x, pad_width=((0, 0), (0, 0), *((0, axis.more) for axis in window)), value=value)
    every = (slice(None), slice(None))
    places = itertools.product(*(map(axis.cut, range(axis.kernel)) for axis in window))
    return [x[(*every, *cuts)] for cuts in places]


def ours(window: list[Sliding], x: Node) -> bool:
    """Whether our pools of two axes have it, whose windows touch the image at each step."""
    inside = all(max(axis.pads) < axis.kernel and axis.dilation == 1 and not axis.ceil for axis in window)
    return len(window) == 2 and inside and is_float(x.dtype)


# -- convolutions --------------------------------------------------------------------------------------------------


@meaning("Conv")
def conv(x: Node, w: Node, b: Node | None = None, *, group: int = 1, **slide: Slide) -> Node:
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
    x: Node,
    w: Node,
    b: Node | None = None,
    *,
    group: int = 1,
    output_padding: Any = None,
    output_shape: Any = None,
    **slide: Slide,
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


@meaning("ConvInteger")
def conv_integer(
    x: Node, w: Node, x_zero: Node | None = None, w_zero: Node | None = None, *, group: int = 1, **slide: Slide
) -> Node:
    """In float64, which holds all sums of products of bytes."""
    wide = (cast_to(shifted(n, zero, 0), np.dtype("float64")) for n, zero in ((x, x_zero), (w, w_zero)))
    return conv(*wide, group=group, **slide)


@meaning("QLinearConv")
def quantized_conv(
    x: Node,
    x_scale: Node,
    x_zero: Node,
    w: Node,
    w_scale: Node,
    w_zero: Node,
    y_scale: Node,
    y_zero: Node,
    b: Node | None = None,
    *,
    group: int = 1,
    **slide: Slide,
) -> Node:
    y = cast_to(conv_integer(x, w, x_zero, w_zero, group=group, **slide), np.dtype("int32"))
    y = y if b is None else y + lift(b, y, 1)
    return quantize(dequantize(y, x_scale * w_scale), y_scale, y_zero)


# -- pools -----------------------------------------------------------------------------------------------------------


@meaning("MaxPool")
def max_pool(x: Node, *, storage_order: int = 0, outputs: OutputCount = 1, **slide: Slide) -> tuple[Node, ...]:
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
def average_pool(x: Node, *, count_include_pad: int = 0, **slide: Slide) -> Node:
    """With `count_include_pad` the frame that was asked for counts, but not what `ceil_mode` adds."""
    window = window_of(x.shape[2:], **slide)
    if ours(window, x) and not any(any(axis.pads) for axis in window):
        return ops.avg_pool2d(x, kernel=[axis.kernel for axis in window], stride=[axis.stride for axis in window])
    ones = ops.full(shape=(1, 1, *x.shape[2:]), fill_value=1, dtype=x.dtype)
    count = reduce(OPS["add"], taps(ones, window, 0, frame=int(bool(count_include_pad))))
    return reduce(OPS["add"], taps(x, window, 0)) / count


@meaning("LpPool")
def norm_pool(x: Node, *, p: int = 2, **slide: Slide) -> Node:
    return ops.norm(ops.stack(taps(x, window_of(x.shape[2:], **slide), 0)), 0, p)


@meaning("MaxUnpool")
def max_unpool(x: Node, places: Node, output_shape: KnownArray = None, **slide: Slide) -> Node:
    """Zeros, but for the numbers of a pool at the places that they came from."""
    window = window_of(x.shape[2:], **slide)
    own = [*x.shape[:2], *((int(axis.size) - 1) * axis.stride + axis.kernel - sum(axis.pads) for axis in window)]
    zeros = ops.full(shape=(math.prod(own),), fill_value=0, dtype=x.dtype)
    made = ops.reshape(scattered(zeros, ops.flatten(places), ops.flatten(x), "none"), own)
    return ops.pad(made, pad_width=tuple((0, int(w) - o) for w, o in zip(whole(output_shape) or own, own)))


@meaning("Col2Im")
def columns_to_image(x: Node, image_shape: KnownArray, block_shape: KnownArray, **slide: Slide) -> Node:
    """Each place of a block back where it came from, summed: the gradient of what windows meet."""
    sizes, block = whole(image_shape), whole(block_shape)
    image = ops.full(shape=(x.shape[0], int(x.shape[1]) // math.prod(block), *sizes), fill_value=0, dtype=x.dtype)
    columns = ops.stack(taps(image, window_of(sizes, **{**slide, "kernel_shape": block}), 0), axis=2)
    return gradients(ops.sum(columns * ops.reshape(x, columns.shape)), [image])[0]
