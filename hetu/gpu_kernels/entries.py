"""Rows that are computed entry by entry where kernels add them: sums by ids in `scatter.cu`, updates in `update.cu`.

What meets in one row is sorted and added in that order, see `runs.cu`, pieces of frequent ids apart. So each row of a
sum, or of a table and its states, is written once. Left out: packs of neighbors, and entries along several axes of
which an operand lacks some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..fuse.entries import RowsUpdate, summed_entries
from ..fuse.form import Form
from ..fuse.line_text import LineWriter
from .group_text import TYPES
from .launchers import kernel
from .machine import Call, Machine, contiguous
from .source import CTYPES
from .tables import SummedRows, added_rows
from .update import update_rows


@kernel(summed_entries)
def sums_of_entries(
    machine: Machine, out: Any, *arrays: Any, form: Form, reads: tuple[int, ...], size: int
) -> list[Call] | None:
    rows = _rows(form, reads, arrays[:-1])
    added = None if rows is None or not contiguous(arrays[-1], out) else added_rows(machine, out, arrays[-1], rows)
    return None if added is None else [partial(out.fill, 0), *added]


def entered(made: Any) -> None:
    kernel(made)(updates_by_entries)


def updates_by_entries(
    machine: Machine, out: Any, *arrays: Any, update: RowsUpdate, form: Form, reads: tuple[int, ...]
) -> list[Call] | None:
    tables, scalars, given, ids = update.cut(arrays)
    rows, attrs = _rows(form, reads, given), {name: value for name, value in update.attrs if name != "window"}
    return None if rows is None else update_rows(machine, update.op.row_update, out, tables, ids, rows, scalars, attrs)


def _rows(form: Form, reads: Sequence[int], arrays: Sequence[Any]) -> SummedRows | None:
    """The rows of a form of these arrays and ids, see `summed_entries`; None where they do not lie in order."""
    places = [_place(form, k, read) for k, read in enumerate(reads)]
    if not contiguous(*arrays) or None in places:
        return None
    text, numbers = _text(form, tuple(places), tuple(CTYPES[a.dtype.name] for a in arrays[len(places) :]))
    return SummedRows((*arrays, *(np.dtype(d).type(v) for d, v in numbers)), form.types_of_results()[0].dtype, text)


class _Place(NamedTuple):
    """Where an operand has its number for entry e and column k: by which array of ids, or -1, and what moves it."""

    read: int
    by_entry: bool
    by_column: bool

    def text(self, n: int) -> str:
        row = f"at{self.read}[e]" if self.read >= 0 else "e" if self.by_entry else "0"
        return f"x{n}[{row} * inner + k]" if self.by_column else f"x{n}[{row}]"


def _place(form: Form, k: int, read: int) -> _Place | None:
    """Where an operand lies; None where it lacks some axes of the entries, or of the columns."""
    shape, split, moves = form.aligned(k, form.types[k].shape, 1), form.split, []
    for own, whole in ((shape[:split], form.space[:split]), (shape[split:], form.space[split:])):
        if own != whole and prod(own) != 1:
            return None
        moves.append(prod(own) != 1)
    return _Place(read - len(form.types) if read >= 0 else -1, *moves)


@lru_cache(4096)
def _text(form: Form, places: tuple[_Place, ...], ids: tuple[str, ...]) -> tuple[str, tuple[tuple[str, float], ...]]:
    """What `runs.cu` knows of rows, and the numbers that kernels take behind arrays; `ids` are the types of ids."""
    writer = LineWriter(form, TYPES)
    lines = "".join(f"    {line}\n" for line in _lines(writer, form, places))
    given = [(f"const {CTYPES[t.dtype.name]}* ", f"x{k}") for k, t in enumerate(form.types)]
    given += [(f"const {dtype}* ", f"at{k}") for k, dtype in enumerate(ids)]
    given += [(f"{CTYPES[d]} ", f"c{k}") for k, (d, _) in enumerate(writer.numbers)]
    parameters = f"#define ROWS {', '.join(t + name for t, name in given)}\n"
    arguments = f"#define THE_ROWS {', '.join(name for _, name in given)}\n"
    head = "__device__ inline Pack<S, PACK> row_of(ROWS, long long e, long long inner, long long k) {\n"
    return f"{parameters}{arguments}{head}{lines}}}\n", tuple(writer.numbers)


def _lines(writer: LineWriter, form: Form, places: Sequence[_Place]) -> Iterator[str]:
    yield from (f"const {writer.local(k)} v{k} = {place.text(k)};" for k, place in enumerate(places))
    yield from (writer.statement(n, "k") for n in writer.lines)
    yield f"return {{{{v{form.results[0]}}}}};"
