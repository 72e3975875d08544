"""Snapshots of several servers: one moment under BSP, what each mode promises otherwise, and always one that all have.

Every push adds 1 to a cell of its own on each server, so a shard shows exactly which pushes it holds. Messages travel
in the order of their connection and otherwise as Hypothesis draws; so do the ends of writing to disk.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu.checkpoint import generations
from hetu.dist.launch.servers import Servers, ServerStartError
from hetu.ps import ASP, BSP, SSP, Consistency, ParameterStore
from hetu.ps.store.messages import Kind, Message
from hetu.ps.wire import snapshot as module
from hetu.ps.wire.snapshot import Snapshots

SERVERS, WORKERS, CLOCKS, TABLE = 2, 3, 8, 1
SPEC = {"name": "cells", "start": 0, "rows": 1, "cols": WORKERS * CLOCKS, "rule": "add", "reduce": "sum"}


class Disk:
    """Threads that write when they are told to, or when somebody waits for them."""

    def __init__(self) -> None:
        self.waiting: list[Disk.Thread] = []
        disk = self

        class Thread:
            def __init__(self, clock, run) -> None:
                self.clock, self.run, self.said = clock, run, ""
                disk.waiting.append(self)

            def is_alive(self) -> bool:
                return self in disk.waiting

            def wait(self) -> str:
                if self.is_alive():
                    disk.waiting.remove(self)
                    self.said = self.run()
                return self.said

        self.Thread = Thread


class Job:
    """Two stores with folders below `folder`, and workers that know the real client's rules."""

    def __init__(self, mode: Consistency, folder: Path, life: int, clock: int | None = None) -> None:
        self.mode, self.life = mode, life
        self.stores = [ParameterStore(WORKERS, mode, epoch=life) for _ in range(SERVERS)]
        self.snapshots = [
            Snapshots(s, folder / f"server-{n}-of-{SERVERS}", every=0.0) for n, s in enumerate(self.stores)
        ]
        for snapshots in self.snapshots:
            snapshots.restore(clock)
        self.workers = [Worker(self, rank) for rank in range(WORKERS)]
        for _ in range(WORKERS):  # after a restart a new worker waits for the others
            for worker in self.workers:
                worker.greet()
        self.flying: list[list[Message]] = [[] for _ in range(SERVERS * WORKERS)]  # by connection
        for worker in self.workers:
            worker.begin()

    def step(self, draw: int) -> None:
        """Deliver the first message of one connection."""
        ready = [line for line in self.flying if line]
        message = ready[draw % len(ready)].pop(0)
        server = message.meta.pop("to")
        message.meta = message.meta or None
        for reply in self.stores[server].handle(message, 0.0):
            self.workers[reply.worker].receive(server, reply)

    @property
    def over(self) -> bool:
        return not any(self.flying)

    def cells(self, server: int) -> np.ndarray:
        """How often each push was added: (worker, clock)."""
        return self.stores[server].tables[TABLE].values.reshape(WORKERS, CLOCKS)


class Worker:
    """Pushes to all servers, waits, ends the clock on all, waits; asks for a snapshot when a server says so."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.seq, self.due = job, rank, [0] * SERVERS, [False] * SERVERS
        self.clocks: list[int | None] = [None] * SERVERS
        self.waiting: set[tuple[int, int]] = set()

    def greet(self) -> None:
        meta = {"incarnation": 100 * self.job.life + self.rank, "first": 1, "at": 0}
        for server, store in enumerate(self.job.stores):
            for reply in store.handle(Message(Kind.HELLO, worker=self.rank, meta=dict(meta)), 0.0):
                self.job.workers[reply.worker].clocks[server] = reply.meta["clock"]
                self.job.workers[reply.worker].due[server] = "snapshot" in reply.meta

    def begin(self) -> None:
        """As `Client` does: create, and end the clocks that only some servers knew of before they were killed."""
        self.clock = max(self.clocks)
        for server in range(SERVERS):
            self.send(server, Kind.CREATE, key=TABLE, meta=dict(SPEC))
            for clock in range(self.clocks[server], self.clock):
                self.send(server, Kind.CLOCK, step=clock)

    def send(self, server: int, kind: Kind, **fields) -> None:
        self.seq[server] += 1
        meta = {**(fields.pop("meta", None) or {}), "to": server}
        message = Message(kind, worker=self.rank, seq=self.seq[server], epoch=self.job.life, meta=meta, **fields)
        self.waiting.add((server, message.seq))
        self.last = kind
        self.job.flying[server * WORKERS + self.rank].append(message)

    def receive(self, server: int, reply: Message) -> None:
        assert reply.kind is Kind.OK, reply.meta
        self.waiting.remove((server, reply.seq))
        if self.last is Kind.CLOCK:
            self.due[server] = reply.meta is not None
        if self.waiting:
            return
        if self.last is Kind.PUSH:
            self.end_clock()
        elif self.clock < CLOCKS:
            self.push()

    def push(self) -> None:
        ones = np.zeros((1, WORKERS * CLOCKS), "f")
        ones[0, self.rank * CLOCKS + self.clock] = 1
        for server in range(SERVERS):
            self.send(server, Kind.PUSH, key=TABLE, step=self.clock, values=ones)

    def end_clock(self) -> None:
        meta = {"snapshot": True} if any(self.due) else None
        for server in range(SERVERS):
            self.send(server, Kind.CLOCK, step=self.clock, meta=meta)
        self.clock += 1


def promised(mode: Consistency, cells: np.ndarray, clock: int) -> bool:
    """All of the clocks below, once, and none of those that nobody could have reached."""
    reach = CLOCKS if mode.staleness == np.inf else clock + int(mode.staleness)
    return (cells[:, :clock] == 1).all() and (cells[:, clock:reach] <= 1).all() and not cells[:, reach:].any()


def common_clock(folder: Path) -> int | None:
    """The clock from which the launcher would have all servers go on; None while not all have a snapshot."""
    with contextlib.suppress(ServerStartError):
        return Servers([""] * SERVERS, WORKERS, snapshots=folder).origin()[0]
    return None


@settings(max_examples=20)
@given(st.sampled_from([BSP(), BSP(), SSP(0), SSP(2), ASP()]), st.integers(0, 300), st.integers(0, 1 << 32))
def test_what_all_servers_go_on_from_is_one_moment(mode, steps, seed):
    rng, disk = random.Random(seed), Disk()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "Threaded", disk.Thread)
        job, common, slow = Job(mode, Path(name), life=1), None, rng.random()
        while not job.over and steps > 0:  # then all are killed, in the midst of whatever they write
            steps -= 1
            job.step(rng.randrange(30))
            if disk.waiting and rng.random() < slow:
                rng.choice(disk.waiting).wait()
            before, common = common, common_clock(Path(name))
            assert before is None or common >= before
        disk.waiting.clear()
        if common is None:
            return
        again = Job(mode, Path(name), life=2, clock=common)
        assert all(promised(mode, again.cells(server), common) for server in range(SERVERS))
        while not again.over:
            again.step(rng.randrange(30))
        for cells in map(again.cells, range(SERVERS)):
            assert (cells[:, : None if mode.staleness == 0 else common] == 1).all()  # what was under way is pushed anew


def test_a_server_that_is_behind_with_writing_waits_before_it_takes_the_next(tmp_path, monkeypatch):
    """Or the other, which hears everything first here, would have dropped what this one has."""
    disk, commons = Disk(), [None]
    monkeypatch.setattr(module, "Threaded", disk.Thread)
    job = Job(BSP(), tmp_path, life=1)
    while not job.over:
        job.step(0)
        for thread in [thread for thread in disk.waiting if thread.run.func.__self__ is job.snapshots[0]]:
            thread.wait()
        commons.append(common_clock(tmp_path))
        assert commons[-2] is None or commons[-1] >= commons[-2]
    kept = [generations(snapshots.folder) for snapshots in job.snapshots]
    assert kept[0][-1] > kept[1][-1] and [*map(len, kept)] == [module.KEPT] * SERVERS
