"""Workers whose sums are made on parameter servers: pushed, ended by a clock, pulled.

Under BSP the servers add what the workers push in the order of these, and every worker pulls the sum: bytes up and down
are those of the array, from however many workers. Under SSP a worker's array has rows of its own, which all pull once
the slowest has pushed its own. What is `shared` stays on the servers: changes of rows are pushed, and the rows that a
worker reads are pulled, as far behind as the job's consistency allows (J. Jiang et al., "Angel", NSR 2018; AD-LDA needs
no more). Left out: ASP, under which nobody knows when a sum is complete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..core.errors import ArgumentError
from ..ops.composition import traced
from ..ps.store.consistency import consistency
from ..ps.store.messages import RefusedError
from ..ps.store.partition import CHUNK, Parameter
from ..ps.store.rules import ADD, described
from ..ps.wire.client import Client
from .workers import Exchanging, Shared, Workers

PIECE = CHUNK // 8  # numbers of a row
MOST_TABLES = 64  # by size, of one client; those that were not used for longest are freed


@dataclass
class SumTables:
    """What a client has on its servers for sums, and what it knows of its job."""

    world_size: int
    staleness: float
    buffered: bool
    turn: int = 0  # of rows: two in a row use different tables, as a fast worker may be one ahead under SSP
    made: dict[str, None] = field(default_factory=dict)  # the last one used is the last
    shared: int = 0  # matrices that there have been


_tables = WeakKeyDictionary[Client, SumTables]()


def tables_of(client: Client) -> SumTables:
    """Of this client; ArgumentError for a job under ASP."""
    if client not in _tables:
        status: dict[str, Any] = client.status()[0]
        mode = consistency(status["consistency"])
        if mode.staleness == np.inf:
            raise ArgumentError(
                "estimators on servers under asp, where no sum is ever complete", fix="use bsp or ssp:2"
            )
        _tables[client] = SumTables(status["workers"], mode.staleness, mode.buffered)
    return _tables[client]


class ServedWorkers(Exchanging):
    """The workers of a job that has parameter servers, as this one's `client` knows them."""

    def __init__(self, client: Client) -> None:
        self.client, self.tables = client, tables_of(client)
        self.rank, self.world_size = client.worker, self.tables.world_size

    def sum(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sums, in float64: whole numbers are exact below 2**53."""
        flat = np.concatenate([np.asarray(each, np.float64).reshape(-1) for each in arrays])
        sums = self._summed(flat) if self.tables.buffered else self._rows(flat).sum(axis=0)
        parts = np.split(sums, np.cumsum([each.size for each in arrays])[:-1])
        return [part.reshape(np.shape(each)).astype(each.dtype) for part, each in zip(parts, arrays)]

    def most(self, array: np.ndarray) -> np.ndarray:
        greatest: np.ndarray = self._side_by_side(np.asarray(array)).max(axis=0)
        return greatest

    def _side_by_side(self, array: np.ndarray) -> np.ndarray:
        if array.dtype.kind == "f":
            return self._rows(array).reshape(-1, *array.shape).astype(array.dtype)
        halves = np.ascontiguousarray(array, np.int64).view(np.uint32)  # each of which a float64 holds
        whole = self._rows(halves).astype(np.uint32).view(np.int64)
        return whole.reshape(-1, *array.shape).astype(array.dtype)

    def shared(self, first: np.ndarray, rows: np.ndarray | None = None) -> Shared:
        return ServedMatrix(self, first, np.arange(len(first)) if rows is None else rows)

    # -- on the servers ----------------------------------------------------------------------------------------

    def _summed(self, flat: np.ndarray) -> np.ndarray:
        """The sum of what all push in one clock, behind which the workers are counted."""
        name = f"ml sum {flat.size}"
        self._table(name, Parameter((flat.size + 1,), "float64", rule=REPLACE, reduce="sum"))
        self.client.push(name, np.append(flat, 1.0))
        self.client.clock().wait()
        found: np.ndarray = self.client.pull(name).wait()
        self._check_all(found[-1] == self.world_size)
        return found[:-1]

    def _rows(self, array: np.ndarray) -> np.ndarray:
        """(workers, numbers): what each worker has, in pieces that all servers share."""
        flat = np.asarray(array, np.float64).reshape(-1)
        count = max(1, -(-flat.size // PIECE))
        width = -(-flat.size // count)
        self.tables.turn += 1
        filled = np.zeros((count, width + 1))
        filled[:, :width].flat[: flat.size] = flat
        filled[:, width] = self.tables.turn
        shape = (self.world_size * count, width + 1)
        name = f"ml rows {shape[0]} x {width} {self.tables.turn % 2}"
        self._table(name, Parameter(shape, "float64", sparse=True, rule=REPLACE, reduce="sum"))
        self.client.push_rows(name, self.rank * count + np.arange(count), filled)
        self.all_wait()
        found: np.ndarray = self.client.pull_rows(name, np.arange(shape[0])).wait()
        self._check_all((found[:, width] == self.tables.turn).all())
        return found[:, :width].reshape(self.world_size, -1)[:, : flat.size]

    def _check_all(self, there: bool) -> None:
        """Servers go on without a worker that is lost or has left, but no sum is right without its rows."""
        if not there:
            raise RefusedError(
                "lost", f"of {self.world_size} workers not all are there any more, and their rows are missing",
                fix="start the job again",
            )  # fmt: skip

    def all_wait(self) -> None:
        """Until all workers have pushed what they did before."""
        for _ in range(1 + int(self.tables.staleness)):
            self.client.clock().wait()

    def _table(self, name: str, parameter: Parameter) -> None:
        """Make a table if it is not there, in the place of the one that was not used for longest."""
        made = self.tables.made
        if name not in made:
            if len(made) == MOST_TABLES:
                self.client.free([oldest := next(iter(made))])
                del made[oldest]
            self.client.create({name: parameter}, {name: np.zeros(parameter.shape)})
        made.pop(name, None)
        made[name] = None


class ServedMatrix(Shared):
    """A matrix that lives on servers, of which this worker reads some rows."""

    def __init__(self, workers: ServedWorkers, first: np.ndarray, rows: np.ndarray) -> None:
        self.client, self.rows = workers.client, rows
        workers.tables.shared += 1
        self.name, self.values = f"ml shared {workers.tables.shared}", np.zeros_like(first)
        parameter = Parameter(first.shape, first.dtype.name, sparse=True, rule=ADD, reduce="sum")
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


def _replacing() -> dict[str, Any]:
    """A rule of servers: what is pushed takes the place of what was there."""
    return described(traced(lambda old, new, rate: new * 1.0, 2, 1, (1,), {}), "replace")


REPLACE = _replacing()


def served(client: Client) -> Workers:
    """The workers of this one's job."""
    return Workers() if tables_of(client).world_size == 1 else ServedWorkers(client)
