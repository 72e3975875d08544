"""A table without a bound of its rows on a server: a row is made when its id is pushed, and goes when room is needed.

Until then a row has its first value, which follows from the seed and the id alone: whoever reads it, as often as
wanted, on any server, gets the same bits, and reading makes no row. So do dynamic tables of recommenders (for one
X. Lian et al., "Persia", KDD 2022; Z. Liu et al., "Monolith", ORSUM 2022, whose filters by count and chance these are).
A row that went has its first value again, and its rule's state is gone.

Versions of new rows begin above those of all rows that went, by more than a cache may be behind, so what one holds of
such a row is stale. Left out: memory that is given back, and functions of whole tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...core.errors import CheckpointError, ValueRangeError
from ...ops.random import GOLDEN, mixed_words
from .admission import Admission
from .directory import Directory
from .messages import Kind, Message, RefusedError, given
from .rules import Gradients
from .server_table import FAR, ReadPart, ServerTable, TableSpec, fitting_part
from .tiers import Hand, Tiers

GONE = -1  # the key of a slot whose row went
BLOCK = 1 << 15  # numbers that are drawn at once
SAMPLE = 10  # updates for each row that has room until all counts are halved
AT_ONCE = 16  # a part of the rows that go at once: one in so many
WHOLE = {Kind.ASSIGN, Kind.CALL, Kind.MAP, Kind.SUM}  # are of all rows of a table
BY_ID = {Kind.PUSH, Kind.PUSH_PULL, Kind.PULL, Kind.SYNC, Kind.STATE, Kind.RESTORE, Kind.POOL}


class GrowingTable(ServerTable):
    """A `ServerTable` whose messages name rows by ids of 63 bits; `spec.rows` is how many it may hold."""

    def __init__(self, spec: TableSpec, gradients: Gradients | None = None) -> None:
        super().__init__(spec, gradients)
        self.growth, self.wanting, self.filled = given(spec.growth), 0, np.ones(0, bool)
        drawn = spec.first_law()
        self.law, self.seed = drawn.law, np.uint64(hash_of(drawn.seed))
        self.directory, self.used = Directory(spec.rows), 0  # slots from `used` on never had a row
        self.last = np.zeros(spec.rows, "<i4")  # the clock of the last update
        self.uses = np.zeros(spec.rows if self.growth.evict == "frequency" else 0, "<i4")  # how many updates
        self.counted = 0  # updates since those were halved
        # The clock at which another row came to a slot, or an update: with rows in files, not that of the row.
        self.written = np.zeros(spec.rows, "<i4") if self.growth.disk else self.last
        self.room = np.empty(0, "<i8")  # slots whose rows went
        self.admission = Admission(self.growth, spec.rows, spec.seed)
        self.floor = 0  # version of ids without a row
        self.hand = Hand(spec.hot_rows)
        self.counts = dict.fromkeys(("hits", "on_disk", "misses", "made", "evicted", "dropped"), 0)

    # -- what messages may say -------------------------------------------------------------------------------

    def check(self, message: Message) -> None:
        if message.kind in WHOLE:
            raise RefusedError(
                "growing",
                f"{message.kind.name} of {self.spec.name}, a table without a bound",
                fix="push, pull, export or import rows by ids",
            )
        if message.kind in BY_ID and message.ids is None:
            raise RefusedError(
                "growing", f"all rows of {self.spec.name}, which has no bound", fix="name ids, or export"
            )
        count = 0 if message.ids is None else len(message.ids)
        if message.kind in (Kind.PUSH, Kind.PUSH_PULL) and count > self.spec.rows:
            raise ValueRangeError(
                f"{count} rows at once for {self.spec.name}, whose budget holds {self.spec.rows} on this server",
                fix="give it a larger budget",
            )
        super().check(message)

    # -- rows and slots --------------------------------------------------------------------------------------

    def first(self, ids: np.ndarray) -> np.ndarray:
        """The first values of the rows `ids`."""
        cols, made = self.spec.cols, np.empty((len(ids), self.spec.cols), self.values.dtype)
        steps, each = np.arange(1, (cols + 1) // 2 + 1, dtype="<u8") * GOLDEN, max(1, BLOCK // max(1, cols))
        for start in range(0, len(ids), each):
            some = slice(start, start + each)
            whole = ids[some].astype("<u8") * np.uint64(self.spec.parts) + np.uint64(self.spec.first)
            words = mixed_words(mixed_words(whole * GOLDEN + self.seed)[:, None] + steps)
            made[some] = self.law.at((words.view("<u4")[:, :cols] + 0.5) * 2.0**-32, self.values.dtype)
        return made

    def _found(self, ids: np.ndarray, array: Any) -> np.ndarray:
        """What rows `ids` have in an array, where they have no row first values, or zeros of their rule's state."""
        slots = self.directory[ids]
        missing = np.flatnonzero(slots < 0)
        rows = np.take(array, slots, axis=0, mode="clip")
        if len(missing):
            rows[missing] = self.first(ids[missing]) if array is self.values else 0
        return rows

    def _slots(self, ids: np.ndarray, clock: int, *, filtered: bool = True) -> np.ndarray:
        """The slots of distinct ids, made for those that get one now; -1 of the others."""
        slots = self.directory[ids].astype("<i8")
        missing = np.flatnonzero(slots < 0)
        if filtered and len(missing):
            missing = missing[self.admission.admits(ids[missing], clock)]
        new = self._make_room(len(missing), slots[slots >= 0])
        missing = missing[: len(new)]
        slots[missing] = new
        if len(new):
            self.directory[ids[missing]] = new
            self.values[new] = self.first(ids[missing])
            for state in self.rule.states:
                state[new] = 0
            self.versions[new] = self.floor + FAR  # caches may hold a row that went, or own updates that were dropped
            self.counts["made"] += len(new)
            if len(self.uses):
                self.uses[new] = 0
        self.counts["dropped"] += int(np.count_nonzero(slots < 0))
        slots = self._warm(slots, clock)
        at = slots[slots >= 0]
        self.last[at] = self.written[at] = np.maximum(self.last[at], clock)
        if len(self.uses):
            self.uses[at] += 1
            self.counted += len(at)
            if self.counted > SAMPLE * self.spec.rows:
                self.uses[: self.used] >>= 1
                self.counted = 0
        return slots

    def _warm(self, slots: np.ndarray, clock: int) -> np.ndarray:
        """Bring rows that lie in files into memory, in exchange with others; the slots of all rows then."""
        cold = np.flatnonzero(slots >= self.hand.slots)
        if not len(cold):
            return slots
        hot = self.hand.oldest(len(cold), self.uses if len(self.uses) else self.last, slots)
        cold = cold[: len(hot)]
        two = np.concatenate([hot, slots[cold]]), np.concatenate([slots[cold], hot])
        keys, gone = self.directory.keys[two[0]], self.directory.keys[two[0]] < 0
        self.directory[keys[~gone]] = GONE
        for array in self.by_slot.values():
            array[two[1]] = array[two[0]]
        self.written[two[1]] = clock
        self.directory[keys[~gone]] = two[1][~gone]
        if gone.any():
            self.room = np.concatenate([self.room[~np.isin(self.room, two[0][gone])], two[1][gone]])
        slots = slots.copy()
        slots[cold] = hot
        return slots

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
        by = self.uses if len(self.uses) else self.last
        score = by[: self.used].astype("<i8")
        score[stay] = score[self.room] = 1 << 40
        count = min(count, self.used - len(self.room) - len(stay))
        if count <= 0:
            return
        going = np.sort(np.argpartition(score, count - 1)[:count])
        self.floor = max(self.floor, int(self.versions[going].max()))
        self.directory[self.directory.keys[going]] = GONE
        self.directory.keys[going] = GONE
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
    def by_slot(self) -> dict[str, Any]:
        """The arrays that have an element, or a row, for each slot."""
        states = {f"state{i}": state for i, state in enumerate(self.rule.states)}
        uses = {"uses": self.uses} if len(self.uses) else {}
        counted = {"ids": self.directory.keys, "versions": self.versions, "last": self.last, **uses}
        return {**counted, "values": self.values, **states}

    def _parts(self, slots: np.ndarray) -> Iterator[tuple[str, np.ndarray, Any]]:
        """What a snapshot holds of increasing slots: arrays, and where; of rows in two tiers, each of these."""
        edge = int(np.searchsorted(slots, self.hand.slots))
        for name, array in self.by_slot.items():
            if isinstance(array, Tiers):
                yield name, array.hot, slots[:edge]
                yield f"{name}.cold", array.cold, slots[edge:] - len(array.hot)
            else:
                yield name, array, slots

    def kept(self, since: int | None = None) -> dict[str, np.ndarray]:
        """All slots as they lie, or copies of those that changed, so that rows that went are not among the latter;
        `room` says which those are, and `facts` how many slots there are, and the version of ids without a row."""
        changed = self.written[: self.used] >= (0 if since is None else since)
        slots = np.flatnonzero(changed)
        whole = len(slots) == self.used  # as they lie, so that no second table is made
        rows = {name: array[: len(at)] if whole else array[at] for name, array, at in self._parts(slots)}
        facts = np.array([self.used, self.floor], "<i8")
        return {
            **rows,
            "slots": slots,
            "room": self.room,
            "facts": facts,
            "rate": self.rule.rate,
            "step": self.rule.step,
        }

    def resume(self, saved: Sequence[ReadPart], jump: int) -> None:
        for read in saved:
            slots = read("slots")
            if len(slots) and not (slots[0] >= 0 and slots[-1] < self.spec.rows and (np.diff(slots) > 0).all()):
                raise CheckpointError(f"slots of {self.spec.name}, which has {self.spec.rows}, in disorder")
            for name, array, at in self._parts(slots):
                wanted = np.broadcast_to(np.zeros((), array.dtype), (len(at), *array.shape[1:]))
                array[at] = fitting_part(read(name), name, wanted)
            self.room = read("room")
            self.used, self.floor = map(int, read("facts"))
            self.rule.rate[...], self.rule.step[...] = read("rate"), read("step")
        self.directory.keys[self.room] = GONE
        self.versions[: self.used] += jump
        self.floor += jump
        live = self.live
        self.directory[self.directory.keys[live]] = live

    # -- writing ---------------------------------------------------------------------------------------------

    def apply(self, pushes: list[Message], weight: float) -> None:
        ids = np.unique(np.concatenate([given(push.ids) for push in pushes]))
        slots = self._slots(ids, max(push.step for push in pushes))
        super().apply([self._admitted(push, ids, slots) for push in pushes], weight)

    def _admitted(self, push: Message, ids: np.ndarray, slots: np.ndarray) -> Message:
        """A push of slots, without the rows that get none."""
        mine = slots[np.searchsorted(ids, given(push.ids))]
        if (mine >= 0).all():
            return replace(push, ids=mine)
        good = mine >= 0
        counts = None if push.counts is None else push.counts[good]
        return replace(push, ids=mine[good], values=given(push.values)[good], counts=counts)

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
        good = slots >= 0
        parts = np.split(given(message.values)[good], len(self.arrays), axis=1)
        for array, part in zip(self.arrays, parts):
            array[slots[good]] = part
        self.versions[slots[good]] += 1
        self.rule.step[...] = max(int(self.rule.step), message.facts["step"])

    def take(self, other: GrowingTable) -> None:
        """The rows of a table of another number of parts that are dealt to this one; the best first, if not all fit."""
        live = other.live
        live = live[np.argsort(-(other.uses if len(other.uses) else other.last)[live], kind="stable")]
        ids = other.directory.keys[live] * other.spec.parts + other.spec.first
        live = live[mine := ids % self.spec.parts == self.spec.first]
        slots = self._slots(ids[mine] // self.spec.parts, 0, filtered=False)
        live, slots = live[slots >= 0], slots[slots >= 0]
        theirs = other.by_slot
        for part, array in self.by_slot.items():
            if part != "ids" and part in theirs:
                array[slots] = theirs[part][live]
        self.floor = max(self.floor, other.floor)
        self.rule.rate[...], self.rule.step[...] = other.rule.rate, max(int(self.rule.step), int(other.rule.step))

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, message: Message) -> np.ndarray:
        ids = given(message.ids)
        slots = self.directory[ids]
        missing = np.flatnonzero(slots < 0)
        self.counts["hits"] += len(ids) - len(missing)
        self.counts["on_disk"] += int(np.count_nonzero(slots >= self.hand.slots))
        self.counts["misses"] += len(missing)
        if self.pull is not None:
            return self.pull.encode(self._found(ids, self.values))
        out = message.place(len(ids), self.spec.cols, self.values.dtype)
        np.take(self.values, slots, axis=0, out=out, mode="clip")
        if len(missing):
            out[missing] = self.first(ids[missing])
        return out

    def rows(self, ids: np.ndarray) -> np.ndarray:
        return self._found(ids, self.values)

    def state(self, ids: np.ndarray | None) -> np.ndarray:
        return np.concatenate([self._found(given(ids), array) for array in self.arrays], axis=1)

    def newer(self, ids: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        slots = self.directory[ids]
        versions = np.where(slots < 0, self.floor, self.versions.take(slots, mode="clip"))
        newer = (versions > limits) | (slots < 0)  # or a cache would keep its own updates that were dropped here
        self.asked += len(ids)
        self.fetched += int(newer.sum())
        rows = self._found(ids[newer], self.values)
        return ids[newer], versions[newer], rows if self.pull is None else self.pull.encode(rows)

    def export(self, start: int, most: int, since: int) -> dict[str, Any]:
        """Up to `most` rows with their rule's state, side by side, from a slot on, that were updated at the clock
        `since` or later: ids, values, and as step the slot to go on from, 0 at the end."""
        live = self.live
        live = live[np.searchsorted(live, start) :]
        live = live[self.last[live] >= since]
        slots = live[:most]
        rows = np.concatenate([np.take(a, slots, axis=0) for a in self.arrays], axis=1)
        further = int(slots[-1]) + 1 if len(live) > most else 0
        return {"ids": self.directory.keys[slots], "values": rows, "step": further}


def table_of(spec: TableSpec, gradients: Gradients | None = None) -> ServerTable:
    """The table of a description."""
    return (ServerTable if spec.growth is None else GrowingTable)(spec, gradients)


def hash_of(seed: Sequence[int]) -> int:
    """Numbers as one of 64 bits."""
    made = np.zeros(1, "<u8")
    for number in seed:
        while True:
            made = mixed_words(made + np.uint64(number & 0xFFFFFFFFFFFFFFFF) + GOLDEN)
            if not (number := number >> 64):
                break
    return int(made[0])
