"""Compute small convolutions that are max-pooled right away by one product, with the batch innermost.

conv2d -> + bias -> relu -> 2x2 max_pool2d and its gradients become the operators of `phases.py`. Images keep their
meaning (n, c, h, w); between two such blocks the transposes cancel, elsewhere they are views. Left out: strides,
groups, other pools, and kernels whose larger patch costs more than the columns it saves.

Gain: 2.8 times the speed of LeNet. Off by leaving `fuse_conv_pool` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.graph import OPS, Node, Readers, readers_of, rewrite, topological
from ..ops.activation import is_relu_mask
from .phases import phase_columns, phase_columns_dx, phase_pool, phase_weights, phase_weights_dx

BATCH_LAST, BATCH_FIRST = (1, 2, 3, 0), (3, 0, 1, 2)
LEAST_BATCH = 16  # shorter rows than this make slow copies
READABLE = {"conv2d_dw", "conv2d_dx", "sum_to_like"}  # what may read the gradient of the product
MOST_CHANNELS = 32  # of the result: with more, the additional work of a larger patch outweighs what pooling saves


def fuse_conv_pool(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`max_pool2d(relu(conv2d(x, w) + b), 2)` and its gradients as products of patches with the four kernels."""
    nodes = topological(outputs)
    readers = readers_of(nodes, outputs)
    blocks = {n: block for n in nodes if n.op.name == "max_pool2d" and (block := _match(n, readers))}
    if not blocks:
        return tuple(outputs)
    by_gradient = {b.gradient: b for b in blocks.values() if b.gradient is not None}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in blocks:
            return blocks[node].forward(inputs[0])
        if node in by_gradient:
            return by_gradient[node].backward(inputs)
        for i in node.inputs:
            if i in blocks:  # an item of the pooling
                return blocks[i].output if node.attrs["index"] == 0 else inputs[0]
            if i in by_gradient:
                return by_gradient[i].part(node, inputs)
        return inputs[0] if _is_dx(node) and any(node in gradient.inputs for gradient in by_gradient) else None

    return rewrite(outputs, rule)


def _is_dx(node: Node) -> bool:
    return node.op.name == "max_pool2d_dx"


def _match(pool: Node, readers: Readers) -> _Block | None:
    """The block that ends in `pool`, if all that lies inside is read by nothing else."""
    relu = pool.inputs[0]
    add = relu.inputs[0] if relu.inputs else relu
    if relu.op.name != "relu" or add.op.name != "add" or len(readers[add]) != 1:
        return None
    conv = next((i for i in add.inputs if i.op.name == "conv2d"), None)
    if conv is None or len(readers[conv]) != 1 or not _pays(pool, conv):
        return None
    bias = add.inputs[1 - add.inputs.index(conv)]
    if bias.shape[-3:] != (conv.shape[1], 1, 1) or (bias.ndim == 4 and bias.shape[0] != 1) or bias.ndim > 4:
        return None
    slopes = [r for r in readers[relu] if r is not pool]
    taps = [r for i in readers[pool] if i is not None and i.attrs["index"] == 1 for r in readers[i]]
    if not slopes and not taps:
        return _Block(None)
    inside = [r for r in (*slopes, *taps) if r is not None]
    if not len(slopes) == len(taps) == 1 or len(inside) != 2:
        return None
    slope, dx = inside
    inner = is_relu_mask(slope) and _is_dx(dx) and readers[slope] == readers[dx] and len(readers[dx]) == 1
    gradient = readers[dx][0] if inner else None
    if gradient is None or gradient.op.name != "multiply" or set(gradient.inputs) != {slope, dx}:
        return None
    kinds = {None if r is None else r.op.name for r in readers[gradient]}
    return _Block(gradient) if kinds <= READABLE else None


def _pays(pool: Node, conv: Node) -> bool:
    """Whether nothing unusual is asked for, and a product of patches is the cheaper way."""
    x, w = (i.tensor for i in conv.inputs)
    if x.dtype != w.dtype or x.dtype.char not in "fd":
        return False
    a, p = conv.attrs, pool.attrs
    plain = (a["stride"], a["dilation"], a["groups"]) == ((1, 1), (1, 1), 1)
    square = (p["kernel"], p["stride"], p["padding"]) == ((2, 2), (2, 2), ((0, 0), (0, 0)))
    return plain and square and x.shape[0] >= LEAST_BATCH and w.shape[0] <= MOST_CHANNELS and min(w.shape[2:]) >= 3


class _Block:
    """One convolution with its pooling. `gradient` is the node that holds the gradient of the convolution, or None."""

    def __init__(self, gradient: Node | None) -> None:
        self.gradient = gradient

    def forward(self, relu: Node) -> Node:
        """The pooling operator in place of `relu` (already rebuilt) and what follows it."""
        add = relu.inputs[0]
        conv = next(i for i in add.inputs if i.op.name == "conv2d")
        bias = add.inputs[1 - add.inputs.index(conv)]
        x, w = conv.inputs
        self.window = {"kernel": w.shape[2:], "padding": conv.attrs["padding"]}
        self.columns = phase_columns(_moved(x, BATCH_LAST), **self.window)
        self.weights = phase_weights(w, OPS["reshape"](bias, shape=(-1,)))
        y, self.chosen = phase_pool(OPS["matmul"](self.weights, self.columns))
        shape = (w.shape[0], conv.shape[2] // 2, conv.shape[3] // 2, x.shape[0])
        self.output = _moved(OPS["reshape"](y, shape=shape), BATCH_FIRST)
        return y.inputs[0]

    def backward(self, factors: tuple[Node, ...]) -> Node:
        """The gradient of the phases (4 o, positions), in place of the gradient of the convolution."""
        g = _moved(next(f for f in factors if f.op.name != "greater"), BATCH_LAST)
        spread = OPS["multiply"](OPS["reshape"](g, shape=(g.shape[0], -1)), self.chosen)
        spread = OPS["reshape"](spread, shape=(self.weights.shape[0], -1))
        # BLAS is faster with the larger of the two on the left
        product = OPS["matrix_transpose"](OPS["matmul"](self.columns, OPS["matrix_transpose"](spread)))
        self.dw, self.db = phase_weights_dx(product, kernel=self.window["kernel"])
        return spread

    def part(self, node: Node, inputs: tuple[Node, ...]) -> Node:
        """What read the gradient of the convolution: the gradient of its kernel, bias or images."""
        if node.op.name == "conv2d_dw":
            return self.dw
        if node.op.name == "sum_to_like":
            return OPS["reshape"](self.db, shape=node.shape)
        taps = OPS["getitem"](self.weights, key=(slice(None), slice(None, -1)))
        columns = OPS["matmul"](OPS["matrix_transpose"](taps), inputs[0])
        return _moved(phase_columns_dx(columns, size=node.attrs["size"], **self.window), BATCH_FIRST)


def _moved(x: Node, axes: tuple[int, ...]) -> Node:
    """`x` with its axes in another order; a move there and back is none."""
    if x.op.name == "permute_dims" and x.attrs["axes"] in (BATCH_LAST, BATCH_FIRST) and x.attrs["axes"] != axes:
        return x.inputs[0]
    return OPS["permute_dims"](x, axes=axes)
