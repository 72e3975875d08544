"""Operators on images (h, w, n, c) made of those on images (n, c, h, w).

So the pixels of all images at one place lie together. Only the pass `channels_last` makes such nodes, after autodiff.
They mean what they are made of between transposes, and are computed so, as these are views; a room of kernels may have
others.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ..core.backend import Scratch
from ..core.graph import OPS
from ..core.kernels import Call
from ..core.op import Op
from ..core.types import TensorType
from ..ops.conv import conv2d, conv2d_dw, conv2d_dx
from ..ops.pooling import _max_pool2d, avg_pool2d, avg_pool2d_dx, max_pool2d_dx, repeat_pixels

__all__ = [
    "LAST", "MOVED", "ChannelsLast", "avg_pool2d_last", "avg_pool2d_last_dx", "conv2d_last", "conv2d_last_dw",
    "conv2d_last_dx", "max_pool2d_last", "max_pool2d_last_dx", "repeat_pixels_last",
]  # fmt: skip

Turn = Callable[[Any], Any]  # images, their type or their term in the other of both layouts
MOVED = (2, 3, 0, 1)  # of (h, w, n, c) to (n, c, h, w), and back
LAST: dict[Op[..., Any], ChannelsLast] = {}  # by what it is made of


class ChannelsLast(Op[..., Any]):
    """The operator `of` on images (h, w, n, c), which its inputs at `images` are, and all its outputs or none.

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (32, 32, 8, 3)), ht.placeholder("w", (64, 3, 3, 3))
    >>> conv2d_last(x, w, stride=2, padding=1).shape
    (16, 16, 8, 64)
    """

    def __init__(self, name: str, of: Op[..., Any], images: Sequence[int], makes_images: bool = True) -> None:
        def forward(xp: ModuleType, *arrays: Any, **attrs: Any) -> Any:
            return results(turn(xp), of.forward(xp, *inputs(turn(xp), arrays), **attrs))

        forward.__doc__ = f"`{of.name}` of images (h, w, n, c)."
        vars(forward)["__signature__"] = inspect.signature(of.forward)  # its inputs and attributes

        def turn(xp: ModuleType) -> Turn:
            return lambda x: xp.permute_dims(x, MOVED)

        def inputs(turn: Turn, given: Sequence[Any]) -> list[Any]:
            return [turn(x) if k in images else x for k, x in enumerate(given)]

        def results(turn: Turn, made: Any) -> Any:
            if isinstance(made, tuple):
                return tuple(results(turn, part) for part in made)
            return turn(made) if makes_images else made

        def infer(*types: TensorType, **attrs: Any) -> Any:
            return results(_turned, of.infer(*inputs(_turned, types), **attrs))

        def canonical(*types: TensorType, **attrs: Any) -> dict[str, Any]:
            return attrs if of.normalize_rule is None else of.normalize_rule(*inputs(_turned, types), **attrs)

        def bind(
            xp: ModuleType, out: Any, *arrays: Any, scratch: Scratch | None = None, **attrs: Any
        ) -> Sequence[Call]:
            return of.bound(xp, results(turn(xp), out), inputs(turn(xp), arrays), attrs, scratch)

        def terms(*types: TensorType, **attrs: Any) -> str:
            text = of.dims(*inputs(_turned, types), **attrs) if callable(of.dims) else str(of.dims)
            read, made = (tuple(part.split(",")) for part in text.split("->"))
            return ",".join(inputs(_turned_term, read)) + "->" + ",".join(results(_turned_term, made))

        super().__init__(
            forward,
            name=name,
            infer=infer,
            dims=of.dims and terms,
            differentiable=False,
            scratch=True,  # what it is turned for may need some
        )
        self.images, self.makes_images = images, makes_images
        self.normalize_rule, self.bind_rule, self.flops_rule = canonical, bind, of.flops_rule
        OPS[name] = LAST[of] = self


def _turned(x: TensorType) -> TensorType:
    return TensorType(tuple(x.shape[a] for a in MOVED), x.dtype)


def _turned_term(term: str) -> str:
    axes = re.findall(".!?", term)
    return "".join(axes[a] for a in MOVED)


conv2d_last = ChannelsLast("conv2d_last", conv2d, images=(0,))
conv2d_last_dx = ChannelsLast("conv2d_last_dx", conv2d_dx, images=(0,))
conv2d_last_dw = ChannelsLast("conv2d_last_dw", conv2d_dw, images=(0, 1), makes_images=False)

max_pool2d_last = ChannelsLast("max_pool2d_last", _max_pool2d, images=(0,))
max_pool2d_last_dx = ChannelsLast("max_pool2d_last_dx", max_pool2d_dx, images=(0, 1))
avg_pool2d_last = ChannelsLast("avg_pool2d_last", avg_pool2d, images=(0,))
avg_pool2d_last_dx = ChannelsLast("avg_pool2d_last_dx", avg_pool2d_dx, images=(0,))
repeat_pixels_last = ChannelsLast("repeat_pixels_last", repeat_pixels, images=(0,))
