"""Turn the update of a whole table into an update of the rows that a batch touched.

The gradient of an embedding lookup is dense in meaning: `scatter_rows(table, ids, g)`. Where an optimizer is its only
reader, the dense table is never made. Gradients that are clipped by a global norm or decayed stay dense.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..core.graph import OPS, Node, rewrite, topological
from ..core.op import Role


def sparsify_updates(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """Replace `update(p, ..., scatter_rows(p, ids, g), ...)` by the row form of the update.

    Plain SGD and AdaGrad give the same values either way. Rules with momentum become lazy: only touched rows and
    their optimizer state move, as in `torch.optim.SparseAdam`.
    """
    readers = Counter(i for node in topological(outputs) for i in node.inputs)
    readers.update(outputs)

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        made = None
        if node.op.ufunc == "add":
            made = _merged(node, inputs, readers)
        elif (update := node.op.update) is not None:
            gradient = inputs[update.tables]
            if gradient.role is Role.SCATTER and readers[node.inputs[update.tables]] == 1 and not update.of(node).whole:
                old, _, scalars = update.split(inputs)
                made = update.rows.make((*old, *gradient.inputs[1:], *scalars), {**node.attrs, "window": None})
        return made

    return rewrite(outputs, rule)


def _merged(node: Node, inputs: tuple[Node, ...], readers: Counter[Node]) -> Node | None:
    """The sum of two gradients of one table (looked up twice) is one gradient of all the rows."""
    one, other = inputs
    if not all(new.role is Role.SCATTER and readers[old] == 1 for new, old in zip(inputs, node.inputs)):
        return None
    if one.op is not other.op or one.attrs != other.attrs or one.inputs[0].type != other.inputs[0].type:
        return None
    (table, ids, rows), (_, more_ids, more_rows) = one.inputs, other.inputs
    width = rows.shape[ids.ndim :]
    flat = [OPS["reshape"](i, shape=(-1,)) for i in (ids, more_ids)]
    flat_rows = [OPS["reshape"](r, shape=(-1, *width)) for r in (rows, more_rows)]
    joined = OPS["concat"](*flat, axis=0), OPS["concat"](*flat_rows, axis=0)
    return one.op.make((table, *joined), one.attrs)
