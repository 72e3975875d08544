"""Which ranks of an elastic job are left: said as it changes, whether they are enough, and the end of all others.

Files tell it: the guard of a rank writes how it was lost (`comm/guard.py`), the first rank who the members are, and
whoever waits in vain for another that it is gone. Only this host's processes can be ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ..comm.guard import GONE, LOST, members
from ..comm.recorder import named
from .arrival import ranks

STOPPED = 2.0  # seconds for which a rank may be stopped


class Living:
    """The ranks of a job that begins with so many, of which `least` must be left."""

    def __init__(self, directory: Path, workers: int, least: int) -> None:
        self.directory, self.least = directory, least
        self.members, self.lost = {*range(workers)}, set[int]()
        self.last: list[str] = []
        self.ran: dict[int, float] = {}  # when a rank was last seen that is not stopped

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
        said, told = [], {*members(str(self.directory))}
        for rank in sorted(told - self.members):
            self.members.add(rank)
            said.append(f"rank {rank} has joined, {named(sorted(self.left))} go on")
        for rank in sorted((ranks(self.directory, LOST) & self.members) - self.lost):
            self.lost.add(rank)
            self.last = (self.directory / f"{LOST}.{rank}").read_text("utf-8").splitlines()
            said.append(f"rank {rank} is lost: {self.last[2]}; {self._rest()}")
        self._end_others(ranks(self.directory, GONE) | (self.members - (told or self.members)))
        return said

    def _end_others(self, gone: set[int]) -> None:
        """Kill those that are gone, and those that are stopped for some time: for MPI they live."""
        now = time.monotonic()
        ended = ranks(self.directory, "over") | ranks(self.directory, LOST)
        for rank in ranks(self.directory, "started") - ended:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or is called and does not run yet
                process = int((self.directory / f"started.{rank}").read_text("utf-8"))
                if not _is_stopped(process):
                    self.ran[rank] = now
                if rank in gone or now - self.ran.get(rank, now) > STOPPED:
                    os.kill(process, signal.SIGKILL)

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


def _is_stopped(process: int) -> bool:
    """As Linux tells it."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0] == "T"
    return False
