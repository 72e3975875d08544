"""`conv2d` and its gradients on images with the channels last, (n, h, w, c): rows of pixels lie together.

A patch of the image is a few long runs of memory, so that unfolding is a fast copy and every product one BLAS call;
3x3 kernels go through `winograd.py`. Made by the pass `channels_last` only, after autodiff. Ignored on purpose:
groups and dilations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .. import blas
from ..backend import Scratch
from ..graph import OPS
from ..op import op
from ..types import TensorType
from . import winograd
from .window import Pair, Window

__all__ = ["conv2d_last", "conv2d_last_dw", "conv2d_last_dx"]

Call = Callable[[], Any]
CHUNK = 1 << 18  # numbers of a column buffer: 1 MB of float32 stays in the second-level cache
FIRST, LAST = (0, 3, 1, 2), (0, 2, 3, 1)
PLAIN = {"dilation": (1, 1), "groups": 1}


def _swapped(x: TensorType, axes: tuple[int, ...]) -> TensorType:
    return TensorType(tuple(x.shape[a] for a in axes), x.dtype)


@op(
    infer=lambda x, w, **attrs: _swapped(OPS["conv2d"].infer(_swapped(x, FIRST), w, **attrs, **PLAIN), LAST),
    dims="nh!w!c,oci!j!->ny!x!o",
    differentiable=False,
    scratch=True,
)
def conv2d_last(xp: ModuleType, x: Any, w: Any, *, stride: Pair, padding: Any) -> Any:
    """`conv2d` of images x (n, h, w, c) with kernels w (o, c, i, j) -> (n, y, x, o).

    >>> import hetu as ht
    >>> from hetu.graph import OPS
    >>> x, w = ht.placeholder("x", (8, 32, 32, 3)), ht.placeholder("w", (64, 3, 3, 3))
    >>> OPS["conv2d_last"](x, w, stride=(2, 2), padding=((1, 1), (1, 1))).shape
    (8, 16, 16, 64)
    """
    y = OPS["conv2d"].forward(xp, xp.permute_dims(x, FIRST), w, stride=stride, padding=padding, **PLAIN)
    return xp.permute_dims(y, LAST)


@op(
    infer=lambda g, w, **attrs: _swapped(OPS["conv2d_dx"].infer(_swapped(g, FIRST), w, **attrs, **PLAIN), LAST),
    dims="ny!x!o,oci!j!->nh!w!c",
    differentiable=False,
    scratch=True,
)
def conv2d_last_dx(xp: ModuleType, g: Any, w: Any, *, size: Pair, stride: Pair, padding: Any) -> Any:
    """`conv2d_dx` of gradients g (n, y, x, o) with kernels w (o, c, i, j) -> (n, *size, c).

    >>> import hetu as ht
    >>> from hetu.graph import OPS
    >>> g, w = ht.placeholder("g", (8, 16, 16, 64)), ht.placeholder("w", (64, 3, 3, 3))
    >>> OPS["conv2d_last_dx"](g, w, size=(32, 32), stride=(2, 2), padding=((1, 1), (1, 1))).shape
    (8, 32, 32, 3)
    """
    g = xp.permute_dims(g, FIRST)
    x = OPS["conv2d_dx"].forward(xp, g, w, size=size, stride=stride, padding=padding, **PLAIN)
    return xp.permute_dims(x, LAST)


@op(
    infer=lambda x, g, **attrs: OPS["conv2d_dw"].infer(_swapped(x, FIRST), _swapped(g, FIRST), **attrs, **PLAIN),
    dims="nh!w!c,ny!x!o->oci!j!",
    differentiable=False,
    scratch=True,
)
def conv2d_last_dw(xp: ModuleType, x: Any, g: Any, *, kernel: Pair, stride: Pair, padding: Any) -> Any:
    """`conv2d_dw` of images x (n, h, w, c) and gradients g (n, y, x, o) -> (o, c, *kernel).

    >>> import hetu as ht
    >>> from hetu.graph import OPS
    >>> x, g = ht.placeholder("x", (8, 32, 32, 3)), ht.placeholder("g", (8, 16, 16, 64))
    >>> OPS["conv2d_last_dw"](x, g, kernel=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1))).shape
    (64, 3, 3, 3)
    """
    x, g = xp.permute_dims(x, FIRST), xp.permute_dims(g, FIRST)
    return OPS["conv2d_dw"].forward(xp, x, g, kernel=kernel, stride=stride, padding=padding, **PLAIN)


# -- bound to arrays -------------------------------------------------------------------------------------------


class _Patches:
    """Patches of a few images at a time as rows (positions, kernel rows x kernel columns x channels) of one buffer."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, window: Window, scratch: Scratch) -> None:
        self.window, (n, *self.size, self.channels) = window, shape
        self.out = window.positions(tuple(self.size))
        self.width = window.kernel[0] * window.kernel[1] * self.channels
        self.step = min(n, max(1, CHUNK // (self.out[0] * self.out[1] * self.width)))
        self.chunks = [slice(k, min(k + self.step, n)) for k in range(0, n, self.step)]
        self.frame = scratch.empty((self.step, *window.padded(tuple(self.size)), self.channels), dtype)
        self.buffer = scratch.empty((self.step, *self.out, self.width), dtype)

    def rows(self, count: int) -> np.ndarray:
        return self.buffer[:count].reshape(-1, self.width)

    def inside(self, count: int) -> np.ndarray:
        """Where the images lie in their padded frame."""
        return self.frame[(slice(0, count), *self.window.inner(tuple(self.size)))]

    def gather(self, x: np.ndarray) -> list[Call]:
        """Calls that fill the rows from some images."""
        (rows, columns), (down, right) = self.window.kernel, self.window.stride
        frame = self.frame[: len(x)]
        n, h, w, c = frame.strides
        shape = (len(x), *self.out, rows, columns * self.channels)
        patches = as_strided(frame, shape, (n, h * down, w * right, h, c), writeable=False)
        filled = self.buffer[: len(x)].reshape(shape)
        return [partial(np.copyto, self.inside(len(x)), x), partial(np.copyto, filled, patches)]

    def scatter(self, out: np.ndarray) -> list[Call]:
        """Calls that add the rows back to the images they belong to."""
        frame, calls = self.frame[: len(out)], [partial(self.frame.fill, 0)]
        taps = self.buffer[: len(out)].reshape(len(out), *self.out, -1, self.channels)
        for tap, (rows, columns) in enumerate(self.window.taps(self.out)):
            place = frame[:, rows, columns]
            calls.append(partial(np.add, place, taps[:, :, :, tap], place))
        return [*calls, partial(np.copyto, out, self.inside(len(out)))]


def _together(w: np.ndarray, scratch: Scratch) -> tuple[np.ndarray, np.ndarray]:
    """A buffer (o, i x j x c) for kernels (o, c, i, j), as `_Patches` wants them, and the same seen as they are."""
    o, c, i, j = w.shape
    matrix = scratch.empty((o, i * j * c), w.dtype)
    return matrix, matrix.reshape(o, i, j, c).transpose(0, 3, 1, 2)


def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray, first: bool = True) -> Call:
    """A call for out = a @ b, or out += a @ b unless `first`."""
    call = blas.gemm(a, b, out, beta=0.0 if first else 1.0)
    if call is not None:
        return call
    return partial(np.matmul, a, b, out) if first else lambda: np.add(out, a @ b, out)


def _binds(xp: ModuleType, out: Any, *arrays: Any) -> bool:
    return xp is np and out.dtype.char in "fd" and all(a.dtype == out.dtype and a.size for a in (out, *arrays))


def _matrix(images: np.ndarray) -> np.ndarray | None:
    """Images as a matrix (pixels, channels), if they lie so in memory."""
    return images.reshape(-1, images.shape[3]) if images.flags.c_contiguous else None


@conv2d_last.bind
def conv2d_last_bind(
    xp: ModuleType, out: Any, x: Any, w: Any, *, stride: Pair, padding: Any, scratch: Scratch
) -> list[Call] | None:
    if not _binds(xp, out, x, w) or not w.flags.c_contiguous or not out.flags.c_contiguous:
        return None
    window = Window(w.shape[2:], stride, padding)
    if winograd.suits(w.shape[:2], x.shape[1:3], window, 1):
        return winograd.correlate(x, w, out, window, scratch)
    patches, (kernels, seen) = _Patches(x.shape, x.dtype, window, scratch), _together(w, scratch)
    calls: list[Call] = [partial(np.copyto, seen, w), partial(patches.frame.fill, 0)]
    for images in patches.chunks:
        rows = patches.rows(len(x[images]))
        calls += [*patches.gather(x[images]), _product(rows, kernels.T, _matrix(out[images]))]
    return calls


@conv2d_last_dx.bind
def conv2d_last_dx_bind(
    xp: ModuleType, out: Any, g: Any, w: Any, *, size: Pair, stride: Pair, padding: Any, scratch: Scratch
) -> list[Call] | None:
    if not _binds(xp, out, g, w) or not w.flags.c_contiguous or not out.flags.c_contiguous:
        return None
    window = Window(w.shape[2:], stride, padding)
    if winograd.suits(w.shape[:2], size, window, 1):
        return winograd.correlate_back(g, w, out, window, scratch)
    if _matrix(g) is None:
        return None
    patches, (kernels, seen) = _Patches(out.shape, out.dtype, window, scratch), _together(w, scratch)
    calls: list[Call] = [partial(np.copyto, seen, w)]
    for images in patches.chunks:
        rows = patches.rows(len(g[images]))
        calls += [_product(_matrix(g[images]), kernels, rows), *patches.scatter(out[images])]
    return calls


@conv2d_last_dw.bind
def conv2d_last_dw_bind(
    xp: ModuleType, out: Any, x: Any, g: Any, *, kernel: Pair, stride: Pair, padding: Any, scratch: Scratch
) -> list[Call] | None:
    if not _binds(xp, out, x, g) or not out.flags.c_contiguous:
        return None
    window = Window(kernel, stride, padding)
    if winograd.suits(out.shape[:2], x.shape[1:3], window, 1):
        return winograd.weight_gradient(x, g, out, window, scratch)
    if _matrix(g) is None:
        return None
    patches, (total, seen) = _Patches(x.shape, x.dtype, window, scratch), _together(out, scratch)
    calls: list[Call] = [partial(patches.frame.fill, 0)]
    for images in patches.chunks:
        rows = patches.rows(len(x[images]))
        calls += [*patches.gather(x[images]), _product(_matrix(g[images]).T, rows, total, images.start == 0)]
    return [*calls, partial(np.copyto, out, seen)]
