"""Steps that survive the loss of ranks: what each begins with is kept twice, and those that are left make it again.

Before a step every rank copies what it keeps of the variables, and sends the next rank a copy of what nobody else has;
then all vote that they have that. When a rank is lost, whatever the others do by then, they meet, take a strategy for
as many as they are, move the values of the last vote to where they belong in one exchange, and make that step again:
one rank's script still waits for its result, another's has it already. So a loss costs one step, and the data are those
of an unbroken run, as every rank is fed the whole batch. Ranks that come later join before a step: their script runs
from its beginning, and is told what each call has returned, until it has caught up.

After the elastic training of Hetu v2 (Haoyang Li et al., 2025) and ULFM's agreement (W. Bland et al., 2013). Left out:
variables on servers, feeds of which each rank is given a part, several executors, and losses before the first step.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np

from ..core.backend import aligned_empty
from ..core.errors import ArgumentError
from ..core.executor import MADE, Executor
from ..core.graph import Node
from ..core.placement import Alone, attach, chosen
from ..core.state import State
from ..core.types import Box
from ..saving import Writing
from .comm.comm import Comm, CommError, RankLostError
from .comm.recorder import Recorder, named
from .cut.on_ranks import OnRanks, spread
from .cut.strategy import Strategy
from .cut.switch import Setting, enter, movable, room
from .layout.boxes import contains, sizes, volume
from .layout.fused import Move, fused

ALIGNED = 64  # bytes
EVERY = 8  # calls, before one of which ranks that wait come in
AFTER_LOSS = "what follows a loss"  # instead of a line
ROOM = 64 << 20  # bytes of what calls have returned, beyond which nobody can be told all of it, and joins


class AskedStep(NamedTuple):
    """A step: the how many-eth call it is, its sub-graph, and copies of what it was fed."""

    number: int
    name: str
    feed: Mapping[Any, np.ndarray]
    ahead: Any


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
        for node, copy in self.own.items():
            copy[...] = arrays[node.name]
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


class Guard:
    """Makes the steps of an executor, whatever becomes of other ranks; so with what else all ranks do between steps."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.asked = executor, executor.strategy
        self.comm = spread(executor.placement).comm  # of those that are left, also before they have a strategy
        self.base: Copies | None = None  # of the last vote
        self.spare: Copies | None = None  # to be written next
        self.call: AskedStep | None = None  # that the last vote was about
        self.changed = True  # whether the values may be others than those of the last vote
        self.voted = False  # whether a vote has said already that a rank is lost
        self.let_in = -1  # before which call ranks last could come in, since a loss
        self.heard = 0  # how many calls this rank's script has made
        self.told: list[Any] | None = []  # what each has returned, for those who join, as far as there is room
        self.room = ROOM
        self.past = deque[Any]()  # what this rank, who has joined, is yet to be told
        vars(executor)["run"] = self.step
        vars(executor)["load"] = lambda *of, **asked: self.beside(partial(Executor.load, executor, *of, **asked))
        self._watch()

    def _watch(self) -> None:
        """Have what all ranks do between two steps survive losses, too."""
        vars(self.placement)["save"] = self._save
        vars(self.placement)["agree"] = lambda values: self.beside(lambda: OnRanks.agree(self.placement, values))

    @property
    def placement(self) -> OnRanks:
        """The present one."""
        return spread(self.executor.placement)

    # -- what scripts call -------------------------------------------------------------------------------------------

    def step(self, name: Any = None, feed: Any = None, *, ahead: Any = None) -> list[Any]:
        """What `Executor.run` returns, as often as it takes."""
        sub, fed = self.executor._asked(name, feed)
        copied = {key: np.array(value) for key, value in (fed or {}).items()}
        return list(self._heard(lambda: self._made(AskedStep(self.heard, sub.name, copied, ahead))))

    def beside(self, act: Callable[[], Any]) -> Any:
        """What `act`, in which all ranks take part between two steps, returns once it was done on all of them."""

        def done() -> Any:
            while True:
                try:
                    found = act()
                    self._agree("what is between two steps")
                    self.changed = True
                    return found
                except RankLostError:
                    self._recover()
                    if self.call is not None:
                        self._made(self.call)

        return self._heard(done)

    def _save(self, *of: Any) -> Writing:
        """A save that is begun again if a rank is lost meanwhile, and given up if one is lost before its end."""
        begun = [Writing()]
        self.beside(lambda: begun.append(type(self.placement).save(self.placement, *of)))
        together, comm = begun[-1].together, self.comm

        def finish(act: Callable[[], object]) -> None:
            _ = together(act) if self.comm is comm else act()

        begun[-1].together = lambda act: self.beside(partial(finish, act))
        return begun[-1]

    def _heard(self, act: Callable[[], Any]) -> Any:
        """What `act` returns, which those who join are told; one of them is told instead what others have seen."""
        self.heard += 1
        if self.past:
            return self.past.popleft()
        found = act()
        if self.told is not None:
            self.told.append(found)
            self.room -= 100 + sum(v.nbytes for v in found if v is not None) if isinstance(found, list) else 100
            self.told = self.told if self.room > 0 else None
        return found

    # -- one step ----------------------------------------------------------------------------------------------------

    def _made(self, asked: AskedStep) -> list[Any]:
        """What a step returns; before it the one that a loss has undone is made once more, as all others do."""
        todo, values = deque([asked]), list[Any]()
        while todo:
            try:
                self._begin(todo[0])
                values = Executor.run(self.executor, todo[0].name, todo[0].feed, ahead=todo[0].ahead)
                todo.popleft()
            except RankLostError:
                self._recover()
                if self.call is not None and self.call is not todo[0]:
                    todo.appendleft(self.call)
        return values

    def _begin(self, call: AskedStep) -> None:
        """Keep what the step begins with, and let in those who wait."""
        self._keep(call)
        if call.number % EVERY or self.let_in == call.number or self.told is None:
            return
        self.let_in, began = call.number, time.monotonic()
        before, self.comm = self.comm, self.comm.grow()
        if self.comm is not before:
            newcomers = self.comm.newcomers
            self._rebuild()
            self._keep(call)
            self._tell(f"{named(newcomers)} joined", began)

    def _keep(self, call: AskedStep) -> None:
        """Copy what a step begins with, and agree that all ranks have."""
        if self.changed:
            if self.spare is None:
                held = KeptParts(self.placement.strategy, self.comm.ranks, self.executor.variables)
                self.spare = Copies(held, self.comm.rank)
            self.spare.take(self.executor)
        self._agree(f"the step of {call.name!r}")
        if self.changed and self.spare is not None:
            left, self.base = self.base, self.spare
            self.spare = left if left is not None and left.held is self.base.held else None
        self.call, self.changed = call, bool(self.executor.subgraphs[call.name].updates)

    def _agree(self, what: str) -> None:
        """RankLostError on all ranks if one of them is lost."""
        if not self.comm.vote(True):
            self.voted = True
            raise RankLostError(what)

    # -- after a loss ------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Meet those that are left, and bring the values of the last vote to where each of them keeps them now."""
        began, before = time.monotonic(), self.comm.ranks
        while True:
            self.comm.revoke()  # others may wait for this one elsewhere
            if not self.voted:
                self.comm.vote(False)
            self.comm, self.voted, self.let_in = self.comm.shrink(), False, -1
            self.comm.at(AFTER_LOSS)
            try:
                self._rebuild()
                break
            except RankLostError:
                continue
            finally:
                self.comm.at(None)
        lost = [rank for rank in before if rank not in self.comm.ranks]
        self._tell(f"{named(lost) if lost else 'a newcomer'} lost", began)

    def _tell(self, what: str, began: float) -> None:
        comm, builder = self.comm, self.placement.builder
        took, go = 1000 * (time.monotonic() - began), "goes" if self.comm.world_size == 1 else "go"
        comm.recorder.event = f"{what}: {named(comm.ranks)} {go} on with {builder!r}"  # alike on all of them
        if comm.rank == 0:
            print(f"hetu: {comm.recorder.event}, after {took:.0f} ms", file=sys.stderr, flush=True)

    def _rebuild(self) -> None:
        """Go over to a strategy for those that are here now, with the values of the last vote."""
        executor, comm = self.executor, self.comm
        strategy = chosen(self.asked, {n: s.entries for n, s in executor.subgraphs.items()}, comm)
        outputs = [n for s in executor.subgraphs.values() for n in s.written.outputs]
        placement = spread(movable(attach(strategy, outputs, comm), executor))
        fresh = room(executor, placement)
        placement.start(fresh, executor.asked | {"entries": [*executor.subgraphs], "shared state": False})
        self.receive(placement, fresh)
        enter(executor, new := Setting(strategy, placement), placement, fresh)
        executor.settings, executor.state.dirty, self.spare, self.changed = [new], False, None, True
        self._watch()

    def join(self) -> None:
        """Come in as a newcomer, whose executor the others have seen begin."""
        try:
            self.receive(self.placement, self.executor.state)
        except RankLostError:
            self._recover()

    def receive(self, placement: OnRanks, fresh: State) -> None:
        """Fill `fresh` from what the members of a group have of the last vote."""
        comm, variables, base = placement.comm, self.executor.variables, self.base
        had, after = self._held(comm).on(comm), KeptParts(placement.strategy, comm.ranks, variables)
        mine = [base.own, base.theirs] if base is not None else []
        moves, given, made = {}, {}, {}
        for v in variables:
            held = {rank: [boxes[v] for boxes in of if v in boxes] for rank, of in enumerate(had)}
            moves[v.name] = Move(v.dtype, held, {rank: (of[v],) for rank, of in enumerate(after.boxes) if v in of})
            given[v.name] = [of[v] for of in mine if v in of]
            made[v.name] = [fresh.arrays[v.name]] if v.name in fresh.arrays else []
        try:
            exchange = fused(moves, placement.strategy.hosts)
        except ArgumentError as error:
            raise CommError(
                f"{error.message}: it was lost with a rank and the copy with the one behind it, both in one step",
                fix="start the job again; fit(checkpoint=..., resume=True) goes on from the last checkpoint",
            ) from None
        exchange.run(comm, given, made)

    def _held(self, comm: Comm) -> KeptParts:
        """How the values of the last vote lie, which the first that has some tells those who join."""
        flags = np.empty(comm.world_size, np.int64)
        comm.all_gather(np.array([self.base is not None]).astype(np.int64), flags)
        if not flags.any():
            raise CommError("a rank is lost before the first step", fix="start the job again")
        first, told = int(np.argmax(flags)), b""
        if self.base is not None:
            if flags.all():
                return self.base.held
            held = self.base.held
            told = json.dumps([held.ranks, held.strategy.to_json(), written(self.told or ())]).encode()
        text = np.frombuffer(told, np.uint8) if self.base else np.empty(0, np.uint8)
        size = np.array([text.size])
        comm.broadcast(size, first)
        text = np.resize(text, size) if comm.rank != first else text.copy()
        comm.broadcast(text, first)
        if self.base is not None:
            return self.base.held
        ranks, strategy, calls = json.loads(text.tobytes())
        self.told = read(calls)
        self.past, self.let_in = deque(self.told), len(self.told) + 1
        return KeptParts(Strategy.from_json(strategy), ranks, self.executor.variables)


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


_guarded = WeakKeyDictionary[Recorder, "ref[Executor]"]()  # the executor of each rank


def guard(executor: Executor) -> None:
    """Have an executor on ranks that may be lost make steps that survive it."""
    placement = executor.placement
    if isinstance(placement, Alone) or not placement.comm.elastic:
        return
    strategy, comm = spread(movable(placement, executor)).strategy, placement.comm
    if strategy.local:
        said = f"each rank is fed its own part of {strategy.local[0]!r}, which would be lost with it"
        raise ArgumentError(said, fix="feed the whole batch: leave out local=")
    if (other := _guarded.get(comm.recorder)) is not None and other() is not None:
        said = "a second executor in a job that survives losses, whose steps would have to be made again too"
        raise ArgumentError(said, fix="make one executor with the sub-graphs of both")
    _guarded[comm.recorder] = ref(executor)
    made = Guard(executor)
    if comm.newcomers and comm.ranks[comm.rank] in comm.newcomers:
        made.join()


MADE.append(guard)
