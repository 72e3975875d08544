"""Rounds: what all workers give a server, reduced there once and answered to each of them.

A round is one message of every worker, and is answered once the last has come: data flow orders it, and no clock ends.
Each life of a worker counts its rounds; a request that repeats is answered again from memory. A worker that is gone, or
has begun anew, gives no part: then nobody is answered, since no sum is right without it. Left out: tables, and the
consistency of a job, which do not matter here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import eq

import numpy as np

from ...core.errors import HetuError
from .consistency import Clocks
from .door import understood
from .functions import reduced
from .member import UNANSWERED, Member
from .messages import Message, RefusedError, given


@dataclass
class Round:
    """What workers have given, and then what all are answered."""

    parts: dict[int, Message] = field(default_factory=dict)
    answer: np.ndarray | HetuError | None = None


class Reductions:
    """The rounds of a server whose `members` are the workers; `clocks` has those that take part."""

    def __init__(self, members: list[Member], clocks: Clocks) -> None:
        self.members, self.clocks = members, clocks
        self.rounds: dict[int, Round] = {}  # those that are open, and the last that were answered
        self.kept: dict[int, np.ndarray] = {}  # what reductions keep from one round to the next
        self.latest: dict[int, tuple[int, int]] = {}  # of each worker its round, and the request
        self.lives: list[int | None] = []  # that had a part in the last answered round

    @property
    def nbytes(self) -> int:
        """Bytes of what waits and of what is kept."""
        waits = (part.nbytes for each in self.rounds.values() for part in each.parts.values())
        return sum(waits) + sum(array.nbytes for array in self.kept.values())

    def give(self, message: Message) -> bool:
        """Take in a worker's part; whether others may have waited for it, or wait for what it has left out."""
        number, found = message.key, self.rounds.get(message.key)
        if found is None or found.answer is not None:  # which was of earlier lives
            self.rounds[number] = found = Round()
        found.parts[message.worker], self.latest[message.worker] = message.kept(), (number, message.seq)
        if whole := len(found.parts) == len(self.members):
            self._answer(number)
        return whole or len(self.rounds) > 1

    def begin_anew(self, worker: int) -> None:
        """A worker has another life, in which it counts from the beginning: what was kept for the one before is of no
        use, since the others get no answer any more."""
        self.latest.pop(worker, None)
        self.kept.clear()
        for each in self.rounds.values():
            each.parts.pop(worker, None)

    def holds(self, message: Message) -> bool:
        """Whether its worker must wait for others."""
        found = self.rounds.get(message.key)
        return found is not None and found.answer is None and not self._missing(message, found)

    def reply(self, message: Message) -> Message:
        """The answer; an error if there can be none."""
        found = self.rounds.get(message.key, Round())
        if isinstance(found.answer, HetuError):
            raise found.answer
        if found.answer is None:
            text = f"of {len(self.members)} workers not all are there any more, and their rows are missing"
            raise RefusedError("lost", text, fix="start the job again")
        rows, cols = found.answer.shape
        out = message.place(rows, cols, found.answer.dtype)
        out[...] = found.answer
        return message.reply(values=out)

    def _answer(self, number: int) -> None:
        """Reduce a round of which all parts are there, in the order of workers."""
        found = self.rounds.pop(number)
        self.rounds[number] = Round(answer=self._reduced([part for _, part in sorted(found.parts.items())]))
        for old in [k for k, each in self.rounds.items() if each.answer is not None][:-UNANSWERED]:
            del self.rounds[old]
        self.lives = [member.incarnation for member in self.members]

    def _reduced(self, parts: list[Message]) -> np.ndarray | HetuError:
        arrays, asked = [given(part.values) for part in parts], parts[0].facts
        try:
            for part, array in zip(parts, arrays):
                if part.facts != asked or (array.shape, array.dtype) != (arrays[0].shape, arrays[0].dtype):
                    text = f"workers 0 and {part.worker} ask for other reductions, or of arrays of other shapes"
                    raise RefusedError("reduce", text, fix="all workers reduce the same, in the same order")
            return reduced(asked["function"], self.kept, arrays, asked.get("arguments", {}))
        except Exception as error:
            return understood(error)

    def _missing(self, message: Message, found: Round) -> bool:
        """Whether a part of a round will not come."""
        had_a_part = [*map(eq, self.lives, (member.incarnation for member in self.members))] or [False] * len(
            self.members
        )
        for other, member in enumerate(self.members):
            alike = had_a_part[other] == had_a_part[message.worker]
            if not alike and had_a_part[message.worker]:
                return True
            latest, seq = self.latest.get(other, (0, 0))
            left_out = alike and latest > message.key and member.done >= seq - 1
            if other not in found.parts and (other not in self.clocks.of or left_out):
                return True
        return False
