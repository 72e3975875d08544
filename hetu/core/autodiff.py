"""Reverse-mode differentiation as graph construction: the gradient of a graph is a graph.

Each operator brings a rule written in graph functions, so gradients of gradients come for free. Broadcasting and dtype
promotion are undone here, once, for all rules. There is no forward mode.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from .errors import GradientError, public
from .graph import Node, origin_of, replace, tagged, topological
from .leaf import stand_in
from .op import Role, unpacked
from .operators import add, barrier, cast_to, ones_like, sum_to_like, with_updates_op, zeros_like
from .types import compatible, is_float

_regions = itertools.count()


@public
def gradients(loss: Node, wrt: Sequence[Node], seed: Node | None = None, *, allow_unused: bool = False) -> list[Node]:
    """d loss / d w for each w in `wrt`, as nodes of w's shape and dtype.

    `loss` is a floating scalar unless `seed`, the gradient of some later scalar with respect to it, is given.
    A `w` the loss does not depend on is a GradientError, or zeros with `allow_unused`.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", ())
    >>> first, = ht.gradients(x * x * x, [x])
    >>> second, = ht.gradients(first, [x])
    >>> float(ht.evaluate(second, {x: 2.0}))
    12.0
    """
    _check_loss(loss, seed)
    order = topological([loss])
    needs = _depends_on(order, wrt)
    tape = _Tape()
    with origin_of(loss, gradient=True):
        tape.add(loss, ones_like(loss) if seed is None else seed)
    for node in reversed(order):
        if node in needs and node.inputs:
            with origin_of(node, gradient=True):
                tape.visit(node, needs)
    return [_result(tape, loss, w, allow_unused) for w in wrt]


def _check_loss(loss: Node, seed: Node | None) -> None:
    type_ = loss.tensor
    if not is_float(type_.dtype):
        raise GradientError(f"{loss!r} is not a float, so it has no gradient", fix="differentiate a float loss")
    if seed is None and type_.shape != ():
        said = f"the loss {loss!r} is not a scalar: its shape is {type_}"
        raise GradientError(said, fix="reduce it to one number, for example ht.mean(loss)")
    if seed is not None and not (seed.ndim == loss.ndim and all(map(compatible, seed.shape, loss.shape))):
        said = f"the seed {seed!r} is the gradient of {loss!r}, but their shapes differ"
        raise GradientError(said, fix="make the shapes equal")


def _depends_on(order: list[Node], wrt: Sequence[Node]) -> set[Node]:
    """Nodes whose value, not only whose shape, depends on one of `wrt` through differentiable operators."""
    needs = set(wrt)
    for node in order:
        if node.op.differentiable and any(
            i in needs for position, i in enumerate(node.inputs) if position not in node.op.like
        ):
            needs.add(node)
    return needs


def _result(tape: _Tape, loss: Node, w: Node, allow_unused: bool) -> Node:
    with origin_of(w, gradient=True):
        if (gradient := tape.total(w)) is not None:
            return gradient
        if allow_unused:
            return zeros_like(w)
    fix = "leave it out, or ask with allow_unused=True; look for stop_gradient and integers on the way"
    raise GradientError(f"the loss {loss!r} does not depend on {w!r}", fix=fix)


class _Tape:
    """Gradients found so far: contributions per node, and per slot for nodes of several outputs."""

    def __init__(self) -> None:
        self.parts: dict[tuple[Node, int], list[Node]] = {}
        self.regions: dict[tuple[int, Node], Node] = {}  # recomputed copies by region

    def add(self, node: Node, gradient: Node, slot: int = 0) -> None:
        self.parts.setdefault((node, slot), []).append(gradient)

    def total(self, node: Node, slot: int = 0) -> Node | None:
        """The sum of all contributions; folded into one part so that asking twice costs nothing."""
        if not (parts := self.parts.get((node, slot))):
            return None
        while len(parts) > 1:
            parts[:] = [add(parts[0], parts[1]), *parts[2:]]
        return parts[0]

    def visit(self, node: Node, needs: set[Node]) -> None:
        """Pass the gradient of one node on to its inputs."""
        if node.role is Role.ITEM:
            if (gradient := self.total(node)) is not None:
                self.add(node.inputs[0], gradient, node.attrs["index"])
            return
        if (g := self._incoming(node)) is None:
            return
        inputs, out = self._values(node, g)
        for target, gradient in zip(node.inputs, self._apply_rule(node, g, out, inputs), strict=True):
            if gradient is None or target not in needs or isinstance(target.type, tuple):
                continue
            if is_float(target.dtype):
                self.add(target, _match(gradient, target, node))

    def _incoming(self, node: Node) -> Any:
        """The output gradient: a node, or a list with None holes for several outputs; None when there is none."""
        if not isinstance(node.type, tuple):
            return self.total(node)
        slots = [self.total(node, i) for i in range(len(node.type))]
        return slots if any(s is not None for s in slots) else None

    def _apply_rule(self, node: Node, g: Any, out: Any, inputs: tuple[Node, ...]) -> tuple[Node | None, ...]:
        rule = node.op.grad_rule
        made = NotImplemented if rule is None else rule(g, out, *inputs, **node.attrs)
        if made is NotImplemented and node.op.decompose_rule is not None:
            made = _through_parts(node, g, inputs)
        if made is NotImplemented:
            fix = f"add one with @{node.op.name}.grad, or cut the path with ht.stop_gradient"
            raise GradientError(f"operator {node.op.name!r} has no gradient rule: {node!r}", fix=fix, site=node.site)
        made = made if isinstance(made, tuple) else (made,)
        few = len(made) != len(node.inputs) and made != (None,)
        if few or any(g is not None and not isinstance(g, Node) for g in made):
            said = f"{len(made)} values for {len(node.inputs)} inputs" if few else f"{made!r:.80}"
            said = f"the gradient rule of {node.op.name!r} returned {said}"
            raise GradientError(said, fix="return one node or None per input", site=node.site)
        return made if len(made) == len(node.inputs) else (None,) * len(node.inputs)

    # -- recomputation: rules of a marked region see copies of its values that are computed anew in backward -----

    def _values(self, node: Node, g: Any) -> tuple[tuple[Node, ...], Any]:
        """What the rule of `node` sees as its inputs and output."""
        if (region := node.tags.get("recompute")) is None:
            return node.inputs, unpacked(node)
        after = next(s for s in (g if isinstance(g, list) else [g]) if s is not None)
        return tuple(self._copy(i, region, after) for i in node.inputs), unpacked(self._copy(node, region, after))

    def _copy(self, node: Node, region: int, after: Node) -> Node:
        """The recomputed twin of `node`; what comes from outside passes a barrier, variables and constants stay."""
        stack = [node]
        while stack:
            n = stack[-1]
            inside = n.tags.get("recompute") == region
            missing = [i for i in n.inputs if inside and (region, i) not in self.regions]
            if missing:
                stack += missing
                continue
            stack.pop()
            if (region, n) not in self.regions:
                stays = not n.inputs and (inside or n.role is not Role.PLACEHOLDER)
                with origin_of(n, gradient=True):
                    self.regions[region, n] = n if stays else self._twin(n, region, after)
        return self.regions[region, node]

    def _twin(self, node: Node, region: int, after: Node) -> Node:
        if node.tags.get("recompute") == region:
            inputs = node.inputs[:1] if node.op is with_updates_op else node.inputs  # what it commits is made once
            return node.op.make(tuple(self.regions[region, i] for i in inputs), node.attrs)
        return node if isinstance(node.type, tuple) else barrier(node, after)


def _through_parts(node: Node, g: Any, inputs: Sequence[Node]) -> tuple[Node | None, ...]:
    """The gradient of an operator without a rule of its own: that of its `decompose` form.

    The parts are differentiated on stand-ins, because one input may itself depend on another.
    """
    stand_ins = [stand_in(f"input{i}", x.tensor) for i, x in enumerate(inputs)]
    assert node.op.decompose_rule is not None
    parts = node.op.decompose_rule(*stand_ins, **node.attrs)
    parts, seeds = (parts, g) if isinstance(parts, tuple) else ((parts,), (g,))
    order = topological(parts)
    needs, tape = _depends_on(order, stand_ins), _Tape()
    for part, seed in zip(parts, seeds, strict=True):
        if seed is not None:
            tape.add(part, seed)
    for inner in reversed(order):
        if inner in needs and inner.inputs:
            tape.visit(inner, needs)
    found = [tape.total(s) for s in stand_ins]
    present = [f for f in found if f is not None]
    replaced = iter(replace(present, dict(zip(stand_ins, inputs))))
    return tuple(None if f is None else next(replaced) for f in found)


def _match(gradient: Node, target: Node, node: Node) -> Node:
    """Undo broadcasting and promotion: the gradient gets the shape and dtype of its target, an input of `node`."""
    if gradient.ndim < target.ndim:
        said = f"the gradient rule of {node.op.name!r} returned {gradient.type} for {target.type}"
        raise GradientError(said, fix="return a gradient of the input's shape", site=node.site)
    if gradient.shape != target.shape:
        gradient = sum_to_like(gradient, target)
    return cast_to(gradient, target.dtype)


def recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients through `function` compute its inner values again instead of keeping them (checkpointing).

    T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (3,))
    >>> y = ht.recompute(lambda v: ht.exp(ht.sin(v)))(x)
    >>> ht.gradients(ht.sum(y), [x])[0].shape
    (3,)
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        with tagged(recompute=next(_regions)):
            return function(*args, **kwargs)

    return call
