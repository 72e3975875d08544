"""Which axes of variables tensor parallelism splits, read from the graph: no name says it.

Where an operator's `dims` rule gives axes of two values the same letter, a split of one is a split of the other. Axes
that hang together so are split together or not at all: the columns of one weight, what is computed elementwise with
them, the heads of attention, and the rows of the next weight, behind which a sum is pending (M. Shoeybi et al.,
"Megatron-LM", 2019, section 3). The planner weighs each operator by itself instead (`plan/search/operators.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...core.graph import Node, topological
from ...core.memory import types_of
from ...core.op import Role
from ...core.operators import with_updates_op
from ...core.types import Dim, TensorType
from ..layout.deduce import updating
from ..layout.rules import ShardingRule, rule_of

ValueOf = tuple[Node, int]  # a node and the number of its result
AxisOf = tuple[ValueOf, int]


@dataclass
class Together:
    """Axes that are split together.

    travels: results that are then sums still to be completed, and inputs of which the gradients are. whole: an operator
    needs one of the axes whole.
    """

    axes: set[AxisOf] = field(default_factory=set)
    travels: set[ValueOf] = field(default_factory=set)
    whole: bool = False

    def join(self, other: Together) -> None:
        self.axes |= other.axes
        self.travels |= other.travels
        self.whole |= other.whole

    def variables(self) -> dict[str, int]:
        """Name -> axis of the variables to split."""
        return {node.name: axis for (node, _), axis in self.axes if node.role is Role.VARIABLE}

    def kept(self) -> int:
        """How many numbers of variables ranks divide, for one sample where a size is open."""
        return sum(_numbers(node.tensor) for (node, _), _ in self.axes if node.role is Role.VARIABLE)

    def sent(self) -> int:
        """How many numbers ranks add up, both ways."""
        return sum(_numbers(types_of(node)[k]) for node, k in self.travels)


def tensor_axes(outputs: Sequence[Node], ranks: int, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Name -> axis of the trained variables that `ranks` ranks split; `given` are axes that are decided already.

    Of axes that cannot both be split those come first that hang together with given ones, then those of which ranks
    keep most for each number that they send. Weights along which nothing else is split, such as tables, are split if
    they have more numbers than are sent.

    >>> import hetu as ht
    >>> h = ht.nn.Linear(4, 16, activation=ht.relu, name="first")(ht.placeholder("x", (None, 4)))
    >>> tensor_axes([ht.nn.Linear(16, 4, name="second")(h)], 2)
    {'first/bias': 0, 'first/weight': 1, 'second/weight': 0}
    """
    found, taken, known = dict[str, int](), set[ValueOf](), (given or {}).items()

    def order(group: Together) -> tuple[bool, float]:
        return known.isdisjoint(group.variables().items()), -group.kept() / max(1, group.sent())

    for group in sorted(_groups(outputs, ranks), key=order):
        values, variables = [value for value, _ in group.axes], group.variables()
        free = len(values) == len({*values}) and taken.isdisjoint(values)
        free = free and all(variables.get(name, axis) == axis for name, axis in known)
        if free and (any(node.inputs for node, _ in values) or group.kept() > group.sent()):
            found |= variables
            taken |= {*values}
    return dict(sorted(found.items()))


def _groups(outputs: Sequence[Node], ranks: int) -> Iterator[Together]:
    """Axes that hang together, if they are of trained variables too and if `ranks` ranks may split them."""
    late, of = updating(outputs), dict[AxisOf, Together]()
    active = set[Node]()  # what gradients flow to in the forward pass
    for node in topological(outputs):
        if not node.inputs:
            active |= {node} if node.role is Role.VARIABLE and node.attrs["trainable"] else set()
        elif node.role is Role.UPDATE or node.tags.get("gradient") or any(i in late for i in node.inputs):
            late.add(node)
        elif node not in late and node.op.differentiable and any(i in active for i in node.inputs):
            active.add(node)
            if node.role is not Role.ITEM and node.op is not with_updates_op:
                reads = {k: _value(i) for k, i in enumerate(node.inputs) if i in active and k not in node.op.like}
                _follow(node, reads, ranks, of)
    for group in {id(group): group for group in of.values()}.values():
        if not group.whole and group.variables():
            yield group


def _follow(node: Node, reads: Mapping[int, ValueOf], ranks: int, of: dict[AxisOf, Together]) -> None:
    """Joins the axes that `node` makes one factor of."""
    made = [(node, k) for k in range(len(types_of(node)))]
    rule = rule_of(node)
    if rule is None:
        for value in (*reads.values(), *made):
            for axis in range(types_of(value[0])[value[1]].ndim):
                _joined([(value, axis)], of).whole = True
        return
    terms = [*((value, rule.inputs[k]) for k, value in reads.items()), *zip(made, rule.outputs)]
    kept = {axis[0] for term in rule.outputs for axis in term if axis}
    for factor in {axis[0]: None for _, term in terms for axis in term if axis}:
        places = [(value, rule.place(term, factor)) for value, term in terms]
        split = [(value, place) for value, place in places if place is not None]
        if not rule.can_split(factor, ranks):  # there what is computed is gathered
            for value, place in split:
                group = _joined([(value, place)], of)
                group.travels.add(value)
                group.whole |= not value[0].inputs
            continue
        group = _joined(split, of)
        group.whole |= _needs_whole(node, rule, factor, factor in kept)
        if any(place is not None for _, place in places[: len(reads)]):
            group.travels |= {value for value, place in places if place is None}


def _needs_whole(node: Node, rule: ShardingRule, factor: str, kept: bool) -> bool:
    """An operator that needs a factor whole is taken apart if the factor is not in its results: sums then suffice."""
    if factor in rule.fixed:
        return kept or node.op.decompose_rule is None
    return factor in rule.windowed and "window" not in node.op.defaults


def _joined(axes: Sequence[AxisOf], of: dict[AxisOf, Together]) -> Together:
    """The group of all these axes."""
    groups = {id(group): group for axis in axes if (group := of.get(axis))}
    first, *others = sorted(groups.values(), key=lambda g: -len(g.axes)) or [Together()]
    for other in others:
        first.join(other)
        of.update(dict.fromkeys(other.axes, first))
    first.axes.update(axes)
    of.update(dict.fromkeys(axes, first))
    return first


def _value(node: Node) -> ValueOf:
    while node.op is with_updates_op:
        node = node.inputs[0]
    return (node.inputs[0], node.attrs["index"]) if node.role is Role.ITEM else (node, 0)


def _numbers(type_: TensorType) -> int:
    return math.prod(size.coef if isinstance(size, Dim) else size for size in type_.shape)
