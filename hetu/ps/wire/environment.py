"""What a rank of `heturun -s N` finds in its environment: its place in the job, and the way to the servers."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import NamedTuple

from ...core.errors import ArgumentError
from ...job import RANK_VARIABLES, endings, job_size, refuse_child
from .client import Client

ADDRESSES, TOKEN, KEYS = "HETU_SERVERS", "HETU_SERVER_TOKEN", "HETU_SERVER_KEYS"


class Place(NamedTuple):
    """One worker of a job: its rank, and the number of workers."""

    rank: int
    world_size: int


def place() -> Place:
    """The place of this process, as MPI's launcher tells it; 0 of 1 without a launcher.

    >>> rank, workers = place()
    >>> 0 <= rank < workers
    True
    """
    refuse_child()
    return Place(int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), 0)), job_size())


def has_servers() -> bool:
    """Whether `heturun -s` started servers for this job."""
    return ADDRESSES in os.environ


def connect() -> Client:
    """This rank's only connection to the job's servers, under heturun with servers; ArgumentError where there are none.

    The rank leaves the job when its process ends.

    >>> import os, hetu as ht
    >>> client = ht.ps.connect() if "HETU_SERVERS" in os.environ else None
    """
    if not has_servers():
        raise ArgumentError("this job has no parameter servers", fix="start it as: heturun -w 2 -s 1 python train.py")
    rank, keys = place().rank, os.environ.get(KEYS)
    key_file = str(Path(keys) / f"worker-{rank}.json") if keys else ""
    return _connected(os.environ[ADDRESSES], rank, os.environ[TOKEN], key_file)


@functools.cache  # a second connection would end the first, as if the worker had begun a new life
def _connected(addresses: str, rank: int, token: str, key_file: str) -> Client:
    client = Client(addresses.split(","), rank, token, key_file=key_file)
    endings.append(client.leave)  # then the last messages have arrived, and nobody waits for this rank
    return client
