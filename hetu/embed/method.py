"""What a compressed table is, how a method declares one, and the layer that looks vectors up by it.

A method says which variables stand for a table in so many bytes, how a lookup reads them in graph functions, what is
done between steps if anything, and what inference stores. It is trained like any other layer. Bytes are those that
inference stores; of what training takes each method tells. Left out: numbers other than float32, files of its own
(a compact form is variables, which any checkpoint holds).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .. import ops
from ..core.errors import ArgumentError, ShapeError, UnknownNameError, public
from ..core.graph import Node, replace
from ..core.leaf import Initializer, variable
from ..nn.embedding import SMALL
from ..nn.layer import Layer, check_sizes
from ..ops.index import within
from ..ranges import AtLeast1, Fraction, Share

SLACK = 1.02  # of its budget a table may take so much
METHODS: dict[str, Method] = {}
Arrays = dict[str, np.ndarray]


class Weights(NamedTuple):
    """A variable of a method: how it begins, and its shape; whether optimizers train it."""

    init: Initializer | np.ndarray | float
    shape: tuple[int, ...]
    dtype: str = "float32"
    trained: bool = True


@dataclass(frozen=True)
class Vectors:
    """What a method stands for: `count` vectors of `features` float32 numbers, in `budget` bytes.

    `init` is how vectors begin, `seen` how often each id occurs, in any order, if that is known. `size` is the greatest
    for which the method's cost is within the budget.
    """

    count: int
    features: int
    budget: int
    init: Initializer
    seen: np.ndarray | None = None
    size: int = 1

    @cached_property
    def popularity(self) -> np.ndarray:
        """How often each id occurs, most first, or a guess by Zipf's law: made for those who ask, for it is long."""
        return 1 / np.arange(1, self.count + 1) if self.seen is None else np.sort(self.seen)[::-1]

    @property
    def row(self) -> int:
        """The bytes of a vector."""
        return 4 * self.features

    def rows(self, count: int) -> Weights:
        """So many vectors, trained."""
        return Weights(self.init, (count, self.features))


class Method:
    """A way to store a table. A method of your own is a subclass with at least `cost`, `parts` and `lookup`.

    Where it is `ranked`, ids are counted by popularity: 0 is the id that occurs most.

    >>> import hetu as ht
    >>> class Mirrored(ht.embed.Method):  # the second half of the ids has the vectors of the first, negated
    ...     def cost(self, table, size):
    ...         return table.row * -(-table.count // 2)
    ...     def parts(self, table):
    ...         return {"rows": table.rows(-(-table.count // 2))}
    ...     def lookup(self, table, parts, ids):
    ...         half = -(-table.count // 2)
    ...         sign = ht.expand_dims(ht.where(ids < half, 1.0, -1.0), axis=-1)
    ...         return ht.embedding(parts["rows"], ids % half) * sign
    >>> layer = ht.embed.Embedding(100, 8, Mirrored(), ratio=0.5)
    >>> layer.compact(ht.Executor([layer([3, 53])]).state).nbytes
    1600
    """

    ranked: ClassVar[bool] = False

    def cost(self, table: Vectors, size: int) -> float:
        """The bytes that inference stores at a size from 1 to `limit`, with which they do not fall: of rows, a rank."""
        raise NotImplementedError

    def limit(self, table: Vectors) -> int:
        """The greatest size that is of use."""
        return table.count

    def parts(self, table: Vectors) -> dict[str, Weights]:
        """The variables that training takes, at `table.size`; a lookup reads all of them."""
        raise NotImplementedError

    def lookup(self, table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
        """The vectors (..., features) of ids (...) of an axis at least, int64 from 0 to below `count`."""
        raise NotImplementedError

    def settle(self, table: Vectors, values: Arrays, done: Fraction) -> Arrays:
        """New values of some parts, when a share `done` of training is over; at 1 they fit the budget, and stay so."""
        return {}

    def stored(self, table: Vectors, values: Arrays) -> Arrays:
        """What inference stores of the values of the parts."""
        return values

    def read(self, table: Vectors, stored: Mapping[str, Node], ids: Node) -> Node:
        """The lookup in what is stored."""
        return self.lookup(table, stored, ids)


class CompressedEmbedding(Layer):
    """Vectors by ids, (...) of integers -> (..., features), of which inference stores a share `ratio` of the bytes.

    Args:
        count, features: of the table that is stood for, float32.
        method: a name in `METHODS`, or a `Method`.
        ratio: the budget, of the bytes of that table; ArgumentError with the least if that cannot be kept.
        popularity: (count,) how often each id occurs. Of methods that are `ranked` the place of each id among the
            others is then stored as well; without it id 0 is to be the one that occurs most, id 1 the next.
        weight_init: how vectors begin.

    DTypeError for ids that are no integers, ValueRangeError at run time for those outside [0, count).

    >>> import hetu as ht
    >>> layer = ht.embed.Embedding(1000, 16, "int8", ratio=0.25)
    >>> layer(ht.placeholder("ids", (None, 7), "int64")).shape[1:], layer.budget, layer.training_bytes
    ((7, 16), 16000, 64004)
    """

    def __init__(
        self,
        count: AtLeast1,
        features: AtLeast1,
        method: str | Method = "hash",
        *,
        ratio: Share = 0.5,
        popularity: np.ndarray | None = None,
        weight_init: Initializer = SMALL,
        name: str | None = None,
    ) -> None:
        check_sizes(count=count, features=features)
        self.method = named(method)
        if not 0 < ratio <= 1:
            raise ArgumentError(f"ratio={ratio!r}", fix="pass a share of the bytes of the table, above 0 up to 1")
        super().__init__(name)
        self.count, self.features, self.budget = count, features, int(ratio * count * features * 4)
        seen, ranks = None if popularity is None else _checked(popularity, count), dict[str, Weights]()
        if self.method.ranked and seen is not None:
            places = np.argsort(np.argsort(-seen, kind="stable")).astype(kind := smallest(count))
            ranks["ranks"] = Weights(places, (count,), kind, trained=False)
        rest = self.budget - sum(np.dtype(part.dtype).itemsize * count for part in ranks.values())
        self.table = fitted(self.method, Vectors(count, features, rest, weight_init, seen), self.budget)
        with self.naming():
            made = self.method.parts(self.table) | ranks
            self.parts = {name: variable(name, *part[:3], trainable=part.trained) for name, part in made.items()}
        self._calls: list[tuple[Node, Node]] = []

    def forward(self, ids: Node) -> Node:
        made = looked_up(self.method.lookup, self.table, self.parts, ids)
        self._calls.append((ids, made))
        return made

    @property
    def training_bytes(self) -> int:
        """What training stores of the table, without the state of an optimizer."""
        return sum(int(v.tensor.nbytes) for v in self.parts.values())

    @public
    def settle(self, state: Any, done: Fraction = 1.0) -> None:
        """Make the values in `state` what they are to be when a share `done` of training is over: at 1 in the budget.

        For methods that prune, merge or move vectors; others do nothing here. To be called every 100 steps or so.

        >>> import hetu as ht
        >>> layer, ids = ht.embed.Embedding(50, 4, "deeplight", ratio=0.5), ht.placeholder("ids", (None,), "int64")
        >>> loss = ht.mean((layer(ids) - 1) ** 2)
        >>> ex, batches = ht.Executor({"train": [loss, ht.optim.SGD(1.0).minimize(loss)]}), [(np.arange(50),)] * 400
        >>> between = lambda step, loss: step % 100 or layer.settle(ex.state, step / 400)
        >>> _ = ht.fit(ex, batches, epochs=1, inputs=[ids], after_step=between)
        >>> layer.compact(ex.state).nbytes / (50 * 4 * 4) <= 0.5
        True
        """
        for name, value in self.method.settle(self.table, self._values(state), done).items():
            state[self.parts[name].name] = value

    @public
    def compact(self, state: Any) -> Compact:
        """What inference stores, made of the values in `state`, which are settled for it where they are not yet."""
        values = self._values(state)
        settled = values | self.method.settle(self.table, dict(values), 1.0)
        ranks = {name: settled.pop(name) for name in ("ranks",) if name in settled}
        return Compact(self, self.method.stored(self.table, settled) | ranks)

    def _values(self, state: Any) -> Arrays:
        again = "or save, and load the checkpoint in an executor of one process"
        if away := [v.name for v in self.parts.values() if v.name not in state]:
            said = f"the state has no values of {away[0]!r}, which servers may keep"
            raise ArgumentError(said, fix=f"train it on ranks; {again}")
        for v in self.parts.values():
            if (shape := np.shape(state[v.name])) != v.shape:  # as under ZeRO(3)
                said = f"the state has {shape} of {v.name!r} {v.shape}, whose rest other ranks may keep"
                raise ArgumentError(said, fix=f"give each rank all of it, as DataParallel does; {again}")
        return {name: np.array(state[v.name]) for name, v in self.parts.items()}

    def describe(self) -> str:
        return f"{self.count} x {self.features} by {self.method} in {self.budget:,} bytes"


class Compact(Layer):
    """The form of an `Embedding` that inference stores: variables that are not trained, `nbytes` in all.

    A checkpoint of it can be loaded into the compact form of any layer that was made alike.

    >>> import hetu as ht
    >>> layer, ids = ht.embed.Embedding(100, 8, "int16", ratio=0.5), ht.placeholder("ids", (None,), "int64")
    >>> y = ht.sum(layer(ids), axis=1)
    >>> ex = ht.Executor([y])
    >>> small = layer.compact(ex.state)
    >>> ht.Executor([small.within(y)]).run({ids: [1, 2]})[0].shape, small.nbytes
    ((2,), 1604)
    """

    def __init__(self, layer: CompressedEmbedding, stored: Arrays) -> None:
        super().__init__("compact")
        self._read, self._table, self._calls = layer.method.read, layer.table, layer._calls
        with self.naming():
            self.stored = {name: variable(name, value, trainable=False) for name, value in stored.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of what is stored."""
        return sum(int(v.tensor.nbytes) for v in self.stored.values())

    def forward(self, ids: Node) -> Node:
        return looked_up(self._read, self._table, self.stored, ids)

    @public
    def within(self, y: Node) -> Node:
        """The node `y` of the trained model with this form of the table in place of the one that is trained."""
        return replace([y], {made: self.forward(ids) for ids, made in self._calls})[0]

    def describe(self) -> str:
        return f"{self.nbytes:,} bytes"


def named(method: str | Method) -> Method:
    """The method of this name; UnknownNameError names those that there are."""
    if isinstance(method, Method):
        return method
    if method not in METHODS:
        raise UnknownNameError(f"there is no method {method!r}", fix=f"take one of {', '.join(METHODS)}, or a Method")
    return METHODS[method]


def fitted(method: Method, table: Vectors, budget: int) -> Vectors:
    """The table at the greatest size that fits; ArgumentError with the least if none does."""
    low, high, beside = 1, max(1, method.limit(table)), budget - table.budget
    least, whole = math.ceil(method.cost(table, 1)) + beside, table.count * table.row
    if least > SLACK * budget:
        fix = f"the least is {least:,} bytes: pass ratio={math.ceil(least / whole * 1e4) / 1e4} or more"
        if least > whole:
            fix = f"the least is {least:,} bytes, more than the table itself has: take another method"
        said = f"{method} cannot store {table.count:,} x {table.features} in {budget:,} bytes"
        raise ArgumentError(f"{said} (ratio={budget / whole:.4g})", fix=fix)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if method.cost(table, middle) <= table.budget else (low, middle - 1)
    return dataclasses.replace(table, size=low)


def looked_up(by: Callable[..., Node], table: Vectors, parts: Mapping[str, Node], ids: Node) -> Node:
    """The vectors of ids as they are given: by a lookup or a read, which are given int64, with an axis at least."""
    found = ops.astype(within(ids, size=table.count), "int64")
    found = found if ids.ndim else ops.expand_dims(found, axis=0)
    ranked = ops.astype(ops.take(parts["ranks"], found), "int64") if "ranks" in parts else found
    made, wanted = by(table, parts, ranked), (found.ndim + 1, table.features)
    if not isinstance(made, Node) or not made.ndim or (made.ndim, made.shape[-1]) != wanted:
        said = f"ids {found.type} became {made.type if isinstance(made, Node) else type(made).__name__}"
        raise ShapeError(said, fix=f"let the method return a node of vectors (..., {table.features}), one for each id")
    return made if ids.ndim else ops.squeeze(made, axis=0)


def smallest(count: int) -> str:
    """The smallest dtype of whole numbers below `count`."""
    return np.min_scalar_type(max(count - 1, 0)).name


def _checked(popularity: Any, count: int) -> np.ndarray:
    array = np.asarray(popularity)
    if array.shape != (count,) or array.dtype.kind not in "iuf" or not (np.isfinite(array) & (array >= 0)).all():
        said = f"popularity is {array.dtype} of shape {array.shape}, wanted {count:,} numbers from 0 up"
        raise ArgumentError(said, fix="count ids: np.bincount(ids.ravel(), minlength=count)")
    return array.astype(np.float64)
