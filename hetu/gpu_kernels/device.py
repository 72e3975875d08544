"""Runs kernels on a GPU through CuPy. The counterpart of `emulator.py`, with the same members.

A launch goes to CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..core.backend import Device
from .machine import HOPPER, address
from .nvrtc import OPTIONS


class Gpu:
    """A machine whose arrays are CuPy's. Each text is compiled once per process; CuPy keeps it on disk, too."""

    def __init__(self, index: int = 0) -> None:
        self.xp: Any = Device("gpu", index).xp
        self.capability = int(self.xp.cuda.Device(index).compute_capability)
        # CuPy asks for sm_90 as well; of the two NVRTC takes the one that has what Hopper alone has.
        options = (*OPTIONS, "-arch=sm_90a") if self.capability == HOPPER else OPTIONS
        self._module = cache(lambda text: self.xp.RawModule(code=text, options=options))

    def kernel(self, text: str, name: str) -> Callable[..., Any]:
        """The kernel `name` of a text: a `cupy.RawKernel`, called as `kernel(grid, block, arguments, shared_mem=0)`."""
        return self._module(text).get_function(name)

    def table(self, rows: Sequence[Sequence[Any]]) -> Any:
        """Addresses of arrays, a row for each tensor, for a kernel that visits many."""
        return self.xp.asarray(np.array([[address(a) for a in row] for row in rows], "uint64"))


@cache
def gpu(index: int = 0) -> Gpu:
    """The machine of one device."""
    return Gpu(index)
