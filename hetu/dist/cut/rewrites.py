"""What becomes of a graph before it is cut: hints move up, and operators that ranks would gather for are taken apart.

A row-parallel layer, its bias and the residual sum end in one hint, a split that `shard` asks for. Made early, the
split turns the pending sums of the product into a reduce-scatter, and all later operators work on parts. An operator
may need an axis whole that layouts split. Written out, as its `.decompose` or the rule of its update says, most of it
works on parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ...core.graph import Node, origin_of, rewrite, topological
from ...core.memory import types_of
from ...core.op import Role
from ...ops.composition import Scalars
from ..layout.deduce import Deduction, Grid
from ..layout.layout import SUM, Layout
from ..layout.redistribute import plan
from ..layout.rules import rule_of, widens
from ..ops import shard
from .kept import Home
from .strategy import Strategy


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


def is_split_though_fixed(node: Node, found: Deduction, strategy: Strategy) -> bool:
    """Whether a node with other operators in it would gather an input along an axis that its kernel needs whole.

    An update of rows only where whole tables, added up, are fewer bytes than the rows.
    """
    divisible = node.op.decompose_rule or node.op.update or node.op.row_update
    if divisible is None or (rule := rule_of(node)) is None:
        return False
    for i, term, want in zip(node.inputs, rule.inputs, found.wants[node]):
        roles = found.layouts[i][0].axes().values() if i.inputs or i.role is not Role.CONSTANT else ()
        dims = {role for role, n in roles if role >= 0 and n > 1}
        kept = {role for role, n in want.axes().values() if role >= 0 and n > 1}
        if any(rule.factor(term, d) in rule.fixed for d in dims - kept):
            return node.op.row_update is None or _sums_are_less(node, found, strategy)
    return False


def _sums_are_less(node: Node, found: Deduction, strategy: Strategy) -> bool:
    """Whether ranks send no more bytes to add up whole tables than to gather the rows that an update of rows changes.

    Feeds that every rank has as a whole need not be sent.
    """
    tables, wants = node.op.row_update.tables, found.wants[node]
    (table, ids, rows), want = node.inputs[tables - 1 : tables + 2], wants[tables - 1]
    lie, kept = [found.layouts[i][0] for i in (ids, rows)], {axis: role for axis, (role, _) in want.axes().items()}
    terms = {axis: SUM for have in lie for axis, (role, _) in have.axes().items() if 0 <= role < ids.ndim}
    made, home, total = Grid.of(lie[0]), Grid.of(want), 0
    for shape, most in ((table.shape, table.ndim), (table.shape[:1], 0)):  # of rows, and of how often each is looked up
        there = {axis: role for axis, role in kept.items() if role <= most}
        total += plan(made.layout((there if made == home else {}) | terms), home.layout(there), shape).moved
    sent = [i for i in (ids, rows) if i.role is not Role.PLACEHOLDER or i.name in strategy.local]
    gathered = {i: plan(found.layouts[i][0], w, i.shape).moved for i, w in zip(node.inputs, wants) if i in sent}
    return total * table.dtype.itemsize <= sum(n * i.dtype.itemsize for i, n in gathered.items())


def decomposed(outputs: Sequence[Node], split: set[Node]) -> tuple[Node, ...]:
    """The graph with the nodes in `split` written as other operators; an update as those of its rule.

    The norm of a parameter is then a sum that ranks complete, and all else is done on the parts that they keep.
    """
    parts: dict[Node, tuple[Node, ...]] = {}
    scalars: Scalars = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node in split:
            made = written_out(node, inputs, scalars)
            if len(made) == 1:
                return made[0]
            parts[node] = made
        if node.role is Role.ITEM and node.inputs[0] in parts:
            index: int = node.attrs["index"]
            return parts[node.inputs[0]][index]
        return None

    return rewrite(outputs, rule)


def written_out(node: Node, inputs: tuple[Node, ...], scalars: Scalars) -> tuple[Node, ...]:
    """The results of a node, computed by other operators."""
    if (update := node.op.update) is not None:
        with origin_of(node, update=True):
            made: tuple[Node, ...] = update.of(node).on(inputs, scalars)
            return made
    if (update := node.op.row_update) is not None:
        sums: tuple[Node, ...] = update.on_sums(node, inputs)
        return sums
    assert node.op.decompose_rule is not None
    found: Node | tuple[Node, ...] = node.op.decompose_rule(*inputs, **node.attrs)
    return (found,) if isinstance(found, Node) else found
