"""How far workers may drift apart (BSP, SSP, ASP), and the clocks that measure it.

Every worker counts its steps; count c means that it has finished the clocks 0 .. c-1 and works on clock c. A mode is
one number, the staleness s: a worker may work on clock c only while c - min(clocks) <= s. The store parks the reply of
a worker that must wait.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from ...core.errors import ArgumentError
from ...ranges import Count, Range
from .messages import RefusedError

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
