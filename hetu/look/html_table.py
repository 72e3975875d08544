"""HTML tables: of any cells, of texts, and of a graph, one row per node with its type and the user's line.

The colors are those of the picture; the rest is the page's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

import numpy as np

from ..core.graph import Graph, Node
from ..core.types import show_type
from .picture import as_graph, family
from .svg import FILL, MONO, SANS


def to_html(outputs: Graph | Node | Iterable[Node]) -> str:
    """A table of name, type, operator call.

    >>> import hetu as ht
    >>> to_html(ht.placeholder("x", (3,)) + 1).count("<tr")
    4
    """
    graph = as_graph(outputs)
    names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    rows = [_row(node, names, node in graph.outputs) for node in graph.nodes]
    return table_html([("", "type", "computed by", "at"), *rows], font=MONO)


def table_html(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), font: str = SANS) -> str:
    """A table of cells that are HTML, the first row its head; the columns `right` stand at their right ends."""
    lines = []
    for number, row in enumerate(rows):
        sides = ("right" if k in right else "left" for k in range(len(row)))
        tag = "td" if number else "th"
        lines.append("".join(f'<{tag} style="text-align:{s}">{cell}</{tag}>' for s, cell in zip(sides, row)))
    return f'<table style="font-family:{font};font-size:12px">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'


def bar_html(width: float, family: str) -> str:
    """A bar of so many pixels in the color of a family."""
    fill, frame = FILL[family]
    return f'<div style="width:{width:.0f}px;height:12px;background:{fill};border:1px solid {frame}"></div>'


def rows_html(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, the first row its head.

    >>> rows_html([("name", "shape"), ("w", "<4>")]).count("&lt;4&gt;")
    1
    """
    return table_html([[*map(escape, row)] for row in rows], font=MONO)


def _row(node: Node, names: dict[Node, str], is_output: bool) -> tuple[str, ...]:
    frame = FILL[family(node)][1]
    arguments = [names[i] for i in node.inputs] + [
        f"{k}={_short(v)}" for k, v in node.attrs.items() if v is not None and not callable(v)
    ]
    name = f"<b>{names[node]}</b> ⇐" if is_output else names[node]
    return (
        f'<span style="border-left:4px solid {frame};padding-left:6px">{name}</span>',
        escape(show_type(node.type)),
        f"<b>{escape(node.op.name)}</b>({escape(', '.join(arguments))})",
        escape(str(node.site)),
    )


def _short(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.item():g}" if value.size == 1 and value.dtype.kind != "b" else f"<{value.size} values>"
    return f"{value!r:.60}"
