"""A job that exists only as a heap of events, with everything going wrong that can: a seed is a history.

Servers and network are those of `virtual.py`, which loses, delays, repeats, reorders and truncates messages; workers
are generators. The nemesis cuts workers off, freezes servers, kills one or all and starts them from their snapshots,
and kills workers, whose next life has another incarnation: one may never come, another may begin while the one before
still works. Workers ask for what is refused: rows that are not there, a table too large, an answer too large. Time is
virtual, so leases end without waiting.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hetu.ps import server_function
from hetu.ps.store.messages import Kind, Message, ProtocolError, decode, encode
from hetu.ps.wire.handshake import Introduction, sign_of_life

from .history import SHARED, Operation
from .virtual import CELLS, LEASE, TABLE, TOKEN, Network

RETRY, TICK, END = 0.05, 0.05, 120.0  # seconds of virtual time
BEAT = LEASE / 8  # more often than a real worker, so that nobody is lost by the loss of messages alone
OUTAGES = 4  # servers that are killed forever let no lease end
MODES = ("bsp", "ssp:1", "asp", "ssp:3", "ssp:0")
Request = tuple[int, int]  # server, number
SPEC = {"name": "cells", "start": 0, "rows": CELLS, "cols": 1, "rule": "add", "reduce": "sum"}


@server_function
def more_than_fits(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An answer beyond the limit of a message, which takes no memory as long as nobody writes it."""
    return np.zeros(1, "<i8"), np.zeros((1, 1 << 25), "<f4")


WRONG: dict[str, tuple[Kind, dict[str, Any]]] = {  # what is refused, by its code
    "value": (Kind.PUSH, {"ids": np.array([CELLS]), "values": np.ones((1, 1), "f")}),
    "memory": (Kind.CREATE, {"key": TABLE + 1, "meta": {**SPEC, "rows": 1 << 40}}),
    "size": (Kind.CALL, {"meta": {"function": "more_than_fits"}}),
}


class World(Network):
    """One run of `workers` workers over `clocks` clocks; `trouble` scales all faults."""

    def __init__(
        self,
        seed: int,
        mode: str,
        folder: Path,
        *,
        servers: int = 1,
        workers: int = 3,
        clocks: int = 8,
        trouble: float = 1.0,
    ) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(random.Random(seed), mode, folder, servers=servers, workers=workers, trouble=trouble)
        self.clocks, self.crew = clocks, [Worker(self, rank) for rank in range(workers)]
        self.crew[-1].done = self.rng.random() < 0.2  # one is killed before it has come

    def run(self) -> list[str]:
        """Everything until all workers have left, and what is wrong with it; a job that hangs is an error."""
        for host in self.hosts:
            host.start()
        self.at(0.0, self.tick)
        for worker in self.crew:
            if not worker.done:
                self.at(self.rng.random() * 0.1, worker.start)
        self.at(self.rng.uniform(0.1, 0.5), self.strike)
        while not all(worker.done for worker in self.crew) or not all(host.sessions for host in self.hosts):
            self.now, _, act = heapq.heappop(self.events)
            if self.now > END:
                raise AssertionError(f"a job that hangs: {[(w.clock, w.done) for w in self.crew]}")
            act()
        return [line for host in self.hosts for line in host.check()]

    def tick(self) -> None:
        for host in self.hosts:
            if host.sessions is not None and not host.frozen:
                store = host.sessions.store
                before = {*store.clocks.of}
                self.answer(host, host.sessions.tick(self.now))
                for rank in before - store.clocks.of.keys():
                    worker = self.living.get((rank, (store.members[rank].incarnation or 0) % 1000))
                    assert worker is None or worker.done or self.cut.get(rank, 0.0) > self.now - LEASE, (
                        f"{rank} gave signs of life"
                    )
        self.at(TICK, self.tick)

    # -- the nemesis -----------------------------------------------------------------------------------------

    def strike(self) -> None:
        """One of the faults, and then the next."""
        faults = [self.freeze, self.cut_off, self.kill_worker, self.double]
        if any(len(host.history.outages) < OUTAGES for host in self.hosts):
            faults += [self.kill_server, self.kill_all_servers]
        if self.rng.random() < self.trouble:
            self.rng.choice(faults)()
        self.at(self.rng.uniform(0.1, 0.5), self.strike)

    def freeze(self) -> None:
        host = self.rng.choice(self.hosts)
        if host.sessions is not None and not host.frozen:
            host.frozen = True
            self.at(self.rng.uniform(0.05, 1.5), host.thaw)

    def kill_server(self) -> None:
        """One alone, which goes on from its own newest snapshot."""
        host = self.rng.choice(self.hosts)
        if host.sessions is not None and host.clocks:
            host.die(host.clocks[-1])
            self.at(self.rng.uniform(0.05, 1.0), host.start)

    def kill_all_servers(self) -> None:
        """They go on from the newest clock that all have."""
        common = set.intersection(*(set(host.clocks) for host in self.hosts))
        if common and all(host.sessions is not None for host in self.hosts):
            for host in self.hosts:
                host.die(max(common))
                self.at(self.rng.uniform(0.05, 1.0), partial(host.start, max(common)))

    def cut_off(self) -> None:
        self.cut[self.rng.randrange(self.workers)] = self.now + self.rng.uniform(0.05, 2.0)

    def kill_worker(self) -> None:
        worker = self.rng.choice(self.crew)
        if worker.lives:
            worker.die()

    def double(self) -> None:
        """Another process takes the place of a worker that works on, or has only come to some servers."""
        worker = self.rng.choice(self.crew)
        if worker.lives:
            self.crew[worker.rank] = other = Worker(self, worker.rank, worker.life)
            other.start()


class Line:
    """A worker's connection to one server, as the real client's `Link`."""

    def __init__(self, introduction: Introduction) -> None:
        self.introduction = introduction
        self.seq, self.epoch, self.granted, self.at, self.due = 0, 0, 0, 0, False
        self.flying: dict[int, Message] = {}


class Worker:
    """Reads all cells, pushes one or two, reads again perhaps, ends the clock; resends what is not answered.

    It does so on each server; a request is told by its server and number.
    """

    def __init__(self, world: World, rank: int, life: int = 0) -> None:
        self.world, self.rank, self.life, self.done, self.clock = world, rank, life, False, 0

    def start(self) -> None:
        """A new life, which knows nothing of the ones before."""
        self.life += 1
        self.world.living[self.rank, self.life] = self
        said = TOKEN, self.rank, self.incarnation
        self.clock, self.lines = 0, [Line(Introduction("", *said)) for _ in self.world.hosts]
        self.answers: dict[Request, Message] = {}
        for server in range(len(self.lines)):
            self.greet(server)
        self.script = self._script()
        self.wanted: set[Request] = {(server, 0) for server in range(len(self.lines))}
        self.world.at(RETRY, lambda life=self.life: self.resend(life))
        self.beat(self.life)

    def die(self) -> None:
        self.end()
        if self.world.crew[self.rank] is self:
            self.world.at(self.world.rng.uniform(0.0, 2.5), self.start)

    def end(self) -> None:
        """Answers to this life go nowhere."""
        self.world.living.pop((self.rank, self.life), None)

    @property
    def lives(self) -> bool:
        """Whether it is at work."""
        return not self.done and (self.rank, self.life) in self.world.living

    # -- what it does ----------------------------------------------------------------------------------------

    def _script(self) -> Generator[set[Request], None, None]:
        """Yields the requests whose answers it waits for."""
        rng, fields = self.world.rng, {"key": TABLE}
        self.clock = max(line.granted for line in self.lines)
        granted = [line.granted for line in self.lines]
        for clock in range(max(0, min(granted) - 1), self.clock):  # as the real client
            yield {self.send(s, Kind.CLOCK, step=clock) for s, of in enumerate(granted) if of <= clock + 1}
        created = self.everywhere(Kind.CREATE, meta=SPEC, **fields)
        yield created
        yield {self._assign(server) for server, seq in created if self.answers[server, seq].step}
        for server, seq in sorted(created):
            if "coming" in self.answers[server, seq].facts:
                waited = self.send(server, Kind.CREATE, meta={**SPEC, "turn": "wait"}, **fields)
                yield {waited}
                yield {self._assign(server)} if self.answers[waited].step else set()
        while self.clock < self.world.clocks:
            yield from self._compute()
            if rng.random() < 0.8:  # which has it wait, so that the push needs not
                yield from self._read()
            yield from self._push(rng.randint(1, 2))
            if rng.random() < 0.2:
                yield from self._err(rng.choice([*WRONG]))
            if rng.random() < 0.5:
                yield from self._read()
            yield from self._end_clock()
        yield self.everywhere(Kind.LEAVE)
        self.done = True

    def _assign(self, server: int) -> Request:
        return self.send(server, Kind.ASSIGN, key=TABLE, values=np.zeros((CELLS, 1), "f"))

    def _compute(self) -> Generator[set[Request], None, None]:
        """Time passes; its end is an answer with a number that no request has."""
        number = -self.clock - 1
        self.world.at(self.world.rng.random() * 0.3, lambda life=self.life: self._computed(number, life))
        yield {(0, number)}

    def _computed(self, number: int, life: int) -> None:
        if self.lives and life == self.life:
            self._answered(0, Message(Kind.OK, seq=number))

    def _begin(self, kind: str) -> list[Operation]:
        return [host.history.begin(kind, self.rank, self.life, self.clock) for host in self.world.hosts]

    def _push(self, count: int) -> Generator[set[Request], None, None]:
        pushes = {}
        for _ in range(count):
            for server, operation in enumerate(self._begin("push")):
                ids, ones = np.array([SHARED, operation.cell]), np.ones((2, 1), "f")
                pushes[self.send(server, Kind.PUSH, key=TABLE, ids=ids, values=ones)] = operation
        yield {*pushes}
        for (server, _), operation in pushes.items():
            self.world.hosts[server].history.end(operation)

    def _read(self) -> Generator[set[Request], None, None]:
        operations = self._begin("read")
        seqs = self.everywhere(Kind.SYNC, key=TABLE, ids=np.arange(CELLS), counts=np.full(CELLS, -1))
        yield seqs
        for server, seq in seqs:
            answer, history = self.answers[server, seq], self.world.hosts[server].history
            history.end(operations[server], answer.values[:, 0].copy(), answer.counts.copy())

    def _err(self, code: str) -> Generator[set[Request], None, None]:
        kind, fields = WRONG[code]
        asked = self.everywhere(kind, **{"key": TABLE, **fields})
        yield asked
        assert {self.answers[request].facts.get("code") for request in asked} == {code}

    def _end_clock(self) -> Generator[set[Request], None, None]:
        operations = self._begin("clock")
        wanted = any(line.due for line in self.lines) or self.world.rng.random() < 0.1
        yield self.everywhere(Kind.CLOCK, meta={"snapshot": True} if wanted else None)
        for host, operation in zip(self.world.hosts, operations):
            host.history.end(operation)
        self.clock += 1

    # -- how it does it --------------------------------------------------------------------------------------

    def greet(self, server: int) -> None:
        line = self.lines[server]
        first = min((seq for seq in line.flying if seq), default=line.seq + 1)
        meta = {**line.introduction.facts, "first": first, "at": line.at}
        self._transmit(server, Message(Kind.HELLO, worker=self.rank, step=line.granted, meta=meta))

    def everywhere(self, kind: Kind, **fields: Any) -> set[Request]:
        return {self.send(server, kind, **fields) for server in range(len(self.lines))}

    def send(self, server: int, kind: Kind, **fields: Any) -> Request:
        line = self.lines[server]
        line.seq += 1
        message = Message(kind, worker=self.rank, seq=line.seq, epoch=line.epoch, **{"step": self.clock, **fields})
        if kind is Kind.CLOCK:
            line.at = message.step + 1
        self._transmit(server, message)
        return server, line.seq

    def _transmit(self, server: int, message: Message) -> None:
        self.lines[server].flying[message.seq] = message
        peer = b"%d %d" % (self.rank, self.life)
        self.world.to_server(self.world.hosts[server], peer, self.rank, encode(message))

    def resend(self, life: int) -> None:
        if self.lives and life == self.life:
            for server, line in enumerate(self.lines):
                for message in list(line.flying.values()):
                    if message.seq:
                        self._transmit(server, message)
                    else:
                        self.greet(server)
            self.world.at(RETRY, lambda: self.resend(life))

    def beat(self, life: int) -> None:
        """A sign of life, from the first moment on."""
        if self.lives and life == self.life:
            sign = sign_of_life(TOKEN, self.rank, self.incarnation)
            for host in self.world.hosts:
                self.world.to_server(host, b"%d %d" % (self.rank, life), self.rank, sign)
            self.world.at(BEAT, lambda: self.beat(life))

    @property
    def incarnation(self) -> int:
        return 1000 * self.rank + self.life

    def receive(self, server: int, frames: list[bytes]) -> None:
        line = self.lines[server]
        try:
            message = decode(frames)
        except ProtocolError:
            return
        if message.kind is Kind.HELLO:
            if line.introduction.hears(message) and 0 in line.flying:
                self.greet(server)
            return
        code = message.meta["code"] if message.kind is Kind.ERROR else ""
        if code == "protocol":
            return
        if code in ("hello", "epoch") and message.seq:
            if 0 not in line.flying:
                self.greet(server)
            return
        sent = line.flying.pop(message.seq, None)
        if sent is None:
            return
        if code == "evicted" and sent.kind is not Kind.LEAVE:
            self.die()
            return
        if code == "hello":  # another process has taken its place
            assert self.world.crew[self.rank] is not self, message.meta
            self.end()
            return
        assert code in ("", "evicted", *WRONG), message.meta
        if message.seq == 0:
            self._greeted(line, message)
        elif sent.kind is Kind.CLOCK:
            line.granted, line.due = max(line.granted, sent.step + 1), message.meta is not None
        self._answered(server, message)

    def _answered(self, server: int, message: Message) -> None:
        self.answers[server, message.seq] = message
        while not self.done and self.wanted <= self.answers.keys():
            self.wanted = set(next(self.script, ()))
            if self.done:
                return

    def _greeted(self, line: Line, hello: Message) -> None:
        if line.epoch == 0:
            line.granted = line.at = hello.meta["clock"]
        old, line.epoch, line.due = line.epoch, hello.epoch, "snapshot" in hello.meta
        if old not in (0, hello.epoch):
            assert "restored" in hello.meta, "a server that forgot its job"
            for seq, m in line.flying.items():
                parts = {name: getattr(m, name) for name in ("key", "ids", "counts", "values", "meta")}
                line.flying[seq] = Message(m.kind, worker=m.worker, seq=seq, step=m.step, epoch=line.epoch, **parts)
