"""Let norms, softmax cross entropies and their gradients read and write 16 bits, without casts around them.

Only for GPUs, in mixed precision. A residual stream and a loss keep float32, while products take and give 16 bits: a
kernel widens what it reads and rounds what it writes on the way. Widening is exact and rounding the same, so no number
changes. A result that another operator reads in float32 stays as it is.

Gain: a step of GPT-2 small takes 1.09 times as long without, on an H100. Off by leaving `absorb_casts`
out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.graph import OPS, Node, Readers, readers_of, rewrite, topological
from ...core.op import Op
from ...core.types import is_float
from ...passes.mixed_precision import SINGLE, is_cast

# Inputs that may be stored in 16 bits, and whether the first result may; all other floats are in float32.
KERNELS: dict[Op[..., Any], tuple[tuple[int, ...], bool]] = {
    OPS["layer_norm"]: ((0,), True),
    OPS["layer_norm_dx"]: ((0, 1), True),
    OPS["rms_norm"]: ((0,), True),
    OPS["rms_norm_dx"]: ((0, 1), True),
    OPS["softmax_cross_entropy"]: ((0,), False),
    OPS["softmax_cross_entropy_dx"]: ((1,), True),
}


def absorb_casts(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`astype(layer_norm(astype(x, float32), scale, bias), low)` becomes `layer_norm(x, scale, bias, dtype=low)`."""
    readers = readers_of(topological(outputs), outputs)

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op is OPS["astype"] and inputs[0].dtype == node.dtype:
            return inputs[0]
        places, rounds = KERNELS.get(node.op, ((), False))
        others = (i.dtype for k, i in enumerate(inputs) if k not in places)
        if not places or any(is_float(d) and d != SINGLE for d in others):
            return None
        read = tuple(i.inputs[0] if k in places and is_cast(i, 2, 4) else i for k, i in enumerate(inputs))
        dtype = _wanted(node, readers) if rounds else None
        if read == inputs and dtype is None:
            return None
        own = node.type[0] if isinstance(node.type, tuple) else node.type
        return node.op.make(read, {**node.attrs, "dtype": dtype or own.dtype.name})

    return rewrite(outputs, rule)


def _wanted(node: Node, readers: Readers) -> str | None:
    """The dtype of 16 bits to which all readers of the first result cast it."""
    parts = isinstance(node.type, tuple)
    results = [r for r in readers[node] if r is not None and r.attrs["index"] == 0] if parts else [node]
    found = {r.dtype.name if r is not None and is_cast(r, 4, 2) else None for n in results for r in readers[n]}
    return found.pop() if len(found) == 1 else None
