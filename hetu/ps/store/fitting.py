"""What a request must fit before it changes anything: its table, its worker's clock, and what that still waits for."""

from __future__ import annotations

from typing import Any

from ...core.errors import ValueRangeError
from .door import check_facts
from .member import UNANSWERED
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
