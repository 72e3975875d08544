"""A roofline: how fast operators can be at most on a machine, and what limits them (S. Williams et al., 2009).

To the right an operator does more arithmetic for each byte that it moves; under the slope memory is the limit, under
the flat roof arithmetic. Both axes are logarithmic. Caches would have roofs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ..ranges import Positive
from .svg import FILL, LINE, Svg, page, text

# Name, operations, bytes, and seconds; without a time (0) it lies on the roof.
RooflinePoint = tuple[str, float, float, float]
Extent = tuple[float, float, float, float]  # left, right, top, bottom

WIDTH, HEIGHT = 620.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 74.0, 14.0, 34.0, 44.0


def roofline_svg(points: Sequence[RooflinePoint], flops: Positive, bandwidth: Positive) -> Svg:
    """Draw (name, operations, bytes, seconds) under the roof of a machine with `flops` per second and bytes/s.

    >>> roofline_svg([("matmul", 2e9, 1e7, 0.0), ("add", 1e6, 1.2e7, 0.0)], flops=60e12, bandwidth=3.35e12)[:4]
    '<svg'
    """
    places = []
    for name, operations, nbytes, seconds in points:
        if operations > 0 and nbytes > 0:
            intensity = operations / nbytes
            places.append((name, intensity, operations / seconds if seconds else min(flops, bandwidth * intensity)))
    ridge = flops / bandwidth
    low = math.floor(math.log10(min([ridge / 10, *(x for _, x, _ in places)])))
    high = math.ceil(math.log10(max([ridge * 10, *(x for _, x, _ in places)])))
    top = math.log10(max([flops, *(y for *_, y in places)])) + 0.3  # what a cache feeds may lie above the roof
    bottom = math.log10(min([bandwidth * 10**low, *(y for *_, y in places)])) - 0.5
    across, up = (WIDTH - LEFT - RIGHT) / (high - low), (HEIGHT - TOP - BOTTOM) / (top - bottom)

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + (math.log10(x) - low) * across, HEIGHT - BOTTOM - (math.log10(y) - bottom) * up

    parts = [_grid(10.0**k, *at(10.0**k, 10**bottom)) for k in range(low, high + 1)]
    parts += [_level(10.0**k, at(10**low, 10.0**k)[1]) for k in range(math.ceil(bottom), math.floor(top) + 1)]
    (x0, y0), (x1, y1), (x2, _) = at(10**low, bandwidth * 10**low), at(ridge, flops), at(10**high, flops)
    parts.append(
        f'<path d="M{x0:.1f},{y0:.1f}L{x1:.1f},{y1:.1f}H{x2:.1f}" fill="none" stroke="{FILL["update"][1]}" '
        f'stroke-width="2"/>'
    )
    parts.append(text(x0 + 8, TOP - 14, f"{_short(bandwidth)}B/s of memory, {_short(flops)}FLOP/s"))
    parts += _points([(name, *at(x, y), x) for name, x, y in places])
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "operations per byte", "middle"))
    return page(WIDTH, HEIGHT, parts)


def _points(places: Sequence[tuple[str, float, float, float]]) -> list[str]:
    """Dots, and beside each its name; those that lie on top of each other have their names in one line."""
    found: dict[tuple[int, int], list[tuple[str, float, float, float]]] = {}
    for place in places:
        found.setdefault((round(place[1] / 6), round(place[2] / 6)), []).append(place)
    fill, frame = FILL["compute"]
    parts, taken = [], [(x - 4, x + 4, y - 4, y + 4) for (_, x, y, _), *_ in found.values()]
    for together in found.values():
        (_, x, y, intensity), names = together[0], ", ".join(dict.fromkeys(place[0] for place in together))
        parts.append(
            f'<g><title>{escape(f"{names}: {intensity:.3g} operations per byte")}</title><circle cx="{x:.1f}" '
            f'cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{frame}" stroke-width="1.5"/>{_name(x, y, names, taken)}</g>'
        )
    return parts


def _name(x: float, y: float, words: str, taken: list[Extent]) -> str:
    """The words below their dot or above it, to the right or to the left: the first place that is inside and free."""
    width = 6.8 * len(words)
    places = [(x + side * 6, y + down, side) for down in (16, -8, 28, -20) for side in (1, -1)]
    boxes = [(a, a + width, b - 9, b + 2) if side > 0 else (a - width, a, b - 9, b + 2) for a, b, side in places]
    outside = [max(LEFT - b[0], 0) + max(b[1] - WIDTH, 0) + max(b[3] - HEIGHT + BOTTOM, 0) for b in boxes]
    met = [sum(b[0] < t[1] and t[0] < b[1] and b[2] < t[3] and t[2] < b[3] for t in taken) for b in boxes]
    k = min(range(len(places)), key=lambda k: (outside[k], met[k]))
    taken.append(boxes[k])
    return text(*places[k][:2], words, "start" if places[k][2] > 0 else "end")


def _grid(value: float, x: float, floor: float) -> str:
    line = f'<path d="M{x:.1f},{TOP}V{floor:.1f}" stroke="{LINE}" stroke-opacity="0.25"/>'
    return line + text(x, floor + 16, f"{value:g}", "middle")


def _level(value: float, y: float) -> str:
    line = f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT:.0f}" stroke="{LINE}" stroke-opacity="0.25"/>'
    return line + text(LEFT - 6, y + 4, _short(value), "end")


def _short(value: float) -> str:
    """With a decimal prefix: 3.35 T."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g} "
