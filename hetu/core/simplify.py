"""What a graph means, and how it gets smaller without changing that: fold constants, merge equals, drop identities.

Tests compare compiled programs with the plain meaning, by which constants are folded. One walk applies all three to
each node, inputs first, so that one feeds the next. A known zero times what is not known is zero, were that NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from .errors import HetuError, NodeUseError
from .graph import Node, remade, rewrite, topological
from .leaf import constant, filled, filling
from .op import LEAVES, Role, of_shapes
from .types import has_dim

FOLD_LIMIT = 1 << 14  # numbers: larger constants would cost more memory than their computation costs time
UNFOLDED = LEAVES | {Role.ITEM, Role.COMMUNICATION}


def interpret(outputs: Sequence[Node], values: Mapping[Node, Any], xp: ModuleType = np) -> list[Any]:
    """The plain meaning of a graph: every node's forward function, one after the other, nothing reused or updated.

    `values` has those of placeholders and variables, and of any node that should be cut off.
    """
    known: dict[Node, Any] = dict(values)
    for node in topological(outputs):
        if node in values:
            continue
        arrays = [known[i] for i in node.inputs]
        shapes = tuple(t.shape for t in (node.type if isinstance(node.type, tuple) else (node.type,)))
        try:
            if node.op.check_rule:
                node.op.check_rule(xp, *arrays, **node.attrs)
            made = node.op.forward(xp, *arrays, **node.attrs)
            made = made if has_dim(shapes) else of_shapes(shapes, made)
        except HetuError as error:
            raise error.raised_by(node.op.name, node.site) from error.__cause__
        kept = isinstance(made, tuple) or node.dtype.name != "bfloat16"  # of which NumPy makes products in float32
        known[node] = made if kept else xp.asarray(made, dtype=node.dtype)
    return [known[o] for o in outputs]


def simplify(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """The same values from fewer nodes."""
    known: dict[Any, Node] = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node:
        try:
            made = fold(identity(fold(remade(node, inputs))))
        except NodeUseError:  # a constant of a size that is not known yet
            made = remade(node, inputs)
        return known.setdefault(key(made), made)

    return rewrite(outputs, rule)


# -- merging equal nodes (common sub-expressions) ---------------------------------------------------------------


def key(node: Node) -> Any:
    """Equal keys mean equal values: same operator, inputs and attributes. Leaves are equal only to themselves."""
    if node.role is Role.CONSTANT:
        value = node.attrs["value"]
        if value.size and value.strides == (0,) * value.ndim:
            return "constant", value.dtype, value.shape, value.flat[0].tobytes()
        if value.size <= FOLD_LIMIT:
            return "constant", value.dtype, value.shape, value.tobytes()
        return node
    return node if node.role in (Role.PLACEHOLDER, Role.VARIABLE) else (node.op, node.inputs, tuple(node.attrs.items()))


# -- constants ----------------------------------------------------------------------------------------------------


def fold(node: Node) -> Node:
    """A constant for a node of constants, unless it has several outputs, or would be large and not one number."""
    inputs = node.inputs
    if isinstance(node.type, tuple) or node.role in UNFOLDED or not all(i.role is Role.CONSTANT for i in inputs):
        return node
    by_element = inputs and node.op.check_rule is None and not str(node.op.dims).strip(".,->")
    one = by_element and all(filling(i) is not None for i in inputs)
    if not one and node.tensor.size > FOLD_LIMIT:
        return node
    with np.errstate(all="ignore"):
        first = (i.attrs["value"].flat[:1] for i in inputs)
        made = node.op.forward(np, *first, **node.attrs) if one else interpret([node], {})[0]
    value = np.asarray(made, node.dtype)
    alike = value.ndim and value.size and value.tobytes() == value.flat[:1].tobytes() * value.size  # takes no memory
    return filled(node, value.flat[0].item()) if one or alike else constant(value=value)


# -- identities -----------------------------------------------------------------------------------------------------


def identity(node: Node) -> Node:
    """`node`, or what the operator's own rule finds, which has the same value and type."""
    if node.op.like:
        node = without_likes(node)
    made = node.op.simplify_rule(node, *node.inputs) if node.op.simplify_rule else None
    return made if made is not None and made.type == node.type else node


def without_likes(node: Node) -> Node:
    """Inputs that only lend a shape become constants without memory, which nobody waits for; NumPy has none of 2^63."""
    inputs = tuple(
        filled(i, 0) if position in node.op.like and i.role is not Role.CONSTANT and i.tensor.nbytes < 1 << 63 else i
        for position, i in enumerate(node.inputs)
    )
    return remade(node, inputs)
