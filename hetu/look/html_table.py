"""HTML tables: of texts, and of a graph, one row per node with its type and the user's line.

The colors are those of the picture; the rest is the page's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from ..core.graph import Graph, Node
from ..core.types import show_type
from .picture import as_graph, family
from .svg import FILL, MONO


def to_html(outputs: Graph | Node | Iterable[Node]) -> str:
    """A table of name, type, operator call.

    >>> import hetu as ht
    >>> to_html(ht.placeholder("x", (3,)) + 1).count("<tr")
    4
    """
    graph = as_graph(outputs)
    names = {node: f"%{i}" for i, node in enumerate(graph.nodes)}
    rows = [_row(node, names, node in graph.outputs) for node in graph.nodes]
    head = "".join(f'<th style="text-align:left">{h}</th>' for h in ("", "type", "computed by", "at"))
    return f'<table style="font-family:{MONO};font-size:12px"><tr>{head}</tr>{"".join(rows)}</table>'


def rows_html(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, the first row its head.

    >>> rows_html([("name", "shape"), ("w", "<4>")]).count("&lt;4&gt;")
    1
    """
    head, *body = ([f'style="text-align:left">{escape(cell)}' for cell in row] for row in rows)
    lines = ["".join(f"<th {cell}</th>" for cell in head), *("".join(f"<td {cell}</td>" for cell in r) for r in body)]
    return f'<table style="font-family:{MONO};font-size:12px">{"".join(f"<tr>{line}</tr>" for line in lines)}</table>'


def _row(node: Node, names: dict[Node, str], is_output: bool) -> str:
    frame = FILL[family(node)][1]
    arguments = [names[i] for i in node.inputs] + [
        f"{k}={_short(v)}" for k, v in node.attrs.items() if v is not None and not callable(v)
    ]
    name = f"<b>{names[node]}</b> ⇐" if is_output else names[node]
    cells = [
        f'<span style="border-left:4px solid {frame};padding-left:6px">{name}</span>',
        escape(show_type(node.type)),
        f"<b>{escape(node.op.name)}</b>({escape(', '.join(arguments))})",
        escape(str(node.site)),
    ]
    return "<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in cells) + "</tr>"


def _short(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.item():g}" if value.size == 1 and value.dtype.kind != "b" else f"<{value.size} values>"
    return f"{value!r:.60}"
