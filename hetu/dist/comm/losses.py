"""Which ranks that are threads are lost, by plan or by `Killed`, who takes their places, and what the rest agrees on.

A communication has three points at which a rank may die: before anybody has something of it, when those before it in
the group have its part and those behind have not, and when all have it but it has nothing. So a test walks through all
deaths of a rank: point 3n + k is the k-th of its n-th communication, from 0. A meeting of those that are left has an
outcome for all or none, and no middle point. All is done under the lock of the ranks' world.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

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
