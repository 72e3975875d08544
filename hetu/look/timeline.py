"""What ranks do when, as a picture: time runs to the right, with two lanes per rank and one box per event.

For zooming use a Chrome trace.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape

from ..files import write_text
from .svg import FILL, INK, LINE, Svg, bold, legend_entry, page, text

TimelineRow = tuple[int, str, str, float, float]  # rank, "compute" or "communication", name, start, end in seconds

WIDTH, LEFT, TOP, LANE, GAP = 960.0, 118.0, 34.0, 18.0, 10.0


def timeline_svg(rows: Sequence[TimelineRow], notes: Mapping[int, str]) -> Svg:
    """Draw (rank, lane, name, start, end) rows, with a note beside each rank.

    >>> timeline_svg([(0, "compute", "matmul", 0.0, 1e-3)], {0: "alone"})[:4]
    '<svg'
    """
    ranks = sorted({row[0] for row in rows})
    end = max((row[4] for row in rows), default=0.0) or 1.0
    across = (WIDTH - LEFT - 12) / end
    height = TOP + (2 * LANE + GAP) * len(ranks) + 22
    top = {rank: TOP + k * (2 * LANE + GAP) for k, rank in enumerate(ranks)}
    parts = [_axis(end, height)]
    for rank, y in top.items():
        parts.append(bold(8, y + 12, f"rank {rank}") + text(8, y + LANE + 11, notes.get(rank, ""), size=10))
    for rank, lane, name, start, stop in rows:
        parts.append(_event(lane, name, start, stop, top[rank] + LANE * (lane == "communication"), across))
    return page(WIDTH, height, parts)


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


def _axis(end: float, height: float) -> str:
    """The legend, and four times with grid lines."""
    parts = [legend_entry(LEFT, "compute"), legend_entry(LEFT + 90, "communication")]
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        x = LEFT + share * (WIDTH - LEFT - 12)
        anchor = "end" if share == 1 else "start" if share == 0 else "middle"
        parts.append(f'<path d="M{x:.1f},{TOP - 4:.0f}V{height - 18:.0f}" stroke="{LINE}" stroke-opacity="0.4"/>')
        time = share * end
        parts.append(text(x, height - 5, f"{time:.3g} s" if time >= 1 else f"{1e3 * time:.3g} ms", anchor))
    return "".join(parts)
