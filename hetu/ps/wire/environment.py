"""What a rank that `heturun -s N` started finds in its environment: its place in the job, and how to reach the servers.

Ignored on purpose: starting servers, and making their keys.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from pathlib import Path

from ...core.errors import ArgumentError
from .client import Client

ADDRESSES, TOKEN, KEYS = "HETU_SERVERS", "HETU_SERVER_TOKEN", "HETU_SERVER_KEYS"
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")


def place() -> tuple[int, int]:
    """This process's rank and the number of workers of the job, as MPI's launcher tells them; alone: 0 of 1.

    >>> rank, workers = place()
    >>> 0 <= rank < workers
    True
    """
    return _first(RANKS, 0), _first(SIZES, 1)


def has_servers() -> bool:
    """Whether `heturun -s` started servers for this job."""
    return ADDRESSES in os.environ


def connect() -> Client:
    """This rank's connection to the job's servers, which it leaves in order when the process ends."""
    if not has_servers():
        raise ArgumentError("this job has no parameter servers", fix="start it as: heturun -w 2 -s 1 python train.py")
    rank, keys = place()[0], os.environ.get(KEYS)
    key_file = str(Path(keys) / f"worker-{rank}.json") if keys else ""
    client = Client(os.environ[ADDRESSES].split(","), rank, os.environ[TOKEN], key_file=key_file)
    atexit.register(client.leave)  # what was sent last has arrived, and nobody waits for this rank
    return client


def _first(names: Sequence[str], default: int) -> int:
    return int(next((os.environ[name] for name in names if name in os.environ), default))
