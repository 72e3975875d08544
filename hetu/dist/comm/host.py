"""The number of a rank among those on its host."""

from __future__ import annotations

import os
from typing import Any

from ...job import job_size
from .guard import unname_shared_files

LOCAL_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_found: list[int] = []  # by MPI, once it is up


def look_around(MPI: Any) -> None:
    """Find the ranks of this host, which share memory; all ranks of the job meet here."""
    host = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    _found[:] = [host.rank]
    host.Free()
    if MPI.get_vendor()[0] == "MPICH":  # attaches to all memory at its start
        unname_shared_files()


def local_rank() -> int:
    """The number of this rank among those on its host, from 0; before the ranks have met, as their launcher told it.

    >>> local_rank()
    0
    """
    if _found or job_size() == 1:
        return _found[0] if _found else 0
    return int(next((os.environ[name] for name in LOCAL_VARIABLES if name in os.environ), 0))
