"""The start of the ranks of a job, and its end: none may let the others wait forever where MPI does not run."""

from __future__ import annotations

import math
import time
from pathlib import Path

from ..comm.patience import Patience
from ..comm.recorder import RankState, ask


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
