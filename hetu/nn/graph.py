"""Layers of graph networks, in which every node gathers from its neighbors.

A graph is given at each call as the entries of a sparse matrix, (rows, columns, values): node rows[k] gathers from
node columns[k] with the weight values[k]. `ht.data.adjacency` makes them of edges, as arrays for a graph that stays the
same; placeholders take those of sampled neighbors. `GraphConv` also takes a function that gathers, such as a
`dist.GraphGrid`. Left out: features of edges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import ops
from ..core.graph import Node
from ..core.leaf import variable
from ..init import xavier_uniform, zeros
from ..ops.sparse import row_maxima
from ..ranges import AtLeast1
from .dense import Linear
from .layer import Activation, Layer, activate, check_sizes

STEEP = 0.2  # the slope of leaky relu in attention
Gathered = tuple[Any, Any, Any] | Callable[[Node], Node]  # rows, columns, values; or what gathers


def gather(graph: Gathered, x: Node) -> Node:
    """The product of a graph's matrix and `x`."""
    return graph(x) if callable(graph) else ops.sparse_matmul(*graph, x, size=x.shape[0])


class GraphConv(Layer):
    """activation(A x W + b) for the matrix A of a graph: (nodes, inputs) -> (nodes, outputs).

    T. Kipf and M. Welling, "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017, eq. 2, where
    A is `adjacency(..., "symmetric")`. The product that leaves fewer features comes first.

    >>> import hetu as ht
    >>> x, graph = ht.placeholder("x", (3, 8)), ht.data.adjacency([[0, 1], [1, 2]], 3)
    >>> GraphConv(8, 4, activation=ht.relu)(x, graph).shape
    (3, 4)
    """

    def __init__(
        self, inputs: AtLeast1, outputs: AtLeast1, *, activation: Activation | None = None, name: str | None = None
    ) -> None:
        super().__init__(name)
        self.inputs, self.outputs, self.activation = inputs, outputs, activation
        with self.naming():
            self.linear = Linear(inputs, outputs, bias=False, name="linear")
            self.bias = variable("bias", zeros, (outputs,))

    def forward(self, x: Node, graph: Gathered) -> Node:
        self._check_axis(x, -1, self.inputs, ndim=2)
        first = self.outputs <= self.inputs
        gathered = gather(graph, self.linear(x)) if first else self.linear(gather(graph, x))
        return activate(self.activation, gathered + self.bias)

    def describe(self) -> str:
        return f"{self.inputs} -> {self.outputs}"


class GraphSAGE(Layer):
    """activation(x W + (A x) V + b): what a node is, beside what its neighbors are on average.

    (nodes, inputs) -> (nodes, outputs); A is `adjacency(..., "mean")`. W. Hamilton et al., "Inductive Representation
    Learning on Large Graphs", NIPS 2017, algorithm 1 with the mean aggregator. With `targets`, integers, only these
    nodes are made, and rows of the entries count them, as `ht.data.NeighborLoader` samples.

    >>> import hetu as ht
    >>> x, graph = ht.placeholder("x", (3, 8)), ht.data.adjacency([[0, 1], [1, 2]], 3, "mean")
    >>> layer = GraphSAGE(8, 4)
    >>> layer(x, graph).shape, layer(x, ([0, 0], [1, 2], [0.5, 0.5]), targets=[1]).shape
    ((3, 4), (1, 4))
    """

    def __init__(
        self, inputs: AtLeast1, outputs: AtLeast1, *, activation: Activation | None = None, name: str | None = None
    ) -> None:
        super().__init__(name)
        self.inputs, self.outputs, self.activation = inputs, outputs, activation
        with self.naming():
            self.own = Linear(inputs, outputs, name="own")
            self.neighbors = Linear(inputs, outputs, bias=False, name="neighbors")

    def forward(self, x: Node, graph: tuple[Any, Any, Any], *, targets: Any = None) -> Node:
        self._check_axis(x, -1, self.inputs, ndim=2)
        own = x if targets is None else ops.take(x, targets, axis=0)
        count = own.shape[0]
        if self.outputs <= self.inputs:
            gathered = ops.sparse_matmul(*graph, self.neighbors(x), size=count)
        else:
            gathered = self.neighbors(ops.sparse_matmul(*graph, x, size=count))
        return activate(self.activation, self.own(own) + gathered)

    def describe(self) -> str:
        return f"{self.inputs} -> {self.outputs}"


class GraphAttention(Layer):
    """Each of `heads` heads gathers with weights of its own: softmax over j of leaky_relu(s . W x_i + t . W x_j).

    (nodes, inputs) -> (nodes, heads * outputs). P. Velickovic et al., "Graph Attention Networks", ICLR 2018, eq. 3 and
    5, over the entries of `adjacency(..., "none")`, whose values multiply the weights before they are normalized.
    A node without entries gathers zeros. With `targets`, integers, only these nodes are made, and rows of the entries
    count them, as `ht.data.NeighborLoader(itself=True)` samples.

    >>> import hetu as ht
    >>> x, graph = ht.placeholder("x", (3, 8)), ht.data.adjacency([[0, 1], [1, 2]], 3, "none")
    >>> layer = GraphAttention(8, 4, heads=2)
    >>> layer(x, graph).shape, layer(x, ([0, 0], [1, 2], [0.5, 0.5]), targets=[1]).shape
    ((3, 8), (1, 8))
    """

    def __init__(
        self,
        inputs: AtLeast1,
        outputs: AtLeast1,
        *,
        heads: AtLeast1 = 1,
        activation: Activation | None = None,
        name: str | None = None,
    ) -> None:
        check_sizes(heads=heads)
        super().__init__(name)
        self.inputs, self.outputs, self.heads, self.activation = inputs, outputs, heads, activation
        with self.naming():
            self.linear = Linear(inputs, heads * outputs, bias=False, name="linear")
            self.asks = variable("asks", xavier_uniform, (heads, outputs))
            self.answers = variable("answers", xavier_uniform, (heads, outputs))
            self.bias = variable("bias", zeros, (heads * outputs,))

    def forward(self, x: Node, graph: tuple[Any, Any, Any], *, targets: Any = None) -> Node:
        self._check_axis(x, -1, self.inputs, ndim=2)
        h = ops.reshape(self.linear(x), shape=(x.shape[0], self.heads, self.outputs))
        own = h if targets is None else ops.take(h, targets, axis=0)
        asked, answered = ops.sum(own * self.asks, axis=2), ops.sum(h * self.answers, axis=2)
        seen = [self._head(h[:, k], asked[:, k], answered[:, k], graph) for k in range(self.heads)]
        return activate(self.activation, ops.concat(seen, axis=1) + self.bias)

    def _head(self, h: Node, asked: Node, answered: Node, graph: tuple[Any, Any, Any]) -> Node:
        rows, columns, values = graph
        ask, answer = ops.expand_dims(asked, axis=1), ops.expand_dims(answered, axis=1)
        count, one, ones = ask.shape[0], ops.ones_like(ask), ops.ones_like(answer)
        scores = ops.sampled_matmul(rows, columns, ops.concat([ask, one], axis=1), ops.concat([ones, answer], axis=1))
        scores = ops.leaky_relu(scores, slope=STEEP)
        most = row_maxima(rows, ops.stop_gradient(scores), size=count)
        weights = values * ops.exp(scores - ops.take(most, rows))
        gathered = ops.sparse_matmul(rows, columns, weights, ops.concat([h, ones], axis=1), size=count)
        made, total = gathered[:, : self.outputs], gathered[:, self.outputs :]
        return made / ops.where(ops.equal(total, 0.0), 1.0, total)

    def describe(self) -> str:
        return f"{self.inputs} -> {self.heads} x {self.outputs}"
