"""Recurrent layers.

Each takes x (batch, time, inputs), an optional first state and optional `lengths` (batch,), beyond which a sequence has
outputs of zero and keeps its state, and returns all outputs (batch, time, features) and the last state. Kernels take at
each step those sequences alone that still go on, so no other packed form is needed. Stacks are composed: the outputs of
one layer are the inputs of the next. `Bidirectional` reads in both directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import ops
from ..core.errors import ArgumentError, ShapeError
from ..core.graph import Node
from ..core.leaf import Initializer, variable
from ..core.op import as_node, as_nodes
from ..init import xavier_uniform, zeros
from ..ops.sequence import sequence_mask, steps_of
from ..ranges import AtLeast1
from .layer import Activation, Layer, check_sizes


class _Recurrent(Layer):
    """Checks and the first state."""

    states = 1  # arrays of (batch, features) that go from step to step; the first is the output

    def __init__(self, inputs: AtLeast1, features: AtLeast1, *, name: str | None = None) -> None:
        check_sizes(inputs=inputs, features=features)
        super().__init__(name)
        self.inputs, self.features = inputs, features

    def _first(self, x: Node, state: Any) -> tuple[Node, ...]:
        """The given first states, or zeros; ShapeError unless x is a batch of sequences of inputs."""
        self._check_axis(x, -1, self.inputs, ndim=3)
        if state is None:
            zero = ops.full(shape=(x.shape[0], self.features), fill_value=0.0, dtype=x.dtype)
            return (zero,) * self.states
        given = as_nodes(state if isinstance(state, tuple | list) else (state,))
        if len(given) != self.states:
            raise ShapeError(
                f"{type(self).__name__} {self.name!r} got {len(given)} states, wanted {self.states}",
                fix="pass the state that an earlier call returned",
            )
        for node in given:
            self._check_axis(node, -1, self.features, ndim=2)
        return given

    def describe(self) -> str:
        return f"{self.inputs} -> {self.features}"


def _gates(count: AtLeast1, weight_init: Initializer) -> Initializer:
    """`weight_init` for each of `count` gates apart: fans are those of one gate, not of all side by side."""

    def make(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
        return np.concatenate([weight_init((shape[0], shape[1] // count), dtype, rng) for _ in range(count)], axis=1)

    return make


class RNN(_Recurrent):
    """h' = activation([x, h] @ weight + bias), with `weight` (inputs + features, features). J. Elman, 1990.

    >>> import hetu as ht
    >>> outputs, last = RNN(8, 16)(ht.placeholder("x", (None, 5, 8)))
    >>> outputs.shape[1:], last.shape[1:]
    ((5, 16), (16,))
    """

    def __init__(
        self,
        inputs: AtLeast1,
        features: AtLeast1,
        *,
        activation: Activation = ops.tanh,
        weight_init: Initializer = xavier_uniform,
        name: str | None = None,
    ) -> None:
        super().__init__(inputs, features, name=name)
        self.activation = activation
        with self.naming():
            self.weight = variable("weight", weight_init, (inputs + features, features))
            self.bias = variable("bias", zeros, (features,))

    def forward(self, x: Node, state: Any = None, lengths: Any = None) -> tuple[Node, Node]:
        """Unrolled in the graph, so that the number of time steps must be known."""
        (h,), steps, outputs = self._first(x, state), steps_of(x), []
        there = None if lengths is None else sequence_mask(as_node(lengths), shape=x.shape[:2])
        for t in steps:
            after = self.activation(ops.linear(ops.concat([x[:, t], h], axis=1), self.weight, self.bias))
            outputs.append(after if there is None else ops.where(there[:, t : t + 1], after, ops.zeros_like(after)))
            h = after if there is None else ops.where(there[:, t : t + 1], after, h)
        return ops.stack(outputs, axis=1), h


class LSTM(_Recurrent):
    """Long short-term memory; the state is (h, c). One product per step: [x, h] @ weight + bias gives i, f, g, o.

    c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c'). `weight` (inputs + features, 4 features). The bias
    of the forget gate f starts at 1 (R. Jozefowicz et al., ICML 2015). F. Gers et al., Neural Computation 12, 2000.

    >>> import hetu as ht
    >>> outputs, (h, c) = LSTM(8, 16)(ht.placeholder("x", (None, 5, 8)))
    >>> outputs.shape[1:], c.shape[1:]
    ((5, 16), (16,))
    """

    states = 2

    def __init__(
        self,
        inputs: AtLeast1,
        features: AtLeast1,
        *,
        weight_init: Initializer = xavier_uniform,
        name: str | None = None,
    ) -> None:
        super().__init__(inputs, features, name=name)
        gates = _gates(4, weight_init)
        with self.naming():
            self.weight = variable("weight", gates, (inputs + features, 4 * features))
            self.bias = variable("bias", np.repeat(np.array([0, 1, 0, 0], np.float32), features))

    def forward(self, x: Node, state: Any = None, lengths: Any = None) -> tuple[Node, tuple[Node, Node]]:
        """All steps in one operator."""
        first = self._first(x, state)
        return ops.lstm(x, self.weight[: self.inputs], self.weight[self.inputs :], self.bias, first, lengths=lengths)


class GRU(_Recurrent):
    """Gated recurrent unit: r, z, n from x @ weight + bias and h @ recurrent + recurrent_bias, side by side.

    r = sigmoid(x_r + h_r), z = sigmoid(x_z + h_z), n = tanh(x_n + r h_n), h' = (1 - z) n + z h: the form that resets
    after the product, which needs one product per step. K. Cho et al., EMNLP 2014; J. Chung et al., 2014.

    >>> import hetu as ht
    >>> outputs, last = GRU(8, 16)(ht.placeholder("x", (None, 5, 8)))
    >>> outputs.shape[1:], last.shape[1:]
    ((5, 16), (16,))
    """

    def __init__(
        self,
        inputs: AtLeast1,
        features: AtLeast1,
        *,
        weight_init: Initializer = xavier_uniform,
        name: str | None = None,
    ) -> None:
        super().__init__(inputs, features, name=name)
        gates = _gates(3, weight_init)
        with self.naming():
            self.weight = variable("weight", gates, (inputs, 3 * features))
            self.bias = variable("bias", zeros, (3 * features,))
            self.recurrent = variable("recurrent", gates, (features, 3 * features))
            self.recurrent_bias = variable("recurrent_bias", zeros, (3 * features,))

    def forward(self, x: Node, state: Any = None, lengths: Any = None) -> tuple[Node, Node]:
        """All steps in one operator."""
        weights = (self.weight, self.recurrent, self.bias, self.recurrent_bias)
        return ops.gru(x, *weights, *self._first(x, state), lengths=lengths)


class Bidirectional(Layer):
    """Two recurrent layers of a kind, of which one reads backward; outputs and last states are side by side.

    Outputs (batch, time, 2 features); the one of a place has seen all of its sequence. Both begin with zeros.
    ArgumentError for a kind of layer that is not recurrent. M. Schuster and K. Paliwal, "Bidirectional Recurrent Neural
    Networks", 1997.

    >>> import hetu as ht
    >>> outputs, (h, c) = Bidirectional(LSTM, 8, 16)(ht.placeholder("x", (None, 5, 8)))
    >>> outputs.shape[1:], h.shape[1:]
    ((5, 32), (32,))
    """

    def __init__(
        self, kind: type[_Recurrent], inputs: AtLeast1, features: AtLeast1, *, name: str | None = None
    ) -> None:
        if not (isinstance(kind, type) and issubclass(kind, _Recurrent)):
            given = kind.__name__ if isinstance(kind, type) else f"{kind!r:.60}"
            fix = "pass a class of recurrent layers: nn.LSTM, nn.GRU or nn.RNN"
            raise ArgumentError(f"Bidirectional of {given}, which is no kind of recurrent layer", fix=fix)
        super().__init__(name)
        with self.naming():
            self.ahead, self.back = kind(inputs, features, name="ahead"), kind(inputs, features, name="back")

    def forward(self, x: Node, lengths: Any = None) -> tuple[Node, Any]:
        """As of the layers; without `lengths` all sequences are whole."""
        there, last = self.ahead(x, lengths=lengths)
        turned, first = self.back(ops.flip(x, 1, lengths=lengths), lengths=lengths)
        outputs = ops.concat([there, ops.flip(turned, 1, lengths=lengths)], axis=2)
        if isinstance(last, Node):
            return outputs, ops.concat([last, first], axis=1)
        return outputs, tuple(ops.concat(pair, axis=1) for pair in zip(last, first))
