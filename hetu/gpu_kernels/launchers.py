"""What this room offers: functions that launch kernels for operators, CuPy's products done better, CUDA graphs, passes.

A launcher, `(machine, out, *arrays, **attrs)`, chooses kernel, launch shape and scratch for given arrays, once. It
returns calls without arguments, or None for a layout or dtype that its kernel does not take; CuPy then runs the
operator's own forward function. A file enters it for the operators it computes: `@kernel(relu)`. One that takes 16 bits
where the operator has float32 says so: `@kernel(loss, widens=[0])`. The same function runs under the emulator, so that
launch shapes are proven together with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..core.kernels import Call, Calls, F, Kernels, RoomPass
from .machine import Machine, RecordingMachine

FILES = "channels convolution groups images products random reduce routing rows sparse tables update"


class GpuKernels(Kernels):
    """What a GPU does better than CuPy alone."""

    passes = (
        RoomPass("fuse_norm_relu", "gpu", f"{__package__}.passes.fuse_norm_relu", seeks=["relu"]),
        RoomPass("tile_attention", "gpu", f"{__package__}.passes.tile_attention", seeks=["attention"]),
        RoomPass("absorb_casts", "gpu", f"{__package__}.passes.absorb_casts", last=True, seeks=["astype"]),
        RoomPass("group_updates", "gpu", f"{__package__}.passes.group_updates", last=True),
        RoomPass("group_checks", "gpu", f"{__package__}.passes.group_checks", last=True),
        RoomPass("fuse_kernels", "gpu", f"{__package__}.passes.fuse_kernels", last=True),
    )
    files = tuple(f"{__package__}.{file}" for file in FILES.split())

    def __init__(self) -> None:
        super().__init__()
        self.widening: dict[Any, Sequence[int]] = {}

    def kernel(self, *operators: Any, widens: Sequence[int] = ()) -> Callable[[F], F]:
        """As in any room. The inputs that a kernel `widens` it takes in 16 bits, too, beside others in float32."""
        self.widening.update(dict.fromkeys(operators, widens))
        return super().kernel(*operators)

    def widened(self, op: Any) -> Sequence[int]:
        """The inputs that the kernel of an operator widens, if it has one."""
        return () if self.function(op) is None else self.widening.get(op, ())

    def compiles(self) -> bool:
        return True

    def bound(
        self, op: Any, xp: Any, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any], scratch: Any
    ) -> Calls | None:
        """Launches of a hand-written or generated kernel; those for arrays of NumPy are there to be shown."""
        from .device import gpu

        machine = gpu(xp.cuda.runtime.getDevice()) if hasattr(xp, "cuda") else RecordingMachine()
        return bound(machine, op, out, arrays, attrs)

    def array_module(self, xp: Any) -> Any:
        from .products import with_products

        return with_products(xp)

    def text(self, call: Call) -> str:
        from .source import shown

        kernel: Any = getattr(call, "func", None)
        return shown(kernel.code, kernel.name) if hasattr(kernel, "code") else ""

    def captured(self, xp: Any, calls: Calls, say: Callable[[Any, str], None], obstacle: str) -> Any:
        from .capture import Captured

        return Captured(xp, calls, say, obstacle)

    def architectures(self) -> Sequence[str]:
        from .nvrtc import ARCHITECTURES, available

        return ARCHITECTURES if available() else ()


KERNELS = GpuKernels()
kernel = KERNELS.kernel


def bound(
    machine: Machine, op: Any, out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]
) -> Sequence[Call] | None:
    """Calls that compute the operator into `out` (a tuple for several outputs), or None without a kernel for it."""
    if attrs.get("window") is not None:  # the operator sees a slice of a partitioned axis only
        return None
    attrs = {name: value for name, value in attrs.items() if name != "window"}
    launch = KERNELS.function(op)
    if launch is not None:
        calls: Sequence[Call] | None = launch(machine, out, *arrays, **attrs)
        if calls is None and not all(a.flags.c_contiguous for a in arrays):
            calls = _of_copies(machine, launch, out, arrays, attrs)
        if calls is not None:
            return calls
    from .groups import single

    return single(machine, op, out, arrays, attrs)


def _of_copies(
    machine: Machine, launch: Callable[..., Calls | None], out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]
) -> list[Call] | None:
    """As `launch`, for a kernel that takes no strides: a copy costs less than what CuPy makes of many operators."""
    whole = [a if a.flags.c_contiguous else machine.xp.empty(a.shape, a.dtype) for a in arrays]
    calls = launch(machine, out, *whole, **attrs)
    copies = [partial(machine.xp.copyto, w, a) for w, a in zip(whole, arrays) if w is not a]
    return None if calls is None else [*copies, *calls]
