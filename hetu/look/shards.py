"""Which part of each tensor lies on which rank, as a picture: a frame is the whole tensor, what is filled is there.

Of more than two axes the first and the last are drawn; the text on hovering has all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from ..core.types import Box
from .svg import FILL, LINE, Svg, bold, page, text

ShardRow = tuple[str, tuple[int, ...], Mapping[int, Box]]  # name, shape, what each rank holds

LEFT, TOP, WIDE, HIGH, GAP, LEAST = 230.0, 44.0, 104.0, 46.0, 12.0, 28.0


def shards_svg(rows: Sequence[ShardRow], notes: Mapping[int, str]) -> Svg:
    """Draw (name, shape, {rank: box}) rows, a column for each rank in `notes`, with its note below the rank.

    >>> shards_svg([("weight", (4, 6), {0: ((0, 2), (0, 6)), 1: ((2, 4), (0, 6))})], {0: "", 1: ""})[:4]
    '<svg'
    """
    places = {rank: LEFT + k * (WIDE + GAP) for k, rank in enumerate(sorted(notes))}
    parts = [bold(x, 16, f"rank {rank}") + text(x, 31, notes[rank], size=10.5) for rank, x in places.items()]
    longest, y = max((size for _, shape, _ in rows for size in shape), default=1), TOP
    for name, shape, boxes in rows:
        down, across = shape[0] if len(shape) > 1 else 1, shape[-1] if shape else 1
        # Sides go by the roots of sizes, so that thin tensors can be seen.
        high, wide = HIGH * math.sqrt(down / longest), WIDE * math.sqrt(across / longest)
        size = max(7.0, wide), max(7.0, high)
        row = max(size[1], LEAST)
        parts.append(_name(name, shape, y + row / 2))
        for rank, x in places.items():
            parts.append(_cell(f"{name} on rank {rank}", shape, boxes.get(rank), (x, y + (row - size[1]) / 2), size))
        y += row + GAP
    width = LEFT + len(places) * (WIDE + GAP)
    return page(width, y, parts)


def _name(name: str, shape: Sequence[int], y: float) -> str:
    """The end of the name, which says more than the scopes before it."""
    shown, sizes = name if len(name) <= 30 else f"…{name[-29:]}", " x ".join(map(str, shape)) or "a number"
    return bold(4, y - 1, shown) + text(4, y + 12, sizes, size=10.5)


def _cell(
    title: str, shape: Sequence[int], box: Box | None, place: tuple[float, float], size: tuple[float, float]
) -> str:
    """The whole as a dashed frame, and the part in it."""
    (x, y), (wide, high), part, held = place, size, "", "nothing"
    if box is not None:
        top, bottom = (high * v / max(shape[0], 1) for v in box[0]) if len(shape) > 1 else (0.0, high)
        start, end = (wide * v / max(shape[-1], 1) for v in box[-1]) if shape else (0.0, wide)
        held = f"[{', '.join(f'{a}:{b}' for a, b in box)}]"
        part = (
            f'<rect x="{x + start:.1f}" y="{y + top:.1f}" width="{end - start:.1f}" height="{bottom - top:.1f}" '
            f'fill="{FILL["variable"][1]}" fill-opacity="0.45" stroke="{FILL["variable"][1]}"/>'
        )
    return (
        f'<g><title>{escape(title)}: {held}</title><rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" '
        f'height="{high:.1f}" fill="{LINE}" fill-opacity="0.06" stroke="{LINE}" stroke-dasharray="3 3"/>{part}</g>'
    )
