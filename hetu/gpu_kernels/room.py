"""What this room offers to the rest of hetu: its kernels, CuPy's products done better, steps as CUDA graphs, passes.

No kernel is loaded before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..core.kernels import Calls, Kernels, RoomPass
from . import launchers


class GpuKernels(Kernels):
    """What a GPU does better than CuPy alone."""

    passes = (
        RoomPass("fuse_norm_relu", "gpu", f"{__package__}.passes.fuse_norm_relu", seeks=["relu"]),
        RoomPass("tile_attention", "gpu", f"{__package__}.passes.tile_attention", seeks=["attention"]),
        RoomPass("absorb_casts", "gpu", f"{__package__}.passes.absorb_casts"),
        RoomPass("group_updates", "gpu", f"{__package__}.passes.group_updates", last=True),
        RoomPass("group_checks", "gpu", f"{__package__}.passes.group_checks", last=True),
        RoomPass("group_casts", "gpu", f"{__package__}.passes.group_casts", last=True),
        RoomPass("fuse_elementwise", "gpu", f"{__package__}.passes.fuse_elementwise", last=True),
    )

    def bound(
        self, op: Any, xp: Any, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any], scratch: Any
    ) -> Calls | None:
        """Launches of a hand-written or generated kernel."""
        from .device import gpu

        machine = gpu(xp.cuda.runtime.getDevice())
        known = {"cuda": op.cuda, "inputs": op.inputs, "update": op.update, "row_update": op.row_update}
        return launchers.bound(machine, op.name, out, arrays, attrs, **known)

    def array_module(self, xp: Any) -> Any:
        from .products import with_products

        return with_products(xp)

    def captured(self, xp: Any, calls: Calls, say: Callable[[Any, str], None], obstacle: str) -> Any:
        from .capture import Captured

        return Captured(xp, calls, say, obstacle)

    def architectures(self) -> Sequence[str]:
        from .nvrtc import ARCHITECTURES, available

        return ARCHITECTURES if available() else ()


KERNELS = GpuKernels()
