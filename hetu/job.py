"""What this process is told by those who started it: the job that it belongs to, and the cores that it may use.

Known before anything of MPI is loaded. Left out: how much of the cores other processes of the same container take.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

# The last one is srun's; SLURM_NTASKS is also set for the one script of sbatch.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")


def job_size() -> int:
    """The number of ranks as the launcher told it; 1 without a launcher."""
    return int(next((os.environ[name] for name in SIZE_VARIABLES if name in os.environ), 1))


def cores() -> int:
    """The cores that this process may run on, or those that its container has the time of, if these are fewer."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(own, share())))


def share(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Seconds of processor time in a second of the clock, as Linux limits them for control groups of either version."""
    limits = [math.inf]
    with contextlib.suppress(OSError, ValueError):  # not as Linux writes it
        for line in own.read_text().splitlines():
            _, kinds, group = line.split(":", 2)
            if not kinds or "cpu" in kinds.split(","):
                place = groups / ("cpu" if kinds else "") / group.lstrip("/")  # a name of it alone on all systems
                limits += map(_limit, [place, *place.parents])  # a container may see its own group as the first
    return min(limits)


def _limit(place: Path) -> float:
    for file in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # "max"
            quota, period = map(int, " ".join((place / name).read_text() for name in file).split())
            return quota / period if quota > 0 else math.inf
    return math.inf
