"""Tell what a pass changed and where: the operators that went and came, and the user's lines they belong to.

The estimated gain is the memory traffic that falls away, counting each operator's inputs and results once. Caches,
arithmetic and traffic inside an operator are not counted; a profile shows those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from ..core.graph import Node, topological
from ..core.memory import types_of
from ..core.op import Role
from ..core.types import TensorType

LINES = 3  # of the user's program that a row shows


def explained(run: Callable[[Sequence[Node]], tuple[Node, ...]], outputs: Sequence[Node]) -> tuple[Node, ...]:
    """What the pass makes; prints one row if it changes the graph, with the gain.

    >>> import hetu as ht
    >>> from hetu.passes import simplify
    >>> x = ht.placeholder("x", (2,))
    >>> _ = explained(simplify, [-(-x)])
    simplify: 3 -> 1 nodes, without negative x2, memory traffic 32 -> 0 bytes
    """
    before, made = topological(outputs), run(outputs)
    after = topological(made)
    old, new = (Counter(n.op.name for n in nodes) for nodes in (before, after))
    if old != new:
        parts = [f"{run.__name__}: {len(before)} -> {len(after)} nodes"]
        parts += [f"{word} {_listed(c)}" for word, c in (("without", old - new), ("with", new - old)) if c]
        traffic = [_traffic(nodes) for nodes in (before, after)]
        if traffic[0] != traffic[1]:
            parts.append(f"memory traffic {traffic[0]:,} -> {traffic[1]:,} bytes")
        print(", ".join(parts) + _places(set(after) - set(before), new - old))
    return made


def _traffic(nodes: Sequence[Node]) -> int:
    """Bytes that the operators read and write, views apart."""
    types: list[TensorType] = []
    for node in nodes:
        if node.inputs and node.role is not Role.ITEM:
            types += [] if _is_view(node) else [t for n in (node, *node.inputs) for t in types_of(n)]
    return sum(int(t.nbytes) for t in types)


def _is_view(node: Node) -> bool:
    if node.op.view_rule is None:
        return False
    types = [(i.dtype, tuple(map(int, i.shape))) for i in node.inputs]
    arrays = [np.broadcast_to(np.zeros((), dtype), shape) for dtype, shape in types]  # of any size, without memory
    return node.op.view_rule(np, *arrays, **node.attrs) is not None


def _listed(ops: Counter[str]) -> str:
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in sorted(ops.items()))


def _places(made: set[Node], new: Counter[str]) -> str:
    """` (model.py:3, model.py:7, ...)` for the new nodes of new operators."""
    found = sorted((n for n in made if n.op.name in new and n.site is not None), key=lambda n: n.serial)
    lines = list(dict.fromkeys(str(n.site) for n in found))
    more = ", ..." if len(lines) > LINES else ""
    return f" ({', '.join(lines[:LINES])}{more})" if lines else ""
