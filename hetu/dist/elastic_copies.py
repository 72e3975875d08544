"""What ranks keep for those that are lost, and for those who come: copies of values, and what calls have returned.

`elastic.py` says when. Each rank keeps its own parts of the variables as they are behind a step, and of the rank before
it those that nobody else has. Left out: more than one copy, so neighbors that are lost in one step take it with them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from typing import Any

import numpy as np

from ..core.backend import aligned_empty
from ..core.errors import CheckpointError
from ..core.executor import Executor
from ..core.graph import Node
from ..core.state import State, initial_value
from ..core.types import Box
from ..saving import WentBack, rewinds, under_way
from .comm.comm import Comm
from .cut.on_ranks import OnRanks, spread
from .cut.strategy import Strategy
from .layout.boxes import contains, sizes, volume
from .layout.fused import Move, fused

ALIGNED = 64  # bytes
EVERY = 8  # calls, before one of which ranks that wait come in
ROOM = 64 << 20  # bytes of what calls have returned, beyond which nobody can be told all of it, and joins


def surviving(own: type, ours: type) -> type:
    """What an object of the class `own`, which may be a user's, becomes: what that adds is done once, as a script is,
    and what it calls is `ours`, which is done as often as it takes."""
    if issubclass(own, ours) or issubclass(ours, own):
        return max(own, ours, key=lambda each: len(each.__mro__))
    return type(own.__name__, (own, ours), {"__module__": own.__module__})


class KeptParts:
    """What the ranks of a group keep of the variables under a strategy: boxes, and which of them nobody else has."""

    def __init__(
        self, strategy: Strategy, ranks: Sequence[int], variables: Sequence[Node], stale: Collection[str] = ()
    ) -> None:
        self.strategy, self.ranks = strategy, tuple(ranks)
        self.stale = {*stale}  # of which ranks keep newer values of their own parts than of those that others had
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
        theirs = [{v: box for v, box in of.items() if v.name not in self.stale} for of in self.alone]
        return [[] if at is None else [self.boxes[at], theirs[at - 1]] for at in places]


class Copies:
    """What one rank keeps of the values between two steps: its own parts, and those that only the rank before it has.

    The parts that travel lie in front, so that they are sent as they lie.
    """

    def __init__(self, held: KeptParts, rank: int) -> None:
        count = len(held.ranks)
        self.held, self.after, self.before = held, (rank + 1) % count, (rank - 1) % count
        self.own, self.sent = _room(held.boxes[rank], held.alone[rank])
        self.theirs, self.received = _room(held.alone[self.before], held.alone[self.before])

    def take(self, executor: Executor) -> None:
        """Copy the values as they are; a collective."""
        self.held.stale.clear()
        arrays = executor.state.arrays
        for node, kept in self.own.items():
            kept[...] = arrays[node.name]
        sends = [(self.after, self.sent)] if self.sent.size else []
        executor.placement.comm.exchange(sends, [(self.before, self.received)] if self.received.size else [])


class LastVote:
    """What all ranks had when they last voted, and what this one's script has seen since."""

    def __init__(self) -> None:
        self.copies: Copies | None = None  # of the values
        self.spare: Copies | None = None  # to be written next
        self.seen: Mapping[str, Any] = {}  # what the script had written by then: `State.unseen`
        self.erred: list[Callable[[], Any]] = []  # calls behind it that ended in an error

    def take(self, executor: Executor, strategy: Strategy, comm: Comm) -> None:
        """Copy the values, for the next vote; a collective."""
        if self.spare is None or self.spare.held.strategy is not strategy or self.spare.held.ranks != comm.ranks:
            self.spare = Copies(KeptParts(strategy, comm.ranks, executor.variables), comm.rank)
        self.spare.take(executor)

    def passed(self, state: State, took: bool) -> None:
        """All have voted that they are here, and have copies if they `took` some."""
        if took:
            self.copies, self.spare = self.spare, self.copies
        self.seen = state.unseen

    def put_back(self, state: State) -> None:
        """Give all variables the values of then."""
        for node, kept in (self.copies.own if self.copies is not None else {}).items():
            state.arrays[node.name][...] = kept
        self.seen = state.unseen

    def took_up(self, state: State) -> bool:
        """Whether the script has written something since; as all scripts write alike, no vote is needed to keep it,
        but for parts that only one rank has, of which others have old copies until all take new ones: True then."""
        before, self.seen = self.seen, state.unseen
        if self.copies is None or before is self.seen:
            return False
        written = {v.name for v in self.copies.own if self.seen.get(v.name) is not before.get(v.name)}
        for node, kept in self.copies.own.items():
            if node.name in written:
                kept[...] = state.arrays[node.name]
        self.copies.held.stale |= written
        return any(node.name in written for of in self.copies.held.alone for node in of)

    def move(self, held: KeptParts, variables: Sequence[Node], placement: OnRanks, fresh: State) -> None:
        """Fill `fresh` with the values of then, of which the members of a group have what `held` says; a collective.

        ArgumentError if nobody has a part of one any more.
        """
        comm, copies = placement.comm, self.copies
        had, after = held.on(comm), KeptParts(placement.strategy, comm.ranks, variables)
        mine = [copies.own, copies.theirs] if copies is not None else []
        moves, given, made = {}, {}, {}
        for v in variables:
            boxes = {rank: [of[v] for of in both if v in of] for rank, both in enumerate(had)}
            moves[v.name] = Move(v.dtype, boxes, {rank: (of[v],) for rank, of in enumerate(after.boxes) if v in of})
            given[v.name] = [of[v] for of in mine if v in of]
            made[v.name] = [fresh.arrays[v.name]] if v.name in fresh.arrays else []
        fused(moves, placement.strategy.hosts).run(comm, given, made)


def begin_again(executor: Executor, placement: OnRanks, fresh: State) -> None:
    """Fill `fresh` with initial values, where a rank was lost before all had copies of some."""
    for v in (v for v in executor.variables if v.name in fresh.arrays):
        if placement.box(v) == spread(executor.placement).box(v):
            fresh.arrays[v.name][...] = executor.state.arrays[v.name]
        else:
            fresh.arrays[v.name][...] = initial_value(fresh.variables[v.name], fresh.seed)


def go_back(
    saves: Iterable[str], executor: Executor, placement: OnRanks, fresh: State
) -> tuple[str, Mapping[str, Any], bool] | None:
    """Fill `fresh` from the last of these saves that is whole: its path, what it has beside the values, and whether
    scripts go on from there. A collective; None if none is."""
    futures.wait([*under_way])
    placement.comm.barrier()  # from here on no save becomes whole, or is removed
    for path in reversed([*saves]):
        with suppress(CheckpointError):
            extra = placement.load(fresh, executor.variables, path)
            known = np.array([rewinds.get()(extra)]).astype(np.int64)
            placement.comm.all_reduce(known, known, "max")  # a rank that joins has not come to where the others are
            return path, extra, bool(known[0])
    return None


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
        self.first = 0  # of a rank that has joined, the number of the first one that it makes itself
        self.told: list[Any] = []  # what they have returned
        self.until = math.inf  # the last call before which one can join: what it has returned cannot be told
        self.room = ROOM

    @property
    def are_told(self) -> bool:
        """Whether the present call is one that others have made before this rank joined."""
        return self.heard < self.first

    def next(self) -> Any:
        """What the present call is told."""
        found = self.told[self.heard - 1]
        if isinstance(found, WentBack):
            raise found
        return found

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

    def let_in(self) -> bool:
        """Whether ranks may join before the present call."""
        if self.heard > self.until:
            self.told.clear()
        return self.heard % EVERY == 0 and self.first < self.heard <= self.until

    def written(self) -> list[Any]:
        """What those are told who make the present call as their first, as JSON has it: numbers with type and shape."""
        return [*map(_written, self.told)]

    def hear(self, told: Sequence[Any]) -> None:
        """Be told the past by others."""
        self.told, self.first = [*map(_read, told)], len(told) + 1
        self.room = ROOM - sum(map(_room_of, self.told))


def _room_of(found: Any) -> int:
    """The bytes that what a call has returned takes, about."""
    return 100 + sum(v.nbytes for v in found if v is not None) if isinstance(found, list) else 100


def _written(found: Any) -> tuple[str, Any]:
    if isinstance(found, WentBack):
        return "went back", found.extra
    if not isinstance(found, list):
        return "value", found
    return "arrays", [None if v is None else [v.dtype.name, v.shape, v.ravel().tolist()] for v in found]


def _read(told: tuple[str, Any]) -> Any:
    kind, of = told
    if kind == "arrays":
        return [None if v is None else np.array(v[2], v[0]).reshape(v[1]) for v in of]
    return WentBack(of) if kind == "went back" else of
