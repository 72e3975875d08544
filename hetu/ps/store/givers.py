"""Who gives the rows of a table their first values: the server, which draws them, or one worker, which it asks.

A CREATE is answered at once, with the number of rows that its sender is to give, or with the word that others are
coming. Then it comes again with the turn "wait", and is answered when all rows have values, or when its sender is asked
after all, because the worker that was asked is gone, or cannot give them (a CREATE with the turn "pass"). Whoever waits
has given all that it was asked for, and waits for one table at a time, so that no two wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from .door import understood
from .first_values import PlacedRows
from .messages import Kind, Message
from .server_table import ServerTable
from .table_spec import TableSpec

SLICE = 20  # blocks, of at most `hetu.init.AT_ONCE` elements, that are drawn between two messages


class Givers:
    """Of each table whose first values are coming: what draws them, or the worker that gives them.

    `ask_again` answers the requests that need not wait any more.
    """

    def __init__(self, tables: dict[int, ServerTable], ask_again: Callable[[], None]) -> None:
        self.tables, self.ask_again = tables, ask_again
        self.drawing = dict[int, Iterator[PlacedRows]]()
        self.workers = dict[int, int]()

    # -- a CREATE ----------------------------------------------------------------------------------------------

    def hear(self, message: Message, spec: TableSpec) -> None:
        """Take it in. A later generation wants other values; first ones are drawn if it says how."""
        key, table = message.key, self.tables[message.key]
        if spec.generation > table.spec.generation:
            table.refill(spec)
            self.drop([key])
        told = message.facts.get("draw")
        if told is not None and self._asks(message) and key not in self.workers:
            self.drawing[key] = spec.drawn(told)
        if message.facts.get("turn") == "pass" and self.workers.get(key) == message.worker:
            self.drop([key])

    def holds(self, message: Message) -> bool:
        """Whether it must wait."""
        return message.facts.get("turn") == "wait" and self._comes(message.key) and not self._asks(message)

    def answer(self, message: Message) -> Message:
        if not self._asks(message):
            return message.reply(meta={"coming": True} if self._comes(message.key) else None)
        self.workers[message.key] = message.worker
        return message.reply(step=self.tables[message.key].wanting)

    def _comes(self, key: int) -> bool:
        """Whether a table is getting its values."""
        return key in self.drawing or key in self.workers

    def _asks(self, message: Message) -> bool:
        """Whether its sender is to give first values. Those of an earlier generation are out of date."""
        table = self.tables[message.key]
        return (
            table.wanting > 0
            and message.key not in self.drawing
            and self.workers.get(message.key, message.worker) == message.worker
            and message.facts.get("generation", 0) == table.spec.generation
            and message.facts.get("turn") != "pass"
        )

    # -- what comes --------------------------------------------------------------------------------------------

    def draw(self) -> None:
        """Draw some blocks of one table: few, so that no message waits for long. If it fails, a worker is asked."""
        for key, coming in [*self.drawing.items()][:1]:
            try:
                with np.errstate(all="ignore"):
                    for places, values in itertools.islice(coming, SLICE):
                        self.tables[key].fill(places, values.reshape(len(places), -1))
            except Exception as error:
                understood(error)
                self.drop([key])
            if not self.tables[key].wanting:
                self.drop([key])

    def fill(self, message: Message) -> None:
        """Take in values that a worker gives."""
        table = self.tables[message.key]
        (table.assign if message.kind is Kind.ASSIGN else table.restore)(message)
        if not table.wanting:
            self.drop([message.key])

    # -- what comes no more ------------------------------------------------------------------------------------

    def forget(self, worker: int) -> None:
        """A worker is gone: others are asked in its place."""
        self.drop([key for key, asked in self.workers.items() if asked == worker])

    def drop(self, keys: Iterable[int]) -> None:
        """Nobody gives the values of these tables any more: they are there, or others are wanted."""
        for key in keys:
            self.drawing.pop(key, None)
            self.workers.pop(key, None)
        self.ask_again()
