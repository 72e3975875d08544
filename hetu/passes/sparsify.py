"""Turn the update of a whole table into an update of the rows that a batch touched.

The gradient of an embedding lookup is dense in meaning: `scatter_rows(table, ids, g)`. Where an optimizer is its only
reader, the dense table is never made: what it is multiplied by, such as the inverse of a loss scale, goes to the rows.
Where others read it too, such as the norm that it is clipped by, or where each number is clipped, it is made, and the
rows change that were looked up. A decayed gradient is one of all rows, and stays so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..core.graph import OPS, Node, origin_of, readers_of, rewrite, topological
from ..core.op import Role
from ..ops.composition import acts_on_elements
from ..ops.update import UpdateRule


def sparsify_updates(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """Replace `update(p, ..., scatter_rows(p, ids, g), ...)` by the row form of the update.

    Plain SGD and AdaGrad give the same values either way. Rules with momentum become lazy: only touched rows and
    their optimizer state move, as in `torch.optim.SparseAdam`. So they are under a condition, as of a loss scale.
    """
    outputs = rewrite(outputs, _merged)
    readers = readers_of(topological(outputs), outputs)
    guarded: dict[tuple[Node, Node], Node] = {}

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op is OPS["where"]:
            return _guarded(inputs, guarded)
        update = node.op.update
        if update is None or not (way := _way(node.inputs[update.tables])) or update.of(node).whole:
            return None
        return _on_rows(update, node, inputs, alone=all(len(readers[n]) == 1 for n in way))

    return rewrite(outputs, rule)


def _way(gradient: Node) -> list[Node]:
    """The operators from a gradient to the scattered rows that it follows from; none unless it is 0 where these are."""
    way = [gradient]
    while (node := way[-1]).role is not Role.SCATTER:
        arrays = [i for i in node.inputs if i.ndim] if acts_on_elements(node.op) else []
        if len(arrays) != 1 or not (_is_linear(node) or _keeps_zero(node)):
            return []
        way += arrays
    return way


def _is_linear(node: Node) -> bool:
    """Whether an operator of one array and scalars multiplies the array by a number."""
    return any(isinstance(k, int) and node.inputs[k].ndim for k in node.op.linear)


def _keeps_zero(node: Node) -> bool:
    """Whether an operator of one array and numbers makes 0 of 0."""
    known = [np.zeros(1, i.dtype) if i.ndim else i.attrs.get("value") for i in node.inputs]
    return all(k is not None for k in known) and not node.op.forward(np, *known, **node.attrs).any()


def _on_rows(update: UpdateRule, node: Node, inputs: tuple[Node, ...], *, alone: bool) -> Node:
    """The update of the rows that were looked up, whose gradient nothing else reads if it is read `alone`."""
    old, gradient, scalars = update.split(inputs)
    *way, scattered = _way(gradient)
    _, ids, rows = scattered.inputs
    if not alone or not all(map(_is_known, way)):
        return update.on_counts(node, old, gradient, ids, scalars)
    with origin_of(node, gradient=True, update=False):
        for step in reversed(way):
            rows = step.op.make(tuple(rows if i.ndim else i for i in step.inputs), step.attrs)
    return update.rows.make((*old, ids, rows, *scalars), {**node.attrs, "window": None})


def _is_known(node: Node) -> bool:
    """Whether an operator multiplies an array by a number that is there before any gradient."""
    numbers = topological([i for i in node.inputs if not i.ndim])
    return _is_linear(node) and not any(n.tags.get("gradient") for n in numbers)


def _guarded(inputs: tuple[Node, ...], made: dict[tuple[Node, Node], Node]) -> Node | None:
    """`where(condition, new, old)` of a table whose rows are updated, as an update that happens under the condition."""
    condition, new, old = inputs
    updated, place = (new.inputs[0], new.attrs["index"]) if new.role is Role.ITEM else (new, 0)
    rule = updated.op.row_update
    if rule is None or condition.ndim or updated.inputs[place] is not old:
        return None
    if (updated, condition) not in made:
        scalars = (*updated.inputs, OPS["astype"](condition, dtype="float64"))
        made[updated, condition] = rule.guarded.rows.make(scalars, updated.attrs)
    both = made[updated, condition]
    return OPS["item"](both, index=place) if rule.states else both


def _merged(node: Node, inputs: tuple[Node, ...]) -> Node | None:
    """The sum of two gradients of one table (looked up twice) is one gradient, of all the rows or of sums of them."""
    if node.op.ufunc != "add" or not all(i.role is Role.SCATTER for i in inputs):
        return None
    one, other = inputs
    if one.op is not other.op or one.attrs != other.attrs or one.inputs[0].type != other.inputs[0].type:
        return None
    (table, ids, rows), (_, more_ids, more_rows) = one.inputs, other.inputs
    if ids is more_ids:
        return one.op.make((table, ids, rows + more_rows), one.attrs)
    if ids.dtype != more_ids.dtype:
        ids, more_ids = (OPS["astype"](i, dtype="int64") for i in (ids, more_ids))
    width = rows.shape[ids.ndim :]
    flat = [OPS["reshape"](i, shape=(-1,)) for i in (ids, more_ids)]
    flat_rows = [OPS["reshape"](r, shape=(-1, *width)) for r in (rows, more_rows)]
    joined = OPS["concat"](*flat, axis=0), OPS["concat"](*flat_rows, axis=0)
    return one.op.make((table, *joined), one.attrs)
