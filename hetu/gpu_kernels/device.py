"""Runs kernels on a GPU through CuPy. The counterpart of `emulator.py`, with the same two members.

A launch goes to CuPy's current stream.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from ..core.backend import Device
from .nvrtc import OPTIONS


class Gpu:
    """A machine whose arrays are CuPy's. Each text is compiled once per process; CuPy keeps it on disk, too."""

    def __init__(self, index: int = 0) -> None:
        self.xp: Any = Device("gpu", index).xp
        self.capability = int(self.xp.cuda.Device(index).compute_capability)
        self._module = cache(lambda text: self.xp.RawModule(code=text, options=OPTIONS))

    def kernel(self, text: str, name: str) -> Callable[..., Any]:
        """The kernel `name` of a text: a `cupy.RawKernel`, called as `kernel(grid, block, arguments, shared_mem=0)`."""
        return self._module(text).get_function(name)


@cache
def gpu(index: int = 0) -> Gpu:
    """The machine of one device."""
    return Gpu(index)
