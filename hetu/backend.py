"""The array module of a device: NumPy on `cpu`, CuPy on `gpu:0`. One of the few files that names cupy.

Ignored on purpose: other array libraries. A forward function sees its array module only as `xp`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from .errors import ArgumentError, MissingDependencyError

ALIGNMENT = 64  # bytes: a copy to a buffer that starts on a cache line is up to 12x faster


@dataclass(frozen=True, slots=True)
class Device:
    """A kind (`cpu` or `gpu`) and an index; `xp` is its array module."""

    kind: str
    index: int = 0

    @staticmethod
    def parse(text: str) -> Device:
        """`cpu`, `gpu` or `gpu:1`; ArgumentError otherwise."""
        kind, _, index = text.partition(":")
        if kind not in ("cpu", "gpu") or not (index or "0").isdigit():
            raise ArgumentError(f"unknown device {text!r}", fix="use 'cpu', 'gpu' or 'gpu:1'")
        return Device(kind, int(index or 0))

    @property
    def xp(self) -> ModuleType:
        if self.kind == "cpu":
            return np
        try:
            cupy = importlib.import_module("cupy")
            cupy.cuda.Device(self.index).use()
        except Exception as error:
            raise MissingDependencyError(
                f"device '{self}' needs CuPy and an NVIDIA driver ({type(error).__name__}: {error})",
                fix='pip install "hetu-dl[gpu]", or use device="cpu"',
            ) from None
        return cupy

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def aligned_empty(xp: ModuleType, nbytes: int) -> Any:
    """An uninitialised byte array that starts on an `ALIGNMENT` boundary."""
    block = xp.empty(nbytes + ALIGNMENT, dtype=xp.uint8)
    address = block.ctypes.data if xp is np else block.data.ptr
    start = -address % ALIGNMENT
    return block[start : start + nbytes]


def to_numpy(array: Any) -> np.ndarray:
    """A host copy of `array`, wherever it lives; the caller owns it."""
    return np.array(array.get() if hasattr(array, "get") else array)
