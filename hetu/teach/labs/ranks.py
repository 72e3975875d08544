"""Ranks that are processes, and the switch between them: it carries every message and counts it.

A rank asks for an *exchange*: messages that it sends, and sources that it waits for. It goes on when all that it waits
for has come and, with `rendezvous`, all that it sent was taken. When every rank waits or is done and none can go on,
no one ever will: that is told at once, with who waits for whom. Nothing here depends on time but a rank that computes
for too long.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .process import Ended, Process, elapsed

MESSAGES = 100_000  # in one call
HELD = 256 << 20  # bytes of messages that wait


@dataclass(frozen=True)
class Switched:
    """One message that was sent: from which rank, to which, and how many numbers and bytes it held."""

    source: int
    to: int
    numbers: int
    nbytes: int


@dataclass
class Ran:
    """What ranks came to: the value of each, and all messages in the order in which the switch saw them."""

    values: list[Any]
    messages: list[Switched]

    def sent(self, rank: int) -> list[Switched]:
        """The messages of one rank."""
        return [m for m in self.messages if m.source == rank]


class Failed(Exception):
    """A rank's answer is no value: which rank, what it said, and what the others wait for meanwhile.

    `is_over` says that all ranks have answered, so that they can be asked again.
    """

    def __init__(self, rank: int, answer: list[Any], others: str, is_over: bool) -> None:
        super().__init__(f"rank {rank}: {answer}")
        self.rank, self.answer, self.others, self.is_over = rank, answer, others, is_over


@dataclass
class Waiting:
    """An exchange under way: what has not been taken of what was sent, and what has come of what is waited for."""

    untaken: int
    sources: list[int | None]
    arrived: list[tuple[int, Any] | None] = field(default_factory=list)


def size(value: Any) -> tuple[int, int]:
    """How many numbers and bytes a message has. Eight letters are a number, and so are 64 bits of a long one: what is
    packed costs what it holds.
    """
    if isinstance(value, np.ndarray):
        return value.size, value.nbytes
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        parts = [size(item) for item in value]
        return sum(n for n, _ in parts), sum(b for _, b in parts)
    if isinstance(value, str):
        return -(-len(value) // 8), len(value)
    words = max(-(-value.bit_length() // 64), 1) if isinstance(value, int) else int(value is not None)
    return words, 8 * words


class Switch:
    """Runs one call on some processes, each a rank, until all have answered."""

    def __init__(self, processes: Sequence[Process], rendezvous: bool) -> None:
        self.processes, self.rendezvous = processes, rendezvous
        n = len(processes)
        self.heard: queue.Queue[tuple[int, Any]] = queue.Queue()
        self.boxes: list[deque[tuple[int, Any]]] = [deque() for _ in range(n)]  # for each rank: (source, value)
        self.waiting: dict[int, Waiting] = {}
        self.values: dict[int, Any] = {}
        self.failed: dict[int, Any] = {}
        self.messages: list[Switched] = []
        self.held = 0

    def run(self, name: str, args: Sequence[Sequence[Any]], kwargs: dict[str, Any]) -> Ran:
        """Call `name` on every rank, rank r with `args[r]`. Failed or Ended when one does not answer with a value."""
        n = len(self.processes)
        for rank, process in enumerate(self.processes):
            process.send(["call", name, list(args[rank]), kwargs, rank, n])
            self.listen(rank)
        deadline = elapsed(self.processes) + self.processes[0].limits.total
        while len(self.values) + len(self.failed) < n:
            if elapsed(self.processes) > deadline:
                raise Ended("the ranks still send messages after all that time: does a loop never end?")
            if len(self.waiting) + len(self.values) + len(self.failed) == n:
                break
            rank, answer = self.heard.get()
            self.take(rank, answer)
        if self.failed:
            rank = min(self.failed)
            raise Failed(rank, self.failed[rank], self.others(rank), not self.waiting)
        if self.waiting:
            raise Ended(self.in_vain())
        return Ran([self.values[r] for r in range(n)], self.messages)

    def listen(self, rank: int) -> None:
        """Have the next answer of a rank put into `heard`."""

        def wait() -> None:
            try:
                self.heard.put((rank, self.processes[rank].read()))
            except Ended as error:
                self.heard.put((rank, error))

        threading.Thread(target=wait, daemon=True).start()

    def take(self, rank: int, answer: Any) -> None:
        """Act on what a rank said."""
        if isinstance(answer, Ended):
            raise Ended(f"rank {rank}: {answer}{self.others(rank)}")
        match answer:
            case ["value", value]:
                self.values[rank] = value
            case ["exchange", list(sends), list(recvs)] if self.are_there(rank, sends, recvs):
                self.post(rank, sends, recvs)
            case ["exchange", *_]:
                raise Ended(f"rank {rank} talks to a rank that is not there")
            case _:
                self.failed[rank] = answer  # what the other ranks say is waited for: the first of them is told

    def are_there(self, rank: int, sends: list[Any], recvs: list[Any]) -> bool:
        """Whether an exchange is one, between this rank and others that there are."""
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in sends):
            return False
        peers = [to for to, _ in sends] + [source for source in recvs if source is not None]
        return all(type(peer) is int and 0 <= peer < len(self.processes) and peer != rank for peer in peers)

    def post(self, rank: int, sends: list[Any], recvs: list[Any]) -> None:
        """Put the messages of a rank into their boxes, and let go on who can."""
        for to, value in sends:
            numbers, nbytes = size(value)
            self.messages.append(Switched(rank, to, numbers, nbytes))
            self.boxes[to].append((rank, value))
            self.held += nbytes
        if len(self.messages) > MESSAGES or self.held > HELD:
            raise Ended(f"{len(self.messages):,} messages were sent, of which {self.held:,} bytes were not received")
        self.waiting[rank] = Waiting(len(sends) if self.rendezvous else 0, list(recvs), [None] * len(recvs))
        for peer in {rank, *(to for to, _ in sends)}:
            self.deliver(peer)
        for peer in [r for r, w in self.waiting.items() if not w.untaken and None not in w.arrived]:
            done = self.waiting.pop(peer)
            self.processes[peer].send(["arrived", done.arrived])
            self.listen(peer)

    def deliver(self, rank: int) -> None:
        """Match what a rank waits for with what is in its box, in the order of sending."""
        waiting = self.waiting.get(rank)
        if waiting is None:
            return
        for place, wanted in enumerate(waiting.sources):
            if waiting.arrived[place] is None:
                found = next((m for m in self.boxes[rank] if wanted in (None, m[0])), None)
                if found is not None:
                    index = next(i for i, m in enumerate(self.boxes[rank]) if m is found)
                    del self.boxes[rank][index]
                    self.held -= size(found[1])[1]
                    waiting.arrived[place] = found
                    if found[0] in self.waiting and self.rendezvous:
                        self.waiting[found[0]].untaken -= 1

    def in_vain(self) -> str:
        """Who waits for whom, when nobody can go on."""
        lines = [f"rank {r} {self.wants(r)}" for r in sorted(self.waiting)]
        lines += [f"rank {r} is done" for r in sorted(self.values)]
        return "nobody can go on: " + "; ".join(lines)

    def wants(self, rank: int) -> str:
        waiting = self.waiting[rank]
        missing = [s for s, got in zip(waiting.sources, waiting.arrived) if got is None]
        told = ["any rank" if s is None else f"rank {s}" for s in missing]
        parts = [f"waits for a message from {' and '.join(told)}"] if told else []
        if waiting.untaken:
            to = sorted({peer for peer, box in enumerate(self.boxes) for source, _ in box if source == rank})
            parts.append(f"has sent to {' and '.join(f'rank {peer}' for peer in to)}, which does not receive")
        return " and ".join(parts)

    def others(self, rank: int) -> str:
        """What the others wait for, when one is late."""
        told = [f"rank {r} {self.wants(r)}" for r in sorted(self.waiting) if r != rank]
        return "".join(f"\n{line}" for line in told)
