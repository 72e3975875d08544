"""Which moments a server keeps: the ends of clocks that are due for a snapshot, and the workers that wait for one.

A server says in its answer to the end of a clock that a snapshot is due. A worker then ends its next clock with the
wish to keep it. `snapshot.py` writes the snapshots and tells how one moment comes about on all servers.
"""

from __future__ import annotations

from collections.abc import Callable

from .consistency import Clocks
from .messages import Message, RefusedError


class Moments:
    """The snapshots that are to come, and the last one. A server keeps none until `keep` is set."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.keep: Callable[[int], None] | None = None  # takes the snapshot of a clock
        self.due = float("inf")  # when the next one should be taken
        self.coming: set[int] = set()  # clocks
        self.last = -1  # the last clock of which one was taken
        self.awaited: dict[tuple[int, int], Message] = {}  # requests for an answer once a snapshot is on disk

    def wish(self, clock: int, now: float) -> dict[str, bool] | None:
        """What a worker that is about to begin `clock` is told, if the end of this clock should be kept."""
        wanted = now >= self.due and not self.coming and clock <= self.clocks.slowest
        return {"snapshot": True} if wanted else None

    def wished(self, end: Message) -> None:
        """Keep the moment after the end of a clock, if the worker wishes so and this server keeps any."""
        if self.keep is not None and end.facts.get("snapshot") is True:
            self.coming.add(end.step + 1)

    def reached(self) -> None:
        """Keep this moment if it is one of those to come."""
        past = {clock for clock in self.coming if clock <= self.clocks.slowest}
        if past and self.keep is not None:
            self.last = max(past)
            self.coming -= past
            self.keep(self.last)

    def forget(self, worker: int) -> None:
        """Nobody waits any more in this life of a worker; in the next, a number is that of another request."""
        self.awaited = {name: message for name, message in self.awaited.items() if name[0] != worker}

    def wait(self, message: Message) -> list[Message]:
        """Hold the request for an answer once the snapshot of its clock is on disk; RefusedError if it cannot be."""
        if self.keep is None:
            raise RefusedError("snapshot", "this server keeps no snapshots", fix="start it with Options(snapshots=...)")
        if message.step > self.clocks.slowest:
            self.coming.add(message.step)  # the worker that heard the wish first may have been killed
        elif message.step > self.last:
            raise RefusedError("snapshot", f"clock {message.step} was not kept: the server was killed", fix="ask anew")
        self.awaited[message.worker, message.seq] = message
        return []
