"""How long a rank waits for others: its deadline from when it last saw one of them work, and ten times that at most.

A rank works that has communicated since the last look, or that has used its core and is in a call of hetu or has got to
another line. One that waits itself does not, nor does an endless loop in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .recorder import RankState

ARRIVE, DEADLINE, LEAVE, SILENCE = "HETU_ARRIVE", "HETU_DEADLINE", "HETU_LEAVE", "HETU_SILENCE"
MOST = 10  # deadlines
AWHILE = 0.1  # seconds after which one that waits leaves its core to others, and says that it waits
BUSY = 0.02  # of a core
LOOKS = 4  # as who calls hetu again and again may be seen just between two calls


def works(before: RankState, after: RankState, apart: float, anywhere: bool = False) -> bool:
    """Whether a rank has got on between two of its answers, `apart` seconds from each other."""
    if after.steps != before.steps:
        return True
    moved = anywhere or before.inside or after.inside or before.where != after.where
    return after.waiting is None and moved and after.cpu - before.cpu > BUSY * apart


class Patience:
    """One wait. `look` asks the ranks; one that is not waited for in a collective may be `anywhere`, and for `most`."""

    def __init__(
        self, deadline: float, look: Callable[[], Mapping[int, RankState]], anywhere: bool = False, most: float = MOST
    ) -> None:
        self.deadline, self.look, self.anywhere, self.most = deadline, look, anywhere, most
        self.states: Mapping[int, RankState] = {}
        self.looked, self.alive = 0.0, 0.0  # seconds from the start of the wait

    def is_over(self, waited: float) -> bool:
        """Whether to give up after so many seconds; however often it is asked, it looks `LOOKS` times in a deadline."""
        if waited < self.looked + self.deadline / LOOKS:
            return False
        states, apart = self.look(), waited - self.looked
        if any(works(self.states[r], s, apart, self.anywhere) for r, s in states.items() if r in self.states):
            self.alive = waited
        self.states, self.looked = {**self.states, **states}, waited  # a rank may be too busy to answer in time
        return waited >= self.alive + self.deadline or waited >= self.most * self.deadline
