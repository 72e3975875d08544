"""Calls of compiled functions, and the step as a table of them.

A call is a function and a block of words: addresses, integers and numbers, fixed when a program is bound. Its jobs
are pieces of work that may be done in any order and by any thread; what a job computes does not depend on who does it.
Neighboring calls make a table, which C walks through, so that a step without a Python call in between is one foreign
call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np

from ..core.kernels import Call
from . import openblas
from .compiled import Source, build, source, text_of

NUMBERS = {"f": "float", "d": "double"}
Word = Any  # an array, of which the address is meant, an integer or a number


class CCall:
    """A function of a source with its block of words. Arrays live as long as the call does."""

    def __init__(self, made: Source, function: str, words: Sequence[Word], jobs: int, grain: int, scratch: int) -> None:
        self.source, self.function, self.words = made, function, words
        self.jobs, self.grain, self.scratch = jobs, grain, scratch
        self.alone: Call | None = None

    def block(self) -> np.ndarray:
        """The words as C reads them."""
        block = np.zeros(max(len(self.words), 1), np.int64)
        numbers = block.view(np.float64)
        for k, word in enumerate(self.words):
            if isinstance(word, float | np.floating):
                numbers[k] = word
            else:
                block[k] = word.ctypes.data if isinstance(word, np.ndarray) else int(word)
        return block

    def __call__(self) -> None:
        """Make the call from Python, as a table of one."""
        if self.alone is None:
            if not build([self.source]):
                raise OSError(f"{self.function} could not be compiled: {self.source.wrong}")
            self.alone = table([self])
        self.alone()

    def address(self) -> int:
        return ctypes.cast(self.source.function(self.function), ctypes.c_void_p).value or 0


def table(calls: Sequence[CCall]) -> Call:
    """One call that makes all of these, whose functions are compiled."""
    blocks = [c.block() for c in calls]
    rows = np.array([(c.address(), b.ctypes.data, c.jobs, c.grain) for c, b in zip(calls, blocks)], np.int64)
    size = max(c.scratch for c in calls)
    place = ctypes.c_void_p.from_param(rows.ctypes.data)
    numbers = map(ctypes.c_int64.from_param, (len(rows), size))
    made = partial(_walk(), place, *numbers, *map(_place, ("get_num_threads", "set_num_threads")))
    made.keeps = calls, blocks, rows  # C holds bare addresses
    return made


@cache
def _place(function: str) -> Any:
    """The address of a function of OpenBLAS, 0 without it."""
    found = openblas.function_of(f"openblas_{function}")
    return ctypes.c_void_p.from_param(found and ctypes.cast(found[0], ctypes.c_void_p).value)


@cache
def _walk() -> Any:
    """What walks through tables, the first that a compiler is asked for; None without one."""
    walker = source(text_of("walk.c"))
    if walker is None or not build([walker]):
        return None
    walk = walker.function("walk")
    walk.restype = None
    return walk


def c_call(
    file: str, function: str, dtype: Any, *words: Word, jobs: int = 1, grain: int = 1, scratch: int = 0, **defines: str
) -> CCall | None:
    """A call of a written kernel, with `T` standing for float or double, or None where it cannot be compiled.

    `grain` is the least number of jobs that is worth waking another thread (100 us of work); `scratch` the bytes that
    each thread gets to work in. Other arguments are names that the text knows, and what they stand for.
    """
    made = _written(file, np.dtype(dtype), **defines) if _walk() is not None else None
    return None if made is None or made.wrong else CCall(made, function, words, jobs, grain, scratch)


@cache
def _written(file: str, dtype: np.dtype, **defines: str) -> Source | None:
    if dtype.char not in NUMBERS:
        return None
    names = {"T": NUMBERS[dtype.char]} | defines
    return source("\n".join((*(f"#define {name} {names[name]}" for name in names), text_of(file))), contract=True)


def joined(calls: Sequence[Call]) -> list[Call] | None:
    """The calls with each run of compiled ones as one table; None where one of them could not be compiled."""
    if not build([call.source for call in calls if isinstance(call, CCall)]):
        return None
    made: list[Call] = []
    for kind, group in groupby(calls, type):
        run = list(group)
        made += [table(run)] if kind is CCall else run
    return made
