"""The group of all ranks of the job that this process belongs to, whatever carries it.

An elastic job begins in `survivors.py`, any other here: its ranks meet, and one that nobody else watches is answered
for. Left out: jobs of one rank, which need no MPI, and ranks that are threads, whose group `run_ranks` makes.
"""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

from ...answers import seconds
from ...core.backend import Device
from ...core.errors import MissingDependencyError
from ...job import endings, job_size, told_size
from ...ranges import Endless
from . import survivors
from .agreement import pack, unpack
from .comm import Comm, SerialComm, of_thread
from .guard import ELASTIC, RUN_DIRECTORY
from .mpi import MPIComm
from .nccl import on_device
from .patience import DEADLINE
from .process import local_rank, look_around, process, start, sweep_behind
from .recorder import answer

_swept: list[Any] = []  # who holds it is waited for


def world(deadline: Endless | None = None, device: str = "cpu") -> Comm:
    """The group of all ranks of this job: over MPI when `heturun` or mpiexec started several, else one rank.

    There is one per process, or per thread of `run_ranks`. `deadline` (seconds, at first $HETU_DEADLINE or 300) is that
    of its waits and of groups made later: how long it waits for ranks that do not get on; see `patience.py`. With a GPU
    as `device` it takes GPU arrays, too: "gpu" is the rank's own, "gpu:1" that one on all ranks; see `nccl.on_device`.

    >>> world().world_size
    1
    """
    host, at = of_thread.get(), Device.parse(device)
    if host is None and told_size() == 1 and ELASTIC not in os.environ:
        return SerialComm()
    if host is None:
        host = _job() if ELASTIC not in os.environ else survivors.job()
        host.deadline = deadline or host.deadline
    return on_device(host, at)


@functools.cache
def _job() -> MPIComm:
    MPI = start()
    if MPI.COMM_WORLD.size != job_size():
        raise MissingDependencyError(
            f"this is one of {job_size()} processes, but MPI sees {MPI.COMM_WORLD.size}: its own mpiexec "
            "did not start them",
            fix="use heturun, which finds the right one; under Slurm srun --mpi=pmi2 or --mpi=pmix",
        )
    comm = MPIComm(MPI.COMM_WORLD, range(MPI.COMM_WORLD.size), seconds(DEADLINE, 300.0), process)
    comm._in_time(lambda: look_around(MPI, comm.transport), ())
    if RUN_DIRECTORY not in os.environ:  # a bare mpiexec: boot has not made this rank answer
        name = pack(tempfile.mkdtemp(prefix="hetu-") if comm.rank == 0 else "")
        comm.broadcast(name)
        os.environ[RUN_DIRECTORY] = directory = unpack(name)
        os.makedirs(directory, exist_ok=True)  # on another host it is another directory
        answer(directory, comm.rank, process)
        _swept.extend([sweep_behind(directory)] if local_rank() == 0 else [])
    endings.append(comm.leave)
    return comm
