"""One table on a server: values (rows, cols) with a version for every row, their rule, and held-back pushes.

A dense parameter arrives cut into blocks, each a table of one row; an embedding table arrives as ranges of rows. A
version counts the updates of a row; caches compare versions. A table knows no workers and clocks: `store.py` has
allowed every push that arrives here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...codec import codec
from ...core.errors import ShapeError, ValueRangeError
from ...core.types import as_dtype
from ...ops.index import sums_of
from .messages import Kind, Message, RefusedError, given
from .packing import RowsAtRest
from .rules import Gradients, ServerRule, check_rate
from .table_spec import TableSpec
from .tiers import Tiers

ALIKE = "let all workers create the same; other tables need other servers"
MOST_UPDATES = 1 << 31  # that one pushed row stands for, so that no sum of them leaves int64
FAR = 1 << 20  # updates that a cache misses at most, whatever its bound; those of a life are fewer than its square
_ONE = np.array(1, "<i8")
ReadPart = Callable[..., np.ndarray]  # of a snapshot: reads a part that fits an array, all of it or a range of rows


class ServerTable:
    """The values of one block, their versions, and the pushes that wait until their clock closes."""

    def __init__(self, spec: TableSpec, gradients: Gradients | None = None) -> None:
        self.spec, self.push, self.pull = spec, codec(spec.push), codec(spec.pull)
        self.versions = np.zeros(spec.rows, "<i8")
        shape, dtype, lying = (spec.rows, spec.cols), as_dtype(spec.dtype).newbyteorder("<"), spec.lying
        self.values: Any  # an array, or what is read and written as one
        self.stored: Any
        self.tiers = Tiers(spec.rows, spec.hot_rows) if spec.hot_rows < spec.rows else None
        zeros = np.zeros if self.tiers is None else self.tiers.zeros
        if lying is None:
            self.values = self.stored = zeros(shape, dtype)
        else:
            ids = range(spec.first, spec.first + spec.parts * spec.rows, spec.parts)
            self.values = RowsAtRest(lying, shape, dtype, ids, self.versions, spec.seed)
            self.stored = self.values.stored
        self.filled, self.wanting = np.zeros(spec.rows, bool), spec.rows  # rows with first values, and without
        self.rule = ServerRule(spec.rule, self.values, spec.options, gradients, zeros)
        self.pending: list[Message] = []
        self.asked = self.fetched = 0  # rows of which caches asked whether they are newer, and those that were
        self.users: set[int] = set()  # the workers that have asked for it and did not free it

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The values and the state of their rule."""
        return self.values, *self.rule.states

    # -- snapshots -------------------------------------------------------------------------------------------

    @property
    def by_row(self) -> dict[str, Any]:
        """The arrays that have an element, or a row, for each row."""
        states = {f"state{i}": state for i, state in enumerate(self.rule.states)}
        return {"values": self.stored, "versions": self.versions, **states}

    def kept(self, since: int | None = None) -> dict[str, Any]:
        """What a snapshot keeps; of a table without a bound, rows that were updated at the clock `since` or later."""
        return {**self.by_row, "filled": self.filled, "rate": self.rule.rate, "step": self.rule.step}

    def resume(self, saved: Sequence[ReadPart], jump: int) -> None:
        """Go on from the last of some snapshots, of which each holds what changed since the one before, with versions
        that are `jump` higher."""
        for part, array in self.kept().items():
            array[...] = saved[-1](part, array)
        self.versions += jump
        self.wanting -= int(self.filled.sum())

    def check(self, message: Message) -> None:
        """Refuse a message that does not fit, before anything is changed."""
        ids, values, counts = message.ids, message.values, message.counts
        rows, most = self.spec.rows if ids is None else len(ids), self.spec.numbered
        if ids is not None and rows:
            if ids[0] < 0 or ids[-1] >= most:
                raise ValueRangeError(f"row ids {ids[0]}..{ids[-1]}, {self.spec.name} has {most} rows here")
            pooled = message.kind is Kind.POOL
            if rows > 1 and not (ids[1:] >= ids[:-1] if pooled else ids[1:] > ids[:-1]).all():
                raise ValueRangeError("row ids are not strictly increasing", fix="send every row once, in order")
        cols, dtype = self.spec.cols * (len(self.arrays) if message.kind is Kind.RESTORE else 1), self.values.dtype
        if message.kind is Kind.POOL:
            cols, bags, counts = 1, given(counts), None
            if rows and not 0 <= bags.min() <= bags.max() < rows:
                raise ValueRangeError(f"bags {bags.min()}..{bags.max()} of {rows} rows", fix="number them from 0")
        coded = self.push if message.kind in (Kind.PUSH, Kind.PUSH_PULL) else None
        if coded is not None:
            cols, dtype = coded.width(cols), np.dtype("uint8")
        if values is not None and (values.shape != (rows, cols) or values.dtype != dtype):
            got = f"{values.dtype}{list(values.shape)}"
            raise ShapeError(f"got {got} for {self.spec.name}, wanted {dtype}[{rows}, {cols}]")
        if values is not None and coded is not None:
            coded.check(values, self.spec.cols)
        if counts is not None and values is not None and not ((counts > 0) & (counts <= MOST_UPDATES)).all():
            raise ValueRangeError(f"a pushed row counts {counts.min()} to {counts.max()} updates", fix="at least one")
        if message.kind is Kind.RATE:
            check_rate(message.facts["rate"], self.values.dtype)

    @property
    def grown(self) -> dict[str, int] | None:
        """What a table without a bound tells of its rows."""
        return None

    def export(self, start: int, most: int, since: int) -> dict[str, Any]:
        """Rows from a place on, for tables without a bound."""
        raise RefusedError(
            "growing", f"{self.spec.name} is no table without a bound", fix="pull its rows, or ask STATE"
        )

    def check_finite(self, message: Message) -> None:
        """Refuse a push that would leave no number of what it meets."""
        if not (good := np.isfinite(given(self._decoded(message).values))).all():
            raise RefusedError(
                "finite",
                f"worker {message.worker} pushes {good.size - np.count_nonzero(good)} numbers of {good.size} to "
                f"{self.spec.name} that are not finite",
                fix="with ht.debug_nans(): finds the operator that made them",
            )

    # -- writing ---------------------------------------------------------------------------------------------

    def assign(self, message: Message) -> None:
        """First values: rows that have some already keep them, so that every worker may send the same ones.

        Rows of a later generation wait for `restore`: the first values of a worker that starts late are out of date.
        """
        if not self.spec.generation:
            self.fill(message.ids, given(message.values))

    def refill(self, spec: TableSpec) -> None:
        """Begin a new generation: every row waits for its new values."""
        self.spec, self.filled[:], self.wanting = spec, False, spec.rows

    def restore(self, message: Message) -> None:
        """Take over values and optimizer state, side by side, for the rows of this generation that have none yet."""
        self.fill(message.ids, given(message.values), self.arrays)
        self.rule.step[...] = message.facts["step"]

    def fill(self, ids: np.ndarray | None, values: np.ndarray, arrays: Sequence[np.ndarray] = ()) -> None:
        """Give rows values, or those of several arrays side by side, where they have none."""
        ids, arrays = np.arange(self.spec.rows) if ids is None else ids, arrays or (self.values,)
        new = ~self.filled[ids]
        if not new.all():
            ids, values = ids[new], values[new]
        for array, part in zip(arrays, np.split(values, len(arrays), axis=1)):
            array[ids] = part
        self.filled[ids] = True
        self.wanting -= len(ids)

    def apply(self, pushes: list[Message], weight: float) -> None:
        """One update of the rule by the weighted sum of these pushes, added in the order given."""
        pushes = [self._decoded(push) for push in pushes]
        if all(push.ids is not None for push in pushes):
            ids, rows, counts = _sum_rows(pushes)
        else:
            for push in pushes:
                if push.ids is None:
                    np.add(self.versions, _ONE, self.versions)
                else:
                    self.versions[push.ids] += 1 if push.counts is None else push.counts
            if self.spec.whole:
                self.rule.apply(self._summed(pushes), weight)
                return
            ids, rows, counts = np.arange(self.spec.rows), self._summed(pushes), 0
        rows = rows if weight == 1 else rows * rows.dtype.type(weight)
        begins = not all(push.facts.get("more") for push in pushes)
        self.update(ids, rows, counts, begins, max(push.step for push in pushes))

    def update(self, ids: np.ndarray, rows: np.ndarray, counts: Any, begins: bool, clock: int) -> None:
        """One update of the distinct rows `ids` at a clock by their gradients, each of which stands for so many."""
        self.versions[ids] += counts
        self.rule.apply_rows(ids, rows, begins=begins)

    def _summed(self, pushes: list[Message]) -> np.ndarray:
        """The sum of pushes to the whole table, added in their order; a single one is as it lies."""
        parts = [(slice(None) if push.ids is None else push.ids, given(push.values)) for push in pushes]
        whole = [push.ids is None for push in pushes[:2]]
        if whole == [True]:
            return parts[0][1]
        out = self.rule.summed() if self.spec.whole else np.empty(self.values.shape, self.values.dtype)
        if whole == [True, True]:
            np.add(parts.pop(0)[1], parts.pop(0)[1], out)
        else:
            out.fill(0)
        for where, values in parts:
            out[where] += values
        return out

    def _decoded(self, push: Message) -> Message:
        """A push with the numbers that its bytes stand for."""
        if self.push is None:
            return push
        values = self.push.decode(given(push.values), self.spec.cols)
        return replace(push, values=values.astype(self.values.dtype, copy=False))

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, message: Message) -> np.ndarray:
        """The rows that a message asks for, in its room if it has one. Without room, all rows are the table itself, so
        that sending makes the only copy."""
        ids = message.ids
        if self.pull is not None:
            return self._coded(slice(None) if ids is None else ids)
        if ids is None and message.room is None:
            found: np.ndarray = self.values[:]
            return found
        out = message.place(self.spec.rows if ids is None else len(ids), self.spec.cols, self.values.dtype)
        if ids is None:
            np.copyto(out, self.values[:])
        else:
            self.rows(ids, out=out)
        return out

    def state(self, ids: np.ndarray | None) -> np.ndarray:
        """Values and optimizer state of rows, side by side."""
        return np.concatenate([a[:] if ids is None else self.rows(ids, a) for a in self.arrays], axis=1)

    def rows(self, ids: np.ndarray, array: Any = None, out: np.ndarray | None = None) -> np.ndarray:
        """The rows `ids`, which have been checked, of the values, or of another of the `arrays`."""
        found: np.ndarray = np.take(self.values if array is None else array, ids, axis=0, out=out, mode="clip")
        return found

    def summed(self, message: Message) -> np.ndarray:
        """The sums of the rows of each bag: one for every number up to the largest that an entry's `counts` has."""
        rows, bags = self.rows(given(message.ids)), given(message.counts)
        with np.errstate(all="ignore"):  # what is infinite stays so
            rows = rows if message.values is None else rows * message.values
        return sums_of(bags, [rows], (int(bags.max(initial=-1)) + 1, rows.shape[1]))

    def newer(
        self, ids: np.ndarray, limits: np.ndarray, versions: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of the rows `ids` those whose version is above their limit: (ids, versions, rows)."""
        versions = self.versions[ids] if versions is None else versions
        newer = versions > limits
        self.asked += len(ids)
        self.fetched += int(newer.sum())
        ids = ids[newer]
        return ids, versions[newer], self.rows(ids) if self.pull is None else self._coded(ids)

    def _coded(self, where: Any) -> np.ndarray:
        """Rows as they travel: as they lie, if that is the same."""
        if isinstance(self.values, RowsAtRest) and self.values.codec is self.pull:
            return self.values.bytes_of(where)
        rows = self.values[where] if isinstance(where, slice) else self.rows(where)
        return given(self.pull).encode(rows)


def _sum_rows(pushes: list[Message]) -> tuple[np.ndarray, np.ndarray, Any]:
    """The distinct ids of several pushes, the sums of their rows, added in the order of the pushes, and of counts."""
    parts = [(given(p.ids), given(p.values), 1 if p.counts is None else p.counts) for p in pushes]
    if len(parts) == 1:
        return parts[0]
    ids = np.unique(np.concatenate([some for some, *_ in parts]))
    rows, counts = np.zeros((len(ids), parts[0][1].shape[1]), parts[0][1].dtype), np.zeros(len(ids), "<i8")
    for some, values, count in parts:
        at = np.searchsorted(ids, some)
        rows[at] += values
        counts[at] += count
    return ids, rows, counts
