"""Rows that are computed entry by entry where kernels add them: sums by ids in `scatter.cu`, updates in `update.cu`.

What meets in one row is sorted and added in that order, see `runs.cu`, pieces of frequent ids apart. So each row of a
sum, or of a table and its states, is written once. Left out: packs of neighbors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

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
    if not contiguous(*arrays):
        return None
    text, numbers = _text(form, tuple(reads), tuple(CTYPES[a.dtype.name] for a in arrays[len(reads) :]))
    return SummedRows((*arrays, *(np.dtype(d).type(v) for d, v in numbers)), form.types_of_results()[0].dtype, text)


def _place(form: Form, k: int, read: int) -> str:
    """Where an operand has its number for entry e and column k."""
    shape, split = form.aligned(k, form.types[k].shape, 1), form.split
    row = f"at{read - len(form.types)}[e]" if read >= 0 else _step("e", shape[:split], form.space[:split])
    own, whole = shape[split:], form.space[split:]
    width = "inner" if own == whole else f"{prod(own)}LL"
    return f"x{k}[{row}]" if prod(own) == 1 else f"x{k}[{row} * {width} + {_step('k', own, whole)}]"


def _step(name: str, own: Sequence[int], whole: Sequence[int]) -> str:
    """The place along some axes, of which an operand may lack some, of what has this number along all of them."""
    if own == whole or prod(own) == 1:
        return name if prod(own) > 1 else "0"
    strides = [(prod(whole[a + 1 :]), n, prod(own[a + 1 :])) for a, n in enumerate(own) if n > 1]
    return f"({' + '.join(f'{name} / {apart} % {n} * {step}' for apart, n, step in strides)})"


@lru_cache(4096)
def _text(form: Form, reads: tuple[int, ...], ids: tuple[str, ...]) -> tuple[str, tuple[tuple[str, float], ...]]:
    """What `runs.cu` knows of rows, and the numbers that kernels take behind arrays; `ids` are the types of ids."""
    writer = LineWriter(form, TYPES)
    lines = "".join(f"    {line}\n" for line in _lines(writer, form, reads))
    given = [(f"const {CTYPES[t.dtype.name]}* ", f"x{k}") for k, t in enumerate(form.types)]
    given += [(f"const {dtype}* ", f"at{k}") for k, dtype in enumerate(ids)]
    given += [(f"{CTYPES[d]} ", f"c{k}") for k, (d, _) in enumerate(writer.numbers)]
    parameters = f"#define ROWS {', '.join(t + name for t, name in given)}\n"
    arguments = f"#define THE_ROWS {', '.join(name for _, name in given)}\n"
    head = "__device__ inline Pack<S, PACK> row_of(ROWS, long long e, long long inner, long long k) {\n"
    return f"{parameters}{arguments}{head}{lines}}}\n", tuple(writer.numbers)


def _lines(writer: LineWriter, form: Form, reads: Sequence[int]) -> Iterator[str]:
    yield from (f"const {writer.local(k)} v{k} = {_place(form, k, read)};" for k, read in enumerate(reads))
    yield from (writer.statement(n, "k") for n in writer.lines)
    yield f"return {{{{v{form.results[0]}}}}};"
