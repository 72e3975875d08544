"""Classifiers of images: (n, channels, height, width) to logits (n, classes); `unet` classifies each pixel.

Stems are those for small images, of 32 x 32: a convolution of 3 x 3 without a pooling. `width` scales a network.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.graph import Node
from ..nn.layer import width as features_of

__all__ = [
    "densenet", "lenet", "logistic", "mlp", "mobilenet", "resnet", "resnet18", "resnet34", "resnet50", "unet", "vgg",
]  # fmt: skip


def logistic(x: Node, classes: int) -> Node:
    """Logistic regression: one linear layer."""
    flat = ops.flatten(x, 1)
    return nn.Linear(features_of(flat), classes)(flat)


def mlp(x: Node, classes: int) -> Node:
    """Two hidden layers with dropout."""
    flat = ops.flatten(x, 1)
    network = nn.Sequential(
        nn.Linear(features_of(flat), 256, activation=ops.relu),
        nn.Dropout(0.3),
        nn.Linear(256, 256, activation=ops.relu),
        nn.Dropout(0.3),
        nn.Linear(256, classes),
    )
    return network(flat)


def lenet(x: Node, classes: int) -> Node:
    """Two convolutions with pooling, then three linear layers, with relu and max-pooling.

    Y. LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998, figure 2.
    """
    features = nn.Sequential(
        nn.Conv2d(features_of(x), 6, 5, padding=2, activation=ops.relu),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, activation=ops.relu),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.4),
    )(x)
    network = nn.Sequential(
        nn.Linear(features_of(features), 120, activation=ops.relu),
        nn.Dropout(0.4),
        nn.Linear(120, 84, activation=ops.relu),
        nn.Linear(84, classes),
    )
    return network(features)


def vgg(x: Node, classes: int, *, width: int = 64, stages: Sequence[int] = (1, 1, 2, 2)) -> Node:
    """Stages of 3 x 3 convolutions and a pooling, each of twice as many channels as the one before.

    K. Simonyan and A. Zisserman, ICLR 2015, table 1: VGG-11 less its last stage, with batch normalization
    and one linear layer.
    """
    for stage, count in enumerate(stages):
        for _ in range(count):
            x = ops.relu(_conv_norm(x, width << stage))
        x = nn.MaxPool2d(2)(x)
    return _head(x, classes)


def resnet(
    x: Node,
    classes: int,
    *,
    width: int = 16,
    blocks: Sequence[int] = (1, 1, 1),
    stem: int = 2,
    bottleneck: bool = False,
) -> Node:
    """Stages of residual blocks, each of twice the channels and half the size of the one before.

    K. He et al., CVPR 2016: figure 2, or with `bottleneck` figure 5 right, of four times the channels. `stem` is the
    stride of the first convolution.
    """
    x = ops.relu(_conv_norm(x, width, stride=stem))
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            x = _bottleneck(x, width << stage, stride) if bottleneck else _block(x, width << stage, stride)
    return _head(x, classes)


def resnet18(x: Node, classes: int, *, width: int = 64) -> Node:
    """18 layers. K. He et al., CVPR 2016, table 1."""
    return resnet(x, classes, width=width, blocks=(2, 2, 2, 2), stem=1)


def resnet34(x: Node, classes: int, *, width: int = 64) -> Node:
    """34 layers. K. He et al., CVPR 2016, table 1."""
    return resnet(x, classes, width=width, blocks=(3, 4, 6, 3), stem=1)


def resnet50(x: Node, classes: int, *, width: int = 64) -> Node:
    """50 layers, of bottlenecks. K. He et al., CVPR 2016, table 1."""
    return resnet(x, classes, width=width, blocks=(3, 4, 6, 3), stem=1, bottleneck=True)


# Of each stage: expansion, channels, blocks, first stride; M. Sandler et al., table 2, with two strides fewer.
INVERTED = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet(x: Node, classes: int, *, stages: Sequence[tuple[int, int, int, int]] = INVERTED) -> Node:
    """Inverted residuals: wide depthwise convolutions between narrow ends.

    M. Sandler et al., "MobileNetV2", CVPR 2018, figure 3b.
    """
    x = _relu6(_conv_norm(x, 32))
    for expansion, channels, count, first in stages:
        for block in range(count):
            x = _inverted(x, expansion, channels, 1 if block else first)
    return _head(_relu6(_conv_norm(x, 4 * stages[-1][1], kernel=1)), classes)


def densenet(x: Node, classes: int, *, growth: int = 12, blocks: Sequence[int] = (6, 6, 6)) -> Node:
    """Layers that see all before them, each adding `growth` channels; between blocks half of them stay.

    G. Huang et al., CVPR 2017, section 3: DenseNet-BC.
    """
    x = _conv(x, 2 * growth)
    for block, count in enumerate(blocks):
        for _ in range(count):
            y = _conv(_norm_relu(x), 4 * growth, kernel=1)
            x = ops.concat([x, _conv(_norm_relu(y), growth)], axis=1)
        if block < len(blocks) - 1:
            x = nn.AvgPool2d(2)(_conv(_norm_relu(x), features_of(x) // 2, kernel=1))
    return _head(_norm_relu(x), classes)


def unet(x: Node, classes: int, *, width: int = 16, depth: int = 2) -> Node:
    """Down by poolings and up again, each level beside what it was on the way down: (n, classes, height, width).

    O. Ronneberger et al., MICCAI 2015, figure 1, with padded convolutions and batch normalization. Height and width
    divide by 2 ** depth.
    """
    levels = []
    for level in range(depth):
        levels.append(_twice(x, width << level))
        x = nn.MaxPool2d(2)(levels[-1])
    x = _twice(x, width << depth)
    for level in reversed(range(depth)):
        up = nn.ConvTranspose2d(features_of(x), width << level, 2, stride=2)(x)
        x = _twice(ops.concat([levels[level], up], axis=1), width << level)
    return nn.Conv2d(width, classes, 1)(x)


# -- parts -------------------------------------------------------------------------------------------------------


def _head(x: Node, classes: int) -> Node:
    return nn.Linear(features_of(x), classes)(nn.GlobalAvgPool2d()(x))


def _conv(x: Node, channels: int, *, kernel: int = 3, stride: int = 1, groups: int = 1) -> Node:
    around = kernel // 2
    return nn.Conv2d(features_of(x), channels, kernel, stride=stride, padding=around, groups=groups, bias=False)(x)


def _conv_norm(x: Node, channels: int, **options: int) -> Node:
    y = _conv(x, channels, **options)
    return nn.BatchNorm(channels)(y)


def _norm_relu(x: Node) -> Node:
    return ops.relu(nn.BatchNorm(features_of(x))(x))


def _relu6(x: Node) -> Node:
    return ops.clip(x, 0.0, 6.0)


def _twice(x: Node, channels: int) -> Node:
    return ops.relu(_conv_norm(ops.relu(_conv_norm(x, channels)), channels))


def _block(x: Node, channels: int, stride: int) -> Node:
    """relu(shortcut + two convolutions)."""
    y = _conv_norm(ops.relu(_conv_norm(x, channels, stride=stride)), channels)
    return ops.relu(y + _shortcut(x, channels, stride))


def _bottleneck(x: Node, channels: int, stride: int) -> Node:
    y = ops.relu(_conv_norm(ops.relu(_conv_norm(x, channels, kernel=1)), channels, stride=stride))
    return ops.relu(_conv_norm(y, 4 * channels, kernel=1) + _shortcut(x, 4 * channels, stride))


def _shortcut(x: Node, channels: int, stride: int) -> Node:
    """`x`, through a 1 x 1 convolution where the shape changes."""
    same = stride == 1 and features_of(x) == channels
    return x if same else _conv_norm(x, channels, kernel=1, stride=stride)


def _inverted(x: Node, expansion: int, channels: int, stride: int) -> Node:
    wide = expansion * features_of(x)
    y = _relu6(_conv_norm(x, wide, kernel=1)) if expansion > 1 else x
    y = _conv_norm(_relu6(_conv_norm(y, wide, stride=stride, groups=wide)), channels, kernel=1)
    return x + y if stride == 1 and features_of(x) == channels else y


_answer_calls(__name__)
