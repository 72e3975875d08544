"""A table without a bound of its rows on a server: a row is made when its id is pushed, and goes when room is needed.

Until then a row has its first value, which follows from the seed and the id alone: whoever reads it, as often as
wanted, on any server, gets the same bits, and reading makes no row. So do dynamic tables of recommenders (for one
X. Lian et al., "Persia", KDD 2022; Z. Liu et al., "Monolith", ORSUM 2022, whose filters by count and chance these are).
A row that went has its first value again, and its rule's state is gone.

Versions of new rows begin above those of all rows that went, by more than a cache may be behind, so what one holds of
such a row is stale. Only ids that have come often enough get a row, or some by chance. Left out: memory that is given
back, and functions of whole tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.errors import CheckpointError, ValueRangeError
from ...growth import Growth
from ...ops.random import words_of
from .messages import Kind, Message, RefusedError, given
from .packing import chances
from .rules import Gradients
from .server_table import FAR, ReadPart, ServerTable
from .table_spec import TableSpec
from .tiers import Directory, Picked

CELL = 254  # that a cell counts to, so that the next update is one that every `after` admits


class Admission:
    """Which ids without a row get one: counts of two cells for each id, the smaller of which is never too small.

    G. Cormode, S. Muthukrishnan, "An Improved Data Stream Summary: The Count-Min Sketch", J. Algorithms 2005; counts
    rise no more than they must, and are halved once half of `after` ids have come for each cell: later, each id would
    be admitted in the end, and sooner, perhaps none, however often it comes.
    """

    def __init__(self, growth: Growth, rows: int, seed: np.uint64) -> None:
        self.after, self.chance, self.seed = growth.after, growth.chance, seed
        self.counts = np.zeros((2, max(64, rows) if growth.after > 1 else 0), "u1")
        self.seen = 0

    def admits(self, ids: np.ndarray, clock: int) -> np.ndarray:
        """Which of these distinct ids, without a row, get one by this update."""
        good = np.ones(len(ids), bool)
        if self.chance < 1:
            good = chances(self.seed, ids, np.full(len(ids), clock), 1)[:, 0] < self.chance
        if self.after > 1:
            halves = words_of(ids, self.seed).view("<u4").reshape(-1, 2).T
            cells = (halves % np.uint32(self.counts.shape[1])).astype("<i8")
            known = np.minimum(np.minimum(*(counts[cell] for counts, cell in zip(self.counts, cells))), CELL) + 1
            for counts, cell in zip(self.counts, cells):
                np.maximum.at(counts, cell, known)
            good &= known >= self.after
            self.seen += len(ids)
            if self.seen > self.after // 2 * self.counts.shape[1]:
                self.counts >>= 1
                self.seen = 0
        return good


GONE = -1  # the key of a slot whose row went
BLOCK = 1 << 15  # numbers that are drawn at once
READ = 1 << 16  # rows that are read at once
SAMPLE = 10  # updates for each row that has room until all counts are halved
AT_ONCE = 16  # a part of the rows that go at once: one in so many
MOST = np.iinfo("<i4").max  # of what is counted
WHOLE = {Kind.ASSIGN, Kind.CALL, Kind.MAP, Kind.SUM}  # are of all rows of a table
NO_ROWS = {Kind.CREATE, Kind.RATE, Kind.EXPORT}  # need no ids


class GrowingTable(ServerTable):
    """A `ServerTable` whose messages name rows by ids of 63 bits; `spec.rows` is how many it may hold."""

    def __init__(self, spec: TableSpec, gradients: Gradients | None = None) -> None:
        super().__init__(spec, gradients)
        growth, drawn = given(spec.growth), spec.first_law()
        self.wanting, self.filled = 0, np.ones(0, bool)
        self.law, self.seed = drawn.law, np.random.SeedSequence(drawn.seed).generate_state(1, np.uint64)[0]
        self.directory, self.used = Directory(spec.rows), 0  # slots from `used` on never had a row
        self.room = np.empty(0, "<i8")  # slots whose rows went
        self.last, self.since = np.zeros(spec.rows, "<i4"), 0  # the clock of the last update, counted from this on
        self.uses = np.zeros(spec.rows, "<i4") if growth.evict == "frequency" else None  # how many updates
        self.counted = self.halved = 0  # updates since those were halved, and how often they were
        self.score = self.last if self.uses is None else self.uses  # of which the lowest go
        self.admission = Admission(growth, spec.rows, self.seed)
        self.floor = 0  # version of ids without a row
        self.counts = dict.fromkeys(("hits", "on_disk", "misses", "made", "evicted", "dropped"), 0)

    # -- what messages may say -------------------------------------------------------------------------------

    def check(self, message: Message) -> None:
        kind, name, count = message.kind, self.spec.name, 0 if message.ids is None else len(message.ids)
        if kind in WHOLE or (message.ids is None and kind not in NO_ROWS):
            text = f"{kind.name} of all rows of {name}, a table without a bound"
            raise RefusedError("growing", text, fix="push, pull, export or import rows by their ids")
        if kind in (Kind.PUSH, Kind.PUSH_PULL) and count > self.spec.rows:
            text = f"{count} rows at once for {name}, whose budget holds {self.spec.rows} on this server"
            raise ValueRangeError(text, fix="give it a larger budget")
        super().check(message)

    # -- rows and slots --------------------------------------------------------------------------------------

    def whole(self, ids: np.ndarray) -> np.ndarray:
        """Ids as they were before they were dealt: what follows from them hangs on no number of servers."""
        return ids * self.spec.parts + self.spec.first

    def first(self, ids: np.ndarray) -> np.ndarray:
        """The first values of the rows `ids`."""
        cols, made = self.spec.cols, np.empty((len(ids), self.spec.cols), self.values.dtype)
        places, each = np.arange(1, (cols + 1) // 2 + 1), max(1, BLOCK // max(1, cols))
        for start in range(0, len(ids), each):
            some = slice(start, start + each)
            words = words_of(places, words_of(self.whole(ids[some]), self.seed)[:, None])
            made[some] = self.law.at((words.view("<u4")[:, :cols] + 0.5) * 2.0**-32, self.values.dtype)
        return made

    def _slots(self, ids: np.ndarray, clock: int, *, filtered: bool = True) -> np.ndarray:
        """The slots of distinct ids, in memory if there is room, made for those that get one now; -1 of the others."""
        slots = self.directory[ids].astype("<i8")
        missing = np.flatnonzero(slots < 0)
        if filtered and len(missing):
            missing = missing[self.admission.admits(self.whole(ids[missing]), clock)]
        new = self._make_room(len(missing), slots[slots >= 0])
        missing = missing[: len(new)]
        slots[missing] = new
        self.counts["made"] += len(new)
        self.counts["dropped"] += int(np.count_nonzero(slots < 0))
        at = slots[slots >= 0]
        if self.tiers is not None:
            self.tiers.warm(at, self.score)
        if len(new):
            self.directory[ids[missing]] = new
            self.values[new] = self.first(ids[missing])
            for state in self.rule.states:
                state[new] = 0
            self.versions[new] = self.floor + FAR  # caches may hold a row that went, or own updates that were dropped
        if clock - self.since >= MOST:
            self._count_from(clock - MOST // 2)
        self.last[at] = np.maximum(self.last[at], max(0, clock - self.since))
        if self.uses is not None:
            self.uses[at] += 1
            self.counted += len(at)
            if self.counted > SAMPLE * self.spec.rows:
                self.uses[: self.used] >>= 1
                self.counted, self.halved = 0, self.halved + 1
        return slots

    def _count_from(self, clock: int) -> None:
        """Count clocks from a later one on; updates before it are no longer told apart."""
        np.maximum(self.last, by := min(clock - self.since, MOST), out=self.last)
        self.last -= by
        self.since = clock

    def _make_room(self, count: int, stay: np.ndarray) -> np.ndarray:
        """Up to `count` slots without a row; rows go for them, but none of `stay`."""
        lacking = count - len(self.room) - (self.spec.rows - self.used)
        if lacking > 0:
            self.evict(max(lacking, self.spec.rows // AT_ONCE), stay)
        fresh = min(max(0, count - len(self.room)), self.spec.rows - self.used)
        slots = np.concatenate([self.room[:count], np.arange(self.used, self.used + fresh)])
        self.room, self.used = self.room[count:], self.used + fresh
        return slots

    def evict(self, count: int, stay: np.ndarray) -> None:
        """Let up to `count` rows go, those updated longest ago, or least often, but none of the slots `stay`."""
        count = min(count, self.used - len(self.room) - len(stay))
        if count <= 0:
            return
        score = self.score[: self.used].copy()
        score[stay] = score[self.room] = MOST  # do not go
        going = np.sort(np.argpartition(score, count - 1)[:count])
        self.floor = max(self.floor, int(self.versions[going].max()))
        self.directory[self.directory.keys[going]] = GONE
        self.directory.keys[going], self.score[going] = GONE, 0
        self.room = np.concatenate([self.room, going])
        self.counts["evicted"] += count

    @property
    def live(self) -> np.ndarray:
        """The slots of all rows."""
        return np.flatnonzero(self.directory.keys[: self.used] != GONE)

    @property
    def grown(self) -> dict[str, int]:
        """How many rows there are; how many were found as they were read, those of them in files, and how many had a
        first value; and how many updates made a row, had one go, or were dropped."""
        return {"held": len(self.directory), **self.counts}

    # -- snapshots -------------------------------------------------------------------------------------------

    @property
    def by_row(self) -> dict[str, Any]:
        uses = {} if self.uses is None else {"uses": self.uses}
        return {**super().by_row, "ids": self.directory.keys, "last": self.last, **uses}

    def kept(self, since: int | None = None) -> dict[str, Any]:
        """The slots that changed, with what they hold; `room` says of which the rows went, and `facts` how many slots
        there are, the version of ids without a row, how often the counts of all were halved, how long ago, and from
        where clocks count; `sketch` and what follows, which ids have come without getting one. Whether a checkpoint is
        being loaded (`wanting`) is not: after a restart it has to be loaded again, as rows that came since are gone."""
        slots = np.flatnonzero(self.last[: self.used] >= (0 if since is None else since - self.since))
        rows = {name: Picked(array, slots) for name, array in self.by_row.items()}
        facts = np.array([self.used, self.floor, self.halved, self.counted, self.since, self.admission.seen], "<i8")
        one = {"facts": facts, "sketch": self.admission.counts, "rate": self.rule.rate, "step": self.rule.step}
        return {**rows, "slots": slots, "room": self.room, **one}

    def resume(self, saved: Sequence[ReadPart], jump: int) -> None:
        for read in saved:
            slots, halved = read("slots"), self.halved
            facts = map(int, read("facts"))
            self.used, self.floor, self.halved, self.counted, since, self.admission.seen = facts
            self._count_from(since)
            if self.uses is not None:
                self.uses >>= min(31, self.halved - halved)  # of rows that did not change otherwise
            if len(slots) and not (slots[0] >= 0 and slots[-1] < self.spec.rows and (np.diff(slots) > 0).all()):
                raise CheckpointError(f"slots of {self.spec.name}, which has {self.spec.rows}, in disorder")
            for first in range(0, len(slots), READ):
                some = slots[first : first + READ]
                for name, array in self.by_row.items():
                    array[some] = read(name, array, (first, first + len(some)))
            self.room = read("room")
            self.rule.rate[...], self.rule.step[...] = read("rate"), read("step")
        self.admission.counts[...] = saved[-1]("sketch", self.admission.counts)
        self.directory.keys[self.room] = GONE
        self.versions[: self.used] += jump
        self.floor += jump
        ids = self.directory.keys[live := self.live]
        if len(np.unique(ids)) < len(ids) or (ids < 0).any():
            raise CheckpointError(f"{self.spec.name} has ids twice, or none for some rows")
        self.directory[ids] = live

    # -- writing ---------------------------------------------------------------------------------------------

    def update(self, ids: np.ndarray, rows: np.ndarray, counts: Any, begins: bool, clock: int) -> None:
        slots = self._slots(ids, clock)
        if not (there := slots >= 0).all():
            slots, rows, counts = slots[there], rows[there], np.broadcast_to(counts, len(ids))[there]
        super().update(slots, rows, counts, begins, clock)

    def refill(self, spec: TableSpec) -> None:
        """Begin a new generation, without a row, until a worker has given the last of its rows."""
        self.spec = spec
        self.evict(self.used, np.empty(0, "<i8"))
        self.rule.step[...], self.wanting = 0, 1

    def restore(self, message: Message) -> None:
        """Take rows in as they are, with the state of their rule, in place of those that it has."""
        if message.facts.get("last"):
            self.wanting = 0
        slots = self._slots(given(message.ids), message.step, filtered=False)
        parts = np.split(given(message.values)[there := slots >= 0], len(self.arrays), axis=1)
        for array, part in zip(self.arrays, parts):
            array[slots[there]] = part
        self.versions[slots[there]] += FAR + 1  # whatever caches hold of them
        self.rule.step[...] = max(int(self.rule.step), message.facts["step"])

    def take(self, other: GrowingTable) -> None:
        """Rows of a table of another number of parts that are dealt to this one, or if not all fit the best of both."""
        for each in (self, other):
            each._count_from(max(self.since, other.since))
        own, live = self.score[self.live], other.live
        ids = other.whole(other.directory.keys[live])
        live, ids = (each[ids % self.spec.parts == self.spec.first] for each in (live, ids))
        best = np.argsort(-np.concatenate([own, other.score[live]]), kind="stable")[: self.spec.rows]
        mine = best[best >= len(own)] - len(own)
        self.evict(len(own) + len(mine) - self.spec.rows, np.empty(0, "<i8"))
        slots, theirs = self._slots(ids[mine] // self.spec.parts, 0, filtered=False), other.by_row
        for part in self.by_row.keys() & theirs.keys() - {"ids"}:
            self.by_row[part][slots] = np.take(theirs[part], live[mine], axis=0)
        self.floor = max(self.floor, other.floor)
        self.rule.rate[...], self.rule.step[...] = other.rule.rate, max(int(self.rule.step), int(other.rule.step))

    # -- reading ---------------------------------------------------------------------------------------------

    def rows(self, ids: np.ndarray, array: Any = None, out: np.ndarray | None = None) -> np.ndarray:
        """Of ids without a row first values, or zeros of their rule's state."""
        slots = self.directory[ids]
        found, missing = super().rows(slots, array, out), np.flatnonzero(slots < 0)
        if array is None or array is self.values:
            self.counts["hits"] += len(ids) - len(missing)
            self.counts["misses"] += len(missing)
            self.counts["on_disk"] += 0 if self.tiers is None else int(self.tiers.in_file(slots[slots >= 0]).sum())
            found[missing] = self.first(ids[missing])
        else:
            found[missing] = 0
        return found

    def newer(
        self, ids: np.ndarray, limits: np.ndarray, versions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Also all without a row, or a cache would keep its own updates that were dropped here."""
        slots = self.directory[ids]
        versions = np.where(slots < 0, self.floor, self.versions.take(slots, mode="clip"))
        return super().newer(ids, np.where(slots < 0, -1, limits), versions)

    def export(self, start: int, most: int, since: int) -> dict[str, Any]:
        """Of `most` slots the rows that were updated at the clock `since` or later, with their rule's state side by
        side: ids, values, and as step the slot to go on from, 0 at the end."""
        slots = np.arange(start, min(end := start + most, self.used))
        slots = slots[(self.directory.keys[slots] != GONE) & (self.last[slots] >= since - self.since)]
        rows = np.concatenate([np.take(a, slots, axis=0) for a in self.arrays], axis=1)
        return {"ids": self.directory.keys[slots], "values": rows, "step": end if end < self.used else 0}


def table_of(spec: TableSpec, gradients: Gradients | None = None) -> ServerTable:
    """The table of a description."""
    return (ServerTable if spec.growth is None else GrowingTable)(spec, gradients)
