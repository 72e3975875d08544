"""Pipeline schedules: which stage works on which micro-batch when, as plain data that prints as a picture.

A schedule starts as one list of forward and backward passes per stage. One simulation, with a backward pass twice as
long as a forward pass, gives one order of all passes and transfers. Each rank does its part in this order, so the ranks
cannot deadlock even where a send waits for its receive. GPipe: Y. Huang et al., 2019. 1F1B and PipeDream: D. Narayanan
et al., "PipeDream", SOSP 2019, and "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021. Left out: several
stages on one rank (interleaving).
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from ...core.errors import ArgumentError, did_you_mean
from ...look.svg import FILL, INK, page, text
from ...ranges import AtLeast1, Positive

FORWARD, BACKWARD = "F", "B"
FAMILY = {FORWARD: "compute", BACKWARD: "gradient"}  # whose colors they have, as in other pictures
StagePass = tuple[str, int]  # (FORWARD or BACKWARD, micro-batch)


class Slot(NamedTuple):
    """A pass of one stage with the time at which it runs."""

    start: float
    end: float
    stage: int
    phase: str
    microbatch: int


class Action(NamedTuple):
    """`compute` a pass, or `transfer` its results to other stages: one entry of the total order."""

    time: float
    kind: str
    slot: Slot


def gpipe(stages: int, microbatches: int, stage: int) -> list[StagePass]:
    """All forward passes, then all backward passes."""
    return [(phase, m) for phase in (FORWARD, BACKWARD) for m in range(microbatches)]


def one_forward_one_backward(stages: int, microbatches: int, stage: int) -> list[StagePass]:
    """As few forward passes as fill the pipeline behind this stage, then one backward for each forward pass."""
    ahead = min(microbatches, stages - stage - 1)
    first = [(FORWARD, m) for m in range(ahead)]
    pairs = [((FORWARD, m), (BACKWARD, m - ahead)) for m in range(ahead, microbatches)]
    return [*first, *chain.from_iterable(pairs), *((BACKWARD, m) for m in range(microbatches - ahead, microbatches))]


# PipeDream has the lists of 1F1B, but it updates after every backward pass, with no flush between batches.
KINDS = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "pipedream": one_forward_one_backward}


@dataclass(frozen=True)
class Schedule:
    """`lists[s]` are the passes of stage s in order; `forward` and `backward` are their lengths in time units.

    >>> print(Schedule.of("1f1b", 2, 3))
    1f1b: 2 stages, 3 micro-batches, bubble 25.0 %
    stage 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
    stage 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..
    """

    kind: str
    lists: tuple[tuple[StagePass, ...], ...]
    forward: Positive = 1
    backward: Positive = 2

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"there is no schedule {self.kind!r}", fix=did_you_mean(self.kind, KINDS))

    @staticmethod
    def of(kind: str, stages: AtLeast1, microbatches: AtLeast1, *, backward: bool = True) -> Schedule:
        """The schedule of this kind; without `backward` only forward passes, as for evaluation.

        kind: "gpipe", "1f1b" (with a flush at the end of the batch) or "pipedream" (updates after each backward pass).

        >>> [Schedule.of("1f1b", 4, 8).live(stage) for stage in range(4)], Schedule.of("gpipe", 4, 8).live(0)
        ([4, 3, 2, 1], 8)
        """
        if kind not in KINDS:
            raise ArgumentError(f"there is no schedule {kind!r}", fix=did_you_mean(kind, KINDS))
        for name, value in (("stages", stages), ("microbatches", microbatches)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"{name}={value!r}", fix="use a whole number from 1 up")
        lists = (KINDS[kind](stages, microbatches, stage) for stage in range(stages))
        return Schedule(kind, tuple(tuple(p for p in passes if backward or p[0] == FORWARD) for passes in lists))

    @property
    def stages(self) -> int:
        return len(self.lists)

    @property
    def microbatches(self) -> int:
        return sum(phase == FORWARD for phase, _ in self.lists[0])

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """All passes by their start: each runs when its stage is free and its input from its neighbor is there."""
        last = self.stages - 1
        end: dict[tuple[str, int, int], float] = {}
        end |= {(FORWARD, m, -1): 0.0 for m in range(self.microbatches)}  # the first stage waits for nobody
        free, left, found = [0.0] * self.stages, [deque(passes) for passes in self.lists], list[Slot]()
        ready, asked = list[tuple[float, int]](), set[tuple[str, int, int]]()

        def ask(s: int) -> None:
            """Whether the next pass of a stage can begin, because its input is there."""
            if not (0 <= s <= last and left[s]) or (*left[s][0], s) in asked:
                return
            phase, m = left[s][0]
            turns = phase == BACKWARD and s == last
            before = (FORWARD, m, s) if turns else (phase, m, s - 1 if phase == FORWARD else s + 1)
            if before in end:
                asked.add((phase, m, s))
                heapq.heappush(ready, (max(free[s], end[before]), s))

        for s in range(self.stages):
            ask(s)
        while ready:
            start, s = heapq.heappop(ready)
            phase, m = left[s].popleft()
            free[s] = end[phase, m, s] = start + (self.forward if phase == FORWARD else self.backward)
            found.append(Slot(start, free[s], s, phase, m))
            for other in (s - 1, s, s + 1):
                ask(other)
        return tuple(sorted(found))

    @cached_property
    def order(self) -> tuple[Action, ...]:
        """The one order of all passes and transfers: a transfer comes when its pass ends, before what starts then."""
        computes = [(slot.start, 1, Action(slot.start, "compute", slot)) for slot in self.slots]
        transfers = [(slot.end, 0, Action(slot.end, "transfer", slot)) for slot in self.slots]
        return tuple(action for *_, action in sorted([*computes, *transfers]))

    @property
    def length(self) -> float:
        """The time at which the last pass ends."""
        return max(slot.end for slot in self.slots)

    @property
    def bubble(self) -> float:
        """The share of its time that a stage waits, on average; (P - 1) / (M + P - 1) for GPipe and 1F1B."""
        busy = sum(slot.end - slot.start for slot in self.slots)
        return 1 - busy / (self.stages * self.length)

    def live(self, stage: int) -> int:
        """The most micro-batches that are between their forward and their backward pass at once."""
        held = most = 0
        for phase, _ in self.lists[stage]:
            held += 1 if phase == FORWARD else -1
            most = max(most, held)
        return most

    def version(self, stage: int, microbatch: int) -> int:
        """How many backward passes the stage has done when it starts on `microbatch`: its weights in PipeDream."""
        passes = self.lists[stage]
        return sum(phase == BACKWARD for phase, _ in passes[: passes.index((FORWARD, microbatch))])

    # -- pictures ---------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        width = len(str(self.microbatches - 1)) + 1
        rows = []
        for stage in range(self.stages):
            cells = ["." * width] * int(self.length)
            for slot in self.slots:
                if slot.stage == stage:
                    name = f"{slot.phase}{slot.microbatch}".ljust(width)
                    cells[int(slot.start) : int(slot.end)] = [name] * int(slot.end - slot.start)
            rows.append(f"stage {stage}  {' '.join(cells)}".rstrip())
        return "\n".join([self._title(), *rows])

    def _title(self) -> str:
        return f"{self.kind}: {self.stages} stages, {self.microbatches} micro-batches, bubble {100 * self.bubble:.1f} %"

    def _repr_svg_(self) -> str:
        unit, left, top = 26, 62, 26
        parts = [text(4, 16, self._title(), size=13)]
        parts += [text(4, top + unit * stage + 18, f"stage {stage}", size=12) for stage in range(self.stages)]
        for start, end, stage, phase, microbatch in self.slots:
            x, y, width = left + unit * start, top + unit * stage, unit * (end - start) - 2
            fill, frame = FILL[FAMILY[phase]]
            box = f'x="{x:g}" y="{y}" width="{width:g}" height="{unit - 2}" rx="4" fill="{fill}" stroke="{frame}"'
            parts += [f"<rect {box}/>", text(x + width / 2, y + 17, str(microbatch), "middle", size=11, color=INK)]
        return str(page(left + unit * self.length + 4, top + unit * self.stages, parts))
