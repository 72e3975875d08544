"""Runs CUDA C on NumPy arrays: the text of a kernel, compiled with a C++ compiler, one fiber a CUDA thread.

Every launch runs in several orders of threads and blocks and must give the same result in all of them. Every access is
looked at: it must be aligned, and lie in an array of the launch, in a shared array or on the thread's own stack.
Barriers know their line, warp operations who is there, shared memory who wrote it. Limits of a device hold. Products
of tensor cores and asynchronous copies have counterparts in `emulator_matrices.h`. A launch has the form of a
`cupy.RawKernel`. Only a device shows speed, contention, coalescing and occupancy.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import MissingDependencyError
from .machine import address
from .source import KernelError

ORDERS = ("ascending", "descending", "shuffled")
LIMITS = (2**31 - 1, 65535, 65535, 1024, 1024, 64)  # of a grid and of a block, along each axis
MOST_THREADS = 1024  # of a block
GAP = 256  # bytes before and after every array that belong to nothing
LARGE = 1 << 28  # bytes of arrays that are not copied
OPTIONS = ("-std=c++17", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")
SANITIZERS = "-fsanitize=kernel-address,alignment,bounds"  # which report by calls
SANITIZER = ("stack=0", "globals=0", "instrumentation-with-call-threshold=0")  # every access, and nothing else
LIBRARIES = ("-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc_s")  # none of a sanitizer
SECONDS = 280  # for a compiler, which may have hundreds of kernels to read on a busy machine
HEADERS = ("emulator.h", "emulator_matrices.h")
RUNTIME = ("emulator.cpp", "emulator_matrices.cpp")
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\(([^,)]*)[^)]*\)\s*)?(\w+)\s*\(')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+([\w\s]+?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"__shared__\s+([\w\s]+?)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;")
_COMMENT = re.compile(r"//[^\n]*")
_SYNCHRONIZES = re.compile(r"__(sync|shfl|ballot|any_sync|all_sync)|load_matrices|multiply_add|multiply_group")


class Emulator:
    """A machine that runs kernels on NumPy arrays, each launch once per order in `orders`.

    `seed` chooses among shuffled orders. Of a larger grid only `blocks` blocks run, the first and the last: enough to
    see what becomes of positions beyond 32 bits. Arrays of so many elements are not copied, so one order has to do.
    Raises KernelError for what breaks a rule of CUDA, and MissingDependencyError without a C++ compiler.

    >>> text = 'extern "C" __global__ void fill(float* y, long long n) { if (threadIdx.x < n) y[threadIdx.x] = 7; }'
    >>> y = np.zeros(3, np.float32)
    >>> if compiler():
    ...     Emulator().kernel(text, "fill")((1,), (32,), (y, 3))
    ...     assert y.tolist() == [7.0, 7.0, 7.0]
    """

    capability = 90

    def __init__(self, orders: Sequence[str] = ORDERS, *, seed: int = 0, blocks: int = 1 << 62) -> None:
        unknown = [o for o in orders if o not in ORDERS]
        if unknown or not orders:
            raise KernelError(f"there is no order {unknown}", fix=f"use some of {', '.join(ORDERS)}")
        self.orders, self.seed, self.blocks = tuple(orders), seed, blocks
        self.xp: Any = _Poisoned()

    def table(self, rows: Sequence[Sequence[Any]]) -> AddressTable:
        """Addresses of arrays, a row for each tensor, for a kernel that visits many."""
        made = np.array([[address(a) for a in row] for row in rows], "uint64").view(AddressTable)
        made.rows = rows
        return made

    def kernel(self, text: str, name: str) -> Kernel:
        """The kernel `name` of a text, to be called as `kernel(grid, block, arguments, shared_mem=0)`."""
        names = [found for _, found in _KERNEL.findall(text)]
        if name not in names:
            raise KernelError(f"the text has no kernel {name!r}", fix=f"it has {', '.join(names)}")
        prepare([text])
        return Kernel(_libraries[text], text, name, self)


class _Poisoned:
    """NumPy, whose empty arrays hold what shows when it is read: NaN, large integers, truth."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, shape: Any, dtype: Any = float) -> np.ndarray:
        made = np.empty(shape, dtype)
        if made.nbytes < LARGE:
            made.reshape(-1).view("uint8").fill({"b": 1, "i": 0x55, "u": 0x55}.get(made.dtype.kind, 0xFF))
        return made

    def empty_like(self, array: np.ndarray) -> np.ndarray:
        return self.empty(array.shape, array.dtype)


class AddressTable(np.ndarray):
    """Addresses of the arrays in `rows`, which a kernel may reach through them."""

    rows: Sequence[Sequence[np.ndarray]] = ()


class Kernel:
    """One compiled kernel. Arrays are passed for pointers, Python or NumPy numbers for numbers."""

    def __init__(self, library: ctypes.CDLL, text: str, name: str, machine: Emulator) -> None:
        self.name, self.machine = name, machine
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
        if any(not 1 <= n <= most for n, most in zip(shape, LIMITS)) or shape[3] * shape[4] * shape[5] > MOST_THREADS:
            raise KernelError(f"{self.name}: grid {tuple(shape[:3])} of blocks {tuple(shape[3:])} cannot be launched")
        values = [_converted(p, a, k, self.name) for k, (p, a) in enumerate(zip(self.parameters, arguments))]
        if len(arguments) != len(self.parameters):
            raise KernelError(f"{self.name} got {len(arguments)} arguments, takes {len(self.parameters)}")
        named = [a for v in values if isinstance(v, AddressTable) for row in v.rows for a in row]
        reaches = any(p.startswith("table") for p in self.parameters) and not named  # what cannot be put back
        memory = _Memory(
            [*(v for v in values if isinstance(v, np.ndarray) and not isinstance(v, AddressTable)), *named]
        )
        changed = {f"argument {k}": v for k, v in enumerate(values) if self.parameters[k].startswith("out")}
        changed |= {f"what a table names, {k}": a for k, a in enumerate(named)}
        values = [memory.table(v) if isinstance(v, AddressTable) else v for v in values]
        first: dict[str, np.ndarray] = {}
        orders = self.machine.orders[:1] if reaches or memory.large else self.machine.orders
        for order in orders:
            memory.restore()
            self._run([*shape, shared_mem], order, values, named, memory, reaches)
            for what, array in changed.items() if len(orders) > 1 else ():
                result = memory.seen(array)
                _check_same(first.setdefault(what, result.copy()), result, f"{self.name}: {what}", orders[0], order)
        memory.write_back()

    def _run(
        self,
        shape: Sequence[int],
        order: str,
        values: Sequence[Any],
        named: Sequence[np.ndarray],
        memory: _Memory,
        reaches: bool,
    ) -> None:
        """One launch; the structs of `emulator.h` from numbers of 8 bytes."""
        places = [memory.span(v) if isinstance(v, np.ndarray) else (0, 0) for v in (*values, *named)]
        cells = [ctypes.c_void_p(memory.address(v)) if isinstance(v, np.ndarray) else v for v in values]
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(c) for c in cells))
        seed = zlib.crc32(f"{self.name} {shape}".encode()) + self.machine.seed
        options = (ORDERS.index(order), seed, self.machine.blocks, self.synchronizes, reaches, len(values), len(places))
        numbers = [*shape, *options, *(n for place in places for n in place)]
        failure = self.entry((ctypes.c_uint64 * len(numbers))(*numbers), pointers)
        if failure:
            raise KernelError(f"{self.name}, threads {order}: {failure.decode()}")


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


def _check_same(first: np.ndarray, now: np.ndarray, what: str, one: str, other: str) -> None:
    """KernelError unless two orders of threads gave the same, to the last digit."""
    if not np.array_equal(first, now, equal_nan="float" in first.dtype.name):
        raise KernelError(
            f"{what} depends on the order of threads ({one} or {other})",
            fix="look for two threads that write one place",
        )


class _Memory:
    """Copies of the arrays of a launch, apart from each other. Those that overlap share one; large ones have none."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        merged: list[list[int]] = []
        for low, high in sorted({np.lib.array_utils.byte_bounds(a) for a in arrays}):
            if merged and low < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], high)
            else:
                merged.append([low, high])
        self.large = any(high - low >= LARGE for low, high in merged)
        self.spans = [] if self.large else merged
        self.kept = [ctypes.string_at(low, high - low) for low, high in self.spans]
        self.copies = [np.empty(high - low + 2 * GAP + 64, np.uint8) for low, high in self.spans]
        # the copy starts on the same residue of 64 as the original, so that packs are as aligned as they are there
        self.starts = [GAP + (low - c.ctypes.data - GAP) % 64 for (low, _), c in zip(self.spans, self.copies)]
        self.writeable = [
            any(a.flags.writeable and low <= np.lib.array_utils.byte_bounds(a)[0] < max(high, low + 1) for a in arrays)
            for low, high in self.spans
        ]

    def restore(self) -> None:
        """The contents from before the launch."""
        for copy, start, kept in zip(self.copies, self.starts, self.kept):
            copy[start : start + len(kept)] = np.frombuffer(kept, np.uint8)

    def _home(self, array: np.ndarray) -> tuple[np.ndarray, int]:
        """The copy in which an array lies, and where in it; itself, if it has none."""
        low = np.lib.array_utils.byte_bounds(array)[0]
        for copy, start, (a, b) in zip(self.copies, self.starts, self.spans):
            if a <= low < max(b, a + 1):
                return copy, start + array.ctypes.data - a
        return array, 0

    def address(self, array: np.ndarray) -> int:
        """Where the first element lies for a kernel."""
        home, start = self._home(array)
        return home.ctypes.data + start

    def span(self, array: np.ndarray) -> tuple[int, int]:
        """Where the array begins and ends for a kernel."""
        low, high = np.lib.array_utils.byte_bounds(array)
        first = self.address(array) + low - array.ctypes.data
        return first, first + high - low

    def table(self, table: AddressTable) -> np.ndarray:
        """The table as a kernel needs it."""
        return np.array([[self.address(a) for a in row] for row in table.rows], "uint64")

    def seen(self, array: np.ndarray) -> np.ndarray:
        """The array as it is in the copy now."""
        return np.ndarray(array.shape, array.dtype, *self._home(array), array.strides)

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
    library = _cache() / f"{_digest(source + _joined(HEADERS + RUNTIME))}.so"
    if not library.exists():
        _compile(source, _shared(), library)
    _libraries.update(dict.fromkeys(new, ctypes.CDLL(str(library))))


def _joined(names: Iterable[str]) -> str:
    return "".join(files(__package__).joinpath(name).read_text("utf-8") for name in names)


@cache
def _digest(text: str) -> str:
    return hashlib.sha256("\0".join((text, *OPTIONS)).encode()).hexdigest()[:24]


def translated(text: str) -> str:
    """The text with what only CUDA's grammar has put into C++, in a namespace of its own, with its entry points."""
    plain = _COMMENT.sub("", text)
    plain = _DYNAMIC.sub(
        r"\1* \2 = (\1*)emulator::shared(&emulator::dynamic_bytes, emulator::dynamic_bytes, alignof(\1));", plain
    )
    plain = _STATIC.sub(
        r"typedef \1 shared_\2\3; static char at_\2; shared_\2& \2"
        r" = *(shared_\2*)emulator::shared(&at_\2, sizeof(shared_\2), alignof(shared_\2));",
        plain,
    )
    plain = re.sub(r'extern\s+"C"(?=\s+__global__)', "", plain)
    entries = "\n".join(f"EMULATE({_digest(text)}, {name}, {bounds or 0})" for bounds, name in _KERNEL.findall(text))
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
    """The C++ compiler that the emulator uses, or None, as everywhere but on Linux: it asks where a library ends."""
    names = ("g++", "clang++") if sys.platform == "linux" else ()
    return next((found for name in names if (found := shutil.which(name))), None)


def _command() -> str:
    command = compiler()
    if sys.platform != "linux":
        raise MissingDependencyError(
            f"the emulator of GPUs runs on Linux, this is {sys.platform}",
            fix="run it there, in a container or, on Windows, in WSL",
        )
    if command is None:
        raise MissingDependencyError(
            "the emulator needs a C++ compiler", fix="install g++ (apt install g++, dnf install gcc-c++)"
        )
    return command


def _flags(*more: str) -> list[str]:
    """The compiler and its options for texts."""
    command = _command()
    flag = "-mllvm -" if Path(command).name == "clang++" else "--param "
    options = " ".join(f"{flag}asan-{s}" for s in SANITIZER).split()
    return [command, *OPTIONS, "-O0", SANITIZERS, *options, *more]


def _shared() -> Path:
    """A folder with what all texts need: the header, and what a compiler has read of it, which takes it longer than
    most kernels; and what is compiled once."""
    header = _joined(HEADERS)
    folder = _cache() / f"header-{_digest(header + _joined(RUNTIME) + _command())}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            whole = Path(made) / "whole"
            whole.mkdir()
            (whole / HEADERS[0]).write_text(header, "utf-8")
            (whole / RUNTIME[0]).write_text(f"#define EMULATOR_RUNTIME\n{header}{_joined(RUNTIME)}", "utf-8")
            _compiled([_command(), *OPTIONS, "-O2", "-c", RUNTIME[0], "-o", "emulator.o"], whole)
            line = _flags("-x", "c++-header", HEADERS[0], "-o", f"{HEADERS[0]}.gch")
            subprocess.run(line, cwd=whole, capture_output=True, timeout=SECONDS)  # it is a matter of time alone
            with suppress(OSError):  # meanwhile another process has made it
                whole.rename(folder)
    return folder


def _compile(source: str, shared: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        place = Path(folder)
        (place / "kernel.cpp").write_text(source, "utf-8")
        _compiled(
            _flags("-I", str(shared), "kernel.cpp", str(shared / "emulator.o"), *LIBRARIES, "-o", "kernel.so"), place
        )
        os.replace(place / "kernel.so", library)  # whole or not at all, even if another process compiles the same


def _compiled(command: Sequence[str], folder: Path) -> None:
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    if made.returncode:
        errors = [line for line in made.stderr.splitlines() if "error" in line] or made.stderr.splitlines()
        raise KernelError("the kernel does not compile:\n" + "\n".join(errors[:10]))
