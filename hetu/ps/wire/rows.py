"""The rows of tables as one worker's operators see them: cached or not, asked for now or a step ahead, or summed up.

The request for the next batch's rows can leave as soon as this batch's clock has ended. The servers answer it when the
consistency allows, so it does not change training, bit for bit under BSP; its answer travels while the ranks reduce
gradients, update their variables and load data. The training loop knows the next ids. No request leaves before this
worker's own gradients, because its answer would miss them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, ShapeError, ValueRangeError
from ...ranges import unmasked
from ..store.cache import CachedTable
from ..store.messages import Kind, given, row_bytes, wire_array
from ..store.partition import CHUNK
from ..store.policies import POLICIES, Cache, Counters
from .client import Client
from .pending import PendingReply

RowRequest = tuple[str, np.ndarray]  # a table and the ids of its rows
Distinct = Callable[[], tuple[np.ndarray, np.ndarray]]  # the distinct rows, and which of them each id means
Asked = tuple[np.ndarray, Distinct]


class Rows:
    """A worker's way to the rows of its tables. `weight` is its gradients' share in the average of all workers."""

    def __init__(self, client: Client, weight: float = 1.0) -> None:
        self.client, self.weight = client, weight
        self.cached: dict[str, CachedTable] = {}
        self.expected: list[RowRequest] = []  # of the next step
        self.coming: list[list[RowRequest]] = []  # of the steps by which caches are to choose
        self.foreseen = dict[str, float]()  # steps to come by which a table's cache has chosen
        self.asked: dict[str, list[Asked]] = client.asked

    def hold(self, tables: Mapping[str, Cache]) -> None:
        """Put these tables, which the servers have already, behind caches: one for all executors of this worker."""
        for table, cache in tables.items():
            found = self.client.cached.get(table) or CachedTable(self.client, table, cache)
            if found.cache != cache:
                raise ArgumentError(
                    f"{table} is kept in {found.cache} by another executor of this state, here in {cache}",
                    fix="give the executors of one state the same cache=",
                )
            self.cached[table] = self.client.cached[table] = found

    @property
    def looks(self) -> int:
        """Of how many coming steps it has use for the rows."""
        choosing = (c.cache.looks for name, c in self.cached.items() if self.foreseen.get(name, 0) < math.inf)
        return max(choosing, default=1)

    @property
    def _due(self) -> dict[str, CachedTable]:
        """The caches that choose by coming steps, and have not seen any more of these."""
        foresee = ((name, c) for name, c in self.cached.items() if POLICIES[c.cache.policy].foresees)
        return {name: cached for name, cached in foresee if not self.foreseen.get(name)}

    @property
    def counters(self) -> Counters:
        """The counters of all cached tables together."""
        return sum((table.counters for table in self.cached.values()), Counters())

    # -- what operators call -------------------------------------------------------------------------------------

    def pull(self, table: str, ids: np.ndarray, outs: Sequence[np.ndarray]) -> None:
        """The rows `ids`, one after the other, into `outs`, which are C-contiguous."""
        (found, places), place = self._pulled(table, ids), 0
        cells = len(self.client.parameters[table].shape) - 1
        for out in outs:
            stop = place + math.prod(out.shape[: out.ndim - cells])
            np.take(found, places[place:stop], axis=0, out=out.reshape(stop - place, found.shape[1]), mode="clip")
            place = stop

    def push(self, table: str, ids: np.ndarray, parts: Sequence[np.ndarray]) -> None:
        """Send gradients of the rows `ids`, which lie in some arrays, one after the other."""
        self.client.push_parts(table, ids, parts)

    def _pulled(self, table: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        waiting = self.asked.get(table, [])
        for place, (asked, answer) in enumerate(waiting):
            if np.array_equal(asked, ids):
                del waiting[place]
                return answer()
        self._drop(table)
        return self._ask(table, ids)()

    def descend(self, table: str, ids: np.ndarray, parts: Sequence[np.ndarray], rate: float) -> None:
        """Gradient descent on the rows `ids` of a cached table. Rows of equal ids are summed first."""
        cached = self.cached[table]
        distinct, sums = cached.sums(ids, *parts)
        number = sums.dtype.type
        sums = sums * number(self.weight)
        sums *= number(-rate)
        cached.update(distinct, sums.reshape(-1, *cached.parameter.shape[1:]))

    def expect(self, steps: Iterable[list[RowRequest]]) -> None:
        """The rows of the next steps; caches that look ahead choose by them once those that they have seen are over."""
        steps = iter(steps)
        self.expected = next(steps, [])
        self.foreseen = {name: max(0, count - 1) for name, count in self.foreseen.items()}
        self.coming = [self.expected, *steps] if self.expected and self._due else []

    def _foresee(self) -> None:
        """Have the caches choose, before a clock ends: under BSP what they send then counts when rows are asked for."""
        for table, cached in self._due.items():
            self._drop(table)
            seen = self.coming[: cached.cache.ahead]
            cached.foresee([ids for step in seen for name, ids in step if name == table])
            full = len(seen) + 1 >= cached.cache.ahead  # of an epoch the first has begun; a resumed run may see few
            self.foreseen[table] = math.inf if POLICIES[cached.cache.policy].once and full else len(seen)
        self.coming = []

    def tick(self) -> None:
        """End the clock, and request the rows of the next step."""
        if self.coming:
            self._foresee()
        self.client.clock()
        for cached in self.cached.values():
            cached.settle()
        expected, self.expected = self.expected, []
        for table, ids in expected:
            waiting = self.asked.setdefault(table, [])
            if not waiting or table not in self.cached:  # a cache answers one question at a time
                waiting.append((ids, self._ask(table, ids)))

    # -- around them ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send all that caches hold back and wait until it counts. All workers call this alike: it ends a clock."""
        for table in list(self.asked):
            self._drop(table)
        if self.cached:
            for cached in self.cached.values():
                cached.flush()
            self.client.clock().wait()

    def forget(self) -> None:
        """Drop all rows, because the servers have other values now."""
        for table in list(self.asked):
            self._drop(table)
        for cached in self.cached.values():
            cached.forget()

    def _ask(self, table: str, ids: np.ndarray) -> Distinct:
        if table in self.cached:
            return self.cached[table].ask(ids)
        return self.client.pull_distinct(table, ids).wait

    def _drop(self, table: str) -> None:
        """Receive the answers that no caller has fetched."""
        for _, answer in self.asked.pop(table, []):
            answer()


def pull_bags(
    client: Client, name: str, ids: np.ndarray, bags: np.ndarray, count: int, weights: np.ndarray | None = None
) -> PendingReply:
    """The sums of the rows `ids` (entries,) in each of `count` bags, (count, *row); entry e is in bag `bags[e]`.

    Each row counts `weights[e]` times. ShapeError unless these are as many as the ids, ValueRangeError for other bags.
    Servers sum up what they have, so one row comes from each for a bag; `pull_rows` fetches each distinct row once.

    >>> from hetu.ps import Client, Options, Parameter, ServerProcess
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         client.create({"t": Parameter((3, 1), sparse=True)}, {"t": np.array([[1.0], [2.0], [4.0]], "f4")})
    ...         pull_bags(client, "t", np.array([2, 0, 2]), np.array([0, 0, 1]), 2).wait().tolist()
    [[5.0], [4.0]]
    """
    parameter, places, bags = client.parameter(name), client.places(name, ids), unmasked(bags, "bags")
    weights = None if weights is None else unmasked(weights, "weights", parameter.element)
    shapes = [None if array is None else array.shape for array in (places, bags, weights)]
    if places.ndim != 1 or len({*shapes} - {None}) > 1:
        raise ShapeError(f"ids, bags and weights {shapes} for bags of {name}", fix="give each entry its bag and weight")
    if bags.size and not 0 <= bags.min() <= bags.max() < count:
        raise ValueRangeError(f"bags {bags.min()}..{bags.max()} of {count}", fix="number them from 0")
    blocks, most = client.blocks[name], max(1, CHUNK // row_bytes(parameter.cols, parameter.element))
    lies = np.searchsorted([block.start for block in blocks], places, side="right") - 1  # in which of them
    order = np.lexsort((bags, lies))  # bag by bag, so that few are in two messages
    ends, sent, found = np.searchsorted(lies[order], range(len(blocks) + 1)), list[Any](), list[np.ndarray]()
    for block, (first, last) in zip(blocks, pairwise(ends)):
        for start in range(first, last, most):
            some = order[start : min(start + most, last)]
            some = some[np.argsort(places[some], kind="stable")]
            distinct, numbers = np.unique(bags[some], return_inverse=True)
            fields: dict[str, Any] = {"key": block.key, "start": block.start, "step": client.step}
            fields |= {"ids": wire_array(places[some] - block.start), "counts": wire_array(numbers, np.dtype("<i8"))}
            fields["values"] = None if weights is None else wire_array(weights[some][:, None])
            sent.append(client.transport.submit(block.server, Kind.POOL, **fields))
            found.append(distinct)

    def total(requests: list[Any]) -> np.ndarray:
        sums = np.zeros((count, parameter.cols), parameter.element)
        with np.errstate(all="ignore"):  # what is infinite stays so
            for distinct, request in zip(found, requests):
                sums[distinct] += given(given(request.reply).values)
        return sums.reshape(count, *parameter.shape[1:])

    return PendingReply(client.transport, sent, total)
