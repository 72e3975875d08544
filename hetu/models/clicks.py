"""Models of click prediction: numbers x (n, k) and ids (n, fields), of `count` that there are, to logits (n,).

`ncf` and `two_towers` know who took what, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.graph import Node
from ..core.leaf import unique_name, variable
from ..init import zeros
from ..nn.layer import width
from .perceptron import network

__all__ = ["dcn", "dcn_v1", "deepfm", "dlrm", "ncf", "two_towers", "wide_deep", "xdeepfm"]

FEATURES = 8  # of an embedded id
TINY = 1e-12


def wide_deep(x: Node, ids: Node, count: int) -> Node:
    """A linear model of all ids, plus a network on embeddings. H. Cheng et al., DLRS 2016."""
    return _linear(x, ids, count) + network(_joined(x, nn.Embedding(count, FEATURES)(ids)))


def deepfm(x: Node, ids: Node, count: int, *, bags: Sequence[tuple[Node, int]] = ()) -> Node:
    """Wide and deep, plus the inner products of all pairs of embeddings. H. Guo et al., IJCAI 2017, eq. 1 to 4.

    `bags` are fields of several values: ids (n, most), of which 0 is none, and how many ids there are.
    """
    vectors = nn.Embedding(count, FEATURES)(ids)
    if bags:
        means = [ops.expand_dims(nn.EmbeddingBag(size, FEATURES)(bag), axis=1) for bag, size in bags]
        vectors = ops.concat([vectors, *means], axis=1)
    pairs = ops.pairs_of_sums(ops.sum(vectors, axis=1), ops.sum(ops.square(vectors), axis=1))
    return _linear(x, ids, count) + pairs + network(_joined(x, vectors))


def dcn(x: Node, ids: Node, count: int) -> Node:
    """Three layers x0 * (W x + b) + x, whose outputs are polynomials of the inputs, beside a network.

    R. Wang et al., "DCN V2", WWW 2021, eq. 1, in parallel (figure 1b).
    """
    first = crossed = _joined(x, nn.Embedding(count, FEATURES)(ids))
    features = width(first)
    for _ in range(3):
        crossed = first * nn.Linear(features, features)(crossed) + crossed
    return ops.squeeze(nn.Linear(features, 1)(crossed), axis=1) + network(first)


def dcn_v1(x: Node, ids: Node, count: int) -> Node:
    """As `dcn`, with one vector a layer: x0 (x . w) + b + x. R. Wang et al., ADKDD 2017, eq. 3."""
    first = crossed = _joined(x, nn.Embedding(count, FEATURES)(ids))
    features = width(first)
    for _ in range(3):
        weight, bias = nn.Linear(features, 1, bias=False), variable(unique_name("bias"), zeros, (features,))
        crossed = first * weight(crossed) + bias + crossed
    return ops.squeeze(nn.Linear(features, 1)(crossed), axis=1) + network(first)


def xdeepfm(x: Node, ids: Node, count: int, *, maps: Sequence[int] = (16, 16)) -> Node:
    """Wide and deep, plus products of ever more fields: a layer weighs all products of its maps with all fields.

    J. Lian et al., KDD 2018, eq. 6 and 7 (the compressed interaction network).
    """
    vectors = nn.Embedding(count, FEATURES)(ids)
    made, pooled, fields = vectors, list[Node](), width(vectors)
    for size in maps:
        products = ops.reshape(ops.einsum("nid,njd->ndij", made, vectors), (-1, FEATURES, width(made) * fields))
        made = ops.permute_dims(nn.Linear(width(made) * fields, size, bias=False)(products), (0, 2, 1))
        pooled.append(ops.sum(made, axis=2))
    crossed = nn.Linear(sum(maps), 1)(ops.concat(pooled, axis=1))
    return _linear(x, ids, count) + ops.squeeze(crossed, axis=1) + network(_joined(x, vectors))


def dlrm(x: Node, ids: Node, count: int) -> Node:
    """Numbers through a network become a vector as those of ids; products of all pairs of them go through another.

    M. Naumov et al., "Deep Learning Recommendation Model", 2019, section 2.
    """
    vectors = nn.Embedding(count, FEATURES)(ids)
    hidden = nn.Linear(width(x), 64, activation=ops.relu)(x)
    bottom = nn.Linear(64, FEATURES, activation=ops.relu)(hidden)
    both = ops.concat([ops.expand_dims(bottom, axis=1), vectors], axis=1)
    apart = np.flatnonzero(np.triu(np.ones((width(both),) * 2), 1))
    pairs = ops.take(ops.flatten(ops.einsum("nid,njd->nij", both, both), 1), apart, axis=1)
    return network(ops.concat([bottom, pairs], axis=1))


def ncf(user: Node, item: Node, users: int, items: int) -> Node:
    """Ids (n,) of users and items to logits (n,): a weighed product of vectors, and a network on others.

    X. He et al., "Neural Collaborative Filtering", WWW 2017, eq. 12 (NeuMF).
    """
    product = nn.Embedding(users, FEATURES)(user) * nn.Embedding(items, FEATURES)(item)
    beside = ops.concat([nn.Embedding(users, FEATURES)(user), nn.Embedding(items, FEATURES)(item)], axis=1)
    return ops.squeeze(nn.Linear(FEATURES, 1)(product), axis=1) + network(beside)


def two_towers(user: Node, item: Node, users: int, items: int, *, temperature: float = 0.1) -> Node:
    """Ids (n,) of users and of the items that they took to logits (n, n) of all items of the batch for each user.

    Cross entropy with the classes 0 ... n - 1 takes the items of the others as negatives. X. Yi et al., "Sampling-Bias-
    Corrected Neural Modeling", RecSys 2019, eq. 1 and 2, without the correction.
    """
    asks, answers = _tower(user, users), _tower(item, items)
    return ops.matmul(asks, ops.matrix_transpose(answers)) / temperature


def _tower(ids: Node, count: int) -> Node:
    """Unit vectors (n, features)."""
    vectors = nn.Embedding(count, FEATURES)(ids)
    hidden = nn.Linear(FEATURES, 64, activation=ops.relu)(vectors)
    y = nn.Linear(64, FEATURES)(hidden)
    return y / ops.sqrt(ops.sum(ops.square(y), axis=1, keepdims=True) + TINY)


def _linear(x: Node, ids: Node, count: int) -> Node:
    """Logistic regression on the numbers and the ids."""
    return ops.squeeze(nn.Linear(width(x), 1)(x), axis=1) + ops.sum(nn.Embedding(count, 1)(ids), axis=(1, 2))


def _joined(x: Node, vectors: Node) -> Node:
    return ops.concat([x, ops.flatten(vectors, 1)], axis=1)


_answer_calls(__name__)
