"""How far workers may drift apart (BSP, SSP, ASP), and the clocks that measure it.

Every worker counts its steps; count c means that it has finished the clocks 0 .. c-1 and works on clock c. A mode is
one number, the staleness s: a worker may work on clock c only while c - min(clocks) <= s. The store parks the reply of
a worker that must wait. The end of a clock is also the moment that a snapshot keeps: a server says in its answer to one
that a snapshot is due, and a worker then ends its next clock with the wish to keep it (`snapshot.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from ...core.errors import ArgumentError
from ...ranges import Count, Range
from .messages import Message, RefusedError

Staleness = Annotated[float, Range(0, endless=True)]


@dataclass(frozen=True)
class Consistency:
    """A mode. `staleness` is s; `buffered` holds the pushes of a clock back until every worker has finished it.

    A reader at clock c sees all pushes of clocks <= c - s - 1 by anyone, and its own; with `buffered`, exactly those
    of clocks < c. Q. Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
    NeurIPS 2013, section 3, with s as there; L. Valiant, "A Bridging Model for Parallel Computation", 1990, for BSP.

    >>> SSP(3).may_work(clock=7, slowest=4), SSP(3).may_work(clock=8, slowest=4)
    (True, False)
    """

    staleness: Staleness
    buffered: bool = False

    def may_work(self, clock: Count, slowest: Count) -> bool:
        return clock - slowest <= self.staleness

    def __str__(self) -> str:
        if self.buffered:
            return "bsp"
        return "asp" if self.staleness == math.inf else f"ssp:{int(self.staleness)}"


def BSP() -> Consistency:
    """Bulk synchronous: no worker starts clock c+1 before all have finished c; then all updates of c are applied.

    They are added in the order of the workers, so the result is the same, bit for bit, for every order of arrival.
    """
    return Consistency(0, buffered=True)


def SSP(staleness: Count) -> Consistency:
    """Stale synchronous: updates are applied as they come; the fastest worker leads by `staleness` clocks at most."""
    if not isinstance(staleness, int) or isinstance(staleness, bool) or staleness < 0:
        raise ArgumentError(f"SSP({staleness!r})", fix="the staleness is a whole number of clocks, such as SSP(3)")
    return Consistency(staleness)


def ASP() -> Consistency:
    """Asynchronous: updates are applied as they come, and no worker ever waits."""
    return Consistency(math.inf)


def consistency(text: str) -> Consistency:
    """The mode of a text: "bsp", "asp" or "ssp:3".

    >>> str(consistency("ssp:3")), consistency("bsp") == BSP()
    ('ssp:3', True)
    """
    name, _, number = str(text).partition(":")
    if name == "ssp" and number.isdecimal() and len(number) < 10:
        return SSP(int(number))
    if text in ("bsp", "asp"):
        return BSP() if text == "bsp" else ASP()
    raise ArgumentError(f"unknown consistency {text!r}", fix="use bsp, asp, or ssp:3 with any bound for 3")


class Clocks:
    """The clock of every worker that takes part.

    >>> clocks = Clocks(2)
    >>> clocks.tick(0); clocks.tick(0); clocks.slowest, clocks.lead
    (0, 2)
    >>> clocks.remove(1); clocks.slowest
    2
    """

    def __init__(self, workers: int) -> None:
        self.of = dict.fromkeys(range(workers), 0)
        self.slowest = 0  # never falls, also when nobody is left
        self.widest = 0  # the largest lead there ever was
        self.fed: dict[int, dict[int, int]] = {}  # by clock what workers say that they were fed

    @property
    def lead(self) -> int:
        """How far the fastest is ahead of the slowest."""
        return max(self.of.values(), default=self.slowest) - self.slowest

    def tick(self, worker: int) -> None:
        self.of[worker] += 1
        self._update()
        self.widest = max(self.widest, self.lead)

    def note_fed(self, worker: int, clock: int, fed: object) -> None:
        """What a worker says that it was fed in the step that ends a clock, a number, unless it says nothing."""
        if type(fed) is int:
            self.fed.setdefault(clock, {})[worker] = fed
        self.fed = {c: told for c, told in self.fed.items() if c >= self.slowest - 1}  # of others all have the answer

    def fed_alike(self, clock: int) -> int:
        """The slowest; RefusedError if workers were fed differently in the step that ends a clock, for all who wait.

        The odd ones are those that differ from most. Nobody is refused before all have ended that step: who comes first
        may be the odd one.
        """
        told = self.fed.get(clock, {})
        usual, count = next(iter(Counter(told.values()).most_common(1)), (0, 0))
        if count < len(told):
            odd, most = (sorted(w for w in told if (told[w] == usual) is same) for same in (False, True))
            raise RefusedError(
                "fed",
                f"{_named(odd)} had other feeds, or another step, than {_named(most)} at the end of clock {clock}"
                + "; either may be wrong" * (2 * count == len(told)),
                fix="feed all ranks the whole batch: each takes its part; shuffle by one seed",
            )
        return self.slowest

    def remove(self, worker: int) -> None:
        """Go on without this worker."""
        self.of.pop(worker, None)
        self._update()

    def join(self, worker: int) -> None:
        """Take a worker in, at the clock of the slowest unless it takes part already."""
        self.of.setdefault(worker, self.slowest)

    def catch_up(self, worker: int, clock: int, staleness: float) -> list[int]:
        """`worker` was allowed to work on `clock`, so nobody was behind by more than `staleness`: returns who is moved.

        >>> clocks = Clocks(3)
        >>> clocks.catch_up(0, 5, staleness=3), clocks.of
        ([0, 1, 2], {0: 5, 1: 2, 2: 2})
        """
        least = {other: clock if other == worker else clock - staleness for other in self.of}
        behind = [other for other in self.of if self.of[other] < least[other]]
        self.of |= {other: int(least[other]) for other in behind}
        self._update()
        return behind

    def _update(self) -> None:
        if self.of:
            self.slowest = max(self.slowest, min(self.of.values()))


def _named(workers: Sequence[int]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


class Moments:
    """The snapshots that are to come, and the last one. A server keeps none until `keep` is set."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.keep: Callable[[int], None] | None = None  # takes the snapshot of a clock
        self.due = float("inf")  # when the next one should be taken
        self.coming: set[int] = set()  # clocks
        self.last = -1  # the last clock of which one was taken
        self.awaited: dict[tuple[int, int], Message] = {}  # requests for an answer once a snapshot is on disk

    def wish(self, clock: int, now: float) -> dict[str, bool] | None:
        """What a worker that is about to begin `clock` is told, if the end of this clock should be kept."""
        wanted = now >= self.due and not self.coming and clock <= self.clocks.slowest
        return {"snapshot": True} if wanted else None

    def wished(self, end: Message) -> None:
        """Keep the moment after the end of a clock, if the worker wishes so and this server keeps any."""
        if self.keep is not None and end.facts.get("snapshot") is True:
            self.coming.add(end.step + 1)

    def reached(self) -> None:
        """Keep this moment if it is one of those to come."""
        past = {clock for clock in self.coming if clock <= self.clocks.slowest}
        if past and self.keep is not None:
            self.last = max(past)
            self.coming -= past
            self.keep(self.last)

    def forget(self, worker: int) -> None:
        """Nobody waits any more in this life of a worker; in the next, a number is that of another request."""
        self.awaited = {name: message for name, message in self.awaited.items() if name[0] != worker}

    def wait(self, message: Message) -> list[Message]:
        """Hold the request for an answer once the snapshot of its clock is on disk; RefusedError if it cannot be."""
        if self.keep is None:
            raise RefusedError("snapshot", "this server keeps no snapshots", fix="start it with Options(snapshots=...)")
        if message.step > self.clocks.slowest:
            self.coming.add(message.step)  # the worker that heard the wish first may have been killed
        elif message.step > self.last:
            raise RefusedError("snapshot", f"clock {message.step} was not kept: the server was killed", fix="ask anew")
        self.awaited[message.worker, message.seq] = message
        return []
