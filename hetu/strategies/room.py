"""Bytes that the client takes beside the plan of a step, at most, as planners count them: ids while they are sorted,
rows on their way, and what a cache keeps. How many of the ids are distinct only a run shows; here all are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..codec import Compress, codec
from ..core.graph import Node
from ..core.op import Op
from ..core.types import TensorType
from ..ps.store.messages import given
from ..ps.store.partition import CHUNK
from ..ps.store.policies import POLICIES
from .served import Served

WORD = 8  # bytes of an id, and of a number of a line
SORTED = 7  # words of each id while `np.unique` sorts them and tells where each is
LINE = 6  # words of each line of a cache beside the row and its updates
GROWN = 20  # bytes for each line to find those of a table without a bound
CHECKED = 8  # words of each distinct id whose row a cache looks for
FLOAT = 4  # bytes of what is coded
LOST = 13  # bytes of a gradient's number with what is decoded, what it lost, and whether that is finite


class Room(NamedTuple):
    """Bytes while an operator runs, and those that stay until its clock ends."""

    runs: int = 0
    stays: int = 0

    def beside(self, more: int) -> Room:
        return Room(self.runs + more, self.stays)


ROOMS = dict[Op[..., Any], Callable[..., Room]]()  # what an operator takes, see `push_pull.py`
OF_ROWS = set[Op[..., Any]]()  # those of them that ask for rows, of which some may be the same


class RowCount(NamedTuple):
    """The ids of a request, those of them that may be distinct, the bytes of a row, the lines of a cache, if there is
    one, and the bytes that it takes to code a number of a row.

    >>> RowCount(ids=100, distinct=60, row=32).pulled
    Room(runs=6080, stays=0)
    >>> RowCount(ids=100, distinct=60, row=32).pushed
    Room(runs=6080, stays=2400)
    """

    ids: int
    distinct: int
    row: int
    lines: int | None = None
    coded: int = 0

    @staticmethod
    def of(ids: Sequence[TensorType], tables: Sequence[tuple[str, int, int]], row: int, *more: Any) -> RowCount:
        """The count for ids of each of these tables (name, first row, rows), some of which may be the same one."""
        asked = dict[tuple[str, int, int], int]()
        for table, one in zip(tables, ids):
            asked[table] = asked.get(table, 0) + math.prod(map(int, one.shape))
        return RowCount(sum(asked.values()), sum(min(n, table[2]) for table, n in asked.items()), row, *more)

    @property
    def sorting(self) -> int:
        return WORD * (SORTED * self.ids + self.distinct)

    @property
    def moving(self) -> int:
        """Distinct rows, with the ids as they were asked for, and where each is; sorted, sent, and as steps to pack."""
        coding = self.coded * min(self.distinct * self.row, CHUNK) // FLOAT
        return self.distinct * (self.row + 4 * WORD) + 2 * WORD * self.ids + coding

    @property
    def pulled(self) -> Room:
        if self.lines is None:
            return Room(max(self.sorting, self.moving))
        known = WORD * (2 * self.ids + self.distinct)  # the ids of a lookup, kept for the update
        fetched = (self.distinct + 2 * min(self.distinct, self.lines)) * self.row + WORD * CHECKED * self.distinct
        return Room(known + max(self.sorting, self.moving + fetched), known)

    @property
    def pushed(self) -> Room:
        stays = self.distinct * (self.row + WORD)
        if self.lines is None:
            return Room(max(self.sorting, self.moving), stays)
        held = 2 * min(self.distinct, self.lines) * self.row + WORD * CHECKED * self.distinct
        return Room(self.moving + stays + held, stays)


def coding(name: str) -> int:
    """The bytes that `codec(name)` takes for a number, none without one."""
    return made.beside if (made := codec(name)) else 0


def dense_coded(nbytes: int, name: str) -> Room:
    """For a gradient of so many bytes that travels as `codec(name)` says, in messages of at most a chunk."""
    made, numbers = given(codec(name)), min(nbytes, CHUNK) // FLOAT
    return Room(max((FLOAT + made.beside) * numbers, LOST * numbers + made.width(numbers)), made.width(nbytes // FLOAT))


def beside_plan(order: Sequence[Node], kept: Mapping[str, Mapping[Node, Served]], rank: int) -> int:
    """The most bytes that a worker has during a step of these instructions beside its plan and its copies of variables,
    which are `kept` on servers, as one, by names."""
    nbytes, stays, most, of = 0, 0, 0, dict[str, Any]()
    for name, homes in kept.items():
        held, lines = _between_steps(homes, rank)
        of[name] = {"lines": lines, "coded": next(iter(homes.values())).compress or Compress()}
        nbytes += held
    for node in (n for n in order if n.op in ROOMS and n.attrs.get("acts", True) and n.attrs["parameter"]):
        room = ROOMS[node.op](*(i.type for i in node.inputs), **{**node.attrs, **of[node.attrs["parameter"]]})
        most, stays = max(most, stays + room.runs), stays + room.stays
    return nbytes + most


def asks_for_rows(order: Sequence[Node]) -> bool:
    """Whether `beside_plan` is more than a worker will have if some of the rows that it asks for are the same."""
    return any(node.op in OF_ROWS for node in order)


def _between_steps(homes: Mapping[Node, Served], rank: int) -> tuple[int, int | None]:
    """The bytes that are kept of variables that lie together, and the lines of their cache, if they have one."""
    nbytes, lines = 0, None
    for v, home in homes.items():
        if home.compress and home.compress.gradients:
            nbytes += int(v.tensor.nbytes)  # what its gradients lost on the way
        if (cache := home.cache) is not None:
            (rows, *row), placed = map(int, v.shape), POLICIES[cache.policy].placed and home.placed
            held = len(placed.kept_by(rank)) if placed else cache.capacity(rows, v.name)
            lines = (lines or 0) + held
            where = held * GROWN if "grows" in v.tags else rows * WORD
            nbytes += held * (2 * math.prod(row) * v.dtype.itemsize + LINE * WORD) + where
    return nbytes, lines
