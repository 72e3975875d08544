"""Three models of click prediction, as functions from numbers x (n, k), ids (n, fields) and how many ids there are to
logits (n,)."""

from __future__ import annotations

import hetu as ht
from hetu import nn

FEATURES = 8  # of an embedded id


def wide_deep(x: ht.Node, ids: ht.Node, count: int) -> ht.Node:
    """A linear model of all ids, plus a network on embeddings. H. Cheng et al., DLRS 2016."""
    return _linear(x, ids, count) + _network(_joined(x, nn.Embedding(count, FEATURES)(ids)))


def deepfm(x: ht.Node, ids: ht.Node, count: int) -> ht.Node:
    """Wide and deep, plus the inner products of all pairs of embeddings. H. Guo et al., IJCAI 2017, eq. 1 to 4."""
    vectors = nn.Embedding(count, FEATURES)(ids)
    total = ht.sum(vectors, axis=1)
    pairs = 0.5 * ht.sum(ht.square(total) - ht.sum(ht.square(vectors), axis=1), axis=1)  # S. Rendle, ICDM 2010, eq. 5
    return _linear(x, ids, count) + pairs + _network(_joined(x, vectors))


def dcn(x: ht.Node, ids: ht.Node, count: int) -> ht.Node:
    """Three layers x0 * (W x + b) + x, whose outputs are polynomials of the inputs, beside a network.

    R. Wang et al., "DCN V2", WWW 2021, eq. 1, in parallel (figure 1b).
    """
    first = crossed = _joined(x, nn.Embedding(count, FEATURES)(ids))
    width = first.shape[1]
    for _ in range(3):
        crossed = first * nn.Linear(width, width)(crossed) + crossed
    return ht.squeeze(nn.Linear(width, 1)(crossed), axis=1) + _network(first)


def _linear(x: ht.Node, ids: ht.Node, count: int) -> ht.Node:
    """Logistic regression on the numbers and the ids."""
    return ht.squeeze(nn.Linear(x.shape[1], 1)(x), axis=1) + ht.sum(nn.Embedding(count, 1)(ids), axis=(1, 2))


def _joined(x: ht.Node, vectors: ht.Node) -> ht.Node:
    return ht.concat([x, ht.flatten(vectors, 1)], axis=1)


def _network(x: ht.Node) -> ht.Node:
    layers = nn.Sequential(
        nn.Linear(x.shape[1], 64, activation=ht.relu),
        nn.Dropout(0.2),
        nn.Linear(64, 64, activation=ht.relu),
        nn.Dropout(0.2),
        nn.Linear(64, 1),
    )
    return ht.squeeze(layers(x), axis=1)
