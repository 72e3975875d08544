"""How far workers of a parameter server drift apart, as a picture: a lane of clocks for each, and a histogram of leads.

A worker's *lead* is the number of clocks that the slowest worker is behind when it begins one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

from ..ranges import Range
from .svg import FILL, INK, Svg, page, text

WorkerStep = tuple[int, int, float, float]  # worker, clock, when it began and ended in seconds

WIDTH, LEFT, TOP, LANE, GAP = 860.0, 78.0, 26.0, 24.0, 7.0
BARS, HIGH = 46.0, 84.0  # width of a histogram's bar with its gap, height of the highest


def leads(steps: Sequence[WorkerStep]) -> list[int]:
    """For each step, its clock less that of the slowest worker when the step began.

    >>> leads([(0, 0, 0.0, 1.0), (1, 0, 0.0, 4.0), (0, 1, 1.0, 2.0), (0, 2, 2.0, 3.0)])
    [0, 0, 1, 2]
    """
    workers = {worker for worker, *_ in steps}

    def done(worker: int, at: float) -> int:
        return sum(w == worker and end <= at for w, _, _, end in steps)

    return [clock - min(done(other, begin) for other in workers) for _, clock, begin, _ in steps]


def staleness_svg(steps: Sequence[WorkerStep], bound: Annotated[float, Range(0, endless=True)] | None = None) -> Svg:
    """Draw (worker, clock, begin, end) steps; white between two is waiting. `bound` is the largest lead allowed.

    >>> staleness_svg([(0, 0, 0.0, 1.0), (1, 0, 0.0, 4.0), (0, 1, 1.0, 2.0)], bound=3)[:4]
    '<svg'
    """
    first = min((begin for _, _, begin, _ in steps), default=0.0)
    last = max((end for *_, end in steps), default=1.0)
    workers = sorted({worker for worker, *_ in steps})
    across = (WIDTH - LEFT - 10) / ((last - first) or 1.0)
    parts = [text(4, 15, f"{last - first:.3g} s in {len(steps)} steps")]
    for worker in workers:
        y = TOP + (LANE + GAP) * workers.index(worker)
        parts.append(text(4, y + 16, f"worker {worker}"))
        for w, clock, begin, end in steps:
            if w == worker:
                parts.append(_box(clock, LEFT + (begin - first) * across, y, (end - begin) * across))
    below = TOP + (LANE + GAP) * len(workers) + 22
    parts += _histogram(Counter(leads(steps)), bound, below)
    height = below + HIGH + 42
    return page(WIDTH, height, parts)


def _box(clock: int, x: float, y: float, width: float) -> str:
    fill, frame = FILL["compute" if clock % 2 else "variable"]
    name = text(x + width / 2, y + 16, str(clock), "middle", color=INK) if 7 * len(str(clock)) < width else ""
    return (
        f'<g><title>clock {clock}</title><rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{LANE}" '
        f'rx="{min(3.0, width / 4):.1f}" fill="{fill}" stroke="{frame}" stroke-width="0.8"/>{name}</g>'
    )


def _histogram(counts: Counter[int], bound: float | None, top: float) -> list[str]:
    """A bar for each lead, and a line behind the largest that is allowed."""
    most, floor = max(counts.values(), default=1), top + HIGH
    farthest = max(counts, default=0)
    parts = [text(4, top + 12, "lead of"), text(4, top + 26, "a step")]
    width = min(BARS, (WIDTH - LEFT - 60) / (farthest + 1))
    for lead in range(farthest + 1):
        x, high = LEFT + lead * width, counts[lead] / most * (HIGH - 14)
        fill, frame = FILL["gradient" if bound is not None and lead > bound else "update"]
        parts.append(
            f'<rect x="{x:.1f}" y="{floor - high:.1f}" width="{width * 0.8:.1f}" height="{high:.1f}" fill="{fill}" '
            f'stroke="{frame}" stroke-width="0.8"/>' + text(x + width * 0.4, floor + 15, str(lead), "middle")
        )
        if counts[lead]:
            parts.append(text(x + width * 0.4, floor - high - 4, str(counts[lead]), "middle"))
    if bound is not None and bound <= farthest + 1:
        x = LEFT + (bound + 0.9) * width
        parts.append(
            f'<path d="M{x:.1f},{top}V{floor + 4:.1f}" stroke="{FILL["gradient"][1]}" stroke-width="2" '
            f'stroke-dasharray="5 3"/>' + text(x + 6, top + 10, f"bound {bound:g}", color=FILL["gradient"][1])
        )
    return parts
