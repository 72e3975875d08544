"""A rank's view of the others. Every message goes through the grader, which switches and counts it.

It has `rank`, `world_size`, `exchange`, `send` and `recv`, and no collective: those are what the labs are about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Ask = Callable[[list[Any], list[int | None]], list[tuple[int, Any]]]


class RankComm:
    """One rank of `world_size`. Values are numbers, texts, lists, tuples, dicts and arrays."""

    def __init__(self, rank: int, world_size: int, ask: Ask) -> None:
        self.rank, self.world_size, self._ask = rank, world_size, ask

    def exchange(self, sends: Sequence[tuple[int, Any]], recvs: Sequence[tuple[int, np.ndarray]]) -> None:
        """Send [(to, array), ...] and receive into [(source, buffer), ...] at the same time; end when all is done."""
        arrived = self._ask([(self._peer(to), value) for to, value in sends], [self._peer(s) for s, _ in recvs])
        for (source, value), (_, buffer) in zip(arrived, recvs):
            got = np.asarray(value)
            if got.shape != buffer.shape or got.dtype != buffer.dtype:
                raise ValueError(
                    f"rank {self.rank} receives {got.dtype}{list(got.shape)} from rank {source}, "
                    f"into a buffer of {buffer.dtype}{list(buffer.shape)}"
                )
            buffer[...] = got

    def send(self, to: int, value: Any) -> None:
        """Send a value; where sends are matched with receives, end when it was received."""
        self._ask([(self._peer(to), value)], [])

    def recv(self, source: int | None = None) -> Any:
        """The next value from a rank; from any of them, (source, value)."""
        ((sender, value),) = self._ask([], [None if source is None else self._peer(source)])
        return (sender, value) if source is None else value

    def _peer(self, rank: int) -> int:
        if not 0 <= int(rank) < self.world_size:
            raise ValueError(f"there is no rank {rank}: ranks are 0 to {self.world_size - 1}")
        if int(rank) == self.rank:
            raise ValueError(f"rank {rank} sends to itself, or receives from itself: keep the value instead")
        return int(rank)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"comm.{name} is not there in this lab: build it from comm.exchange, send and recv")
