"""A virtual clock: honest times of a parallel schedule on a machine with fewer cores than ranks.

`VirtualClock` wraps a communicator. Each rank's clock advances by the CPU time of its own thread while it
computes; a collective sets the clocks of its group to the latest of them plus the cost of a modelled link; a message
carries the time at which it arrives. So the schedule really runs (bubbles, order and operator costs are real) and
only the wire is a model. Ignored on purpose: contention between groups, and work done by other threads (keep BLAS
at one thread).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .comm import Call, Comm, Handle, Message
from .recorder import Raw


@dataclass(frozen=True, slots=True)
class Link:
    """`latency` in seconds and `bandwidth` in bytes/s of every connection (the alpha-beta model of Hockney, 1994).

    >>> Link(latency=0.5, bandwidth=100.0).seconds("all_reduce", ranks=2, nbytes=50)
    1.5
    """

    latency: float = 50e-6
    bandwidth: float = 100e6

    def message(self, nbytes: int) -> float:
        return self.latency + nbytes / self.bandwidth

    def seconds(self, kind: str, ranks: int, nbytes: int) -> float:
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


class _Clock:
    """The time of one rank, shared by all its groups; stopped while it communicates."""

    def __init__(self, timer: Callable[[], float]) -> None:
        self.now, self.timer, self.mark = 0.0, timer, timer()

    def stop(self) -> float:
        """Charge the computing since `go`, and return the time."""
        self.now += self.timer() - self.mark
        self.mark = self.timer()
        return self.now

    def go(self) -> None:
        self.mark = self.timer()


class VirtualClock(Comm):
    """`comm` with a clock; `now` is this rank's time in virtual seconds. `timer` is the source of compute time.

    >>> from hetu.dist import run_ranks
    >>> def wait_for_slowest(comm):
    ...     work = iter([0.0, 2.0 + comm.rank])  # seconds on the timer: at the start, and when the barrier is reached
    ...     clocked = VirtualClock(comm, Link(latency=0.5), timer=lambda: next(work, 2.0 + comm.rank))
    ...     clocked.barrier()
    ...     return clocked.now
    >>> run_ranks(2, wait_for_slowest)
    [3.5, 3.5]
    """

    def __init__(self, comm: Comm, link: Link | None = None, timer: Callable[[], float] = time.thread_time) -> None:
        self._wrap(comm, link or Link(), _Clock(timer))

    def _wrap(self, comm: Comm, link: Link, clock: _Clock) -> VirtualClock:
        super().__init__(comm.rank, comm.ranks, comm.deadline, comm.recorder)
        self.inner, self.link, self._clock, self._last = comm, link, clock, None
        return self

    @property
    def now(self) -> float:
        now = self._clock.stop()
        self._clock.go()
        return now

    def progress(self) -> None:
        self.inner.progress()

    def _noted(self, call: Call) -> Call:
        return self.inner._noted(call)

    def _start(self, call: Call) -> Handle:
        began = np.array([self._clock.stop()])
        stamp = self.inner.all_reduce_async(began, began, "max")
        cost = self.link.seconds(call.kind, self.world_size, call.x.nbytes)
        self._last = _Clocked(self._clock, self.inner._start(call), stamp, began, cost, self._last)
        self._clock.go()
        return self._last

    def _message(self, source: int, to: int, x: np.ndarray) -> Raw:
        return ()  # `inner` notes it

    def _exchange(self, sends: Sequence[Message], recvs: Sequence[Message], noted: Sequence[Raw]) -> None:
        arrival, stamps = self._clock.stop() + self.link.latency, []
        for to, x in sends:  # one after the other on this rank's wire; the sender does not wait for them
            arrival += x.nbytes / self.link.bandwidth
            stamps.append((to, np.array([arrival])))
        arrivals = [(source, np.zeros(1)) for source, _ in recvs]
        # A stamp travels before its message on the same channel, so the pairs stay together.
        self.inner.exchange(_interleave(stamps, sends), _interleave(arrivals, recvs))
        self._clock.now = max([self._clock.now, *(float(stamp[0]) for _, stamp in arrivals)])
        self._clock.go()

    def _split(self, group: tuple[int, ...]) -> Comm:
        return VirtualClock.__new__(VirtualClock)._wrap(self.inner.split(group), self.link, self._clock)


def _interleave(first: Sequence[Message], second: Sequence[Message]) -> list[Message]:
    return [message for pair in zip(first, second) for message in pair]


class _Clocked(Handle):
    """A collective that ends its cost after the latest of its ranks came and the one before it on the link ended."""

    def __init__(
        self, clock: _Clock, handle: Handle, stamp: Handle, began: np.ndarray, cost: float, before: _Clocked | None
    ) -> None:
        self.clock, self.handle, self.stamp, self.began, self.cost, self.before = (
            clock,
            handle,
            stamp,
            began,
            cost,
            before,
        )
        self.end: float | None = None

    def test(self) -> bool:
        return self.handle.test()

    def wait(self) -> None:
        self.clock.stop()
        self.handle.wait()
        self.clock.now = max(self.clock.now, self.ended())
        self.clock.go()

    def ended(self) -> float:
        if self.end is None:
            self.stamp.wait()
            start = float(self.began[0])
            self.end = self.cost + (start if self.before is None else max(start, self.before.ended()))
            self.before = None  # a long run must not keep the whole chain
        return self.end
