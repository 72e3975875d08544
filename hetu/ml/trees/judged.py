"""Histograms of nodes, summed over workers and judged, each column where it is owned.

Ranks own a part of the columns each, and tell each other what they found. In a job with servers these own the columns:
workers send what they count, and hear of each server its best cuts, in one message (J. Jiang et al., "DimBoost", SIGMOD
2018). What a parent has beyond the child that was counted is not sent: its owner has both, and subtracts. Left out:
which nodes are counted, and at what columns a node looks.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np

from ...ps.store.functions import best_columns, first_best
from ..served import ServedWorkers
from ..workers import Workers, edges

KEPT = 1 << 28  # bytes that one owner keeps
MOST = 512  # nodes that are judged together


class Histograms:
    """Of nodes (columns, nodes, size, channels); `kept` has those that may be split, by their numbers."""

    def __init__(self, workers: Workers, owners: int, nbytes: int) -> None:
        self.workers, self.places = workers, max(1, owners * KEPT // nbytes)
        self.kept: dict[int, Any] = {}
        self.last: dict[int, Any] = {}  # those that were judged last

    def keep(self, nodes: Iterable[int]) -> None:
        """Keep these of the last ones, as long as there is room."""
        self.kept |= {k: self.last[k] for k in [*nodes][: max(0, self.places - len(self.kept))]}

    def drop(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            self.kept.pop(node, None)

    def best(self, own: np.ndarray, *asked: np.ndarray) -> np.ndarray:
        """The best cut of each node, int64 (nodes, 4 + channels), as `best_columns` tells it.

        `own` is what this worker counted, and `asked` is of each node: its number, or -1 if it is not to be kept; where
        in `own` it is; the kept node that has it beyond that, or -1; the least H, and l2.
        """
        told = self._of_owners(own, *asked)
        scores = np.ascontiguousarray(told[..., 0]).view(np.float64)
        return np.delete(first_best(scores, told[..., 1:]), 1, axis=1)

    def _of_owners(
        self, own: np.ndarray, nodes: np.ndarray, at: np.ndarray, less: np.ndarray, least: np.ndarray, l2: np.ndarray
    ) -> np.ndarray:
        """(nodes, owners, ...): the best cut among the columns of each."""
        found, first = self.workers.part(own)
        found = found.take(at, axis=1)
        for k in np.flatnonzero(less >= 0):
            np.subtract(self.kept[int(less[k])], found[:, k], out=found[:, k])
        self.last = dict(zip(nodes.tolist(), found.swapaxes(0, 1)))
        told = best_columns(found, least, l2)
        told[:, 1] += first
        return self.workers.side_by_side(told).swapaxes(0, 1)

    def close(self) -> None:
        """Keep nothing any more."""
        self.kept.clear()


class ServedHistograms(Histograms):
    """The same on servers, which keep the numbers; here is which these are."""

    workers: ServedWorkers
    there: frozenset[int] = frozenset()

    def _of_owners(self, own: np.ndarray, *asked: np.ndarray) -> np.ndarray:
        nodes, at, less, least, l2 = (each.tolist() for each in asked)
        ends, client = edges(len(own), self.workers.servers), self.workers.client
        parts = {k: own[low:high].reshape(high - low, -1) for k, (low, high) in enumerate(pairwise(ends)) if high > low}
        more = {"nodes": nodes, "at": at, "less": less, "least": least, "l2": l2}
        gone = sorted(self.there - self.kept.keys())
        told = np.stack(client.reduce("best_cut", parts, size=own.shape[2], drop=gone, **more).wait(), axis=1)
        told[..., 1] += [ends[k] for k in parts]
        self.last = dict.fromkeys(node for node in nodes if node >= 0)
        self.there = frozenset([*self.kept, *self.last])
        return told

    def close(self) -> None:
        super().close()
        if self.there:
            self.workers.client.reduce("forget", {k: np.zeros((1, 1)) for k in range(self.workers.servers)})


def histograms_of(workers: Workers, nbytes: int) -> Histograms:
    """Those that these workers share, of `nbytes` each."""
    if isinstance(workers, ServedWorkers):
        return ServedHistograms(workers, workers.servers, nbytes)
    return Histograms(workers, workers.world_size, nbytes)
