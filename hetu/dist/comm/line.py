"""The line of a call that communicates, by which the calls of ranks are compared.

Two calls are one if one expression of the source makes them; those of two expressions differ, even in one line. What a
call is given does not tell: an array has no name, and ranks may well pass other numbers at other addresses, here a new
array and there an old one. So of `for x in arrays: comm.all_reduce(x, x)` no more than kinds, sizes and dtypes are
compared; `arrays` must be in one order on all ranks. Operators that one line makes, as in `[all_reduce(g) for g in
gradients]`, are told apart by what they are computed from: ranks that go through a set of names do so in orders of
their own.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import linecache
import os
import sys
import threading
import weakref
import zlib
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from ...core.errors import PACKAGE, Site
from ...core.graph import Node

BETWEEN = (PACKAGE, functools.__file__, contextlib.__file__)
NOBODYS = (*BETWEEN, threading.__file__, "<frozen")  # whose lines tell a user nothing
REMEMBERED = 512  # paths


@dataclass(frozen=True, slots=True, eq=False)  # to hash a code takes long
class CallPath:
    """The code of a call and of the two calls that led to it, with their instructions.

    As numbers, which are the same on all ranks: `place` of the call alone, `way` of all.
    """

    codes: tuple[CodeType, ...]
    at: tuple[int, ...]
    place: int
    way: int


CallLine = Site | str | CallPath | None  # a program's, or as `calling_line` finds it: a Site takes longer


def show(line: CallLine) -> str:
    """`train.py:7`."""
    return _place(line.codes[0], line.at[0]) if isinstance(line, CallPath) else str(line)


def calling_line(above: int = 2) -> CallLine:
    """Where the user's code is, as `user_site` finds it, and the two calls that led there.

    The line alone does not tell two calls through one helper apart. So many frames are hetu's at least.
    """
    frame: FrameType | None = sys._getframe(above)
    while frame is not None:
        code = frame.f_code
        made = code.co_filename == "<string>" and frame.f_globals.get("__name__", "").startswith("hetu.")
        if not made and not code.co_filename.startswith(BETWEEN):
            break
        frame = frame.f_back
    if frame is None:
        return None
    if (caller := frame.f_back) is None:
        return _path_of((code,), (frame.f_lasti,))
    if (first := caller.f_back) is None:
        return _path_of((code, caller.f_code), (frame.f_lasti, caller.f_lasti))
    between, outer = caller.f_code, first.f_code
    key = frame.f_lasti, caller.f_lasti, first.f_lasti, id(code), id(between), id(outer)
    return _paths.get(key) or _path_of((code, between, outer), key[:3])


def numbers(line: CallLine) -> tuple[int, int]:
    """The place of a line, and that with the calls that led to it, as numbers."""
    if type(line) is CallPath:
        return line.place, line.way
    if not isinstance(line, Site):
        return 0, 0
    path = _path_of((line.code,), (line.instruction,))
    return path.place, hash((path.place, line.number)) if isinstance(line, OperandSite) else path.way


def _path_of(codes: tuple[CodeType, ...], at: tuple[int, ...]) -> CallPath:
    """Of instructions: by where their expressions begin and end in the source, which tells those of one line apart."""
    key = (*at, *map(id, codes))
    if (found := _paths.get(key)) is None:
        if len(_paths) >= REMEMBERED:
            _paths.clear()
        way = (*map(_number, codes, at),)
        found = _paths[key] = CallPath(codes, at, way[0], hash(way))
    return found


_paths: dict[tuple[int, ...], CallPath] = {}  # which hold the codes, whose ids are in the keys


def _number(code: CodeType, instruction: int) -> int:
    position = _position(code, instruction)
    unknown = instruction if position[2] is None else 0
    return mixed((os.path.basename(code.co_filename), *position, unknown))


@functools.lru_cache(1024)
def mixed(numbers: tuple[Any, ...]) -> int:
    """A number to be added up: Python's hashes of (a, x) and (b, y) often add up as those of (a, y) and (b, x) do."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")


def show_way(line: CallLine) -> str:
    """`train.py:7 < train.py:20`: the lines of the calls that led to a line."""
    if not isinstance(line, CallPath):
        return line.words if isinstance(line, OperandSite) else ""
    shown = ((code, at) for code, at in zip(line.codes[1:], line.at[1:]) if not code.co_filename.startswith(NOBODYS))
    return " < ".join(_place(code, at) for code, at in shown)


def _place(code: CodeType, instruction: int) -> str:
    """`train.py:7`, or `train.py:7:20` for an expression that does not begin its line, as another may stand before."""
    line, _, column, _ = _position(code, instruction)
    text = linecache.getline(code.co_filename, line).encode()
    more = f":{column + 1}" if column and column > len(text) - len(text.lstrip()) else ""
    return f"{Site(code, line, instruction)}{more}"


def _position(code: CodeType, instruction: int) -> tuple[int, int | None, int | None, int | None]:
    """The first and last line and column of an expression; `-X no_debug_ranges` leaves the columns out."""
    places = itertools.islice(code.co_positions(), instruction // 2, None)
    line, last, column, end = next(places, (None,) * 4)
    line = line or next((place[0] for place in places if place[0]), code.co_firstlineno)
    return line, last, column, end


# -- operators -------------------------------------------------------------------------------------------------

_known: weakref.WeakKeyDictionary[Node, int] = weakref.WeakKeyDictionary()


class OperandSite(Site):
    """A line, and what an operator of it is given: in words, and as a number that ranks with one graph share."""

    words: str
    number: int

    @classmethod
    def of(cls, site: Site, given: Node) -> OperandSite:
        """The line `site`, with what it is given there."""
        made = cls(*site)
        made.number = digest(given)
        made.words = f"{given.name} of {given.site} (graph {made.number:08x})"
        return made


def digest(node: Node) -> int:
    """A number of the graph of `node`: operators, names, and attributes that are numbers or texts."""
    open_ = [node]
    while open_:
        if unknown := [i for i in open_[-1].inputs if i not in _known]:
            open_ += unknown
            continue
        last = open_.pop()
        plain = [value for _, value in sorted(last.attrs.items()) if isinstance(value, int | float | str)]
        _known[last] = zlib.crc32(repr((last.op.name, plain, [_known[i] for i in last.inputs])).encode())
    return _known[node]
