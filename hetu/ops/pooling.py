"""Pooling and resizing of images (batch, channels, height, width).

A maximum is found together with the tap it came from; its gradient and the gradient of that only move numbers by these
taps, so they are linear and each other's gradients. Left out: 1-D and 3-D, dilation, learned pooling.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, ShapeError, public
from ..core.graph import OPS, Node
from ..core.op import Role, as_node, op
from ..core.types import Dim, TensorType, compatible, show_shape
from .elementwise import rounded, wide
from .reduction import mean
from .window import Pair, Sizes, Window, check_images, fold, pad_image, pair

__all__ = ["avg_pool2d", "global_avg_pool2d", "global_max_pool2d", "interpolate", "max_pool2d"]

TAP = np.dtype("uint8")  # the number of a tap within its window; 256 taps are a 16 x 16 kernel


def _attrs(size: Sizes, *, kernel: Any, stride: Any, padding: Any) -> dict[str, Any]:
    """Pairs; the stride is the kernel unless given. The frame must not hold a whole window."""
    kernel = pair("kernel", kernel)
    window = Window(kernel, kernel if stride is None else stride, padding).canonical(size)
    if window.padding != "same" and any(max(p) >= k for p, k in zip(window.padding, kernel)):
        raise ArgumentError(
            f"padding={window.padding} reaches the kernel {kernel}", fix="pad less than the kernel size"
        )
    return {"kernel": kernel, "stride": window.stride, "padding": window.padding}


def _image_attrs(x: TensorType, *_: TensorType, **attrs: Any) -> dict[str, Any]:
    check_images(x)
    return _attrs(x.shape[2:], **attrs)


def _gradient_attrs(g: TensorType, *_: TensorType, size: Any, **attrs: Any) -> dict[str, Any]:
    check_images(g, "g")
    return {"size": tuple(size), **_attrs(size, **attrs)}


def _pooled(x: TensorType, **attrs: Any) -> TensorType:
    return TensorType((*x.shape[:2], *Window(**attrs).positions(x.shape[2:])), x.dtype)


def _picked(x: TensorType, taps: TensorType, **attrs: Any) -> TensorType:
    made = _pooled(x, **attrs)
    if not all(map(compatible, made.shape, taps.shape)):
        raise ShapeError(f"the taps are {taps}, the windows {show_shape(made.shape)}", fix="take those of these images")
    return made


def _unpooled(g: TensorType, *taps: TensorType, size: Sizes, **attrs: Any) -> TensorType:
    wanted = Window(**attrs).positions(size)
    if not all(map(compatible, g.shape[2:], wanted)):
        raise ShapeError(f"g has {show_shape(g.shape[2:])} pixels, {size} pools to {wanted}", fix="pass the size of x")
    return TensorType((*g.shape[:2], *size), g.dtype)


# -- maximum ---------------------------------------------------------------------------------------------------


@op(precision="follow", name="max_pool2d", dims="nch!w!->ncy!x!,ncy!x!")
def _max_pool2d(xp: ModuleType, x: Any, *, kernel: Any, stride: Any = None, padding: Any = 0) -> Any:
    """The greatest value of each window and the tap it lies at, see `max_pool2d`.

    >>> import hetu as ht
    >>> values, taps = _max_pool2d(ht.placeholder("x", (1, 2, 4, 4)), kernel=2)
    >>> str(taps.type)
    'u8[1, 2, 2, 2]'
    """
    window = Window(kernel, stride, padding)
    frame = pad_image(xp, x, window, fill=-xp.inf)
    best, tap = None, None
    for k, (rows, columns) in enumerate(window.taps(window.positions(x.shape[2:]))):
        part = frame[:, :, rows, columns]
        if best is None:
            best, tap = part, xp.zeros(part.shape, dtype=xp.uint8)
        else:
            tap = xp.maximum(tap, xp.astype(part > best, xp.uint8) * k)  # taps come in rising order
            best = xp.maximum(best, part)
    return best, tap


_max_pool2d.normalize(_image_attrs)


@_max_pool2d.infers
def max_pool2d_type(x: TensorType, *, kernel: Pair, **attrs: Any) -> tuple[TensorType, TensorType]:
    if kernel[0] * kernel[1] > 256:
        raise ArgumentError(f"kernel={kernel} has more than 256 taps", fix="pool twice, or use ht.global_max_pool2d")
    values = _pooled(x, kernel=kernel, **attrs)
    return values, TensorType(values.shape, TAP)


@_max_pool2d.grad
def max_pool2d_grad(g: list[Node | None], out: tuple[Node, Node], x: Node, **attrs: Any) -> Node | None:
    return None if g[0] is None else max_pool2d_dx(g[0], out[1], size=x.shape[2:], **attrs)


@public
def max_pool2d(x: Any, kernel: int | Pair, stride: int | Pair | None = None, padding: Any = 0) -> Node:
    """The greatest value of each window: (n, c, h, w) -> (n, c, (h + padding - kernel) // stride + 1, ...).

    The stride is the kernel unless given; `padding` as in `conv2d`, the frame never wins. Among equal values the first
    in row order gets the whole gradient. A NaN stays a NaN.

    >>> import hetu as ht
    >>> ht.evaluate(max_pool2d([[[[1.0, 2.0], [3.0, 0.0]]]], 2)).tolist()
    [[[[3.0]]]]
    """
    return _max_pool2d(x, kernel=kernel, stride=stride, padding=padding)[0]


@op(precision="follow", dims="ncy!x!,ncy!x!->nch!w!", linear=(0,), infer=_unpooled, scratch=True)
def max_pool2d_dx(
    xp: ModuleType, g: Any, taps: Any, *, size: Sizes, kernel: Any, stride: Any = None, padding: Any = 0
) -> Any:
    """The gradient of `max_pool2d`: each g is added to the pixel its tap names.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (1, 1, 4, 4))
    >>> ht.gradients(ht.sum(max_pool2d(x, 2)), [x])[0].op.name
    'max_pool2d_dx'
    """
    window = Window(kernel, stride, padding)
    zero = xp.zeros_like(g)
    parts = (xp.where(taps == xp.asarray(k, dtype=xp.uint8), g, zero) for k in range(kernel[0] * kernel[1]))
    return fold(xp, parts, window, size, g.shape[2:], g.shape[:2], g)


max_pool2d_dx.normalize(_gradient_attrs)


@op(precision="follow", dims="nch!w!,ncy!x!->ncy!x!", linear=(0,), infer=_picked)
def max_pool2d_pick(xp: ModuleType, x: Any, taps: Any, *, kernel: Any, stride: Any = None, padding: Any = 0) -> Any:
    """The pixel of each window that its tap names: the adjoint of `max_pool2d_dx`.

    >>> import hetu as ht
    >>> values, taps = _max_pool2d([[[[1.0, 2.0], [3.0, 0.0]]]], kernel=2)
    >>> ht.evaluate(max_pool2d_pick([[[[1.0, 2.0], [5.0, 0.0]]]], taps, kernel=2)).tolist()
    [[[[5.0]]]]
    """
    window = Window(kernel, stride, padding)
    frame = pad_image(xp, x, window)
    picked = xp.zeros(taps.shape, dtype=x.dtype)
    for k, (rows, columns) in enumerate(window.taps(taps.shape[2:])):
        picked = xp.where(taps == xp.asarray(k, dtype=xp.uint8), frame[:, :, rows, columns], picked)
    return picked


max_pool2d_dx.grad(lambda h, dx, g, taps, *, size, **attrs: (max_pool2d_pick(h, taps, **attrs), None))
max_pool2d_pick.normalize(_image_attrs)
max_pool2d_pick.grad(lambda g, y, x, taps, **attrs: (max_pool2d_dx(g, taps, size=x.shape[2:], **attrs), None))


# -- average ---------------------------------------------------------------------------------------------------


@op(dims="nch!w!->ncy!x!", linear=(0,), infer=_pooled)
def avg_pool2d(xp: ModuleType, x: Any, *, kernel: Any, stride: Any = None, padding: Any = 0) -> Any:
    """The mean of each window: (n, c, h, w) -> (n, c, (h + padding - kernel) // stride + 1, ...).

    The stride is the kernel unless given; `padding` as in `conv2d`. The zeros of the frame count as values.

    >>> import hetu as ht
    >>> ht.evaluate(avg_pool2d([[[[1.0, 2.0], [3.0, 0.0]]]], 2)).tolist()
    [[[[1.5]]]]
    """
    window = Window(kernel, stride, padding)
    frame = xp.astype(pad_image(xp, x, window), wide(xp, x.dtype), copy=False)
    total = None
    for rows, columns in window.taps(window.positions(x.shape[2:])):
        part = frame[:, :, rows, columns]
        total = part if total is None else total + part
    return rounded(xp, total / (kernel[0] * kernel[1]), x)


avg_pool2d.normalize(_image_attrs)


@op(dims="ncy!x!->nch!w!", linear=(0,), infer=_unpooled, scratch=True)
def avg_pool2d_dx(xp: ModuleType, g: Any, *, size: Sizes, kernel: Any, stride: Any = None, padding: Any = 0) -> Any:
    """The gradient of `avg_pool2d`: each g is spread evenly over its window.

    >>> import hetu as ht
    >>> ht.evaluate(avg_pool2d_dx([[[[4.0]]]], size=(2, 2), kernel=2)).tolist()
    [[[[1.0, 1.0], [1.0, 1.0]]]]
    """
    part = g / (kernel[0] * kernel[1])
    parts = (part for _ in range(kernel[0] * kernel[1]))
    return fold(xp, parts, Window(kernel, stride, padding), size, g.shape[2:], g.shape[:2], g)


avg_pool2d.grad(lambda g, y, x, **attrs: avg_pool2d_dx(g, size=x.shape[2:], **attrs))
avg_pool2d_dx.normalize(_gradient_attrs)
avg_pool2d_dx.grad(lambda h, dx, g, *, size, **attrs: avg_pool2d(h, **attrs))


@public
def global_avg_pool2d(x: Any) -> Node:
    """The mean over all pixels: (n, c, h, w) -> (n, c).

    >>> import hetu as ht
    >>> global_avg_pool2d(ht.placeholder("x", (None, 8, 7, 7))).shape[1]
    8
    """
    x = as_node(x)
    check_images(x.tensor)
    return mean(x, axis=(2, 3))


@public
def global_max_pool2d(x: Any) -> Node:
    """The greatest of all pixels: (n, c, h, w) -> (n, c).

    >>> import hetu as ht
    >>> global_max_pool2d(ht.placeholder("x", (None, 8, 7, 7))).shape[1]
    8
    """
    x = as_node(x)
    check_images(x.tensor)
    return OPS["max"](x, axis=(2, 3))


# -- resizing --------------------------------------------------------------------------------------------------


@op(role=Role.MOVE, dims="nch!w!->ncy!x!", linear=(0,))
def repeat_pixels(xp: ModuleType, x: Any, *, times: Pair) -> Any:
    """Images whose pixels are repeated `times` each way, in blocks.

    >>> import hetu as ht
    >>> ht.evaluate(repeat_pixels([[[[1.0, 2.0]]]], times=(1, 2))).tolist()
    [[[[1.0, 1.0, 2.0, 2.0]]]]
    """
    n, c, h, w = x.shape
    blocks = xp.broadcast_to(x[:, :, :, None, :, None], (n, c, h, times[0], w, times[1]))
    return xp.reshape(blocks, (n, c, h * times[0], w * times[1]))


@repeat_pixels.infers
def repeat_pixels_type(x: TensorType, *, times: Pair) -> TensorType:
    check_images(x)
    return TensorType((*x.shape[:2], *(size * t for size, t in zip(x.shape[2:], times))), x.dtype)


@repeat_pixels.grad
def repeat_pixels_grad(g: Node, y: Node, x: Node, *, times: Pair) -> Node:
    return avg_pool2d(g, kernel=times) * float(times[0] * times[1])


@public
def interpolate(
    x: Any, size: int | Pair | None = None, *, scale: int | Pair | None = None, method: str = "nearest"
) -> Node:
    """Images (n, c, h, w) resized to `size` pixels, or `scale` times larger. `method` is "nearest" or "bilinear".

    `interpolate(x, 2)` makes images of 2 x 2 pixels; `interpolate(x, scale=2)` doubles their height and width.
    Pixels are squares: the center of pixel i lies at i + 0.5 (corners are not aligned). Sizes must be known.

    >>> import hetu as ht
    >>> ht.evaluate(interpolate(ht.constant(value=[[[[1.0, 3.0]]]]), (1, 4), method="bilinear")).tolist()
    [[[[1.0, 1.5, 2.5, 3.0]]]]
    """
    x = as_node(x)
    check_images(x.tensor)
    if method not in ("nearest", "bilinear"):
        raise ArgumentError(f"interpolate: method={method!r}", fix='use "nearest" or "bilinear"')
    if any(isinstance(s, Dim) for s in x.shape[2:]):
        raise ShapeError(f"interpolate: the image size of {x.type} is unknown", fix="give the placeholder a fixed size")
    if (size is None) == (scale is None):
        raise ArgumentError("interpolate takes either size or scale", fix="pass pixels by size, or factors by scale")
    sizes: Pair = x.shape[2:]
    target = pair("size", size) if scale is None else tuple(h * s for h, s in zip(sizes, pair("scale", scale)))
    if method == "nearest":
        if all(old and new % old == 0 for old, new in zip(sizes, target)):
            return repeat_pixels(x, times=tuple(new // old for old, new in zip(sizes, target)))
        made: Node = x
        for axis, old, new in zip((2, 3), sizes, target):
            places = (2 * np.arange(new) + 1) * old // (2 * new)
            made = made if old == new else OPS["take"](made, places, axis=axis)
        return made
    rows, columns = (_bilinear(old, new, x.dtype) for old, new in zip(sizes, target))
    return OPS["matmul"](OPS["matmul"](rows, x), np.ascontiguousarray(columns.T))


def _bilinear(old: int, new: int, dtype: np.dtype) -> np.ndarray:
    """The (new, old) matrix whose row i weighs the two pixels nearest to the center of new pixel i."""
    at = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.floor(at).astype(int)
    high = np.minimum(low + 1, old - 1)
    weights = np.zeros((new, old))
    weights[np.arange(new), low] += 1 - (at - low)
    weights[np.arange(new), high] += at - low
    return weights.astype(dtype)
