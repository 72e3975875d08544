"""Wide models: of bags of ids with weights, as rows of a sparse matrix, to logits (bags,).

`ids`, `weights` and `fields` are (entries,), `starts` says where each bag begins; see `hetu.embedding_bag` and
`hetu.data.BagDataset`. There are `count` ids. Numbers are ids with a weight, so there are no others among the inputs.
"""

from __future__ import annotations

from typing import Any

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.graph import Node
from ..core.leaf import scope, unique_name, variable
from ..init import normal, zeros
from ..ranges import AtLeast1
from .clicks import FEATURES
from .perceptron import network

__all__ = ["deep_factorization", "factorization", "field_factorization", "logistic"]
SMALL = normal(0.01)


def logistic(ids: Node, starts: Node, count: AtLeast1, weights: Any = None) -> Node:
    """Logistic regression: a number for each id, and a bias. D. Cox, J. of the Royal Statistical Society B, 1958.

    >>> import hetu as ht
    >>> ids, starts = ht.placeholder("ids", (None,), "int64"), ht.placeholder("starts", (None,), "int64")
    >>> logistic(ids, starts, 100_000).ndim
    1
    """
    with scope(unique_name("logistic")):
        weight, bias = variable("weight", zeros, (count,)), variable("bias", zeros, ())
    return ops.embedding_bag(weight, ids, starts, weights) + bias


def factorization(
    ids: Node, starts: Node, count: AtLeast1, weights: Any = None, *, features: AtLeast1 = FEATURES
) -> Node:
    """Logistic, plus the inner products of all pairs of vectors. S. Rendle, ICDM 2010, eq. 1."""
    pairs = ops.pair_products(_vectors(count, features), ids, starts, weights)
    return logistic(ids, starts, count, weights) + pairs


def field_factorization(
    ids: Node, fields: Node, starts: Node, count: AtLeast1, weights: Any = None, *,
    field_count: AtLeast1, features: AtLeast1 = 4,
) -> Node:  # fmt: skip
    """Logistic, plus inner products of vectors that each id has for each field. Y. Juan et al., RecSys 2016, eq. 4."""
    vectors = _vectors(count, field_count * features)
    pairs = ops.field_products(vectors, ids, fields, field_count, starts, weights)
    return logistic(ids, starts, count, weights) + pairs


def deep_factorization(
    ids: Node, fields: Node, starts: Node, count: AtLeast1, weights: Any = None, *,
    field_count: AtLeast1, features: AtLeast1 = FEATURES,
) -> Node:  # fmt: skip
    """A factorization machine, plus a network on the same vectors, summed field by field. H. Guo et al., IJCAI 2017."""
    vectors = _vectors(count, features)
    bags = ops.field_bags(vectors, ids, fields, field_count, starts, weights)
    pairs = ops.pair_products(vectors, ids, starts, weights)
    return logistic(ids, starts, count, weights) + pairs + network(ops.flatten(bags, 1))


def _vectors(count: int, features: int) -> Node:
    return nn.Embedding(count, features, weight_init=SMALL).weight


_answer_calls(__name__)
