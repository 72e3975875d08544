"""Steps that survive the loss of ranks: what each leaves is kept twice, and those that are left make the next again.

Behind a step every rank copies what it keeps of the variables, and sends the next rank a copy of what nobody else has;
then all vote that they have that, and only now their scripts go on. So all scripts are in the same step, or what else
all ranks do, such as to load, which ends with a vote, too; as does the start, of the initial values. When a rank is
lost, whatever the others do by then, they meet, take a strategy for as many as they are, move the values of the last
vote to where they belong in one exchange, and begin again what they were in. So a loss costs one step, and the data are
those of an unbroken run, as every rank is fed the whole batch. If both copies of a value are lost, all go back to the
newest save that is whole. Ranks that come later join before a step: their script runs from its beginning, and is told
what each call has returned.

After the elastic training of Hetu v2 (Haoyang Li et al., 2025) and ULFM's agreement (W. Bland et al., 2013). Left out:
variables on servers, feeds of which each rank is given a part, several executors, and a script that catches an error,
writes values, and loses a rank before its next step.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, ref

import numpy as np

from ..core.errors import ArgumentError, of_steps
from ..core.executor import MADE, Executor
from ..core.placement import Alone, attach, chosen
from ..core.state import FilePath, State
from ..job import endings
from ..saving import WentBack, Writing, given_up
from .comm.comm import Comm, CommError, RankLostError, of_thread
from .comm.recorder import Recorder, named
from .comm.world import world
from .cut.on_ranks import OnRanks, spread
from .cut.strategy import Strategy
from .cut.switch import Setting, go_over, movable, room
from .elastic_copies import KeptParts, LastVote, PastCalls, begin_again, go_back, surviving

OTHERS = "what ranks do that go on with others"  # instead of a line


class ElasticExecutor(Executor):
    """What an executor on ranks that may be lost becomes: its calls, in which all ranks take part, survive it."""

    guard: Guard

    @of_steps
    def run(self, name: Any = None, feed: Any = None, *, ahead: Any = None) -> list[Any]:
        run, (sub, fed) = super().run, self._asked(name, feed)
        act = partial(run, sub.name, fed, ahead=ahead)
        return [*self.guard.does(act, bool(sub.updates) or sub.random, step=bool(sub.updates))]

    def value(self, *of: Any, **asked: Any) -> np.ndarray:
        value = super().value
        found: np.ndarray = self.guard.does(lambda: [value(*of, **asked)])[0]
        return found

    def program(self, *of: Any, **asked: Any) -> Any:
        """See `Executor.program`, which cannot be told to those who join."""
        return self.guard.does(partial(super().program, *of, **asked), False, tell=False)

    def switch(self, strategy: Any, **asked: Any) -> Any:
        guard, switch = self.guard, super().switch

        def act() -> Any:
            moved = switch(strategy, **asked)
            guard.watch()
            return moved

        moved = guard.does(act, tell=False)
        guard.asked = guard.placement.source or self.strategy
        return moved

    def save(self, path: FilePath, *of: Any, **extra: Any) -> None:
        self.guard.does(self.guard.noting(path, partial(super().save, path, *of, **extra)), False)

    def load(self, path: FilePath, **of: Any) -> dict[str, Any]:
        load = partial(super().load, path, **of)
        found: dict[str, Any] = self.guard.does(load if of else self.guard.noting(path, load))
        return found


_begun: list[FilePath] = []  # the newest save of this process, until somebody waits for it


def _look_at_save() -> None:
    """Say so if it is not whole, as all ranks that are left have ended."""
    for said in filter(None, map(given_up, _begun)):
        if world().rank == 0:
            print(f"hetu: {said}", file=sys.stderr, flush=True)


class ElasticPlacement(OnRanks):
    """What a placement of such an executor becomes."""

    guard: Guard

    def agree(self, values: Mapping[str, float]) -> Mapping[str, float]:
        found: Mapping[str, float] = self.guard.does(lambda: OnRanks.agree(self.guard.placement, values), False)
        return found

    def save(self, state: State, variables: Any, path: FilePath, extra: Any) -> Writing:
        """A save that is begun again if a rank is lost meanwhile, and given up if one is lost before its end."""
        guard = self.guard

        def save() -> Writing:  # by the placement that is there then
            return OnRanks.save(guard.placement, state, variables, path, extra)

        if guard.inside:
            return save()
        begun = [Writing()]
        guard.does(guard.noting(path, lambda: begun.append(save())), False)
        together, comm = begun[-1].together, guard.comm
        _begun[:] = [path] if of_thread.get() is None else []

        def finish(act: Callable[[], object]) -> None:
            _begun.clear()
            _ = together(act) if guard.comm is comm else act()

        begun[-1].together = lambda act: guard.does(partial(finish, act), False)
        return begun[-1]


class Guard:
    """Makes what all ranks do together, whatever becomes of some."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.asked = executor, spread(executor.placement).source or executor.strategy
        self.comm = spread(executor.placement).comm  # of those that are left, also before they have a strategy
        self.vote, self.calls = LastVote(), PastCalls()
        self.inside = False  # whether a call is being made
        self.steps, self.saves = 0, dict[str, int]()  # that were made, and by then; the newest save is the last
        self.back: WentBack | None = None  # of a rank that joins, what its first call raises
        executor.__class__ = surviving(type(executor), ElasticExecutor)
        cast(ElasticExecutor, executor).guard = self
        self.watch()

    def watch(self) -> None:
        """Have what the present placement does survive losses, too."""
        self.placement.__class__ = surviving(type(self.placement), ElasticPlacement)
        cast(ElasticPlacement, self.placement).guard = self

    @property
    def placement(self) -> OnRanks:
        """The present one."""
        return spread(self.executor.placement)

    def begin(self) -> None:
        """Keep the initial values; whoever joins gets those of the others, who have seen its executor begin."""
        if self.comm.ranks[self.comm.rank] not in self.comm.newcomers:
            self._outlive(lambda: None, True)
        elif not self._commit(lambda: self._fill(self.placement, self.executor.state), True)[0]:
            self._recover()

    # -- what all ranks do together ----------------------------------------------------------------------------------

    def does(self, act: Callable[[], Any], changes: bool = True, *, tell: bool = True, step: bool = False) -> Any:
        """What `act` returns once it was done on all ranks, which those who join are told, unless it `changes` nothing.

        changes: whether values may be others behind it; tell: whether those who join can be told what it returns, who
        cannot come behind it otherwise; step: whether to count it as a step.
        """
        if self.inside:
            return act()
        self.calls.heard += 1
        if self.calls.are_told:
            return self.calls.next()
        self.inside = True
        try:
            self._look_at_script()
            self._let_in()
            found = self._outlive(act, changes)
        except WentBack as back:
            self.calls.add(back, tell)
            raise
        except Exception:
            self.calls.end()  # errors are not told
            raise
        finally:
            self.inside = False
        self.steps += step
        self.calls.add(found, tell)
        return found

    def _outlive(self, act: Callable[[], Any], changes: bool) -> Any:
        """What `act` returns, begun again after each loss: behind what this has undone of calls that ended in errors,
        as other ranks may not have met these yet."""
        undone = list[Callable[[], Any]]()

        def again() -> Any:
            for other in undone:
                try:
                    other()
                except RankLostError:
                    raise
                except Exception:  # which the script has seen
                    continue
            return act()

        while True:
            try:
                is_whole, found = self._commit(again, changes)
            except Exception:
                self.vote.erred.append(act)
                raise
            if is_whole:
                self.vote.erred.clear()
                return found
            self._recover()
            undone = [*self.vote.erred]

    def _commit(self, act: Callable[[], Any], changes: bool) -> tuple[bool, Any]:
        """Do `act`, and copy what it may have changed: whether all that are left have, by a vote, and what it returns.

        If not all have, it counts on none: they meet in `_recover`.
        """
        found = None
        try:
            found = act()
            if changes:
                self.vote.take(self.executor, self.placement.strategy, self.comm)
            here = True
        except RankLostError:
            self.comm.revoke()  # others may wait for this one elsewhere
            here = False
        is_whole = self.comm.vote(here)
        if is_whole:
            self.vote.passed(self.executor.state, changes)
        return is_whole, found

    def _look_at_script(self) -> None:
        """Take up what the script has written since the last vote; of a newcomer, who was in its past, it is undone."""
        if self.calls.heard == self.calls.first:
            self.vote.put_back(self.executor.state)
            self._rewind()
        elif self.vote.took_up(self.executor.state):
            self._outlive(lambda: None, True)

    def _let_in(self) -> None:
        """Go on with those who wait, before a call in some."""
        if not self.calls.let_in():
            return
        before, began = self.comm, time.monotonic()
        try:
            self.comm = before.grow()
        except RankLostError:  # on all ranks
            self._recover()
            return
        if self.comm is before:
            return
        if self._commit(self._rebuild, True)[0]:
            self._tell(f"{named(self.comm.newcomers)} joined", began)
        else:
            self._recover()

    def noting(self, path: FilePath, act: Callable[[], Any]) -> Callable[[], Any]:
        """The same, behind which there is a save to go back to."""
        name, made = os.path.abspath(path), self.steps

        def noted() -> Any:
            found = act()
            self.saves.pop(name, None)
            self.saves[name] = made
            return found

        return noted

    # -- after a loss ------------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Meet those that are left, and bring the values of the last vote to where each of them keeps them now."""
        began, before, is_whole = time.monotonic(), self.comm.ranks, False
        while not is_whole:
            self.comm = self.comm.shrink()
            is_whole, back = self._commit(self._rebuild, True)
        lost = [rank for rank in before if rank not in self.comm.ranks]
        what = f"{named(lost) if lost else 'a newcomer'} lost"
        if back is None:
            self._tell(what, began)
            return
        name, extra, rewound = back
        undone, self.steps = self.steps - self.saves[name], self.saves[name]
        how = "made again" if rewound else "undone, but not their place in the data"
        what = f"{what} with the copies of their values, back to {os.path.relpath(name)!r}"
        self._tell(f"{what}: {undone} step{'s' * (undone != 1)} {how}", began)
        self.back = WentBack(extra) if rewound else None
        if not self.calls.are_told:
            self._rewind()

    def _rewind(self) -> None:
        back, self.back = self.back, None
        if back is not None:
            raise back

    def _tell(self, what: str, began: float) -> None:
        comm, builder = self.comm, self.placement.builder
        took, go = 1000 * (time.monotonic() - began), "goes" if self.comm.world_size == 1 else "go"
        comm.recorder.event = f"{what}: {named(comm.ranks)} {go} on with {builder!r}"  # alike on all of them
        if comm.rank == 0:
            print(f"hetu: {comm.recorder.event}, after {took:.0f} ms", file=sys.stderr, flush=True)

    def _rebuild(self) -> tuple[str, Any, bool] | None:
        """Go over to a strategy for those that are here now, with the values of the last vote, or those of a save: then
        its path, what it has beside the values, and whether scripts go on from there."""
        executor, comm = self.executor, self.comm
        comm.at(OTHERS)
        try:
            entries = {n: s.entries for n, s in executor.subgraphs.items()}
            strategy = chosen(self.asked, entries, comm, executor.asked["precision"])
            outputs = [n for s in executor.subgraphs.values() for n in s.written.outputs]
            placement = spread(movable(attach(strategy, outputs, comm), executor))
            fresh = room(executor, placement)
            found = go_over(executor, [Setting(strategy, placement)], fresh, partial(self._fill, placement))
        finally:
            comm.at(None)
        executor.state.dirty = False
        self.watch()
        return found

    def _fill(self, placement: OnRanks, fresh: State) -> tuple[str, Any, bool] | None:
        """Fill `fresh` from what the members of a group have of the last vote; see `_rebuild`."""
        if (held := self._held(placement.comm)) is None:
            begin_again(self.executor, placement, fresh)
            return None
        try:
            self.vote.move(held, self.executor.variables, placement, fresh)
        except ArgumentError as error:
            if found := go_back(self.saves, self.executor, placement, fresh):
                return found
            said = f"{error.message}: it was lost with a rank and the copy with the one behind it, both in one step"
            fix = "start the job again, and save as it runs: ht.Checkpoints, or fit(checkpoint=...)"
            raise CommError(f"{said}; no save is there", fix=fix) from None
        return None

    def _held(self, comm: Comm) -> KeptParts | None:
        """How the values of the last vote lie, which the first that has some tells those who join; None without any."""
        copies, calls = self.vote.copies, self.calls
        flags = np.empty(comm.world_size, np.int64)
        comm.all_gather(np.array([copies is not None]).astype(np.int64), flags)
        if flags.all() and copies is not None:
            return copies.held
        if not flags.any():
            if calls.heard or calls.first:
                raise CommError("all ranks are lost that had the values", fix="start the job again")
            return None
        first, text = int(np.argmax(flags)), np.empty(0, np.uint8)
        if copies is not None:
            held = copies.held
            told = [held.ranks, held.strategy.to_json(), sorted(held.stale), self.steps, self.saves, calls.written()]
            text = np.frombuffer(json.dumps(told).encode(), np.uint8).copy()
        size = np.array([text.size])
        comm.broadcast(size, first)
        text = text if comm.rank == first else np.empty(size, np.uint8)
        comm.broadcast(text, first)
        if copies is not None:
            return copies.held
        ranks, strategy, stale, self.steps, self.saves, past = json.loads(text.tobytes())
        calls.hear(past)
        return KeptParts(Strategy.from_json(strategy), ranks, self.executor.variables, stale)


_guarded = WeakKeyDictionary[Recorder, "ref[Guard]"]()  # of each rank


def guard(executor: Executor) -> None:
    """Have an executor on ranks that may be lost make steps that survive it."""
    if isinstance(placement := executor.placement, Alone) or not placement.comm.elastic:
        return
    recorder = placement.comm.recorder
    before = _guarded.get(recorder, lambda: None)
    if (other := before()) is not None and other.inside:
        return  # which has made this one, to look at a value
    movable(placement, executor)
    del other
    if before() is not None:
        gc.collect()  # an executor and what guards it know each other
    if before() is not None:
        said = "a second executor in a job that survives losses, whose steps would have to be made again too"
        raise ArgumentError(said, fix="make one executor with the sub-graphs of both, or delete the first")
    made = Guard(executor)
    if recorder in _guarded:
        made.calls.until = 0  # who joins would make the first one
    _guarded[recorder] = ref(made)
    made.begin()


MADE.append(guard)
endings.insert(0, _look_at_save)
