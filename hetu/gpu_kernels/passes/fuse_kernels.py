"""Put elementwise operators, and folds of what they make, into groups that a GPU computes by one kernel each.

Pattern: neighbors that a form can hold, see `hetu/fuse/`; operators with a kernel of their own stay whole. The values
do not change, as every line keeps its dtype; only sums are added in another order. Gain: without,
a step takes 1.18 times as long (GPT-2 small, on an H100), 1.06 (ResNet-18) or 1.04 (an MLP). Off by leaving
`fuse_kernels` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.graph import Node
from ...core.op import Op
from ...fuse.group import fuse
from ...fuse.unit import Limits
from ..groups import cut, launched
from ..launchers import KERNELS, kernel
from ..source import CTYPES

NARROW = 32  # numbers: shorter rows leave threads of a warp without work
SMALL = 1 << 18  # numbers: below, a launch takes longer than the work
LIMITS = Limits(
    dtypes=frozenset(CTYPES),
    folded="fbiuV",
    draws=True,
    across=False,
    some=True,
    lines=24,  # beyond, a thread runs out of registers
    arrays=10,
    results=6,
    small=SMALL,
    whole=lambda node: _has_kernel(node),
    folds=lambda rows, columns: columns >= NARROW or rows * columns <= SMALL // NARROW,
    waits=lambda rows, columns: cut(rows, columns) == 1,
)


def _has_kernel(node: Node) -> bool:
    """Whether it has one of its own, as rules that need whole parameters have not."""
    update = node.op.update
    return KERNELS.function(node.op) is not None and (update is None or not update.of(node).whole)


def fuse_kernels(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """Groups of two or more elementwise operators and reductions become one kernel each."""
    return fuse(outputs, LIMITS, _entered)


def _entered(group: Op[..., Any]) -> None:
    kernel(group)(launched)
