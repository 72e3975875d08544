"""Convolution and pooling layers on images (n, channels, height, width).

Sizes of one number hold for rows and columns; a pair gives them apart. `hetu.conv2d` says what `padding` may be.
Left out: one and three dimensions.
"""

from __future__ import annotations

from typing import Annotated, Any

from .. import ops
from ..core.errors import ArgumentError
from ..core.graph import Node
from ..core.leaf import Initializer, variable
from ..init import he_uniform, zeros
from ..ranges import AtLeast1, Count, OneOf
from .layer import Activation, Layer, activate, check_sizes

KernelSize = AtLeast1 | tuple[AtLeast1, AtLeast1]
Border = Count | tuple[Count, Count]
Padding = Annotated[str, OneOf("same")] | Count | tuple[Border, Border]


class _Convolution(Layer):
    """What `Conv2d` and `ConvTranspose2d` share: variables, checks, bias and activation."""

    def __init__(
        self,
        inputs: AtLeast1,
        outputs: AtLeast1,
        kernel_size: KernelSize,
        *,
        stride: KernelSize = 1,
        padding: Padding = 0,
        dilation: KernelSize = 1,
        groups: AtLeast1 = 1,
        activation: Activation | None = None,
        bias: bool = True,
        weight_init: Initializer = he_uniform,
        bias_init: Initializer = zeros,
        name: str | None = None,
    ) -> None:
        rows, columns = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        check_sizes(inputs=inputs, outputs=outputs, kernel_size=rows, groups=groups)
        check_sizes(kernel_size=columns)
        if inputs % groups or outputs % groups:
            raise ArgumentError(
                f"{inputs} input and {outputs} output channels do not divide into {groups} groups",
                fix="choose channels that are multiples of groups",
            )
        super().__init__(name)
        self.inputs, self.outputs, self.kernel, self.activation = inputs, outputs, (rows, columns), activation
        self.options: dict[str, Any] = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        with self.naming():
            self.weight = variable("weight", weight_init, self._weight_shape(groups))
            self.bias = variable("bias", bias_init, (outputs,)) if bias else None

    def _weight_shape(self, groups: AtLeast1) -> tuple[int, int, int, int]:
        raise NotImplementedError

    def _convolve(self, x: Node) -> Node:
        raise NotImplementedError

    def forward(self, x: Node) -> Node:
        self._check_axis(x, 1, self.inputs, ndim=4)
        y = self._convolve(x)
        if self.bias is not None:
            y = y + ops.reshape(self.bias, shape=(1, self.outputs, 1, 1))
        return activate(self.activation, y)

    def describe(self) -> str:
        shown = [f"{self.inputs} -> {self.outputs}", f"kernel {self.kernel[0]}x{self.kernel[1]}"]
        defaults = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
        shown += [f"{k} {v}" for k, v in self.options.items() if v != defaults.get(k, 0)]
        return ", ".join(shown)


class Conv2d(_Convolution):
    """Convolution (n, inputs, h, w) -> (n, outputs, y, x) with `weight` (outputs, inputs / groups, rows, columns).

    >>> import hetu as ht
    >>> layer = Conv2d(1, 6, 5, padding="same", activation=ht.relu)
    >>> layer(ht.placeholder("x", (None, 1, 28, 28))).shape[1:]
    (6, 28, 28)
    """

    def _weight_shape(self, groups: AtLeast1) -> tuple[int, int, int, int]:
        return (self.outputs, self.inputs // groups, *self.kernel)

    def _convolve(self, x: Node) -> Node:
        return ops.conv2d(x, self.weight, **self.options)


class ConvTranspose2d(_Convolution):
    """The transpose of a convolution, with `weight` (inputs, outputs / groups, rows, columns).

    `output_padding` chooses among the image sizes that a stride shrinks to one, see `hetu.conv_transpose2d`.

    >>> import hetu as ht
    >>> ConvTranspose2d(8, 4, 2, stride=2)(ht.placeholder("x", (None, 8, 7, 7))).shape[1:]
    (4, 14, 14)
    """

    def __init__(
        self,
        inputs: AtLeast1,
        outputs: AtLeast1,
        kernel_size: KernelSize,
        *,
        output_padding: Border = 0,
        **options: Any,
    ) -> None:
        super().__init__(inputs, outputs, kernel_size, **options)
        self.options["output_padding"] = output_padding

    def _weight_shape(self, groups: AtLeast1) -> tuple[int, int, int, int]:
        return (self.inputs, self.outputs // groups, *self.kernel)

    def _convolve(self, x: Node) -> Node:
        return ops.conv_transpose2d(x, self.weight, **self.options)


class _Pooling(Layer):
    def __init__(
        self,
        kernel_size: KernelSize,
        *,
        stride: KernelSize | None = None,
        padding: Padding = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.kernel, self.stride, self.padding = kernel_size, stride, padding

    def describe(self) -> str:
        return f"kernel {self.kernel}, stride {self.kernel if self.stride is None else self.stride}"


class MaxPool2d(_Pooling):
    """The greatest value of each window; the stride is the kernel unless given.

    >>> import hetu as ht
    >>> MaxPool2d(2)(ht.placeholder("x", (None, 6, 28, 28))).shape[1:]
    (6, 14, 14)
    """

    def forward(self, x: Node) -> Node:
        return ops.max_pool2d(x, self.kernel, stride=self.stride, padding=self.padding)


class AvgPool2d(_Pooling):
    """The mean of each window; the stride is the kernel unless given.

    >>> import hetu as ht
    >>> AvgPool2d(2)(ht.placeholder("x", (None, 6, 28, 28))).shape[1:]
    (6, 14, 14)
    """

    def forward(self, x: Node) -> Node:
        return ops.avg_pool2d(x, kernel=self.kernel, stride=self.stride, padding=self.padding)


class GlobalAvgPool2d(Layer):
    """The mean over all pixels: (n, channels, h, w) -> (n, channels).

    >>> import hetu as ht
    >>> GlobalAvgPool2d()(ht.placeholder("x", (None, 6, 28, 28))).shape[1:]
    (6,)
    """

    def forward(self, x: Node) -> Node:
        return ops.global_avg_pool2d(x)
