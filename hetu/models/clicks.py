"""Three models of click prediction, as functions from numbers x (n, k), ids (n, fields) and how many ids there are to
logits (n,)."""

from __future__ import annotations

from .. import nn, ops
from ..answers import answer_names as _answer_names
from ..core.graph import Node
from ..nn.layer import width

__all__ = ["dcn", "deepfm", "wide_deep"]
_answer_names(__name__)

FEATURES = 8  # of an embedded id


def wide_deep(x: Node, ids: Node, count: int) -> Node:
    """A linear model of all ids, plus a network on embeddings. H. Cheng et al., DLRS 2016."""
    return _linear(x, ids, count) + _network(_joined(x, nn.Embedding(count, FEATURES)(ids)))


def deepfm(x: Node, ids: Node, count: int) -> Node:
    """Wide and deep, plus the inner products of all pairs of embeddings. H. Guo et al., IJCAI 2017, eq. 1 to 4."""
    vectors = nn.Embedding(count, FEATURES)(ids)
    total = ops.sum(vectors, axis=1)
    pairs = 0.5 * ops.sum(
        ops.square(total) - ops.sum(ops.square(vectors), axis=1), axis=1
    )  # S. Rendle, ICDM 2010, eq. 5
    return _linear(x, ids, count) + pairs + _network(_joined(x, vectors))


def dcn(x: Node, ids: Node, count: int) -> Node:
    """Three layers x0 * (W x + b) + x, whose outputs are polynomials of the inputs, beside a network.

    R. Wang et al., "DCN V2", WWW 2021, eq. 1, in parallel (figure 1b).
    """
    first = crossed = _joined(x, nn.Embedding(count, FEATURES)(ids))
    features = width(first)
    for _ in range(3):
        crossed = first * nn.Linear(features, features)(crossed) + crossed
    return ops.squeeze(nn.Linear(features, 1)(crossed), axis=1) + _network(first)


def _linear(x: Node, ids: Node, count: int) -> Node:
    """Logistic regression on the numbers and the ids."""
    return ops.squeeze(nn.Linear(width(x), 1)(x), axis=1) + ops.sum(nn.Embedding(count, 1)(ids), axis=(1, 2))


def _joined(x: Node, vectors: Node) -> Node:
    return ops.concat([x, ops.flatten(vectors, 1)], axis=1)


def _network(x: Node) -> Node:
    layers = nn.Sequential(
        nn.Linear(width(x), 64, activation=ops.relu),
        nn.Dropout(0.2),
        nn.Linear(64, 64, activation=ops.relu),
        nn.Dropout(0.2),
        nn.Linear(64, 1),
    )
    return ops.squeeze(layers(x), axis=1)
