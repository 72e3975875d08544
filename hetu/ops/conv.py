"""Two-dimensional convolution, its two backward operators and the transposed convolution.

Each of `conv2d`, `conv2d_dx` and `conv2d_dw` is linear in both inputs and their gradients are made of one another, so
every order of derivative works. Images are unfolded into columns, which the kernel multiplies. A layer adds biases.
Left out: 1-D and 3-D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..core.errors import ArgumentError, ShapeError, public
from ..core.graph import Node
from ..core.op import as_nodes, op
from ..core.types import Dim, TensorType, compatible, promote, require_float, show_shape
from .window import Pair, Sizes, Window, check_images, fold, pad_image, pair, unfold

__all__ = ["conv2d", "conv_transpose2d"]


# -- attributes and types --------------------------------------------------------------------------------------


def _attrs(kernel: Sizes, size: Sizes, *, stride: Any, padding: Any, dilation: Any, groups: Any) -> dict[str, Any]:
    window = Window(kernel, stride, padding, dilation).canonical(size)
    if not isinstance(groups, int) or groups < 1:
        raise ArgumentError(f"groups={groups!r}", fix="pass groups as an integer >= 1")
    return {"stride": window.stride, "padding": window.padding, "dilation": window.dilation, "groups": groups}


def _window(kernel: Pair, attrs: dict[str, Any]) -> Window:
    return Window(kernel, attrs["stride"], attrs["padding"], attrs["dilation"])


def _check_kernel(w: TensorType, groups: int) -> None:
    require_float(w)
    if w.ndim != 4:
        raise ShapeError(
            f"w has {w.ndim} axes, wanted (out channels, in channels / groups, height, width)",
            fix="reshape the kernel to four axes",
        )
    if any(isinstance(s, Dim) for s in w.shape[2:]):
        raise ShapeError(f"the kernel has an unknown size: {w}", fix="give its height and width as numbers")
    if 0 in w.shape[2:]:
        raise ShapeError(f"the kernel covers no pixel: {w}", fix="give it a height and a width of 1 at least")
    if isinstance(w.shape[0], int) and w.shape[0] % groups:
        raise ShapeError(f"{w.shape[0]} output channels do not divide into {groups} groups", fix="change one of them")


def _check_channels(x: TensorType, w: TensorType, groups: int) -> None:
    wanted = w.shape[1] * groups
    if not compatible(x.shape[1], wanted):
        last = x.shape[3] == wanted
        raise ShapeError(
            f"x has {x.shape[1]} channels (axis 1 of {show_shape(x.shape)}), the kernel {show_shape(w.shape)} wants "
            + (f"{w.shape[1]} x {groups} groups = {wanted}" if groups > 1 else f"{wanted}"),
            fix="x looks channels-last: use ht.permute_dims(x, (0, 3, 1, 2))"
            if last
            else "layouts are x (batch, channels, height, width) and w (out, in / groups, height, width)",
        )


# -- the three operators ---------------------------------------------------------------------------------------


@op(precision="low", linear=(0, 1), scratch=True)
def conv2d(
    xp: ModuleType, x: Any, w: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    """Cross-correlation of images x (n, c, h, w) with kernels w (o, c / groups, i, j) -> (n, o, y, x).

    `stride` and `dilation` are a number or a (rows, columns) pair; `padding` is a number of zero pixels on every side,
    a pair, a pair of (before, after) pairs, "valid" (none) or "same" (result of ceil(h / stride) rows, the odd pixel
    after). y = (h + padding - dilation (i - 1) - 1) // stride + 1. ShapeError for channels or kernels that do not fit.

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (None, 3, 32, 32)), ht.placeholder("w", (16, 3, 5, 5))
    >>> conv2d(x, w, stride=2, padding="same").shape[1:]
    (16, 16, 16)
    """
    window = Window(tuple(w.shape[2:]), stride, padding, dilation)
    columns = unfold(xp, x, window)
    columns = xp.reshape(columns, (x.shape[0], groups, math.prod(w.shape[1:]), columns.shape[-1]))
    y = xp.matmul(xp.reshape(w, (groups, w.shape[0] // groups, math.prod(w.shape[1:]))), columns)
    return xp.reshape(y, (x.shape[0], w.shape[0], *window.positions(x.shape[2:])))


@conv2d.normalize
def conv2d_attrs(x: TensorType, w: TensorType, **attrs: Any) -> dict[str, Any]:
    check_images(x)
    made = _attrs(w.shape[2:], x.shape[2:], **attrs)
    _check_kernel(w, made["groups"])
    return made


@conv2d.infers
def conv2d_type(x: TensorType, w: TensorType, **attrs: Any) -> TensorType:
    _check_channels(x, w, attrs["groups"])
    out = _window(w.shape[2:], attrs).positions(x.shape[2:])
    return TensorType((x.shape[0], w.shape[0], *out), promote(x.dtype, w.dtype))


@conv2d.grad
def conv2d_grad(g: Node, y: Node, x: Node, w: Node, **attrs: Any) -> tuple[Node, Node]:
    return conv2d_dx(g, w, size=x.shape[2:], **attrs), conv2d_dw(x, g, kernel=w.shape[2:], **attrs)


def _operations(images: TensorType, w: TensorType) -> int:
    """A product and a sum for each number of `images`, which lie behind the kernel, and each number that makes it."""
    return 2 * int(images.size) * math.prod(map(int, w.shape[1:]))


@conv2d.flops
def conv2d_flops(y: TensorType, x: TensorType, w: TensorType, **_: Any) -> int:
    return _operations(y, w)


@op(precision="low", linear=(0, 1), scratch=True)
def conv2d_dx(
    xp: ModuleType,
    g: Any,
    w: Any,
    *,
    size: Sizes,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """The gradient of `conv2d` with respect to its images: g (n, o, y, x), w (o, c / groups, i, j) -> (n, c, *size).

    >>> import hetu as ht
    >>> g, w = ht.placeholder("g", (8, 16, 14, 14)), ht.placeholder("w", (16, 3, 3, 3))
    >>> conv2d_dx(g, w, size=(28, 28), stride=2, padding=1).shape
    (8, 3, 28, 28)
    """
    window = Window(tuple(w.shape[2:]), stride, padding, dilation)
    n, out = g.shape[0], g.shape[2:]
    kernel = xp.reshape(w, (groups, w.shape[0] // groups, math.prod(w.shape[1:])))
    slopes = xp.reshape(g, (n, groups, w.shape[0] // groups, math.prod(out)))
    columns = xp.matmul(xp.matrix_transpose(kernel), slopes)
    channels = w.shape[1] * groups
    columns = xp.reshape(columns, (n, channels, math.prod(w.shape[2:]), *out))
    parts = (columns[:, :, tap, :, :] for tap in range(columns.shape[2]))
    return fold(xp, parts, window, size, out, (n, channels), columns)


@conv2d_dx.normalize
def conv2d_dx_attrs(g: TensorType, w: TensorType, *, size: Any, **attrs: Any) -> dict[str, Any]:
    check_images(g, "g")
    made = _attrs(w.shape[2:], size, **attrs)
    _check_kernel(w, made["groups"])
    return {"size": tuple(size), **made}


@conv2d_dx.infers
def conv2d_dx_type(g: TensorType, w: TensorType, *, size: Sizes, **attrs: Any) -> TensorType:
    wanted = (w.shape[0], *_window(w.shape[2:], attrs).positions(size))
    if not all(map(compatible, g.shape[1:], wanted)):
        raise ShapeError(
            f"g has (channels, height, width) {show_shape(g.shape[1:])}, the kernel and size={size} give {wanted}",
            fix="layouts are (batch, channels, height, width) and w (channels of g, others / groups, height, width)",
        )
    return TensorType((g.shape[0], w.shape[1] * attrs["groups"], *size), promote(g.dtype, w.dtype))


@conv2d_dx.flops
def conv2d_dx_flops(dx: TensorType, g: TensorType, w: TensorType, **_: Any) -> int:
    return _operations(g, w)


@conv2d_dx.grad
def conv2d_dx_grad(h: Node, dx: Node, g: Node, w: Node, *, size: Sizes, **attrs: Any) -> tuple[Node, Node]:
    return conv2d(h, w, **attrs), conv2d_dw(h, g, kernel=w.shape[2:], **attrs)


@op(precision="low", linear=(0, 1), scratch=True)
def conv2d_dw(
    xp: ModuleType,
    x: Any,
    g: Any,
    *,
    kernel: Pair,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """The gradient of `conv2d` with respect to its kernel: x (n, c, h, w), g (n, o, y, x) -> (o, c / groups, *kernel).

    >>> import hetu as ht
    >>> x, g = ht.placeholder("x", (8, 3, 28, 28)), ht.placeholder("g", (8, 16, 26, 26))
    >>> conv2d_dw(x, g, kernel=(3, 3)).shape
    (16, 3, 3, 3)
    """
    window, channels, outputs = Window(kernel, stride, padding, dilation), x.shape[1] // groups, g.shape[1]
    x, g = (xp.permute_dims(images, (1, 0, 2, 3)) for images in (x, g))
    frame = pad_image(xp, x, window)
    taps = xp.stack([frame[:, :, rows, columns] for rows, columns in window.taps(g.shape[2:])], axis=1)
    pixels = math.prod(g.shape[2:])
    parts = max(1, g.shape[1]) if outputs < pixels else 1  # BLAS is slow at sums of 100,000 terms with few results

    def in_parts(x: Any, rows: int) -> Any:
        return xp.permute_dims(xp.reshape(x, (groups, rows, parts, g.shape[1] * pixels // parts)), (2, 0, 1, 3))

    slopes, columns = in_parts(g, outputs // groups), in_parts(taps, channels * taps.shape[1])
    sums = xp.sum(xp.matmul(slopes, xp.matrix_transpose(columns)), axis=0)
    return xp.reshape(sums, (outputs, channels, *kernel))


@conv2d_dw.normalize
def conv2d_dw_attrs(x: TensorType, g: TensorType, *, kernel: Any, **attrs: Any) -> dict[str, Any]:
    check_images(x)
    check_images(g, "g")
    return {"kernel": pair("kernel", kernel), **_attrs(kernel, x.shape[2:], **attrs)}


@conv2d_dw.infers
def conv2d_dw_type(x: TensorType, g: TensorType, *, kernel: Pair, groups: int, **attrs: Any) -> TensorType:
    out = _window(kernel, attrs).positions(x.shape[2:])
    if not all(map(compatible, (g.shape[0], *g.shape[2:]), (x.shape[0], *out))):
        raise ShapeError(
            f"g is {show_shape(g.shape)}, wanted {x.shape[0]} images of {show_shape(out)}",
            fix="pass the gradient of the convolution of x",
        )
    if any(isinstance(s, int) and s % groups for s in (x.shape[1], g.shape[1])):
        raise ShapeError(f"{x.shape[1]} and {g.shape[1]} channels do not divide into {groups} groups")
    return TensorType((g.shape[1], x.shape[1] // groups, *kernel), promote(x.dtype, g.dtype))


@conv2d_dw.flops
def conv2d_dw_flops(dw: TensorType, x: TensorType, g: TensorType, **_: Any) -> int:
    return _operations(g, dw)


@conv2d_dw.grad
def conv2d_dw_grad(h: Node, dw: Node, x: Node, g: Node, *, kernel: Pair, **attrs: Any) -> tuple[Node, Node]:
    return conv2d_dx(g, h, size=x.shape[2:], **attrs), conv2d(x, h, **attrs)


def _splits(terms: str, grouped: str) -> Callable[..., str]:
    """Sharding: batch and channels may be split, pixels not; with groups the channels neither."""
    return lambda *types, groups, **attrs: terms if groups == 1 else grouped


conv2d.dims = _splits("nch!w!,oci!j!->noy!x!", "nc!h!w!,o!d!i!j!->no!y!x!")
conv2d_dx.dims = _splits("noy!x!,oci!j!->nch!w!", "no!y!x!,o!d!i!j!->nc!h!w!")
conv2d_dw.dims = _splits("nch!w!,noy!x!->oci!j!", "nc!h!w!,no!y!x!->o!d!i!j!")


@public
def conv_transpose2d(
    x: Any,
    w: Any,
    *,
    stride: int | Pair = 1,
    padding: Any = 0,
    output_padding: int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Node:
    """The transpose of `conv2d`: images x (n, c, h, w), kernels w (c, o / groups, i, j) -> (n, o, y, x).

    y = (h - 1) stride - padding + dilation (i - 1) + 1 + output_padding, or h stride for padding="same". Several image
    sizes shrink to one under a stride; `output_padding` (less than the stride) chooses among them.

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (None, 16, 7, 7)), ht.placeholder("w", (16, 8, 4, 4))
    >>> conv_transpose2d(x, w, stride=2, padding=1).shape[1:]
    (8, 14, 14)
    """
    x, w = as_nodes((x, w))
    check_images(x.tensor)
    _check_kernel(w.tensor, groups)
    steps, extra = pair("stride", stride), pair("output_padding", output_padding, least=0)
    if padding == "same":
        size = tuple(h * s for h, s in zip(x.shape[2:], steps))
    else:
        window = Window(w.shape[2:], steps, _plain(padding), pair("dilation", dilation)).canonical(x.shape[2:])
        pads = (sum(p) for p in window.padding)
        parts = zip(x.shape[2:], steps, pads, window.extent, extra)
        size = tuple((h - 1) * s - p + e + more for h, s, p, e, more in parts)
    return conv2d_dx(x, w, size=size, stride=steps, padding=padding, dilation=dilation, groups=groups)


def _plain(value: Any) -> Any:
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
