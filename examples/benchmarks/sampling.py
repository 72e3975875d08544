"""The parent's side of a benchmark: worker processes, and samples of which it is known whether they were disturbed.

Ignored on purpose: what the peers compute. On systems without /proc nothing can be said about disturbance, and every
sample counts as clean.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
FORCED_KERNELS = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")  # each library is to find out the processor by itself
ALONE = "NumPy alone"  # the variant of hetu that does without a compiler
IDLE_SHARE = 0.85
DELAY_SHARE = 0.03
ATTEMPTS = 3
PATIENCE_SECONDS = 5.0


class PeerError(RuntimeError):
    """A peer could not start, or ended in the middle."""


@dataclass(frozen=True)
class Sample:
    """Seconds per step, and whether nothing else took the cores meanwhile."""

    seconds: float
    clean: bool


class Peer:
    """A worker process that runs `workload` with `name` in `variant`, as soon as it is made."""

    def __init__(self, name: str, variant: str, workload: str, threads: int) -> None:
        self.title = name if variant in ("default", "split") else f"{name}, {variant}"
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), name, workload, variant]
        environment = {k: v for k, v in os.environ.items() if k not in FORCED_KERNELS}
        environment |= dict.fromkeys(THREAD_VARIABLES, str(threads)) | ({"HETU_CC": "0"} if variant == ALONE else {})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment)

    @cached_property
    def first(self) -> dict[str, Any]:
        """What it reports before it is timed: its first results, what the start took, versions."""
        return self._answer()

    def run(self, steps: int) -> dict[str, float | None]:
        """The times that `steps` steps took, as worker.py describes them."""
        assert self.first
        self.process.stdin.write(json.dumps({"steps": steps}) + "\n")
        return self._answer()

    def sample(self, steps: int, wall: bool) -> Sample:
        """CPU time of the process, which waiting for a core does not change; or wall time on an idle machine.

        The second is tried a few times before a disturbed sample is returned.
        """
        if not wall:
            return Sample(self.run(steps)["cpu"] / steps, clean=True)
        for _ in range(ATTEMPTS):
            idle = wait_until_idle()
            times = self.run(steps)
            clean = idle and (times["delay"] or 0.0) <= DELAY_SHARE * times["wall"]
            if clean:
                break
        return Sample(times["wall"] / steps, clean)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": f"its process ended with code {self.process.wait()}"}
        if "error" in answer:
            self.close()
            raise PeerError(f"{self.title}: {answer['error']}")
        return answer


def wait_until_idle() -> bool:
    """Wait until the cores are idle, but not forever; False if they never were."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        before = _cpu_ticks()
        time.sleep(0.1)
        after = _cpu_ticks()
        if before is None or after is None:
            return True
        total = sum(after) - sum(before)
        if total and (after[3] - before[3]) / total >= IDLE_SHARE:
            return True
    return False


def _cpu_ticks() -> list[int] | None:
    """Ticks of all cores together as user, nice, system, idle, ... (Linux)."""
    try:
        return [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return None
