"""What ranks have started and left running: mpiexec, which passes on what that prints, would wait for it forever."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ...system import marked
from ..comm.guard import LOST, RUN_DIRECTORY
from .arrival import ranks

WARN_AFTER = 5.0  # seconds; what is about to end need not be told


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
