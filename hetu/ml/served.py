"""Workers whose sums are made on parameter servers: pushed, ended by a clock, pulled.

Under BSP the servers add what the workers push in the order of these, and every worker pulls the sum: bytes up and down
are those of the array, from however many workers; or it asks a server function about what was pushed to places of a
table, and bytes down are those of the answer. Under SSP a worker's array has rows of its own, which all pull once the
slowest has pushed its own. What is `shared` stays on the servers: changes of rows are pushed, and the rows that a
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
from ..ps.store.placed import Placed
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
    turn: int = 0  # of sums, by which each knows whose numbers are new
    made: dict[str, Any] = field(default_factory=dict)  # whole numbers that were pushed last; used last is last
    shared: int = 0  # matrices that there have been
    begun: bool = False


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
        if not self.tables.begun:  # tables of earlier clients are gone once no worker has its own any more
            self.tables.begun = True
            self.all_wait()

    def sum(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """The sums, of whole numbers exactly, of others in float64."""
        if not self.tables.buffered:
            return [self._side_by_side(each).sum(axis=0).astype(each.dtype) for each in map(np.asarray, arrays)]
        self.tables.turn += 1
        sums = [row.reshape(-1) for row in self._added([_pieces(_wide(each), self.tables.turn) for each in arrays])]
        self._check_all(
            all(row[np.size(each)] == self.world_size * self.tables.turn for row, each in zip(sums, arrays))
        )
        return [row[: np.size(each)].reshape(np.shape(each)).astype(each.dtype) for row, each in zip(sums, arrays)]

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

    def place(self, places: int, used: np.ndarray, arrays: np.ndarray) -> str:
        """Sum arrays (used, rows, ...) over workers, in these places of a table; its name. Each row has its server.

        So a server function finds (places, its rows, numbers). What workers asked it they sum before they place anew.
        """
        rows, servers = arrays.shape[1], len(self.client.transport.links)
        matrix = _wide(arrays).reshape(len(used) * rows, -1)
        name = f"ml places: {places} {rows} {matrix.shape[1]} {matrix.dtype}"
        owners = Placed(np.tile(np.arange(rows) % servers, places))
        shape = (places * rows, matrix.shape[1])
        self._table(name, _table_of(shape, matrix.dtype, ADD, owners))
        ids = (used[:, None] * rows + np.arange(rows)).reshape(-1)
        last = self.tables.made[name]
        self.client.push_rows(name, ids, matrix - last[ids])
        last[ids] = matrix
        self.all_wait()
        return name

    # -- on the servers ----------------------------------------------------------------------------------------

    def _added(self, matrices: list[np.ndarray]) -> list[np.ndarray]:
        """Of each matrix (rows, numbers) the sum of what all push in one clock."""
        names = [self._pushed(f"ml sum {k}", each) for k, each in enumerate(matrices)]
        self.client.clock().wait()
        replies = [self.client.pull_rows(name, np.arange(len(each))) for name, each in zip(names, matrices)]
        return [reply.wait() for reply in replies]

    def _pushed(self, name: str, matrix: np.ndarray) -> str:
        """Push the rows of a matrix to the table of its size. Whole numbers replace the last ones by the difference."""
        rule = REPLACE if matrix.dtype.kind == "f" else ADD
        name = f"{name}: {matrix.shape} {matrix.dtype}"
        self._table(name, _table_of(matrix.shape, matrix.dtype, rule))
        self.client.push_rows(name, np.arange(len(matrix)), matrix - self.tables.made[name])
        self.tables.made[name] = matrix if rule is ADD else 0
        return name

    def _rows(self, array: np.ndarray) -> np.ndarray:
        """(workers, numbers): what each worker has, in pieces that all servers share."""
        self.tables.turn += 1
        pieces = _pieces(np.asarray(array, np.float64), self.tables.turn)
        count, width = pieces.shape
        name = f"ml rows {self.tables.turn % 2}: {pieces.shape}"  # of two, as a fast worker may be one ahead under SSP
        shape = (self.world_size * count, width)
        self._table(name, _table_of(shape, pieces.dtype, REPLACE))
        self.client.push_rows(name, self.rank * count + np.arange(count), pieces)
        self.all_wait()
        found: np.ndarray = self.client.pull_rows(name, np.arange(shape[0])).wait().reshape(self.world_size, -1)
        self._check_all((found[:, np.size(array)] == self.tables.turn).all())
        return found[:, : np.size(array)]

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
            made[name] = np.zeros(parameter.shape, parameter.dtype)
            self.client.create({name: parameter}, {name: made[name]})
        made[name] = made.pop(name)


def _table_of(shape: tuple[int, ...], dtype: np.dtype, rule: Any, placed: Placed | None = None) -> Parameter:
    return Parameter(shape, dtype.name, True, rule, reduce="sum", placed=placed, fleeting=True)


def _wide(array: np.ndarray) -> np.ndarray:
    """The numbers in a dtype that servers add: float64, int32 where they are such, or int64."""
    kind = np.float64 if array.dtype.kind == "f" else np.int32 if array.dtype == np.int32 else np.int64
    return np.asarray(array, kind)


def _pieces(array: np.ndarray, mark: int) -> np.ndarray:
    """The numbers of an array and a mark behind them, in rows of one length, which all servers share."""
    count = -(-(np.size(array) + 1) // PIECE)
    pieces = np.zeros((count, -(-(np.size(array) + 1) // count)), array.dtype)
    pieces.reshape(-1)[: np.size(array) + 1] = np.append(array, mark)
    return pieces


class ServedMatrix(Shared):
    """A matrix that lives on servers, of which this worker reads some rows."""

    def __init__(self, workers: ServedWorkers, first: np.ndarray, rows: np.ndarray) -> None:
        self.client, self.rows = workers.client, rows
        workers.tables.shared += 1
        self.name, self.values = f"ml shared {workers.tables.shared}", np.zeros_like(first)
        self.client.create({self.name: _table_of(first.shape, first.dtype, ADD)}, {self.name: self.values})
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
