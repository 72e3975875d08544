"""This process as a rank: MPI from its start to its end. One of the two files that name mpi4py, imported on first use.

An error ends the whole job, as other ranks may wait for this one. Left out: what ranks tell each other; see `mpi.py`.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...answers import seconds
from ...core.errors import MissingDependencyError
from ...job import RANK_PROCESS, endings, is_child, refuse_child, told_size
from .bound import free_all
from .guard import ELASTIC, RUN_DIRECTORY, forget_shared_files, own_rank, until_read
from .host import all_have_met, joining
from .patience import DEADLINE
from .recorder import Recorder, write

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
