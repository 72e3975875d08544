"""Launches the kernels of `entries.cu` with the lines of a form: sums of what is computed entry by entry.

What meets in one row is sorted and added in that order, as in `tables.py`. Left out: 16-bit floats, and entries along
several axes of which an operand lacks some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..fuse.entries import summed_entries
from ..fuse.form import Form
from ..fuse.line_text import LineWriter
from .group_text import TYPES
from .launchers import kernel
from .machine import Call, Machine, contiguous, spread_rows
from .source import CTYPES, assemble
from .tables import PIECE, sorting, with_runs


class EntryPlace(NamedTuple):
    """Where an operand has its number for entry e and column k: by which array of ids, or -1, and what moves it."""

    read: int
    by_entry: bool
    by_column: bool

    def text(self, n: int) -> str:
        row = f"at{self.read}[e]" if self.read >= 0 else "e" if self.by_entry else "0"
        return f"x{n}[{row} * inner + k]" if self.by_column else f"x{n}[{row}]"


@lru_cache(4096)
def text_of(
    form: Form, places: tuple[EntryPlace, ...], ids: tuple[str, ...]
) -> tuple[str, tuple[tuple[str, float], ...]]:
    """The text of both kernels, and the numbers that they take behind the arrays; `ids` are the dtypes of ids."""
    writer = LineWriter(form, TYPES)
    body = [*_lines(writer, form, places)]
    dtype = form.types_of_results()[0].dtype.name
    given = [(f"const {CTYPES[t.dtype.name]}*", f"x{k}") for k, t in enumerate(form.types)]
    given += [(f"const {CTYPES[i]}*", f"at{k}") for k, i in enumerate(ids)]
    given += [(CTYPES[d], f"c{k}") for k, (d, _) in enumerate(writer.numbers)]
    parameters, arguments = (", ".join(parts) for parts in zip(*((f"{t} {name}", name) for t, name in given)))
    lines = "".join(f"    {line}\n" for line in body)
    own = f"__device__ inline T value({parameters}, long long e, long long k, long long inner) {{\n{lines}}}\n"
    known = {"PARAMETERS": parameters, "ARGUMENTS": arguments, "VALUE(e, k)": f"value({arguments}, e, k, inner)"}
    macros = "".join(f"#define {name} {text}\n" for name, text in known.items())
    whole = f"constexpr int PACK = 1;\n{macros}{own}{with_runs('entries')}"
    return assemble(whole, "entries.cu", S=dtype, I=ids[-1]), tuple(writer.numbers)


def _lines(writer: LineWriter, form: Form, places: Sequence[EntryPlace]) -> Iterator[str]:
    yield from (f"const {writer.local(k)} v{k} = {place.text(k)};" for k, place in enumerate(places))
    yield from (writer.statement(n, "k") for n in writer.lines)
    yield f"return v{form.results[0]};"


@kernel(summed_entries)
def sums_of_entries(
    machine: Machine, out: Any, *arrays: Any, form: Form, reads: tuple[int, ...], size: int
) -> list[Call] | None:
    count, into = len(form.types), arrays[-1]
    places = [_place(form, k, read) for k, read in enumerate(reads)]
    if not contiguous(*arrays, out) or None in places:
        return None
    text, numbers = text_of(form, tuple(places), tuple(i.dtype.name for i in arrays[count:]))
    xp, flat, pieces, inner = machine.xp, into.reshape(-1), (into.size - 1) // PIECE, prod(out.shape[1:])
    ordered, order, parts = xp.empty_like(flat), xp.empty(into.size, "int64"), xp.empty((pieces + 1, inner), out.dtype)
    words = (*arrays, *(np.dtype(d).type(v) for d, v in numbers), ordered, order, parts)
    calls: list[Call] = [
        partial(out.fill, 0),
        sorting(machine, into, order),
        partial(xp.take, flat, order, out=ordered),
    ]
    if pieces:
        launch = machine.kernel(text, "sum_pieces_of_entries")
        calls.append(partial(launch, *spread_rows(pieces, inner, 1), (*words, into.size, inner)))
    launch = machine.kernel(text, "sum_entries")
    return [*calls, partial(launch, *spread_rows(into.size, inner, 1), (*words, out, into.size, size, inner))]


def _place(form: Form, k: int, read: int) -> EntryPlace | None:
    """Where an operand lies; None where it lacks some axes of the entries, or of the columns."""
    shape = form.aligned(k, form.types[k].shape, 1)
    moves = []
    for own, whole in (
        (shape[: form.split], form.space[: form.split]),
        (shape[form.split :], form.space[form.split :]),
    ):
        if own != whole and prod(own) != 1:
            return None
        moves.append(prod(own) != 1)
    return EntryPlace(read - len(form.types) if read >= 0 else -1, *moves)
