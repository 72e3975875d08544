"""The checks of lab 6, on ranks that are threads. They count what is sent, not the time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from ...core.errors import ArgumentError
from ...dist import Comm, run_ranks
from .grading import Lab, different

lab = Lab(6, "a ring all-reduce", "lab6_ring_all_reduce.py")
DEADLINE = 5.0  # seconds, for ranks that wait for each other forever


class Ring:
    """A communicator that only exchanges messages, and notes them."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self.sent: list[tuple[int, int]] = []  # (to, elements)

    def exchange(self, sends: Sequence[tuple[int, np.ndarray]], recvs: Sequence[tuple[int, np.ndarray]]) -> None:
        self.sent += [(to, array.size) for to, array in sends]
        self._comm.exchange(sends, recvs)

    def __getattr__(self, name: str) -> Any:
        raise ArgumentError(f"comm.{name} is not there in this lab", fix="build it from comm.exchange")


def on_ranks(student: ModuleType, n: int, size: int) -> list[tuple[np.ndarray, np.ndarray, Ring]]:
    """For each rank: the result, its own `x` afterward, and what it sent. Sends wait for their receivers."""

    def rank(comm: Comm) -> tuple[np.ndarray, np.ndarray, Ring]:
        ring, x = Ring(comm), own(comm.rank, size)
        return np.asarray(student.ring_all_reduce(ring, x)), x, ring

    return run_ranks(n, rank, rendezvous=True, deadline=DEADLINE)


def own(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(-50, 50, size).astype(np.float64)


def _sums(n: int, size: int) -> Callable[[ModuleType], str]:
    def test(student: ModuleType) -> str:
        wanted = np.sum([own(r, size) for r in range(n)], axis=0)
        seen = (different(got, wanted, f"rank {r}: ") for r, (got, *_) in enumerate(on_ranks(student, n, size)))
        return next(filter(None, seen), "")

    return test


lab.check("one rank", hint="There is nobody to talk to, and a rank must not send to itself.")(_sums(1, 4))
lab.check("two ranks", hint="One step of each kind: send the chunk that the other one will own.")(_sums(2, 4))
lab.check(
    "four ranks",
    hint="Let each rank begin with the chunk of its own number; what has just arrived and been added to is what it "
    "sends next. Draw a table of ranks and chunks: which chunk is complete where after n - 1 steps?",
)(_sums(4, 8))
lab.check("lengths that do not divide", hint="Chunks differ in size then: receive into a buffer of the right one.")(
    _sums(4, 7)
)
lab.check("fewer elements than ranks", hint="Some chunks are empty. They may be sent like any other.")(_sums(4, 2))


@lab.check("`x` is not changed", hint="Work on a copy.")
def keeps(student: ModuleType) -> str:
    rows = on_ranks(student, 3, 6)
    return next(filter(None, (different(x, own(r, 6), f"rank {r}: ") for r, (_, x, _) in enumerate(rows))), "")


@lab.check("every rank talks to its right neighbor only", hint="To the right is (rank + 1) % world_size.")
def neighbors(student: ModuleType) -> str:
    for rank, (*_, ring) in enumerate(on_ranks(student, 4, 8)):
        others = {to for to, _ in ring.sent} - {(rank + 1) % 4}
        if others:
            return f"rank {rank} sent to {sorted(others)}"
    return ""


@lab.check(
    "no rank sends more than 2 (n - 1) / n of the data",
    hint="Send one chunk in a step, not the whole array, and n - 1 steps in each of the two rounds.",
)
def traffic(student: ModuleType) -> str:
    most = max(sum(size for _, size in ring.sent) for *_, ring in on_ranks(student, 4, 400))
    return f"a rank sent {most} numbers to add up 400, wanted 600 at most" if most > 600 else ""
