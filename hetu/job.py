"""What this process is told by those who started it: the job that it belongs to, and the cores that it may use.

Known before anything of MPI is loaded; and how the process leaves the job. What a rank starts or forks inherits what it
was told, but is no rank. Left out: how much of the cores other processes of the same container take.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from .core.errors import ArgumentError

# The last one is srun's; SLURM_NTASKS is also set for the one script of sbatch.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")


RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
RANK_PROCESS = "HETU_RANK_PROCESS"  # set by the rank to its own process

endings: list[Callable[[], None]] = []  # what this process does as it ends, the last first


def told_size() -> int:
    """The number of ranks as the launcher told it to this process, or to the rank that started it; 1 without one."""
    return int(next((os.environ[name] for name in SIZE_VARIABLES if name in os.environ), 1))


def job_size() -> int:
    """The number of ranks; 1 without a launcher, and for a process that a rank has started."""
    return 1 if is_child() else told_size()


def is_child() -> bool:
    """Whether a rank has started or forked this process."""
    return os.environ.get(RANK_PROCESS, str(os.getpid())) != str(os.getpid())


def refuse_child() -> None:
    """ArgumentError in a process that a rank has started: it would speak for the rank, or train alone unnoticed."""
    if is_child():
        raise ArgumentError(
            f"this process was started by process {os.environ[RANK_PROCESS]}, a rank, and is no rank itself",
            fix="communicate in the rank, and pass on what is needed; heturun starts it as a job of its own",
        )


def end() -> None:
    """Leave the job. What fails here has failed in the script, while Python would end with exit code 0.

    Then files that the script has left open lose what it has not flushed.
    """
    try:
        while endings:
            endings.pop()()
    except BaseException as error:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        sys.excepthook(type(error), error, error.__traceback__)
        os._exit(1)


atexit.register(end)  # at first, and so behind the threads of the script and all that it leaves to `atexit` itself
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=endings.clear)


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
