"""What a graph means, and how it gets smaller without changing that: fold constants, merge equals, drop identities.

Tests compare compiled programs with the plain meaning, and constants are folded with it. One walk applies all three
simplifications to each node, inputs first, so that one feeds the next. Unused nodes disappear by themselves: graphs
hold only what their outputs reach. A known zero times NaN or infinity counts as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from .errors import HetuError
from .graph import OPS, Node, rewrite, topological
from .op import LEAVES, Role
from .types import is_float

FOLD_LIMIT = 1 << 16  # bytes: larger constants would cost more memory than their computation costs time
UNFOLDED = LEAVES | {Role.ITEM, Role.COMMUNICATION}
Identity = Callable[[Node, tuple[Node, ...]], "Node | None"]
IDENTITIES: dict[str, Identity] = {}


def interpret(outputs: Sequence[Node], values: Mapping[Node, Any], xp: ModuleType = np) -> list[Any]:
    """The plain meaning of a graph: every node's forward function, one after the other, nothing reused or updated.

    `values` has those of placeholders and variables, and of any node that should be cut off.
    """
    known: dict[Node, Any] = dict(values)
    for node in topological(outputs):
        if node in values:
            continue
        arrays = [known[i] for i in node.inputs]
        if node.op.check_rule:
            try:
                node.op.check_rule(xp, *arrays, **node.attrs)
            except HetuError as error:
                raise error.raised_by(node.op.name, node.site) from error.__cause__
        known[node] = node.op.forward(xp, *arrays, **node.attrs)
    return [known[o] for o in outputs]


def simplify(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """The same values from fewer nodes."""
    known: dict[Any, Node] = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node:
        made = node if inputs == node.inputs else node.op.make(inputs, node.attrs)
        made = identity(made)
        made = fold(made)
        return known.setdefault(key(made), made)

    return rewrite(outputs, rule)


# -- merging equal nodes (common sub-expressions) ---------------------------------------------------------------


def key(node: Node) -> Any:
    """Equal keys mean equal values: same operator, inputs and attributes. Leaves are equal only to themselves."""
    if node.role is Role.CONSTANT:
        value = node.attrs["value"]
        if value.size and value.strides == (0,) * value.ndim:
            return "constant", value.dtype.name, value.shape, value.flat[0].tobytes()
        if value.nbytes <= FOLD_LIMIT:
            return "constant", value.dtype.name, value.shape, value.tobytes()
        return node
    if node.role in (Role.PLACEHOLDER, Role.VARIABLE):
        return node
    return node.op, node.inputs, tuple(node.attrs.items())


# -- constants ----------------------------------------------------------------------------------------------------


def fold(node: Node) -> Node:
    """A constant for a node of constants, unless it would be large or have several outputs."""
    if isinstance(node.type, tuple) or node.role in UNFOLDED:
        return node
    if not all(i.role is Role.CONSTANT for i in node.inputs):
        return node
    if node.op.name == "full":  # all elements share one place in memory, so size does not matter
        return filled(node, node.attrs["fill_value"])
    if node.tensor.nbytes > FOLD_LIMIT:
        return node
    with np.errstate(all="ignore"):
        return OPS["constant"](value=np.asarray(interpret([node], {})[0], node.dtype))


def filled(like: Node, value: float) -> Node:
    """A constant of the type of `like`, which takes no memory."""
    array = np.broadcast_to(np.asarray(value, like.dtype), tuple(map(int, like.shape)))
    return OPS["constant"].make((), {"value": array})


def filling(node: Node) -> float | None:
    """The number that every element is known to be, if there is one."""
    if node.role is Role.CONSTANT:
        array = node.attrs["value"]
        uniform = array.size > 0 and (array.size == 1 or array.strides == (0,) * array.ndim)
        return array.flat[0].item() if uniform else None
    return node.attrs["fill_value"] if node.op.name == "full" else None


def is_filled(node: Node, value: float) -> bool:
    """Whether every element is known to be `value`."""
    return filling(node) == value


# -- identities -----------------------------------------------------------------------------------------------------


def identity(node: Node) -> Node:
    """`node`, or the simpler node that has the same value and type."""
    if node.op.like:
        node = without_likes(node)
    rule = IDENTITIES.get(node.op.name)
    made = rule(node, node.inputs) if rule else None
    return made if made is not None and made.type == node.type else node


def without_likes(node: Node) -> Node:
    """Inputs that lend only their shape become constants without memory, so that nothing is kept alive for them."""
    inputs = tuple(
        filled(i, 0) if position in node.op.like and i.role is not Role.CONSTANT else i
        for position, i in enumerate(node.inputs)
    )
    return node if inputs == node.inputs else node.op.make(inputs, node.attrs)


def _identity(*names: str) -> Callable[[Identity], Identity]:
    def enter(rule: Identity) -> Identity:
        IDENTITIES.update(dict.fromkeys(names, rule))
        return rule

    return enter


@_identity("zeros_like")
def _zeros_like(node: Node, inputs: tuple[Node, ...]) -> Node:
    return filled(node, 0)


@_identity("ones_like")
def _ones_like(node: Node, inputs: tuple[Node, ...]) -> Node:
    return filled(node, 1)


@_identity("add")
def _add(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    a, b = inputs
    if is_filled(b, 0):
        return a
    return b if is_filled(a, 0) else None


@_identity("subtract")
def _subtract(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    a, b = inputs
    if is_filled(b, 0):
        return a
    return OPS["negative"](b) if is_filled(a, 0) else None


@_identity("multiply")
def _multiply(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    for a, b in (inputs, inputs[::-1]):
        if is_filled(b, 0):
            return filled(node, 0)
        if is_filled(b, 1):
            return a
    return None


@_identity("divide")
def _divide(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    a, b = inputs
    if is_filled(b, 1):
        return a
    return filled(node, 0) if is_filled(a, 0) else None


@_identity("matmul")
def _matmul(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    return filled(node, 0) if any(is_filled(i, 0) for i in inputs) else None


@_identity("negative", "matrix_transpose")
def _involution(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    (x,) = inputs
    if x.op is node.op:
        return x.inputs[0]
    return filled(node, 0) if is_filled(x, 0) else None


@_identity("where")
def _where(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    condition, a, b = inputs
    if is_filled(condition, True):
        return a
    return b if is_filled(condition, False) else None


@_identity(
    "reshape", "broadcast_to", "broadcast_like", "sum_to_like", "astype", "expand_dims", "squeeze", "permute_dims"
)
def _movement(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    x = inputs[0]
    if node.op.name == "reshape" and x.op.name == "reshape":
        (first,) = x.inputs
        return first if first.type == node.type else OPS["reshape"](first, shape=node.shape)
    if node.op.name == "astype" and x.op.name == "astype" and _holds(x.dtype, x.inputs[0].dtype):
        (first,) = x.inputs
        return first if first.type == node.type else OPS["astype"](first, dtype=node.dtype.name)
    if x.type == node.type and node.attrs.get("axes", ()) == tuple(range(len(node.attrs.get("axes", ())))):
        return x
    value = filling(x)
    if value is None or (node.op.name == "sum_to_like" and value):
        return None
    return filled(node, value)


def _holds(wide: np.dtype, dtype: np.dtype) -> bool:
    """Whether every float of a dtype is one of another."""
    return is_float(dtype) and np.can_cast(dtype, wide)


@_identity("sum")
def _sum(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    (x,) = inputs
    if is_filled(x, 0):
        return filled(node, 0)
    return x if not node.attrs["axis"] else None
