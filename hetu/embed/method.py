"""What a compressed table is, how a method declares one, and the layer that looks vectors up by it.

A method is a function that says which variables stand for a table, how they are looked up, and where that is more,
what is done between steps and what inference stores, from which its bytes follow. It is trained like any other layer.
Left out: numbers other than float32, files of its own (a compact form is variables, which any checkpoint holds).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .. import ops
from ..core.errors import ArgumentError, ShapeError, UnknownNameError, public
from ..core.graph import Node, replace
from ..core.leaf import Initializer, constant, variable
from ..core.simplify import interpret
from ..core.types import as_dtype
from ..nn.embedding import SMALL
from ..nn.layer import Layer
from ..ops.index import within
from ..ranges import AtLeast1, Count, Fraction, Share, Whole

SLACK = 1.02  # of its budget a table may take so much
AT_ONCE = 1 << 13  # ids, in memory a multiple of their vectors
METHODS: dict[str, Method] = {}
Arrays = dict[str, np.ndarray]
Nodes = Mapping[str, Node]
Types = dict[str, tuple[tuple[Count, ...], str]]  # shape and dtype, by name
Lookup = Callable[[Nodes, Node], Node]


@dataclass
class Vectors:
    """What a method stands for: `count` vectors of `features` float32 numbers, in `budget` bytes.

    `init` is how vectors begin, `seen` how often each id occurs, most first, if that is known. `size` is the greatest
    at which what is stored is within the budget.
    """

    count: AtLeast1
    features: AtLeast1
    budget: Whole
    init: Initializer
    seen: np.ndarray | None = None
    size: AtLeast1 = 1

    def __post_init__(self) -> None:
        if self.seen is None:
            return
        seen = np.asarray(self.seen)
        right = seen.shape == (self.count,) and seen.dtype.kind in "iuf" and (np.isfinite(seen) & (seen >= 0)).all()
        if not right or (seen[1:] > seen[:-1]).any():
            said = f"popularity is {seen.dtype} of shape {seen.shape}, wanted {self.count:,} falling numbers from 0 up"
            fix = "count ids, popularity = np.bincount(ids.ravel(), minlength=count), and number both by it, most first"
            sort = "ids = np.argsort(np.argsort(-popularity))[ids]; popularity = np.sort(popularity)[::-1]"
            raise ArgumentError(said, fix=f"{fix}: {sort}")
        self.seen = seen.astype(np.float64)

    @property
    def row(self) -> int:
        """The bytes of a vector."""
        return 4 * self.features

    def rows(self, count: AtLeast1) -> Weights:
        """So many vectors, trained."""
        return Weights(self.init, (count, self.features))


@dataclass(frozen=True)
class Weights:
    """A variable of a method: how it begins, and its shape; whether optimizers train it."""

    init: Initializer | np.ndarray | float
    shape: tuple[Count, ...]
    dtype: str = "float32"
    trained: bool = True

    def __post_init__(self) -> None:
        as_dtype(self.dtype)


@dataclass
class Scheme:
    """What stands for a table: variables, and how they are looked up.

    Args:
        parts, lookup: the variables that training takes, and what makes vectors (..., features) of all of them and of
            ids (...), which have an axis at least, int64 from 0 to below `count`.
        limit: the greatest `table.size` of use, such as rows, up to which stored bytes do not fall; `count` if None.
        settle: of the values of parts, when a share `done` of training is over: new values of some; at 1 they stay so.
        types, store, read: shape and dtype of what inference stores, made of the values of parts, and the lookup in it.
            If nothing is said, it stores the parts.

    >>> import hetu as ht
    >>> def mirrored(table):  # a method of your own: half of the ids have the vectors of the others, negated
    ...     half = -(-table.count // 2)
    ...     def lookup(parts, ids):
    ...         sign = ht.expand_dims(ht.where(ids < half, 1.0, -1.0), axis=-1)
    ...         return ht.embedding(parts["rows"], ids % half) * sign
    ...     return ht.embed.Scheme({"rows": table.rows(half)}, lookup)
    >>> layer = ht.embed.Embedding(100, 8, mirrored, ratio=0.5)
    >>> layer.compact(ht.Executor([layer([3, 53])]).state).nbytes
    1600
    """

    parts: dict[str, Weights]
    lookup: Lookup
    limit: AtLeast1 | None = None
    settle: Callable[[Arrays, float], Arrays] | None = None
    types: Types = field(default_factory=dict)
    store: Callable[[Arrays], Arrays] | None = None
    read: Lookup | None = None

    def __post_init__(self) -> None:
        self.types = self.types or {name: (part.shape, part.dtype) for name, part in self.parts.items()}
        if strange := [name for name in self.parts | self.types if not name.isidentifier()]:
            raise ArgumentError(f"{strange[0]!r} is no name of a part", fix="name parts by letters, digits and _")

    @property
    def nbytes(self) -> int:
        """The bytes of what inference stores."""
        return sum(math.prod(shape) * as_dtype(kind).itemsize for shape, kind in self.types.values())


Method = Callable[[Vectors], Scheme]


class CompressedEmbedding(Layer):
    """Vectors by ids, (...) of integers -> (..., features), of which inference stores a share `ratio` of the bytes.

    Args:
        count, features: of the table that is stood for, float32.
        method: a name in `METHODS`, or a function of a table that makes a `Scheme`.
        ratio: the budget, of the bytes of that table; ArgumentError with the least if that cannot be kept.
        popularity: (count,) how often each id occurs, falling: for some methods id 0 occurs most. None is Zipf's law.
        weight_init: how vectors begin.

    Training stores `training_bytes` beside the state of its optimizer. DTypeError for ids that are no integers,
    ValueRangeError at run time for those outside [0, count).

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
        super().__init__(name)
        makes = METHODS.get(method) if isinstance(method, str) else method
        if makes is None:
            fix = f"take one of {', '.join(METHODS)}, or a function"
            raise UnknownNameError(f"there is no method {method!r}", fix=fix)
        self.method = method if isinstance(method, str) else getattr(method, "__name__", repr(method))
        self.count, self.features = count, features
        self.budget = math.floor(ratio * count * features * 4 + 1e-6)  # 0.7 of 60 is 41.999 in floats
        self.scheme = fitted(self.method, makes, Vectors(count, features, self.budget, weight_init, popularity))
        with self.naming():
            self.parts = {
                name: variable(name, part.init, part.shape, part.dtype, trainable=part.trained)
                for name, part in self.scheme.parts.items()
            }
        self.training_bytes = sum(int(v.tensor.nbytes) for v in self.parts.values())
        self._calls: WeakKeyDictionary[Node, Node] = WeakKeyDictionary()  # vectors, and the ids that they are of

    def forward(self, ids: Node) -> Node:
        made = self._looked_up(self.scheme.lookup, self.parts, ids)
        self._calls[made] = ids
        return made

    def _looked_up(self, by: Lookup, parts: Nodes, ids: Node) -> Node:
        """The vectors of ids as they are given; a lookup is given int64, with an axis at least."""
        found = ops.astype(within(ids, size=self.count), "int64")
        made = by(parts, found if ids.ndim else ops.expand_dims(found, axis=0))
        if not isinstance(made, Node) or made.ndim != max(ids.ndim, 1) + 1 or made.shape[-1] != self.features:
            said = f"{self.method}: ids {found.type} became {made.type if isinstance(made, Node) else repr(made)[:60]}"
            raise ShapeError(said, fix=f"let it return a node of vectors (..., {self.features}), one for each id")
        return made if ids.ndim else ops.squeeze(made, axis=0)

    @public
    def settle(self, state: Any, done: Fraction = 1.0) -> None:
        """Make the values in `state` what they are to be when a share `done` of training is over: at 1 in the budget.

        For methods that prune, merge or move vectors; others do nothing here. To be called every 100 steps or so, such
        as by `after_step` of `ht.fit`.

        >>> import hetu as ht
        >>> layer = ht.embed.Embedding(50, 4, "deeplight", ratio=0.5)
        >>> state = ht.Executor([layer([0])]).state
        >>> layer.settle(state, 0.9)
        >>> int(np.count_nonzero(state[layer.parts["weight"]]))
        66
        """
        for name, value in self._settled(state, done)[1].items():
            state[self.parts[name].name] = value

    @public
    def compact(self, state: Any) -> Compact:
        """What inference stores, made of the values in `state`, which are settled for it where they are not yet."""
        values, settled = self._settled(state, 1.0)
        values |= settled
        stored = self.scheme.store(values) if self.scheme.store else values
        return Compact(self, by_name(f"store of {self.method}", stored, self.scheme.types, whole=True))

    def _settled(self, state: Any, done: float) -> tuple[Arrays, Arrays]:
        """The values of all parts, and new ones of some."""
        values = {name: state[v.name] for name, v in self.parts.items() if v.name in state}
        for name, v in self.parts.items():
            if (has := getattr(values.get(name), "shape", None)) != v.shape:  # as on servers, or under ZeRO(3)
                said = (
                    f"the state has {has or 'no values'} of {v.name!r} {v.shape}, whose rest servers or ranks may keep"
                )
                again = "or save, and load the checkpoint in an executor of one process"
                raise ArgumentError(said, fix=f"give each rank all of it, as DataParallel does; {again}")
        made = self.scheme.settle(dict(values), done) if self.scheme.settle else {}
        return values, by_name(f"settle of {self.method}", made, self.parts)

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
    >>> ht.Executor([small.replace_in(y)]).run({ids: [1, 2]})[0].shape, small.nbytes
    ((2,), 1604)
    """

    def __init__(self, layer: CompressedEmbedding, stored: Arrays) -> None:
        super().__init__("compact")
        self.nbytes = layer.scheme.nbytes
        self._read, self._calls = partial(layer._looked_up, layer.scheme.read or layer.scheme.lookup), layer._calls
        with self.naming():
            types = layer.scheme.types.items()
            self.stored = {name: variable(name, stored[name], *type_, trainable=False) for name, type_ in types}

    def forward(self, ids: Node) -> Node:
        return self._read(self.stored, ids)

    @public
    def replace_in(self, y: Node) -> Node:
        """The node `y` of the trained model with this form of the table in place of the one that is trained."""
        forms: dict[Node, Node] = {}
        for made, ids in self._calls.items():  # ids may follow from vectors that were looked up before
            forms[made] = self.forward(replace([ids], forms)[0])
        return replace([y], forms)[0]


def fitted(name: str, method: Method, table: Vectors) -> Scheme:
    """The scheme at the greatest size that fits; ArgumentError with the least if none does."""

    def at(size: int) -> Scheme:
        if isinstance(scheme := method(dataclasses.replace(table, size=size)), Scheme):
            return scheme
        raise ArgumentError(f"{name} made {scheme!r:.60} of a table", fix="let it return a ht.embed.Scheme")

    scheme, whole = at(1), table.count * table.row
    if (least := scheme.nbytes) > SLACK * table.budget:
        other = f"take another method, for the table has {whole:,}"
        fix = f"pass ratio={-(-least * 10_000 // whole) / 10_000} or more" if least <= whole else other
        said = f"{name} cannot store {table.count:,} x {table.features} in {table.budget:,} bytes"
        raise ArgumentError(f"{said} (ratio={table.budget / whole:.4g})", fix=f"the least is {least:,} bytes: {fix}")
    low, high = 1, scheme.limit or table.count
    while low < high:
        middle = (low + high + 1) // 2
        if (tried := at(middle)).nbytes <= table.budget:
            low, scheme = middle, tried
        else:
            high = middle - 1
    return scheme


def values_of(by: Lookup, parts: Arrays, ids: np.ndarray) -> np.ndarray:
    """What a lookup, or what is like it, makes of arrays and all ids, so many at once."""
    nodes = {name: constant(value=value) for name, value in parts.items()}
    some = np.array_split(ids.astype("int64"), -(-len(ids) // AT_ONCE) or 1)
    return np.concatenate([interpret([by(nodes, constant(value=each))], {})[0] for each in some])


def by_name(of: str, made: Any, wanted: Mapping[str, Any], whole: bool = False) -> Arrays:
    """What a method has made, where that is by the names that are wanted; variables look at the arrays themselves."""
    if isinstance(made, dict) and made.keys() <= wanted.keys() and (len(made) == len(wanted) or not whole):
        return made
    fix = f"let it return arrays by name: {'' if whole else 'some of '}{', '.join(wanted)}"
    raise ArgumentError(f"{of} gave {made!r:.80}", fix=fix)
