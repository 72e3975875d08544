"""Runs CUDA C on NumPy arrays: the text of a kernel, compiled with a C++ compiler, one fiber a CUDA thread.

Every launch runs in several orders of threads and blocks and must give the same result in all of them. Arrays lie
between guard zones, shared memory starts as NaN, and barriers know their line, so that a missing or divergent barrier,
a write out of bounds and a read of what nobody wrote show up. Products of tensor cores and asynchronous copies have
counterparts in `emulator_matrices.h`. A launch has the form of a `cupy.RawKernel`. Only a device shows speed,
contention, coalescing and occupancy.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import MissingDependencyError
from .source import KernelError

ORDERS = ("ascending", "descending", "shuffled")
GUARD = 256  # bytes before and after every array: a float read there is NaN, a write there is noticed
MOST_THREADS, MOST_SHARED = 1024, 227 * 1024  # per block, compute capability 9.0
OPTIONS = ("-std=c++17", "-O0", "-fPIC", "-shared", "-w", "-fno-strict-aliasing")
HEADERS = ("emulator.h", "emulator_matrices.h")
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+([\w\s]+?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"__shared__\s+([\w\s]+?)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;")
_COMMENT = re.compile(r"//[^\n]*")
_SYNCHRONIZES = re.compile(r"__(sync|shfl|ballot|any_sync|all_sync)|load_matrices|multiply_add")


class Emulator:
    """A machine that runs kernels on NumPy arrays, each launch once per order in `orders`.

    Raises KernelError for what breaks a rule of CUDA, and MissingDependencyError without a C++ compiler.

    >>> text = 'extern "C" __global__ void fill(float* y, long long n) { if (threadIdx.x < n) y[threadIdx.x] = 7; }'
    >>> y = np.zeros(3, np.float32)
    >>> if compiler():
    ...     Emulator().kernel(text, "fill")((1,), (32,), (y, 3))
    ...     assert y.tolist() == [7.0, 7.0, 7.0]
    """

    xp: Any = np
    capability = 90

    def __init__(self, orders: Sequence[str] = ORDERS) -> None:
        unknown = [o for o in orders if o not in ORDERS]
        if unknown or not orders:
            raise KernelError(f"there is no order {unknown}", fix=f"use some of {', '.join(ORDERS)}")
        self.orders = tuple(orders)

    def kernel(self, text: str, name: str) -> Kernel:
        """The kernel `name` of a text, to be called as `kernel(grid, block, arguments, shared_mem=0)`."""
        if name not in _KERNEL.findall(text):
            raise KernelError(f"the text has no kernel {name!r}", fix=f"it has {', '.join(_KERNEL.findall(text))}")
        prepare([text])
        return Kernel(_libraries[text], text, name, self.orders)


class Kernel:
    """One compiled kernel. Arrays are passed for pointers, Python or NumPy numbers for numbers."""

    def __init__(self, library: ctypes.CDLL, text: str, name: str, orders: Sequence[str]) -> None:
        self.name, self.orders = name, orders
        self.synchronizes = bool(_SYNCHRONIZES.search(_COMMENT.sub("", text)))
        self.entry = getattr(library, f"emulate_{_digest(text)}_{name}")
        self.entry.restype = ctypes.c_char_p
        signature = getattr(library, f"signature_{_digest(text)}_{name}")
        signature.restype = ctypes.c_char_p
        self.parameters = [p for p in signature().decode().split(", ") if p]

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        shape = [*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block))]
        self._check_launch(shape, shared_mem)
        values = [_converted(p, a, k, self.name) for k, (p, a) in enumerate(zip(self.parameters, arguments))]
        if len(arguments) != len(self.parameters):
            raise KernelError(f"{self.name} got {len(arguments)} arguments, takes {len(self.parameters)}")
        arrays = {k: v for k, v in enumerate(values) if isinstance(v, np.ndarray)}
        memory = _Memory(list(arrays.values()))
        through_table = any(p.startswith("table") for p in self.parameters)  # such memory cannot be put back
        first: dict[int, np.ndarray] = {}
        for order in self.orders[:1] if through_table else self.orders:
            memory.restore()
            self._run(shape, shared_mem, ORDERS.index(order), values, memory)
            memory.check(self.name, order)
            results = {k: memory.seen(a) for k, a in arrays.items() if self.parameters[k].startswith("out")}
            for k, result in results.items():
                _check_same(first.setdefault(k, result.copy()), result, self.name, k, self.orders[0], order)
        memory.write_back()

    def _check_launch(self, shape: Sequence[int], shared_mem: int) -> None:
        threads = shape[3] * shape[4] * shape[5]
        if min(shape) < 1 or threads > MOST_THREADS or max(shape[1:3]) > 65535:
            raise KernelError(f"{self.name}: grid {tuple(shape[:3])} of blocks {tuple(shape[3:])} cannot be launched")
        if shared_mem > MOST_SHARED:
            raise KernelError(f"{self.name}: {shared_mem} bytes of shared memory, a block has {MOST_SHARED}")

    def _run(self, shape: Sequence[int], shared_mem: int, order: int, values: Sequence[Any], memory: _Memory) -> None:
        cells = [ctypes.c_void_p(memory.address(v)) if isinstance(v, np.ndarray) else v for v in values]
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
        sizes = (ctypes.c_uint * 6)(*shape)
        failure = self.entry(sizes, ctypes.c_size_t(shared_mem), order, int(self.synchronizes), pointers)
        if failure:
            raise KernelError(f"{self.name}, threads {ORDERS[order]}: {failure.decode()}")


def _converted(parameter: str, value: Any, position: int, name: str) -> Any:
    """An array or a C number of exactly the declared type; Python numbers are int64 or float64, as in CuPy."""
    kind, _, ctype = parameter.rpartition(" ")
    where = f"argument {position} of {name}"
    if kind:
        if not isinstance(value, np.ndarray):
            raise KernelError(f"{where} is {value!r:.40}, wanted an array of {ctype}")
        fits = value.dtype.name == ctype or (ctype == "bits16" and value.dtype.itemsize == 2)
        if not fits:
            raise KernelError(f"{where} is {value.dtype.name}, the kernel takes {ctype}")
        if kind == "out" and not value.flags.writeable:
            raise KernelError(f"{where} is read-only, but the kernel may write it", fix="declare it const")
        return value
    given = {bool: "bool", int: "int64", float: "float64"}.get(type(value)) or getattr(value, "dtype", None)
    if given is None or np.dtype(given).name != ctype:
        raise KernelError(f"{where} is {value!r:.40}, the kernel takes {ctype}")
    return np.ctypeslib.as_ctypes_type(np.dtype(ctype))(value)


def _check_same(first: np.ndarray, now: np.ndarray, name: str, position: int, one: str, other: str) -> None:
    """KernelError unless two orders of threads gave the same, to the last digit."""
    if not np.array_equal(first, now, equal_nan="float" in first.dtype.name):
        raise KernelError(
            f"{name}: argument {position} depends on the order of threads ({one} or {other})",
            fix="look for a missing __syncthreads, or for two threads that write one place",
        )


class _Memory:
    """Copies of the arrays of a launch between guard zones. Arrays that overlap share one copy."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        spans = sorted({np.lib.array_utils.byte_bounds(a) for a in arrays})
        merged: list[list[int]] = []
        for low, high in spans:
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self.spans = [(low, high) for low, high in merged]
        self.kept = [ctypes.string_at(low, high - low) for low, high in self.spans]
        self.copies = [np.empty(high - low + 2 * GUARD + 64, np.uint8) for low, high in self.spans]
        # the copy starts on the same residue of 64 as the original, so that packs are as aligned as they are there
        self.starts = [GUARD + (low - c.ctypes.data - GUARD) % 64 for (low, _), c in zip(self.spans, self.copies)]
        self.guards = [self._guard(k, arrays) for k in range(len(self.spans))]
        self.writeable = [
            any(a.flags.writeable and low <= np.lib.array_utils.byte_bounds(a)[0] < max(high, low + 1) for a in arrays)
            for low, high in self.spans
        ]

    def _guard(self, k: int, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """What lies around the k-th copy: NaNs that arithmetic makes quiet and that no other copy has, so that a thread
        that computes outside its arrays, NaN from NaN, leaves a trace."""
        size = next(a.dtype.itemsize for a in arrays if self._span(a) == k)
        signals = {4: 0xFFA00001, 8: 0xFFF4000000000001}
        unit = np.array([signals[size] + k], f"u{size}").view(np.uint8) if size in signals else np.uint8([0xFF])
        return np.resize(np.roll(unit, self.starts[k]), self.copies[k].size)

    def restore(self) -> None:
        """The contents from before the launch, and intact guards."""
        for copy, start, kept, guard in zip(self.copies, self.starts, self.kept, self.guards):
            copy[:] = guard
            copy[start : start + len(kept)] = np.frombuffer(kept, np.uint8)

    def _span(self, array: np.ndarray) -> int:
        low = np.lib.array_utils.byte_bounds(array)[0]
        return next(i for i, (a, b) in enumerate(self.spans) if a <= low < max(b, a + 1))

    def address(self, array: np.ndarray) -> int:
        i = self._span(array)
        return self.copies[i].ctypes.data + self.starts[i] + array.ctypes.data - self.spans[i][0]

    def seen(self, array: np.ndarray) -> np.ndarray:
        """The array as it is in the copy now."""
        i = self._span(array)
        offset = self.starts[i] + array.ctypes.data - self.spans[i][0]
        return np.ndarray(array.shape, array.dtype, self.copies[i], offset, array.strides)

    def check(self, name: str, order: str) -> None:
        for copy, start, kept, guard in zip(self.copies, self.starts, self.kept, self.guards):
            end = start + len(kept)
            if (copy[:start] != guard[:start]).any() or (copy[end:] != guard[end:]).any():
                raise KernelError(f"{name}, threads {order}: a write outside an array")

    def write_back(self) -> None:
        for copy, start, kept, (low, _), writeable in zip(
            self.copies, self.starts, self.kept, self.spans, self.writeable
        ):
            if writeable:
                ctypes.memmove(low, copy.ctypes.data + start, len(kept))


# -- compiling -------------------------------------------------------------------------------------------------------


_libraries: dict[str, ctypes.CDLL] = {}  # by the text of the kernels


def prepare(texts: Iterable[str]) -> None:
    """Compile many texts at once, which takes far less time than one by one; `Emulator.kernel` then finds them."""
    new = sorted({t for t in texts if t not in _libraries}, key=_digest)
    if not new:
        return
    source = f'#include "{HEADERS[0]}"\n' + "".join(map(translated, new))
    header = "".join(files(__package__).joinpath(name).read_text("utf-8") for name in HEADERS)
    library = _cache() / f"{_digest(source + header)}.so"
    if not library.exists():
        _compile(source, _precompiled(header), library)
    _libraries.update(dict.fromkeys(new, ctypes.CDLL(str(library))))


@cache
def _digest(text: str) -> str:
    return hashlib.sha256("\0".join((text, *OPTIONS)).encode()).hexdigest()[:24]


def translated(text: str) -> str:
    """The text with what only CUDA's grammar has put into C++, in a namespace of its own, with its entry points."""
    plain = _COMMENT.sub("", text)
    plain = _DYNAMIC.sub(r"\1* \2 = (\1*)emulator::shared(-1, emulator::dynamic_bytes);", plain)
    plain = _STATIC.sub(
        r"typedef \1 shared_\2\3; shared_\2& \2 = *(shared_\2*)emulator::shared(__COUNTER__, sizeof(shared_\2));",
        plain,
    )
    plain = re.sub(r'extern\s+"C"(?=\s+__global__)', "", plain)
    entries = "\n".join(f"EMULATE({_digest(text)}, {name})" for name in _KERNEL.findall(text))
    space = f"text_{_digest(text)}"
    head = f'namespace {space} {{ namespace hetu {{}}\n#line 1 "kernel.cu"\n'
    return f"{head}{plain}\nusing namespace hetu;\n{entries}\n}}\n"


@cache
def _cache() -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetu" / "emulator"
    try:
        home.mkdir(parents=True, exist_ok=True)
        return home
    except OSError:
        return Path(tempfile.mkdtemp(prefix="hetu-emulator-"))


def compiler() -> str | None:
    """The C++ compiler that the emulator uses, or None."""
    return next((found for name in ("g++", "clang++") if (found := shutil.which(name))), None)


def _command() -> str:
    command = compiler()
    if command is None:
        raise MissingDependencyError(
            "the emulator needs a C++ compiler", fix="install g++ (apt install g++, dnf install gcc-c++)"
        )
    return command


def _precompiled(header: str) -> Path:
    """A folder with the header, and with what a compiler has read of it, which takes it longer than most kernels."""
    command = _command()
    folder = _cache() / f"header-{_digest(header + command)}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            whole = Path(made) / "whole"
            whole.mkdir()
            (whole / HEADERS[0]).write_text(header, "utf-8")
            line = [command, *OPTIONS, "-x", "c++-header", HEADERS[0], "-o", f"{HEADERS[0]}.gch"]
            subprocess.run(line, cwd=whole, capture_output=True, timeout=120)  # it is a matter of time alone
            with suppress(OSError):  # meanwhile another process has made it
                whole.rename(folder)
    return folder


def _compile(source: str, header: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        place = Path(folder)
        (place / "kernel.cpp").write_text(source, "utf-8")
        command = [_command(), *OPTIONS, "-I", str(header), "kernel.cpp", "-o", "kernel.so"]
        made = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)
        if made.returncode:
            errors = [line for line in made.stderr.splitlines() if "error" in line] or made.stderr.splitlines()
            raise KernelError("the kernel does not compile:\n" + "\n".join(errors[:10]))
        os.replace(place / "kernel.so", library)  # whole or not at all, even if another process compiles the same
