"""Graph -> Graph passes, in the order the executor applies them: once each, when all sizes are known.

A pass is a pure function of output nodes. Each can be switched off by name (`Executor(passes=...)` or the environment
variable `HETU_PASSES`), and the result must not change. Ignored on purpose: memory, see `memory.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from ..core.errors import UnknownNameError, did_you_mean
from ..core.graph import Node
from ..core.simplify import simplify
from ..core.specialize import specialize
from ..core.training_flag import resolve_training
from ..look.explain import explained
from .absorb_casts import absorb_casts
from .attention import fuse_attention, tile_attention
from .channels_last import channels_last
from .conv_pool import fuse_conv_pool
from .fuse import fuse_linear
from .fuse_elementwise import fuse_elementwise
from .group_casts import group_casts
from .group_checks import group_checks
from .group_updates import group_updates
from .mixed_precision import mixed_precision
from .norm_relu import fuse_norm_relu
from .share import share_cross_entropy, share_gelu, share_layer_norm
from .sparsify import sparsify_updates
from .update import fuse_updates

Pass = Callable[[Sequence[Node]], tuple[Node, ...]]
PASSES: dict[str, Pass] = {
    "simplify": simplify,
    "sparsify_updates": sparsify_updates,
    "fuse_conv_pool": fuse_conv_pool,
    "channels_last": channels_last,
    "fuse_norm_relu": fuse_norm_relu,
    "fuse_attention": fuse_attention,
    "tile_attention": tile_attention,
    "share_gelu": share_gelu,
    "share_layer_norm": share_layer_norm,
    "share_cross_entropy": share_cross_entropy,
    "absorb_casts": absorb_casts,
    "fuse_linear": fuse_linear,
    "fuse_updates": fuse_updates,
    "group_updates": group_updates,
    "group_checks": group_checks,
    "group_casts": group_casts,
    "fuse_elementwise": fuse_elementwise,
}

# Nothing sees into what these make, so what a placement does to a rank's graph comes before them.
LAST = (group_updates, group_checks, group_casts, fuse_elementwise)

# What the others make is bound to BLAS and NumPy; elsewhere the plain operators are the faster ones.
FOR_GPU = frozenset(
    {"tile_attention", "absorb_casts", "group_updates", "group_checks", "group_casts", "fuse_elementwise"}
)
FOR_CPU = frozenset(PASSES) - FOR_GPU - {"simplify", "sparsify_updates", "channels_last", "fuse_norm_relu"}


def chosen_passes(names: Iterable[str] | None, device: str = "cpu") -> list[Pass]:
    """The passes called `names`, in their proper order; None means `$HETU_PASSES` (comma-separated), else all.

    Without a name those for another kind of `device` are left out.
    """
    if names is None:
        setting = os.environ.get("HETU_PASSES")
        elsewhere = FOR_GPU if device == "cpu" else FOR_CPU
        kept = [n for n in PASSES if n not in elsewhere]
        names = kept if setting is None else [n for n in setting.split(",") if n]
    wanted = list(names)
    for name in wanted:
        if name not in PASSES:
            raise UnknownNameError(f"there is no pass {name!r}", fix=did_you_mean(name, PASSES))
    return [run for name, run in PASSES.items() if name in wanted]
