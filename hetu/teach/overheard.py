"""What ranks that are threads communicate, overheard and drawn in phases: the story of a step that one did not survive.

The flight recorders of the ranks (`dist/comm/recorder.py`) note each call; here it is kept, too, whole and in order.
Left out: processes, and when anything happened, as phases go on side by side.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from ..dist.comm.comm import of_thread
from ..dist.comm.recorder import LastCalls, Raw
from ..dist.elastic import OTHERS
from ..look.svg import FILL, INK, Svg, bold, page, text

WIDE, HIGH, LEFT = 92.0, 50.0, 58.0  # of a phase and its gap, and of the names of ranks
FAMILY = {"copy": "variable", "vote": "communication", "shrink": "update", "move": "placeholder", "step": "compute"}


class Overheard(NamedTuple):
    """A call of one rank: `vote`, `all_gather`, `message from 0 to 1`; its bytes; whether it was to mend a loss."""

    what: str
    nbytes: int
    mends: bool

    @property
    def phase(self) -> str:
        """What it is a part of: copy, vote, step, shrink or move."""
        first = self.what.partition(" ")[0]
        if self.mends:
            return "move"
        return "copy" if first == "message" else first if first in FAMILY else "step"


@contextmanager
def overheard() -> Iterator[dict[int, list[Overheard]]]:
    """What each rank communicates meanwhile, by its number in the job.

    >>> from hetu.dist import run_ranks
    >>> with overheard() as said:
    ...     _ = run_ranks(2, lambda comm: comm.vote(True) and comm.barrier())
    >>> [heard.what for heard in said[1]]
    ['vote', 'barrier']
    """
    said, add = defaultdict[int, list[Overheard]](list), LastCalls.add

    def noted(ring: LastCalls, what: str, x: np.ndarray, size: int, line: Any) -> Raw:
        comm = of_thread.get()
        if comm is not None and not ring.series.startswith("fed"):
            said[comm.ranks[comm.rank]].append(Overheard(what, x.nbytes, line == OTHERS))
        return add(ring, what, x, size, line)

    LastCalls.add = noted  # type: ignore[method-assign, assignment]
    try:
        yield said
    finally:
        LastCalls.add = add  # type: ignore[method-assign]


def phases(calls: Sequence[Overheard]) -> list[tuple[str, dict[str, int]]]:
    """The phases of one rank, each with the bytes of its messages.

    >>> phases([Overheard("message from 0 to 1", 8, False), Overheard("vote", 0, False)])
    [('copy', {'message from 0 to 1': 8}), ('vote', {})]
    """
    return [
        (name, {heard.what: heard.nbytes for heard in of if heard.what.startswith("message")})
        for name, of in itertools.groupby(calls, lambda heard: heard.phase)
    ]


def story_svg(said: Mapping[int, Sequence[Overheard]], dead: int, before: int = 3, behind: int = 7) -> Svg:
    """Draw a row for each rank and a column for each phase, around that in which rank `dead` was lost.

    >>> story_svg({0: [Overheard("vote", 0, False)], 1: [Overheard("vote", 0, False)]}, dead=1)[:4]
    '<svg'
    """
    rows, parts = {rank: phases(calls) for rank, calls in sorted(said.items())}, list[str]()
    last = len(rows[dead]) - 1
    for row, (rank, of) in enumerate(rows.items()):
        parts.append(bold(4, row * HIGH + 32, f"rank {rank}"))
        for place, (name, sent) in enumerate(of[max(0, last - before) : last + behind], max(0, before - last)):
            broken = "lost" if rank == dead else "broken off"
            mine = {way: n for way, n in sent.items() if way.startswith(f"message from {rank} ")}
            lines = [f"{n / 1000:,.0f} kB to {way.rpartition(' ')[2]}" for way, n in mine.items()]
            at = LEFT + place * WIDE, row * HIGH + 6
            parts += _box(*at, *((broken, "gradient") if place == before else (name, FAMILY[name])), lines)
    return page(LEFT + WIDE * (before + behind), HIGH * len(rows) + 8, parts)


def _box(x: float, y: float, name: str, family: str, lines: Sequence[str]) -> list[str]:
    fill, frame = FILL[family]
    middle, place = x + WIDE / 2 - 2, f'x="{x:.0f}" y="{y:.0f}" width="{WIDE - 5:.0f}" height="{HIGH - 5:.0f}" rx="6"'
    below = [text(middle, y + 27 + 11 * k, line, "middle", size=9, color=INK) for k, line in enumerate(lines)]
    frame = f'<rect {place} fill="{fill}" stroke="{frame}"/>'
    return [frame, text(middle, y + 14, name, "middle", color=INK), *below]
