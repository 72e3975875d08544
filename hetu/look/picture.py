"""What a picture of a graph shows: boxes and arrows, without their places or looks.

Numbers are written into the box that uses them and `item`s are drawn as arrows from their operator, because neither is
work. `layout.py` finds the positions; `svg.py` and `dot.py` have the colors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from ..core.graph import Graph, Node
from ..core.op import LEAVES, Role
from ..core.types import show_type

FAMILIES = ("placeholder", "variable", "constant", "compute", "gradient", "update", "communication")
_DRAWN = {role: role.value for role in (*LEAVES, Role.UPDATE, Role.COMMUNICATION)} | {Role.HINT: "communication"}
LayerGroup = tuple[str, str]  # the layer, and "forward" or "backward"
_LONGEST = 34  # characters of a line before it is cut


@dataclass(frozen=True)
class DrawnNode:
    """One drawn node: two lines of text, the tooltip, its family and the group (layer, direction) it stands in."""

    title: str
    detail: str
    tooltip: str
    family: str
    group: LayerGroup | None
    is_output: bool


@dataclass
class Picture:
    """Boxes in graph order (inputs first), arrows between their indices; `shape_only` arrows carry no values."""

    boxes: list[DrawnNode] = field(default_factory=list)
    arrows: list[tuple[int, int]] = field(default_factory=list)
    shape_only: set[tuple[int, int]] = field(default_factory=set)


def family(node: Node) -> str:
    """One of `FAMILIES`: what kind of vertex this is.

    >>> import hetu as ht
    >>> family(ht.placeholder("x", (3,))), family(ht.placeholder("x", (3,)) + 1)
    ('placeholder', 'compute')
    """
    if node.role in _DRAWN:
        return _DRAWN[node.role]
    if not node.inputs:
        return "constant"
    return "gradient" if node.tags.get("gradient") else "compute"


def picture(outputs: Graph | Node | Iterable[Node]) -> Picture:
    """The boxes and arrows of a graph, or of what one or several nodes need."""
    graph = as_graph(outputs)
    made = Picture()
    places: dict[Node, int] = {}
    shown = {node.inputs[0] if node.role is Role.ITEM else node for node in graph.outputs}
    groups = _groups(graph)
    for node in graph.nodes:
        if node.role is Role.ITEM:
            places[node] = places[node.inputs[0]]
        elif node in shown or not _is_number(node):
            places[node] = len(made.boxes)
            made.boxes.append(_box(node, groups.get(node), node in shown))
            _connect(made, node, places)
    return made


def as_graph(outputs: Graph | Node | Iterable[Node]) -> Graph:
    if isinstance(outputs, Graph):
        return outputs
    return Graph((outputs,) if isinstance(outputs, Node) else tuple(outputs))


def _connect(made: Picture, node: Node, places: dict[Node, int]) -> None:
    """Arrows into the newest box; an arrow is dashed if no use of that input needs its value."""
    target = places[node]
    uses: dict[int, bool] = {}
    for position, i in enumerate(node.inputs):
        if i in places:
            uses[places[i]] = uses.get(places[i], True) and position in node.op.like
    for source, only_shape in uses.items():
        made.arrows.append((source, target))
        if only_shape:
            made.shape_only.add((source, target))


def _is_number(node: Node) -> bool:
    return node.role is Role.CONSTANT and node.attrs["value"].size == 1


def _groups(graph: Graph) -> dict[Node, LayerGroup]:
    """Layer and direction of each node. A variable belongs to the layer that uses it, if its name says so."""
    groups: dict[Node, LayerGroup] = {}
    for node in graph.nodes:
        layer = node.tags.get("layer")
        if layer is None:
            continue
        groups[node] = layer, "backward" if family(node) == "gradient" else "forward"
        for i in node.inputs:
            if i.role is Role.VARIABLE and i.name.startswith(f"{layer}/"):
                groups.setdefault(i, (layer, "forward"))
    return groups


def _box(node: Node, group: LayerGroup | None, is_output: bool) -> DrawnNode:
    numbers = [f"{i.attrs['value'].item():.4g}" for i in node.inputs if _is_number(i)]
    name = node.name if group is None else node.name.removeprefix(f"{group[0]}/")
    return DrawnNode(
        title=_cut(" ".join([name, *numbers])),
        detail=_cut(f"{node.type[0]} +{len(node.type) - 1}" if isinstance(node.type, tuple) else f"{node.type}"),
        tooltip=_tooltip(node),
        family=family(node),
        group=group,
        is_output=is_output,
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _tooltip(node: Node) -> str:
    """Everything there is to say: type, attributes, tags and the user's line."""
    attrs = [f"{k} = {v!r}" for k, v in node.attrs.items() if not isinstance(v, np.ndarray) and not callable(v)]
    tags = [f"{k}: {v}" for k, v in node.tags.items()]
    lines = [f"{node.op.name}  {show_type(node.type)}", *attrs, *tags]
    if node.site is not None:
        lines += [f"at {node.site}", *(line.strip() for line in node.site.excerpt().splitlines()[:1])]
    return "\n".join(lines)
