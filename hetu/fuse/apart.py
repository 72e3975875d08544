"""Operators taken apart into those that can be lines of a group; what they check is kept.

A norm, a softmax or an optimizer's rule is then a group like any other. It stays whole where a part could be no line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import Site
from ..core.graph import OPS, Node, origin_of, remade, rewrite
from ..core.op import Op, Role
from ..core.operators import broadcast_axes, cast_to
from ..ops.composition import Scalars
from .form import Attrs, line_of, own_column


class Looked(NamedTuple):
    """The check of a node: its inputs, and those of them whose numbers it looks at."""

    op: Op[..., Any]
    inputs: tuple[Node, ...]
    arrays: tuple[Node, ...]
    attrs: Attrs
    site: Site | None


Checks = Mapping[Node, Sequence[Looked]]
Parts = tuple[Node, ...]


class Example(NamedTuple):
    """A node that was taken apart: the same operator of the same types has the same parts, so they are only copied."""

    inputs: Parts
    copies: list[Parts]  # what hangs on those inputs, inputs first; and the same of each copy
    parts: Parts

    def copied(self, inputs: Parts) -> Parts:
        new = dict(zip(self.inputs, inputs))
        for n in self.copies[0]:
            new[n] = Node(n.op, tuple([new.get(i, i) for i in n.inputs]), n.attrs, n.type)
        self.copies.append(tuple([new[n] for n in self.copies[0]]))
        return tuple(new.get(part, part) for part in self.parts)


Examples = dict[Any, Example | None]  # by what the parts follow from


def taken_apart(
    outputs: Sequence[Node], fits: Callable[[Node], bool], whole: Callable[[Node], bool]
) -> tuple[tuple[Node, ...], Checks, list[list[Parts]]]:
    """The graph with operators taken apart where all parts are such that `fits`; the checks of those, by part; and
    what came of single operators, those together that are alike.

    Operators that are better `whole` stay so.
    """
    checks: dict[Node, list[Looked]] = {}
    scalars: Scalars = {}
    examples: Examples = {}

    @cache
    def parts_of(node: Node) -> Parts | None:
        if whole(node):
            return None
        looked = looked_at(node)
        parts = None if looked is None and node.op.check_rule is not None else _parts(node, fits, scalars, examples)
        if looked is not None and parts is not None:
            if not all(part in node.inputs or fits(part) for part in parts):
                return None
            for part in parts:
                if part not in node.inputs:
                    checks.setdefault(part, []).append(looked)
        return parts

    def rule(node: Node, inputs: Parts) -> Node | None:
        if node.role is Role.ITEM:
            parts = parts_of(inputs[0])
            return parts[node.attrs["index"]] if parts else None
        parts = None if isinstance(node.type, tuple) else parts_of(remade(node, inputs))
        return parts[0] if parts else None

    made = rewrite(outputs, rule)
    return made, checks, [example.copies for example in examples.values() if example]


def looked_at(node: Node) -> Looked | None:
    """What the check of a node looks at, where its operator tells: then it can be made of these arrays alone."""
    if node.op.check_rule is None or node.op.ranges_rule is None or any(isinstance(i.type, tuple) for i in node.inputs):
        return None
    shapes: list[Any] = [i.shape for i in node.inputs]
    stands = [np.broadcast_to(np.zeros((), i.dtype), shape) for i, shape in zip(node.inputs, shapes)]
    ranges = node.op.ranges_rule(*stands, **node.attrs)
    if ranges is None:
        return None
    arrays = tuple(i for i, x in zip(node.inputs, stands) if any(x is ids for ids, *_ in ranges))
    return Looked(node.op, node.inputs, arrays, tuple(node.attrs.items()), node.site)


def _parts(node: Node, fits: Callable[[Node], bool], scalars: Scalars, examples: Examples) -> Parts | None:
    """The results of a node as operators that can join groups, or None."""
    if node.op not in REWRITTEN and node.op.update is None and node.op.decompose_rule is None:
        return None
    if any(isinstance(i.type, tuple) for i in node.inputs):
        return None
    with origin_of(node):
        made = _rewritten(node, node.inputs)
        if made is not None:
            return (made,)
        key = line_of(node.op, [node.inputs.index(i) for i in node.inputs], node.attrs), *map(_given, node.inputs)
        if key not in examples:
            example, own = _example(node, fits, scalars)
            if own:
                examples[key] = example
            return None if example is None else example.parts
        example = examples[key]
        return None if example is None else example.copied(node.inputs)


def _given(x: Node) -> Any:
    """What the parts of an operator may follow from: the kind of an input, or the very scalar or constant."""
    return (x.type, x.op) if x.ndim and x.role is not Role.CONSTANT else x


def _example(node: Node, fits: Callable[[Node], bool], scalars: Scalars) -> tuple[Example | None, bool]:
    """The parts of a node in operators all of which fit, or None; and whether they reach no further than its inputs."""
    rule = node.op.decompose_rule
    update: Any = node.op.update
    whole = update.of(node).on(node.inputs, scalars) if update else rule and rule(*node.inputs, **node.attrs)
    if whole is None:
        return None, True
    inputs = node.inputs
    made = _made(whole if isinstance(whole, tuple) else (whole,), inputs, fits)
    if made is None:
        return None, True
    parts, frontier, seen = made, [*made], {*inputs}
    while frontier:
        n = frontier.pop()
        if n not in seen and n.inputs:
            if not fits(n):
                return None, True
            frontier += n.inputs
        seen.add(n)
    hanging = {i for i in inputs if _given(i) is not i}
    nodes = []
    for n in sorted(seen.difference(inputs), key=lambda n: n.serial):
        if not hanging.isdisjoint(n.inputs):
            hanging.add(n)
            nodes.append(n)
    latest = max((i.serial for i in inputs), default=-1)
    own = all(n in inputs or n.serial > latest or not n.ndim or n.role is Role.CONSTANT for n in seen)
    return Example(inputs, [tuple(nodes)], parts), own


def _made(outputs: Parts, inputs: Parts, fits: Callable[[Node], bool]) -> Parts | None:
    """The parts of an operator, as lines where such are known; None at the first that fits not: there may be many."""
    known, stack = {i: i for i in inputs}, [*outputs]
    while stack:
        node = stack.pop()
        lacking = () if node in known else [i for i in node.inputs if i not in known]
        if lacking:
            stack += (node, *lacking)
        elif node not in known:
            read = tuple([known[i] for i in node.inputs])
            line = _rewritten(node, read) if read else node
            known[node] = remade(node, read) if line is None else line
            if read and known[node] not in inputs and not fits(known[node]):
                return None
    return tuple(known[n] for n in outputs)


# -- patterns ----------------------------------------------------------------------------------------------------------


def _rewritten(node: Node, inputs: Parts) -> Node | None:
    """Operators that are more than one line but have no parts of their own."""
    made = REWRITTEN.get(node.op)
    return None if made is None else made(node, *inputs)


def _sum_to_like(node: Node, x: Node, like: Node) -> Node | None:
    before: Any = x.shape
    after: Any = node.shape
    axes = broadcast_axes(before, after)
    made = OPS["reshape"](OPS["sum"](x, axis=axes), node.shape) if axes else x
    return made if made.type == node.type else None


def _take(node: Node, x: Node, places: Node) -> Node | None:
    """One number of each row is a sum of which all but one are 0."""
    if node.attrs["axis"] != x.ndim - 1 or places.shape != (*x.shape[:-1], 1) or node.attrs["window"] is not None:
        return None
    return OPS["sum"](OPS["where"](own_column(places, x), x, _number(0, x)), axis=-1, keepdims=True)


def _cross_entropy_dx(node: Node, g: Node, x: Node, labels: Node, total: Node) -> Node | None:
    skip, smoothing = node.attrs["ignore_index"], node.attrs["label_smoothing"]
    low, _, classes = (0, 0, x.shape[-1]) if node.attrs["window"] is None else node.attrs["window"][0]
    rest, places = smoothing / classes, labels if not low else cast_to(labels, np.dtype("int64")) - low
    own = own_column(OPS["expand_dims"](places, axis=-1), x)
    target = OPS["where"](own, _number(1 - smoothing + rest, x), _number(rest, x))
    if skip is not None:
        g = OPS["where"](OPS["equal"](labels, skip), _number(0, x), g)
    return OPS["expand_dims"](g, axis=-1) * (OPS["exp"](x - OPS["expand_dims"](total, axis=-1)) - target)


def _number(value: float, x: Node) -> Node:
    return OPS["constant"](value=np.asarray(value, x.dtype))


REWRITTEN: dict[Op[..., Any], Callable[..., Node | None]] = {
    OPS["stop_gradient"]: lambda node, x: x,
    OPS["linear"]: lambda node, x, w, b: OPS["add"](OPS["matmul"](x, w), b),
    OPS["sum_to_like"]: _sum_to_like,
    OPS["take_along_axis"]: _take,
    OPS["softmax_cross_entropy_dx"]: _cross_entropy_dx,
}
