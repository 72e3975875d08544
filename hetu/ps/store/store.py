"""The parameter server as a state machine without I/O: `handle(message, now) -> replies`.

Sockets, processes and time stay outside, so a test can try any interleaving of messages. A request that must wait for
other workers is parked and answered when the last of them ticks; no worker polls. Every request has a number that its
worker never reuses; one that comes again is answered again but not applied again, so a client may resend whenever it is
in doubt (M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 4). A
worker that is silent for longer than its lease is taken out, so that no worker waits for the dead. `session.py` decides
who may speak for a worker. Left out: replication.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...core.errors import HetuError
from .consistency import Clocks, Consistency, consistency
from .functions import call_function
from .member import WINDOW, Member
from .messages import Kind, Message, RefusedError
from .partial_reduce import Controller
from .server_table import ServerTable, TableSpec

_GATED = {Kind.PULL, Kind.PUSH_PULL, Kind.SYNC, Kind.STATE, Kind.CLOCK}  # may have to wait for other workers
_ON_TABLE = {
    Kind.ASSIGN, Kind.PUSH, Kind.PULL, Kind.PUSH_PULL, Kind.SYNC, Kind.RATE, Kind.CALL, Kind.STATE, Kind.RESTORE
}  # fmt: skip
_OF_THE_CLOCK = {Kind.PUSH, Kind.PUSH_PULL, Kind.RATE, Kind.CLOCK}  # only while their worker is at work on it


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
        self.tables: dict[int, ServerTable] = {}
        self.parked: dict[tuple[int, int], Message] = {}
        self.failure: RefusedError | None = None
        self.bytes_used, self.counts, self.rows_synced = 0, dict.fromkeys(Kind, 0), [0, 0]  # asked for, sent
        self.traffic = [0, 0]  # bytes of arrays received and sent
        self.started = self.now = now
        self.restored: dict[str, Any] | None = None  # what a snapshot says of itself, in the life after it
        self.returning: set[int] = set()  # workers that may have been there in the life before
        self.keep: Callable[[int], None] | None = None  # takes a snapshot of a clock, where there are any
        self.due = float("inf")  # when the next snapshot should be taken
        self.cuts, self.kept = set[int](), -1  # the clocks of those to come, and of the last
        self.awaited: dict[tuple[int, int], Message] = {}  # who is to be told that they are on disk
        self._out: list[Message] = []
        self._write: dict[Kind, Callable[[Message], None]] = {
            Kind.CREATE: self._create,
            Kind.MODE: self._mode,
            Kind.ASSIGN: lambda m: self.tables[m.key].assign(m),
            Kind.RESTORE: lambda m: self.tables[m.key].restore(m),
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
            Kind.CLOCK: lambda m: m.reply(step=self.clocks.slowest, meta=self._wish(m.step + 1) or None),
            Kind.STATE: lambda m: m.reply(values=self.tables[m.key].state(m.ids)),
            Kind.CALL: self._call,
            Kind.STATUS: lambda m: m.reply(meta=self.status()),
        }
        # It is answered by what is still to come; the sender asks again when it sends again.
        self._later: dict[Kind, Callable[[Message], list[Message]]] = {
            Kind.READY: lambda m: self.partial.ready(m, self.now),
            Kind.SNAPSHOT: self._snapshot,
        }
        self._known = {Kind.PING, *self._write, *self._answer, *self._later}

    # -- the machine -----------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> list[Message]:
        """The replies to this message, and to the parked ones that it sets free. Replies name their worker and seq.

        Their values may be a table's own, so a reply is to be sent before the next message is handled. Whatever is
        wrong with the message is answered with an ERROR and changes nothing.
        """
        self.now = now
        try:
            self._admit(message, now)
        except HetuError as error:
            self._out.append(message.refusal(error))
        return self._drain()

    def tick(self, now: float) -> list[Message]:
        """Take out workers whose lease is over, and let partial reduce's deadlines pass."""
        self.now = now
        lost = [w for w in self.clocks.of if (self.members[w].silence(now) or 0.0) > self.lease]
        for worker in lost if self.failure is None else ():
            if self.on_loss == "fail":
                self._fail(RefusedError("lost", f"worker {worker} was silent for {self.lease:g} s and the job ends"))
            else:
                self._remove(worker)
        self._out += self.partial.tick(now)
        return self._drain()

    def _drain(self) -> list[Message]:
        if self.cuts and min(self.cuts) <= self.clocks.slowest:
            self.kept = max(clock for clock in self.cuts if clock <= self.clocks.slowest)
            self.keep(self.kept)
            self.cuts = {clock for clock in self.cuts if clock > self.clocks.slowest}
        out, self._out = self._out, []
        for message in out:
            self.traffic[1] += message.nbytes
        return out

    def _admit(self, message: Message, now: float) -> None:
        """Everything that can be said of a message without looking at its content."""
        if message.worker >= len(self.members):
            raise RefusedError("worker", f"worker {message.worker}, but the servers expect {len(self.members)} workers")
        if self.failure:
            raise self.failure
        if message.kind is Kind.HELLO:
            self._out = self._hello(message, now) + self._out  # before what it sets free
            return
        member = self.members[message.worker]
        if message.epoch != self.epoch or member.incarnation is None:
            raise RefusedError("epoch", f"a message of epoch {message.epoch}, this is {self.epoch}", fix="say HELLO")
        if message.worker not in self.clocks.of:
            text = f"worker {message.worker} is no longer part of the job: it left, or was silent for {self.lease:g} s"
            raise RefusedError("evicted", text, fix="take part again with a new Client")
        member.last_seen = now
        if message.seq in member.refused:
            self._out.append(member.refused[message.seq])
        elif not member.knows(message.seq):
            self._first_time(message, member)
        else:
            self._check(message, again=True)
            self._respond(message)

    def _first_time(self, message: Message, member: Member) -> None:
        if message.seq > member.done + WINDOW:
            raise RefusedError("seq", f"request {message.seq} when {member.done} were handled")
        try:
            self._check(message)
            if write := self._write.get(message.kind):
                write(message)
        except HetuError as error:  # the number is used up: the same request again gets the same answer
            member.refused[message.seq] = message.refusal(error)
            if len(member.refused) > WINDOW:
                del member.refused[next(iter(member.refused))]
            member.finish(message.seq)
            raise
        member.finish(message.seq)
        self.counts[message.kind] += 1
        self.traffic[0] += message.nbytes
        self._respond(message)

    def _check(self, message: Message, again: bool = False) -> None:
        """Refuse what does not fit the tables and clocks. What comes `again` may be of an earlier clock."""
        kind = message.kind
        if kind not in self._known:
            raise RefusedError("kind", f"{kind.name} is not for a server")
        if kind in _ON_TABLE or (again and kind is Kind.CREATE):
            if message.key not in self.tables:
                raise RefusedError("key", f"no table {message.key} on this server", fix="create it first")
            self.tables[message.key].check(message)
            if kind in _GATED:
                self.tables[message.key].check_readable(message)
        clock = self.clocks.of[message.worker]
        if kind in _OF_THE_CLOCK and not again:
            # That it ended in the server's life before the snapshot, others may have shown already.
            over = kind is Kind.CLOCK and self.restored is not None and message.step < clock
            wrong = not over and (message.step != clock or not self.consistency.may_work(clock, self.clocks.slowest))
        else:  # reads for the next clock may be sent ahead; partial reduce counts iterations of its own
            wrong = message.step > clock + 1 and kind is not Kind.READY
        if wrong:
            raise RefusedError("clock", f"{kind.name} of clock {message.step}, worker {message.worker} is at {clock}")

    # -- membership ------------------------------------------------------------------------------------------

    def renew(self, worker: int, incarnation: Any, now: float) -> None:
        """The lease of a worker that is heard of, if it is in that life."""
        if worker in self.clocks.of and self.members[worker].incarnation == incarnation:
            self.members[worker].last_seen = now

    def _hello(self, message: Message, now: float) -> list[Message]:
        """The answer, if there is one already."""
        member, incarnation = self.members[message.worker], (message.meta or {}).get("incarnation")
        if type(incarnation) is not int:
            raise RefusedError("hello", "a HELLO without an incarnation number")
        if incarnation in member.retired:
            raise RefusedError("hello", f"an earlier life of worker {message.worker}")
        if incarnation != member.incarnation:
            if self._must_wait(message):
                return []
            self._forget(message.worker)
            retired = member.retired | ({member.incarnation} - {None})
            member = self.members[message.worker] = Member(now, incarnation, retired)
            self.partial.join(message.worker)
            self.clocks.join(message.worker)
        member.last_seen = now
        if message.worker in self.returning:
            self._welcome_back(message, member)
        clock = self.clocks.of.get(message.worker, self.clocks.slowest)  # a life that was taken out stays out
        meta = {"lease": self.lease, "consistency": str(self.consistency), "clock": clock, **self._wish(clock)}
        if self.restored:
            meta["restored"] = self.restored
        return [Message(Kind.OK, worker=message.worker, seq=message.seq, epoch=self.epoch, meta=meta)]

    def _must_wait(self, hello: Message) -> bool:
        """After a restart a new process asks in vain until those who know the clock are back, or lost."""
        if _was_there(hello):
            return False
        self.returning.discard(hello.worker)
        return any(self.members[other].incarnation is not None for other in self.returning & self.clocks.of.keys())

    def _welcome_back(self, hello: Message, member: Member) -> None:
        """After a restart: what happened since the snapshot is lost, but no worker goes back in time for it.

        The HELLO tells the last clock for which the server's earlier life gave leave, the clock at which the worker
        is, and its oldest request that is still without an answer.
        """
        worker, (first, at) = hello.worker, (hello.meta.get(name) for name in ("first", "at"))
        self.returning.discard(worker)
        if type(first) is not int or type(at) is not int or worker not in self.clocks.of:
            return
        member.skip_to(first)
        slowest = self.clocks.slowest
        raised = self.clocks.catch_up(worker, hello.step, self.consistency.staleness)
        late = [other for other in raised if other != worker and other not in self.returning]  # came before we knew
        self._advance(slowest)
        if _was_there(hello) and self.clocks.of[worker] > at:  # the others went on without it: it had been taken out
            late.append(worker)
        for other in late:
            self._remove(other)

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

    def _mode(self, message: Message) -> None:
        """The first worker that asks for a consistency decides; the others have to ask for the same."""
        wanted = consistency(str((message.meta or {}).get("consistency")))
        if wanted != self.consistency and (self.tables or self.counts[Kind.MODE]):
            raise RefusedError(
                "consistency",
                f"the job runs under {self.consistency}, worker {message.worker} asks for {wanted}",
                fix="all workers must ask for the same consistency",
            )
        self.consistency = wanted

    def _create(self, message: Message) -> None:
        spec = TableSpec.parse(message.meta or {})
        known = self.tables.get(message.key)
        if known is not None:
            if replace(known.spec, generation=spec.generation) != spec:
                raise RefusedError("spec", f"table {message.key} is {known.spec}, not {spec}", fix="create it alike")
            if spec.generation > known.spec.generation:
                known.refill(spec)
            return
        self._use_memory(spec.footprint)
        self.tables[message.key] = ServerTable(spec)

    def _push(self, message: Message) -> None:
        table = self.tables[message.key]
        if not self.consistency.buffered:
            table.apply([message], self._weight(table))
            return
        self._use_memory(message.nbytes)
        table.pending.append(message.kept())

    def _rate(self, message: Message) -> None:
        rate = message.meta["rate"] if message.meta and len(message.meta) == 1 and "rate" in message.meta else None
        if not isinstance(rate, int | float) or not 0 <= rate < 1e30:
            raise RefusedError("rate", f"a learning rate {rate!r}", fix="send one number >= 0")
        self.tables[message.key].rule.rate[...] = rate

    def _clock(self, message: Message) -> None:
        slowest = self.clocks.slowest
        if message.step == self.clocks.of[message.worker]:
            self.clocks.tick(message.worker)
            if self.keep is not None and (message.meta or {}).get("snapshot") is True:
                self.cuts.add(message.step + 1)
        self._advance(slowest)

    def _advance(self, slowest_before: int) -> None:
        """Close the clock that the last worker has finished, and answer the workers that waited for it."""
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

    def _weight(self, table: ServerTable) -> float:
        return 1 / max(1, len(self.clocks.of)) if table.spec.reduce == "mean" else 1.0

    def _use_memory(self, nbytes: int) -> None:
        if self.bytes_used + nbytes > self.memory_limit:
            text = f"{self.bytes_used + nbytes} bytes on one server, the limit is {self.memory_limit}"
            raise RefusedError("memory", text, fix="use more servers (heturun -s), or a higher memory_limit")
        self.bytes_used += nbytes

    # -- answers ---------------------------------------------------------------------------------------------

    def _respond(self, message: Message) -> None:
        """Answer a request that has been applied, or park it until the slowest worker has come close enough."""
        clock = message.step + (message.kind is Kind.CLOCK)
        if message.kind in _GATED and not self.consistency.may_work(clock, self.clocks.slowest):
            self.parked[message.worker, message.seq] = message
            return
        if message.kind in self._later:
            self._out += self._later[message.kind](message)
            return
        answer = self._answer.get(message.kind)
        try:
            self._out.append(answer(message) if answer else message.reply(step=self.clocks.slowest))
        except HetuError as error:
            self._out.append(message.refusal(error))

    def _pull(self, message: Message) -> Message:
        return message.reply(step=self.clocks.slowest, values=self.tables[message.key].read(message))

    def _sync(self, message: Message) -> Message:
        ids, versions, rows = self.tables[message.key].newer(message.ids, message.counts)
        self.rows_synced[0] += len(message.ids)
        self.rows_synced[1] += len(ids)
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

    def _wish(self, clock: int) -> dict[str, bool]:
        """What to tell one of the slowest workers, which is to begin `clock`: that its end should be kept, if so."""
        return {"snapshot": True} if self.now >= self.due and not self.cuts and clock <= self.clocks.slowest else {}

    def _snapshot(self, message: Message) -> list[Message]:
        if self.keep is None:
            raise RefusedError("snapshot", "this server keeps no snapshots", fix="start it with Options(snapshots=...)")
        if message.step > self.clocks.slowest:
            self.cuts.add(message.step)  # whoever heard the wish before may have been killed
        elif message.step > self.kept:
            raise RefusedError("snapshot", f"clock {message.step} was not kept: the server was killed", fix="ask anew")
        self.awaited[message.worker, message.seq] = message
        return []

    def status(self) -> dict[str, Any]:
        """What is going on, as plain data: counts since the start, seconds, bytes."""
        return {
            "consistency": str(self.consistency),
            "clocks": {str(worker): clock for worker, clock in self.clocks.of.items()},
            "silent": {str(worker): self.members[worker].silence(self.now) for worker in self.clocks.of},
            "lead": self.clocks.lead,
            "widest": self.clocks.widest,
            "parked": len(self.parked),
            "bytes": self.bytes_used,
            "requests": {kind.name.lower(): n for kind, n in self.counts.items() if n},
            "received": self.traffic[0],
            "sent": self.traffic[1],
            "rows": {"asked": self.rows_synced[0], "fetched": self.rows_synced[1]},
            "seconds": self.now - self.started,
            "tables": len(self.tables),
            "restored": self.restored,
        }


def _was_there(hello: Message) -> bool:
    """Whether it comes from a life that this server, or its own earlier life, has greeted before."""
    return hello.step > 0 or (hello.meta or {}).get("first", 1) != 1
