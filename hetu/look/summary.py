"""The table of a model: layers in the order of use, their output shapes, parameters and memory.

Layers are recognized by the `layer` tag that `hetu.nn` puts on nodes, and own the variables named below them. For time
and activations see `profiler.py` and `print(program)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from ..core.errors import public
from ..core.graph import Graph, Node
from ..core.op import Role
from ..core.types import show_type
from .columns import in_columns
from .html_table import table_html


@dataclass(frozen=True)
class SummaryRow:
    """One layer: what it gives and the elements and bytes of the variables that are its own."""

    layer: str
    output: str
    parameters: int
    trainable: int
    nbytes: int


@dataclass(frozen=True)
class Summary:
    """Rows and totals; `print(summary)` and notebooks show them as a table."""

    rows: tuple[SummaryRow, ...]

    @property
    def parameters(self) -> int:
        """Elements of all variables, trainable or not."""
        return sum(row.parameters for row in self.rows)

    @property
    def trainable(self) -> int:
        """Elements of the variables that optimizers change."""
        return sum(row.trainable for row in self.rows)

    @property
    def nbytes(self) -> int:
        return sum(row.nbytes for row in self.rows)

    def _cells(self) -> list[tuple[str, ...]]:
        """Head, rows and totals as text."""
        head = ("layer", "output", "parameters", "trainable", "MB")
        total = SummaryRow("total", "", self.parameters, self.trainable, self.nbytes)
        lines = [
            (r.layer, r.output, f"{r.parameters:,}", f"{r.trainable:,}", f"{r.nbytes / 1e6:.3f}")
            for r in (*self.rows, total)
        ]
        return [head, *lines]

    def __str__(self) -> str:
        lines = in_columns(self._cells(), right={2, 3, 4})
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        *rows, total = ([*map(escape, row)] for row in self._cells())
        return table_html([*rows, [f"<b>{cell}</b>" for cell in total]], right={2, 3, 4})


@public
def summary(outputs: Node | Iterable[Node]) -> Summary:
    """The layers and parameters that `outputs` (one node or several) need.

    Shared variables count once, in the first layer that uses them. Variables outside of layers have rows of their own.
    Tables without a bound have no number of parameters, and the bytes of their budget.

    >>> import hetu as ht
    >>> with ht.tagged(layer="scale"):
    ...     y = ht.placeholder("x", (None, 3)) * ht.variable("scale/weight", 1.0, (3,))
    >>> print(summary(y))
    layer  output     parameters  trainable     MB
    ----------------------------------------------
    scale  f32[?, 3]           3          3  0.000
    ----------------------------------------------
    total                      3          3  0.000
    """
    graph = Graph((outputs,) if isinstance(outputs, Node) else tuple(outputs))
    forward = [n for n in graph.nodes if not n.tags.get("gradient")]
    last: dict[str, Node] = {}
    for node in forward:
        if node.inputs and "layer" in node.tags:
            last[node.tags["layer"]] = node
    owned: dict[str, list[Node]] = {layer: [] for layer in last}
    for variable, layer in _owners(forward, owned).items():
        owned.setdefault(layer, []).append(variable)
    return Summary(tuple(_row(layer, last.get(layer), variables) for layer, variables in owned.items()))


def _owners(nodes: list[Node], layers: Iterable[str]) -> dict[Node, str]:
    """The layer of each variable: that whose name it carries, else the first that uses it, else the variable itself."""
    owners: dict[Node, str] = {}
    for node in nodes:
        for i in node.inputs:
            if i.role is Role.VARIABLE and i not in owners:
                named = [layer for layer in layers if i.name.startswith(f"{layer}/")]
                owners[i] = max(named, key=len) if named else node.tags.get("layer", i.name)
    for node in nodes:
        if node.role is Role.VARIABLE:  # an output itself
            owners.setdefault(node, node.name)
    return owners


def _row(layer: str, node: Node | None, variables: list[Node]) -> SummaryRow:
    sizes = {v: v.tensor for v in variables if "grows" not in v.tags}
    budgets = [v.tags["grows"].budget for v in variables if "grows" in v.tags]
    return SummaryRow(
        layer=layer,
        output=show_type(node.type if node is not None else variables[0].type),
        parameters=sum(int(t.size) for t in sizes.values()),
        trainable=sum(int(t.size) for v, t in sizes.items() if v.attrs["trainable"]),
        nbytes=sum(int(t.nbytes) for t in sizes.values()) + sum(budgets),
    )
