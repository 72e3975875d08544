"""Lines over a common axis as a picture, such as losses by epoch.

Axes span the values and are logarithmic on request. For more, hand the numbers to a plotting library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..ranges import AnyFloat
from .svg import FILL, LINE, Svg, page, text

WIDTH, HEIGHT = 560.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 12.0, 34.0, 40.0
MOST_NUMBERS, APART = 12, 8.0  # places along the axis that all have a number, if these are so far apart
SLACK = 1e-9  # of a step, for ends that rounding moved
DIGIT, LINE_HEIGHT = 6.5, 16.0  # the width of one, and the distance of lines of names
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
COLORS = [FILL[family][1] for family in ("compute", "gradient", "update", "placeholder", "variable", "communication")]


def curves_svg(
    curves: Mapping[str, Sequence[AnyFloat]],
    x: Sequence[AnyFloat] | None = None,
    *,
    label: str = "",
    up: str = "",
    log: bool = False,
    log_x: bool = False,
) -> Svg:
    """Draw each named sequence as a line over `x` (by default 1, 2, ...); `label` and `up` name the axes.

    Values that are not finite, and on a logarithmic axis (`log` of the values, `log_x`) those that are not positive,
    leave a gap.

    >>> curves_svg({"loss": [3.0, 1.5, 1.2]}, label="epoch")[:4]
    '<svg'
    """
    rows = {name: _scaled(values, log) for name, values in curves.items()}
    places = _scaled(range(1, 1 + max(map(len, rows.values()), default=0)) if x is None else x, log_x)
    (left, right), (low, high) = _range(places), _range([v for values in rows.values() for v in values])
    side = max([RIGHT, *(4.0 * len(_number(p, log_x)) for p in _named(places, left, right, log_x)[-1:])])
    names, above = _legend(list(rows))
    per_x, per_y = (WIDTH - LEFT - side) / (right - left), (HEIGHT - above - BOTTOM) / (high - low)

    def point(place: float, value: float) -> tuple[float, float]:
        return LEFT + (place - left) * per_x, HEIGHT - BOTTOM - (value - low) * per_y

    parts = [_rule(point(left, v)[1], _number(v, log)) for v in (_log_ticks if log else _ticks)(low, high)]
    named = [(point(p, low)[0], _number(p, log_x)) for p in _named(places, left, right, log_x)]
    parts += [text(at, HEIGHT - BOTTOM + 17, words, "middle") for at, words in _that_fit(named)]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, label, "middle"))
    parts.append(
        f'<g transform="rotate(-90 11 {HEIGHT / 2:.0f})">{text(11, HEIGHT / 2, up, "middle")}</g>' if up else ""
    )
    for index, (name, values) in enumerate(rows.items()):
        color = COLORS[index % len(COLORS)]
        parts.append(_curve([point(p, v) for p, v in zip(places, values)], color))
        parts.append(text(*names[index], name, color=color))
    return page(WIDTH, HEIGHT, parts)


def _legend(names: Sequence[str]) -> tuple[list[tuple[float, float]], float]:
    """Where the names of the curves stand, in as many lines as they need, and where the curves begin below them."""
    longest = DIGIT * max(map(len, names), default=0) + APART
    columns = max(1, min(len(names), int((WIDTH - LEFT) // longest)))
    lines = -(-len(names) // columns)
    columns = -(-len(names) // max(1, lines))
    at = [(LEFT + i % columns * (WIDTH - LEFT) / columns, 16 + LINE_HEIGHT * (i // columns)) for i in range(len(names))]
    return at, TOP + LINE_HEIGHT * max(0, lines - 1)


def _scaled(values: Sequence[float], log: bool) -> list[float]:
    """Where the numbers lie on an axis; NaN for those that have no place on it."""
    scale = math.log10 if log else float
    return [scale(v) if math.isfinite(v) and (v > 0 or not log) else math.nan for v in values]


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
    return [k * step for k in range(math.ceil(low / step - SLACK), math.floor(high / step + SLACK) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """The same on a logarithmic axis: powers of ten, of many every second or third, of few their halves and fifths."""
    powers = range(math.ceil(low), math.floor(high) + 1)
    if len(powers) > 2:
        return [float(k) for k in powers if k % -(-len(powers) // 7) == 0]
    between = [k + math.log10(m) for k in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
    found = [v for v in between if low <= v <= high]
    return found if len(found) > 2 else [math.log10(v) for v in _ticks(10**low, 10**high)]


def _number(place: float, log: bool) -> str:
    """What an axis says of a place: powers of ten as such where they are far from 1."""
    if log and place == round(place) and not -3 <= place <= 3:
        return "10" + f"{place:.0f}".translate(RAISED)
    return f"{10**place if log else place:,.6g}"


def _named(places: Sequence[float], left: float, right: float, log: bool) -> Sequence[float]:
    """The places with a number below them: all, or of many round ones."""
    if len(places) <= MOST_NUMBERS:
        return [p for p in places if math.isfinite(p)]
    return (_log_ticks if log else _ticks)(left, right)


def _that_fit(named: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """Numbers along the axis without those that would touch the one before."""
    kept: list[tuple[float, str]] = []
    for at, words in sorted(named):
        if not kept or at - kept[-1][0] >= APART + DIGIT * (len(words) + len(kept[-1][1])) / 2:
            kept.append((at, words))
    return kept


def _rule(y: float, number: str) -> str:
    line = f'<path d="M{LEFT},{y:.1f}H{WIDTH - RIGHT:.0f}" stroke="{LINE}" stroke-opacity="0.4"/>'
    return line + text(LEFT - 8, y + 4, number, "end")


def _curve(points: Sequence[tuple[float, float]], color: str) -> str:
    """A line through the points that exist, each marked, because a single epoch is a point and no line."""
    path, pen = [], "M"
    dots = []
    for x, y in points:
        if math.isnan(x + y):
            pen = "M"
            continue
        path.append(f"{pen}{x:.1f},{y:.1f}")
        pen = "L"
        if len(points) <= 40:
            dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>')
    return f'<path d="{"".join(path)}" fill="none" stroke="{color}" stroke-width="1.8"/>{"".join(dots)}'
