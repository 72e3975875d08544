"""Requests on their way to a model: those of one kind that wait together share a run, along the first axis.

One thread runs the model, and the loop of events fills the queue meanwhile. Left out: priorities, and deadlines of
single requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
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
        self.thread = ThreadPoolExecutor(1)
        self.worker: asyncio.Task[None] | None = None

    async def predict(self, fed: NamedArrays) -> NamedArrays:
        """The outputs for what is fed, which fits."""
        if len(self.queue) >= self.most_waiting:
            raise asyncio.QueueFull
        waits = AskedRun(fed, self.predictor.rows(fed), asyncio.get_running_loop().create_future())
        self.queue.append(waits)
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._work())
        return await waits.answer

    async def _work(self) -> None:
        """Run what waits, until nothing does."""
        if sum(waits.rows for waits in self.queue) < self.most_rows:
            await asyncio.sleep(self.pause)
        loop = asyncio.get_running_loop()
        while self.queue:
            group = [self.queue.popleft()]
            if self.queue and await loop.run_in_executor(self.thread, self.predictor.joins, group[0].fed):
                self._gather(group)
            self.counts["requests"] += len(group)
            for waits, made in zip(group, await loop.run_in_executor(self.thread, self._made, group)):
                if waits.answer.done():
                    continue
                waits.answer.set_exception(made) if isinstance(made, Exception) else waits.answer.set_result(made)

    def _gather(self, group: list[AskedRun]) -> None:
        """Move those that fit into the run of the first from the queue to its group."""
        rest, kind, room = deque[AskedRun](), self.predictor.kind(group[0].fed), self.most_rows - group[0].rows
        for waits in self.queue:
            if fits := 0 < waits.rows <= room and self.predictor.kind(waits.fed) == kind:
                room -= waits.rows
            (group if fits else rest).append(waits)
        self.queue = rest

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
