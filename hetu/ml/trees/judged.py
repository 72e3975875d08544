"""Histograms of nodes, summed over workers and judged, each column where it is owned.

Ranks own a part of the columns each, and gather what they found. In a job with servers these own the columns: workers
push what they count, and pull of each server its best cut of a node (J. Jiang et al., "DimBoost", SIGMOD 2018). What a
parent has beyond the child that was counted is not pushed: a server knows where both are, and subtracts when it is
asked. Left out: which nodes are counted, and at what columns a node looks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...ops.trees import best_cuts
from ..served import ServedWorkers
from ..workers import Workers
from .bins import compute

ROOM = 1 << 24  # bytes that nodes which are looked at together may take
PLACES = 64  # for histograms on servers, at most


class Histograms:
    """Of nodes (slots, nodes, size, channels); `kept` are those of nodes that may be split."""

    most = ROOM  # nodes that may be judged together

    def __init__(self, workers: Workers, l2: float) -> None:
        self.workers, self.l2 = workers, l2
        self.kept: dict[int, Any] = {}
        self.last: Any = ()  # what to keep of those that were judged last

    def make_room(self, count: int) -> None:
        """So that this many can be judged, whatever is kept."""

    def best(self, own: np.ndarray, at: np.ndarray, less: np.ndarray, *asked: np.ndarray) -> tuple[np.ndarray, ...]:
        """The score of the best cut of each node, the slot, the first of equal ones, and its facts: see `best_cuts`.

        `own` is what this worker counted. Node k has its entry `at[k]`, or what the kept node `less[k]`, if that is not
        -1, has beyond it. `asked` are the totals and the least H of each node.
        """
        found, first = self.workers.part(own)
        found = found.take(at, axis=1)
        for k in np.flatnonzero(less >= 0):
            np.subtract(self.kept[int(less[k])], found[:, k], out=found[:, k])
        self.last = found.swapaxes(0, 1)
        nodes, slots, channels = len(at), len(found), own.shape[3]
        out = np.empty((nodes, slots)), np.empty((nodes, slots, 2 + channels), np.int64)
        compute(best_cuts, out, found, *asked, l2=self.l2)
        told = np.zeros((1, nodes, 4 + channels), np.int64)  # bits of the score, slot, facts
        told[..., 0] = np.float64(-np.inf).view(np.int64)
        if slots:
            scores, slot, facts = first_best(*out)
            told[0] = np.column_stack([scores.view(np.int64), first + slot, facts])
        told = self.workers.gather(told).swapaxes(0, 1)
        scores, _, facts = first_best(np.ascontiguousarray(told[..., 0]).view(np.float64), told[..., 1:])
        return scores, facts[:, 0], facts[:, 1:]


def first_best(scores: np.ndarray, facts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of (nodes, slots) the best score of each node, its slot, the first of equal ones, and the facts there."""
    at, slot = np.arange(len(scores)), scores.argmax(axis=1)
    return scores[at, slot], slot, facts[at, slot]


class ServedHistograms(Histograms):
    """The same in places of a table, the rows of which lie where their slots are owned.

    What is kept of a node is its place, or places of which all but the first are to be subtracted.
    """

    def __init__(self, workers: ServedWorkers, l2: float, nbytes: int) -> None:
        super().__init__(workers, l2)
        self.served, self.places = workers, min(max(4, 2 * ROOM // nbytes), PLACES)
        self.most = self.places // 2

    def make_room(self, count: int) -> None:
        if len(self._free()) < count:
            self.kept.clear()

    def _free(self) -> np.ndarray:
        return np.setdiff1d(np.arange(self.places), [place for places in self.kept.values() for place in places])

    def best(self, own: np.ndarray, at: np.ndarray, less: np.ndarray, *asked: np.ndarray) -> tuple[np.ndarray, ...]:
        used = self._free()[: own.shape[1]]
        name = self.served.place(self.places, used, own.swapaxes(0, 1))
        self.last = [(*self.kept.get(k, ()), place) for k, place in zip(less.tolist(), used[at].tolist())]
        totals, least = (each.tolist() for each in asked)
        told = np.zeros((len(at), 4 + own.shape[3]), np.int64)  # bits of the score, slot, facts
        mine = range(self.workers.rank, len(at), self.workers.world_size)  # no server is asked twice
        more = {"places": self.places, "size": own.shape[2], "l2": self.l2}
        calls = [
            self.served.client.call(name, "best_cut", used=self.last[k], totals=totals[k], least=least[k], **more)
            for k in mine
        ]
        for k, call in zip(mine, calls):
            slot, facts = call.wait()
            best = np.lexsort([slot, -facts[:, 0].copy().view(np.float64)])[0]  # of all servers
            told[k] = facts[best, 0], slot[best], *facts[best, 1:]
        (told,) = self.workers.sum(told)
        return told[:, 0].copy().view(np.float64), told[:, 1], told[:, 2:]


def histograms_of(workers: Workers, l2: float, nbytes: int) -> Histograms:
    """Those of a tree that these workers grow, of at most `nbytes` each."""
    if isinstance(workers, ServedWorkers):
        return ServedHistograms(workers, l2, nbytes)
    return Histograms(workers, l2)
