"""The memory plan of a program as a picture: time runs to the right, addresses upward, a rectangle per value.

A good plan looks like bricks without holes: the height is the peak. Variables are not drawn, as they never move.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from html import escape

from .columns import show_bytes
from .svg import INK, LINE, Svg, page, text

MemoryRow = tuple[str, int, int, int, int]  # label, first instruction, last instruction, offset, bytes

WIDTH, HEIGHT = 860.0, 380.0
LEFT, TOP, BOTTOM = 74.0, 26.0, 34.0


def memory_svg(rows: Sequence[MemoryRow]) -> Svg:
    """Draw (label, first instruction, last instruction, offset, bytes) rows; both ends are inclusive.

    >>> memory_svg([("%1 matmul", 0, 2, 0, 4096), ("%2 relu", 2, 3, 4096, 4096)])[:4]
    '<svg'
    """
    steps = max((last for _, _, last, _, _ in rows), default=0) + 1
    peak = max((offset + nbytes for *_, offset, nbytes in rows), default=0)
    across, up = (WIDTH - LEFT - 12) / steps, (HEIGHT - TOP - BOTTOM) / max(peak, 1)
    parts = [_axes(steps, peak)]
    for label, first, last, offset, nbytes in rows:
        if nbytes:
            x, width = LEFT + first * across, (last - first + 1) * across
            y, height = HEIGHT - BOTTOM - (offset + nbytes) * up, nbytes * up
            tooltip = f"{label}\ninstructions {first} to {last}\noffset {offset:,}, {nbytes:,} bytes"
            parts.append(_brick(label, tooltip, x, y, width, height))
    return page(WIDTH, HEIGHT, parts)


def _brick(label: str, tooltip: str, x: float, y: float, width: float, height: float) -> str:
    fill, frame = _colors(label)
    shown = len(label) * 6.6 < width and height > 11
    name = text(x + width / 2, y + height / 2 + 3.5, label, "middle", size=10.5, color=INK) if shown else ""
    return (
        f'<g><title>{escape(tooltip)}</title><rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'rx="{min(3.0, width / 4, height / 4):.1f}" fill="{fill}" stroke="{frame}" stroke-width="0.7"/>{name}</g>'
    )


def _colors(label: str) -> tuple[str, str]:
    """Fill and frame; labels that end in the same word (the operator) share a hue."""
    hue = sum(ord(c) * (i + 7) for i, c in enumerate(label.split()[-1] if label.split() else "")) * 0.618 % 1
    return _hex(hue, 0.88, 0.75), _hex(hue, 0.5, 0.5)


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(c * 255):02x}" for c in colorsys.hls_to_rgb(hue, lightness, saturation))


def _axes(steps: int, peak: int) -> str:
    """Frame, three addresses with grid lines, and the ends of time."""
    floor, right = HEIGHT - BOTTOM, WIDTH - 12
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = floor - share * (floor - TOP)
        parts.append(f'<path d="M{LEFT},{y:.1f}H{right:.0f}" stroke="{LINE}" stroke-opacity="0.4"/>')
        parts.append(text(LEFT - 8, y + 4, show_bytes(share * peak), "end"))
    parts.append(text(LEFT, floor + 20, "instruction 0"))
    parts.append(text(right, floor + 20, f"{steps - 1}", "end"))
    parts.append(text(LEFT, TOP - 10, f"peak {show_bytes(peak)}"))
    return "".join(parts)
