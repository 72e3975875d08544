"""Steps that survive the loss of ranks: what each begins with is kept twice, and those that are left make it again.

Before a step every rank copies what it keeps of the variables, and sends the next rank a copy of what nobody else has;
then all vote that they have that. When a rank is lost, whatever the others do by then, they meet, take a strategy for
as many as they are, move the values of the last vote to where they belong in one exchange, and make that step again:
one rank's script still waits for its result, another's has it already. So a loss costs one step, and the data are those
of an unbroken run, as every rank is fed the whole batch. What all ranks do between two steps, such as to load, ends
with such a vote, too; what a script has written into the state since is written again behind a step made again. Ranks
that come later join before a step: their script runs from its beginning, and is told what each call has returned.

After the elastic training of Hetu v2 (Haoyang Li et al., 2025) and ULFM's agreement (W. Bland et al., 2013). Left out:
variables on servers, feeds of which each rank is given a part, several executors, and losses before the first step.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np

from ..core.errors import ArgumentError, of_steps
from ..core.executor import MADE, Executor
from ..core.graph import Node
from ..core.placement import Alone, Placement, attach, chosen
from ..core.state import State
from ..core.types import Box
from ..saving import Writing
from .comm.comm import Comm, CommError, RankLostError
from .comm.recorder import Recorder, named
from .cut.on_ranks import OnRanks, spread
from .cut.strategy import Strategy
from .cut.switch import Setting, enter, movable, room
from .elastic_copies import Copies, KeptParts, PastCalls
from .layout.boxes import contains, within
from .layout.fused import Move, fused

AFTER_LOSS = "what follows a loss"  # instead of a line


class AskedStep(NamedTuple):
    """A step: the how many-eth call it is, its sub-graph, and copies of what it was fed."""

    number: int
    name: str
    feed: Mapping[Any, np.ndarray]
    ahead: Any


class Guard:
    """Makes the steps of an executor, whatever becomes of other ranks; so with what else all ranks do between steps."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.asked = executor, spread(executor.placement).source or executor.strategy
        self.comm = spread(executor.placement).comm  # of those that are left, also before they have a strategy
        self.base: Copies | None = None  # of the last vote
        self.spare: Copies | None = None  # to be written next
        self.call: AskedStep | None = None  # that the last vote was about, unless it was behind what is no step
        self.failed: AskedStep | None = None  # whose error the script has seen
        self.changed = True  # whether the values may be others than those of the last vote
        self.seen: Mapping[str, Any] = {}  # what the script had written by then: `State.unseen`
        self.voted = False  # whether a vote has said already that a rank is lost
        self.let_in = -1  # before which call ranks last could come in, since a loss
        self.inside = False  # whether a call is being made
        self.calls = PastCalls()
        self.brought: dict[str, Any] = {}  # the values that it has got, over which its script may write until then
        vars(executor).update(run=self.step, value=self.value, switch=self.switch)
        vars(executor).update({name: partial(self.does, name) for name in ("load", "save", "program")})
        self._watch()

    def _watch(self) -> None:
        """Have what all ranks do between two steps survive losses, too."""
        vars(self.placement)["save"] = self._begun
        vars(self.placement)["agree"] = lambda values: self.beside(lambda: OnRanks.agree(self.placement, values))

    @property
    def placement(self) -> OnRanks:
        """The present one."""
        return spread(self.executor.placement)

    # -- what scripts call -------------------------------------------------------------------------------------------

    @of_steps
    def step(self, name: Any = None, feed: Any = None, *, ahead: Any = None) -> list[Any]:
        """What `Executor.run` returns, as often as it takes."""
        sub, fed = self.executor._asked(name, feed)
        copied = {key: np.array(value) for key, value in sub.match(fed or {}).items()}

        def made() -> list[Any]:
            call = AskedStep(self.calls.heard, sub.name, copied, ahead)
            try:
                values: list[Any] = self._outlive(partial(self._step, call), call)
                return values
            except Exception:
                self.failed = call
                raise

        return [*self._heard(made)]

    def beside(self, act: Callable[[], Any], tell: bool = True) -> Any:
        """What `act`, in which all ranks take part between two steps, returns once it was done on all of them.

        If that is nothing to `tell`, no rank can join from then on.
        """

        def done() -> Any:
            found = act()
            self.changed = True
            self._keep(None)
            return found

        return self._heard(lambda: self._outlive(done), tell)

    def does(self, name: str, *of: Any, **asked: Any) -> Any:
        """What this method of `Executor` does; begun again if a rank is lost meanwhile."""
        return self.beside(partial(getattr(Executor, name), self.executor, *of, **asked), tell=name != "program")

    def value(self, *of: Any, **asked: Any) -> np.ndarray:
        """See `Executor.value`."""
        found: np.ndarray = self.beside(lambda: [Executor.value(self.executor, *of, **asked)])[0]
        return found

    def switch(self, strategy: Any, **asked: Any) -> Any:
        """See `Executor.switch`."""

        def act() -> Any:
            executor, asked_of = self.executor, {n: s.entries for n, s in self.executor.subgraphs.items()}
            wanted = chosen(strategy, asked_of, self.comm, executor.asked["precision"])
            survivable(attach(wanted, self.placement.outputs, self.comm), executor)
            moved = Executor.switch(executor, wanted, **asked)
            self.spare = None
            self._watch()
            return moved

        moved = self.beside(act, tell=False)
        self.asked = self.placement.source or self.executor.strategy
        return moved

    def _begun(self, *of: Any) -> Writing:
        """A save that is begun again if a rank is lost meanwhile, and given up if one is lost before its end."""
        if self.inside:
            return type(self.placement).save(self.placement, *of)
        begun = [Writing()]
        self.beside(lambda: begun.append(type(self.placement).save(self.placement, *of)))
        together, comm = begun[-1].together, self.comm

        def finish(act: Callable[[], object]) -> None:
            _ = together(act) if self.comm is comm else act()

        begun[-1].together = lambda act: self.beside(partial(finish, act))
        return begun[-1]

    def _heard(self, act: Callable[[], Any], tell: bool = True) -> Any:
        """What `act` returns, which those who join are told; one of them is told instead what others have seen."""
        if self.inside:
            return act()
        self.calls.heard += 1
        if self.calls.past:
            return self.calls.past.popleft()
        self._arrive()
        self.inside = True
        try:
            found = act()
        except Exception:
            self.calls.end()  # errors are not told
            raise
        finally:
            self.inside = False
        self.calls.add(found, tell)
        return found

    def _arrive(self) -> None:
        """Put back what this rank has got when it joined: in its past its script may have written other values."""
        state = self.executor.state
        for name, value in self.brought.items():
            state.arrays[name][...] = value
        if self.brought:
            self.brought, self.seen = {}, state.unseen

    # -- one step ----------------------------------------------------------------------------------------------------

    def _outlive(self, act: Callable[[], Any], asked: AskedStep | None = None) -> Any:
        """What `act` returns, begun again after each loss: behind what this has undone, as all others do.

        That is the step before, unless `act` is a step that was voted on, and what the script has written since.
        """
        wrote, undone = self._wrote(), False
        while True:
            try:
                if undone and self.call is not None:
                    self._again(self.call)
                if undone:
                    self._write(wrote)
                return act()
            except RankLostError:
                self._recover()
                undone = asked is None or self.call is not asked

    def _step(self, call: AskedStep) -> list[Any]:
        self._begin(call)
        return Executor.run(self.executor, call.name, call.feed, ahead=call.ahead)

    def _again(self, call: AskedStep) -> None:
        """Make a step that the script has behind it; if it has seen an error, so that all ranks meet it."""
        try:
            self._step(call)
        except RankLostError:
            raise
        except Exception:
            if self.failed is not call:
                raise

    def _wrote(self) -> dict[Node, tuple[Box, Any]]:
        """The values that the script has written since the last vote, and which parts of the variables they are."""
        state, found = self.executor.state, {}
        for v in self.executor.variables if state.unseen is not self.seen else ():
            box = self.placement.box(v)
            if box is not None and state.unseen.get(v.name) is not self.seen.get(v.name):
                found[v] = box, state.arrays[v.name].copy()
        return found

    def _write(self, wrote: Mapping[Node, tuple[Box, Any]]) -> None:
        """Write it again, each rank by itself: others may not have come so far in their scripts."""
        for v, (box, value) in wrote.items():
            part = self.placement.box(v)
            if part is not None and not contains(box, part):
                said = f"a part of what was written to {v.name!r} is lost with a rank, before a step began with it"
                raise CommError(said, fix="start the job again, or write to what each rank keeps whole")
            if part is not None:
                self.executor.state[v.name] = value[within(part, box)]

    def _begin(self, call: AskedStep) -> None:
        """Keep what the step begins with, and let in those who wait."""
        self._keep(call)
        if not self.calls.let_in(call.number) or self.let_in == call.number:
            return
        self.let_in, began = call.number, time.monotonic()
        before, self.comm = self.comm, self.comm.grow()
        if self.comm is not before:
            newcomers = self.comm.newcomers
            self._rebuild()
            self._keep(call)
            self._tell(f"{named(newcomers)} joined", began)

    def _keep(self, call: AskedStep | None) -> None:
        """Copy what a step begins with, or what is between two steps has made, and agree that all ranks have."""
        executor = self.executor
        if changed := self.changed or executor.state.unseen is not self.seen:
            if self.spare is None:
                held = KeptParts(self.placement.strategy, self.comm.ranks, executor.variables)
                self.spare = Copies(held, self.comm.rank)
            self.spare.take(executor)
        if not self.comm.vote(True):
            self.voted = True
            raise RankLostError(f"the step of {call.name!r}" if call is not None else "what is between two steps")
        if changed and self.spare is not None:
            left, self.base = self.base, self.spare
            self.spare = left if left is not None and left.held is self.base.held else None
        sub = executor.subgraphs[call.name] if call is not None else None
        self.call, self.seen = call, executor.state.unseen
        self.changed = sub is not None and (bool(sub.updates) or sub.random)

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
        entries = {n: s.entries for n, s in executor.subgraphs.items()}
        strategy = chosen(self.asked, entries, comm, executor.asked["precision"])
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
            self.let_in = len(self.calls.told) + 1
        except RankLostError:
            self._recover()
        self.brought = {name: array.copy() for name, array in self.executor.state.arrays.items()}

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
            told = json.dumps(
                [held.ranks, held.strategy.to_json(), self.calls.before(self.call and self.call.number)]
            ).encode()
        text = np.frombuffer(told, np.uint8) if self.base else np.empty(0, np.uint8)
        size = np.array([text.size])
        comm.broadcast(size, first)
        text = np.resize(text, size) if comm.rank != first else text.copy()
        comm.broadcast(text, first)
        if self.base is not None:
            return self.base.held
        ranks, strategy, calls = json.loads(text.tobytes())
        self.calls.hear(calls)
        return KeptParts(Strategy.from_json(strategy), ranks, self.executor.variables)


_guarded = WeakKeyDictionary[Recorder, "ref[Guard]"]()  # of each rank


def survivable(placement: Placement, executor: Executor) -> OnRanks:
    """The placement; ArgumentError for one under which not all of a step can be made again."""
    strategy = spread(placement).strategy
    if strategy.local:
        said = f"each rank is fed its own part of {strategy.local[0]!r}, which would be lost with it"
        raise ArgumentError(said, fix="feed the whole batch: leave out local=")
    return spread(movable(placement, executor))


def guard(executor: Executor) -> None:
    """Have an executor on ranks that may be lost make steps that survive it."""
    placement = executor.placement
    if isinstance(placement, Alone) or not placement.comm.elastic:
        return
    comm, before = placement.comm, _guarded.get(placement.comm.recorder, lambda: None)
    if (other := before()) is not None and other.inside:
        return  # which has made this one, to look at a value
    survivable(placement, executor)
    del other
    gc.collect()  # an executor and what guards it know each other
    if before() is not None:
        said = "a second executor in a job that survives losses, whose steps would have to be made again too"
        raise ArgumentError(said, fix="make one executor with the sub-graphs of both, or delete the first")
    made = Guard(executor)
    if comm.recorder in _guarded:
        made.calls.until = 0  # who joins would make the first one
    _guarded[comm.recorder] = ref(made)
    if comm.newcomers and comm.ranks[comm.rank] in comm.newcomers:
        made.join()


MADE.append(guard)
