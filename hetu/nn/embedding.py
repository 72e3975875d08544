"""Tables of vectors, looked up by integer ids, alone or in bags."""

from __future__ import annotations

from .. import ops
from ..core.graph import Node
from ..core.leaf import Initializer, variable
from ..init import normal
from ..ranges import AtLeast1
from .layer import Layer, check_sizes

SMALL = normal(0.02)


class Embedding(Layer):
    """Rows of `weight` (count, features) picked by ids: (...) of integers -> (..., features).

    A training step changes only the rows it looked up; `optim.Optimizer` says how to change all. ValueRangeError at run
    time for ids outside [0, count).

    >>> import hetu as ht
    >>> Embedding(1000, 16)(ht.placeholder("ids", (None, 7), "int64")).shape[1:]
    (7, 16)
    """

    def __init__(
        self, count: AtLeast1, features: AtLeast1, *, weight_init: Initializer = SMALL, name: str | None = None
    ) -> None:
        check_sizes(count=count, features=features)
        super().__init__(name)
        self.count, self.features = count, features
        with self.naming():
            self.weight = variable("weight", weight_init, (count, features))

    def forward(self, ids: Node) -> Node:
        return ops.embedding(self.weight, ids)

    def describe(self) -> str:
        return f"{self.count} x {self.features}"


class EmbeddingBag(Embedding):
    """The mean of the rows of a bag: (..., most) of integers, of which 0 is none, -> (..., features).

    A field of several values, such as the genres of a film; a bag of none gives zeros. Row 0 is never learned.

    >>> import hetu as ht
    >>> EmbeddingBag(20, 16)(ht.placeholder("genres", (None, 3), "int64")).shape[1:]
    (16,)
    """

    def forward(self, ids: Node) -> Node:
        given = ops.expand_dims(ops.astype(ids > 0, self.weight.dtype), axis=-1)
        total = ops.sum(ops.embedding(self.weight, ids) * given, axis=-2)
        return total / ops.maximum(ops.sum(given, axis=-2), 1.0)
