"""What every rank does when, as a simulation found it: numbers, a Chrome trace and a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ...look.svg import Svg
from ...look.timeline import Held, Panel, timeline_svg, write_trace
from ...ranges import Count

COMPUTE, GRADIENT, COMMUNICATION = "compute", "gradient", "communication"


class Event(NamedTuple):
    """Something that a rank does from `start` to `end` (seconds).

    `lane` is compute, gradient (a backward pass, which computes too) or communication.
    """

    rank: int
    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of one rank: with computing, with communication under way, and with both at once."""

    compute: float
    communication: float
    both: float

    @property
    def hidden(self) -> float:
        """The share of communication behind which the rank computes."""
        return self.both / self.communication if self.communication else 1.0

    def told(self, seconds: float) -> str:
        """The share of so many seconds in which it computes, and what is hidden, if anything.

        >>> Overlap(compute=3.0, communication=2.5, both=1.5).told(4.0), Overlap(3.0, 1.0, 0.0).told(4.0)
        ('75 % busy, 60 % hidden', '75 % busy')
        """
        hidden = f", {100 * self.hidden:.0f} % hidden" if 200 * self.both >= self.communication > 0 else ""
        return f"{100 * self.compute / (seconds or 1.0):.0f} % busy{hidden}"


class Spent(NamedTuple):
    """Where the seconds of a step go on its busiest rank: it computes, waits for communication, or idles."""

    computing: float
    communication: float
    idling: float


@dataclass(frozen=True)
class Timeline:
    """The events of one step, which took `seconds`, and what ranks held meanwhile, as far as that is known.

    In a notebook it is shown as its picture; `ht.plan.draw` shows several.

    >>> print(Timeline((Event(0, COMPUTE, "matmul", 0.0, 2e-3), Event(0, COMMUNICATION, "all_reduce", 1e-3, 4e-3))))
    4.000 ms: rank 0 computes 2.000 ms and communicates 3.000 ms, 33 % of it hidden
    """

    events: tuple[Event, ...]
    held: Mapping[int, Held] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the begin to the end of the last event."""
        return max((event.end for event in self.events), default=0.0)

    def overlap(self, rank: Count) -> Overlap:
        """
        >>> step = Timeline((Event(0, COMPUTE, "matmul", 0.0, 2.0), Event(0, COMMUNICATION, "all_reduce", 1.0, 4.0)))
        >>> step.overlap(0)
        Overlap(compute=2.0, communication=3.0, both=1.0)
        """
        mine = [event for event in self.events if event.rank == rank]
        compute, wire = (_merged([e for e in mine if (e.lane == COMMUNICATION) == sends]) for sends in (False, True))
        together = _merged(mine)
        both = _length(compute) + _length(wire) - _length(together)
        return Overlap(_length(compute), _length(wire), max(0.0, both))  # rounding may leave less than nothing

    @property
    def spent(self) -> Spent:
        """The parts of `seconds` on the rank that computes most.

        >>> Timeline((Event(0, COMPUTE, "matmul", 0.0, 2.0), Event(0, COMMUNICATION, "all_reduce", 1.0, 4.0))).spent
        Spent(computing=2.0, communication=2.0, idling=0.0)
        """
        most = max(map(self.overlap, {event.rank for event in self.events} or {0}), key=lambda found: found.compute)
        wire = most.communication - most.both
        return Spent(most.compute, wire, max(0.0, self.seconds - most.compute - wire))

    def __str__(self) -> str:
        rank = min((event.rank for event in self.events), default=0)
        mine = self.overlap(rank)
        sent = f" and communicates {1e3 * mine.communication:.3f} ms, {100 * mine.hidden:.0f} % of it hidden"
        computes = f"rank {rank} computes {1e3 * mine.compute:.3f} ms"
        return f"{1e3 * self.seconds:.3f} ms: {computes}{sent if mine.communication else ''}"

    def __repr__(self) -> str:
        return f"<timeline of {len({event.rank for event in self.events})} ranks, {1e3 * self.seconds:.3f} ms>"

    def chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write JSON for chrome://tracing or Perfetto: a process for each rank, with two threads and its memory."""
        rows: list[dict[str, object]] = [
            {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
            for rank in sorted({e.rank for e in self.events})
        ]
        for e in self.events:
            where = {"pid": e.rank, "tid": int(e.lane == COMMUNICATION)}
            when = {"ts": e.start * 1e6, "dur": (e.end - e.start) * 1e6}  # microseconds
            rows.append({"name": e.name, "cat": e.lane, "ph": "X", **where, **when})
        for rank, held in self.held.items():
            for start, nbytes in held.steps:
                memory = {"name": "memory", "ph": "C", "pid": rank, "ts": start * 1e6}
                rows.append(memory | {"args": {"kept": held.kept, "meanwhile": nbytes}})
        write_trace(path, rows)

    def to_svg(self) -> Svg:
        """A lane for computing, one for communication, and memory, of each rank; hovering shows names and times."""
        return draw({"": self})

    def _repr_svg_(self) -> str:
        return str(self.to_svg())


def draw(steps: Mapping[str, Timeline]) -> Svg:
    """Steps by their names, one above the other on the same scales: of two plans, or as predicted and as run.

    >>> one = Timeline((Event(0, COMPUTE, "matmul", 0.0, 2e-3),))
    >>> draw({"predicted": one, "run": one})[:4]
    '<svg'
    """
    panels = list[Panel]()
    for name, step in steps.items():
        ranks = sorted({event.rank for event in step.events})
        notes = {r: step.overlap(r).told(step.seconds) for r in ranks}
        panels.append(Panel(step.events, notes, step.held, f"{name}: {1e3 * step.seconds:,.3f} ms" if name else ""))
    return timeline_svg(*panels)


def _merged(events: Sequence[Event]) -> list[tuple[float, float]]:
    """The spans that events cover, in order and apart."""
    found: list[tuple[float, float]] = []
    for start, end in sorted((e.start, e.end) for e in events):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
