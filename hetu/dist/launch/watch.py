"""What the launcher looks at while ranks run: who is late, left behind, or lost, and what they leave running.

None may let the others wait forever where MPI does not run. Ranks tell it by files in the job's directory: how far each
has come; of an elastic job the guard of a rank writes how it was lost (`comm/guard.py`), the first rank who the members
are, and whoever waits in vain for another that it is gone. Only this host's processes can be ended.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from pathlib import Path

from ...system import marked
from ..comm.guard import GONE, LOST, RUN_DIRECTORY, members
from ..comm.patience import Patience
from ..comm.recorder import RankState, ask, named

WARN_AFTER = 5.0  # seconds; what is about to arrive, or to end, need not be told
STOPPED = 2.0  # seconds for which a rank may be stopped


class Start:
    """Whether ranks are late. `seconds` is how long they may let the others wait, from when they last worked.

    A rank has started when its process runs, and arrived when it joins MPI. Scripts may join late or never, but all
    together: the time to arrive counts from the first rank that joins.
    """

    def __init__(self, directory: Path, workers: int, seconds: float) -> None:
        self.directory, self.workers, self.seconds = directory, workers, seconds
        self.stage, self.warned = "started", False
        self._begin()

    def _begin(self) -> None:
        self.since = time.monotonic()
        self.patience = Patience(self.seconds, self._states, anywhere=True)

    def is_late(self, seconds: float) -> bool:
        """Whether a rank has let the others wait for so long."""
        present = ranks(self.directory, self.stage)
        if present >= {*range(self.workers)}:  # and maybe some that came later
            if self.stage == "started":
                self.stage, self.warned = "arrived", False
                self._begin()
            return False
        if self.stage == "arrived" and not present:
            self._begin()
        return time.monotonic() - self.since > seconds

    def is_over(self) -> bool:
        """Whether to end the job because of it."""
        return self.is_late(0.0) and self.patience.is_over(time.monotonic() - self.since)

    def _late(self) -> list[int]:
        return sorted(set(range(self.workers)) - ranks(self.directory, self.stage))

    def _states(self) -> dict[int, RankState]:
        running = ranks(self.directory, "started") - ranks(self.directory, "done")
        return ask(self.directory, [rank for rank in self._late() if rank in running])

    def absent(self) -> list[str]:
        """Who is late, and where they are instead."""
        started, done, late = ranks(self.directory, "started"), ranks(self.directory, "done"), self._late()
        where = dict.fromkeys(late, "it does not answer")
        where |= {rank: f"it is at {state.where}" for rank, state in self._states().items()}
        where |= dict.fromkeys(done & {*late}, "it has ended")
        where |= dict.fromkeys({*late} - started, "its process does not run")
        waited = time.monotonic() - self.since
        return [f"after {waited:.0f} s rank {rank} has not arrived: {where[rank]}" for rank in late]


class End:
    """Whether ranks neither work nor end that others have left behind, as those of servers do: for `seconds`.

    Ranks that share MPI leave together, and speak before this does.
    """

    def __init__(self, directory: Path, workers: int, seconds: float) -> None:
        self.directory, self.workers, self.seconds, self.since = directory, workers, seconds, 0.0
        self.patience = Patience(seconds, self._states, anywhere=True, most=math.inf)

    def _states(self) -> dict[int, RankState]:
        return ask(self.directory, sorted({*range(self.workers)} - ranks(self.directory, "done")))

    def is_over(self) -> bool:
        """Whether to end the job because of them."""
        if not 0 < len(ranks(self.directory, "done")) < self.workers:
            return False
        self.since = self.since or time.monotonic()
        return self.patience.is_over(time.monotonic() - self.since)

    def absent(self) -> list[str]:
        """Who they are, and where."""
        done, states = ranks(self.directory, "done"), self._states()
        where = {rank: states[rank].where if rank in states else "" for rank in {*range(self.workers)} - done}
        told = {
            rank: f"it is at {at}" if at else "it does not answer, as a stopped process" for rank, at in where.items()
        }
        return [
            f"ranks {sorted(done)} have ended, rank {rank} has done nothing for {self.seconds:g} s since: {at}"
            for rank, at in sorted(told.items())
        ]


def ranks(directory: Path, state: str) -> set[int]:
    """The ranks that have reached this state, for which each leaves a file."""
    return {int(path.suffix[1:]) for path in directory.glob(f"{state}.*")}


class Strays:
    """Processes of this host that go on when all ranks have ended, but `mpiexec` has not: `seconds` at most."""

    def __init__(self, directory: Path, workers: int, mpiexec: int, seconds: float) -> None:
        self.directory, self.workers, self.mpiexec, self.seconds = directory, workers, mpiexec, seconds
        self.since, self.told = 0.0, False

    def look(self) -> list[str]:
        """What to say about them; they are ended when their time is over."""
        if len(ranks(self.directory, "over") | ranks(self.directory, LOST)) < self.workers:
            return []
        now = time.monotonic()
        self.since = self.since or now
        if now < self.since + (self.seconds if self.told else min(WARN_AFTER, self.seconds)):
            return []
        found = self.found()
        ended = [f"{command} (process {process})" for process, command in found.items()]
        if not self.told:
            self.told = True
            return [
                f"all ranks have ended, but what they started runs, for {self.seconds:g} s more: {e}" for e in ended
            ]
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        return [f"killed, as all ranks have ended: {e}" for e in ended]

    def found(self) -> dict[int, str]:
        """Their commands by process, where the system tells."""
        commands, parents = marked(f"{RUN_DIRECTORY}={self.directory}")
        return {p: c for p, c in commands.items() if not self._is_below(p, parents)}

    def _is_below(self, process: int, parents: dict[int, int]) -> bool:
        """Whether a process belongs to mpiexec itself."""
        while process in parents and process != self.mpiexec:
            process = parents[process]
        return process == self.mpiexec


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
