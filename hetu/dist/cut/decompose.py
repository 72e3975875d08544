"""Which operators with others in them are taken apart, and into what: those that ranks would have to gather for.

An operator may need an axis whole that layouts split. Written out, as its `.decompose` or the rule of its update says,
most of it works on parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.graph import Node, origin_of, rewrite
from ...core.op import Role
from ...ops.composition import Scalars
from ..layout.deduce import Deduction, Grid
from ..layout.layout import SUM
from ..layout.redistribute import plan
from ..layout.rules import rule_of
from .strategy import Strategy


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
