"""Calls of compiled functions, and the step as a table of them.

A call is a function and a block of words: addresses, integers and numbers, fixed when a program is bound. Its jobs
are pieces of work that may be done in any order and by any thread; what a job computes does not depend on who does it.
Neighboring calls make a table, which C walks through, so that a step without a Python call in between is one foreign
call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from copy import copy
from functools import cache, partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np

from ..core.kernels import Call, Calls
from . import openblas
from .ahead import alike, is_noted, with_others
from .compiled import CSource, build, source, text_of
from .compiler import compiler

NUMBERS = {"float32": "float", "float64": "double", "int32": "int", "int64": "long long"}
NUMBERS |= {"int16": "short", "uint8": "unsigned char"}
Word = Any  # an array, of which the address is meant, an integer or a number


class CCall:
    """A function of a source with its block of words. Arrays live as long as the call does.

    A call that sets the number in `doubt` has found something that `check` has to look at, and to raise an error.
    """

    def __init__(
        self,
        made: CSource,
        function: str,
        words: Sequence[Word],
        jobs: int = 1,
        grain: int = 1,
        scratch: int = 0,
        doubt: np.ndarray | None = None,
        check: Call | None = None,
    ) -> None:
        self.source, self.function, self.words = made, function, words
        self.jobs, self.grain, self.scratch = jobs, max(1, grain), scratch  # C divides by the grain
        self.doubt, self.check = doubt, check
        self.file = ""  # of a written function
        self.alone: CTable | None = None

    def block(self) -> np.ndarray:
        """The words as C reads them."""
        return np.array([*map(_bits, self.words)], np.int64)

    def __call__(self) -> None:
        """Make the call from Python, as a table of one."""
        if self.alone is None:
            if not build([self.source]):
                raise OSError(f"{self.function} could not be compiled: {self.source.wrong}")
            self.alone = CTable([copy(self)])  # not of itself: what it works on would wait for the garbage collector
        self.alone()

    @property
    def text(self) -> str:
        """A function that was made for this program, or where a written one stands."""
        return f"// {self.function}, which stands in hetu/cpu_kernels/{self.file}\n" if self.file else self.source.shown

    def address(self) -> int:
        return ctypes.cast(self.source.function(self.function), ctypes.c_void_p).value or 0


class CTable:
    """Compiled calls that C makes one after the other; `call` is the one whose check is under way."""

    def __init__(self, calls: Sequence[CCall]) -> None:
        self.calls, self.blocks, self.call = calls, [c.block() for c in calls], calls[0]
        rows = [(c.address(), address(b), c.jobs, c.grain, address(c.doubt)) for c, b in zip(calls, self.blocks)]
        self.rows = np.array(rows, np.int64)  # C holds bare addresses
        self.most = max(calls, key=attrgetter("scratch"))
        size = ctypes.c_int64.from_param(self.most.scratch)
        end = ctypes.c_void_p.from_param(address(self.rows) + self.rows.nbytes)
        self.walk = partial(_walk(), end, size, *map(ctypes.c_void_p.from_param, _threads()))
        self.start = self._from(0)

    def _from(self, row: int) -> Any:
        return ctypes.c_void_p.from_param(address(self.rows) + row * self.rows.strides[0])

    def __call__(self) -> None:
        row = self.walk(self.start)
        while row:  # counted from the end: this one has its doubts
            if row < 0:
                raise MemoryError(f"{self.most.scratch:,} bytes for each thread to work in, for {self.most.function}")
            self.call = self.calls[-row]
            self.call.check()
            row = self.walk(self._from(len(self.calls) - row + 1))


def _bits(word: Word) -> int:
    if type(word) is int:
        return word
    if isinstance(word, np.ndarray):
        return address(word)
    return int(np.float64(word).view(np.int64)) if isinstance(word, float | np.floating) else int(word)


def address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


@cache
def _walk() -> Any:
    """What walks through tables, the first that a compiler is asked for; None without one."""
    walker = source(text_of("walk.c"))
    if walker is None or not build([walker]):
        return None
    walk = walker.function("walk")
    walk.restype = ctypes.c_int64
    return walk


def _threads() -> list[int]:
    """The functions that tell and set how many threads there are: those of BLAS, or ours where it has none."""
    found: list[int] = [openblas.address_of(f"openblas_{verb}_num_threads") for verb in ("get", "set")]
    return found if all(found) else _own_threads()


@cache
def _own_threads() -> list[int]:
    walker = source(text_of("walk.c"))
    assert walker is not None and build([walker])  # whoever makes a table has been walking, by any compiler
    walker.function("set_threads")(openblas.wanted())
    return [ctypes.cast(walker.function(f"{verb}_threads"), ctypes.c_void_p).value or 0 for verb in ("get", "set")]


def compiles() -> bool:
    """Whether tables can be walked through, without which nothing is worth compiling."""
    return compiler() is not None and _walk() is not None


def c_call(
    file: str, function: str, dtype: Any, *words: Word, jobs: int = 1, grain: int = 1, scratch: int = 0, **defines: str
) -> CCall | None:
    """A call of a written kernel, with `T` standing for the C name of the dtype, or None where it cannot be compiled.

    `grain` is the least number of jobs that is worth another thread (25 us of work); `scratch` the bytes that
    each thread gets to work in. Other arguments are names that the text knows, and what they stand for.
    """
    made = _written(file, np.dtype(dtype), **defines) if compiles() else None
    if made is None or made.wrong:
        return None
    call = CCall(made, function, words, jobs, grain, scratch)
    call.file = file
    return call


@cache
def _written(file: str, dtype: np.dtype, **defines: str) -> CSource | None:
    if dtype.name not in NUMBERS:
        return None
    names = {"T": NUMBERS[dtype.name]} | defines
    return source("\n".join((*(f"#define {name} {names[name]}" for name in names), f'#include "{file}"')))


def checked(ranges: Sequence[tuple[Any, ...]], check: Call) -> Calls:
    """The check of an operator, made only where an id lies outside 0 ... size - 1, or falls where they should rise."""
    made: list[Call] = []
    for ids, size, _, *rises in ranges:
        doubt, contiguous = np.zeros(1, np.int64), ids.flags.c_contiguous
        call = c_call("check.c", "in_range", ids.dtype, ids, ids.size, size, doubt, len(rises)) if contiguous else None
        if call is None:
            return [check]
        call.doubt, call.check = doubt, check
        made.append(call)
    return made


def all_or_none(calls: Iterable[Call | None]) -> list[Call] | None:
    """The calls, or None if one of them could not be made."""
    made = [*calls]
    found = [call for call in made if call is not None]
    return found if len(found) == len(made) else None


def joined(calls: Sequence[Call]) -> list[Call] | None:
    """The calls with each run of compiled ones as one table; None where a rank could not compile one."""
    wanted = [call.source for call in calls if isinstance(call, CCall)]
    if is_noted(wanted):
        return []
    build(with_others(wanted))
    lacking = [source for source in dict.fromkeys(wanted) if source.library is None]
    if not alike(lacking) or lacking:
        return None
    made: list[Call] = []
    for kind, group in groupby(calls, type):
        run = list(group)
        made += [CTable(run)] if kind is CCall else run
    return made
