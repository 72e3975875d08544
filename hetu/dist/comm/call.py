"""One rank's part in a collective, and whether any transport can do it: arrays and how they fit, before a rank waits.

Buffers are C-contiguous arrays of numbers, of NumPy or on a GPU. What ranks must have in common is a call's
`signature`; whether they do is compared elsewhere (`agreement.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, DTypeError, ShapeError, did_you_mean
from ...core.types import TensorType, is_float
from .recorder import Raw

REDUCE = {"sum": np.add, "max": np.maximum, "min": np.minimum}
PeerMessage = tuple[int, np.ndarray]


@dataclass(slots=True)  # not frozen: that would cost a small all_reduce a tenth of its time
class CollectiveCall:
    """One rank's part in a collective. `counts` are the elements sent to and received from each rank.

    `noted` is its entry in the flight recorder.
    """

    kind: str
    x: np.ndarray
    out: np.ndarray
    op: str = ""
    root: int = 0
    counts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    noted: Raw = ()

    def check(self, world_size: int) -> None:
        """Refuse what no transport can do, before any rank waits."""
        self.check_buffers()
        self.check_fit(world_size)

    def check_buffers(self) -> None:
        """Refuse arrays that no transport can read or write."""
        if self.x is not self.out:
            check_buffer(self.x)
        check_buffer(self.out, written=True)

    def check_fit(self, world_size: int) -> None:
        """Refuse arrays that do not fit each other or the group."""
        if self.x.dtype is not self.out.dtype and self.x.dtype != self.out.dtype:
            raise DTypeError(f"{self.kind} from {self.x.dtype} into {self.out.dtype}", fix="use one dtype for both")
        if self.op:
            if self.op not in REDUCE:
                raise ArgumentError(f"unknown reduction {self.op!r}", fix=did_you_mean(self.op, REDUCE))
            if self.op == "sum" and self.x.dtype == bool:
                raise DTypeError("a sum of bool is not defined between ranks", fix="cast to an integer, or use max")
        if not 0 <= self.root < world_size:
            raise ArgumentError(f"root {self.root} in a group of {world_size}", fix="name a rank of the group")
        if self.counts is not None:
            sent, received = self.counts
            if len(sent) != world_size or len(received) != world_size:
                raise ArgumentError(f"{self.counts} for {world_size} ranks", fix="give one count for every rank")
            fits = sum(sent) == self.x.size and sum(received) == self.out.size
        else:
            given, made = self.x.size, self.out.size
            if self.kind == "all_gather":
                given *= world_size
            elif self.kind == "reduce_scatter":
                made *= world_size
            fits = given == made and (self.kind != "all_to_all" or given % world_size == 0)
        if not fits:
            raise ShapeError(
                f"{self.kind} over {world_size} ranks from {show_array(self.x)} into {show_array(self.out)}",
                fix="size out for what arrives: the same for all_reduce, world_size times x for all_gather, "
                "x over world_size for reduce_scatter",
            )

    @property
    def signature(self) -> tuple[object, ...]:
        """What the calls of all ranks must have in common; with `counts` the sizes may differ."""
        return self.kind, self.op, self.root, self.x.dtype, self.x.size if self.counts is None else -1

    @property
    def size(self) -> int:
        """The elements that all ranks give alike, in whatever shape; -1 where `counts` say what each gives."""
        return self.x.size if self.counts is None else -1

    @property
    def what(self) -> str:
        """Its name, without the array."""
        return _named(self.kind, self.op, self.root)

    def __str__(self) -> str:
        return self.kind if self.kind == "barrier" else f"{self.what} {show_array(self.x)}"


@functools.cache
def _named(kind: str, op: str, root: int) -> str:
    if kind == "broadcast":
        return f"broadcast from {root}"
    return f"{kind} {op}" if op else kind


def show_array(x: np.ndarray) -> str:
    return str(TensorType(x.shape, x.dtype))


def is_half(dtype: np.dtype) -> bool:
    """Whether these are floats of 16 bits: between ranks they are added in 32, and each sum is rounded once."""
    return dtype.itemsize == 2 and is_float(dtype)


def is_device(x: Any) -> bool:
    """Whether an array lies on a GPU."""
    return hasattr(x, "__cuda_array_interface__")


def check_buffer(x: Any, written: bool = False) -> None:
    """Buffers are C-contiguous and aligned NumPy or GPU arrays of numbers; writeable where results land."""
    on_host = isinstance(x, np.ndarray)
    if not (on_host or is_device(x)) or not (x.dtype.kind in "biufc" or is_float(x.dtype)):
        raise ArgumentError(f"{type(x).__name__} is no buffer", fix="pass a NumPy array of numbers")
    if not x.dtype.isnative:  # others would take its bytes in their own order
        raise DTypeError(f"a buffer of {x.dtype.str}", fix="copy it, with x.astype(x.dtype.newbyteorder('='))")
    flags = x.flags
    if not flags.c_contiguous or (on_host and not (flags.aligned and (flags.writeable or not written))):
        lacks = "C-contiguous" if not flags.c_contiguous else "writeable" if flags.aligned else "aligned"
        raise ArgumentError(f"a buffer {show_array(x)} that is not {lacks}", fix="copy it, with x.copy()")
