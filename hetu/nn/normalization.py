"""Normalization layers. Each rescales to mean 0 and variance 1 along some axes, then by learned scale and bias.

Batch statistics over ranks follow from how the batch is sharded.
"""

from __future__ import annotations

from typing import Any

from .. import ops
from ..core.errors import ArgumentError
from ..core.graph import Node
from ..core.leaf import variable
from ..init import ones, zeros
from ..ranges import AtLeast1, Fraction, Positive, Whole
from .layer import Layer, check_sizes


class _Norm(Layer):
    """A scale (ones) and, unless left out, a bias (zeros) per feature."""

    def __init__(self, features: AtLeast1, *, epsilon: Positive, bias: bool = True, name: str | None = None) -> None:
        check_sizes(features=features)
        super().__init__(name)
        self.features, self.epsilon = features, epsilon
        with self.naming():
            self.scale = variable("scale", ones, (features,))
            self.bias: Any = variable("bias", zeros, (features,)) if bias else None

    def describe(self) -> str:
        return f"{self.features} features"


class BatchNorm(_Norm):
    """Each feature (entry of `axis`) by its statistics in the batch; in evaluation by running averages of them.

    After a training step running = (1 - momentum) running + momentum batch. S. Ioffe, C. Szegedy, ICML 2015.

    >>> import hetu as ht
    >>> layer = BatchNorm(6)
    >>> layer(ht.placeholder("x", (None, 6, 28, 28))).shape[1:], len(layer.variables)
    ((6, 28, 28), 4)
    """

    def __init__(
        self,
        features: AtLeast1,
        *,
        momentum: Fraction = 0.1,
        epsilon: Positive = 1e-5,
        axis: Whole = 1,
        name: str | None = None,
    ) -> None:
        super().__init__(features, epsilon=epsilon, name=name)
        self.momentum, self.axis = momentum, axis
        with self.naming():
            self.running_mean = variable("running_mean", zeros, (features,), trainable=False)
            self.running_var = variable("running_var", ones, (features,), trainable=False)

    def forward(self, x: Node) -> Node:
        self._check_axis(x, self.axis, self.features)
        statistics = (self.running_mean, self.running_var)
        momentum, epsilon, axis = self.momentum, self.epsilon, self.axis
        y = ops.batch_norm(x, self.scale, self.bias, *statistics, momentum=momentum, epsilon=epsilon, axis=axis)
        return y if self.scale.attrs["trainable"] else y.inputs[1]  # of a frozen layer what evaluation computes


class LayerNorm(_Norm):
    """Each example by the statistics of its own last axis. J. Ba et al., "Layer Normalization", 2016.

    >>> import hetu as ht
    >>> LayerNorm(64)(ht.placeholder("x", (None, 10, 64))).shape[1:]
    (10, 64)
    """

    def __init__(self, features: AtLeast1, *, epsilon: Positive = 1e-5, name: str | None = None) -> None:
        super().__init__(features, epsilon=epsilon, name=name)

    def forward(self, x: Node) -> Node:
        self._check_axis(x, -1, self.features)
        return ops.layer_norm(x, self.scale, self.bias, epsilon=self.epsilon)


class RMSNorm(_Norm):
    """Each example by the root mean square of its last axis, without mean and bias. B. Zhang, R. Sennrich, 2019.

    >>> import hetu as ht
    >>> RMSNorm(64)(ht.placeholder("x", (None, 10, 64))).shape[1:]
    (10, 64)
    """

    def __init__(self, features: AtLeast1, *, epsilon: Positive = 1e-6, name: str | None = None) -> None:
        super().__init__(features, epsilon=epsilon, bias=False, name=name)

    def forward(self, x: Node) -> Node:
        self._check_axis(x, -1, self.features)
        return ops.rms_norm(x, self.scale, epsilon=self.epsilon)


class GroupNorm(_Norm):
    """Images (n, features, h, w) by the statistics of each group of channels. Y. Wu, K. He, ECCV 2018.

    >>> import hetu as ht
    >>> GroupNorm(2, 6)(ht.placeholder("x", (None, 6, 28, 28))).shape[1:]
    (6, 28, 28)
    """

    def __init__(
        self, groups: AtLeast1, features: AtLeast1, *, epsilon: Positive = 1e-5, name: str | None = None
    ) -> None:
        check_sizes(groups=groups)
        super().__init__(features, epsilon=epsilon, name=name)
        if features % groups:
            raise ArgumentError(f"{features} features do not divide into {groups} groups", fix="choose a divisor")
        self.groups = groups

    def forward(self, x: Node) -> Node:
        self._check_axis(x, 1, self.features)
        return ops.group_norm(x, self.scale, self.bias, groups=self.groups, epsilon=self.epsilon)

    def describe(self) -> str:
        return f"{self.features} features in {self.groups} groups"
