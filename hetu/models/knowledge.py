"""Scores of the triples of a knowledge graph: how likely a head has a relation to a tail, from a vector for each.

Vectors (..., features) of heads, relations and tails, whose leading axes broadcast, give scores (...). `complex_` and
`rotate` read the first half of the features as real parts and the second as imaginary ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .. import nn, ops
from ..answers import answer_calls as _answer_calls
from ..core.errors import ArgumentError
from ..core.graph import Node
from ..core.leaf import variable
from ..init import uniform
from ..nn.layer import width
from ..ranges import AtLeast0, AtLeast1

TINY = 1e-12  # below a root, which has no slope at 0
TripleScore = Callable[[Node, Node, Node], Node]

__all__ = ["Triples", "complex_", "distmult", "rotate", "transe"]


def transe(head: Node, relation: Node, tail: Node) -> Node:
    """-|h + r - t|: a relation is a way from heads to tails. A. Bordes et al., NIPS 2013, eq. 1, with the L1 norm."""
    return -ops.sum(ops.abs(head + relation - tail), axis=-1)


def distmult(head: Node, relation: Node, tail: Node) -> Node:
    """sum(h r t): features that agree, weighed by the relation. B. Yang et al., ICLR 2015, eq. 2."""
    return ops.sum(head * relation * tail, axis=-1)


def complex_(head: Node, relation: Node, tail: Node) -> Node:
    """Re(sum(h r conj(t))) of complex vectors, so that directions differ. T. Trouillon et al., ICML 2016, eq. 11."""
    (a, b), (c, d), (e, f) = _parts(head), _parts(relation), _parts(tail)
    return ops.sum((a * c - b * d) * e + (a * d + b * c) * f, axis=-1)


def rotate(head: Node, relation: Node, tail: Node) -> Node:
    """-|h r - t| of complex vectors, where r turns each number by an angle: the first half of `relation`.

    Z. Sun et al., "RotatE", ICLR 2019, eq. 2, with the L1 norm of absolute values.
    """
    (a, b), (angle, _), (e, f) = _parts(head), _parts(relation), _parts(tail)
    c, d = ops.cos(angle), ops.sin(angle)
    return -ops.sum(ops.sqrt(ops.square(a * c - b * d - e) + ops.square(a * d + b * c - f) + TINY), axis=-1)


def _parts(x: Node) -> tuple[Node, Node]:
    if width(x, -1) % 2:
        raise ArgumentError(f"{width(x, -1)} features are no complex numbers", fix="choose an even number of features")
    real, imaginary = ops.split(x, 2, axis=-1)
    return real, imaginary


class Triples(nn.Layer):
    """Vectors of entities and relations, and a score made of them: integers (...) three times -> (...).

    Scores begin at `margin`, so that a distance of it has probability 1 / 2 (Z. Sun et al., 2019, eq. 3). First values
    are uniform in +-(margin + 2) / features, as there.

    >>> import hetu as ht
    >>> model, ids = Triples(100, 7, 16, transe, margin=6.0), ht.placeholder("ids", (None, 3), "int64")
    >>> model(ids[:, 0], ids[:, 1], ids[:, 2]).ndim, model.entities.shape
    (1, (100, 16))
    """

    def __init__(
        self,
        entities: AtLeast1,
        relations: AtLeast1,
        features: AtLeast1,
        score: TripleScore,
        *,
        margin: AtLeast0 = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.score, self.margin = score, margin
        far = (margin + 2) / features
        with self.naming():
            self.entities = variable("entities", uniform(-far, far), (entities, features))
            self.relations = variable("relations", uniform(-far, far), (relations, features))

    def forward(self, head: Node, relation: Node, tail: Node) -> Node:
        return self.scores(*self.vectors(head, relation, tail))

    def vectors(self, head: Node, relation: Node, tail: Node) -> tuple[Node, Node, Node]:
        """Of ids (...), (..., features) each."""
        entity, relation = partial(ops.embedding, self.entities), ops.embedding(self.relations, relation)
        return entity(head), relation, entity(tail)

    def scores(self, head: Node, relation: Node, tail: Node) -> Node:
        """Of vectors (..., features) that are looked up already, as those of false triples that a group shares."""
        return self.margin + self.score(head, relation, tail)


_answer_calls(__name__)
