"""Passes that serve every device, in the order in which they run; each kernel room brings its own.

`sparsify_updates` keeps row updates sparse, `channels_last` lays images out for fast convolution, and
`mixed_precision` computes in 16 bits. `hetu/core/passes.py` has the table that they are entered in.
"""

from __future__ import annotations

from functools import partial

from ..core.kernels import KINDS, room
from ..core.op import Role
from ..core.passes import PASSES, PRECISIONS, Pass, chosen_passes, enter, resolve_training, specialize
from ..core.simplify import simplify
from .channels_last import CONVOLUTIONS, channels_last
from .mixed_precision import mixed_precision
from .sparsify import sparsify_updates

__all__ = [
    "PASSES", "Pass", "channels_last", "chosen_passes", "mixed_precision", "resolve_training", "simplify",
    "sparsify_updates", "specialize",
]  # fmt: skip

enter(sparsify_updates, seeks=[Role.SCATTER])
enter(channels_last, seeks=[op.name for op in CONVOLUTIONS], compiled=True)
for _own in (own for kind in KINDS for own in room(kind).passes):
    enter(_own, _own.before, _own.seeks)
PRECISIONS |= {dtype: partial(mixed_precision, dtype=dtype) for dtype in ("float16", "bfloat16")}
