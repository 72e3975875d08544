"""Whether what a model gives for a row follows from that row alone, so that requests may share a run.

The sharding rules of operators tell: were each row on a rank of its own, none would have to hear of another, nor to
know which row it has. Left out: models of which only some outputs are so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count

from ..core.graph import Node, topological
from ..core.leaf import random_state
from ..core.memory import types_of
from ..core.op import Role
from ..core.passes import specialize
from ..core.types import Atom, Dim, has_dim, substitute
from ..dist.layout.deduce import Deduction, Grid, deduce
from ..dist.layout.layout import DUP, Layout, Mesh
from ..dist.layout.rules import rule_of


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
        return _each_could_lie_alone(outputs, inputs, sizes)
    except Exception:  # of sizes that do not fit, by whatever an operator raises: the run itself tells
        return False


def _each_could_lie_alone(outputs: Sequence[Node], inputs: Iterable[str], sizes: Mapping[Atom, int]) -> bool:
    nodes = topological(outputs)
    known = {s for node in nodes for t in types_of(node) for s in t.shape if isinstance(s, int)} | {*sizes.values()}
    rows = next(n for n in count(5) if all(s == 0 or s % n for s in known))  # so that sizes tell which axes are of rows
    batch = {(name, 0): rows for name in inputs}
    made = dict(zip(nodes, specialize(nodes, {**sizes, **batch})))
    if any(node is random_state or _counts(node, made[node], batch, rows) for node in nodes):
        return False
    whole, cut = (Mesh((rows,), ("batch",)).layout(**roles) for roles in ({}, {"batch": 0}))

    def leaf(node: Node, updating: bool) -> Layout | None:
        return cut if node.role is Role.PLACEHOLDER else whole if node.role is Role.VARIABLE else None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operators without a rule, which hear of all rows
        found = deduce([*made.values()], leaf, lambda node: Grid.of(cut), set())
    if not all(found.layouts[made[node]] == (cut,) and made[node].shape[0] == rows for node in outputs):
        return False
    return all(_stays(node, found, rows) for node in made.values() if node.inputs and node.role is not Role.ITEM)


def _counts(node: Node, made: Node, batch: Mapping[Atom, int], rows: int) -> bool:
    """Whether a node computes with the number of rows; to be as long, or a multiple, is another thing."""
    asked = [value for value in node.attrs.values() if has_dim(value) and substitute(value, batch) != value]
    if not asked or node.role not in (Role.MOVE, Role.PLACEHOLDER) or any(value != node.shape for value in asked):
        return bool(asked)
    return any(n % rows for size, n in zip(node.shape, made.tensor.shape) if substitute(size, batch) != size)


def _stays(node: Node, found: Deduction, rows: int) -> bool:
    """Whether a node reads its rows where they lie, and of other axes as long no place in particular, nor all."""
    rule = rule_of(node)
    for k, (i, want) in enumerate(zip(node.inputs, found.wants[node])):
        split, _ = (lies := found.layouts[i][0]).axes()[0, 0]
        if split != DUP and (lies != want or rule is None):
            return False
        for axis in (a for a, size in enumerate(i.tensor.shape) if size and size % rows == 0):  # as long, or a multiple
            factor = rule and rule.factor(rule.inputs[k], axis)
            if rule is None or factor is None or factor in rule.windowed:
                return False
            kept = factor not in rule.fixed and any(rule.place(term, factor) is not None for term in rule.outputs)
            if axis != split and not (kept and _alike(i, axis)):
                return False
    return True


def _alike(node: Node, axis: int) -> bool:
    """Whether along an axis all of a value is the same: filled in or repeated."""
    if not node.inputs:
        return node.role is Role.MOVE
    rule = rule_of(node)
    factor = None if rule is None else rule.factor(rule.outputs[0], axis)
    if rule is None or factor is None or factor in (*rule.fixed, *rule.windowed):
        return False
    had = [(i, rule.place(term, factor)) for i, term in zip(node.inputs, rule.inputs) if factor in chain(*term)]
    return all(place is not None and _alike(i, place) for i, place in had) if had else node.role is Role.MOVE
