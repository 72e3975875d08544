"""Workers whose sums are made on parameter servers: each worker's part goes up, and what is made of all comes down.

A `reduction` of servers answers all workers at once, so that a sum is one message of every worker to every server that
has a piece of it, and nobody waits but for the numbers themselves. Bytes up and down are those of the array, from
however many workers. What is `shared` lies in a table: changes of rows are pushed, and the rows that a worker reads are
pulled, as far behind as the job's consistency allows (J. Jiang et al., "Angel", NSR 2018; AD-LDA needs no more). Left
out: ASP, under which nobody knows when such a table is complete.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from ..core.errors import ArgumentError, DTypeError
from ..ps.store.consistency import consistency
from ..ps.store.partition import CHUNK, Parameter
from ..ps.store.rules import ADD
from ..ps.wire.client import Client
from ..ps.wire.transport import ServerTimeoutError
from .workers import Exchanging, Shared, Workers, edges

LOOK = 0.01  # seconds between looks whether all are there
SMALL = CHUNK // 16  # bytes of an array up to which it goes to one server only


@dataclass
class ServedJob:
    """What a client knows of its job, and how many matrices have been shared in it."""

    world_size: int
    staleness: float
    shared: int = 0  # matrices that there have been
    begun: bool = False


_jobs = WeakKeyDictionary[Client, ServedJob]()


def job_of(client: Client) -> ServedJob:
    """Of this client; ArgumentError for a job under ASP."""
    if client not in _jobs:
        status = client.status()[0]
        staleness = consistency(status["consistency"]).staleness
        if staleness == np.inf:
            raise ArgumentError(
                "estimators on servers under asp, where no sum is ever complete", fix="use bsp or ssp:2"
            )
        _jobs[client] = ServedJob(status["workers"], staleness)
    return _jobs[client]


class ServedWorkers(Exchanging):
    """The workers of a job that has parameter servers, as this one's `client` knows them."""

    def __init__(self, client: Client) -> None:
        self.client, self.job = client, job_of(client)
        self.rank, self.world_size = client.worker, self.job.world_size
        if not self.job.begun:  # tables of earlier clients are gone once no worker has its own any more
            self._all_back()
            self.job.begun = True
            self.all_wait()
        self.servers = len(client.transport.links)

    def _all_back(self) -> None:
        """Until those work again who left when an earlier job was done: servers wait for nobody who has left."""
        until = time.monotonic() + self.client.transport.timeout
        while left := sorted({worker for status in self.client.status() for worker in status["left"]}):
            if time.monotonic() > until:
                text = f"workers {left} have left and did not come back in {self.client.transport.timeout:g} s"
                raise ServerTimeoutError(text, fix="fit on all workers, or start the job again with fewer")
            time.sleep(LOOK)

    def _sum(self, numbers: np.ndarray) -> np.ndarray:
        """The sums, of whole numbers exactly, of others in float64."""
        return self._reduced("total", _wide(numbers, "iuf"))[0].astype(numbers.dtype)

    def most(self, array: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        if array.dtype == np.uint64:  # of which servers have none
            return np.asarray(self.side_by_side(array).max(axis=0))
        return self._reduced("most", _wide(array, "iufb"))[0].reshape(array.shape).astype(array.dtype)

    def side_by_side(self, array: np.ndarray) -> np.ndarray:
        """The same, of any dtype: bytes travel."""
        array = np.asarray(array, order="C")
        found = self._reduced("side_by_side", array.reshape(-1).view(np.uint8))
        return found.view(array.dtype).reshape(self.world_size, *array.shape)

    def shared(self, first: np.ndarray, rows: np.ndarray | None = None) -> Shared:
        return ServedMatrix(self, first, np.arange(len(first)) if rows is None else rows)

    def all_wait(self) -> None:
        """Until all workers have pushed what they did before."""
        for _ in range(1 + int(self.job.staleness)):
            self.client.clock().wait()

    def _reduced(self, reduction: str, array: np.ndarray) -> np.ndarray:
        """(rows, numbers): what servers make of an array's numbers, of which all have as many if these are not few."""
        numbers = array.reshape(1, -1)
        pieces = self.servers * -(-numbers.nbytes // (self.servers * CHUNK)) if numbers.nbytes > SMALL else 1
        ends = edges(numbers.shape[1], pieces)
        asked = [
            self.client.reduce(reduction, {k % self.servers: numbers[:, ends[k] : ends[k + 1]]}) for k in range(pieces)
        ]
        return np.concatenate([each.wait()[0] for each in asked], axis=1)


def _wide(array: np.ndarray, kinds: str) -> np.ndarray:
    """The numbers in a dtype that servers add: float64, int32 where they are such, or int64; DTypeError for others."""
    if array.dtype.kind not in kinds:
        text = f"a sum or a maximum of {array.dtype} is not defined between workers"
        raise DTypeError(text, fix="pass real numbers; truths as integers, of which the sum is a count")
    kind = np.float64 if array.dtype.kind == "f" else np.int32 if array.dtype == np.int32 else np.int64
    return np.asarray(array, kind)


class ServedMatrix(Shared):
    """A matrix that lives on servers, of which this worker reads some rows."""

    def __init__(self, workers: ServedWorkers, first: np.ndarray, rows: np.ndarray) -> None:
        self.client, self.rows = workers.client, rows
        workers.job.shared += 1
        self.name, self.values = f"ml shared {workers.job.shared}", np.zeros_like(first)
        parameter = Parameter(first.shape, first.dtype.name, sparse=True, rule=ADD, reduce="sum", fleeting=True)
        self.client.create({self.name: parameter}, {self.name: self.values})
        self._push(first)
        workers.all_wait()
        self._pull()

    def add(self, change: np.ndarray) -> None:
        self._push(change)
        self.client.clock().wait()
        self._pull()

    def close(self) -> None:
        self.client.free([self.name])

    def _push(self, change: np.ndarray) -> None:
        changed = np.flatnonzero(change.any(axis=1))
        self.client.push_rows(self.name, changed, change[changed])

    def _pull(self) -> None:
        self.values[self.rows] = self.client.pull_rows(self.name, self.rows).wait()


def served(client: Client) -> Workers:
    """The workers of this one's job."""
    return Workers() if job_of(client).world_size == 1 else ServedWorkers(client)
