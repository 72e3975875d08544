"""What ranks do when, as a picture: time runs to the right, with two lanes per rank and one box per event.

Below them the memory that the rank holds meanwhile, where it is known. Several steps stand one above the other on the
same scales. For zooming use a Chrome trace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from ..files import write_text
from .columns import show_bytes
from .svg import FILL, INK, LINE, Svg, bold, legend_entry, page, text

TimelineRow = tuple[int, str, str, float, float]  # rank, lane, name, start, end in seconds

WIDTH, LEFT, TOP, LANE, STAIRS, GAP, TITLE = 960.0, 118.0, 34.0, 18.0, 40.0, 10.0, 24.0
FINEST = 0.02  # of what is narrower nobody would see a point


class Held(NamedTuple):
    """Bytes that a rank holds all the time, and (seconds, bytes) of those beside them, from then on."""

    kept: int
    steps: Sequence[tuple[float, int]]

    @property
    def most(self) -> int:
        return self.kept + max((nbytes for _, nbytes in self.steps), default=0)


class Panel(NamedTuple):
    """One step: (rank, lane, name, start, end) rows, a note beside each rank, and what the ranks hold.

    Lanes are "compute", "gradient" and, below them, "communication".
    """

    rows: Sequence[TimelineRow]
    notes: Mapping[int, str] = {}
    held: Mapping[int, Held] = {}
    title: str = ""

    @property
    def end(self) -> float:
        return max((row[4] for row in self.rows), default=0.0)

    def lanes(self) -> Iterator[tuple[int, float]]:
        """Each rank, and the height that it takes."""
        for rank in sorted({row[0] for row in self.rows}):
            yield rank, 2 * LANE + GAP + (STAIRS if rank in self.held else 0.0)


def timeline_svg(*panels: Panel) -> Svg:
    """Draw steps, one above the other.

    >>> timeline_svg(Panel([(0, "compute", "matmul", 0.0, 1e-3)], {0: "alone"}))[:4]
    '<svg'
    """
    end = max((panel.end for panel in panels), default=0.0) or 1.0
    most = max((held.most for panel in panels for held in panel.held.values()), default=0) or 1
    across, y, parts = (WIDTH - LEFT - 12) / end, TOP, list[str]()
    for panel in panels:
        if panel.title:
            parts.append(bold(8, y + 13, panel.title))
            y += TITLE
        tops = dict[int, float]()
        for rank, height in panel.lanes():
            tops[rank] = y
            parts.append(bold(8, y + 12, f"rank {rank}") + text(8, y + LANE + 11, panel.notes.get(rank, ""), size=9))
            if (held := panel.held.get(rank)) is not None:
                parts.append(_stairs(held, panel.end, y + 2 * LANE, across, (STAIRS - 4) / most))
            y += height
        for rank, lane, name, start, stop in (row for row in panel.rows if (row[4] - row[3]) * across >= FINEST):
            parts.append(_event(lane, name, start, stop, tops[rank] + LANE * (lane == "communication"), across))
    drawn = {"communication", "compute", *(row[1] for panel in panels for row in panel.rows)}
    families = [*sorted(drawn, key=["compute", "gradient", "communication"].index)]
    families += ["variable", "update"] if any(p.held for p in panels) else []
    return page(WIDTH, y + 22, [_axis(end, y + 22, families), *parts])


def write_trace(path: str | os.PathLike[str], events: Sequence[Mapping[str, object]]) -> None:
    """Write events as JSON for chrome://tracing or Perfetto."""
    write_text(path, json.dumps({"traceEvents": [*events], "displayTimeUnit": "ms"}))


def _event(lane: str, name: str, start: float, stop: float, y: float, across: float) -> str:
    fill, frame = FILL[lane]
    x, width = LEFT + start * across, max((stop - start) * across, 0.3)
    shown = text(x + width / 2, y + 12, name, "middle", size=9.5, color=INK) if len(name) * 5.6 < width else ""
    tooltip = f"{name}\n{1e3 * start:.3f} to {1e3 * stop:.3f} ms, {1e3 * (stop - start):.3f} ms"
    return (
        f'<g><title>{escape(tooltip)}</title><rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{LANE - 2:.0f}" '
        f'rx="{min(3.0, width / 4):.1f}" fill="{fill}" stroke="{frame}" stroke-width="{min(0.7, width / 4):.2f}"/>'
        f"{shown}</g>"
    )


def _stairs(held: Held, end: float, y: float, across: float, up: float) -> str:
    """What is kept as a band, and on it a staircase of what a step needs beside."""
    floor, right = y + STAIRS - 4, LEFT + end * across
    path = [f"M{LEFT:.1f},{floor - held.kept * up:.2f}"]
    for start, nbytes in held.steps:
        path.append(f"H{LEFT + start * across:.2f}V{floor - (held.kept + nbytes) * up:.2f}")
    path.append(f"H{right:.2f}V{floor - held.kept * up:.2f}z")
    told = f"at most {show_bytes(held.most)}, {show_bytes(held.kept)} of them all the time"
    band = f'x="{LEFT:.1f}" y="{floor - held.kept * up:.2f}" width="{right - LEFT:.2f}" height="{held.kept * up:.2f}"'
    colors = ['fill="{}" stroke="{}" stroke-width="0.7"'.format(*FILL[family]) for family in ("update", "variable")]
    return (
        f'<g><title>{told}</title><path d="{"".join(path)}" {colors[0]}/><rect {band} {colors[1]}/></g>'
        f"{text(LEFT - 8, floor, show_bytes(held.most), 'end', size=10)}"
    )


def _axis(end: float, height: float, families: Sequence[str]) -> str:
    """The legend, and four times with grid lines."""
    names = {"gradient": "backward", "variable": "held all the time", "update": "held meanwhile"}
    parts = [legend_entry(LEFT + 120 * k, family, names.get(family, "")) for k, family in enumerate(families)]
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        x = LEFT + share * (WIDTH - LEFT - 12)
        anchor = "end" if share == 1 else "start" if share == 0 else "middle"
        parts.append(f'<path d="M{x:.1f},{TOP - 4:.0f}V{height - 18:.0f}" stroke="{LINE}" stroke-opacity="0.4"/>')
        time = share * end
        parts.append(text(x, height - 5, f"{time:.3g} s" if time >= 1 else f"{1e3 * time:.3g} ms", anchor))
    return "".join(parts)
