"""Batch normalization with the relu after it, and its gradient, for channels that come last.

Made by the pass `fuse_norm_relu` only, after autodiff: the activations are met once less in each direction. Where
channels do not come last, each operator makes its own sweeps.

Gain: see `fuse_norm_relu.py`. Off by leaving `fuse_norm_relu` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...core.graph import OPS
from ...core.op import op
from ...core.types import TensorType
from ..channels import norm_relu, norm_relu_dx
from ..launchers import kernel


def _axes(x: TensorType) -> str:
    return "".join(chr(ord("d") + i) + "!" for i in range(x.ndim - 1)) + "c"


def _dims(x: TensorType, scale: TensorType, bias: TensorType, *added: TensorType, **_: Any) -> str:
    axes = _axes(x)
    return ",".join([axes, "c", "c", *(axes for _ in added)]) + f"->{axes},c,c"


@op(
    dims=_dims,
    infer=lambda x, *vectors, **_: OPS["batch_norm_train"].infer(x, *vectors[:2], axis=x.ndim - 1),
    differentiable=False,
)
def batch_norm_relu(xp: ModuleType, x: Any, scale: Any, bias: Any, *added: Any, epsilon: float) -> tuple[Any, Any, Any]:
    """(y, mean, var) of `batch_norm_train` along the last axis, with y = max(y + what is added, 0).

    `added` is nothing or one array of the shape of `x`.

    >>> import hetu as ht
    >>> y, _, _ = batch_norm_relu([[1.0], [3.0]], [1.0], [0.0], [[0.0], [1.0]], epsilon=0.0)
    >>> ht.evaluate(y).tolist()
    [[0.0], [2.0]]
    """
    y, mean, var = OPS["batch_norm_train"].forward(xp, x, scale, bias, axis=x.ndim - 1, epsilon=epsilon)
    return xp.maximum(sum(added, y), 0), mean, var


@op(
    dims=lambda g, y, x, *vectors, **_: f"{','.join([_axes(x)] * 3 + ['c'] * len(vectors))}->{_axes(x)},c,c",
    infer=lambda g, y, x, scale, *_, **__: OPS["batch_norm_dx"].infer(g, x, scale),
    differentiable=False,
)
def batch_norm_relu_dx(
    xp: ModuleType, g: Any, y: Any, x: Any, scale: Any, mean: Any, var: Any, *bias: Any, epsilon: float
) -> tuple[Any, Any, Any]:
    """`batch_norm_dx` along the last axis, of a gradient `g` that counts where `y`, the result of the relu, is not 0.

    `bias` is given where nothing was added before the relu: a GPU then finds out from `x` where that is.

    >>> import hetu as ht
    >>> x, s = ht.placeholder("x", (8, 3)), ht.placeholder("s", (3,))
    >>> batch_norm_relu_dx(x, x, x, s, s, s, epsilon=1e-5)[0].shape
    (8, 3)
    """
    masked = g * xp.astype(y > 0, g.dtype)
    return OPS["batch_norm_dx"].forward(xp, masked, x, scale, mean, var, axis=x.ndim - 1, epsilon=epsilon)


kernel(batch_norm_relu)(norm_relu)
kernel(batch_norm_relu_dx)(norm_relu_dx)
