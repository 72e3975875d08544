"""Operators of ONNX whose windows slide over images of one, two or three axes.

Convolutions and pools of two axes are ours where we have them. The others are compositions of taps: for each place of
the window, the numbers that lie under it at each step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
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
from .elementwise import dequantize, quantize
from .indexing import end, scattered
from .meaning import KnownArray, OutputCount, Slide, meaning
from .products import shifted
from .shapes import whole

MOST_TAPS = 1 << 14  # each is a node


@dataclass(frozen=True)
class Slider:
    """How a window slides along each axis of an image, in numbers of all of them."""

    sizes: tuple[Any, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    ceil: bool = False

    @staticmethod
    def of(
        sizes: Sequence[Any],
        kernel_shape: Any,
        strides: Any = None,
        dilations: Any = None,
        pads: Any = None,
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
    ) -> Slider:
        """The attributes of ONNX, for images of these sizes, which may be open where no padding follows from them."""
        n = len(sizes)
        strides, dilations = strides or (1,) * n, dilations or (1,) * n
        if {len(kernel_shape), len(strides), len(dilations), len(pads or (0,) * 2 * n) / 2} != {n}:
            said = f"its window has not {n} axes: kernel {kernel_shape}, strides {strides}, dilations {dilations}"
            raise DataError(f"{said}, pads {pads}", fix="write the model again: onnx.checker.check_model")
        extents = [(k - 1) * d + 1 for k, d in zip(kernel_shape, dilations)]
        pairs = tuple(zip(pads[:n], pads[n:])) if pads else ((0, 0),) * n
        if auto_pad.startswith("SAME"):
            lack = [max((-(-s // t) - 1) * t + e - s, 0) for s, t, e in zip(map(int, sizes), strides, extents)]
            upper = auto_pad == "SAME_UPPER"
            pairs = tuple((v // 2, v - v // 2) if upper else (v - v // 2, v // 2) for v in lack)
        elif auto_pad == "VALID":
            pairs = ((0, 0),) * n
        return Slider(tuple(sizes), tuple(kernel_shape), tuple(strides), tuple(dilations), pairs, bool(ceil_mode))

    @property
    def out(self) -> tuple[Any, ...]:
        """Steps along each axis; with `ceil` also one that begins within the image and ends beyond its frame."""
        found = []
        for s, k, t, d, (before, after) in zip(self.sizes, self.kernel, self.strides, self.dilations, self.pads):
            room = s + before + after - (k - 1) * d - 1
            steps = (-(-room // t) if self.ceil else room // t) + 1
            found.append(steps - 1 if self.ceil and (steps - 1) * t >= s + before else steps)
        return tuple(found)

    @property
    def rest(self) -> tuple[int, ...]:
        """What lies behind the last step along each axis."""
        axes = zip(self.sizes, self.kernel, self.strides, self.dilations, self.pads, self.out)
        return tuple(s + sum(p) - ((n - 1) * t + (k - 1) * d + 1) for s, k, t, d, p, n in axes)

    def frame(self) -> tuple[tuple[int, int], ...]:
        """The padding that holds all steps."""
        return tuple((before, after + max(-rest, 0)) for (before, after), rest in zip(self.pads, self.rest))

    def taps(self, x: Any) -> Iterator[Any]:
        """For each place of the window, in row order, what it meets in the padded `x`, a node or an array."""
        if math.prod(self.kernel) > MOST_TAPS:
            said = f"its window {self.kernel} has more than {MOST_TAPS} places"
            raise DataError(said, fix="export a reduction over axes")
        for place in itertools.product(*map(range, self.kernel)):
            cuts = (
                slice(i * d, i * d + (n - 1) * t + 1, t)
                for i, d, n, t in zip(place, self.dilations, self.out, self.strides)
            )
            yield x[(slice(None), slice(None), *cuts)]

    def padded(self, x: Node, value: float) -> Node:
        return ops.pad(x, pad_width=((0, 0), (0, 0), *self.frame()), value=value)

    def table(self, image: np.ndarray, value: Any) -> np.ndarray:
        """What each place of the window meets in an array of one image: (taps, *out)."""
        frame = np.pad(image, self.frame(), constant_values=value)[None, None]
        return np.stack([tap[0, 0] for tap in self.taps(frame)])

    @property
    def plain(self) -> bool:
        """Whether our operators of two axes have it."""
        return len(self.sizes) == 2 and not self.ceil


# -- convolutions --------------------------------------------------------------------------------------------------


@meaning("Conv")
def conv(x: Node, w: Node, b: Node | None = None, *, group: int = 1, **slide: Slide) -> Node:
    window = Slider.of(x.shape[2:], **{**slide, "kernel_shape": w.shape[2:]})
    if len(window.sizes) == 1:  # one row
        wide = (ops.expand_dims(n, axis=2) for n in (x, w))
        ends = dict(stride=(1, *window.strides), dilation=(1, *window.dilations), padding=((0, 0), *window.pads))
        y = ops.squeeze(ops.conv2d(*wide, groups=group, **ends), axis=2)
    elif window.plain:
        y = ops.conv2d(x, w, stride=window.strides, dilation=window.dilations, padding=window.pads, groups=group)
    else:
        y = _conv_by_taps(x, w, window, group)
    return y if b is None else y + _along(b, y)


def _along(vector: Node, y: Node) -> Node:
    return ops.reshape(vector, (-1,) + (1,) * (y.ndim - 2))


def _conv_by_taps(x: Node, w: Node, window: Slider, group: int) -> Node:
    n, channels, outputs = x.shape[0], x.shape[1] // group, w.shape[0]
    columns = ops.stack(list(window.taps(window.padded(x, 0))), axis=2)
    columns = ops.reshape(columns, (n, group, channels * math.prod(window.kernel), math.prod(window.out)))
    y = ops.matmul(ops.reshape(w, (group, outputs // group, -1)), columns)
    return ops.reshape(y, (n, outputs, *window.out))


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
    n, kernel, olds = x.ndim - 2, w.shape[2:], x.shape[2:]
    strides, dilations = (slide.get(name) or (1,) * n for name in ("strides", "dilations"))
    pads, extra, auto_pad = slide.get("pads") or (0,) * 2 * n, output_padding or (0,) * n, slide.get("auto_pad", "")
    extents = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    longest = [(s - 1) * t + e + more for s, t, e, more in zip(olds, strides, extents, extra, strict=True)]
    if auto_pad.startswith("SAME") or output_shape:
        news = output_shape or [s * t for s, t in zip(olds, strides)]
        lost = [max(int(size - new), 0) for size, new in zip(longest, news, strict=True)]
        begins = [v // 2 if auto_pad == "SAME_UPPER" else v - v // 2 for v in lost]
        pairs = [(first, v - first) for v, first in zip(lost, begins)]
    else:
        pairs = list(zip(pads[:n], pads[n:], strict=True))
        news = [size - sum(pair) for size, pair in zip(longest, pairs, strict=True)]
    image = ops.full(shape=(x.shape[0], w.shape[1] * group, *news), fill_value=0, dtype=x.dtype)
    ends = dict(strides=strides, dilations=dilations, pads=[*(p[0] for p in pairs), *(p[1] for p in pairs)])
    read = conv(image, w, group=group, **ends)[(slice(None), slice(None), *(slice(0, s) for s in olds))]
    y = gradients(ops.sum(read * x), [image])[0]
    return y if b is None else y + _along(b, y)


@meaning("ConvInteger")
def conv_integer(
    x: Node, w: Node, x_zero: Node | None = None, w_zero: Node | None = None, *, group: int = 1, **slide: Slide
) -> Node:
    """In float64, which holds all sums of products of bytes."""
    wide = np.dtype("float64")
    zero = None if w_zero is None or w_zero.ndim == 0 else ops.reshape(w_zero, (-1,) + (1,) * (w.ndim - 1))
    kernels = cast_to(shifted(w, zero if zero is not None else w_zero, 0), wide)
    return conv(cast_to(shifted(x, x_zero, 0), wide), kernels, group=group, **slide)


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
    y = y if b is None else y + _along(b, y)
    return quantize(dequantize(y, x_scale * w_scale), y_scale, y_zero)


# -- pools -----------------------------------------------------------------------------------------------------------


@meaning("MaxPool")
def max_pool(x: Node, *, storage_order: int = 0, outputs: OutputCount = 1, **slide: Slide) -> tuple[Node, ...]:
    """The greatest number under the window, and its place among all of the array."""
    window = Slider.of(x.shape[2:], **slide)
    inside = all(max(p) < k for p, k in zip(window.pads, window.kernel))
    if outputs == 1 and window.plain and is_float(x.dtype) and inside and set(window.dilations) == {1}:
        return (ops.max_pool2d(x, kernel=window.kernel, stride=window.strides, padding=window.pads),)
    taps = list(window.taps(window.padded(x, end(x.dtype, -1))))
    if outputs == 1:
        return (reduce(ops.maximum, taps),)
    column = ops.stack(taps, axis=0)
    tap = ops.argmax(column, axis=0, keepdims=True)
    image = np.arange(math.prod(window.sizes)).reshape(window.sizes, order="F" if storage_order else "C")
    places = ops.constant(value=window.table(image, 0).reshape(len(taps), 1, 1, *window.out))
    found = ops.take_along_axis(ops.broadcast_to(places, column.shape), tap, axis=0)[0]
    first = ops.reshape(
        ops.arange(product(x.shape[:2])) * math.prod(window.sizes), (*x.shape[:2], *(1,) * (x.ndim - 2))
    )
    return ops.max(column, axis=0), found + first


@meaning("AveragePool")
def average_pool(x: Node, *, count_include_pad: int = 0, **slide: Slide) -> Node:
    window = Slider.of(x.shape[2:], **slide)
    bare = not any(map(any, window.pads))
    if window.plain and bare and set(window.dilations) == {1}:
        return ops.avg_pool2d(x, kernel=window.kernel, stride=window.strides)
    counted = np.ones(window.sizes)
    if count_include_pad:  # the frame that was asked for, but not what `ceil_mode` adds
        added = [(0, f - p) for (_, f), (_, p) in zip(window.frame(), window.pads)]
        framed = np.pad(np.pad(counted, window.pads, constant_values=1), added)
        count = sum(tap[0, 0] for tap in window.taps(framed[None, None]))
    else:
        count = window.table(counted, 0).sum(0)
    total: Node = reduce(OPS["add"], window.taps(window.padded(x, 0)))
    return OPS["divide"](total, count.astype(x.dtype))


@meaning("LpPool")
def norm_pool(x: Node, *, p: int = 2, **slide: Slide) -> Node:
    window = Slider.of(x.shape[2:], **slide)
    powers = window.padded(OPS["power"](ops.abs(x), float(p)), 0)
    return OPS["power"](reduce(OPS["add"], window.taps(powers)), 1 / p)


@meaning("MaxUnpool")
def max_unpool(x: Node, places: Node, output_shape: KnownArray = None, **slide: Slide) -> Node:
    """Zeros, but for the numbers of a pool at the places that they came from."""
    kernel, n = slide["kernel_shape"], x.ndim - 2
    strides, pads = slide.get("strides") or (1,) * n, slide.get("pads") or (0,) * 2 * n
    ends = zip(x.shape[2:], strides, kernel, pads[:n], pads[n:])
    own = (*x.shape[:2], *((int(s) - 1) * t + k - first - last for s, t, k, first, last in ends))
    zeros = ops.full(shape=(math.prod(own),), fill_value=0, dtype=x.dtype)
    made = ops.reshape(scattered(zeros, ops.flatten(places), ops.flatten(x), "none"), own)
    return ops.pad(made, pad_width=tuple((0, int(w) - o) for w, o in zip(whole(output_shape) or own, own)))


@meaning("Col2Im")
def columns_to_image(x: Node, image_shape: KnownArray, block_shape: KnownArray, **slide: Slide) -> Node:
    """Each place of a block back where it came from, summed: the gradient of what windows meet."""
    sizes, block = whole(image_shape), whole(block_shape)
    window = Slider.of(sizes, **{**slide, "kernel_shape": block})
    image = ops.full(shape=(x.shape[0], int(x.shape[1]) // math.prod(block), *sizes), fill_value=0, dtype=x.dtype)
    columns = ops.stack(list(window.taps(window.padded(image, 0))), axis=2)
    return gradients(ops.sum(columns * ops.reshape(x, columns.shape)), [image])[0]
