"""Let kernels read 16 bits in the place of float32, without a cast before them, where they say that they widen.

Only for GPUs, in mixed precision. A loss keeps float32, while products give 16 bits: its kernel widens what it reads on
the way. Widening is exact, so no number changes. What groups compute, the gradient of the loss too, has casts among its
lines.

Gain: a tenth of the bytes of a step of GPT-2 small, as counted; `examples/benchmarks/gpu_counts.py` counts them. Off by
leaving `absorb_casts` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

from ...core.graph import Node, rewrite
from ...core.op import Op
from ...core.types import TensorType
from ...passes.mixed_precision import SINGLE, is_cast
from ..launchers import KERNELS, kernel


def absorb_casts(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`f(astype(x, float32))` becomes an `f` that reads x itself, where the kernel of `f` says that it `widens` it."""

    def rule(node: Node, inputs: tuple[Node, ...]) -> Node | None:
        casts = tuple(k for k in KERNELS.widened(node.op) if is_cast(inputs[k], 2, 4))
        if not casts:
            return None
        read = tuple(i.inputs[0] if k in casts else i for k, i in enumerate(inputs))
        return _reading(node.op, casts, KERNELS.function(node.op)).make(read, node.attrs)

    return rewrite(outputs, rule)


@cache
def _reading(op: Op[..., Any], casts: tuple[int, ...], own: Any) -> Op[..., Any]:
    """The operator with those casts of its inputs inside, computed by its `own` kernel."""

    def forward(xp: ModuleType, *arrays: Any, **attrs: Any) -> Any:
        return op.forward(xp, *(xp.astype(a, xp.float32) if k in casts else a for k, a in enumerate(arrays)), **attrs)

    def infer(*types: TensorType, **attrs: Any) -> Any:
        return op.infer(*(TensorType(t.shape, SINGLE) if k in casts else t for k, t in enumerate(types)), **attrs)

    made: Op[..., Any] = Op(forward, name=op.name, infer=infer, dims=op.dims, differentiable=False)
    made.check_rule, made.ranges_rule = op.check_rule, op.ranges_rule
    kernel(made)(own)
    return made
