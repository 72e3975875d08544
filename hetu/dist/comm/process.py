"""This process as a rank: MPI from its start to its end. One of the two files that name mpi4py, imported on first use.

An error ends the whole job, as other ranks may wait for this one. Of its host a rank knows its number there, and that
a process removes what the job leaves (`sweep.py`). Left out: what ranks tell each other; see `mpi.py`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ... import system
from ...answers import seconds
from ...core.errors import MissingDependencyError
from ...job import RANK_PROCESS, endings, is_child, job_size, refuse_child, told_size
from . import guard
from .bound import free_all
from .guard import (
    ELASTIC,
    RUN_DIRECTORY,
    forget_shared_files,
    noting_shared_files,
    own_rank,
    unname_shared_files,
    until_read,
)
from .patience import DEADLINE
from .recorder import Recorder, write

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


process = Recorder()  # of this rank; `boot` has it answer before MPI is up


@functools.cache
def start() -> Any:
    """The module `mpi4py.MPI`, initialized. MissingDependencyError if it or its library is not installed."""
    refuse_child()
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is there, but no MPI library
        raise MissingDependencyError(f"MPI cannot be used ({error})", fix='pip install "mpi4py>=4.1" mpich') from None
    if not MPI.Is_initialized():
        if directory := os.environ.get(RUN_DIRECTORY):
            write(Path(directory) / f"arrived.{own_rank()}", "")
        with joining(seconds(DEADLINE, 300.0)):
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if MPI.COMM_WORLD.size == 1:  # also under a launcher that MPI does not know
            all_have_met(MPI)
    if told_size() > 1:
        os.environ[RANK_PROCESS] = str(os.getpid())
    sys.excepthook = functools.partial(_print_and_abort, sys.excepthook)
    endings.append(leave)
    return MPI


def _forget() -> None:
    """In a process that a rank has forked: it has MPI's memory, and would be taken for the rank.

    One that is forked before MPI starts may be the rank.
    """
    start.cache_clear()
    if is_child():
        process.refuse(refuse_child)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _print_and_abort(print_it: Callable[..., None], *error: Any) -> None:
    """Under a bare mpiexec an uncaught exception would leave the other ranks waiting forever."""
    print_it(*error)
    until_read()
    time.sleep(0.2)  # until it is passed on
    abort(1)


def _running() -> Any:
    """`mpi4py.MPI` between its start and its end, else None."""
    MPI = None if is_child() else sys.modules.get("mpi4py.MPI")
    return MPI if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized() else None


def abort(code: int) -> None:
    """End all ranks of the job at once, if MPI is running: others may be waiting for this one.

    Those of an elastic job do not wait in vain; its launcher ends them.
    """
    if (MPI := _running()) and ELASTIC not in os.environ:
        MPI.COMM_WORLD.Abort(code)


def leave() -> None:
    """End MPI, as all ranks have come to their end, which `MPIComm.leave` waits for."""
    if (MPI := _running()) and ELASTIC not in os.environ:  # after a loss this may hang
        free_all()
        MPI.Finalize()
        forget_shared_files()
