"""What a launcher works with: a machine that runs kernels, grids, addresses.

`device.py` is a GPU, `emulator.py` needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..core.kernels import Call as Call

Size2d = tuple[int, int]  # rows and columns
BLOCK = 256  # threads: enough to hide the latency of memory, few enough for 8 blocks a multiprocessor
MOST_BLOCKS = 1 << 14
TENSOR = 80  # the capability from which on there are products of tensor cores that we use, and asynchronous copies
HOPPER = 90  # the one capability that has products of warpgroups


class Machine(Protocol):
    """What runs kernels: a GPU through CuPy, or the emulator. `xp` is the module of its arrays.

    `capability` is what NVIDIA calls compute capability, times 10: 80 of an A100, 90 of an H100.
    """

    xp: Any
    capability: int

    def kernel(self, text: str, name: str) -> Callable[..., Any]:
        """The kernel `name` of a text, to be called as `kernel(grid, block, arguments, shared_mem=0)`."""

    def table(self, rows: Sequence[Sequence[Any]]) -> Any:
        """Addresses of arrays, a row for each tensor, for a kernel that visits many. It does not keep them alive."""


class RecordedKernel(NamedTuple):
    """The kernel `name` of a text, as `cupy.RawKernel` calls both; it does nothing."""

    code: str
    name: str

    def __call__(self, *_: Any, **__: Any) -> None: ...


class RecordingMachine:
    """A machine that runs nothing and keeps the texts it was given, to compile or check them together."""

    xp: Any = np
    capability = 90

    def __init__(self) -> None:
        self.texts: dict[str, None] = {}  # in the order they came

    def kernel(self, text: str, name: str) -> RecordedKernel:
        self.texts[text] = None
        return RecordedKernel(text, name)

    def table(self, rows: Sequence[Sequence[Any]]) -> None:
        pass


def warps(count: int) -> tuple[tuple[int], tuple[int, int]]:
    """Grid and block for a warp per item."""
    return (-(-count // 8),), (32, 8)


def threads_of_row(width: int, pack: int) -> int:
    """A power of 2, up to a warp, that reaches over a row of `width` elements if each thread has `pack` of them."""
    return min(32, 1 << (-(-width // pack) - 1).bit_length())


def spread_rows(count: int, width: int, pack: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Grid and block for `count` rows: threads of a row and rows lie in a block, and the grid's second axis goes over
    what is wider than a warp, in a loop where it would have too many blocks."""
    threads = threads_of_row(width, pack)
    return (-(-count * threads // BLOCK), min(-(-width // (threads * pack)), 65535)), (threads, BLOCK // threads)


def spread(count: int) -> tuple[tuple[int], tuple[int]]:
    """Grid and block for a grid-stride loop over `count` items."""
    return (min(-(-count // BLOCK), MOST_BLOCKS),), (BLOCK,)


def address(array: Any) -> int:
    """Where the first element lies, in the memory of the machine."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def widest_pack(width: int, *arrays: Any) -> int:
    """How many neighbors of rows of `width` elements one thread can move at once: up to 16 bytes, a power of 2."""
    pack = 16 // max(a.dtype.itemsize for a in arrays)
    while pack > 1 and (width % pack or any(address(a) % (a.dtype.itemsize * pack) for a in arrays)):
        pack //= 2
    return pack


def index_dtype(*counts: int) -> str:
    """The integers in which a kernel counts elements: 32 bits divide several times faster than 64 on a GPU."""
    return "int32" if max(counts) < 1 << 30 else "int64"


def contiguous(*arrays: Any) -> bool:
    """Whether hand-written kernels can take the arrays: C order, nothing empty."""
    return all(a.flags.c_contiguous and a.size for a in arrays)
