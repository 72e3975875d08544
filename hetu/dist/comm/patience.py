"""How long a rank waits for others: its deadline from when it last saw one of them work, and ten times that at most.

A rank works that has communicated since the last look, or that has used its core and is in a call of hetu or has got to
another line. One that waits itself does not, nor does an endless loop in one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ...core.errors import ArgumentError
from .recorder import RankState

ARRIVE, DEADLINE, LEAVE = "HETU_ARRIVE", "HETU_DEADLINE", "HETU_LEAVE"
MOST = 10  # deadlines
BUSY = 0.02  # of a core


def seconds(variable: str, otherwise: float) -> float:
    """The number of seconds that an environment variable gives.

    >>> seconds("NO_SUCH_VARIABLE", 300.0)
    300.0
    """
    text = os.environ.get(variable)
    try:
        found = otherwise if text is None else float(text)
    except ValueError:
        found = 0.0
    if not found > 0:
        raise ArgumentError(f"{variable} is {text!r:.80}", fix="give seconds, a number above 0 such as 600")
    return found


def works(before: RankState, after: RankState, apart: float, anywhere: bool = False) -> bool:
    """Whether a rank has got on between two of its answers, `apart` seconds from each other."""
    if after.steps != before.steps:
        return True
    moved = anywhere or before.inside or after.inside or before.where != after.where
    return after.waiting is None and moved and after.cpu - before.cpu > BUSY * apart


class Patience:
    """One wait. `look` asks the ranks; one that is not waited for in a collective may be `anywhere`."""

    def __init__(self, deadline: float, look: Callable[[], Mapping[int, RankState]], anywhere: bool = False) -> None:
        self.deadline, self.look, self.anywhere = deadline, look, anywhere
        self.states: Mapping[int, RankState] = {}
        self.looked, self.alive = 0.0, 0.0  # seconds from the start of the wait

    def is_over(self, waited: float) -> bool:
        """Whether to give up after so many seconds; however often it is asked, it looks twice in a deadline."""
        if waited < self.looked + self.deadline / 2:
            return False
        states, apart = self.look(), waited - self.looked
        if any(works(self.states[r], s, apart, self.anywhere) for r, s in states.items() if r in self.states):
            self.alive = waited
        self.states, self.looked = {**self.states, **states}, waited  # a rank may be too busy to answer in time
        return waited >= self.alive + self.deadline or waited >= MOST * self.deadline
