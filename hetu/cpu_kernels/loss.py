"""Cross entropy that makes its gradient in the same passes, from the same exponentials.

Left out: probabilities as targets.

Pattern: `softmax_cross_entropy` and its gradient under a constant one. Gain: 1.07 on a GPT, where the noise is 0.08.
Off by leaving `share_cross_entropy` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.graph import OPS, Node, topological
from ..core.kernels import Call
from ..core.op import op
from ..core.types import TensorType
from ..ops.loss import check_class_ids, cross_entropy_of_ids, softmax_cross_entropy_dx
from .cross_entropy import exponentials, losses, picked, row_maxima, row_wise
from .share import share


def _slope_type(g: TensorType, logits: TensorType, labels: TensorType, **_: Any) -> tuple[TensorType, ...]:
    rows = TensorType(logits.shape[:-1], logits.dtype)
    return rows, rows, logits


@op(infer=_slope_type, inplace={2: (1,)}, differentiable=False)
def cross_entropy_slope(
    xp: ModuleType, g: Any, logits: Any, labels: Any, *, ignore_index: int | None = None, label_smoothing: float = 0.0
) -> tuple[Any, Any, Any]:
    """(loss, log(sum(exp(row))), gradient of the logits) for class ids, given the gradient g of each row's loss.

    >>> import hetu as ht
    >>> loss, _, dx = cross_entropy_slope([2.0], [[0.0, 0.0]], np.array([1]))
    >>> round(float(ht.evaluate(loss)[0]), 4), ht.evaluate(dx).tolist()
    (0.6931, [[1.0, -1.0]])
    """
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss, total = cross_entropy_of_ids.forward(xp, logits, labels, **options)
    return loss, total, softmax_cross_entropy_dx.forward(xp, g, logits, labels, total, **options)


@cross_entropy_slope.check
def cross_entropy_slope_check(
    xp: ModuleType, g: Any, logits: Any, labels: Any, *, ignore_index: int | None, **_: Any
) -> None:
    check_class_ids(labels, logits.shape[-1], ignore_index)


cross_entropy_slope.ranges(lambda g, logits, labels, **_: [(labels, logits.shape[-1], "class id")])


@cross_entropy_slope.bind
def cross_entropy_slope_bind(
    xp: ModuleType, out: Any, g: Any, logits: Any, labels: Any, *, ignore_index: int | None, label_smoothing: float
) -> list[Call] | None:
    """Rows are taken by flat position; without smoothing and skipped rows that is all there is to do."""
    plain = xp is np and not label_smoothing and ignore_index is None and logits.dtype.char in "fd"
    if not plain or not all(a.flags.c_contiguous for a in (*out, logits, labels)) or not logits.size:
        return None
    rows, slope, ids = logits.reshape(-1, logits.shape[-1]), out[2].reshape(-1, logits.shape[-1]), labels.reshape(-1)
    loss, total = (o.reshape(-1) for o in out[:2])
    top, own, scale = (np.empty_like(loss) for _ in range(3))
    places, picks = picked(rows, ids, own)
    flat, below = slope.reshape(-1), scale.reshape(g.shape)
    return [
        *picks,
        *row_maxima(rows, top),
        *exponentials(rows, top, slope, total),
        partial(np.divide, g, out[1], below),
        *row_wise(np.multiply, slope, scale, slope),
        partial(flat.take, places, None, scale, "clip"),
        partial(np.subtract, below, g, below),
        partial(flat.put, places, scale, "clip"),
        *losses(total, top, own, loss),
    ]


def share_cross_entropy(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`softmax_cross_entropy` makes its gradient too, where what scales that is a constant, as under a mean."""
    nodes = topological(outputs)
    pairs: dict[Node, Node] = {}
    scales: dict[Node, Node] = {}
    for n in nodes:
        if n.op.name != "softmax_cross_entropy_dx" or n.inputs[3].op.name != "item":
            continue
        loss = n.inputs[3].inputs[0]
        same = loss.op.name == "softmax_cross_entropy" and loss.inputs == n.inputs[1:3]
        same = same and n.attrs.get("window") is None and all(n.attrs[k] == v for k, v in loss.attrs.items())
        same = same and loss.attrs["dtype"] is None
        if same and n.inputs[0].op.name == "constant" and loss not in scales:
            pairs[n], scales[loss] = loss, n.inputs[0]
    return share(
        outputs,
        pairs,
        lambda node, inputs: cross_entropy_slope.make(
            (scales[node], *inputs), {k: v for k, v in node.attrs.items() if k != "dtype"}
        ),
        lambda both, inputs: OPS["item"](both, index=2),
    )
