"""The parameter server as a state machine without I/O: `handle(message, now) -> replies`.

Sockets, processes and time stay outside, so a test can try any interleaving of messages. A request that must wait for
other workers is parked and answered when the last of them ticks; no worker polls. Every request has a number that its
worker never reuses. A repeated request is answered again but not applied again, so a client may resend whenever it is
in doubt (M. Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 4). A
worker that is silent for longer than its lease is removed, so that no worker waits for the dead. `session.py` decides
who may speak for a worker. Left out: replication.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from typing import Any

from .consistency import Clocks, Consistency, Moments, consistency
from .door import understood
from .functions import Elements, call_function
from .givers import Givers
from .growing import table_of
from .member import WINDOW, Member
from .messages import Kind, Message, RefusedError, given
from .partial_reduce import Controllers
from .reductions import Reductions
from .rules import Gradients
from .seen import Latencies, status_of
from .server_table import ALIKE, ServerTable
from .table_spec import TableSpec
from .welcome import GATED, ON_TABLE, check_fits, welcome


class ParameterStore:
    """Tables, clocks and parked requests of one server for `workers` workers.

    A worker is lost after `lease` seconds of silence, or if it has not come `arrive` seconds after the first; then
    `on_loss` "evict" goes on without it and "fail" refuses all further work. `memory_limit` bounds the bytes of values
    and of what is held back; `finite` refuses pushes of NaN and infinities. `epoch` tells one life of a server from the
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
        arrive: float = math.inf,
        on_loss: str = "evict",
        memory_limit: int = 8 << 30,
        finite: bool = False,
        partial: Controllers | None = None,
        now: float = 0.0,
    ) -> None:
        self.consistency, self.epoch, self.clocks = consistency, epoch, Clocks(workers)
        self.lease, self.arrive, self.on_loss = lease, arrive, on_loss
        self.memory_limit, self.finite, self.partial = memory_limit, finite, partial or Controllers(workers)
        self.members = [Member(math.inf) for _ in range(workers)]
        self.tables: dict[int, ServerTable] = {}
        self.reductions = Reductions(self.members, self.clocks)
        self.givers = Givers(self.tables, self._ask_again)
        self.gradients: Gradients = {}  # in which pushes are summed
        self.maps = list[Elements]()  # held back until their clock closes
        self.parked: dict[tuple[int, int], Message] = {}
        self.failure: RefusedError | None = None
        self.bytes_used, self.counts = 0, dict.fromkeys(Kind, 0)
        self.traffic, self.handled = [0, 0], Latencies()  # bytes of arrays received and sent; how long requests take
        self.started = self.now = now
        self.restored: dict[str, Any] | None = None  # what a snapshot says of itself, in the life after it
        self.inherit: Callable[[ServerTable], None] = lambda table: None  # fills it with what others have kept
        self.returning: set[int] = set()  # workers that may have been there in the life before
        self.afresh = False  # after a restart, until a worker is there: if none of the life before is, all begin anew
        self.moments, self._out = Moments(self.clocks), list[Message]()

    # -- the machine -----------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> list[Message]:
        """The replies to this message, and to the parked ones that it sets free. Replies name their worker and seq.
        Their values may be a table's own, so send a reply before the next message is handled. A message that is wrong
        in any way is answered with an ERROR and changes nothing.
        """
        self.now = now
        try:
            self._admit(message, now)
        except Exception as error:
            self._out.append(message.refusal(understood(error)))
        return self._drain()

    def tick(self, now: float) -> list[Message]:
        """Remove workers whose lease is over, and let the deadlines of partial reduce pass."""
        self.now = now
        lost = {w: why for w in self.clocks.of if (why := self.members[w].why_lost(now, self.lease, self.arrive))}
        for worker, why in lost.items() if self.failure is None else ():
            if self.on_loss == "fail":
                self.failure = RefusedError("lost", f"worker {worker} {why} and the job ends")
                self._ask_again()
            else:
                self.remove(worker, why)
        self._out += self.partial.tick(now)
        self.givers.draw()
        return self._drain()

    def _drain(self) -> list[Message]:
        self.moments.reached()
        self.partial.decided(len(self.tables))
        out, self._out = self._out, []
        self.traffic[1] += sum(message.nbytes for message in out)
        return out

    def _admit(self, message: Message, now: float) -> None:
        """Refuse what does not fit the sender's life, then handle what has not been handled yet."""
        if message.worker >= len(self.members):
            raise RefusedError("worker", f"worker {message.worker}, but the servers expect {len(self.members)} workers")
        if self.failure:
            raise self.failure
        if message.kind is Kind.HELLO:
            self._out = welcome(self, message, now) + self._out  # before what it sets free
            return
        member = self.members[message.worker]
        if message.epoch != self.epoch or member.incarnation is None:
            raise RefusedError("epoch", f"a message of epoch {message.epoch}, this is {self.epoch}", fix="say HELLO")
        if message.worker not in self.clocks.of:
            text = f"worker {message.worker} is no longer part of the job: it {member.lost or 'left'}"
            raise RefusedError("evicted", text, fix="take part again with a new Client")
        member.last_seen = now
        if message.seq in member.refused:
            self._out.append(member.refused[message.seq])
        elif not member.knows(message.seq):
            self._first_time(message, member)
        else:
            self.check_fits(message, again=True)
            self._respond(message)

    def _first_time(self, message: Message, member: Member) -> None:
        if message.seq > member.done + WINDOW:
            raise RefusedError("seq", f"request {message.seq} when {member.done} were handled")
        try:
            self.check_fits(message)
            if write := _WRITE.get(message.kind):
                write(self, message)
        except Exception as error:  # the number is used up: the same request again gets the same answer
            member.refused[message.seq] = message.refusal(told := understood(error))
            if len(member.refused) > WINDOW:
                del member.refused[next(iter(member.refused))]
            member.finish(message.seq)
            raise told from error
        member.finish(message.seq)
        self.counts[message.kind] += 1
        self.traffic[0] += message.nbytes - message.saved
        self._respond(message)

    check_fits = check_fits

    # -- membership ------------------------------------------------------------------------------------------

    def renew(self, worker: int, incarnation: Any, now: float) -> None:
        """Renew the lease of a worker that gives a sign of that life."""
        if worker in self.clocks.of and self.members[worker].incarnation == incarnation:
            self.members[worker].last_seen = now

    def forget(self, worker: int) -> None:
        """Drop what a worker left unfinished: parked requests, and held-back pushes of a clock that it did not end.

        Without buffering, the pushes of that clock are applied already, and the worker's next life pushes them again.
        """
        self.parked = {name: message for name, message in self.parked.items() if name[0] != worker}
        self.partial.forget(worker)
        self.moments.forget(worker)
        self.givers.forget(worker)
        for key in [key for key, table in self.tables.items() if table.spec.fleeting]:
            self._unused(key, worker)
        clock = self.clocks.of.get(worker, math.inf)

        def ended(message: Message) -> bool:
            return message.worker != worker or message.step < clock

        self.bytes_used -= sum(held.nbytes for held in self.maps if not ended(held.message))
        self.maps = [held for held in self.maps if ended(held.message)]
        for table in self.tables.values():
            self.bytes_used -= sum(push.nbytes for push in table.pending if not ended(push))
            table.pending = [push for push in table.pending if ended(push)]

    def remove(self, worker: int, why: str = "") -> None:
        """Take a worker out of the job: nobody waits for it any more."""
        self.members[worker].lost = why
        self.forget(worker)
        slowest = self.clocks.slowest
        self.clocks.remove(worker)
        self.advance(slowest)
        self._out += self.partial.gone(worker)
        self._ask_again()  # for reductions, which lack its part

    # -- requests that change something ----------------------------------------------------------------------

    def _mode(self, message: Message) -> None:
        """The first worker that asks for a consistency decides; the others must ask for the same."""
        wanted = consistency(message.facts["consistency"])
        if wanted != self.consistency and (self.tables or self.counts[Kind.MODE]):
            text = f"the job runs under {self.consistency}, worker {message.worker} asks for {wanted}"
            raise RefusedError("consistency", text, fix="all workers must ask for the same consistency")
        self.consistency = wanted

    def _create(self, message: Message) -> None:
        spec, known = TableSpec.parse(message.facts), self.tables.get(message.key)
        if known is None:
            if spec.mode is not None and spec.mode.staleness > self.consistency.staleness:
                text = f"{spec.name} is to be under {spec.mode}, the job is under {self.consistency}"
                raise RefusedError("consistency", text, fix="run the job under the loosest mode of its tables")
            self._check_memory(spec.footprint)
            self.inherit(known := table_of(spec, self.gradients))
            self.tables[message.key] = known
            self.bytes_used += spec.footprint
        elif replace(known.spec, generation=spec.generation) != spec:
            raise RefusedError("spec", f"table {message.key} has {known.spec.unlike(spec)}", fix=ALIKE)
        known.users.add(message.worker)
        self.givers.hear(message, spec)

    def _free(self, message: Message) -> None:
        self._unused(message.key, message.worker)

    def _unused(self, key: int, worker: int) -> None:
        """A worker needs a table no longer: without any that does, the table goes."""
        table = self.tables.get(key)
        if table is not None:
            table.users.discard(worker)
        if table is None or table.users:
            return
        del self.tables[key]
        self.bytes_used -= table.spec.footprint + sum(push.nbytes for push in table.pending)
        waiting, on_it = self.parked.items(), {*ON_TABLE, Kind.CREATE}  # is refused when it comes again
        self.parked = {name: m for name, m in waiting if m.key != key or m.kind not in on_it}
        self.givers.drop([key])

    def _push(self, message: Message) -> None:
        table = self.tables[message.key]
        if self.mode_of(message).buffered:
            self._check_memory(message.nbytes)
            table.pending.append(message.kept())
            self.bytes_used += message.nbytes
        else:
            table.apply([message], self._weight(table))

    def _reduce(self, message: Message) -> None:
        self._check_memory(message.nbytes + self.reductions.nbytes)
        if self.reductions.give(message):
            self._ask_again()

    def _map(self, message: Message) -> None:
        elements = Elements(message, self.tables)
        if self.mode_of(message).buffered:  # after the pushes of this clock
            self._check_memory(elements.nbytes)
            self.maps.append(elements)
            self.bytes_used += elements.nbytes
        else:
            elements.change()

    def _clock(self, message: Message) -> None:
        slowest = self.clocks.slowest
        if message.step == self.clocks.of[message.worker]:
            self.clocks.tick(message.worker)
            self.moments.wished(message)
        self.clocks.note_fed(message.worker, message.step, message.facts.get("fed"))
        self.advance(slowest)

    def advance(self, slowest_before: int) -> None:
        """Close the clock that the last worker has finished, and answer the workers that waited for it."""
        if self.clocks.slowest == slowest_before:
            return
        try:
            for table in self.tables.values():
                pushes = sorted(table.pending, key=lambda push: (push.step, push.worker, push.seq))
                for clock, some in groupby(pushes, key=lambda push: push.step):
                    if clock < self.clocks.slowest:  # under a mode of its own, workers may be farther
                        table.apply([*some], self._weight(table))
                table.pending = [push for push in pushes if push.step >= self.clocks.slowest]
                self.bytes_used -= sum(push.nbytes for push in pushes) - sum(push.nbytes for push in table.pending)
            for held in sorted(self.maps, key=lambda held: (held.message.step, held.message.worker, held.message.seq)):
                if held.message.step < self.clocks.slowest:
                    held.change()
                    self.bytes_used -= held.nbytes
            self.maps = [held for held in self.maps if held.message.step >= self.clocks.slowest]
        except Exception as error:  # half a clock is applied: nobody may go on from there
            self.failure = RefusedError("defect", f"clock {slowest_before} did not end: {understood(error).message}")
        self._ask_again()

    def _ask_again(self) -> None:
        """Answer those that need not wait any more."""
        waiting, self.parked = self.parked, {}
        for message in waiting.values():
            self._respond(message)

    def mode_of(self, message: Message) -> Consistency:
        """The consistency of the table that a request is for, or else of the job."""
        table = self.tables.get(message.key) if message.kind in ON_TABLE else None
        return self.consistency if table is None else table.spec.mode or self.consistency

    def _weight(self, table: ServerTable) -> float:
        return 1 / max(1, len(self.clocks.of)) if table.spec.reduce == "mean" else 1.0

    def _check_memory(self, nbytes: int) -> None:
        if self.bytes_used + nbytes > self.memory_limit:
            text = f"{self.bytes_used + nbytes} bytes on one server, the limit is {self.memory_limit}"
            raise RefusedError("memory", text, fix="use more servers (heturun -s), or a higher memory_limit")

    # -- answers ---------------------------------------------------------------------------------------------

    def _respond(self, message: Message) -> None:
        """Answer a request that has been applied, or park it until the slowest worker has come close enough."""
        if self.failure:
            self._out.append(message.refusal(self.failure))
            return
        if self.must_park(message):
            self.parked[message.worker, message.seq] = message
            self._out += self.partial.waits(message.worker)
            return
        answer = _ANSWER.get(message.kind)
        try:
            self._out += answer(self, message) if answer else [message.reply(step=self.clocks.slowest)]
        except Exception as error:
            self._out.append(message.refusal(understood(error)))

    def must_park(self, message: Message) -> bool:
        clock = message.step + (message.kind is Kind.CLOCK)
        waits = message.kind in GATED and not self.mode_of(message).may_work(clock, self.clocks.slowest)
        holders: dict[Kind, Any] = {Kind.CREATE: self.givers, Kind.REDUCE: self.reductions}
        return waits or (message.kind in holders and holders[message.kind].holds(message))

    def _pull(self, message: Message) -> list[Message]:
        return [message.reply(step=self.clocks.slowest, values=self.tables[message.key].read(message))]

    def _sync(self, message: Message) -> list[Message]:
        ids, versions, rows = self.tables[message.key].newer(given(message.ids), given(message.counts))
        return [message.reply(step=self.clocks.slowest, ids=ids, counts=versions, values=rows)]

    def _call(self, message: Message) -> list[Message]:
        facts, table = message.facts, self.tables[message.key]
        if table.stored is not table.values:  # all of it is decoded
            self._check_memory(table.values.nbytes)
        ids, rows = call_function(facts["function"], table.values[:], facts.get("arguments", {}))
        return [message.reply(ids=ids, values=rows)]

    status = status_of


_WRITE: dict[Kind, Callable[[ParameterStore, Message], None]] = {
    Kind.CREATE: ParameterStore._create,
    Kind.MODE: ParameterStore._mode,
    Kind.ASSIGN: lambda store, m: store.givers.fill(m),
    Kind.RESTORE: lambda store, m: store.givers.fill(m),
    Kind.PUSH: ParameterStore._push,
    Kind.PUSH_PULL: ParameterStore._push,
    Kind.RATE: lambda store, m: store.tables[m.key].rule.rate.fill(m.facts["rate"]),
    Kind.MAP: ParameterStore._map,
    Kind.REDUCE: ParameterStore._reduce,
    Kind.CLOCK: ParameterStore._clock,
    Kind.FREE: ParameterStore._free,
    Kind.LEAVE: lambda store, m: store.remove(m.worker),
}
_ANSWER: dict[Kind, Callable[[ParameterStore, Message], list[Message]]] = {
    Kind.CREATE: lambda store, m: [store.givers.answer(m)],
    Kind.PULL: ParameterStore._pull,
    Kind.PUSH_PULL: ParameterStore._pull,
    Kind.SYNC: ParameterStore._sync,
    Kind.POOL: lambda store, m: [m.reply(values=store.tables[m.key].summed(m))],
    Kind.CLOCK: lambda s, m: [m.reply(step=s.clocks.fed_alike(m.step), meta=s.moments.wish(m.step + 1, s.now))],
    Kind.STATE: lambda store, m: [m.reply(values=store.tables[m.key].state(m.ids))],
    Kind.CALL: ParameterStore._call,
    Kind.REDUCE: lambda store, m: [store.reductions.reply(m)],
    Kind.EXPORT: lambda store, m: [m.reply(**store.tables[m.key].export(**m.facts))],
    Kind.SUM: lambda store, m: [m.reply(values=Elements(m, store.tables).sum())],
    Kind.STATUS: lambda store, m: [m.reply(meta=store.status())],
    # Later messages answer these; the sender asks again when it resends.
    Kind.READY: lambda store, m: store.partial.ready(m, store.now),
    Kind.SNAPSHOT: lambda store, m: store.moments.wait(m),
}
