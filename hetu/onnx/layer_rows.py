"""Rows of operators that ONNX has as a whole, and computes faster so: norms, convolutions, pooling, recurrence.

They could do without, except for sequences of any length. Left out: windows whose frame follows from open sizes, where
ONNX counts it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.graph import Node
from ..core.types import Size, has_dim
from ..ops.window import Window
from .rows import Written, alike, row

if TYPE_CHECKING:
    from .save import Writer


@row("layer_norm", when=lambda node, used: node.attrs["dtype"] is None and len({i.dtype for i in node.inputs}) == 1)
def layer_norm(out: Writer, node: Node, x: str, scale: str, bias: str) -> str:
    return out("LayerNormalization", x, scale, bias, axis=-1, epsilon=node.attrs["epsilon"])


def _frame(padding: Any) -> dict[str, Any]:
    """The attributes of a frame of zeros; "same" is left where it follows from open sizes."""
    if padding == "same":
        return {"auto_pad": "SAME_UPPER"}
    return {"pads": [pair[side] for side in (0, 1) for pair in padding]}


@row("conv2d")
def conv2d(out: Writer, node: Node, *names: str) -> str:
    slide = {"strides": node.attrs["stride"], "dilations": node.attrs["dilation"], "group": node.attrs["groups"]}
    shape = node.inputs[1].shape[2:]
    return out("Conv", *alike(out, node, names), kernel_shape=shape, **slide, **_frame(node.attrs["padding"]))


def _rest(node: Node) -> tuple[Size, ...]:
    """Rows and columns of images at whose end no window of a convolution begins, which its adjoint has to add."""
    a = node.attrs
    window = Window(node.inputs[1].shape[2:], a["stride"], a["padding"], a["dilation"])
    least = [(n - 1) * s + e for n, s, e in zip(node.inputs[0].shape[2:], window.stride, window.extent)]
    return tuple(size - (n - sum(pair)) for size, n, pair in zip(a["size"], least, window.padding))


@row("conv2d_dx", when=lambda node, used: node.attrs["padding"] != "same" and not has_dim(_rest(node)))
def conv2d_dx(out: Writer, node: Node, *names: str) -> str:
    a, kernel = node.attrs, node.inputs[1].shape[2:]
    slide = {"strides": a["stride"], "dilations": a["dilation"], "group": a["groups"], "output_padding": _rest(node)}
    return out("ConvTranspose", *alike(out, node, names), kernel_shape=kernel, **slide, **_frame(a["padding"]))


def _pooled(node: Node) -> dict[str, Any]:
    return {"kernel_shape": node.attrs["kernel"], "strides": node.attrs["stride"], **_frame(node.attrs["padding"])}


@row("max_pool2d", when=lambda node, used: 1 not in used)
def max_pool2d(out: Writer, node: Node, x: str) -> Written:
    return out("MaxPool", x, **_pooled(node)), ""


@row("avg_pool2d", when=lambda node, used: node.attrs["padding"] != "same")
def avg_pool2d(out: Writer, node: Node, x: str) -> str:
    return out("AveragePool", x, count_include_pad=1, **_pooled(node))


def recurrent(kind: str, gates: Sequence[int], out: Writer, node: Node, *names: str) -> Written:
    """ONNX has time first, transposed weights, one direction as an axis of size 1, and our `gates` in this order."""
    x, w, u, *others = names
    k, count = int(node.inputs[2].shape[0]), 2 if kind == "GRU" else 1  # the number of biases
    order = out.constant(np.concatenate([np.arange(k) + k * gate for gate in gates]))

    def weights(name: str) -> str:
        return out("Unsqueeze", out("Transpose", out("Gather", name, order, axis=1)), out.sizes([0]))

    biases, states, lengths = others[:count], others[count:3], others[3:]
    given = [out("Gather", name, order) for name in biases]
    given += [out.filled((len(gates) * k,), np.zeros((), node.inputs[3].dtype))] * (2 - count)
    bias = out("Unsqueeze", out("Concat", *given, axis=0), out.sizes([0]))
    ends = [out.cast(name, node.inputs[-1].dtype, np.dtype("int32")) for name in lengths] or [""]
    first = [out("Unsqueeze", name, out.sizes([0])) for name in states]
    how = {"hidden_size": k, **({"linear_before_reset": 1} if kind == "GRU" else {})}
    time = out("Transpose", x, perm=(1, 0, 2))
    made = out.several(1 + len(states), kind, time, weights(w), weights(u), bias, *ends, *first, **how)
    steps = out("Transpose", out("Squeeze", made[0], out.sizes([1])), perm=(1, 0, 2))
    last = [out("Squeeze", name, out.sizes([0])) for name in made[1:]]
    if lengths:  # runtimes forget the first state of a sequence without steps
        none = out("Unsqueeze", out("Equal", ends[0], out.constant(np.zeros((), np.int32))), out.sizes([1]))
        last = [out("Where", none, before, name) for before, name in zip(states, last)]
    return (steps, *last, "", "", "")


# Other outputs serve gradients.
row("lstm", when=lambda node, used: used <= {0, 1, 2})(partial(recurrent, "LSTM", (0, 3, 1, 2)))
row("gru", when=lambda node, used: used <= {0, 1})(partial(recurrent, "GRU", (1, 0, 2)))
