"""Whether what a model gives for a row follows from that row alone, so that requests may share a run.

The sharding rules of operators tell: were each row on a rank of its own, none would have to hear of another, nor to
know which row it has. Left out: models of which only some outputs are so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from ..core.graph import Node, topological
from ..core.leaf import random_state
from ..core.memory import types_of
from ..core.op import Role
from ..core.passes import specialize
from ..core.types import Atom, Dim, has_dim, substitute
from ..dist.layout.rules import rule_of

# Of each output of a node the axes as long as the batch, or a multiple: whether they are rows, or one value repeated.
Long = list[dict[int, bool]]


def rows_apart(outputs: Sequence[Node], inputs: Mapping[str, Node], sizes: Mapping[Atom, int]) -> bool:
    """Whether rows, along the first axes of all inputs and outputs, may be joined with any others; at these sizes.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 3))
    >>> [rows_apart([y], {"x": x}, {}) for y in (ht.softmax(x), ht.softmax(x, axis=0), x / x.shape[0])]
    [True, False, False]
    """
    if not all(node.shape and isinstance(node.shape[0], Dim) for node in (*inputs.values(), *outputs)):
        return False
    try:
        return _lie_apart(outputs, inputs, sizes)
    except Exception:  # of sizes that do not fit, by whatever an operator raises: the run itself tells
        return False


def _lie_apart(outputs: Sequence[Node], inputs: Iterable[str], sizes: Mapping[Atom, int]) -> bool:
    nodes = topological(outputs)
    known = {s for node in nodes for t in types_of(node) for s in t.shape if isinstance(s, int)} | {*sizes.values()}
    rows = next(n for n in count(5) if all(s == 0 or s % n for s in known))  # so that sizes tell which axes are of rows
    batch = {(name, 0): rows for name in inputs}
    made = dict(zip(nodes, specialize(nodes, {**sizes, **batch})))
    if any(node is random_state or _counts(node, made[node], batch, rows) for node in nodes):
        return False
    found: dict[Node, Long] = {}
    for node in topological([*made.values()]):
        if (axes := _long_axes(node, found, rows)) is None:
            return False
        found[node] = axes
    return all(found[made[node]] == [{0: True}] and made[node].shape[0] == rows for node in outputs)


def _counts(node: Node, made: Node, batch: Mapping[Atom, int], rows: int) -> bool:
    """Whether a node computes with the number of rows; to be as long, or a multiple, is another thing."""
    asked = [value for value in node.attrs.values() if has_dim(value) and substitute(value, batch) != value]
    if not asked or node.role not in (Role.MOVE, Role.PLACEHOLDER) or any(value != node.shape for value in asked):
        return bool(asked)
    return any(n % rows for size, n in zip(node.shape, made.tensor.shape) if substitute(size, batch) != size)


def _long_axes(node: Node, found: Mapping[Node, Long], rows: int) -> Long | None:
    """Those of a node, of whose inputs they are `found`; None where rows meet, or their places are told apart."""
    if node.role is Role.PLACEHOLDER:
        return [{0: True}]
    if node.role is Role.ITEM:
        return [found[node.inputs[0]][node.attrs["index"]]]
    long = [[axis for axis, size in enumerate(t.shape) if size and size % rows == 0] for t in types_of(node)]
    given = [(k, axis, own) for k, i in enumerate(node.inputs) for axis, own in found[i][0].items()]
    if not (given or any(long)) or not node.inputs:  # then it is filled in, and else of no number of rows
        return [dict.fromkeys(axes, False) for axes in long] if node.role is Role.MOVE or not any(long) else None
    if (rule := rule_of(node)) is None:
        return None
    own_rows, closed = dict[str | None, bool](), {None, *rule.fixed, *rule.windowed}
    for k, axis, own in given:
        factor = rule.factor(rule.inputs[k], axis)
        own_rows[factor] = own_rows.get(factor, False) or own
        if factor is not None and not rule.can_split(factor, rows):
            return None
    made = [{axis: rule.factor(term, axis) for axis in axes} for axes, term in zip(long, rule.outputs)]
    factors = {factor for axes in made for factor in axes.values()}
    if not closed.isdisjoint({*own_rows, *factors}) or not all({*axes.values()} >= own_rows.keys() for axes in made):
        return None
    if sum(own_rows.values()) > 1 or (node.role is not Role.MOVE and not factors <= own_rows.keys()):
        return None
    return [{axis: own_rows.get(factor, False) for axis, factor in axes.items()} for axes in made]
