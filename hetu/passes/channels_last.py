"""Keep images with their channels last between convolutions, where what a tap needs of a pixel is a long run of memory.

`conv2d`, its gradients and `batch_norm` become their forms for (h, w, n, c); what lies between follows, pooling too, so
that the transposes at the borders meet and cancel. Gain: 1.92 times the speed of ResNet-18 on a CPU; pooling takes a
quarter of its time. Left out: convolutions of few channels, whose runs would be short.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.graph import OPS, Node, rewrite, topological
from ..core.types import TensorType
from .conv_last import LAST, MOVED

CONVOLUTIONS = ("conv2d", "conv2d_dx", "conv2d_dw")
NORMS = {"batch_norm_train": 1, "batch_norm_dx": 2}  # how many of the inputs are images
POOLS = {"max_pool2d": "max_pool2d_dx", "avg_pool2d": "avg_pool2d_dx"}  # with their gradients
LEAST_CHANNELS = 16  # of the result, forward
ELEMENTWISE = ("...->...", "...,...->...")


def channels_last(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """Convolutions of many channels and what lies between them, on images (h, w, n, c)."""
    chosen = {n for n in topological(outputs) if _fits(n)}
    pooled = set[tuple[object, ...]]()  # what was pooled with its channels last: its gradients are too

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        name = node.op.name
        if node in chosen:
            return _made_last(node, inputs)
        if name == "item" and inputs[0].op.name in NORMS and inputs[0].attrs != node.inputs[0].attrs:
            item = OPS["item"](inputs[0], index=node.attrs["index"])
            return _first(item) if node.attrs["index"] == 0 else item
        if name == "item" and inputs[0].op is LAST["max_pool2d"]:
            return _first(OPS["item"](inputs[0], index=node.attrs["index"]))
        if name in POOLS and _is_moved(inputs[0]):
            pooled.add(_pooling(POOLS[name], node.inputs[0], node))
            return _made_last(node, inputs)
        if name in POOLS.values() and _pooling(name, node, node) in pooled:
            return _made_last(node, inputs)
        if not any(map(_is_moved, inputs)):
            return None
        if name in NORMS and node.attrs["axis"] == 1:
            images = tuple(map(_last, inputs[: NORMS[name]]))
            return node.op.make((*images, *inputs[NORMS[name] :]), {**node.attrs, "axis": 3})
        if name == "sum" and node.attrs["axis"] == (2, 3) and not node.attrs["keepdims"]:
            return OPS["sum"](_last(inputs[0]), axis=(0, 1))
        if name == "sum_to_like" and _is_vector(inputs[1], inputs[0]):
            return OPS["reshape"](OPS["sum"](_last(inputs[0]), axis=(0, 1, 2)), shape=node.shape)
        return _elementwise(node, inputs) if node.op.dims in ELEMENTWISE else None

    return rewrite(outputs, rule) if chosen else tuple(outputs)


def _fits(node: Node) -> bool:
    if node.op.name not in CONVOLUTIONS:
        return False
    x, w = (i.tensor for i in node.inputs)
    results = node.shape[0] if node.op.name == "conv2d_dw" else w.shape[0]
    return results >= LEAST_CHANNELS and x.dtype == w.dtype


def _pooling(gradient: str, images: Node, node: Node) -> tuple[object, ...]:
    """What a pooling of images and its gradient have in common."""
    return gradient, images.shape, *(node.attrs[key] for key in ("kernel", "stride", "padding"))


def _made_last(node: Node, inputs: tuple[Node, ...]) -> Node:
    made = LAST[node.op.name]
    turned = (_last(x) if k in made.images else x for k, x in enumerate(inputs))
    node = made.make(tuple(turned), node.attrs)
    return _first(node) if made.makes_images and isinstance(node.type, TensorType) else node


def _elementwise(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    """The same operator on images with the channels last, if every other input is one too, a number or a vector."""
    moved = []
    for i in inputs:
        if i.ndim == 0:
            moved.append(i)
        elif i.shape == node.shape:
            moved.append(_last(i))
        elif _is_vector(i, node):
            moved.append(OPS["reshape"](i, shape=(node.shape[1],)))
        else:
            return None
    return _first(node.op.make(tuple(moved), node.attrs)) if node.ndim == 4 else None


def _is_vector(x: Node, images: Node) -> bool:
    """Whether `x` holds one number for each channel."""
    return images.ndim == 4 and x.shape in ((images.shape[1], 1, 1), (1, images.shape[1], 1, 1))


def _is_moved(x: Node) -> bool:
    return x.op.name == "permute_dims" and x.attrs["axes"] == MOVED


def _last(x: Node) -> Node:
    return x.inputs[0] if _is_moved(x) else OPS["permute_dims"](x, axes=MOVED)


def _first(x: Node) -> Node:
    return OPS["permute_dims"](x, axes=MOVED)
