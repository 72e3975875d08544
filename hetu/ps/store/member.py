"""What a server knows of one worker: its present life, and which of its requests have taken effect.

A life is a number, larger the later it began: of two processes that are one worker the later one wins at every server,
whichever comes first there. Within a life requests are numbered, so a repeated one is known even if others overtook it.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field

from .messages import Message

UNANSWERED = 8  # requests of one worker that wait for others; a client has half as many in flight (`CREDIT`)
WINDOW = 4096  # requests of one worker that may be ahead of its oldest unfinished one


def new_life() -> int:
    """The number of a life that begins now: nanoseconds, of which no two processes share the last."""
    return time.time_ns() & -1024 | secrets.randbits(10)


@dataclass
class Member:
    """What the store knows of one worker."""

    last_seen: float  # before its first sign of life: since when others wait for it
    incarnation: int | None = None
    done: int = 0  # every request up to this number has been handled
    ahead: set[int] = field(default_factory=set)  # and these beyond it
    refused: dict[int, Message] = field(default_factory=dict)
    lost: str = ""  # why it was taken out
    latest: int = 0  # life that has come, and may have to wait

    def skip_to(self, first: int) -> None:
        """No request below `first` will come any more: the worker has all those answers."""
        self.done = max(self.done, first - 1)
        self.ahead = {seq for seq in self.ahead if seq > self.done}

    def knows(self, seq: int) -> bool:
        return seq <= self.done or seq in self.ahead

    def silence(self, now: float) -> float | None:
        """Seconds since its last sign of life; None before its first, because it may still be reading its data."""
        return None if self.incarnation is None else now - self.last_seen

    def why_lost(self, now: float, lease: float, arrive: float) -> str:
        """What it has done to be lost; "" unless it was silent for its lease, or did not come at all."""
        came = self.incarnation is not None
        most = lease if came else arrive
        return f"{'was silent for' if came else 'did not come in'} {most:g} s" if now - self.last_seen > most else ""

    def finish(self, seq: int) -> None:
        self.ahead.add(seq)
        while self.done + 1 in self.ahead:
            self.done += 1
            self.ahead.remove(self.done)


def was_there(hello: Message) -> bool:
    """Whether the sender's life has been greeted before, by this server or by its own earlier life."""
    return hello.step > 0 or hello.facts.get("first", 1) != 1
