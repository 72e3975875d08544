"""Eleven mistakes of one rank among two or three, as functions of the communicator.

`heturun -w 3 python -m tests.dist.mistakes skip` makes one. Rank 1 is the culprit, and its line is marked with the
name of the mistake.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np

import hetu as ht
from hetu.dist import DataParallel, world

CULPRIT = 1
never = threading.Event()  # a rank that waits for it is slow or endless, until the test ends


def arrays(comm):
    return np.zeros(4, "f4"), np.zeros(4, "f4"), np.zeros((comm.world_size, 4), "f4")


def skip(comm):
    x, y, z = arrays(comm)
    for step in range(3):
        if comm.rank != CULPRIT or step != 1:
            comm.all_reduce(x, x)  # skip
        comm.all_gather(y, z)


def order(comm):
    x, y, z = arrays(comm)
    comm.barrier()
    if comm.rank == CULPRIT:
        comm.all_gather(y, z)  # order
        comm.all_reduce(x, x)
    else:
        comm.all_reduce(x, x)
        comm.all_gather(y, z)


def shape(comm):
    x = np.zeros(5 if comm.rank == CULPRIT else 4, "f4")
    comm.barrier()
    comm.all_reduce(x, x)  # shape


def dtype(comm):
    x = np.zeros(4, "i4" if comm.rank == CULPRIT else "f4")
    comm.barrier()
    comm.all_reduce(x, x)  # dtype


def early_exit(comm):
    x, _, _ = arrays(comm)
    for step in range(4):
        if comm.rank == CULPRIT and step == 2:
            return
        comm.all_reduce(x, x)  # early_exit


def exception(comm):
    comm.barrier()
    if comm.rank == CULPRIT:
        raise ZeroDivisionError("mine")  # exception
    comm.barrier()


def endless_loop(comm):
    comm.barrier()
    while comm.rank == CULPRIT and not never.is_set():  # endless_loop
        pass
    comm.barrier()


def wrong_world_size(comm):
    comm.barrier()
    if comm.rank == CULPRIT:
        comm.send(np.zeros(4), to=3)  # wrong_world_size
    comm.barrier()


def duplicate_rank(comm):
    comm.barrier()
    comm.split((0, 1, 1) if comm.rank == CULPRIT else range(comm.world_size)).barrier()  # duplicate_rank


def slow_rank(comm):
    comm.barrier()
    if comm.rank == CULPRIT:
        never.wait(60)  # slow_rank
    comm.barrier()


def drift(comm):
    x = ht.placeholder("x", (None, 3))
    ex, batch = ht.Executor([ht.mean(x * x)], strategy=DataParallel(), comm=comm), np.arange(36, dtype="f4")
    for step in range(9):
        if comm.rank == CULPRIT and step == 2:
            batch = batch[::-1]
        ex.run({"x": batch.reshape(12, 3)})  # drift


MISTAKES = {
    mistake.__name__: mistake
    for mistake in (
        skip,
        order,
        shape,
        dtype,
        early_exit,
        exception,
        endless_loop,
        wrong_world_size,
        duplicate_rank,
        slow_rank,
        drift,
    )
}


def line_of(name: str) -> str:
    """`mistakes.py:29`, where the mistake of this name is made."""
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {name}'))}"


if __name__ == "__main__":
    MISTAKES[sys.argv[1]](world(deadline=1.0))
