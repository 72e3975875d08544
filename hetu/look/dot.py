"""A graph in the language of Graphviz, for another layout or format.

Pipe the text into `dot`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.graph import Graph, Node
from .picture import DrawnNode, LayerGroup, picture
from .svg import FILL, LINE


def to_dot(outputs: Graph | Node | Iterable[Node]) -> str:
    """Graphviz text: boxes colored by family, clusters by layer, dashed arrows where only a shape is used.

    >>> import hetu as ht
    >>> print(to_dot(ht.placeholder("x", (3,)) + 1).splitlines()[0])
    digraph {
    """
    drawn = picture(outputs)
    lines = [
        "digraph {",
        '  node [shape=box style="rounded,filled" fontname="Helvetica" fontsize=11]',
        f'  edge [color="{LINE}" arrowsize=0.7]',
    ]
    clusters: dict[LayerGroup | None, list[str]] = {}
    for index, box in enumerate(drawn.boxes):
        clusters.setdefault(box.group, []).append(_node(index, box))
    for number, (group, rows) in enumerate(clusters.items()):
        if group is None:
            lines += [f"  {row}" for row in rows]
        else:
            title = _quoted(group[0] if group[1] == "forward" else f"{group[0]} backward")
            lines += [f"  subgraph cluster_{number} {{", f'    label={title} style=rounded color="{LINE}"']
            lines += [*(f"    {row}" for row in rows), "  }"]
    for source, target in drawn.arrows:
        dash = " [style=dashed]" if (source, target) in drawn.shape_only else ""
        lines.append(f"  n{source} -> n{target}{dash}")
    return "\n".join([*lines, "}"])


def _node(index: int, box: DrawnNode) -> str:
    fill, frame = FILL[box.family]
    thick = " penwidth=2.5" if box.is_output else ""
    label, tooltip = _quoted(f"{box.title}\n{box.detail}"), _quoted(box.tooltip)
    return f'n{index} [label={label} tooltip={tooltip} fillcolor="{fill}" color="{frame}"{thick}]'


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
