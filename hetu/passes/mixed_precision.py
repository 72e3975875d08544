"""Compute in 16-bit floats, keep variables and their updates in float32, and scale the loss so that gradients survive.

P. Micikevicius et al., "Mixed Precision Training", ICLR 2018. Products (matrices, convolutions, attention) take 16-bit
operands; what moves or gates values follows its operands, as do the images of a batch norm, beside vectors in float32;
all else, such as sums, other norms, losses and updates, keeps float32, whose kernels may read 16 bits without a cast
(`absorb_casts.py`). For float16 the gradient starts from `loss_scale`, a variable, instead of 1. If a gradient
overflows, the step changes no other variable and halves the scale; after `PATIENCE` good steps in a row it doubles. All
of that is part of the graph, so nothing waits for the host and a checkpoint holds it. Left out: 8-bit floats; float64
values; leaves beyond 65,504 that are added where the sum is not at once read in float32, as it is by a softmax: in
float16 they are infinite.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from ..core.graph import OPS, Node, readers_of, replace, rewrite, tagged, topological
from ..core.leaf import filled, filling, stand_in, variable
from ..core.op import LEAVES, Role
from ..core.types import is_float
from ..ops.linalg import matrix_transpose, permute_dims

FIRST_SCALE, MOST = 2.0**15, 2.0**24
PATIENCE = 2000  # good steps before the scale doubles
SINGLE = np.dtype("float32")
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120}  # numbers

loss_scale: Node = variable("loss_scale", FIRST_SCALE, (), trainable=False)
good_steps: Node = variable("loss_scale/good_steps", 0, (), "int64", trainable=False)


def mixed_precision(
    fetches: Sequence[Node], updates: Mapping[Node, Node], gradients: Sequence[Node], dtype: str
) -> tuple[tuple[Node, ...], dict[Node, Node]]:
    """Fetches and updates that compute in `dtype`, float16 or bfloat16; `gradients` are those that the updates apply.

    Their types stay what they were.

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (2, 3)), ht.variable("w", 0.0, (3, 4))
    >>> (y,), _ = mixed_precision([x @ w], {}, [], "float16")
    >>> y.dtype.name, y.inputs[0].dtype.name
    ('float32', 'float16')
    """
    seeds = _seeds(gradients) if dtype == "float16" else set()
    # Updates are cut off at the gradients, which are not touched before they are whole again.
    stubs = {g: stand_in(f"gradient{k}", g.tensor) for k, g in enumerate(gradients)}
    above = replace((*fetches, *updates.values()), stubs)
    made = _lowered((*above, *stubs), dtype, seeds)
    above, whole = made[: len(above)], made[len(above) :]
    with tagged(update=True):  # as what an optimizer computes
        scaled = whole
        if seeds:
            whole = tuple(g / OPS["astype"](loss_scale, dtype=g.dtype) for g in whole)
        outputs = replace(above, dict(zip(stubs.values(), whole)))
        values = dict(zip(updates, outputs[len(fetches) :]))
        return outputs[: len(fetches)], _guarded(values, scaled, whole) if seeds and values else values


def _seeds(gradients: Sequence[Node]) -> set[Node]:
    """Where backward starts: the 1 that each loss is differentiated with. Gradients inside of a loss have their own."""
    ones = [n for n in topological(gradients) if n.op is OPS["ones_like"] and not n.ndim and n.tags.get("gradient")]
    return {*ones} - {*topological([n.inputs[0] for n in ones])}


def _rows(gradient: Node) -> list[Node]:
    """The gradients of rows that are scattered and added to that of a table; none if anything else is in it."""
    if gradient.role is Role.SCATTER:
        return [i for k, i in enumerate(gradient.inputs) if k in gradient.op.linear]
    terms = [*map(_rows, gradient.inputs)] if gradient.op.ufunc == "add" else []
    return [row for rows in terms for row in rows] if all(terms) else []


def _guarded(updates: Mapping[Node, Node], scaled: Sequence[Node], gradients: Sequence[Node]) -> dict[Node, Node]:
    """Updates that keep the old values if a gradient is not finite, and those of the scale.

    Of the gradient of a table the `scaled` rows are asked, so that the whole of it need not be made. Their sums, in
    float32, overflow only where training in float32 would.
    """
    where, at_least, at_most = OPS["where"], OPS["maximum"], OPS["minimum"]
    asked = [OPS["all"](OPS["isfinite"](g)) for g, s in zip(gradients, scaled) if not _rows(s)]
    with tagged(gradient=True, update=False):  # counted for each micro-batch, and added up as gradients are
        lost = [OPS["sum"](OPS["astype"](~OPS["isfinite"](row), dtype="float32")) for s in scaled for row in _rows(s)]
    finite: Node = reduce(operator.and_, asked + [OPS["equal"](n, 0.0) for n in lost])
    steps = good_steps + 1
    grown = where(OPS["greater_equal"](steps, PATIENCE), at_most(loss_scale * 2.0, MOST), loss_scale)
    kept = {v: where(finite, value, v) for v, value in updates.items()}
    kept[loss_scale] = where(finite, grown, at_least(loss_scale * 0.5, 1.0))
    kept[good_steps] = where(finite & (steps < PATIENCE), steps, 0)
    return kept


def _lowered(outputs: Sequence[Node], dtype: str, seeds: set[Node]) -> tuple[Node, ...]:
    readers = readers_of(topological(outputs), outputs).items()
    widened = {node for node, found in readers if all(r is None or r.op.precision == "wide" for r in found)}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if not inputs or node.role is Role.ITEM or node.op is OPS["astype"]:
            return None
        old = [i.dtype if not isinstance(i.type, tuple) else None for i in node.inputs]
        free = [k for k, d in enumerate(old) if d == SINGLE and k not in node.op.like]
        chosen = [k for k in free if isinstance(node.op.precision, str) or k in node.op.precision]
        low = dtype if _is_low(node, [inputs[k] for k in chosen], node in widened) else "float32"
        cast = tuple(_as(i, low if k in chosen else "float32") if k in free else i for k, i in enumerate(inputs))
        made = node if cast == node.inputs else node.op.make(cast, node.attrs)
        return made * loss_scale if node in seeds else made

    return tuple(_as(new, old.dtype.name) for new, old in zip(rewrite(outputs, rule), outputs))


def _is_low(node: Node, inputs: Sequence[Node], widened: bool) -> bool:
    """Whether an operator computes in 16 bits, given those of its float32 operands that may become so.

    One that is `widened`, as all its readers compute in float32, rounds nothing that is not trained: masks are large.
    """
    if node.op.precision in ("low", "wide"):
        return node.op.precision == "low"
    if node.op.precision != "follow":
        return bool(inputs) and inputs[-1].dtype != SINGLE
    if widened and any(i.role in LEAVES and filling(i) is None and not i.attrs.get("trainable") for i in inputs):
        return False
    computed = [i for i in inputs if i.role not in LEAVES]
    return bool(computed) and all(i.dtype != SINGLE for i in computed)


def _as(node: Node, dtype: str) -> Node:
    if isinstance(node.type, tuple) or node.dtype.name == dtype:
        return node
    # Below views that a product reads, so that a weight and its transpose share one cast, as do rows and their batch.
    if node.op in (matrix_transpose, permute_dims) or (node.op is OPS["reshape"] and dtype != "float32"):
        return node.op.make((_as(node.inputs[0], dtype),), node.attrs)
    number = filling(node) if dtype in LARGEST else None
    if number is not None and LARGEST[dtype] < abs(number) < math.inf:  # such as what hides a key
        node = filled(node, math.copysign(LARGEST[dtype], number))
    return OPS["astype"](node, dtype=dtype)


def is_cast(node: Node, old: int, new: int) -> bool:
    """Whether it makes floats of `new` bytes of those of `old`."""
    if node.op is not OPS["astype"]:
        return False
    return [d.itemsize for d in (node.inputs[0].dtype, node.dtype) if is_float(d)] == [old, new]
