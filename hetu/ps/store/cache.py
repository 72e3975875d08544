"""A bounded cache of embedding rows at a worker, stale within bounds that are counted in updates.

Embedding ids are skewed: a few rows make up most lookups. A worker keeps such rows, trains on its copies, and talks to
the server only when a copy has come too far from the truth: `pull_bound` limits how many updates that servers know of a
row may miss when it is read, `push_bound` how many of its own a worker may hold back. A read among W workers misses at
most pull_bound + (W - 1) push_bound updates. With both at 0, training is as without a cache. X. Miao et al., "HET:
Scaling out Huge Embedding Model Training via Cache-enabled Distributed Framework", VLDB 2022, sections 3 and 4; hot
rows after S. Dong et al., "HET-KG", ICDE 2022; counts that are halved, so that rows once hot make room, after
G. Einziger et al., "TinyLFU", TOS 2017, section 3.3.

The server only adds finished deltas, so this is for plain gradient descent: Adam on a server needs every gradient, not
sums of some. A bound is not free: the updates that W workers hold back act on a hot row like descent delayed by up to
W * bound steps. `examples/benchmarks/cache.py` measures both sides. Two workers on the Adult census, half of the rows
cached (`--auc --epochs 6`, too few epochs, which shows differences best):

    bound                 none      0      1      3     10     30    100
    distinct rows found      -    18%    49%    68%    81%    85%    87%
    test AUC             .9206  .9206  .9204  .9200  .9181  .9192  .9183

After 12 epochs the AUC is .9286 without a cache and within .0002 of that for each bound. A bound above 10 saves little
more, so 10 is the default. One thread may use a cache at a time; `rows.py` computes the deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ...codec import codec
from ...core.errors import ArgumentError, ShapeError
from ...ops.index import sums_of
from .partition import Parameter
from .policies import NEVER, POLICIES, SMALL, Cache, Counters, Worth, hot_rows, worth_keeping
from .rules import name_of
from .server_table import FAR
from .tiers import Directory

RECENT = 32  # batches whose most used rows "hot" keeps, at most; at first fewer
SAMPLE = 10  # uses per line until all counts are halved


class RowClient(Protocol):
    """What a cache needs of a client."""

    parameters: dict[str, Parameter]
    step: int  # the clock of this worker

    @property
    def worker(self) -> int: ...

    def push_rows(self, name: str, ids: np.ndarray, rows: np.ndarray, counts: np.ndarray | None = None) -> Any: ...

    def pull_rows(self, name: str, ids: np.ndarray) -> Any: ...

    def sync_rows(self, name: str, ids: np.ndarray, limits: np.ndarray) -> Any: ...


class CachedTable:
    """The cache of one sparse parameter, which needs the rule "add" and reduce="sum": the servers only add.

    Each line holds the row as this worker sees it, its version (the server's update count when both were last equal),
    and the sum and number of the worker's updates that are not pushed yet.

    >>> from hetu.ps import Client, Options, Parameter, ServerProcess
    >>> with ServerProcess(Options(workers=1, token="secret")) as server:
    ...     with Client([server.address], worker=0, token="secret") as client:
    ...         client.create({"t": Parameter((4, 2), sparse=True, rule="add", reduce="sum")}, {"t": np.zeros((4, 2))})
    ...         table = CachedTable(client, "t", Cache(rows=2))
    ...         _ = table.lookup(np.array([1, 3]))
    ...         table.update(np.array([1]), np.ones((1, 2)))
    ...         table.lookup(np.array([1, 3])).tolist(), table.counters.fetched
    ([[1.0, 1.0], [0.0, 0.0]], 2)
    """

    def __init__(self, client: RowClient, name: str, cache: Cache) -> None:
        parameter = client.parameters[name]
        if not parameter.sparse or (parameter.rule, parameter.reduce) != ("add", "sum"):
            raise ArgumentError(
                f"a cache for {name} with the rule {name_of(parameter.rule)!r}, reduce={parameter.reduce!r}",
                fix='workers send deltas: use sparse=True, rule="add", reduce="sum"',
            )
        self.client, self.name, self.parameter, self.cache = client, name, parameter, cache
        self.pull_bound, self.push_bound, self.counters = min(cache.pull_bound, FAR), cache.push_bound, Counters()
        tables = parameter.joined or [(name, parameter.shape[0])]
        self.shares = [(rows, cache.capacity(rows, table)) for table, rows in tables]  # of each, if several are one
        capacity, policy = sum(count for _, count in self.shares), POLICIES[cache.policy]
        replicas = self._replicas() if policy.placed else None
        capacity = capacity if replicas is None else max(1, len(replicas))
        self.score, self.on, self.worth = policy.score, True, Worth(capacity) if policy.switches else None
        whole = parameter.cols * parameter.element.itemsize
        self.pull_bytes, self.push_bytes = (  # bytes of a row that comes and of one that goes, with its id
            SMALL + (coded.width(parameter.cols) if (coded := codec(name)) else whole)
            for name in (parameter.pull, parameter.push)
        )
        self.batch: tuple[np.ndarray, ...] | None = None  # the ids of the last lookup, those distinct, their places
        self.slot_of: Any = Directory(capacity) if parameter.grows else np.full(parameter.shape[0], -1, np.intp)
        self.ids = np.full(capacity, -1, "<i8")  # of each slot; -1: free
        self.rows = np.zeros((capacity, parameter.cols), parameter.element)
        self.deltas = np.zeros_like(self.rows)
        self.versions, self.updates, self.uses, self.last = (np.zeros(capacity, "<i8") for _ in range(4))
        self.current = np.zeros(capacity, "<i8")  # the last clock at which a line was known to miss no update
        self.turn = self.used = 0  # uses since counts were halved
        self.recent, self.span = list[np.ndarray](), 1  # the last batches, and how many say which rows are hot
        self.named = policy.foresees or policy.placed  # whether others say which: `keep`, or `foresee`
        self.sent: list[Any] = []  # pushes that may still be on their way
        if replicas is not None:
            self._admit(replicas)

    def _replicas(self) -> np.ndarray:
        """The rows that the table's division names for this worker."""
        placed = self.parameter.placed
        if placed is None or not placed.replicas:
            what = "rows are dealt in turn" if placed is None else "division names no replicas"
            raise ArgumentError(
                f"a cache of replicas for {self.name}, whose {what}",
                fix="give placed= a Placed with replicas, such as partition_bigraph(...).placed, or use another policy",
            )
        return placed.kept_by(self.client.worker)

    # -- the three things a worker does ----------------------------------------------------------------------

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """The rows `ids`, as ids.shape + row shape, none staler than `pull_bound`; at most one round trip."""
        rows, places = self.ask(ids)()
        return np.take(rows, places, axis=0).reshape(*np.shape(ids), *self.parameter.shape[1:])

    def ask(self, ids: np.ndarray) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
        """Begin a `lookup`; the function that is returned finishes it: the distinct rows (rows, cols), and which of
        them each id means. Do not use the table in between."""
        self._weigh(sends=False)
        self.settle()  # the pushes of an earlier batch must have arrived if this one asks for their rows
        ids = np.asarray(ids)
        unique, places = self._distinct(ids)
        self.counters.lookups += ids.size
        self.counters.unique += len(unique)
        self.counters.plain += len(unique) * self.pull_bytes
        if self.score is None and not self.named:
            self._keep_recent(unique)
        checked = self._check(unique, self._use(unique)) if self.on else self._pass(unique)
        return lambda: (checked(), places)

    def update(self, ids: np.ndarray, deltas: np.ndarray) -> None:
        """Add `deltas`, ids.shape + row shape, to the rows `ids`: here at once, on the server within `push_bound`."""
        ids, deltas = np.asarray(ids), np.asarray(deltas, self.rows.dtype)
        if deltas.shape != (*ids.shape, *self.parameter.shape[1:]):
            raise ShapeError(f"deltas {deltas.shape} for ids {ids.shape} of rows {self.parameter.shape[1:]}")
        ids, deltas = self.sums(ids, deltas)
        self.counters.plain += len(ids) * self.push_bytes
        slots = self.slot_of[ids]
        goes = slots < 0
        held = np.flatnonzero(~goes)
        lines, mine = slots[held], np.take(deltas, held, axis=0)
        self.rows[lines] += mine
        self.deltas[lines] += mine
        self.updates[lines] += 1
        goes[held[self.updates[lines] > self.push_bound]] = True
        going = np.flatnonzero(goes)
        slots, deltas, counts = slots[going], np.take(deltas, going, axis=0), np.ones(len(going), "<i8")
        over = np.flatnonzero(slots >= 0)
        _, deltas[over], counts[over] = self._collect(slots[over])
        self._push(ids[going], deltas, counts)
        self._weigh(sends=True)

    def sums(self, ids: np.ndarray, *parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `sum_by_id`, of ids and rows of any shape; those of the last lookup are not sorted again."""
        ids, row = ids.reshape(-1), self.parameter.shape[1:]
        if len(parts) == 1 and (ids[1:] > ids[:-1]).all():
            return ids, parts[0].reshape(len(ids), self.parameter.cols)
        distinct, places = self._distinct(ids)
        return distinct, sums_of(places, parts, (len(distinct), *row)).reshape(len(distinct), self.parameter.cols)

    def _distinct(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The distinct ids, increasing, and the place of each id among them."""
        ids = ids.reshape(-1)
        if self.batch is None or not np.array_equal(ids, self.batch[0]):
            distinct, places = np.unique(ids, return_inverse=True)
            self.batch = ids.copy(), distinct, places
        return self.batch[1], self.batch[2]

    def flush(self) -> None:
        """Push all that is held back and wait until it has arrived; call this before others read the table."""
        self._push(*self._collect(np.flatnonzero(self.updates)))
        self.settle()

    def forget(self) -> None:
        """Fetch every row anew when it is looked up, because the servers have other values now."""
        self.settle()
        self.versions[:], self.deltas[:], self.updates[:] = -1, 0, 0

    # -- whether it is worth it ------------------------------------------------------------------------------

    def _weigh(self, *, sends: bool) -> None:
        """Switch "auto" on or off, between batches. What is held back goes to the server then, so not just before a
        lookup, of which under BSP the answer would lack it."""
        if self.worth is None or not self.worth.due(self.counters) or not (sends or not self.updates.any()):
            return
        was, self.on = self.on, self.worth.decide(self.counters)
        if was and not self.on:
            self._push(*self._evict(np.flatnonzero(self.ids >= 0)))

    def _pass(self, ids: np.ndarray) -> Callable[[], np.ndarray]:
        """Ask for distinct rows as if there were no cache."""
        self.counters.passed += len(ids)
        self.counters.fetched += len(ids)
        self.counters.moved += len(ids) * self.pull_bytes
        answer = self.client.pull_rows(self.name, ids)
        return lambda: answer.wait().reshape(len(ids), self.parameter.cols)

    # -- prefetched hot rows ---------------------------------------------------------------------------------

    def keep(self, ids: np.ndarray) -> None:
        """Cache exactly these rows from now on (policy "hot"), and fetch the new ones; see `hot_rows`.

        "auto" then stays on.
        """
        self.named, self.on, self.worth = True, True, None
        self._keep(ids)

    def _keep_recent(self, unique: np.ndarray) -> None:
        """Cache what the last batches used most, of which there are ever more until they are `RECENT`.

        Rows of this batch with updates that are held back stay: under BSP the answer would lack what is pushed now.
        """
        self.recent.append(unique)
        if len(self.recent) >= self.span:
            held = unique[self.slot_of[unique] >= 0]
            held = held[self.updates[self.slot_of[held]] > 0]
            hot = hot_rows(self.recent, len(self.ids))
            self._keep(np.concatenate([held, hot[~np.isin(hot, held)]])[: len(self.ids)])
            self.recent, self.span = [], min(2 * self.span, RECENT)

    def _keep(self, ids: np.ndarray) -> None:
        self.settle()
        wanted = np.unique(np.asarray(ids, "<i8"))[: len(self.ids)]
        self._admit(wanted)
        self._check(wanted, self.slot_of[wanted])()

    def foresee(self, batches: Sequence[np.ndarray]) -> None:
        """Keep what these coming batches use most, of each table its share. A new row is fetched at its first lookup.

        What rows that go hold back is sent, so call it before the end of a clock, with no answer under way.
        """
        self._admit(worth_keeping(batches, self.ids[self.ids >= 0], self.shares))

    def _admit(self, wanted: np.ndarray) -> None:
        """Give lines to exactly these distinct rows."""
        old = np.flatnonzero((self.ids >= 0) & ~np.isin(self.ids, wanted))
        self._push(*self._evict(old))
        new = wanted[self.slot_of[wanted] < 0]
        self._place(new, np.flatnonzero(self.ids < 0))

    # -- lines -----------------------------------------------------------------------------------------------

    def _use(self, ids: np.ndarray) -> np.ndarray:
        """The slots of these distinct rows, new ones for rows without; -1 if there is no room."""
        self.turn += 1
        slots: np.ndarray = self.slot_of[ids]
        missing = np.flatnonzero(slots < 0)
        if self.score is not None and len(missing):
            room = np.flatnonzero(self.ids < 0)[: len(missing)]
            if len(room) < len(missing):
                scores = np.array(self.score(self.uses, self.last))
                victims = self._victims(scores, len(missing) - len(room), slots[slots >= 0])
                self._push(*self._evict(victims))
                room = np.concatenate([room, victims])
            admitted = missing[: len(room)]
            slots[admitted] = self._place(ids[admitted], room)
        used = slots[slots >= 0]
        self.uses[used] += 1
        self.last[used] = self.turn
        self.used += len(used)
        if self.used >= SAMPLE * len(self.ids):
            self.uses >>= 1
            self.used = 0
        return slots

    def _victims(self, scores: np.ndarray, count: int, in_use: np.ndarray) -> np.ndarray:
        """Up to `count` slots to give up, those of the lowest scores, none of them in use by this batch."""
        scores[in_use] = NEVER
        scores[self.ids < 0] = NEVER
        found = np.flatnonzero(scores < NEVER)
        if len(found) <= count:
            return found
        scores = scores[found]
        edge = np.sort(scores)[count - 1]  # scores are alike in long runs, on which argpartition takes 8 times as long
        below, at = np.flatnonzero(scores < edge), np.flatnonzero(scores == edge)
        lowest: np.ndarray = found[np.concatenate([below, at[: count - len(below)]])]
        return lowest

    def _place(self, ids: np.ndarray, room: np.ndarray) -> np.ndarray:
        """Make empty lines for these rows; the version -1 makes the next check fetch them."""
        slots = room[: len(ids)]
        self.ids[slots], self.slot_of[ids] = ids, slots
        self.versions[slots], self.uses[slots], self.last[slots] = -1, 0, 0
        return slots

    def _evict(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Give these lines up; returns the updates that they still have to push."""
        self.counters.evicted += len(slots)
        dirty = self._collect(slots[self.updates[slots] > 0])
        self.slot_of[self.ids[slots]] = -1
        self.ids[slots] = -1
        return dirty

    def _collect(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take the unpushed updates off these lines: (ids, sums, counts)."""
        taken = self.ids[slots], self.deltas[slots], self.updates[slots]
        exact = not (self.parameter.at_rest or self.parameter.push or self.parameter.grows)
        if exact:  # or what a server adds is rounded, or dropped: own ones make stale
            self.versions[slots] += np.where(self.versions[slots] < 0, 0, taken[2])  # what was never fetched stays so
        self.deltas[slots], self.updates[slots] = 0, 0
        return taken

    # -- the server ------------------------------------------------------------------------------------------

    def _check(self, ids: np.ndarray, slots: np.ndarray) -> Callable[[], np.ndarray]:
        """Ask the server for the rows that are missing or too old; the function that is returned gives all rows."""
        known, now, inter = self.versions[slots], self.client.step, self.cache.inter_bound
        late = np.zeros(len(slots), bool) if inter is None else now - self.current[slots] > inter
        limits = np.where((slots >= 0) & (known >= 0), known + np.where(late, 0, self.pull_bound), -1)
        surely = slots[(slots >= 0) & (limits == known)]  # either comes, or misses nothing
        answer = self.client.sync_rows(self.name, ids, limits)
        self.counters.moved += 2 * SMALL * len(ids)

        def rows() -> np.ndarray:
            found, versions, fetched = answer.wait()
            self.counters.fetched += len(found)
            self.counters.moved += len(found) * (SMALL + self.pull_bytes)
            places = np.searchsorted(ids, found)
            made = np.take(self.rows, slots, axis=0, mode="clip")
            made[places] = fetched
            inside = np.flatnonzero(slots[places] >= 0)
            lines = slots[places[inside]]
            self.versions[lines] = versions[inside]
            self.current[lines] = self.current[surely] = now
            rows = np.take(fetched, inside, axis=0)
            rows += np.take(self.deltas, lines, axis=0)  # own writes stay visible
            self.rows[lines] = made[places[inside]] = rows
            return made

        return rows

    def _push(self, ids: np.ndarray, deltas: np.ndarray, counts: np.ndarray) -> None:
        if len(ids):
            self.counters.pushed += len(ids)
            if not (ids[1:] > ids[:-1]).all():
                order = np.argsort(ids)
                ids, deltas, counts = ids[order], np.take(deltas, order, axis=0), counts[order]
            sums = bool((counts > 1).any())
            self.counters.moved += len(ids) * (self.push_bytes + SMALL * sums)
            deltas = deltas.reshape(len(ids), *self.parameter.shape[1:])
            self.sent.append(self.client.push_rows(self.name, ids, deltas, counts if sums else None))

    def settle(self) -> None:
        """Wait until what was pushed has arrived, and let go of it."""
        for handle in self.sent:
            handle.wait()
        self.sent.clear()
