"""How a worker is welcomed: as a new life, in place of an earlier one, or back after a restart of the server.

A worker that knows the clock goes on where it was, and tells a server that has forgotten it. A new process waits until
all of those are back or lost, so that it does not begin in the past.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .door import check_facts
from .member import Member, was_there
from .messages import Kind, Message, RefusedError


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
