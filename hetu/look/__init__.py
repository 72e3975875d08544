"""Views of a graph: SVG picture, Graphviz text, HTML table; memory plans, shards, timelines, rooflines, curves.

`print(graph)` (in `graph.py`) is the plain-text view. Everything is text: no drawing library is needed.
"""

from __future__ import annotations

from html import escape
from typing import Any

from ..answers import answer_calls as _answer_calls
from ..core.errors import HetuError
from ..core.executor import evaluate
from ..core.graph import Graph, Node
from ..core.passes import APPLIED
from ..core.program import Program
from . import doubtful as _doubtful  # which looks at what is run
from .arena import memory_svg
from .curves import curves_svg
from .dot import to_dot
from .explain import explained
from .growing import growing_curves
from .html_table import to_html
from .listing import compiled_text, cuda_text, program_svg, program_text
from .logs import log_steps
from .rates import RateCurve, find_rate
from .roofline import roofline_svg
from .shards import shards_svg
from .staleness import staleness_svg
from .svg import to_svg
from .timeline import timeline_svg

__all__ = [
    "RateCurve", "compiled_text", "cuda_text", "curves_svg", "explained", "find_rate", "growing_curves", "install",
    "log_steps", "memory_svg", "program_svg", "program_text", "roofline_svg", "shards_svg", "staleness_svg",
    "timeline_svg", "to_dot", "to_html", "to_svg",
]  # fmt: skip

_MOST_BOXES = 400  # beyond this a picture is slow to lay out and unreadable
_MOST_NUMBERS = 1_000_000  # that are computed to show one value


def install() -> None:
    """Let notebooks show graphs, nodes and programs as pictures, `print` show programs, and `explain=True` explain.

    >>> import hetu as ht
    >>> install()
    >>> ht.Graph((ht.placeholder("x", (3,)),))._repr_svg_()[:4]
    '<svg'
    """
    Graph._repr_html_ = _graph_html  # type: ignore[attr-defined]
    Graph._repr_svg_ = _graph_svg  # type: ignore[attr-defined]
    Node._repr_html_ = _node_html  # type: ignore[attr-defined]
    Node._repr_pretty_ = _node_pretty  # type: ignore[attr-defined]
    Program._repr_svg_ = program_svg  # type: ignore[attr-defined]
    Program.c = property(compiled_text)  # type: ignore[attr-defined]
    # The checker takes the method that `Program` inherits for one that every object must fit.
    Program.__str__ = program_text  # type: ignore[method-assign, assignment]
    APPLIED[True] = explained


def _graph_svg(graph: Graph) -> str | None:
    return to_svg(graph) if len(graph.nodes) <= _MOST_BOXES else None


def _graph_html(graph: Graph) -> str:
    """The picture, with the table folded below it; large graphs are a folded table only."""
    table = f"<details><summary>{len(graph.nodes)} nodes</summary>{to_html(graph)}</details>"
    return (_graph_svg(graph) or "") + table


def _node_html(node: Node) -> str:
    """One line, with the picture of everything the node needs folded below it."""
    line = escape(repr(node) + _constant_value(node))
    return f"<details><summary><code>{line}</code></summary>{_graph_html(Graph((node,)))}</details>"


def _node_pretty(node: Node, printer: Any, cycle: bool) -> None:
    """What IPython prints: of what is fed nothing and learns nothing its value, too."""
    printer.text(repr(node) + _constant_value(node))


def _constant_value(node: Node) -> str:
    graph = Graph((node,))
    types = [t for n in graph.nodes for t in (n.type if isinstance(n.type, tuple) else (n.type,))]
    if (
        any(graph.leaves(role) for role in ("placeholder", "variable"))
        or sum(int(t.size) for t in types) > _MOST_NUMBERS
    ):
        return ""
    try:
        return f" = {evaluate(node)}"
    except (HetuError, MemoryError):  # a look must not fail
        return ""


_answer_calls(__name__)
