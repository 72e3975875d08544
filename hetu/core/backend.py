"""The array module of a device, `xp` to forward functions: NumPy on `cpu`, CuPy on `gpu:0`. Few files name cupy."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Annotated, Any, cast

import numpy as np

from .errors import ArgumentError, MissingDependencyError
from .kernels import kernels
from .types import bfloat16, is_float, promote

Unfit = Callable[[str, str], Exception]  # from what a value is, and what to do, to the error
READ: list[Callable[[Any, Unfit], np.ndarray]] = [lambda value, _: np.asarray(value)]  # `hetu.foreign` enters its own
OWN: dict[str, Callable[[], int]] = {}  # by the kind of device: its number for this process, which the package enters
Seed = Annotated[int, range(2**128)]  # of NumPy's generators
ALIGNMENT = 64  # bytes: a copy to a buffer that starts on a cache line is up to 12x faster


@dataclass(frozen=True, slots=True)
class Device:
    """A kind (`cpu` or `gpu`) and an index; `xp` is its array module."""

    kind: str
    index: int = 0

    @staticmethod
    def parse(text: str) -> Device:
        """`cpu`, `gpu` (this rank's own) or `gpu:1`; ArgumentError otherwise."""
        kind, _, index = text.partition(":")
        if kind not in ("cpu", "gpu") or not (index or "0").isdigit():
            raise ArgumentError(f"unknown device {text!r}", fix="use 'cpu', 'gpu' or 'gpu:1'")
        return Device(kind, int(index) if index else OWN.get(kind, int)())

    @property
    def xp(self) -> ModuleType:
        if self.kind == "cpu":
            return np
        try:
            cupy = importlib.import_module("cupy")
            cupy.cuda.Device(self.index).use()
        except Exception as error:
            said = f"device '{self}' needs CuPy and an NVIDIA driver ({type(error).__name__}: {error})"
            raise MissingDependencyError(said, fix='pip install "hetu-dl[gpu]", or use device="cpu"') from None
        return cast(ModuleType, kernels(self.kind).array_module(cupy))

    def stream(self) -> AbstractContextManager[Any]:
        """A new queue of work on a GPU, current inside `with`, for which the default stream waits; nothing on a CPU."""
        return nullcontext() if self.kind == "cpu" else self.xp.cuda.Stream()

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def aligned_empty(xp: ModuleType, nbytes: int) -> Any:
    """An uninitialized byte array that starts on an `ALIGNMENT` boundary."""
    block = xp.empty(nbytes + ALIGNMENT, dtype=xp.uint8)
    start = -address(block) % ALIGNMENT
    return block[start : start + nbytes]


def address(array: Any) -> int:
    """Where the memory of an array begins."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


_values: dict[int, np.ndarray] = {}  # of the constants on devices, by the id of their arrays


def fixed_array(xp: ModuleType, value: np.ndarray) -> Any:
    """A constant in the memory of a device; `fixed_value` still tells its values, as long as it lives."""
    if xp is np:
        return value
    array = xp.asarray(value)
    _values[id(array)] = value
    weakref.finalize(array, _values.pop, id(array), None).atexit = False
    return array


def fixed_value(array: Any) -> np.ndarray | None:
    """The values, in the memory of the host, of an array that never changes; None for others.

    What is computed from them when an instruction is bound need not be computed in every step.
    """
    if id(array) in _values:
        return _values[id(array)]
    return array if isinstance(array, np.ndarray) and not array.flags.writeable else None


class Scratch:
    """Working memory of one instruction on a CPU: arrays cut from `block`, or beyond it of their own; `used` bytes."""

    def __init__(self, block: np.ndarray | None = None) -> None:
        self.block, self.used = block, 0
        self.counts = block is not None and not block.flags.writeable  # bytes, for a plan: nothing is computed

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        start = 0 if self.counts else self.used
        self.used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self.block is None or start + nbytes > self.block.nbytes:
            return np.empty(shape, dtype)
        return self.block[start : start + nbytes].view(dtype).reshape(shape)


def host_empty(xp: ModuleType, nbytes: int) -> np.ndarray:
    """An uninitialized byte array in the memory of the host, pinned where a GPU copies from and to it by itself."""
    if xp is np:
        return cast(np.ndarray, aligned_empty(np, nbytes))
    pinned: np.ndarray = np.frombuffer(xp.cuda.alloc_pinned_memory(max(nbytes, 1)), np.uint8, nbytes)
    return pinned


def filler(xp: ModuleType, buffer: Any) -> Callable[[np.ndarray], None]:
    """A call that copies an array of the host into `buffer`; the dtype may change within its kind."""
    return partial(np.copyto, buffer, casting="same_kind") if xp is np else _PinnedFeed(xp, buffer).fill


class _PinnedFeed:
    """Memory of the host that a GPU reads by itself, so that the host does not wait for a copy."""

    def __init__(self, xp: ModuleType, buffer: Any) -> None:
        self.xp, self.buffer, self.copied = xp, buffer, xp.cuda.Event(disable_timing=True)
        self.host = host_empty(xp, buffer.nbytes).view(buffer.dtype).reshape(buffer.shape)

    def fill(self, array: np.ndarray) -> None:
        self.copied.synchronize()  # the copy of the step before may still read
        np.copyto(self.host, array, casting="same_kind")
        stream = self.xp.cuda.get_current_stream()
        self.buffer.set(self.host, stream=stream)
        self.copied.record(stream)


def to_numpy(array: Any) -> np.ndarray:
    """A host copy of `array`, wherever it lives; the caller owns it."""
    return cast(np.ndarray, getattr(array, "get", array.copy)())


# -- dtypes of arrays of any array module -----------------------------------------------------------------------


def dtype_in(xp: ModuleType, name: str) -> Any:
    """What an array module calls a dtype; none has a name for bfloat16, but NumPy and CuPy know its dtype."""
    return bfloat16() if name == "bfloat16" else getattr(xp, name)


def dtype_of(array: Any) -> np.dtype:
    """The NumPy dtype of an array of any array module."""
    dtype = array.dtype  # NumPy's own, or an object that prints as `module.float32`
    return dtype if isinstance(dtype, np.dtype) else np.dtype(str(dtype).rpartition(".")[2])


def array_from(value: Any, unfit: Unfit = lambda said, fix: ArgumentError(f"data {said}", fix=fix)) -> np.ndarray:
    """`value` as an array, one of another library where it lies; raises `unfit(reason, fix)` if it is none."""
    plain = type(value) is np.ndarray or isinstance(value, int | float | np.generic)
    return np.asarray(value) if plain else READ[-1](value, unfit)


def fitting(value: Any, dtype: np.dtype, unfit: Unfit) -> np.ndarray:
    """`value` as an array whose numbers a dtype holds, floats not yet in it; else raises `unfit(reason, fix)`."""
    array = array_from(value, unfit)
    if np.can_cast(array.dtype, dtype):
        return array
    if isinstance(value, list | tuple) and not array.size:  # has no dtype
        return array.astype(dtype)
    if array.dtype.kind not in "biuf" and not is_float(array.dtype):
        fix = "pass an array of numbers; of objects values.astype(dtype) makes one"
        raise unfit(f"wants {dtype.name}, got {' '.join(repr(value).split()):.60}", fix)
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        given, array = array, array.astype(dtype)
        if len(lost := given[given != array]):
            raise unfit(f"is {dtype.name}, got {lost[0]}", "declare a wider dtype, or look for the mistake")
    elif not np.can_cast(array.dtype, dtype, "same_kind"):
        raise unfit(f"wants {dtype.name}, got {array.dtype.name}", f'convert it: array.astype("{dtype.name}")')
    return array


def to_dtype(xp: ModuleType, array: Any, dtype: np.dtype) -> Any:
    """`array` in the given dtype; itself when it has it already."""
    return array if dtype_of(array) == dtype else xp.astype(xp.asarray(array), dtype_in(xp, dtype.name))


def common(xp: ModuleType, *arrays: Any) -> Sequence[Any]:
    """The arrays in the dtype of their elementwise result, as array modules disagree about mixed kinds."""
    if all(a.dtype == arrays[0].dtype for a in arrays):
        return arrays
    dtype = promote(*map(dtype_of, arrays))
    return [to_dtype(xp, a, dtype) for a in arrays]
