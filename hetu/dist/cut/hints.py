"""Move hints up: a split that `shard` asks for is made as early as possible.

A row-parallel layer, its bias and the residual sum end in one hint. Made early, the split turns the pending sums of the
product into a reduce-scatter, and all later operators work on parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ...core.graph import Node, origin_of, rewrite, topological
from ...core.memory import types_of
from ...core.op import Role
from ..layout.layout import Layout
from ..layout.rules import rule_of, widens
from ..ops import shard
from .kept import Home


def hint_gradients(
    outputs: Sequence[Node], home: Callable[[Node], Home], store: Callable[[Node], Layout]
) -> tuple[Node, ...]:
    """The graph with hints on each gradient: the layouts that it goes through, as its variable's home says, and that of
    the state that it updates, so that each rank gets its part.

    With `push_hints` this holds before clipping and decay too: gradients are first scattered, then scaled.
    """

    def hinted(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        kept = [store(i) for i in node.inputs if i.role is Role.VARIABLE and i.ndim]
        if node.op.update is None or not kept:
            return None
        place, through = node.op.update.tables, home(node.inputs[0]).through
        if not through and not any(n > 1 and role >= 0 for role, n in kept[-1].axes().values()):
            return None
        gradient = inputs[place]
        with origin_of(node, update=True):
            for layout in (*through, kept[-1]):
                gradient = shard(gradient, layout=layout)
        return node.op.make((*inputs[:place], gradient, *inputs[place + 1 :]), node.attrs)

    return rewrite(outputs, hinted)


def push_hints(outputs: Sequence[Node], *, narrow: bool = False) -> tuple[Node, ...]:
    """The graph with a copy of each hint on every node that leads to it through operators that keep every axis.

    A copy stops at a value with a reader that does not keep every axis: this one may want another layout. It stops at
    the border of a place on other ranks too: what is computed there lies there. And it stops at a cast that widens, so
    that sums are taken in the longer floats, unless they are to be `narrow`.
    """
    nodes = topological(outputs)
    if not any(node.role is Role.HINT for node in nodes):
        return tuple(outputs)
    readers = Counter(i for node in nodes for i in node.inputs)
    readers.update(outputs)
    keeping = {node: [] if widens(node) and not narrow else alike(node) for node in nodes}
    kept = Counter(i for node in nodes for i in keeping[node])
    hints: dict[Node, Node] = {}  # the hint that a node gets a copy of
    hinted: set[Node] = set()  # those with a reader that is not a hint itself
    for node in reversed(nodes):
        hint = node if node.role is Role.HINT else hints.get(node)
        if hint is None:
            continue
        layout: Layout = hint.attrs["layout"]
        for i in keeping[node]:
            free = readers[i] == kept[i] and sorted(i.tags.get("place", layout.ranks)) == sorted(layout.ranks)
            if i.inputs and free and i.role not in (Role.HINT, Role.ITEM):
                hints.setdefault(i, hint)
                hinted |= {i} if node.role is not Role.HINT else set()

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node not in hinted:
            return None
        made, hint = node.op.make(inputs, node.attrs), hints[node]
        with origin_of(node, update=hint.tags.get("update", False)):
            return shard(made, layout=hint.attrs["layout"])

    return rewrite(outputs, rule)


def alike(node: Node, *, several: bool = False) -> list[Node]:
    """The inputs with every axis of the result, element by element; or of `several` that are alike."""
    rule = rule_of(node) if several or not isinstance(node.type, tuple) else None
    if rule is None or len({*rule.outputs}) > 1:
        return []
    out, shape = rule.outputs[0], types_of(node)[0].shape
    free = not any(factor in rule.fixed for axis in out for factor in axis)
    return [
        i
        for i, term in zip(node.inputs, rule.inputs)
        if free and term == out and not isinstance(i.type, tuple) and i.shape == shape
    ]
