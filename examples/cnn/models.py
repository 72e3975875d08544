"""Four classifiers, as functions from the node of the images (n, 28, 28) to that of the logits (n, 10)."""

from __future__ import annotations

import hetu as ht
from hetu import nn


def logistic(x: ht.Node) -> ht.Node:
    """Logistic regression: one linear layer."""
    return nn.Linear(784, 10)(ht.reshape(x, (-1, 784)))


def mlp(x: ht.Node) -> ht.Node:
    """Two hidden layers with dropout."""
    network = nn.Sequential(
        nn.Linear(784, 256, activation=ht.relu),
        nn.Dropout(0.3),
        nn.Linear(256, 256, activation=ht.relu),
        nn.Dropout(0.3),
        nn.Linear(256, 10),
    )
    return network(ht.reshape(x, (-1, 784)))


def lenet(x: ht.Node) -> ht.Node:
    """Two convolutions with pooling, then three linear layers. Y. LeCun et al. 1998, with relu and max-pooling."""
    network = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2, activation=ht.relu),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, activation=ht.relu),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(400, 120, activation=ht.relu),
        nn.Dropout(0.4),
        nn.Linear(120, 84, activation=ht.relu),
        nn.Linear(84, 10),
    )
    return network(ht.expand_dims(x, axis=1))


def resnet(x: ht.Node) -> ht.Node:
    """Three residual blocks of 16, 32 and 64 channels with batch normalization. K. He et al., CVPR 2016, figure 2."""
    x = ht.relu(_conv_norm(ht.expand_dims(x, axis=1), 1, 16, stride=2))
    for channels, channels_out, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        x = _block(x, channels, channels_out, stride)
    return nn.Linear(64, 10)(nn.GlobalAvgPool2d()(x))


def _block(x: ht.Node, channels: int, channels_out: int, stride: int) -> ht.Node:
    """relu(shortcut + two convolutions); the shortcut is a 1 x 1 convolution where the shape changes."""
    y = ht.relu(_conv_norm(x, channels, channels_out, stride=stride))
    y = _conv_norm(y, channels_out, channels_out)
    shortcut = x if stride == 1 else _conv_norm(x, channels, channels_out, kernel=1, stride=stride)
    return ht.relu(y + shortcut)


def _conv_norm(x: ht.Node, channels: int, channels_out: int, *, kernel: int = 3, stride: int = 1) -> ht.Node:
    convolution = nn.Conv2d(channels, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.BatchNorm(channels_out)(convolution(x))
