"""All-reduce of large arrays between processes of one host, through memory that they share.

For each chunk, every rank copies its part in, all meet, each rank reduces one slice of all parts in the order of the
ranks, all meet, and each copies the result out. The sum is the same on all ranks, bit for bit, and in every run. Two
halves of the memory take turns, so that a rank may fill one while others still read the other, without a third meeting.
It serves one host, and no more ranks than cores: with more, waiting costs more than the copies save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...job import cores
from .call import REDUCE

FROM_BYTES = 256 << 10  # below, MPI's own all_reduce is as fast
CHUNK = 1 << 20  # bytes; must stay in the cache
SLICE = 64  # bytes: no two ranks write to one line of the cache


class SharedMemory:
    """A window over the ranks of `comm`, which are all on one host. `meet` waits for all of them."""

    def __init__(self, MPI: Any, comm: Any) -> None:
        self.rank, self.size, self.turn = comm.rank, comm.size, 0
        self.window = MPI.Win.Allocate_shared(2 * CHUNK, 1, comm=comm)
        self.window.Lock_all()
        self.parts = [np.frombuffer(self.window.Shared_query(r)[0], np.uint8) for r in range(comm.size)]

    @classmethod
    def over(cls, MPI: Any, comm: Any) -> SharedMemory | None:
        """That of `comm`, all ranks of which call this; None where shared memory does not serve."""
        host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        serves = np.array([host.size == comm.size <= cores()], np.int32)
        host.Free()
        comm.Allreduce(MPI.IN_PLACE, serves, MPI.MIN)  # one answer for all
        return cls(MPI, comm) if serves[0] else None

    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str, meet: Callable[[], None]) -> None:
        source, target, reduce, step = x.reshape(-1), out.reshape(-1), REDUCE[op], CHUNK // x.itemsize
        for first in range(0, source.size, step):
            n = min(step, source.size - first)
            start, self.turn = self.turn * CHUNK, 1 - self.turn
            parts = [part[start : start + n * x.itemsize].view(x.dtype) for part in self.parts]
            np.copyto(parts[self.rank], source[first : first + n])
            self._meet(meet)
            mine = self._slice(n, x.itemsize)
            total = parts[0][mine]
            for part in parts[1:]:
                reduce(total, part[mine], out=total)
            self._meet(meet)
            np.copyto(target[first : first + n], parts[0])

    def _slice(self, n: int, itemsize: int) -> slice:
        """The part of n elements that this rank reduces, in whole lines of the cache."""
        per_rank = -(-n // self.size)
        per_rank += -per_rank % max(1, SLICE // itemsize)
        return slice(self.rank * per_rank, (self.rank + 1) * per_rank)

    def _meet(self, meet: Callable[[], None]) -> None:
        self.window.Sync()  # what was written is seen by those who come after the meeting
        meet()
        self.window.Sync()

    def free(self) -> None:
        self.parts.clear()
        self.window.Unlock_all()
        self.window.Free()
