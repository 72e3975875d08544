"""A graph as one SVG picture, in plain text without a library.

The background stays transparent and every box brings its own light fill and dark text, so the picture reads well on
light and on dark pages. It has no scripts and no zooming; the page may scale the picture.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from ..core.graph import Graph, Node
from .layout import BOX_HEIGHT, Drawing, Point, layout
from .picture import FAMILIES, DrawnNode, LayerGroup, picture

FILL = {  # family: fill, frame
    "placeholder": ("#fef3c7", "#d97706"),
    "variable": ("#e0e7ff", "#6366f1"),
    "constant": ("#eef0f3", "#8b95a5"),
    "compute": ("#d9f0fd", "#0284c7"),
    "gradient": ("#ffe4e6", "#e0486a"),
    "update": ("#dcfce7", "#16a34a"),
    "communication": ("#f3e8ff", "#9333ea"),
}
INK, SOFT_INK, LINE = "#1f2937", "#4b5563", "#8793a6"
SANS = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"
MONO = "ui-monospace,Menlo,'DejaVu Sans Mono',monospace"
_LEGEND = 30.0  # height of the row that names the colors


class Svg(str):
    """The text of a picture, which a notebook shows as the picture.

    >>> Svg("<svg></svg>")
    <svg, 11 characters>
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<svg, {len(self):,} characters>"

    def _repr_svg_(self) -> str:
        return str(self)


def page(width: float, height: float, parts: Iterable[str]) -> Svg:
    """A picture of `parts`, at most as wide as the page that shows it."""
    return Svg(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" style="max-width:100%;height:auto" font-family="{SANS}" role="img">'
        f"{''.join(parts)}</svg>"
    )


def text(x: float, y: float, words: str, anchor: str = "start", *, size: float = 11.5, color: str = LINE) -> str:
    """Words that start, end or have their middle at `x`, on the line `y`."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" fill="{color}">{escape(words)}</text>'


def bold(x: float, y: float, words: str, anchor: str = "start", *, size: float = 12, color: str = LINE) -> str:
    """Words as `text` has them, in bold."""
    return f'<g font-weight="600">{text(x, y, words, anchor, size=size, color=color)}</g>'


def legend_entry(x: float, family: str, name: str = "") -> str:
    """A colored square at the top of a picture, and the name of what it stands for, by default the family's."""
    fill, frame = FILL[family]
    square = f'<rect x="{x:.0f}" y="8" width="13" height="13" rx="4" fill="{fill}" stroke="{frame}"/>'
    return square + text(x + 19, 19, name or family)


def to_svg(outputs: Graph | Node | Iterable[Node]) -> Svg:
    """The picture of a graph; hovering over a box shows its type, attributes and the user's line.

    >>> import hetu as ht
    >>> to_svg(ht.placeholder("x", (3,)) + 1)[:4]
    '<svg'
    """
    drawn = picture(outputs)
    placed = layout([_width(b) for b in drawn.boxes], drawn.arrows, [b.group for b in drawn.boxes])
    parts = [_group(key, *rectangle) for key, rectangle in placed.groups.items()]
    parts += [_arrow(placed.paths[a], a in drawn.shape_only) for a in drawn.arrows]
    parts += [_box(box, center) for box, center in zip(drawn.boxes, placed.centers)]
    return _framed(placed, [b.family for b in drawn.boxes], parts)


def _framed(placed: Drawing, families: list[str], parts: list[str]) -> Svg:
    legend, legend_width = _legend([f for f in FAMILIES if f in set(families)])
    width, height = max(placed.width, legend_width), placed.height + _LEGEND
    side = (width - placed.width) / 2
    marker = (
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0,0.6L8,4L0,7.4z" fill="{LINE}"/></marker></defs>'
    )
    return page(width, height, [marker, legend, f'<g transform="translate({side:.1f},{_LEGEND:.0f})">', *parts, "</g>"])


def _width(box: DrawnNode) -> float:
    """Room for the wider of the two lines."""
    return max(56.0, 7.7 * len(box.title) + 20, 6.1 * len(box.detail) + 20)


def _box(box: DrawnNode, center: Point) -> str:
    width, (x, y) = _width(box), center
    fill, frame = FILL[box.family]
    radius = BOX_HEIGHT / 2 if box.family == "placeholder" else 7
    ring = ""
    if box.is_output:
        ring = (
            f'<rect x="{x - width / 2 - 3:.1f}" y="{y - BOX_HEIGHT / 2 - 3:.1f}" width="{width + 6:.1f}" '
            f'height="{BOX_HEIGHT + 6:.0f}" rx="{radius + 3:.0f}" fill="none" stroke="{frame}" stroke-width="1.3"/>'
        )
    return (
        f'<g><title>{escape(box.tooltip)}</title>{ring}<rect x="{x - width / 2:.1f}" y="{y - BOX_HEIGHT / 2:.1f}" '
        f'width="{width:.1f}" height="{BOX_HEIGHT:.0f}" rx="{radius:.0f}" fill="{fill}" stroke="{frame}" '
        f'stroke-width="1.3"/>{bold(x, y - 3, box.title, "middle", size=12.5, color=INK)}<g font-family="{MONO}">'
        f"{text(x, y + 12, box.detail, 'middle', size=10, color=SOFT_INK)}</g></g>"
    )


def _arrow(points: list[Point], shape_only: bool) -> str:
    """Straight down along rows, an S between them."""
    (x, y), *rest = points
    path = [f"M{x:.1f},{y:.1f}"]
    for index, (to_x, to_y) in enumerate(rest):
        if index % 2 == 0:
            middle = (y + to_y) / 2
            path.append(f"C{x:.1f},{middle:.1f} {to_x:.1f},{middle:.1f} {to_x:.1f},{to_y:.1f}")
        else:
            path.append(f"V{to_y:.1f}")
        x, y = to_x, to_y
    dash = ' stroke-dasharray="3 4"' if shape_only else ""
    return f'<path d="{"".join(path)}" fill="none" stroke="{LINE}" stroke-width="1.3"{dash} marker-end="url(#tip)"/>'


def _group(key: LayerGroup, x: float, y: float, width: float, height: float) -> str:
    """A frame with the layer's name; outer scopes that do not fit are left to the tooltip."""
    layer, direction = key
    name = shown = layer if direction == "forward" else f"{layer} · backward"
    while 7.2 * len(shown) > width - 16 and "/" in shown.removeprefix("…/"):
        shown = "…/" + shown.removeprefix("…/").partition("/")[2]
    return (
        f'<g><title>{escape(name)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'rx="12" fill="{LINE}" fill-opacity="0.11" stroke="{LINE}" stroke-opacity="0.45"/>'
        f"{bold(x + 10, y + 15, shown, size=11)}</g>"
    )


def _legend(families: list[str]) -> tuple[str, float]:
    parts, x = [], 14.0
    for name in families:
        parts.append(legend_entry(x, name))
        x += 19 + 6.6 * len(name) + 20
    return "".join(parts), x
