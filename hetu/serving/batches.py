"""Requests on their way to a model: those of one kind that wait together share a run, along the first axis.

One thread runs the model, and the loop of events fills the queue meanwhile. Left out: priorities, and deadlines of
single requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

from .predictor import NamedArrays, Predictor


class AskedRun(NamedTuple):
    """One request: what is fed, how many rows that is, 0 where inputs differ in it, and who waits."""

    fed: NamedArrays
    rows: int
    answer: asyncio.Future[NamedArrays]


class SharedRuns:
    """The queue before a model. A run has at most `most_rows` rows of several requests, and a request that finds the
    model at rest waits `pause` seconds for others; QueueFull where `most_waiting` of them wait."""

    def __init__(self, predictor: Predictor, most_rows: int, pause: float, most_waiting: int) -> None:
        self.predictor, self.most_rows, self.pause = predictor, most_rows, pause
        self.queue, self.most_waiting = deque[AskedRun](), most_waiting
        self.counts = {"requests": 0, "runs": 0, "rows": 0}
        self.thread, self.lock, self.at_work = ThreadPoolExecutor(1), Lock(), False

    async def predict(self, fed: NamedArrays) -> NamedArrays:
        """The outputs for what is fed, which fits."""
        if len(self.queue) >= self.most_waiting:
            raise asyncio.QueueFull
        loop = asyncio.get_running_loop()
        waits = AskedRun(fed, self.predictor.rows(fed), loop.create_future())
        with self.lock:
            self.queue.append(waits)
            begins, self.at_work = not self.at_work, True
        if begins:
            pause = self.pause if waits.rows < self.most_rows else 0
            loop.call_later(pause, self.thread.submit, self._work, loop)
        return await waits.answer

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run what waits, until nothing does."""
        while group := self._group():
            self.counts["requests"] += len(group)
            loop.call_soon_threadsafe(_answer, group, self._made(group))

    def _group(self) -> list[AskedRun]:
        """The first request, and behind it those that fit into its run."""
        with self.lock:
            group = [self.queue.popleft()] if self.queue else []
            self.at_work = bool(group)
        if not (self.queue and group and self.predictor.joins(group[0].fed)):
            return group
        rest, kind, room = deque[AskedRun](), self.predictor.kind(group[0].fed), self.most_rows - group[0].rows
        with self.lock:
            for waits in self.queue:
                if fits := 0 < waits.rows <= room and self.predictor.kind(waits.fed) == kind:
                    room -= waits.rows
                (group if fits else rest).append(waits)
            self.queue = rest
        return group

    def _made(self, group: list[AskedRun]) -> list[NamedArrays | Exception]:
        """What the model makes of requests; each alone where all together fail, so that one answers for itself."""
        self.counts["runs"] += 1
        self.counts["rows"] += sum(waits.rows for waits in group)
        try:
            if len(group) == 1:
                return [self.predictor.predict(group[0].fed)]
            return [*self.predictor.joined([waits.fed for waits in group])]
        except Exception as error:
            if len(group) == 1:
                return [error]
            return [made for waits in group for made in self._made([waits])]


def _answer(group: Iterable[AskedRun], made: Iterable[NamedArrays | Exception]) -> None:
    for waits, given in zip(group, made):
        if not waits.answer.done():
            waits.answer.set_exception(given) if isinstance(given, Exception) else waits.answer.set_result(given)
