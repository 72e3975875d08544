"""Launches the kernels of `channels.cu`: batch normalization in training and its gradient, with the relu behind it.

Channels that come last are read in packs across channels, others in packs along one. Images, and vectors, may be
stored in 16 bits beside statistics in float32. Arrays must be contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import chain
from math import prod
from typing import Any

from ..fuse.line_text import compute_dtype
from ..ops.batch_norm import batch_norm_dx, batch_norm_train
from .launchers import kernel
from .machine import BLOCK, Call, Machine, address, contiguous, index_dtype, widest_pack
from .reduce import ROOM
from .source import assemble, file_text

LEAST = 4  # packs of a thread: what it reads for its channels, and the sum along the block, are then small beside them
MOST_CHANNELS = 65535  # where a block has one: as many as a grid has along its second axis
JOIN = (4, 64)  # the block of what sums up parts: few channels, so that even 64 of them have many threads


@cache
def text(images: str, vectors: str, statistics: str, index: str, pack: int, last: bool, relu: bool, more: bool) -> str:
    """The kernels for these dtypes, packs and operators."""
    flags = f"LAST = {last:d}, RELU = {relu:d}, MORE = {more:d}"
    early = f'constexpr int PACK = {pack};\nconstexpr bool {flags};\n#line 1 "channels.cu"\n'
    return assemble(early + file_text("channels"), "channels.cu", S=images, V=vectors, M=statistics, Index=index)


class _Channels:
    """How blocks share images (before, channels, after): `chunks` of each channel, and channels side by side."""

    def __init__(self, machine: Machine, axis: int, *groups: Sequence[Any], **flags: bool) -> None:
        (x, *_), (vector, *_), (mean, *_) = images, vectors, statistics = groups
        before, channels, after = self.sizes = prod(x.shape[:axis]), x.shape[axis], prod(x.shape[axis + 1 :])
        last = after == 1
        aligned = not any(address(v) % 16 for v in (*vectors, *statistics))
        pack = widest_pack(channels if last else after, *images) if aligned else 1
        across = min(32, 1 << (channels // pack - 1).bit_length()) if last else 1
        steps, columns = (before, -(-channels // (pack * across))) if last else (before * after // pack, channels)
        each = max(-(-steps * columns // ROOM), LEAST * BLOCK // across)
        self.machine, self.channels, self.chunks = machine, channels, -(-steps // each)
        self.shape = (self.chunks, columns), (across, BLOCK // across)
        dtypes = (a.dtype.name for a in (x, vector, mean))
        self.text = text(*dtypes, index_dtype(x.size), pack, last, **flags)
        self.wide = compute_dtype(x.dtype.name)

    def lines(self) -> Any:
        """Room for three numbers a channel."""
        return self.machine.xp.empty((3, self.channels), self.wide)

    def parts(self, numbers: int) -> Any:
        """Room for what chunks sum up."""
        return self.machine.xp.empty((self.chunks, self.channels, numbers), self.wide)

    def sweep(self, name: str, *arguments: Any) -> Call:
        """The launch of a kernel that visits the images."""
        return partial(self.machine.kernel(self.text, name), *self.shape, arguments)

    def join(self, name: str, *arguments: Any) -> Call:
        """The launch of one that sums up parts."""
        return partial(self.machine.kernel(self.text, name), (-(-self.channels // JOIN[0]),), JOIN, arguments)


def _fit(*groups: Sequence[Any]) -> bool:
    """Whether arrays are contiguous, of one dtype each, in which sums are alike, and a grid has room for them."""
    alike = all(a.dtype == group[0].dtype for group in groups for a in group)
    wide = {compute_dtype(group[0].dtype.name) for group in groups}
    return alike and len(wide) == 1 and groups[-1][0].size <= MOST_CHANNELS and contiguous(*chain(*groups))


@kernel(batch_norm_train)
def norm(
    machine: Machine,
    out: Any,
    x: Any,
    scale: Any,
    bias: Any,
    *added: Any,
    axis: int,
    epsilon: float,
    relu: bool = False,
) -> list[Call] | None:
    y, mean, var = out
    groups = (x, *added, y), (scale, bias), (mean, var)
    if not _fit(*groups):
        return None
    work = _Channels(machine, axis, *groups, relu=relu, more=bool(added))
    parts, lines, other = work.parts(3), work.lines(), (*added, x)[0]
    return [
        work.sweep("moments_of_chunks", x, parts, *work.sizes),
        work.join("join_moments", parts, scale, bias, mean, var, lines, work.channels, work.chunks, float(epsilon)),
        work.sweep("normalize", x, other, lines, y, *work.sizes),
    ]


def norm_relu(machine: Machine, out: Any, x: Any, *arrays: Any, epsilon: float) -> list[Call] | None:
    return norm(machine, out, x, *arrays, axis=x.ndim - 1, epsilon=epsilon, relu=True)


@kernel(batch_norm_dx)
def norm_dx(
    machine: Machine,
    out: Any,
    g: Any,
    x: Any,
    scale: Any,
    mean: Any,
    var: Any,
    *,
    axis: int,
    epsilon: float,
    y: Any = None,
    bias: Any = None,
) -> list[Call] | None:
    """With `y` or `bias` g counts where the relu let it through: where y > 0, or what follows from x and the bias."""
    dx, dscale, dbias = out
    images, vectors = [g, x, dx], [scale, dscale, dbias]
    images += [] if y is None else [y]
    vectors += [] if bias is None else [bias]
    groups = images, vectors, (mean, var)
    if not _fit(*groups):
        return None
    relu, more = y is not None or bias is not None, y is not None
    work = _Channels(machine, axis, *groups, relu=relu, more=more)
    other, shift = x if y is None else y, scale if bias is None else bias  # what is not there is not read
    parts, lines, count = work.parts(2), work.lines(), x.size // work.channels
    numbers = (work.channels, work.chunks, count, float(epsilon))
    return [
        work.sweep("slopes_of_chunks", g, x, other, scale, shift, mean, var, parts, *work.sizes, float(epsilon)),
        work.join("join_slopes", parts, scale, var, dscale, dbias, lines, *numbers),
        work.sweep("normalize_dx", g, x, other, lines, shift, mean, dx, *work.sizes),
    ]


def norm_relu_dx(
    machine: Machine, out: Any, g: Any, y: Any, x: Any, scale: Any, mean: Any, var: Any, *bias: Any, epsilon: float
) -> list[Call] | None:
    """Computing y again saves reading it twice, if scale, bias and statistics are not rounded."""
    exact = bias and scale.dtype.name == compute_dtype(scale.dtype.name)
    opening = {"bias": bias[0]} if exact else {"y": y}
    return norm_dx(machine, out, g, x, scale, mean, var, axis=x.ndim - 1, epsilon=epsilon, **opening)
