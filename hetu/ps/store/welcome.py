"""How a request is let in: what it must fit before it changes anything, and how a HELLO welcomes its worker.

It must fit its table, its worker's clock, and what that still waits for. A worker is welcomed as a new life, in place
of an earlier one, or back after a restart of the server. One that knows the clock goes on where it was, and tells a
server that has forgotten it. A new process waits until all of those are back or lost, so that it does not begin in the
past.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...core.errors import ValueRangeError
from .door import check_facts
from .member import UNANSWERED, Member, was_there
from .messages import FRAME_LIMIT, Kind, Message, RefusedError
from .server_table import ServerTable

ANSWERS = {Kind.OK, Kind.ERROR}
ROWS = {Kind.PULL, Kind.PUSH_PULL, Kind.SYNC, Kind.STATE, Kind.EXPORT, Kind.POOL}  # are answered with rows
GATED = ROWS | {Kind.CALL, Kind.SUM, Kind.CLOCK}  # these may have to wait for other workers
ON_TABLE = GATED - {Kind.CLOCK} | {Kind.ASSIGN, Kind.PUSH, Kind.RATE, Kind.MAP, Kind.RESTORE}
OF_THE_CLOCK = {Kind.PUSH, Kind.PUSH_PULL, Kind.RATE, Kind.MAP, Kind.CLOCK}  # only while their worker works on it


def check_fits(store: Any, message: Message, again: bool = False) -> None:
    """Refuse what does not fit the tables and clocks of a `ParameterStore`, of which this is a method. A message that
    comes `again` may be of an earlier clock."""
    kind = message.kind
    if kind in ANSWERS:
        raise RefusedError("kind", f"{kind.name} is not for a server")
    if message.meta is not None:
        check_facts(message)
    if kind in ON_TABLE or (again and kind is Kind.CREATE):
        if message.key not in store.tables:
            raise RefusedError("key", f"no table {message.key} on this server", fix="create it first")
        store.tables[message.key].check(message)
        if store.finite and kind in (Kind.PUSH, Kind.PUSH_PULL):
            store.tables[message.key].check_finite(message)
        if kind in ROWS:
            check_readable(store.tables[message.key], message)
    clock = store.clocks.of[message.worker]
    if kind in OF_THE_CLOCK and not again:
        # A worker's next life asks so when it may go on; others may have shown a restarted server what is over.
        over = kind is Kind.CLOCK and message.step < clock
        wrong = not over and (message.step != clock or not store.consistency.may_work(clock, store.clocks.slowest))
    else:  # reads for the next clock may be sent ahead; partial reduce counts iterations of its own
        wrong = message.step > clock + 1 and kind is not Kind.READY
    if (store.parked or store.moments.awaited) and not again:
        held = [seq for worker, seq in (*store.parked, *store.moments.awaited) if worker == message.worker]
        if len(held) >= UNANSWERED and (kind is Kind.SNAPSHOT or store.must_park(message)):
            raise RefusedError("credit", f"worker {message.worker} waits for {len(held)} answers already")
    if wrong:
        raise RefusedError("clock", f"{kind.name} of clock {message.step}, worker {message.worker} is at {clock}")


def check_readable(table: ServerTable, message: Message) -> None:
    """Refuse an answer that no message could carry."""
    rows = table.spec.rows if message.ids is None else len(message.ids)
    rows = message.facts.get("most", rows)
    arrays = len(table.arrays) if message.kind in (Kind.STATE, Kind.EXPORT) else 1
    if rows * table.spec.cols * arrays * table.values.itemsize > FRAME_LIMIT:
        raise ValueRangeError(f"{rows} rows of {table.spec.name} do not fit a message", fix="ask for fewer at once")


def welcome(store: Any, message: Message, now: float) -> list[Message]:
    """What a `ParameterStore` answers a HELLO, unless the worker must wait for it."""
    check_facts(message)
    member, incarnation = store.members[message.worker], message.facts["incarnation"]
    store.afresh &= not was_there(message)
    if incarnation < max(member.latest, member.incarnation or 0):
        text = f"an earlier life of worker {message.worker}, in whose place another process works"
        raise RefusedError("hello", text, fix="end this process: only one process may be this worker, the latest")
    member.latest = incarnation
    if incarnation != member.incarnation:
        if must_wait(store, message):
            return []
        for table in store.tables.values() if store.afresh else ():
            table.spec = replace(table.spec, generation=0)  # these workers, too, count what they load from 0
        store.afresh = False
        store.forget(message.worker)
        member = store.members[message.worker] = Member(now, incarnation)
        store.partial.join(message.worker)
        store.reductions.begin_anew(message.worker)
        store.clocks.join(message.worker)
        for other in store.members:  # those that have not come yet are waited for from now on
            other.last_seen = min(other.last_seen, now)
    member.last_seen = now
    if message.worker in store.returning:
        welcome_back(store, message, member)
    clock = store.clocks.of.get(message.worker, store.clocks.slowest)  # a life that was taken out stays out
    meta = {"lease": store.lease, "consistency": str(store.consistency), "clock": clock}
    meta |= (store.moments.wish(clock, store.now) or {}) | ({"restored": store.restored} if store.restored else {})
    return [Message(Kind.OK, worker=message.worker, seq=message.seq, epoch=store.epoch, meta=meta)]


def must_wait(store: Any, hello: Message) -> bool:
    """Whether a new process must wait after a restart, until the workers that know the clock are back or lost."""
    if was_there(hello):
        store.returning.add(hello.worker)  # an earlier life of it may have come first after the restart
        return False
    store.returning.discard(hello.worker)
    return any(store.members[other].incarnation is not None for other in store.returning & store.clocks.of.keys())


def welcome_back(store: Any, hello: Message, member: Member) -> None:
    """Go on after a restart: what happened since the snapshot is lost, but no worker goes back in time.

    The HELLO holds the last clock that the server's earlier life allowed (`step`), the worker's clock (`at`), and
    its oldest request without an answer (`first`).
    """
    worker, first, at = hello.worker, hello.facts.get("first"), hello.facts.get("at")
    store.returning.discard(worker)
    if type(first) is not int or type(at) is not int or worker not in store.clocks.of:
        return
    member.skip_to(first)
    slowest = store.clocks.slowest
    raised = store.clocks.catch_up(worker, hello.step, store.consistency.staleness)
    late = [other for other in raised if other != worker and other not in store.returning]  # came before we knew
    store.advance(slowest)
    if was_there(hello) and store.clocks.of[worker] > at:  # the others went on without it: it had been taken out
        late.append(worker)
    for other in late:
        store.remove(other, "was out while the others went on, before this server was restarted")
