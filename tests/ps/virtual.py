"""Servers and a network that exist only in virtual time: a heap of events, and messages that get lost on their way.

The servers are the real ones behind their doors. The network drops, delays, repeats, reorders and truncates messages,
and cuts workers off. `nemesis.py` has the workers, and what strikes.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hetu.checkpoint import generations
from hetu.ps import Consistency, ParameterStore, consistency
from hetu.ps.wire.session import Sessions
from hetu.ps.wire.snapshot import Snapshots

from .history import History, check

TABLE, TOKEN, CELLS = 1, "secret", 400
LEASE, ARRIVE = 1.0, 5.0  # seconds of virtual time


class Network:
    """Events in the order of their time, servers, and messages between them and the lives of workers."""

    def __init__(
        self, rng: random.Random, mode: str, folder: Path, *, servers: int, workers: int, trouble: float
    ) -> None:
        self.rng, self.workers, self.trouble = rng, workers, trouble
        self.now, self.turn, self.events = 0.0, itertools.count(), []
        self.loss, self.every = rng.choice([0.0, 0.05, 0.2]) * trouble, rng.choice([0.0, 0.5])
        self.hosts = [Host(self, consistency(mode), folder / f"server-{number}") for number in range(servers)]
        self.cut: dict[int, float] = {}  # until when a worker is cut off
        self.living: dict[tuple[int, int], Any] = {}  # workers by rank and life

    def at(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.turn), act))

    def to_server(self, host: Host, peer: bytes, rank: int, frames: list[bytes]) -> None:
        self._carry(host, rank, int(peer.split()[1]), frames, partial(host.arrive, peer))

    def answer(self, host: Host, envelopes: list[tuple[bytes, list[bytes]]]) -> None:
        for peer, frames in envelopes:
            rank, life = map(int, peer.split())
            if worker := self.living.get((rank, life)):
                self._carry(host, rank, life, frames, partial(worker.receive, self.hosts.index(host)))

    def _carry(
        self, host: Host, rank: int, life: int, frames: list[bytes], deliver: Callable[[list[bytes]], None]
    ) -> None:
        """Deliver these frames, if at all, unless the server or this life of the worker ends before."""
        frames = [bytes(memoryview(frame).cast("B")) for frame in frames]
        if self.cut.get(rank, 0.0) > self.now:
            return
        for _ in range(1 + (self.rng.random() < self.loss)):
            draw = self.rng.random()
            if draw < self.loss / 2:
                continue
            if draw < self.loss:
                frames = self._truncated(frames)
            slow = 0.2 if self.rng.random() < self.loss else 0.005
            ends = (host, host.lives, rank, life)
            self.at(self.rng.random() * slow, partial(self._deliver, ends, deliver, frames))

    def _deliver(
        self, ends: tuple[Host, int, int, int], deliver: Callable[[list[bytes]], None], frames: list[bytes]
    ) -> None:
        host, lives, rank, life = ends  # what is on its way goes with its connection
        if host.sessions is not None and lives == host.lives and (rank, life) in self.living:
            deliver(frames)

    def _truncated(self, frames: list[bytes]) -> list[bytes]:
        place = self.rng.randrange(len(frames))
        return [*frames[:place], frames[place][: self.rng.randrange(len(frames[place]) + 1)]]


class Host:
    """One server: its door while it lives, its folder, and the history of what workers did to it."""

    def __init__(self, world: Network, mode: Consistency, folder: Path) -> None:
        self.world, self.folder, self.history = world, folder, History(mode, CELLS)
        self.sessions: Sessions | None = None
        self.frozen, self.waiting, self.lives = False, [], 0
        self.taken: dict[int, int] = {}  # when the snapshots of clocks were begun

    def start(self, clock: int | None = None) -> None:
        self.lives += 1
        waits = {"lease": LEASE, "arrive": ARRIVE, "now": self.world.now}
        store = ParameterStore(self.world.workers, self.history.mode, epoch=self.lives, **waits)
        self.sessions, self.frozen = Sessions(store, TOKEN), False
        self.snapshots = Snapshots(store, self.folder, every=self.world.every)
        self.snapshots.restore(clock)
        store.moments.keep = self.keep

    def keep(self, clock: int) -> None:
        self.taken[clock] = next(self.history.now)
        self.snapshots.take(clock)
        self.snapshots.finish()

    def die(self, clock: int) -> None:
        """Until `start` goes on from the snapshot of this clock."""
        self.history.outages.append((self.taken[clock], next(self.history.now)))
        self.sessions, self.waiting, self.frozen = None, [], False

    def arrive(self, peer: bytes, frames: list[bytes]) -> None:
        if self.frozen:
            self.waiting.append((peer, frames))
        elif self.sessions is not None:
            self.world.answer(self, self.sessions.receive(peer, frames, self.world.now))

    def thaw(self) -> None:
        self.frozen, waiting, self.waiting = False, self.waiting, []
        for peer, frames in waiting:
            self.arrive(peer, frames)

    @property
    def clocks(self) -> list[int]:
        """Those of which there are snapshots."""
        return generations(self.folder)

    def check(self) -> list[str]:
        table = self.sessions.store.tables[TABLE]
        return check(self.history, table.values[:, 0], table.versions)
