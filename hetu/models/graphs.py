"""Classifiers of the nodes of a graph: features (nodes, f) and what neighbors gather by to logits (nodes, classes).

`graph` is what `ht.data.adjacency` makes: "symmetric" for `gcn`, "mean" for `graphsage`, "none" for `gat`.
"""

from __future__ import annotations

from typing import Any

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.graph import Node
from ..nn.graph import Gathered
from ..nn.layer import width

__all__ = ["Sampled", "SampledAttention", "gat", "gcn", "graphsage"]


def gcn(x: Node, graph: Gathered, classes: int, *, hidden: int = 64, dropout: float = 0.5) -> Node:
    """Two graph convolutions. T. Kipf and M. Welling, ICLR 2017, eq. 9."""
    h = nn.GraphConv(width(x), hidden, activation=ops.relu)(nn.Dropout(dropout)(x), graph)
    return nn.GraphConv(hidden, classes)(nn.Dropout(dropout)(h), graph)


def graphsage(x: Node, graph: Gathered, classes: int, *, hidden: int = 64, dropout: float = 0.5) -> Node:
    """Two layers that join each node with the mean of its neighbors. W. Hamilton et al., NIPS 2017."""
    return Sampled(width(x), classes, hidden=hidden, dropout=dropout)(x, ((None, graph), (None, graph)))


class Sampled(nn.Layer):
    """`graphsage` whose layers gather by graphs of their own: those of a `Neighborhood`, or twice the whole one.

    x (nodes seen, features) and for each layer (places of the nodes that gather, or None for all; entries) give
    (nodes, classes). W. Hamilton et al., NIPS 2017, algorithm 2.
    """

    def __init__(
        self, features: int, classes: int, *, hidden: int = 64, dropout: float = 0.5, name: str | None = None
    ) -> None:
        super().__init__(name)
        with self.naming():
            self.first: nn.Layer = nn.GraphSAGE(features, hidden, activation=ops.relu, name="first")
            self.second: nn.Layer = nn.GraphSAGE(hidden, classes, name="second")
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Node, hops: tuple[tuple[Any, Gathered], ...]) -> Node:
        for layer, (own, graph) in zip((self.first, self.second), hops):
            x = layer(self.dropout(x), graph, targets=own)
        return x


def gat(x: Node, graph: Gathered, classes: int, *, hidden: int = 8, heads: int = 8, dropout: float = 0.5) -> Node:
    """Two layers of graph attention, the first of several heads. P. Velickovic et al., ICLR 2018, section 3.3."""
    model = SampledAttention(width(x), classes, hidden=hidden, heads=heads, dropout=dropout)
    return model(x, ((None, graph), (None, graph)))


class SampledAttention(Sampled):
    """`gat` whose layers gather by graphs of their own, as those of `Sampled`: P. Velickovic et al., ICLR 2018.

    Each node is to be among those that it gathers from: `ht.data.NeighborLoader(itself=True)`.
    """

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        hidden: int = 8,
        heads: int = 8,
        dropout: float = 0.5,
        name: str | None = None,
    ) -> None:
        nn.Layer.__init__(self, name)
        with self.naming():
            self.first = nn.GraphAttention(features, hidden, heads=heads, activation=ops.elu, name="first")
            self.second = nn.GraphAttention(heads * hidden, classes, name="second")
        self.dropout = nn.Dropout(dropout)


_answer_calls(__name__)
