"""Workers and a network that exist only as lists, so that a test decides the order of every message.

Each worker runs `clocks` steps: push, pull, tick, and waits for each answer. `schedule` numbers pick who sends next;
`echo` numbers pick old messages that are delivered once more.
"""

from __future__ import annotations

import numpy as np

from hetu.ps import Consistency, ParameterStore
from hetu.ps.store.growing import GrowingTable
from hetu.ps.store.messages import Kind, Message, decode, encode
from hetu.ps.wire.handshake import Introduction
from hetu.ps.wire.session import Sessions

DENSE, SPARSE, GROWING = 1, 2, 3
GROWS = {"budget": 1 << 14, "disk": 0, "evict": "age", "after": 1, "chance": 1.0}
LAW = {"law": "normal", "numbers": [0, 1.0], "rows": 1, "seed": [1]}
ROWS, COLS = 6, 2


def gradient(worker: int, clock: int, rows: int = 1, cols: int = 8) -> np.ndarray:
    """Values whose sum depends on the order of adding, in float32."""
    rng = np.random.default_rng([worker, clock, rows])
    return (rng.standard_normal((rows, cols)) * 10.0 ** rng.integers(-3, 4, (rows, cols))).astype("float32")


def row_ids(worker: int, clock: int) -> np.ndarray:
    return np.sort(np.random.default_rng([worker, clock]).choice(ROWS, 3, replace=False)).astype("<i8")


def new_store(
    workers: int, mode: Consistency, rule: str = "sgd", at_rest: str = "", own: tuple[str, str] = ("", ""), **options
) -> ParameterStore:
    """A store with a dense and a sparse table, which may have modes of their `own`, and every worker greeted."""
    store = ParameterStore(workers, mode, **options)
    for worker in range(workers):
        hello(store, worker)
    for key, rows, cols, its in ((DENSE, 1, 8, own[0]), (SPARSE, ROWS, COLS, own[1])):
        meta = {"name": f"t{key}", "start": 0, "rows": rows, "cols": cols, "rule": rule, "at_rest": at_rest}
        meta |= {"consistency": its} if its else {}
        store.handle(Message(Kind.CREATE, key=key, seq=key, epoch=store.epoch, meta=meta), 0.0)
    return store


def grow(store: ParameterStore, rows: int = 100, rule: str = "sgd", **grows: object) -> GrowingTable:
    """A table without a bound, which worker 0 creates by its third request."""
    meta = {"name": "g", "start": 0, "rows": rows, "cols": COLS, "rule": rule, "grows": {**GROWS, **grows}, "law": LAW}
    [reply] = store.handle(Message(Kind.CREATE, key=GROWING, seq=3, epoch=store.epoch, meta=meta), 0.0)
    assert reply.kind is Kind.OK, reply.meta
    return store.tables[GROWING]


def hello(store: ParameterStore, worker: int, incarnation: int = 100, now: float = 0.0) -> Message:
    [reply] = store.handle(Message(Kind.HELLO, worker=worker, meta={"incarnation": incarnation}), now)
    return reply


def greeting(sessions: Sessions, peer: bytes, token: str, worker: int = 0, life: int = 100, **facts: object) -> Message:
    """The HELLO that a life of a worker proves itself by on this connection."""
    introduction = Introduction("here", token, worker, life)
    first = encode(Message(Kind.HELLO, worker=worker, meta=introduction.facts))
    [(_, asked)] = sessions.receive(peer, first, 0.0)
    assert introduction.hears(decode(asked))
    return Message(Kind.HELLO, worker=worker, meta={**introduction.facts, **facts})


class Worker:
    """Sends its script one message at a time. Worker 0 has used the requests 1 and 2 to create the tables."""

    def __init__(self, rank: int, clocks: int, epoch: int = 1) -> None:
        self.rank, self.clock, self.seq, self.epoch = rank, 0, 2, epoch
        self.clocks, self.stage, self.waiting = clocks, 0, False
        self.pulls: list[tuple[int, np.ndarray]] = []

    @property
    def idle(self) -> bool:
        return self.waiting or self.clock == self.clocks

    def next(self) -> Message:
        self.seq += 1
        self.waiting = True
        fields = {"worker": self.rank, "seq": self.seq, "step": self.clock, "epoch": self.epoch}
        ids = row_ids(self.rank, self.clock)
        return (
            Message(Kind.PULL, key=DENSE, **fields),
            Message(Kind.PUSH, key=DENSE, values=gradient(self.rank, self.clock), **fields),
            Message(Kind.PUSH, key=SPARSE, ids=ids, values=gradient(self.rank, self.clock, len(ids), COLS), **fields),
            Message(Kind.CLOCK, **fields),
        )[self.stage]

    def receive(self, message: Message) -> None:
        if message.seq != self.seq or not self.waiting:
            return  # an echo
        assert message.kind is Kind.OK, message.meta
        self.waiting = False
        if self.stage == 0:
            self.pulls.append((self.clock, message.values.copy()))
        self.stage = (self.stage + 1) % 4
        self.clock += self.stage == 0


def run(store: ParameterStore, workers: list[Worker], schedule: list[int], echoes: list[int] = ()) -> list[int]:
    """Run all workers to their end; returns the lead after every message. Echoes are used up, then there are none."""
    leads, sent, echoes, schedule = [], [], list(echoes), list(schedule)
    while active := [w for w in workers if not w.idle]:
        worker = active[(schedule.pop() if schedule else 0) % len(active)]
        message = worker.next()
        sent.append(message)
        batch = [message]
        if echoes:
            batch.append(sent[echoes.pop() % len(sent)])
        for one in batch:
            for reply in store.handle(one, 0.0):
                workers[reply.worker].receive(reply)
        leads.append(store.clocks.lead)
    return leads


def contents(store: ParameterStore) -> list[bytes]:
    """Everything a server holds that a client could ever see."""
    return [
        part.tobytes()
        for key in sorted(store.tables)
        for table in (store.tables[key],)
        for part in (table.stored, table.versions, table.rule.step, *table.rule.states)
    ] + [repr(store.clocks.of).encode()]
