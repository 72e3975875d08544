"""A virtual clock: honest times of a parallel schedule on a machine with fewer cores than ranks.

`VirtualClock` wraps a communicator. While a rank computes, its clock advances by the CPU time of its own thread; a
collective sets the clocks of its group to the latest of them plus the cost of a modeled link; a message carries the
time at which it arrives. So the schedule really runs (bubbles, order and operator costs are real), and only the wire is
a model. It counts neither contention between groups nor work of other threads (keep BLAS at one thread). Ranks that are
threads of one process can take turns, so that none is slowed by what the others do to its caches and cores.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...ranges import AtLeast0, AtLeast1, Count, Endless
from .call import CollectiveCall, PeerMessage
from .comm import Comm, Handle
from .line import CallLine
from .recorder import Raw


@dataclass(frozen=True, slots=True)
class Link:
    """`latency` in seconds and `bandwidth` in bytes/s of every connection (the alpha-beta model of Hockney, 1994).

    >>> Link(latency=0.5, bandwidth=100.0).seconds("all_reduce", ranks=2, nbytes=50)
    1.5
    """

    latency: AtLeast0 = 50e-6
    bandwidth: Endless = 100e6
    called: ClassVar = "a link", "give its latency and bandwidth"

    def message(self, nbytes: AtLeast0) -> float:
        """The time of one message in seconds."""
        return self.latency + nbytes / self.bandwidth

    def seconds(self, kind: str, ranks: AtLeast1, nbytes: Count) -> float:
        """The time of a collective over `ranks`, each giving `nbytes`, by the usual ring and tree algorithms."""
        peers, tree = ranks - 1, math.ceil(math.log2(ranks))
        return {
            "all_reduce": 2 * peers * self.message(nbytes / ranks),
            "reduce_scatter": peers * self.message(nbytes / ranks),
            "all_gather": peers * self.message(nbytes),
            "all_to_all": peers * self.message(nbytes / ranks),
            "broadcast": tree * self.message(nbytes),
            "barrier": tree * self.latency,
        }[kind]


Network = Callable[[Sequence[int]], Link]  # the link that a group of ranks communicates over
Sent = tuple[str, float, float]  # what was communicated, from when to when


class _Clock:
    """The time of one rank, shared by all its groups; stopped while it communicates."""

    def __init__(self, timer: Callable[[], float], turn: threading.Semaphore | None) -> None:
        self.now, self.mark, self.computes, self.timer, self.turn = 0.0, 0.0, False, timer, turn
        self.noted: list[Sent] | None = None
        self.go()

    def note(self, *sent: Any) -> None:
        if self.noted is not None:
            self.noted.append(sent)

    def read(self) -> float:
        """Charge the computing since `go`, and return the time."""
        if self.computes:
            before, self.mark = self.mark, self.timer()
            self.now += self.mark - before
        return self.now

    def stop(self) -> float:
        """The same, and others may compute."""
        self.read()
        if self.computes and self.turn is not None:
            self.turn.release()
        self.computes = False
        return self.now

    def go(self) -> None:
        if self.turn is not None and not self.computes:
            self.turn.acquire()
        self.computes, self.mark = True, self.timer()


class VirtualClock(Comm):
    """`comm` with a clock; `now` is this rank's time in virtual seconds. `timer` is the source of compute time.

    `link` joins all ranks, or is a function from ranks to the link over which they communicate. Ranks that share a
    `turn` compute one at a time; who has it ends with `rest`.

    >>> from hetu.dist import run_ranks
    >>> def wait_for_slowest(comm):
    ...     work = iter([0.0, 2.0 + comm.rank])  # seconds on the timer: at the start, and when the barrier is reached
    ...     clocked = VirtualClock(comm, Link(latency=0.5), timer=lambda: next(work, 2.0 + comm.rank))
    ...     clocked.barrier()
    ...     return clocked.now
    >>> run_ranks(2, wait_for_slowest)
    [3.5, 3.5]
    """

    def __init__(
        self,
        comm: Comm,
        link: Link | Network | None = None,
        timer: Callable[[], float] = time.thread_time,
        turn: threading.Semaphore | None = None,
    ) -> None:
        fixed = Link() if link is None or callable(link) else link
        self._wrap(comm, link if callable(link) else lambda ranks: fixed, _Clock(timer, turn))

    def _wrap(self, comm: Comm, network: Network, clock: _Clock) -> VirtualClock:
        super().__init__(comm.rank, comm.ranks, comm.deadline, comm.recorder)
        self.inner, self.network, self._clock = comm, network, clock
        self._last: _Clocked | None = None
        return self

    @property
    def now(self) -> float:
        return self._clock.read()

    def clock(self) -> float:
        return self.now

    def skip(self) -> None:
        """What was done since `now` was read is not charged."""
        self._clock.mark = self._clock.timer()

    def rest(self) -> None:
        """This rank computes no more, until it communicates."""
        self._clock.stop()

    def note(self, rows: list[Sent] | None) -> None:
        """From now on append (kind, start, end) of all that this rank communicates to `rows`; None ends it."""
        self._clock.noted = rows

    def progress(self) -> None:
        self._clock.stop()  # a real library must be polled, but the modeled wire works alone
        self.inner.progress()
        self._clock.go()

    def _noted(self, call: CollectiveCall, what: str = "") -> CollectiveCall:
        return self.inner._noted(call, what)

    def _start(self, call: CollectiveCall) -> Handle:
        began = np.array([self._clock.stop()])
        stamp = self.inner.all_reduce_async(began, began, "max")
        handle, cost = self.inner._start(call), self._cost(call)
        self._last = made = _Clocked(self._clock, call.kind, handle, stamp, began, cost, self._last)
        self._clock.go()
        return made

    def _cost(self, call: CollectiveCall) -> float:
        """Seconds of a collective over the slowest link of its group; an all_to_all takes the link of each pair."""
        if call.kind != "all_to_all":
            return self.network(self.ranks).seconds(call.kind, self.world_size, call.x.nbytes)
        me, share = self.ranks[self.rank], call.x.nbytes / self.world_size
        return sum(self.network((me, peer)).message(share) for peer in self.ranks if peer != me)

    def note_messages(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], line: CallLine) -> list[Raw]:
        return []  # `inner` notes them

    def _exchange(self, sends: Sequence[PeerMessage], recvs: Sequence[PeerMessage], noted: Sequence[Raw]) -> None:
        wire, stamps = self._clock.stop(), []
        for to, x in sends:  # one after the other on this rank's wire; the sender does not wait for them
            link = self.network((self.ranks[self.rank], self.ranks[to]))
            wire += link.message(x.nbytes) - link.message(0)
            stamps.append((to, np.array([wire + link.message(0)])))
        arrivals = [(source, np.zeros(1)) for source, _ in recvs]
        # A stamp travels before its message on the same channel, so the pairs stay together.
        self.inner.exchange(_interleave(stamps, sends), _interleave(arrivals, recvs))
        for (source, out), (_, stamp) in zip(recvs, arrivals):
            link = self.network((self.ranks[source], self.ranks[self.rank]))
            self._clock.note(f"from rank {self.ranks[source]}", stamp[0] - link.message(out.nbytes), stamp[0])
        self._clock.now = max([self._clock.now, *(float(stamp[0]) for _, stamp in arrivals)])
        self._clock.go()

    def _split(self, group: tuple[int, ...]) -> Comm:
        return VirtualClock.__new__(VirtualClock)._wrap(self.inner.split(group), self.network, self._clock)


def _interleave(first: Sequence[PeerMessage], second: Sequence[PeerMessage]) -> list[PeerMessage]:
    return [message for pair in zip(first, second) for message in pair]


class _Clocked(Handle):
    """A collective that starts when its last rank has come and the one before it has ended, and then takes its cost."""

    def __init__(
        self,
        clock: _Clock,
        kind: str,
        handle: Handle,
        stamp: Handle,
        began: np.ndarray,
        cost: float,
        before: _Clocked | None,
    ) -> None:
        self.clock, self.kind, self.handle, self.stamp = clock, kind, handle, stamp
        self.began, self.cost, self.before = began, cost, before
        self.end: float | None = None

    def wait(self) -> None:
        self.clock.stop()
        self.handle.wait()
        self.clock.now = max(self.clock.now, self.ended())
        self.clock.go()

    def ended(self) -> float:
        if self.end is None:
            self.stamp.wait()
            start = float(self.began[0])
            start = start if self.before is None else max(start, self.before.ended())
            self.end = start + self.cost
            self.clock.note(self.kind, start, self.end)
            self.before = None  # a long run must not keep the whole chain
        return self.end
