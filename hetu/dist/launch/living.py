"""Which ranks of an elastic job are left: said as it changes, and whether they are enough.

Files tell it: the guard of a rank writes that it is lost (`comm/guard.py`), the first rank who has joined.
"""

from __future__ import annotations

from pathlib import Path

from ..comm.guard import JOINED, LOST
from ..comm.recorder import named
from .arrival import ranks


class Living:
    """The ranks of a job that begins with so many, of which `least` must be left."""

    def __init__(self, directory: Path, workers: int, least: int) -> None:
        self.directory, self.least = directory, least
        self.members, self.lost = {*range(workers)}, set[int]()
        self.last: list[str] = []

    @property
    def left(self) -> set[int]:
        """Those that the job goes on with."""
        return self.members - self.lost

    @property
    def code(self) -> int:
        """The exit code of the last one that was lost."""
        return int(self.last[1]) if self.last else 0

    def look(self) -> list[str]:
        """What is new."""
        said = []
        for rank in sorted(ranks(self.directory, JOINED) - self.members):
            self.members.add(rank)
            said.append(f"rank {rank} has joined, {named(sorted(self.left))} go on")
        for rank in sorted((ranks(self.directory, LOST) & self.members) - self.lost):
            self.lost.add(rank)
            self.last = (self.directory / f"{LOST}.{rank}").read_text("utf-8").splitlines()
            said.append(f"rank {rank} is lost: {self.last[2]}; {self._rest()}")
        return said

    def _rest(self) -> str:
        if len(self.left) < self.least:
            return f"{len(self.left)} of at least {self.least} are left"
        return f"{named(sorted(self.left))} go{'es' if len(self.left) == 1 else ''} on"

    def are_too_few(self) -> bool:
        """Whether to end the job."""
        return len(self.left) < self.least

    def have_ended(self) -> bool:
        """Whether all that are left have ended well."""
        return self.left <= ranks(self.directory, "done")
