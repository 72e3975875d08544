"""Fix the sizes that were unknown while the graph was built: substitute, and let every type follow anew.

Each set of fed shapes gets its own program; sizes are not put into buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .graph import OPS, Node, rewrite
from .types import Atom, has_dim, substitute


def specialize(outputs: Sequence[Node], sizes: Mapping[Atom, int]) -> tuple[Node, ...]:
    """The graph at the given sizes, for example `{("x", 0): 128}`; a size that does not fit is a ShapeError."""

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if not any(map(has_dim, node.attrs.values())):
            return None
        attrs = {name: substitute(value, sizes) for name, value in node.attrs.items()}
        if node.op.name == "size" and isinstance(attrs["value"], int):
            return OPS["constant"](value=attrs["value"])
        return node.op.make(inputs, attrs)

    return rewrite(outputs, rule)
