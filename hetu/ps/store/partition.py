"""How parameters are cut into blocks, and which server holds each block.

A dense parameter is cut, flat, into blocks of at most one chunk, so that a block is also a message and no server waits
for a whole tensor (similar to Y. Peng et al., "A Generic Communication Scheduler for Distributed DNN Training
Acceleration", SOSP 2019). The rows of an embedding table are dealt to the servers in turn, as ids are often sorted by
their frequency; ids without a bound are mixed before. So that the rows of a server are neighbors all the same, a row
has a place: those of the first server come first. Or a table says itself which part owns each row (`placed.py`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from types import EllipsisType
from typing import Any

import numpy as np

from ...core.errors import ArgumentError
from ...core.types import as_dtype
from ...growth import UNBOUNDED, Growth
from ...ops.index import sums_of
from ...ops.random import GOLDEN
from ...ranges import Count
from .messages import wire_array
from .placed import Placed
from .rules import RuleSpec, check_rule
from .table_spec import TableSpec

Index = tuple[slice | np.ndarray | EllipsisType, ...]
MOST_JOINED = 100  # tables in one that servers know by name
MIX = int(GOLDEN) & UNBOUNDED  # odd, so that it has an inverse
BACK = pow(MIX, -1, UNBOUNDED + 1)
CHUNK = 1 << 20  # bytes of a message: larger ones make every receive allocate fresh pages


@dataclass(frozen=True)
class Parameter:
    """A parameter that a job keeps on its servers.

    A `sparse` parameter is a table whose rows, along the first axis, are pushed and pulled by id. `rule`, `options`,
    `reduce`, `generation`, `push`, `pull`, `at_rest`, `seed`, `fleeting` and `consistency` are those of
    `hetu.ps.TableSpec`. The parts of one that is to be `beside` another, of the same shape, lie on the same servers as
    the other's, which may so compute with both. One that `grows` has `UNBOUNDED` rows, of which servers make those that
    are pushed. The rows of a table that is `placed` lie as that says, part k on server k, instead of dealt out in turn.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    sparse: bool = False
    rule: RuleSpec = "sgd"
    options: Mapping[str, Any] = field(default_factory=dict)
    reduce: str = "mean"
    generation: int = 0
    beside: str = ""
    push: str = ""
    pull: str = ""
    at_rest: str = ""
    seed: int = 0
    joined: tuple[tuple[str, int], ...] = ()
    grows: Growth | None = None
    placed: Placed | None = None
    fleeting: bool = False
    consistency: str = ""

    def __post_init__(self) -> None:
        if (self.grows is not None) != (self.shape[:1] == (UNBOUNDED,)) or (self.grows and not self.sparse):
            raise ArgumentError(
                f"grows={self.grows} of a parameter {self.shape}, sparse={self.sparse}",
                fix="to have no bound, pass shape=(hetu.ps.UNBOUNDED, ...), sparse=True, grows=Growth(...)",
            )
        if self.at_rest and not self.sparse:
            raise ArgumentError(f"at_rest={self.at_rest!r} of what is no table", fix="use it for tables, sparse=True")
        if self.placed is not None and (not self.sparse or self.shape[:1] != self.placed.owners.shape):
            text = f"owners of {len(self.placed.owners)} rows for what is {'' if self.sparse else 'no table and '}"
            raise ArgumentError(f"{text}{self.shape}", fix="give the part of each row of a table, sparse=True")

    @cached_property
    def element(self) -> np.dtype:
        """The dtype as a NumPy object."""
        return as_dtype(self.dtype)

    @property
    def coded(self) -> bool:
        """Whether it travels in fewer bytes than it has."""
        return bool(self.push or self.pull)

    @cached_property
    def cols(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[1:])

    @cached_property
    def arrays(self) -> int:
        """The number of arrays of its shape on the servers: the values and the state of the rule."""
        return 1 + check_rule(self.rule, self.options).states

    @cached_property
    def timed(self) -> bool:
        """Whether its rule counts steps, also those that change no row of a block."""
        return check_rule(self.rule, self.options).timed

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape in which it is cut into blocks: a table by rows, any other flat."""
        return (self.shape[0], self.cols) if self.sparse else (1, math.prod(self.shape))

    @property
    def rows(self) -> slice:
        """All rows of a table."""
        return slice(0, self.shape[0])

    def of(self, rows: slice | None) -> Parameter:
        """Some rows of a table by themselves; with None the whole."""
        if rows is None:
            return self
        return replace(self, shape=(rows.stop - rows.start, *self.shape[1:]), placed=None)

    def places(self, ids: np.ndarray, parts: int) -> np.ndarray:
        """The places of rows of a table in so many parts: those of the first part come first."""
        if self.placed is not None:
            placed: np.ndarray = self.placed.places[ids]
            return placed
        return places_of(mixed(ids) if self.grows else ids, self.shape[0], parts)

    def ids(self, places: np.ndarray, parts: int) -> np.ndarray:
        """The inverse of `places`."""
        if self.placed is not None:
            placed: np.ndarray = self.placed.ids[places]
            return placed
        found = ids_of(places, self.shape[0], parts)
        return mixed(found, BACK) if self.grows else found

    @property
    def nbytes(self) -> int:
        """Of one that grows what it may take."""
        return self.grows.budget if self.grows else math.prod(self.shape) * self.element.itemsize

    def spec(self, name: str, start: int, stop: int, parts: int = 1, first: int = 0) -> TableSpec:
        """The description of one block for its server; of a table its rows are `first`, `first + parts`, ..."""
        rows, cols = (stop - start, self.cols) if self.sparse else (1, stop - start)
        if self.grows:
            start, (_, rows) = 0, self.grows.rows(self.arrays * self.cols * self.element.itemsize, parts, name[:100])
        return TableSpec(
            name, start, rows, cols, self.element.name, self.rule, dict(self.options), self.reduce, self.generation,
            self.push, self.pull, parts, first if self.sparse else 0, self.at_rest, self.seed,
            [*map(list, self.joined[:MOST_JOINED])], asdict(self.grows) if self.grows else {}, {},
            0 if self.placed is None else self.placed.number, self.fleeting,
            self.consistency,
        )  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Places of rows (sparse) or flat elements (dense) [start, stop) of a parameter, on one server under one key.

    Of a table these are the rows first, first + step, ..., or if it is `placed` by that number those of part `first`.
    """

    key: int
    server: int
    start: int
    stop: int
    first: int = 0
    step: int = 1
    placed: int = 0

    def rows(self, parameter: Parameter) -> Any:
        """The rows of a table that lie here, increasing: a range, or of one that is placed an array."""
        placed = parameter.placed
        return placed.ids[self.start : self.stop] if placed else range(self.first, parameter.shape[0], self.step)

    def chunks(
        self, parameter: Parameter, places: np.ndarray | slice | None, row_bytes: int, always: bool = False
    ) -> Iterator[tuple[Index, np.ndarray | None]]:
        """Of each message for the whole, a slice of its rows, or those at increasing places: its part of an array, and
        its rows here.

        Where none of the rows is here, there is no message, or if there `always` is one, one without rows.

        >>> table = Parameter((10, 2), sparse=True)
        >>> list(Block(0, 0, start=4, stop=7, first=1, step=3).chunks(table, np.array([1, 5, 6, 8]), row_bytes=16))
        [((slice(1, 3, None),), array([1, 2]))]
        """
        most = max(1, CHUNK // max(1, row_bytes))
        if not parameter.sparse:
            yield (..., slice(self.start, self.stop)), None
        elif places is None or isinstance(places, slice):
            wanted = parameter.rows if places is None else places
            mine = self.rows(parameter)
            low, high = (bisect_left(mine, end) for end in (wanted.start, wanted.stop))
            for a in range(low, high, most):
                some = mine[a : min(a + most, high)]
                ends = slice(some[0] - wanted.start, some[-1] - wanted.start + 1, self.step)
                where: Index = (some - wanted.start if parameter.placed else ends,)
                yield where, np.arange(a, a + len(some), dtype="<i8")
        else:
            first, last = np.searchsorted(places, (self.start, self.stop)).tolist()
            for a in range(first, max(last, first + always), most):
                some = slice(a, min(a + most, last))
                yield (some,), wire_array(places[some] - self.start)


def partition(
    parameters: Mapping[str, Parameter],
    servers: int,
    first_key: Count = 0,
    made: Mapping[str, list[Block]] | None = None,
) -> dict[str, list[Block]]:
    """Blocks of every parameter, balanced by bytes: the largest first, each to the server with the least so far.

    Those `beside` another lie where its blocks do, which may have been `made` before. Every worker computes the same
    answer from the same arguments. Part k of a placed table lies on server k, or of fewer servers on one of them.

    >>> tables = {"w": Parameter((4, 4)), "table": Parameter((1_000_000, 4), sparse=True)}
    >>> [(b.server, b.stop - b.start) for b in partition(tables, 2)["table"]]
    [(0, 500000), (1, 500000)]
    """
    pieces: list[tuple[int, str, int, int, int, int, int]] = []  # (bytes, name, and the fields of a block)
    for name, parameter in sorted((name, p) for name, p in parameters.items() if not p.beside):
        if parameter.sparse and not parameter.shape:
            raise ArgumentError(f"the table {name} has no rows", fix="sparse=True needs at least one axis")
        length = parameter.shape[0] if parameter.sparse else math.prod(parameter.shape)
        count = parts_of(parameter.nbytes, length, servers if parameter.sparse else length)
        edges = [places_before(i, length, count) for i in range(count + 1)]
        if placed := parameter.placed:
            count, edges = placed.parts, placed.edges
        per_row, step = parameter.nbytes / max(1, length), count if parameter.sparse else 1
        more = step, placed.number if placed else 0
        pieces += [(int((b - a) * per_row), name, a, b, i, *more) for i, (a, b) in enumerate(pairwise(edges))]
    made = made or {}
    load = [0] * servers
    blocks: dict[str, list[Block]] = {name: [] for name, p in parameters.items() if not p.beside}
    for key, (nbytes, name, *rows) in sorted(enumerate(pieces), key=lambda p: (-p[1][0], p[0])):
        server = rows[2] % servers if parameters[name].placed else load.index(min(load))
        load[server] += max(1, nbytes)
        blocks[name].append(Block(first_key + key, server, *rows))
    found = {name: sorted(some, key=lambda block: (block.start, block.stop)) for name, some in blocks.items()}
    key = first_key + len(pieces)
    for name, parameter in sorted((name, p) for name, p in parameters.items() if p.beside):
        there = {**made, **found}.get(parameter.beside, [])
        if sum(block.stop - block.start for block in there) != parameter.matrix[not parameter.sparse]:
            raise ArgumentError(
                f"{name} {parameter.shape} beside {parameter.beside!r}, which is no parameter of that shape",
                fix="make the other one before, or with it",
            )
        if any(block.placed != (parameter.placed.number if parameter.placed else 0) for block in there):
            raise ArgumentError(
                f"{name} beside {parameter.beside!r}, whose rows are placed otherwise", fix="pass the same placed="
            )
        found[name] = [replace(block, key=key + number) for number, block in enumerate(there)]
        key += len(there)
    return found


def parts_of(nbytes: int, length: int, most: int) -> int:
    """Into how many blocks a parameter of so many rows, or elements, is cut."""
    return max(1, min(math.ceil(nbytes / CHUNK), most, length))


def places_before(part: int, rows: int, parts: int) -> int:
    """Where the places of a part begin, if rows are dealt to parts in turn."""
    each, more = divmod(rows, parts)
    return part * each + min(part, more)


def places_of(ids: np.ndarray, rows: int, parts: int) -> np.ndarray:
    """The places of rows that are dealt to parts in turn.

    >>> places_of(np.arange(7), rows=7, parts=3).tolist()
    [0, 3, 5, 1, 4, 6, 2]
    """
    if parts == 1:
        return ids
    each, more = divmod(rows, parts)
    turn, part = np.divmod(ids, parts)
    return part * each + np.minimum(part, more) + turn


def ids_of(places: np.ndarray, rows: int, parts: int) -> np.ndarray:
    """The inverse of `places_of`."""
    if parts == 1:
        return places
    edges = np.array([places_before(part, rows, parts) for part in range(parts)])
    part = np.searchsorted(edges, places, side="right") - 1
    found: np.ndarray = (places - edges[part]) * parts + part
    return found


def mixed(ids: np.ndarray, by: int = MIX) -> np.ndarray:
    """Ids of a table without a bound in another order of all ids, by which they are dealt; with `BACK` the inverse.

    Or ids that are not hashed, and all even, would lie on one of two servers.

    >>> mixed(mixed(np.array([0, 2, 4])), BACK).tolist(), (mixed(np.array([0, 2, 4, 6])) % 2).tolist()
    ([0, 2, 4], [0, 1, 0, 1])
    """
    words = np.uint64(UNBOUNDED) - ids.astype("<u8")  # so that 0 stands for what is no id, and stays 0
    words ^= words >> np.uint64(32)
    with np.errstate(over="ignore"):  # NumPy tells of it where there is one id alone
        words = words * np.uint64(by) & np.uint64(UNBOUNDED)
    words ^= words >> np.uint64(32)
    return (np.uint64(UNBOUNDED) - words).astype("<i8")


def sum_by_id(ids: np.ndarray, parts: Sequence[np.ndarray], row: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids, increasing, and the sum of the rows of each, added in their order as on one process.

    The rows, of this shape, lie in one array or several, one after the other.

    >>> sum_by_id(np.array([7, 2, 7]), [np.array([[1.0], [2.0]]), np.array([[3.0]])], row=(1,))[1].tolist()
    [[2.0], [4.0]]
    """
    if len(parts) == 1 and (ids[1:] > ids[:-1]).all():
        return ids, parts[0].reshape(len(ids), *row)
    distinct, places = np.unique(ids, return_inverse=True)
    return distinct, sums_of(places, parts, (len(distinct), *row))
