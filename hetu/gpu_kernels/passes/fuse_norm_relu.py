"""Let batch normalization and the relu after it, with or without a sum between them, be one operator each way.

Left out: channels that do not come last; a gradient whose masked form another operator reads too, as after the sum of a
residual block: it is made anyway.

Gain: a step of ResNet-18 takes 1.03 times as long without, on an H100; none on a CPU (1.01). Off by leaving
`fuse_norm_relu` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.graph import OPS, Node, Readers, readers_of, rewrite, topological
from ...ops.activation import is_relu_mask
from .batch_norm_relu import batch_norm_relu, batch_norm_relu_dx


def fuse_norm_relu(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`relu(batch_norm_train(x) + h)` and `batch_norm_dx(g * (y > 0), ...)`, each as one operator."""
    nodes = topological(outputs)
    readers = readers_of(nodes, outputs)
    relus = {n: at for n in nodes if n.op is OPS["relu"] and (at := _norm_under(n, readers)) is not None}
    slopes = {n: at for n in nodes if _is_last(n, "batch_norm_dx") and (at := _mask_under(n, readers)) is not None}
    fused: dict[Node, Node] = {}  # what does both, and the normalization it stands for

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in relus:
            terms = list(inputs[0].inputs) if inputs[0].op is OPS["add"] else [inputs[0]]
            norm = terms.pop(relus[node]).inputs[0]
            both = batch_norm_relu.make((*norm.inputs, *terms), {"epsilon": norm.attrs["epsilon"]})
            fused[both] = norm
            return OPS["item"](both, index=0)
        if node in slopes:
            factors = list(inputs[0].inputs)
            y = factors.pop(slopes[node]).inputs[0]
            bias = _bias_under(y, inputs[1:], fused)
            return batch_norm_relu_dx.make((*factors, y, *inputs[1:], *bias), {"epsilon": node.attrs["epsilon"]})
        return None

    made = rewrite(outputs, rule)
    return _statistics_of(fused, made) if fused else made


def _statistics_of(fused: dict[Node, Node], outputs: Sequence[Node]) -> tuple[Node, ...]:
    """The graph with mean and variance taken from what is `fused`, and not from the normalization it stands for."""
    new: dict[Node, Node] = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in fused:
            new[fused[node]] = node if inputs == node.inputs else node.op.make(inputs, node.attrs)
            return new[fused[node]]
        if node.op is OPS["item"] and node.inputs[0] in new:
            return OPS["item"](new[node.inputs[0]], index=node.attrs["index"])
        return None

    return rewrite((*fused, *outputs), rule)[len(fused) :]  # what is fused is met before those who read it


def _bias_under(y: Node, normalized: tuple[Node, ...], fused: dict[Node, Node]) -> tuple[Node, ...]:
    """The bias of the normalization (x, scale, mean, var) if y is nothing but its relu."""
    x, scale, mean, _ = normalized
    both = y.inputs[0] if y.op is OPS["item"] else None
    if both not in fused or both.inputs[:2] != (x, scale) or mean.inputs != (fused[both],):
        return ()
    return both.inputs[2:] if len(both.inputs) == 3 else ()


def _is_last(node: Node, name: str) -> bool:
    return node.op is OPS[name] and node.attrs["axis"] == node.inputs[0].ndim - 1


def _norm_under(relu: Node, readers: Readers) -> int | None:
    """Which term under a relu, the only one or one of two, is a normalization that nothing else reads."""
    under = relu.inputs[0]
    terms = under.inputs if under.op is OPS["add"] else (under,)
    if readers[under] != [relu] or any(t.type != under.type for t in terms):
        return None
    reader = under if under.op is OPS["add"] else relu
    for at, term in enumerate(terms):
        normal = term.op is OPS["item"] and term.attrs["index"] == 0 and _is_last(term.inputs[0], "batch_norm_train")
        if normal and readers[term] == [reader]:
            return at
    return None


def _mask_under(slope: Node, readers: Readers) -> int | None:
    """Which factor of the gradient is the mask of a relu, if nothing else reads the product."""
    product = slope.inputs[0]
    if product.op is not OPS["multiply"] or readers[product] != [slope]:
        return None
    for at, factor in enumerate(product.inputs):
        if (
            is_relu_mask(factor)
            and readers[factor] == [product]
            and factor.inputs[0].type == product.inputs[1 - at].type == product.type
        ):
            return at
    return None
