"""The geometry of a window that slides over images, shared by convolution and pooling.

Images are (batch, channels, height, width); a window has a kernel, a stride, a frame of padding and a dilation, each
for rows and columns. Left out: one and three dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import ArgumentError, ShapeError
from ..core.types import Dim, Size, TensorType, require_float, show_shape

Pair = tuple[Any, ...]  # numbers of rows and columns
Sizes = tuple[Size, ...]  # those of an image; a size may be unknown


def check_images(x: TensorType, name: str = "x") -> None:
    """ShapeError unless `x` has the axes (batch, channels, height, width); DTypeError unless it is floating."""
    require_float(x)
    if x.ndim != 4:
        fix = f"add the batch axis with ht.expand_dims({name}, 0)" if x.ndim == 3 else "reshape it to four axes"
        raise ShapeError(f"{name} has {x.ndim} axes, wanted (batch, channels, height, width)", fix=fix)


def pair(name: str, value: Any, least: int = 1) -> Pair:
    """(rows, columns) of one number or of a pair; ArgumentError when one is no integer or below `least`."""
    both = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list) else value
    both = tuple(int(v) if isinstance(v, np.integer) else v for v in both) if isinstance(both, tuple) else both
    if not isinstance(both, tuple) or len(both) != 2 or not all(isinstance(v, int) and v >= least for v in both):
        raise ArgumentError(f"{name}={value!r}", fix=f"pass {name} as one integer >= {least} or a pair of them")
    return both


class Window(NamedTuple):
    """A kernel sliding over the last two axes. `padding` is ((top, bottom), (left, right)), or "same" while unknown."""

    kernel: Pair
    stride: Pair
    padding: Any
    dilation: Pair = (1, 1)

    @property
    def extent(self) -> Pair:
        """Pixels from the first to the last tap."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation))

    def canonical(self, size: Sizes) -> Window:
        """All fields as pairs; "same" and "valid" become numbers of pixels where `size` is known."""
        made = self._replace(stride=pair("stride", self.stride), dilation=pair("dilation", self.dilation))
        return made._replace(padding=made._pads(size))

    def _pads(self, size: Sizes) -> Any:
        padding = self.padding
        if padding == "valid":
            return ((0, 0), (0, 0))
        if padding == "same":
            needed = [_same_pads(*axis) for axis in zip(size, self.extent, self.stride)]
            return "same" if None in needed else tuple(needed)
        if isinstance(padding, str):
            raise ArgumentError(f"padding={padding!r}", fix='use "same", "valid", a number of pixels or a pair')
        if isinstance(padding, tuple) and any(isinstance(p, tuple) for p in padding):
            if len(padding) != 2:
                raise ArgumentError(f"padding={padding!r}", fix="pass ((top, bottom), (left, right))")
            return tuple(pair("padding", p, least=0) for p in padding)
        return tuple((p, p) for p in pair("padding", padding, least=0))

    def positions(self, size: Sizes) -> Sizes:
        """Rows and columns of the result; ShapeError when the kernel does not fit."""
        if self.padding == "same":
            return tuple((s + step - 1) // step for s, step in zip(size, self.stride))
        room = [s + before + after - e for s, (before, after), e in zip(size, self.padding, self.extent)]
        if any(isinstance(r, int) and r < 0 for r in room):
            padded = tuple(s + sum(p) for s, p in zip(size, self.padding))
            raise ShapeError(
                f"a window of {show_shape(self.extent)} pixels does not fit the padded input of {show_shape(padded)}",
                fix="use a smaller kernel or dilation, or more padding",
            )
        return tuple(r // step + 1 for r, step in zip(room, self.stride))

    def taps(self, out: Pair) -> Iterator[tuple[slice, ...]]:
        """For each pixel of the kernel, in row order, the padded rows and columns it meets."""
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                starts = (i * self.dilation[0], j * self.dilation[1])
                yield tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, out, self.stride))

    def inner(self, size: Pair) -> tuple[slice, ...]:
        """Where the image lies in its padded frame."""
        return tuple(slice(before, before + s) for s, (before, _) in zip(size, self.padding))

    def padded(self, size: Pair) -> Pair:
        return tuple(s + before + after for s, (before, after) in zip(size, self.padding))


def _same_pads(size: Size, extent: int, stride: int) -> Pair | None:
    if stride == 1:
        total = extent - 1
    elif isinstance(size, Dim):
        return None
    else:
        total = max((-(-size // stride) - 1) * stride + extent - size, 0)
    return total // 2, total - total // 2


def pad_image(xp: ModuleType, x: Any, window: Window, fill: float = 0.0) -> Any:
    """`x` within a frame of `fill`."""
    size = x.shape[2:]
    if window.padded(size) == size:
        return x
    frame = xp.full((*x.shape[:2], *window.padded(size)), fill, dtype=x.dtype)
    frame[(slice(None), slice(None), *window.inner(size))] = x
    return frame


def fold(xp: ModuleType, parts: Iterator[Any], window: Window, size: Pair, out: Pair, shape: Pair, like: Any) -> Any:
    """The images of spatial `size` whose taps sum the `parts`, one per tap in order: the adjoint of unfolding."""
    frame = xp.zeros((*shape, *window.padded(size)), dtype=like.dtype)
    for (rows, columns), part in zip(window.taps(out), parts):
        frame[:, :, rows, columns] += part
    return frame[(slice(None), slice(None), *window.inner(size))]


def unfold(xp: ModuleType, x: Any, window: Window) -> Any:
    """(n, c, h, w) -> columns (n, c, taps, positions)."""
    out = window.positions(x.shape[2:])
    frame = pad_image(xp, x, window)
    columns = xp.stack([frame[:, :, rows, columns] for rows, columns in window.taps(out)], axis=2)
    return xp.reshape(columns, (*x.shape[:2], columns.shape[2], out[0] * out[1]))
