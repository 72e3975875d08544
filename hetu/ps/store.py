"""The parameter server as a state machine without I/O: `handle(message, now) -> replies`.

Sockets, processes and time stay outside, so a test can try any interleaving of messages. A request that must wait
for other workers is parked and answered when the last of them ticks: nobody polls. Every request has a number that
its worker never reuses; one that comes again is answered again but not applied again, so a client may resend
whenever it is in doubt (M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
section 4). A worker that is silent for longer than its lease is taken out, so that nobody waits for the dead.
Ignored on purpose: who may speak for a worker (`session.py`), and replication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import HetuError
from .consistency import Clocks, Consistency
from .functions import call_function
from .messages import Kind, Message, RefusedError
from .partial_reduce import Controller
from .table import Table, TableSpec

WINDOW = 4096  # requests of one worker that may be ahead of its oldest unfinished one
_GATED = (Kind.PULL, Kind.PUSH_PULL, Kind.SYNC, Kind.CLOCK)  # may have to wait for other workers
_ON_TABLE = (Kind.ASSIGN, Kind.PUSH, Kind.PULL, Kind.PUSH_PULL, Kind.SYNC, Kind.RATE, Kind.CALL)
_OF_THE_CLOCK = (Kind.PUSH, Kind.PUSH_PULL, Kind.RATE, Kind.CLOCK)  # only while their worker is at work on it


@dataclass
class Member:
    """What the store knows of one worker."""

    last_seen: float
    incarnation: int | None = None
    retired: set[int] = field(default_factory=set)  # incarnations that are over
    done: int = 0  # every request up to this number has been handled
    ahead: set[int] = field(default_factory=set)  # and these beyond it
    refused: dict[int, Message] = field(default_factory=dict)

    def knows(self, seq: int) -> bool:
        return seq <= self.done or seq in self.ahead

    def expired(self, now: float, lease: float) -> bool:
        """Silent for too long. One who has not come yet is waited for: it may be reading its data."""
        return self.incarnation is not None and now - self.last_seen > lease

    def finish(self, seq: int) -> None:
        self.ahead.add(seq)
        while self.done + 1 in self.ahead:
            self.done += 1
            self.ahead.remove(self.done)


class ParameterStore:
    """Tables, clocks and parked requests of one server for `workers` workers.

    `lease` seconds of silence end a worker; then `on_loss` "evict" goes on without it and "fail" refuses all further
    work. `memory_limit` bounds the bytes of values and held-back pushes. `epoch` tells one life of a server from the
    next: requests of another epoch are refused.

    >>> store = ParameterStore(1, Consistency(0))
    >>> hello = Message(Kind.HELLO, meta={"incarnation": 7})
    >>> store.handle(hello, now=0.0)[0].meta["clock"]
    0
    """

    def __init__(
        self,
        workers: int,
        consistency: Consistency,
        *,
        epoch: int = 1,
        lease: float = 60.0,
        on_loss: str = "evict",
        memory_limit: int = 8 << 30,
        partial: Controller | None = None,
        now: float = 0.0,
    ) -> None:
        self.consistency, self.epoch, self.clocks = consistency, epoch, Clocks(workers)
        self.lease, self.on_loss, self.memory_limit = lease, on_loss, memory_limit
        self.partial = partial or Controller(workers)
        self.members = [Member(now) for _ in range(workers)]
        self.tables: dict[int, Table] = {}
        self.parked: dict[tuple[int, int], Message] = {}
        self.failure: RefusedError | None = None
        self.bytes_used, self.counts = 0, dict.fromkeys(Kind, 0)
        self._out: list[Message] = []
        self._write: dict[Kind, Callable[[Message], None]] = {
            Kind.CREATE: self._create,
            Kind.ASSIGN: self._assign,
            Kind.PUSH: self._push,
            Kind.PUSH_PULL: self._push,
            Kind.RATE: self._rate,
            Kind.CLOCK: self._clock,
            Kind.LEAVE: self._leave,
        }
        self._answer: dict[Kind, Callable[[Message], Message]] = {
            Kind.CREATE: lambda m: m.reply(step=int((~self.tables[m.key].filled).sum())),
            Kind.PULL: self._pull,
            Kind.PUSH_PULL: self._pull,
            Kind.SYNC: self._sync,
            Kind.CALL: self._call,
            Kind.STATUS: lambda m: m.reply(meta=self.status()),
        }

    # -- the machine -----------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> list[Message]:
        """The replies to this message, and to the parked ones that it sets free. Replies name their worker and seq.

        Whatever is wrong with the message is answered with an ERROR and changes nothing.
        """
        try:
            self._admit(message, now)
        except HetuError as error:
            self._out.append(message.refusal(error))
        return self._drain()

    def tick(self, now: float) -> list[Message]:
        """Take out workers whose lease is over, and let partial reduce's deadlines pass."""
        lost = [w for w in self.clocks.of if self.members[w].expired(now, self.lease)]
        for worker in lost if self.failure is None else ():
            if self.on_loss == "fail":
                self._fail(RefusedError("lost", f"worker {worker} was silent for {self.lease:g} s and the job ends"))
            else:
                self._remove(worker)
        self._out += self.partial.tick(now)
        return self._drain()

    def _drain(self) -> list[Message]:
        out, self._out = self._out, []
        return out

    def _admit(self, message: Message, now: float) -> None:
        """Everything that can be said of a message without looking at its content."""
        if message.worker >= len(self.members):
            raise RefusedError("worker", f"worker {message.worker} of a job of {len(self.members)}")
        if self.failure:
            raise self.failure
        if message.kind is Kind.HELLO:
            self._out.append(self._hello(message, now))
            return
        member = self.members[message.worker]
        if message.epoch != self.epoch or member.incarnation is None:
            raise RefusedError("epoch", f"a message of epoch {message.epoch}, this is {self.epoch}", fix="say HELLO")
        if message.worker not in self.clocks.of:
            raise RefusedError("evicted", f"worker {message.worker} is no longer part of the job", fix="say HELLO")
        member.last_seen = now
        if message.seq in member.refused:
            self._out.append(member.refused[message.seq])
        elif not member.knows(message.seq):
            self._first_time(message, member, now)
        elif message.kind is Kind.READY:
            self._out += self.partial.ready(message, now)
        else:
            self._check(message, again=True)
            self._respond(message)

    def _first_time(self, message: Message, member: Member, now: float) -> None:
        if message.seq > member.done + WINDOW:
            raise RefusedError("seq", f"request {message.seq} when {member.done} were handled")
        try:
            self._check(message)
            if message.kind in self._write:
                self._write[message.kind](message)
        except HetuError as error:  # the number is used up: the same request again gets the same answer
            member.refused[message.seq] = message.refusal(error)
            if len(member.refused) > WINDOW:
                del member.refused[next(iter(member.refused))]
            member.finish(message.seq)
            raise
        member.finish(message.seq)
        self.counts[message.kind] += 1
        if message.kind is Kind.READY:
            self._out += self.partial.ready(message, now)
        else:
            self._respond(message)

    def _check(self, message: Message, again: bool = False) -> None:
        """Refuse what does not fit the tables and clocks. What comes `again` may be of an earlier clock."""
        kind = message.kind
        if kind not in self._write and kind not in self._answer and kind not in (Kind.PING, Kind.READY):
            raise RefusedError("kind", f"{kind.name} is not for a server")
        if kind in _ON_TABLE or (again and kind is Kind.CREATE):
            if message.key not in self.tables:
                raise RefusedError("key", f"no table {message.key} on this server", fix="create it first")
            self.tables[message.key].check(message)
            if kind in _GATED:
                self.tables[message.key].check_readable(message.ids)
        clock = self.clocks.of[message.worker]
        if kind in _OF_THE_CLOCK and not again:
            wrong = message.step != clock or not self.consistency.may_work(clock, self.clocks.slowest)
        else:
            wrong = message.step > clock + 1  # reads for the next clock may be sent ahead
        if wrong:
            raise RefusedError("clock", f"{kind.name} of clock {message.step}, worker {message.worker} is at {clock}")

    # -- membership ------------------------------------------------------------------------------------------

    def _hello(self, message: Message, now: float) -> Message:
        member, incarnation = self.members[message.worker], (message.meta or {}).get("incarnation")
        if type(incarnation) is not int:
            raise RefusedError("hello", "a HELLO without an incarnation number")
        if incarnation in member.retired:
            raise RefusedError("hello", f"an earlier life of worker {message.worker}")
        if incarnation != member.incarnation:
            self._forget(message.worker)
            retired = member.retired | ({member.incarnation} - {None})
            member = self.members[message.worker] = Member(now, incarnation, retired)
        member.last_seen = now
        self.partial.join(message.worker)
        clock = self.clocks.join(message.worker)
        meta = {"clock": clock, "lease": self.lease, "consistency": str(self.consistency)}
        return Message(Kind.OK, worker=message.worker, seq=message.seq, epoch=self.epoch, meta=meta)

    def _forget(self, worker: int) -> None:
        """Drop what a worker left unfinished: parked requests, and what is held back of a clock it did not end.

        Without buffering the pushes of that clock have been applied already, and its next life pushes them again.
        """
        self.parked = {name: message for name, message in self.parked.items() if name[0] != worker}
        self.partial.forget(worker)
        if self.clocks.of.get(worker) == self.clocks.slowest:
            for table in self.tables.values():
                self.bytes_used -= sum(push.nbytes for push in table.pending if push.worker == worker)
                table.pending = [push for push in table.pending if push.worker != worker]

    def _remove(self, worker: int) -> None:
        self._forget(worker)
        slowest = self.clocks.slowest
        self.clocks.remove(worker)
        self._advance(slowest)
        self._out += self.partial.gone(worker)

    def _leave(self, message: Message) -> None:
        self._remove(message.worker)

    def _fail(self, failure: RefusedError) -> None:
        self.failure = failure
        self._out += [message.refusal(failure) for message in self.parked.values()]
        self.parked.clear()

    # -- requests that change something ----------------------------------------------------------------------

    def _create(self, message: Message) -> None:
        spec = TableSpec.parse(message.meta or {})
        known = self.tables.get(message.key)
        if known is not None:
            if known.spec != spec:
                raise RefusedError("spec", f"table {message.key} is {known.spec}, not {spec}", fix="create it alike")
            return
        self._use_memory(spec.footprint)
        self.tables[message.key] = Table(spec)

    def _assign(self, message: Message) -> None:
        self.tables[message.key].assign(message)

    def _push(self, message: Message) -> None:
        table = self.tables[message.key]
        if not self.consistency.buffered:
            table.apply([message], self._weight(table))
            return
        self._use_memory(message.nbytes)
        table.pending.append(message)

    def _rate(self, message: Message) -> None:
        rate = message.meta["rate"] if message.meta and len(message.meta) == 1 and "rate" in message.meta else None
        if not isinstance(rate, int | float) or not 0 <= rate < 1e30:
            raise RefusedError("rate", f"a learning rate {rate!r}", fix="send one number >= 0")
        self.tables[message.key].rule.rate[...] = rate

    def _clock(self, message: Message) -> None:
        slowest = self.clocks.slowest
        self.clocks.tick(message.worker)
        self._advance(slowest)

    def _advance(self, slowest_before: int) -> None:
        """Close the clock that the last worker has finished, and answer whoever waited for that."""
        if self.clocks.slowest == slowest_before:
            return
        for table in self.tables.values():
            if table.pending:
                self.bytes_used -= sum(push.nbytes for push in table.pending)
                table.apply(sorted(table.pending, key=lambda push: (push.worker, push.seq)), self._weight(table))
                table.pending = []
        waiting, self.parked = self.parked, {}
        for message in waiting.values():
            self._respond(message)

    def _weight(self, table: Table) -> float:
        return 1 / max(1, len(self.clocks.of)) if table.spec.reduce == "mean" else 1.0

    def _use_memory(self, nbytes: int) -> None:
        if self.bytes_used + nbytes > self.memory_limit:
            raise RefusedError("memory", f"{self.bytes_used + nbytes} bytes, the limit is {self.memory_limit}")
        self.bytes_used += nbytes

    # -- answers ---------------------------------------------------------------------------------------------

    def _respond(self, message: Message) -> None:
        """Answer a request that has been applied, or park it until the slowest worker has come close enough."""
        clock = message.step + (message.kind is Kind.CLOCK)
        if message.kind in _GATED and not self.consistency.may_work(clock, self.clocks.slowest):
            self.parked[message.worker, message.seq] = message
            return
        answer = self._answer.get(message.kind)
        try:
            self._out.append(answer(message) if answer else message.reply(step=self.clocks.slowest))
        except HetuError as error:
            self._out.append(message.refusal(error))

    def _pull(self, message: Message) -> Message:
        return message.reply(step=self.clocks.slowest, values=self.tables[message.key].read(message.ids))

    def _sync(self, message: Message) -> Message:
        ids, versions, rows = self.tables[message.key].newer(message.ids, message.counts)
        return message.reply(step=self.clocks.slowest, ids=ids, counts=versions, values=rows)

    def _call(self, message: Message) -> Message:
        meta, table = message.meta or {}, self.tables[message.key]
        try:
            ids, rows = call_function(str(meta.get("function")), table.values, dict(meta.get("arguments") or {}))
        except HetuError:
            raise
        except Exception as error:  # a user's function must not end the server
            raise RefusedError("function", f"{meta.get('function')}: {type(error).__name__}: {error}") from error
        return message.reply(ids=ids, values=rows)

    def status(self) -> dict[str, Any]:
        """What is going on, as plain data."""
        return {
            "consistency": str(self.consistency),
            "clocks": {str(worker): clock for worker, clock in self.clocks.of.items()},
            "lead": self.clocks.lead,
            "parked": len(self.parked),
            "bytes": self.bytes_used,
            "requests": {kind.name.lower(): n for kind, n in self.counts.items() if n},
            "tables": len(self.tables),
        }
