"""Tables of vectors, looked up by integer ids, alone or in bags."""

from __future__ import annotations

import functools
from typing import Any

from .. import ops
from ..core.errors import ArgumentError
from ..core.graph import Node, tagged
from ..core.leaf import Initializer, variable
from ..growth import UNBOUNDED, After, Evict, Growth
from ..init import normal
from ..ranges import AtLeast1, Count, Share
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


class DynamicEmbedding(Layer):
    """Rows picked by ids without a bound, such as hashes: (...) of int64 from 0 on -> (..., features).

    Parameter servers keep the table, so the executor needs a strategy with servers. They make a row when its id is
    trained, and let rows go that are rarely used if `budget` bytes, of all servers together, are full; see
    `hetu.ps.Growth`, also for `disk`, `evict`, `after` and `chance`. An id without a row has the vector that
    `weight_init` draws for it, always the same. `ht.data.hashed` makes ids of texts.

    >>> import hetu as ht
    >>> DynamicEmbedding(16, budget=1 << 30)(ht.placeholder("ids", (None, 7), "int64")).shape[1:]
    (7, 16)
    """

    def __init__(
        self,
        features: AtLeast1,
        *,
        budget: AtLeast1,
        disk: Count = 0,
        evict: Evict = "age",
        after: After = 1,
        chance: Share = 1.0,
        weight_init: Initializer = SMALL,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.features, self.growth = features, Growth(budget, disk, evict, after, chance)
        with self.naming(), tagged(grows=self.growth):
            self.weight = variable("weight", _served(weight_init), (UNBOUNDED, features))

    def forward(self, ids: Node) -> Node:
        return ops.embedding(self.weight, ids)

    def describe(self) -> str:
        disk = f", {self.growth.disk:,} on disk" if self.growth.disk else ""
        return f"any x {self.features}, in {self.growth.budget:,} bytes{disk}"


def _served(init: Initializer) -> Initializer:
    """An initializer by whose law servers draw single rows, and that makes no whole table."""

    @functools.wraps(init)
    def refuse(shape: tuple[int, ...], dtype: Any, rng: Any) -> Any:
        raise ArgumentError(
            "a table without a bound of its rows, which only parameter servers keep",
            fix="use Executor(..., strategy=ht.strategies.ParameterServer()), or Hybrid(), under heturun -s 1",
        )

    return refuse
