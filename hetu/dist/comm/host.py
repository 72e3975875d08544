"""What a host has of a job: the numbers of its ranks, and a process that removes what the job leaves there."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ... import system
from ...job import job_size
from . import guard
from .guard import RUN_DIRECTORY, noting_shared_files, unname_shared_files

SWEEP = str(Path(__file__).with_name("sweep.py"))

LOCAL_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_found: list[int] = []  # by MPI, once it is up
_watching: list[subprocess.Popen[str]] = []  # until the ranks have met


def look_around(MPI: Any, comm: Any) -> None:
    """Find the ranks of this host, which share memory; all ranks of the job meet here."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    _found[:] = [host.rank]
    host.Free()
    all_have_met(MPI)


def all_have_met(MPI: Any) -> None:
    """From now on no rank of this host looks for what the others share."""
    if MPI.get_vendor()[0] == "MPICH":  # attaches to all memory at its start
        unname_shared_files()
    for watcher in _watching:
        watcher.communicate("met")
    _watching.clear()


@contextlib.contextmanager
def joining(deadline: float) -> Iterator[None]:
    """Around the start of MPI, which waits for all ranks, and lets no Python run.

    Under a bare mpiexec nobody else notices that one never comes: then this process shows where it waits, and ends. Who
    looks what it shares removes that if it ends here.
    """
    if alone := RUN_DIRECTORY not in os.environ and job_size() > 1:
        if sys.platform == "linux":  # which alone tells what a process shares
            _watching.append(_beside("watch", str(os.getpid()), guard.__file__, *guard.shared_files()))
        faulthandler.dump_traceback_later(deadline, exit=True, file=2)
    with noting_shared_files():
        yield
    if alone:
        faulthandler.cancel_dump_traceback_later()


def local_rank() -> int:
    """The number of this rank among those on its host, from 0; before the ranks have met, as their launcher told it.

    >>> local_rank()
    0
    """
    if _found or job_size() == 1:
        return _found[0] if _found else 0
    return int(next((os.environ[name] for name in LOCAL_VARIABLES if name in os.environ), 0))


def sweep_behind(directory: str) -> subprocess.Popen[str]:
    """Start the process that cleans up when this one has ended, however: see `sweep.py`."""
    return _beside("main", directory, guard.__file__, system.__file__)


def _beside(*arguments: str) -> subprocess.Popen[str]:
    quiet = subprocess.DEVNULL  # a pipe that it held open would keep mpiexec from ending
    line = [sys.executable, "-I", "-S", SWEEP, *arguments]
    return subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, text=True, encoding="utf-8", **system.apart()
    )
