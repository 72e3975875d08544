"""What a rank that `heturun -s N` started finds in its environment: its place in the job, and how to reach the servers.

Ignored on purpose: starting servers, and keys for servers on other hosts.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence

from ..errors import ArgumentError
from .client import Client

ADDRESSES, TOKEN = "HETU_SERVERS", "HETU_SERVER_TOKEN"
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "SLURM_NTASKS")


def place() -> tuple[int, int]:
    """This process's rank and the number of workers of the job, as MPI's launcher tells them; alone: 0 of 1.

    >>> rank, workers = place()
    >>> 0 <= rank < workers
    True
    """
    return _first(RANKS, 0), _first(SIZES, 1)


def connect() -> Client:
    """This rank's connection to the job's servers, which it leaves in order when the process ends."""
    if ADDRESSES not in os.environ:
        raise ArgumentError("this job has no parameter servers", fix="start it as: heturun -w 2 -s 1 python train.py")
    client = Client(os.environ[ADDRESSES].split(","), place()[0], os.environ[TOKEN])
    atexit.register(client.leave)  # what was sent last has arrived, and nobody waits for this rank
    return client


def _first(names: Sequence[str], default: int) -> int:
    return int(next((os.environ[name] for name in names if name in os.environ), default))
