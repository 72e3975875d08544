"""Linear maps of the last axis, and the layers without variables that stand between them.

Activations need no layers: any function of a node can stand in a `Sequential`.
"""

from __future__ import annotations

from .. import ops
from ..core.errors import ArgumentError
from ..core.graph import Node
from ..core.leaf import Initializer, variable
from ..init import xavier_uniform, zeros
from ..ranges import AtLeast1
from .layer import Activation, Layer, activate, check_sizes


class Linear(Layer):
    """activation(x @ weight + bias): (..., inputs) -> (..., outputs). `weight` (inputs, outputs), `bias` (outputs,).

    Without `bias`, or with `activation=None`, that part is left out. ShapeError for another last axis.

    >>> import hetu as ht
    >>> Linear(784, 256, activation=ht.relu)(ht.placeholder("x", (None, 784))).shape[1]
    256
    """

    def __init__(
        self,
        inputs: AtLeast1,
        outputs: AtLeast1,
        *,
        activation: Activation | None = None,
        bias: bool = True,
        weight_init: Initializer = xavier_uniform,
        bias_init: Initializer = zeros,
        name: str | None = None,
    ) -> None:
        check_sizes(inputs=inputs, outputs=outputs)
        super().__init__(name)
        self.inputs, self.outputs, self.activation = inputs, outputs, activation
        with self.naming():
            self.weight = variable("weight", weight_init, (inputs, outputs))
            self.bias = variable("bias", bias_init, (outputs,)) if bias else None

    def forward(self, x: Node) -> Node:
        self._check_axis(x, -1, self.inputs)
        made = ops.linear(x, self.weight, self.bias) if self.bias is not None else ops.matmul(x, self.weight)
        return activate(self.activation, made)

    def describe(self) -> str:
        return f"{self.inputs} -> {self.outputs}"


class Flatten(Layer):
    """All axes but the first merged into one: (n, ...) -> (n, size).

    >>> import hetu as ht
    >>> Flatten()(ht.placeholder("x", (None, 6, 5, 5))).shape[1]
    150
    """

    def forward(self, x: Node) -> Node:
        return ops.flatten(x, 1)


class Dropout(Layer):
    """In training, zeroes each element with probability `rate` and scales the others by 1 / (1 - rate).

    >>> import hetu as ht
    >>> Dropout(0.5)(ht.placeholder("x", (None, 3))).shape[1]
    3
    """

    def __init__(self, rate: float, *, name: str | None = None) -> None:
        if not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise ArgumentError(f"the dropout rate is {rate!r}", fix="pass a probability in [0, 1)")
        super().__init__(name)
        self.rate = rate

    def forward(self, x: Node) -> Node:
        return ops.dropout(x, self.rate) if self.rate else x

    def describe(self) -> str:
        return f"rate {self.rate}"
