"""`conv2d` and its gradients on images (h, w, n, c): the pixels of all images at one place lie together.

Only the pass `channels_last` makes them, after autodiff. This file says what they mean, in terms of `conv2d`; the rooms
of kernels compute them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..core.graph import OPS
from ..core.op import op
from ..core.types import TensorType
from ..ops.conv import conv2d_dw_flops, conv2d_dw_type, conv2d_dx_flops, conv2d_dx_type, conv2d_flops, conv2d_type
from ..ops.window import Pair

__all__ = ["conv2d_last", "conv2d_last_dw", "conv2d_last_dx"]

MOVED = (2, 3, 0, 1)  # of (h, w, n, c) to (n, c, h, w), and back


def _swapped(x: TensorType) -> TensorType:
    return TensorType(tuple(x.shape[a] for a in MOVED), x.dtype)


@op(
    infer=lambda x, w, **attrs: _swapped(conv2d_type(_swapped(x), w, **attrs)),
    differentiable=False,
    scratch=True,
)
def conv2d_last(
    xp: ModuleType, x: Any, w: Any, *, stride: Pair, padding: Any, dilation: Pair = (1, 1), groups: int = 1
) -> Any:
    """`conv2d` of images x (h, w, n, c) with kernels w (o, c, i, j) -> (y, x, n, o).

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (32, 32, 8, 3)), ht.placeholder("w", (64, 3, 3, 3))
    >>> conv2d_last(x, w, stride=(2, 2), padding=((1, 1), (1, 1))).shape
    (16, 16, 8, 64)
    """
    y = OPS["conv2d"].forward(
        xp, xp.permute_dims(x, MOVED), w, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    return xp.permute_dims(y, MOVED)


@op(
    infer=lambda g, w, **attrs: _swapped(conv2d_dx_type(_swapped(g), w, **attrs)),
    differentiable=False,
    scratch=True,
)
def conv2d_last_dx(
    xp: ModuleType, g: Any, w: Any, *, size: Pair, stride: Pair, padding: Any, dilation: Pair = (1, 1), groups: int = 1
) -> Any:
    """`conv2d_dx` of gradients g (y, x, n, o) with kernels w (o, c, i, j) -> (*size, n, c).

    >>> import hetu as ht
    >>> g, w = ht.placeholder("g", (16, 16, 8, 64)), ht.placeholder("w", (64, 3, 3, 3))
    >>> conv2d_last_dx(g, w, size=(32, 32), stride=(2, 2), padding=((1, 1), (1, 1))).shape
    (32, 32, 8, 3)
    """
    g = xp.permute_dims(g, MOVED)
    x = OPS["conv2d_dx"].forward(xp, g, w, size=size, stride=stride, padding=padding, dilation=dilation, groups=groups)
    return xp.permute_dims(x, MOVED)


@op(
    infer=lambda x, g, **attrs: conv2d_dw_type(_swapped(x), _swapped(g), **attrs),
    differentiable=False,
    scratch=True,
)
def conv2d_last_dw(
    xp: ModuleType,
    x: Any,
    g: Any,
    *,
    kernel: Pair,
    stride: Pair,
    padding: Any,
    dilation: Pair = (1, 1),
    groups: int = 1,
) -> Any:
    """`conv2d_dw` of images x (h, w, n, c) and gradients g (y, x, n, o) -> (o, c, *kernel).

    >>> import hetu as ht
    >>> x, g = ht.placeholder("x", (32, 32, 8, 3)), ht.placeholder("g", (16, 16, 8, 64))
    >>> conv2d_last_dw(x, g, kernel=(3, 3), stride=(2, 2), padding=((1, 1), (1, 1))).shape
    (64, 3, 3, 3)
    """
    x, g = xp.permute_dims(x, MOVED), xp.permute_dims(g, MOVED)
    return OPS["conv2d_dw"].forward(
        xp, x, g, kernel=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups
    )


def _splits(name: str, *images: bool) -> Callable[..., str]:
    """How the operator of that name may be split, with the axes of images where they lie here; its result is last."""

    def dims(*types: TensorType, **attrs: Any) -> str:
        rule: Any = OPS[name].dims
        operands, result = rule(*types, **attrs).split("->")
        terms = [re.findall("[a-z]!?", term) for term in (*operands.split(","), result)]
        *read, made = ("".join(t[a] for a in MOVED) if moved else "".join(t) for t, moved in zip(terms, images))
        return f"{','.join(read)}->{made}"

    return dims


conv2d_last.dims = _splits("conv2d", True, False, True)
conv2d_last_dx.dims = _splits("conv2d_dx", True, False, True)
conv2d_last_dw.dims = _splits("conv2d_dw", True, True, False)
conv2d_last.flops(conv2d_flops)
conv2d_last_dx.flops(conv2d_dx_flops)
conv2d_last_dw.flops(conv2d_dw_flops)
