"""What ranks that are threads share under one lock: open collectives, messages on their way, who runs, who is lost.

A communication has three points at which a rank may die by plan: before anybody has something of it, when those before
it in the group have its part and those behind have not, and when all have it but it has nothing. So a test walks
through all deaths of a rank: point 3n + k is the k-th of its n-th communication, from 0. A meeting of those that are
left has an outcome for all or none, and no middle point. `threads.py` has the ranks themselves. Left out: how they are
started.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .agreement import CallHistory
from .call import REDUCE, CollectiveCall, is_half, show_array
from .comm import CommError, disagreement
from .recorder import Recorder, readable

BEFORE, BETWEEN, BEHIND = range(3)


class Killed(BaseException):  # so that nothing takes it for an error of the script
    """Raised on a rank that is a thread, wherever it is, it is lost for the others like a process that was killed."""


class Family:
    """A group and all that is split off from it, which are revoked together. `newcomers` came as it was made, and
    `grown` is what it becomes with the next ones."""

    def __init__(self, ranks: tuple[int, ...], newcomers: tuple[int, ...] = ()) -> None:
        self.ranks, self.newcomers, self.revoked = ranks, newcomers, False
        self.grown: Family | None = None


class Council:
    """What members of a family have said, and what the last to come has decided, for all of them."""

    def __init__(self) -> None:
        self.said: dict[int, int] = {}
        self.outcome: Any = None


class Losses:
    """Who has died, and who has yet to. At a `grow` so many join that there are `most`, numbered from `number` on."""

    def __init__(self, number: int, die_at: Mapping[int, int], die_in: Mapping[int, int], most: int) -> None:
        self.number, self.die_at, self.die_in, self.most = number, die_at, die_in, most
        self.counted: Counter[int] = Counter()
        self.lost: set[int] = set()

    def point(self, rank: int, runs: int) -> int | None:
        """At which point of the communication that it begins now, while it makes its step of the number `runs`, from 1,
        a rank dies. Before it has begun: Killed."""
        if runs > self.die_in.get(rank, runs):
            return BETWEEN
        at, point = divmod(self.die_at.get(rank, -1), 3)
        number, self.counted[rank] = self.counted[rank], self.counted[rank] + 1
        if at == number and point == BEFORE:
            raise Killed
        return point if at == number else None


MOST_RANKS = 8
GRACE = 1.0  # seconds


class World:
    """What the ranks share: open collectives, messages on their way, losses, the first failure, the end of patience."""

    def __init__(self, rendezvous: bool, deadline: float, losses: Losses) -> None:
        self.rendezvous, self.deadline, self.until = rendezvous, deadline, time.monotonic() + deadline
        self.losses, self.context = losses, contextvars.copy_context()
        self.start: Callable[[int, Family], None]  # the thread of a rank
        self.councils: dict[tuple[Any, ...], Council] = defaultdict(Council)
        self.changed = threading.Condition()
        self.meetings: dict[tuple[Any, ...], ThreadMeeting] = {}
        self.channels: dict[tuple[Any, ...], deque[Parcel]] = defaultdict(deque)
        self.histories: dict[tuple[Any, ...], list[CallHistory]] = defaultdict(list)  # by group
        self.told: dict[tuple[Any, ...], dict[int, str]] = defaultdict(dict)  # by group and number, of who has come
        self.made: Counter[tuple[Any, ...]] = Counter()  # by rank, groups of the same ranks
        self.results: dict[int, Any] = {}
        self.failure: tuple[int, BaseException] | None = None
        self.running: set[int] = set()
        self.recorders: dict[int, Recorder] = {}

    def join(self) -> None:
        """Wait for all ranks; after a failure or the deadline, a moment for the others to see it."""
        with self.changed:
            self.changed.wait_for(lambda: self.failure or not self.running, self.until - time.monotonic())
            self.changed.wait_for(lambda: not self.running, GRACE)

    def begin(self, family: Family, ranks: Sequence[int]) -> None:
        """These ranks of a family run from now on; with the lock held."""
        self.running.update(ranks)
        self.recorders |= {rank: Recorder() for rank in ranks}
        for rank in ranks:
            self.start(rank, family)

    def grown(self, family: Family) -> Family:
        """A family and those who join it; with the lock held."""
        if family.grown is None:
            first, self.losses.number = self.losses.number, self.losses.number + self.losses.most - len(family.ranks)
            newcomers = tuple(range(first, self.losses.number))
            family.grown = Family((*family.ranks, *newcomers), newcomers)
            self.begin(family.grown, newcomers)
        return family.grown

    def forget(self, family: Family | None = None) -> None:
        """Drop what a family, or each that was revoked or has lost a rank, has left unfinished; with the lock held."""
        lost = self.losses.lost
        for kept in (self.meetings, self.channels, self.told, self.histories):
            for key in [*kept]:
                if key[0] is family or key[0].revoked or not lost.isdisjoint(key[1]):
                    del kept[key]

    def check_end(self) -> None:
        """HetuError if something is unfinished as all ranks have ended well; over MPI the end of the script says it."""
        self.forget()
        for meeting in self.meetings.values():
            rank = min(meeting.calls.keys() - meeting.fetched)
            said = f"the ranks have ended, but nobody has waited for {readable(meeting.calls[rank].noted)}"
            raise CommError(said, fix="call wait() on what the asynchronous call has returned")
        for (_, ranks, source, to), parcels in self.channels.items():
            for parcel in parcels:
                said = f"rank {ranks[to]} has not received {show_array(parcel.x)} of rank {ranks[source]}"
                raise CommError(said, fix="receive what is sent")
        for (_, ranks, _), histories in self.histories.items():
            if absent := sorted({*ranks} - {history.comm.ranks[history.comm.rank] for history in histories}):
                said = f"the ranks have ended, but rank {absent[0]} has not split off the group {ranks}, as others have"
                raise CommError(said, fix="all members of a group call split")
            for history in histories:
                history.roll()
            for history in histories:
                history.judge_last(())


class ThreadMeeting:
    """One collective: the calls of the ranks that have come, then one result per rank until all have fetched it."""

    def __init__(self) -> None:
        self.calls: dict[int, CollectiveCall] = {}
        self.results: list[np.ndarray] = []
        self.fetched: set[int] = set()
        self.until = MOST_RANKS  # who stands here in the group has died as those behind it had not its part

    def check(self) -> None:
        """CommError if the ranks do not agree. Only when all have come is it known who is odd."""
        if len({call.signature for call in self.calls.values()}) > 1:
            entries = {rank: readable(call.noted) for rank, call in self.calls.items()}
            raise disagreement({rank: {0: entry} for rank, entry in entries.items()})


class Parcel:
    """One message on its way."""

    def __init__(self, x: np.ndarray) -> None:
        self.x, self.taken = x, False


def combine(calls: Sequence[CollectiveCall]) -> list[np.ndarray]:
    """The result of every rank, from the calls of all in the order of the ranks; no result aliases an input."""
    first, n = calls[0], len(calls)
    inputs = [call.x.reshape(-1) for call in calls]
    if first.kind == "all_to_all":
        counts = [call.counts or ((call.x.size // n,) * n,) * 2 for call in calls]
        blocks = [np.split(x, np.cumsum(sent)[:-1]) for x, (sent, _) in zip(inputs, counts)]
        for rank, (_, received) in enumerate(counts):
            if (arriving := tuple(row[rank].size for row in blocks)) != tuple(received):
                raise CommError(f"all_to_all: rank {rank} receives {received} elements, {arriving} are sent to it")
        return [np.concatenate([row[rank] for row in blocks]) for rank in range(n)]
    if first.kind == "all_gather":
        return [np.concatenate(inputs)] * n
    if first.kind in ("broadcast", "barrier"):
        return [inputs[first.root].copy()] * n
    total = inputs[0].astype(np.float32 if is_half(first.x.dtype) else first.x.dtype)
    for x in inputs[1:]:
        REDUCE[first.op](total, x, out=total)
    total = total.astype(first.x.dtype, copy=False)
    return [total] * n if first.kind == "all_reduce" else np.split(total, n)
