"""How long each rank of a job takes for a step: measured by steps of the model itself, all ranks at once.

Slow machines and other programs on them count, so it is wall time. A rank counts as slow only if it is so in each of
`ROUNDS`: what is slow now and then is noise here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import HetuError
from ...core.executor import Executor
from ...core.graph import Node
from ...dist.comm.comm import Comm
from ...dist.comm.seat import Seat
from ...dist.cut.agreement import gathered
from ...dist.cut.builders import DataParallel

ROUNDS, ROUND = 7, 0.05  # seconds of a round at least, on the fastest rank
EVEN = 1.5  # a rank that takes no longer than so many times the fastest is as fast


def measured_seconds(
    comm: Comm, entries: Sequence[Any], feeds: Mapping[str, Node], shapes: Mapping[str, Sequence[int]]
) -> list[float]:
    """Seconds in which each rank computes its part of a step; none for a model that cannot be split so.

    All ranks call this. Each trains for a while, on numbers that mean nothing, with values of its own.
    """
    seat = Seat(comm.rank, comm.world_size)
    feed = {name: ordinary(shapes[name], feeds[name].dtype) for name in feeds}
    try:
        executor = Executor(entries, strategy=DataParallel(), comm=seat)
        took = min(_seconds(executor, feed, 1) for _ in range(3))  # the first one compiles
    except HetuError:
        took = math.inf
    first = _of_all(comm, took)
    if not np.isfinite(first).all():
        return []
    steps = math.ceil(ROUND / float(first.min()))
    rounds = np.array([_of_all(comm, _seconds(executor, feed, steps)) for _ in range(ROUNDS)])
    fastest = rounds.min(axis=1)
    factors = (rounds / fastest[:, None]).min(axis=0)
    return [float(np.median(fastest)) / steps * (float(f) if f > EVEN else 1.0) for f in factors]


def ordinary(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Numbers that are no ids out of range, and that do not underflow, which would take many times as long."""
    rng = np.random.default_rng(0)
    return rng.standard_normal(shape).astype(dtype) if dtype.kind == "f" else np.zeros(shape, dtype)


def _seconds(executor: Executor, feed: Any, steps: int) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        executor.run(feed)
    return time.perf_counter() - began


def _of_all(comm: Comm, seconds: float) -> np.ndarray:
    """What each rank has, once all are here."""
    return np.concatenate(gathered(comm, np.array([seconds])))
