"""The BLAS that NumPy uses: its functions and its threads.

That is the OpenBLAS inside the wheel, or what NumPy's own library is linked with: OpenBLAS of a distribution, MKL,
Accelerate. Each function is looked for by itself, under the names that builds give it. `HETU_BLAS=0` in the environment
hides it. Left out: BLAS on Windows that is not of the wheel, and threads of Accelerate, which does not tell them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..core.errors import ArgumentError
from ..core.kernels import Call, switched_off
from ..job import cores

# Multiplications of one product for which a thread takes a millisecond. Where others want the cores, two threads of
# BLAS, which spin while they wait, take 10 to 1,000 times as long for less.
WORTH = 1 << 25

# What builds write before and behind a name, and their integers: OpenBLAS in wheels, that of others, MKL, Accelerate.
SPELLINGS = (
    ("scipy_{}64_", ctypes.c_int64),
    ("scipy_{}", ctypes.c_int32),
    ("{}64_", ctypes.c_int64),
    ("{}_64", ctypes.c_int64),
    ("{}$NEWLAPACK$ILP64", ctypes.c_int64),
    ("{}", ctypes.c_int32),
)
OF_MKL = {"openblas_get_num_threads": "MKL_Get_Max_Threads", "openblas_set_num_threads": "MKL_Set_Num_Threads"}
EXTENSION = "numpy._core._multiarray_umath"  # the library of NumPy that calls BLAS

CValue: TypeAlias = "ctypes._SimpleCData[Any]"


def set_threads(n: int) -> None:
    """Let BLAS, and with it `np.matmul`, use `n` threads from now on, in the whole process.

    Does nothing without the library. Raises `ArgumentError` if `n` is not a positive integer.
    """
    if not isinstance(n, int) or n < 1:
        raise ArgumentError(f"set_threads got {n!r}", fix="pass the number of threads, an integer of at least 1")
    function = function_of("openblas_set_num_threads")
    if function is not None:
        function[0](ctypes.c_int(n))


def get_threads() -> int | None:
    """The number of threads BLAS uses, or None without the library."""
    function = function_of("openblas_get_num_threads")
    return None if function is None else function[0]()


def wanted() -> int:
    """How many threads there are to be where the library does not tell: as the environment says, else all cores."""
    told = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
    return next((int(text) for text in told if text.isdecimal() and int(text)), cores())


def fit() -> None:
    """Leave BLAS no more threads than there are cores to use: it counts them, but not the time a container has."""
    if (get_threads() or 1) > cores():
        set_threads(cores())


@contextlib.contextmanager
def at_most(threads: int) -> Iterator[None]:
    """Inside, BLAS has no more threads than these."""
    before = get_threads() or 1
    set_threads(min(before, threads))
    try:
        yield
    finally:
        set_threads(before)


def alone(call: Call, work: int, least: int) -> Call:
    """The call with one thread of BLAS, if it multiplies less than `WORTH` times; below `least` BLAS takes one itself.

    For calls from Python: while C walks a table, BLAS has one thread, and threads that sleep divide the products.

    >>> alone(print, 100, least=1000) is print
    True
    """
    get, set_ = (function_of(f"openblas_{verb}_num_threads") for verb in ("get", "set"))
    if not least <= work < WORTH or get is None or set_ is None:
        return call

    def run(get: Callable[[], int] = get[0], set_: Callable[[Any], None] = set_[0]) -> None:
        threads = get()
        if threads == 1:
            call()
            return
        set_(1)
        try:
            call()
        finally:
            set_(threads)

    return run


def kernels() -> str | None:
    """The processor family for which BLAS has chosen its kernels, such as "Haswell"; None without the library.

    It finds the processor out by itself. `OPENBLAS_CORETYPE` in the environment forces another, at up to half the
    speed where that knows less than the processor.
    """
    function = function_of("openblas_get_corename")
    if function is None:
        return None
    function[0].restype = ctypes.c_char_p
    return function[0]().decode()


@functools.cache
def _library() -> ctypes.CDLL | None:
    """The BLAS that this numpy has already loaded: beside it on Linux and Windows, inside it on macOS.

    Else NumPy's library, in which the system finds what that is linked with, too, but for Windows.
    """
    package = Path(np.__file__).parent
    for folder in (package.parent / "numpy.libs", package / ".libs", package / ".dylibs"):
        for path in sorted(folder.glob("*openblas*")):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(path))
    with contextlib.suppress(ImportError, OSError):
        return ctypes.CDLL(str(importlib.import_module(EXTENSION).__file__))
    return None


@functools.cache
def _symbol(name: str) -> tuple[Callable[..., Any], type[CValue]] | None:
    """A C function of the library and its integer type."""
    for spelling, integer in SPELLINGS:
        for called in (name, OF_MKL.get(name, name)):
            function = getattr(_library(), spelling.format(called), None)
            if function is not None:
                function.restype = ctypes.c_int if name.startswith("openblas_get") else None
                return function, ctypes.c_int64 if _has_long_integers() else integer
    return None


@functools.cache
def _has_long_integers() -> bool:
    """Whether an OpenBLAS whose names do not say so was built with 64-bit integers, as it tells of itself."""
    about = getattr(_library(), "openblas_get_config", None)
    if about is None:
        return False
    about.restype = ctypes.c_char_p
    return b"USE64BITINT" in about()


def function_of(name: str) -> tuple[Callable[..., Any], type[CValue]] | None:
    """A C function of the library and its integer type; None where there is none, or with `HETU_BLAS=0`."""
    return None if switched_off("HETU_BLAS") else _symbol(name)


class Symbol(int):
    """The address of a function; `name` is what it is called."""

    name: str


def address_of(name: str) -> Symbol:
    """Where a function lies, 0 where there is none."""
    return _address(name) if function_of(name) is not None else Symbol(0)


@functools.cache
def _address(name: str) -> Symbol:
    function, _ = _symbol(name)
    made = Symbol(ctypes.cast(function, ctypes.c_void_p).value or 0)
    made.name = name
    return made
