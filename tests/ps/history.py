"""What workers did to a server and saw of it, and whether a correct server allows that (after K. Kingsbury's Jepsen).

Every push adds 1 to a cell of its own and to cell 0, which all share, so a read shows exactly which pushes it has
seen. The checker knows nothing of messages or clocks inside the server: only when each operation began and ended, in
one order for all, and between which moments a killed server may have lost what it had confirmed.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from hetu.ps import Consistency
from hetu.ps.wire.snapshot import VERSION_JUMP

SHARED = 0  # the cell that every push adds to


@dataclass(eq=False)
class Operation:
    """One push, read, or end of a clock. `ended` is infinite while there is no answer."""

    kind: str
    worker: int
    life: int
    clock: int
    began: int
    cell: int = 0
    ended: float = math.inf
    values: np.ndarray | None = None  # of a read: every cell
    versions: np.ndarray | None = None


@dataclass
class History:
    """All operations of a run; `outages` are (start of the last snapshot, death of the server)."""

    mode: Consistency
    cells: int
    operations: list[Operation] = field(default_factory=list)
    outages: list[tuple[int, int]] = field(default_factory=list)
    now: itertools.count = field(default_factory=lambda: itertools.count(1))
    free: itertools.count = field(default_factory=lambda: itertools.count(SHARED + 1))

    def begin(self, kind: str, worker: int, life: int, clock: int) -> Operation:
        made = Operation(kind, worker, life, clock, next(self.now), next(self.free) if kind == "push" else 0)
        self.operations.append(made)
        return made

    def end(self, operation: Operation, values: np.ndarray | None = None, versions: np.ndarray | None = None) -> None:
        operation.values, operation.versions, operation.ended = values, versions, next(self.now)

    def of(self, kind: str) -> list[Operation]:
        return [o for o in self.operations if o.kind == kind]


def check(history: History, values: np.ndarray, versions: np.ndarray) -> list[str]:
    """What is wrong with a history that ended in these cells; nothing if it is correct."""
    settled = {push: _settled(history, push) for push in history.of("push")}
    found = _check_end(history, settled, values, versions)
    for read in history.of("read"):
        if read.values is not None:
            found += _check_read(history, settled, read)
    return found + _check_monotone(history)


def _settled(history: History, push: Operation) -> float:
    """When a push counted for good: once it is confirmed, or under BSP once its clock is, as a life that dies in the
    midst of a clock takes what it pushed with it."""
    if not history.mode.buffered:
        return push.ended
    clocks = [o for o in history.of("clock") if (o.worker, o.life, o.clock) == (push.worker, push.life, push.clock)]
    return max([push.ended, *(o.ended for o in clocks)]) if clocks else math.inf


def _lost(history: History, settled: float, push: Operation, until: float) -> bool:
    """Whether a kill before `until` may have taken it: not settled before the snapshot, begun before the death."""
    return any(saved < settled and push.began < died < until for saved, died in history.outages)


def _check_end(history: History, settled: dict[Operation, float], values: np.ndarray, versions: np.ndarray) -> list:
    found, pushed = [], {push.cell for push in settled}
    for push, when in settled.items():
        if values[push.cell] == 0 and when < math.inf and not _lost(history, when, push, math.inf):
            found.append(f"lost: {_name(push)}")
    for cell in np.flatnonzero(values > 1).tolist():
        if cell != SHARED:
            found.append(f"cell {cell} was added to {values[cell]:g} times")
    found += [f"cell {cell} was never pushed" for cell in np.flatnonzero(values).tolist() if cell not in {0, *pushed}]
    applied = values.sum() - values[SHARED]
    if values[SHARED] != applied or (versions % VERSION_JUMP != values).any():
        found.append(f"{applied:g} pushes, the shared cell has {values[SHARED]:g}, version {versions[SHARED]}")
    return found


def _check_read(history: History, settled: dict[Operation, float], read: Operation) -> list[str]:
    """The bound of the mode: what a read must show, and what it cannot show yet."""
    found, mode = [], history.mode
    for push, when in settled.items():
        seen = read.values[push.cell]
        own = (push.worker, push.life) == (read.worker, read.life) and push.ended < read.began and not mode.buffered
        in_time = read.ended if push.life == 1 else read.began  # a later life may begin at a clock that is over
        due = push.clock < read.clock - mode.staleness and push.ended < in_time and when < math.inf
        if seen == 0 and (own or due) and not _lost(history, when, push, read.ended):
            found.append(f"{_name(read)} misses {'its own ' if own else ''}{_name(push)}")
        early = push.clock >= read.clock if mode.buffered else push.clock > read.clock + mode.staleness
        if seen and (early or push.began > read.ended):
            found.append(f"{_name(read)} shows {_name(push)} of a later time")
        if seen > 1:
            found.append(f"{_name(read)} shows {_name(push)} {seen:g} times")
    return found


def _check_monotone(history: History) -> list[str]:
    """A read that begins after another ended has no older version of any cell, restarts included."""
    found, reads = [], [r for r in history.of("read") if r.versions is not None]
    for first, second in itertools.permutations(reads, 2):
        if first.ended < second.began and (first.versions > second.versions).any():
            found.append(f"{_name(second)} has older versions than {_name(first)}")
    return found


def _name(o: Operation) -> str:
    cell = f" of cell {o.cell}" if o.kind == "push" else ""
    return f"{o.kind}{cell} by worker {o.worker} (life {o.life}) at clock {o.clock}, {o.began}..{o.ended}"
