"""Let softmax cross entropies read logits of 16 bits, without a cast before them.

Only for GPUs, in mixed precision. A loss keeps float32, while products give 16 bits: the kernel widens what it reads on
the way. Widening is exact, so no number changes. What groups compute, the gradient of the loss too, has casts among its
lines.

Gain: a tenth of the bytes of a step of GPT-2 small, as counted; `examples/benchmarks/gpu_counts.py` counts them. Off by
leaving `absorb_casts` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.graph import OPS, Node, rewrite
from ...passes.mixed_precision import is_cast


def absorb_casts(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`softmax_cross_entropy(astype(x, float32), labels)` becomes `softmax_cross_entropy(x, labels, dtype=float32)`."""

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op is not OPS["softmax_cross_entropy"] or not is_cast(inputs[0], 2, 4):
            return None
        wide = inputs[0].dtype.name
        return node.op.make((inputs[0].inputs[0], *inputs[1:]), {**node.attrs, "dtype": wide})

    return rewrite(outputs, rule)
