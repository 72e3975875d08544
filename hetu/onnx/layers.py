"""Operators of ONNX that normalize."""

from __future__ import annotations

import numpy as np

from .. import ops
from ..core.graph import Node
from ..core.operators import cast_to
from ..core.types import unify
from ..ops.batch_norm import lift
from .known import few
from .meaning import OutputCount, Untrained, meaning

FLOAT = np.dtype("float32")


@meaning("BatchNormalization")
def batch_norm(
    x: Node,
    scale: Node,
    bias: Node,
    mean: Untrained,
    var: Untrained,
    *,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    training_mode: int = 0,
) -> tuple[Node, ...]:
    """By the statistics given, or, in training, by those of the batch, beside which stand new running ones."""
    running = mean, var
    if training_mode:
        others = tuple(i for i in range(x.ndim) if i != 1)
        mean, var = ops.mean(x, axis=others), ops.var(x, axis=others)
    factor = cast_to(scale, var.dtype) * ops.rsqrt(var + epsilon)
    y = x * lift(factor, x, 1) + lift(cast_to(bias, var.dtype) - mean * factor, x, 1)
    return y, *(old * momentum + new * (1 - momentum) for old, new in zip(running, (mean, var)))


@meaning("InstanceNormalization")
def instance_norm(x: Node, scale: Node, bias: Node, *, epsilon: float = 1e-5) -> Node:
    return ops.group_norm(x, scale, bias, groups=int(unify(x.shape[1], scale.shape[0])), epsilon=epsilon)


@meaning("LayerNormalization")
def layer_norm(
    x: Node,
    scale: Node,
    bias: Node | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    outputs: OutputCount = 1,
) -> tuple[Node, ...]:
    """In float32 at least, as `stash_type` says."""
    last = tuple(range(axis % x.ndim, x.ndim))
    if outputs == 1 and len(last) == 1 and bias is not None and scale.ndim == bias.ndim == 1:
        return (ops.layer_norm(x, scale, bias, epsilon=epsilon),)
    wide = cast_to(x, FLOAT) if x.dtype.itemsize == 2 else x
    mean = ops.mean(wide, axis=last, keepdims=True)
    inverse = ops.rsqrt(ops.var(wide, axis=last, keepdims=True) + epsilon)
    y = cast_to((wide - mean) * inverse, x.dtype) * scale
    return y if bias is None else y + bias, mean, inverse


@meaning("LRN")
def local_response(x: Node, *, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0) -> Node:
    """Each channel by the squares of its neighbors."""
    before, channels = (few(size, "neighbors") - 1) // 2, x.shape[1]
    borders = tuple((before, size - 1 - before) if i == 1 else (0, 0) for i in range(x.ndim))
    squares = ops.pad(ops.square(x), pad_width=borders)
    total = sum((squares[:, k : k + channels] for k in range(1, size)), squares[:, :channels])
    return x / (bias + alpha / size * total) ** beta
