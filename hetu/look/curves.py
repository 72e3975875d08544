"""Lines over a common axis as a picture, such as losses by epoch.

The vertical axis spans the values and is logarithmic on request. For more, hand the numbers to a plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .svg import FILL, LINE, Svg, page, text

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 34.0, 40.0
MOST_NUMBERS = 12  # along the axis
COLORS = [FILL[family][1] for family in ("compute", "gradient", "update", "placeholder", "variable", "communication")]


def curves_svg(
    curves: Mapping[str, Sequence[float]], x: Sequence[float] | None = None, *, label: str = "", log: bool = False
) -> Svg:
    """Draw each named sequence as a line over `x` (by default 1, 2, ...); `label` names the horizontal axis.

    Values that are not finite, and with `log` those that are not positive, leave a gap.

    >>> curves_svg({"loss": [3.0, 1.5, 1.2]}, label="epoch")[:4]
    '<svg'
    """
    scale = math.log10 if log else float
    rows = {
        name: [scale(v) if math.isfinite(v) and (v > 0 or not log) else math.nan for v in values]
        for name, values in curves.items()
    }
    places = list(range(1, 1 + max(map(len, rows.values()), default=0))) if x is None else list(x)
    (left, right), (low, high) = _range(places), _range([v for values in rows.values() for v in values])
    across, up = (WIDTH - LEFT - RIGHT) / (right - left), (HEIGHT - TOP - BOTTOM) / (high - low)

    def point(place: float, value: float) -> tuple[float, float]:
        return LEFT + (place - left) * across, HEIGHT - BOTTOM - (value - low) * up

    parts = [_rule(point(left, v)[1], 10**v if log else v) for v in _ticks(low, high)]
    parts += [text(point(p, low)[0], HEIGHT - BOTTOM + 17, f"{p:g}", "middle") for p in _named(places)]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, label, "middle"))
    for index, (name, values) in enumerate(rows.items()):
        color = COLORS[index % len(COLORS)]
        parts.append(_curve([point(p, v) for p, v in zip(places, values)], color))
        parts.append(text(LEFT + index * (WIDTH - LEFT) / len(rows), 16, name, color=color))
    return page(WIDTH, HEIGHT, parts)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest; a little apart where they are equal, since the scale divides by their distance."""
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Three to seven multiples of 1, 2 or 5 times a power of ten between the ends."""
    rough = (high - low) / 3
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * max(k for k in (1, 2, 5) if k * power <= rough)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _named(places: Sequence[float]) -> Sequence[float]:
    """The places with a number below them: all, or of many the ends and the middle."""
    return places if len(places) <= MOST_NUMBERS else (places[0], places[len(places) // 2], places[-1])


def _rule(y: float, value: float) -> str:
    line = f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT:.0f}" stroke="{LINE}" stroke-opacity="0.4"/>'
    return line + text(LEFT - 8, y + 4, f"{value:.4g}", "end")


def _curve(points: Sequence[tuple[float, float]], color: str) -> str:
    """A line through the points that exist, each marked, because a single epoch is a point and no line."""
    path, pen = [], "M"
    dots = []
    for x, y in points:
        if math.isnan(y):
            pen = "M"
            continue
        path.append(f"{pen}{x:.1f},{y:.1f}")
        pen = "L"
        if len(points) <= 40:
            dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>')
    return f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.8"/>{"".join(dots)}'
