"""What ranks keep for those that are lost, and for those who come: copies of values, and what calls have returned.

`elastic.py` says when. Each rank keeps its own parts of the variables as they are before a step, and of the rank before
it those that nobody else has. Left out: more than one copy, so neighbors that are lost in one step take it with them.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from ..core.backend import aligned_empty
from ..core.executor import Executor
from ..core.graph import Node
from ..core.types import Box
from .comm.comm import Comm
from .cut.strategy import Strategy
from .layout.boxes import contains, sizes, volume

ALIGNED = 64  # bytes
EVERY = 8  # calls, before one of which ranks that wait come in
ROOM = 64 << 20  # bytes of what calls have returned, beyond which nobody can be told all of it, and joins


class KeptParts:
    """What the ranks of a group keep of the variables under a strategy: boxes, and which of them nobody else has."""

    def __init__(self, strategy: Strategy, ranks: Sequence[int], variables: Sequence[Node]) -> None:
        self.strategy, self.ranks = strategy, tuple(ranks)
        self.boxes: list[dict[Node, Box]] = [{} for _ in ranks]
        for node in variables:
            for rank, piece in strategy.store(node).pieces(node.shape).items():
                self.boxes[rank][node] = piece.box
        self.alone = [self._alone(rank) for rank in range(len(ranks))]

    def _alone(self, rank: int) -> dict[Node, Box]:
        others = [boxes for other, boxes in enumerate(self.boxes) if other != rank]
        mine = self.boxes[rank].items() if others else ()
        return {v: box for v, box in mine if not any(v in of and contains(of[v], box) for of in others)}

    def on(self, comm: Comm) -> list[list[Mapping[Node, Box]]]:
        """What each rank of another group has copies of: its own parts, and those that only the one before it had."""
        places = [self.ranks.index(rank) if rank in self.ranks else None for rank in comm.ranks]
        return [[] if at is None else [self.boxes[at], self.alone[at - 1]] for at in places]


class Copies:
    """What one rank keeps of the values before a step: its own parts, and those that only the rank before it has.

    The parts that travel lie in front, so that they are sent as they lie.
    """

    def __init__(self, held: KeptParts, rank: int) -> None:
        count = len(held.ranks)
        self.held, self.after, self.before = held, (rank + 1) % count, (rank - 1) % count
        self.own, self.sent = _room(held.boxes[rank], held.alone[rank])
        self.theirs, self.received = _room(held.alone[self.before], held.alone[self.before])

    def take(self, executor: Executor) -> None:
        """Copy the values as they are; a collective."""
        arrays = executor.state.arrays
        for node, kept in self.own.items():
            kept[...] = arrays[node.name]
        sends = [(self.after, self.sent)] if self.sent.size else []
        executor.placement.comm.exchange(sends, [(self.before, self.received)] if self.received.size else [])


def _room(boxes: Mapping[Node, Box], first: Collection[Node]) -> tuple[dict[Node, np.ndarray], np.ndarray]:
    """An array for each box, and the memory of the `first`, which lie side by side."""
    order = [*first, *(node for node in boxes if node not in first)]
    nbytes = [volume(boxes[v]) * v.dtype.itemsize for v in order]
    ends = np.cumsum([0, *(-(-n // ALIGNED) * ALIGNED for n in nbytes)])
    memory = aligned_empty(np, int(ends[-1]))
    parts = [memory[at : at + n].view(v.dtype).reshape(sizes(boxes[v])) for v, at, n in zip(order, ends, nbytes)]
    return dict(zip(order, parts)), memory[: ends[len(first)]]


class PastCalls:
    """What the calls of a rank's script have returned, for those who join, who are told it instead of making them."""

    def __init__(self) -> None:
        self.heard = 0  # how many there were
        self.told: list[Any] = []  # what they have returned
        self.until = math.inf  # the last call before which one can join: what it has returned cannot be told
        self.room = ROOM
        self.past = deque[Any]()  # what this rank, who has joined, is yet to be told

    def add(self, found: Any, tell: bool) -> None:
        """Note what the present call has returned."""
        if tell and self.until == math.inf:
            self.told.append(copy.deepcopy(found))
            self.room -= _room_of(found)
        if not tell or self.room < 0:
            self.end()

    def end(self) -> None:
        """Nobody can join behind the present call."""
        self.until = min(self.until, self.heard)

    def let_in(self, number: int) -> bool:
        """Whether ranks may join before a call, behind which all are."""
        if number > self.until:
            self.told.clear()
        return number % EVERY == 0 and number <= self.until

    def before(self, number: int | None) -> list[Any]:
        """What those are told who make the call of this number as their first; some ranks may have it behind them."""
        return written(self.told[: None if number is None else number - 1])

    def hear(self, told: Sequence[Any]) -> None:
        """Be told the past by others."""
        self.told = read(told)
        self.room, self.past = ROOM - sum(map(_room_of, self.told)), deque(self.told[self.heard :])


def _room_of(found: Any) -> int:
    """The bytes that what a call has returned takes, about."""
    return 100 + sum(v.nbytes for v in found if v is not None) if isinstance(found, list) else 100


def written(told: Sequence[Any]) -> list[Any]:
    """What calls have returned, as JSON has it: numbers of arrays with their type and shape."""
    return [
        of
        if not isinstance(of, list)
        else [None if v is None else [v.dtype.name, v.shape, v.ravel().tolist()] for v in of]
        for of in told
    ]


def read(told: Sequence[Any]) -> list[Any]:
    """The inverse of `written`."""
    return [
        of if not isinstance(of, list) else [None if v is None else np.array(v[2], v[0]).reshape(v[1]) for v in of]
        for of in told
    ]
