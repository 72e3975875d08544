"""Ranks as threads of one process: for tests, notebooks and reading. NumPy releases the lock, so they do overlap.

`run_ranks(n, fn)` calls `fn(comm)` on n threads. Reductions add in the order of the ranks, so results are the same in
every run. Lines are compared as processes compare them (`agreement.py`). All state is in one `World` under one lock.
With `rendezvous=True` a send waits for its receive, as large MPI messages do, which shows that a program needs no
buffers. Ranks can be lost by plan, which is the same in every run, too (`thread_world.py`). It is fast for a few ranks
only; for processes see `mpi.py`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from operator import and_
from typing import Any, TypeVar

import numpy as np

from ...answers import LONGEST
from ...core.errors import ArgumentError, HetuError, user_site
from ...core.leaf import SCOPE, scope_now
from ...ranges import AtLeast1, Count, Endless
from .agreement import CallHistory
from .alike import WeighedFeed
from .call import CollectiveCall, PeerMessage, show_array
from .comm import Comm, CommError, DeadlineError, Handle, RankLostError, of_thread
from .patience import AWHILE
from .recorder import RankState, Raw
from .thread_world import BETWEEN, MOST_RANKS, Family, Killed, Losses, Parcel, ThreadMeeting, World, combine

R = TypeVar("R")


class _Told:
    """A short text of every rank of a group, of which some may not have come."""

    def __init__(self, comm: ThreadComm, texts: dict[int, str]) -> None:
        self.comm, self.of = comm, texts

    def has_come(self) -> bool:
        return len(self.of) == self.comm.world_size

    def texts(self, entry: Raw) -> list[str]:
        comm = self.comm
        late = f"rank {comm.ranks[comm.rank]} is far ahead of others"
        with comm._world.changed:
            comm.wait(self.has_come, lambda: late, entry, lambda: {*range(comm.world_size)} - self.of.keys())
        return [text for _, text in sorted(self.of.items())]


class ThreadComm(Comm):
    """A rank's view of a group of threads; made by `run_ranks`."""

    survives = True

    def __init__(self, world: World, family: Family, rank: int, ranks: Sequence[int], deadline: float) -> None:
        super().__init__(rank, ranks, deadline, world.recorders[ranks[rank]])
        self._world, self._family, self._started, self._told = world, family, 0, 0
        self.elastic = bool(world.losses.die_at or world.losses.die_in or world.losses.most)
        self.newcomers = family.newcomers if self.ranks == family.ranks else ()
        self.regrouped = bool(self.newcomers)
        self.history = CallHistory(self)
        with world.changed:
            world.made[family, rank, self.ranks] += 1
            self._group = family, self.ranks, world.made[family, rank, self.ranks]
            world.histories[self._group].append(self.history)

    def clock(self) -> float:
        """See `Comm.clock`; without what other threads compute meanwhile."""
        return time.thread_time()

    def wait(
        self,
        ready: Callable[[], bool],
        late: Callable[[], str],
        noted: Raw,
        absent: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """Wait, with the lock held, until `ready`; an error when a rank has failed, the deadline passes, one at a place
        that is `absent` is lost, or the group is revoked."""
        world, recorder = self._world, self.recorder
        recorder.waiting = noted
        over = min(time.monotonic() + self.deadline, world.until)

        def gone() -> Collection[int] | None:
            if absent is None:
                return None
            lost = world.losses.lost & {self.ranks[place] for place in absent()}
            return lost if lost or self._family.revoked else None

        def come() -> bool:
            return ready() or world.failure is not None or gone() is not None

        if not world.changed.wait_for(come, max(0.0, min(over - time.monotonic(), AWHILE))):
            recorder.waits()
        if not world.changed.wait_for(come, max(0.0, over - time.monotonic())):
            raise DeadlineError(
                f"{late()} before the deadline\n{self.report()}".rstrip(),
                fix="all ranks must call the same collectives, in the same order",
            )
        recorder.waiting = ()
        if not ready():
            if world.failure is not None:
                raise CommError(f"{late()}: rank {world.failure[0]} has failed") from world.failure[1]
            raise RankLostError(late(), sorted(gone() or ()))

    @property
    def revoked(self) -> bool:
        """See `revoke`."""
        return self._family.revoked

    def revoke_all(self) -> None:
        """See `revoke`."""
        with self._world.changed:
            self._family.revoked = True
            self._world.changed.notify_all()

    def agreed(self, word: int) -> int:
        """The bits that the words of all members have in common; 0 if one is lost."""
        members = self._family.ranks
        agreed: int = self._meet("vote", word, lambda said: reduce(and_, (said.get(rank, 0) for rank in members)))
        return agreed

    def somebody_comes(self) -> bool:
        """Whether somebody can be let in now."""
        return self.world_size < self._world.losses.most

    def shrunken(self) -> Comm:
        """See `shrink`."""

        def decide(said: Mapping[int, int]) -> Family:
            self._world.forget(self._family)
            return Family(tuple(rank for rank in self._family.ranks if rank in said))

        return self._over(self._meet("shrink", 1, decide))

    def grown(self) -> Comm:
        """See `grow`."""
        with self._world.changed:
            family = self._world.grown(self._family)
        return self._over(family)

    def _over(self, family: Family) -> Comm:
        """This rank in another family, which numbers what it communicates anew."""
        world, me = self._world, self.ranks[self.rank]
        self.recorder.rings.clear()
        comm = ThreadComm(world, family, family.ranks.index(me), family.ranks, self.deadline)
        of_thread.set(comm)
        return comm

    def _meet(self, what: str, word: int, decide: Callable[[Mapping[int, int]], Any]) -> Any:
        """What the last to come `decide`s from the words of those that still run, and of who has died behind it."""
        world, family, me = self._world, self._family, self.ranks[self.rank]
        noted = self.recorder.note(self.ranks, what, np.empty(0), series=what)
        with world.changed:
            dies = world.losses.point(me, self.recorder.runs)
            council = world.councils[family, what, noted[2]]
            council.said[me] = word
            world.changed.notify_all()

            def ready() -> bool:
                if council.outcome is None and world.running & {*family.ranks} <= council.said.keys():
                    council.outcome = decide(council.said)
                return council.outcome is not None

            if dies is not None:
                ready()
                raise Killed
            self.wait(ready, lambda: f"{what} of ranks {self.ranks}", noted)
        return council.outcome

    def tell(self, text: str) -> _Told:
        """Tell all ranks of the group a short text, which all do in the same order."""
        with self._world.changed:
            told = self._world.told[*self._group, self._told]
            told[self.rank] = text
            if len(told) == self.world_size:  # those who wait for it hold it
                del self._world.told[*self._group, self._told]
            self._told += 1
            self._world.changed.notify_all()
        return _Told(self, told)

    def asked(self, ranks: Sequence[int]) -> dict[int, RankState]:
        return {rank: self._world.recorders[rank].state() for rank in ranks}

    def _start(self, call: CollectiveCall) -> Handle:
        self.history.add(self.history.kinds.get(call.signature) or self.history.learn(call), call)
        world, key, me = self._world, (self._family, self.ranks, self._started), self.ranks[self.rank]
        self._started += 1  # the n-th collective of a group meets the n-th of every other member
        dies = world.losses.point(me, self.recorder.runs)
        with world.changed:
            self._refuse_revoked(call, dies)
            meeting = world.meetings.setdefault(key, ThreadMeeting())
            meeting.calls[self.rank] = call
            if dies == BETWEEN:
                meeting.until = min(meeting.until, self.rank)
            if len(meeting.calls) == self.world_size:
                # The last to come computes for all, while the others' inputs cannot change.
                meeting.check()
                meeting.results = combine([meeting.calls[r] for r in range(self.world_size)])
                world.changed.notify_all()
        if dies is not None:
            raise Killed
        return _Pending(self, key, meeting, call)

    def _refuse_revoked(self, what: object, dies: int | None) -> None:
        if self._family.revoked:
            if dies is not None:  # by plan, whether the others have been faster or not
                raise Killed
            raise RankLostError(f"rank {self.ranks[self.rank]} begins {what}")

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        world = self._world
        dies = world.losses.point(self.ranks[self.rank], self.recorder.runs)
        with world.changed:
            self._refuse_revoked("messages", dies)
            parcels = [(to, Parcel(x if world.rendezvous else x.copy())) for to, x in sends]
            for to, parcel in parcels[: len(sends) // 2 if dies == BETWEEN else None]:
                world.channels[self._family, self.ranks, self.rank, to].append(parcel)
            world.changed.notify_all()
            if dies is not None:
                raise Killed
            for (source, out), entry in zip(recvs, noted[len(sends) :]):
                self._take(world.channels[self._family, self.ranks, source, self.rank], source, out, entry)
            for (to, parcel), entry in zip(parcels if world.rendezvous else (), noted):
                late = f"rank {self.rank} waits for rank {to} to receive {show_array(parcel.x)}"
                self.wait(partial(getattr, parcel, "taken"), partial(str, late), entry, partial(tuple, (to,)))

    def _take(self, channel: deque[Parcel], source: int, out: np.ndarray, entry: Raw) -> None:
        """Receive the next parcel of `channel`; the lock is held."""
        late = f"rank {self.rank} waits for {show_array(out)} from rank {source}"
        self.wait(partial(bool, channel), partial(str, late), entry, partial(tuple, (source,)))
        parcel = channel.popleft()
        if (parcel.x.size, parcel.x.dtype) != (out.size, out.dtype):
            raise CommError(
                f"rank {source} sent {show_array(parcel.x)}, rank {self.rank} receives {show_array(out)}",
                fix="send and receive in the same order, with the same size and dtype",
            )
        out.reshape(-1)[:] = parcel.x.reshape(-1)
        parcel.taken = True
        self._world.changed.notify_all()

    def compare_feeds(self, noted: Sequence[WeighedFeed]) -> None:
        self.history.note_feeds(noted)

    def _split(self, group: tuple[int, ...]) -> Comm:
        members = [self.ranks[r] for r in group]
        return ThreadComm(self._world, self._family, group.index(self.rank), members, self.deadline)


class _Pending(Handle):
    """A collective that some ranks may not have reached yet."""

    def __init__(self, comm: ThreadComm, key: tuple[Any, ...], meeting: ThreadMeeting, call: CollectiveCall) -> None:
        self.comm, self.key, self.meeting, self.call, self.finished = comm, key, meeting, call, False

    def wait(self) -> None:
        with self.comm._world.changed:
            if not self.finished:
                self.comm.wait(self._has_come, self._late, self.call.noted, self._absent)
                self._fetch()

    def _has_come(self) -> bool:
        return bool(self.meeting.results) and self.comm.rank < self.meeting.until

    def _absent(self) -> Collection[int]:
        """The places of the group that have given nothing, or not to this rank."""
        came = [place for place in self.meeting.calls if place < self.meeting.until or self.comm.rank < place]
        return {*range(self.comm.world_size)}.difference(came)

    def _fetch(self) -> None:
        self.call.out.reshape(-1)[:] = self.meeting.results[self.comm.rank].reshape(-1)
        self.finished = True
        self.meeting.fetched.add(self.comm.rank)
        if len(self.meeting.fetched) == self.comm.world_size:
            self.comm._world.meetings.pop(self.key, None)  # a loss may have dropped it

    def _late(self) -> str:
        absent = [self.comm.ranks[r] for r in range(self.comm.world_size) if r not in self.meeting.calls]
        return f"{self.call}: rank {self.comm.ranks[self.comm.rank]} waits for ranks {absent}, who have not come"


def count_names_apart() -> None:
    """From here on this thread counts names by itself, so that ranks that are threads build equal models."""
    SCOPE.set(copy.deepcopy(scope_now()))


def _start(world: World, fn: Callable[[Comm], Any], rank: int, family: Family) -> None:
    """Start the thread of a rank.

    It has a copy of the caller's context, so that scopes opened around `run_ranks` hold inside, and counts names by
    itself, so that all ranks give the parts of a model the same names.
    """
    context = world.context.copy()
    context.run(count_names_apart)
    of = world, fn, rank, family
    threading.Thread(target=context.run, args=(_run, *of), name=f"rank {rank}", daemon=True).start()


def _run(world: World, fn: Callable[[Comm], Any], rank: int, family: Family) -> None:
    """The body of a rank's thread."""
    world.recorders[rank].thread = threading.get_ident()
    comm = ThreadComm(world, family, family.ranks.index(rank), family.ranks, world.deadline)
    of_thread.set(comm)
    try:
        world.results[rank] = fn(comm)
    except Killed:
        with world.changed:
            world.losses.lost.add(rank)
    except BaseException as error:
        with world.changed:
            world.failure = world.failure or (rank, error)
    finally:
        with world.changed:
            world.recorders[rank].ended = "its loss" if rank in world.losses.lost else "the end of its function"
            world.running.discard(rank)
            world.changed.notify_all()


def run_ranks(
    n: int,
    fn: Callable[[Comm], R],
    *,
    rendezvous: bool = False,
    deadline: Endless = 60.0,
    die_at: Mapping[int, Count] | None = None,
    die_in: Mapping[int, Count] | None = None,
    most: AtLeast1 | None = None,
) -> list[R]:
    """Call `fn(comm)` on `n` ranks (at most 8) at once and return their results in the order of the ranks.

    The first exception of any rank ends the others' waits and is raised here, with a note that names its rank. Ranks
    that end well must have received what was sent, awaited what was begun, made the same steps, and called like
    collectives from their lines in one order.
    The whole run takes at most `deadline` seconds, or DeadlineError says which ranks were still busy.

    `die_in` plans losses: `{2: 10}` has rank 2 die in the middle of the first communication of its step 10, from 0; so
    does `die_at`: 3n, 3n + 1 or 3n + 2 for the beginning, middle or end of its n-th communication, in steps or not.
    The others get a RankLostError there, and go on with `comm.shrink()`; the result of a lost rank is None. If fewer
    than `most` ranks are left, new ones, numbered from `n` on, join at a `comm.grow()` of the others.

    >>> run_ranks(3, lambda comm: comm.rank ** 2)
    [0, 1, 4]
    >>> import numpy as np
    >>> from hetu.dist import RankLostError
    >>> def sum_of_ranks(comm):
    ...     try:
    ...         comm.barrier()
    ...     except RankLostError:
    ...         comm = comm.shrink()
    ...     x = np.array([comm.ranks[comm.rank]])
    ...     comm.all_reduce(x, x)
    ...     return int(x[0])
    >>> run_ranks(4, sum_of_ranks, die_at={1: 0})
    [5, None, 5, 5]
    """
    for ranks in (n, most or n):
        if not 1 <= ranks <= MOST_RANKS:
            fix = f"use 1 to {MOST_RANKS}; heturun starts more, as processes"
            raise ArgumentError(f"{ranks} ranks as threads", fix=fix)
    deadline = min(deadline, LONGEST)
    world = World(rendezvous, deadline, Losses(n, die_at or {}, die_in or {}, most or 0))
    world.start = partial(_start, world, fn)
    with world.changed:
        world.begin(Family(tuple(range(n))), range(n))
    world.join()
    if world.failure is not None:
        rank, error = world.failure
        error.add_note(f"raised on rank {rank} of {n}")
        if isinstance(error, HetuError) and error.site is None:  # `fn` is hetu's own, and no line of the user's ran
            error.site = user_site()
        raise error
    if world.running:
        raise DeadlineError(f"ranks {sorted(world.running)} of {n} still ran after {deadline:g} s")
    world.check_end()
    if not world.results:
        raise RankLostError(f"{n} ranks as threads", sorted(world.losses.lost))
    return [world.results.get(r) for r in sorted(world.recorders)]  # type: ignore[misc]
