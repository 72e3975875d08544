"""A job that exists only as a heap of events, with everything going wrong that can: a seed is a history.

The server is the real one behind its door (`Sessions`, `ParameterStore`, `Snapshots`); workers and network are made of
generators and lists. The nemesis drops, delays, repeats, reorders and truncates messages, cuts workers off, freezes the
server, kills it and starts it from its snapshot, and kills workers, whose next life has another incarnation. Time is
virtual, so leases end without waiting.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hetu.ps import ParameterStore, consistency
from hetu.ps.messages import Kind, Message, ProtocolError, decode, encode
from hetu.ps.session import Sessions
from hetu.ps.snapshot import Snapshots

from .history import SHARED, History

TABLE, TOKEN = 1, "secret"
LEASE, RETRY, TICK, END = 1.0, 0.05, 0.05, 120.0  # seconds of virtual time
CELLS = 400
MODES = ("bsp", "ssp:1", "asp", "ssp:3", "ssp:0")
SPEC = {"name": "cells", "start": 0, "rows": CELLS, "cols": 1, "rule": "add", "reduce": "sum"}


class World:
    """One run of `workers` workers over `clocks` clocks; `trouble` scales all faults."""

    def __init__(self, seed: int, mode: str, folder: Path, workers: int = 3, clocks: int = 8, trouble: float = 1.0):
        self.rng, self.mode, self.workers, self.clocks = random.Random(seed), mode, workers, clocks
        self.now, self.turn, self.events = 0.0, itertools.count(), []
        self.loss = self.rng.choice([0.0, 0.05, 0.2]) * trouble
        self.trouble, self.snapshots = trouble, Snapshots(folder, every=1e9)
        self.history = History(consistency(mode), CELLS)
        self.sessions: Sessions | None = None
        self.frozen, self.waiting, self.lives, self.saved = False, [], 0, 0
        self.cut: dict[int, float] = {}  # until when a worker is cut off
        self.crew = [Worker(self, rank) for rank in range(workers)]

    def run(self) -> History:
        """Everything until all workers have left; a job that hangs is an error."""
        self.start_server()
        self.at(0.0, self.tick)
        for worker in self.crew:
            self.at(self.rng.random() * 0.1, worker.start)
        self.at(self.rng.uniform(0.1, 0.5), self.strike)
        while not all(worker.done for worker in self.crew):
            self.now, _, act = heapq.heappop(self.events)
            if self.now > END:
                raise AssertionError(f"a job that hangs: {[(w.clock, w.done) for w in self.crew]}")
            act()
        return self.history

    def at(self, delay: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.turn), act))

    @property
    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        table = self.sessions.store.tables[TABLE]
        return table.values[:, 0], table.versions

    # -- the network -----------------------------------------------------------------------------------------

    def to_server(self, peer: bytes, rank: int, frames: list[bytes]) -> None:
        self._carry(rank, self.crew[rank].life, frames, partial(self.arrive, peer))

    def _carry(self, rank: int, life: int, frames: list[bytes], deliver: Callable[[list[bytes]], None]) -> None:
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
            ends = (self.lives, rank, life)
            self.at(self.rng.random() * slow, partial(self._deliver, ends, deliver, frames))

    def _deliver(self, ends: tuple[int, int, int], deliver: Callable[[list[bytes]], None], frames: list[bytes]) -> None:
        server, rank, life = ends  # what is on its way goes with its connection
        if self.sessions is not None and server == self.lives and life == self.crew[rank].life:
            deliver(frames)

    def _truncated(self, frames: list[bytes]) -> list[bytes]:
        place = self.rng.randrange(len(frames))
        return [*frames[:place], frames[place][: self.rng.randrange(len(frames[place]) + 1)]]

    # -- the server ------------------------------------------------------------------------------------------

    def start_server(self) -> None:
        self.lives += 1
        store = ParameterStore(self.workers, self.history.mode, epoch=self.lives, lease=LEASE, now=self.now)
        self.sessions, self.frozen = Sessions(store, TOKEN), False
        self.snapshots.restore(store)

    def arrive(self, peer: bytes, frames: list[bytes]) -> None:
        if self.frozen:
            self.waiting.append((peer, frames))
        elif self.sessions is not None:
            self.answer(self.sessions.receive(peer, frames, self.now))

    def tick(self) -> None:
        if self.sessions is not None and not self.frozen:
            self.answer(self.sessions.tick(self.now))
        self.at(TICK, self.tick)

    def answer(self, envelopes: list[tuple[bytes, list[bytes]]]) -> None:
        for peer, frames in envelopes:
            rank, life = map(int, peer.split())
            self._carry(rank, life, frames, self.crew[rank].receive)

    # -- the nemesis -----------------------------------------------------------------------------------------

    def strike(self) -> None:
        """One of the faults, or a snapshot, and then the next."""
        faults = [self.save, self.save, self.freeze, self.kill_server, self.cut_off, self.kill_worker]
        if self.rng.random() < self.trouble:
            self.rng.choice(faults)()
        else:
            self.save()
        self.at(self.rng.uniform(0.1, 0.5), self.strike)

    def save(self) -> None:
        if self.sessions is not None and not self.frozen and TABLE in self.sessions.store.tables:
            self.saved = next(self.history.now)
            self.snapshots.write(self.sessions.store, [])
            self.snapshots.finish()

    def freeze(self) -> None:
        if self.sessions is not None and not self.frozen:
            self.frozen = True
            self.at(self.rng.uniform(0.05, 1.5), self.thaw)

    def thaw(self) -> None:
        self.frozen, waiting, self.waiting = False, self.waiting, []
        for peer, frames in waiting:
            self.arrive(peer, frames)

    def kill_server(self) -> None:
        if self.sessions is not None and self.saved:
            self.history.outages.append((self.saved, next(self.history.now)))
            self.sessions, self.waiting, self.frozen = None, [], False
            self.at(self.rng.uniform(0.05, 1.0), self.start_server)

    def cut_off(self) -> None:
        self.cut[self.rng.randrange(self.workers)] = self.now + self.rng.uniform(0.05, 2.0)

    def kill_worker(self) -> None:
        worker = self.rng.choice(self.crew)
        if not worker.done:
            worker.die()


class Worker:
    """Reads all cells, pushes one or two, reads again perhaps, ends the clock; resends what is not answered."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.life, self.done, self.clock = world, rank, 0, False, 0

    def start(self) -> None:
        """A new life, which knows nothing of the ones before."""
        self.life += 1
        self.seq, self.epoch, self.clock, self.granted = 0, 0, 0, 0
        self.flying: dict[int, Message] = {}
        self.answers: dict[int, Message] = {}
        self.greet()
        self.script = self._script()
        self.wanted: set[int] = {0}
        self.world.at(RETRY, lambda life=self.life: self.resend(life))

    def die(self) -> None:
        self.life += 1  # answers to the old one go nowhere
        self.world.at(self.world.rng.uniform(0.0, 2.5), self.start)

    # -- what it does ----------------------------------------------------------------------------------------

    def _script(self) -> Generator[set[int], None, None]:
        """Yields the numbers of the requests whose answers it waits for."""
        history, rng, fields = self.world.history, self.world.rng, {"key": TABLE}
        self.clock = self.granted
        yield {self.send(Kind.CREATE, meta=SPEC, **fields)}
        yield {self.send(Kind.ASSIGN, values=np.zeros((CELLS, 1), "f"), **fields)}
        while self.clock < self.world.clocks:
            yield from self._compute()
            yield from self._read()
            pushes = {}
            for _ in range(rng.randint(1, 2)):
                operation = history.begin("push", self.rank, self.life, self.clock)
                ids, ones = np.array([SHARED, operation.cell]), np.ones((2, 1), "f")
                pushes[self.send(Kind.PUSH, ids=ids, values=ones, **fields)] = operation
            yield pushes.keys()
            for operation in pushes.values():
                history.end(operation)
            if rng.random() < 0.5:
                yield from self._read()
            yield from self._end_clock()
        yield {self.send(Kind.LEAVE)}
        self.done = True

    def _compute(self) -> Generator[set[int], None, None]:
        """Time passes; its end is an answer with a number that no request has."""
        number = -self.clock - 1
        self.world.at(self.world.rng.random() * 0.3, lambda life=self.life: self._computed(number, life))
        yield {number}

    def _computed(self, number: int, life: int) -> None:
        if life == self.life:
            self._answered(Message(Kind.OK, seq=number))

    def _read(self) -> Generator[set[int], None, None]:
        operation = self.world.history.begin("read", self.rank, self.life, self.clock)
        ids = np.arange(CELLS)
        seq = self.send(Kind.SYNC, key=TABLE, ids=ids, counts=np.full(CELLS, -1))
        yield {seq}
        answer = self.answers[seq]
        self.world.history.end(operation, answer.values[:, 0].copy(), answer.counts.copy())

    def _end_clock(self) -> Generator[set[int], None, None]:
        operation = self.world.history.begin("clock", self.rank, self.life, self.clock)
        yield {self.send(Kind.CLOCK)}
        self.world.history.end(operation)
        self.clock += 1
        self.granted = max(self.granted, self.clock)

    # -- how it does it --------------------------------------------------------------------------------------

    def greet(self) -> None:
        first = min((seq for seq in self.flying if seq), default=self.seq + 1)
        at = self.clock + any(message.kind is Kind.CLOCK for message in self.flying.values())
        meta = {"token": TOKEN, "incarnation": 1000 * self.rank + self.life, "first": first, "at": at}
        self._transmit(Message(Kind.HELLO, worker=self.rank, step=self.granted, meta=meta))

    def send(self, kind: Kind, **fields: Any) -> int:
        self.seq += 1
        self._transmit(Message(kind, worker=self.rank, seq=self.seq, step=self.clock, epoch=self.epoch, **fields))
        return self.seq

    def _transmit(self, message: Message) -> None:
        self.flying[message.seq] = message
        self.world.to_server(b"%d %d" % (self.rank, self.life), self.rank, encode(message))

    def resend(self, life: int) -> None:
        if life == self.life and not self.done:
            for message in list(self.flying.values()):
                self._transmit(message)
            self.world.at(RETRY, lambda: self.resend(life))

    def receive(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames)
        except ProtocolError:
            return
        code = message.meta["code"] if message.kind is Kind.ERROR else ""
        if code == "protocol":
            return
        if code in ("hello", "epoch") and message.seq:
            if 0 not in self.flying:
                self.greet()
            return
        if code == "evicted":
            self.done = self.flying.get(message.seq, message).kind is Kind.LEAVE
            if not self.done:
                self.die()
            return
        if self.flying.pop(message.seq, None) is None:
            return
        assert not code, message.meta
        self._answered(message)

    def _answered(self, message: Message) -> None:
        if message.seq == 0:
            self._greeted(message)
        self.answers[message.seq] = message
        while not self.done and self.wanted <= self.answers.keys():
            self.wanted = set(next(self.script, ()))
            if self.done:
                return

    def _greeted(self, hello: Message) -> None:
        self.granted = max(self.granted, hello.meta["clock"]) if self.epoch == 0 else self.granted
        old, self.epoch = self.epoch, hello.epoch
        if old not in (0, hello.epoch):
            assert "restored" in hello.meta, "a server that forgot its job"
            for seq, m in self.flying.items():
                parts = {name: getattr(m, name) for name in ("key", "ids", "counts", "values", "meta")}
                self.flying[seq] = Message(m.kind, worker=m.worker, seq=seq, step=m.step, epoch=self.epoch, **parts)
