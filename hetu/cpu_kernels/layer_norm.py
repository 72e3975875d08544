"""Layer normalization that hands its normal rows to its gradient, which else would center and measure them again.

The normal rows take the place of the input in memory. RMS and group norm are compositions.

Pattern: `layer_norm` and its gradient. Gain: within the noise of 8 % on a GPT. Off by leaving `share_layer_norm` out of
`passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import OPS, Node, topological
from ..core.kernels import Call
from ..core.op import op
from ..core.types import TensorType
from .batch_norm import runs_fast
from .normalization import CenteredRows
from .share import share


def _rows_type(x: TensorType, *_: TensorType, **__: Any) -> tuple[TensorType, ...]:
    return x, x, TensorType((*x.shape[:-1], 1), x.dtype)


@op(infer=_rows_type, differentiable=False)
def layer_norm_rows(xp: ModuleType, x: Any, scale: Any, bias: Any, *, epsilon: float = 1e-5) -> tuple[Any, Any, Any]:
    """(`layer_norm`(x, scale, bias), the normal rows, 1 / standard deviation of each).

    >>> import hetu as ht
    >>> y, normal, inverse = layer_norm_rows([[1.0, 3.0]], [2.0, 2.0], [1.0, 1.0], epsilon=0.0)
    >>> ht.evaluate(y).tolist(), ht.evaluate(normal).tolist(), ht.evaluate(inverse).tolist()
    ([[-1.0, 3.0]], [[-1.0, 1.0]], [[1.0]])
    """
    centered = x - xp.mean(x, axis=-1, keepdims=True)
    inverse = 1 / xp.sqrt(xp.mean(centered * centered, axis=-1, keepdims=True) + epsilon)
    normal = centered * inverse
    return normal * scale + bias, normal, inverse


@layer_norm_rows.bind
def layer_norm_rows_bind(
    xp: ModuleType, out: Any, x: Any, scale: Any, bias: Any, *, epsilon: float
) -> list[Call] | None:
    y, normal, inverse = out
    if not runs_fast(xp, y, x, scale, bias):
        return None
    rows = CenteredRows(x, epsilon, inverse.reshape(-1, 1))
    return [
        partial(rows.center, normal.reshape(rows.x.shape)),
        partial(np.multiply, normal, inverse, normal),
        partial(np.multiply, normal, scale, y),
        partial(np.add, y, bias, y),
    ]


def _dx_type(g: TensorType, normal: TensorType, inverse: TensorType, scale: TensorType) -> tuple[TensorType, ...]:
    return normal, scale, scale


@op(infer=_dx_type, inplace={0: (0,)}, differentiable=False)
def layer_norm_rows_dx(xp: ModuleType, g: Any, normal: Any, inverse: Any, scale: Any) -> tuple[Any, Any, Any]:
    """The gradients of `layer_norm` with respect to (x, scale, bias), from what `layer_norm_rows` handed over.

    >>> import hetu as ht
    >>> g = ht.placeholder("g", (8, 3))
    >>> _, normal, inverse = layer_norm_rows(g, np.ones(3), np.ones(3))
    >>> [d.shape for d in layer_norm_rows_dx(g, normal, inverse, np.ones(3))]
    [(8, 3), (3,), (3,)]
    """
    scaled, batch = g * scale, tuple(range(g.ndim - 1))
    along = xp.mean(scaled, axis=-1, keepdims=True) + normal * xp.mean(scaled * normal, axis=-1, keepdims=True)
    dscale, dbias = xp.sum(g * normal, axis=batch, dtype=g.dtype), xp.sum(g, axis=batch, dtype=g.dtype)
    return (scaled - along) * inverse, dscale, dbias


@layer_norm_rows_dx.bind
def layer_norm_rows_dx_bind(
    xp: ModuleType, out: Any, g: Any, normal: Any, inverse: Any, scale: Any
) -> list[Call] | None:
    dx, dscale, dbias = out
    if not runs_fast(xp, dx, g, normal, inverse, scale, dscale, dbias):
        return None
    width = g.shape[-1]
    gs, normals, result = (a.reshape(-1, width) for a in (g, normal, dx))
    inverses, ones = inverse.reshape(-1, 1), np.ones(len(gs), g.dtype)
    mean, part, weights = np.empty((len(gs), 1), g.dtype), np.empty((len(gs), 1), g.dtype), np.empty_like(scale)
    along, share = np.empty_like(gs), g.dtype.type(1 / width)
    return [
        partial(np.einsum, "ij,ij->j", gs, normals, out=dscale),
        partial(np.matmul, ones, gs, dbias),
        partial(np.multiply, scale, share, weights),
        partial(np.matmul, gs, weights, mean[:, 0]),
        partial(np.multiply, gs, scale, result),
        partial(np.einsum, "ij,ij->i", result, normals, out=part[:, 0]),
        partial(np.multiply, part, share, part),
        partial(np.multiply, normals, part, along),
        partial(np.add, along, mean, along),
        partial(np.subtract, result, along, result),
        partial(np.multiply, result, inverses, result),
    ]


def share_layer_norm(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`layer_norm` also returns its normal rows and inverse deviations, from which the gradient starts."""
    nodes = topological(outputs)
    norms = {(n.inputs[0], n.attrs["epsilon"]): n for n in nodes if n.op.name == "layer_norm" and _of_one_dtype(n)}
    found = {n: norms.get((n.inputs[1], n.attrs["epsilon"])) for n in nodes if n.op.name == "layer_norm_dx"}
    return share(
        outputs,
        {n: f for n, f in found.items() if f is not None},
        lambda node, inputs: layer_norm_rows.make(inputs, {"epsilon": node.attrs["epsilon"]}),
        lambda both, inputs: _node(
            layer_norm_rows_dx(inputs[0], *(OPS["item"](both, index=i) for i in (1, 2)), inputs[2])
        ),
    )


def _of_one_dtype(node: Node) -> bool:
    return all(i.dtype == node.dtype for i in node.inputs)


def _node(items: tuple[Node, ...]) -> Node:
    return items[0].inputs[0]
