"""A form over entries as a function in C, whose results are summed in rows by ids, or put in rows of distinct ids.

A job of a sum adds a part of the entries in rows of its own, which are added up in order. `touched.py` has the pass.

Gain: 3 to 4 times the speed of a step of logistic regression or factorization machines, 1.8 of field-aware and 2.4 of
deep ones, see `examples/benchmarks/wide.py`. Off by leaving `join_entries` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.graph import OPS
from ..core.kernels import Call
from ..fuse.entries import summed_entries
from ..fuse.form import MOVES, Form, Outline, expression_of
from .c_calls import CCall
from .compiled import source
from .group_text import CTYPES, GroupLayout, GroupWriter, Text
from .groups import LEAST, PARTS, Laid, merged, single
from .moves import grain_of, in_order
from .recipes import kernel

FIXED = 64  # columns: up to so many are compiled in


class EntriesWriter(GroupWriter):
    """Writes the function: a job sums some of the entries in rows of its own, or is an entry whose rows it puts.

    `reads` are by which array of ids each operand is read, or -1; the last is by which results go; `columns` are how
    many there are, where that is compiled in. No values lie in rows of scratch.
    """

    sizes = "columns", "size"  # the last is how many rows the results have

    def __init__(self, form: Form, layout: GroupLayout, reads: tuple[int, ...], columns: int, adds: bool) -> None:
        super().__init__(form, layout)
        self.reads, self.columns = reads, columns
        self.across, self.store = (list(form.results), "+=") if adds else ([], "=")

    def _pointers(self) -> Iterator[tuple[str, str]]:
        yield from super()._pointers()
        yield from (("const long long", f"at{k}") for k in range(self.reads[-1] + 1))

    def _size(self, name: str, word: str) -> str:
        fixed = name == "columns" and self.columns
        return f"enum {{ columns = {self.columns} }};" if fixed else super()._size(name, word)

    def _begin_totals(self) -> Iterator[str]:
        yield from (f"for (long long j = 0; j < y{k}_job; j++) y{k}j[j] = 0;" for k in self.slot.values())

    def _flush(self) -> Iterator[str]:
        return iter(())

    def _end_totals(self) -> Iterator[str]:
        return iter(())

    def _row_pointers(self) -> Iterator[str]:
        yield f"const long long to = at{self.reads[-1]}[row];"
        yield "if (to < 0 || to >= size) continue;"
        job = "j" if self.across else ""
        yield from (f"{self.type(r)}* const y{k}r = y{k}{job} + to * columns;" for r, k in self.slot.items())
        yield from super()._row_pointers()

    def _start(self, k: int) -> str:
        read = self.reads[k] if k < self.count else -1
        return super()._start(k) if read < 0 else f"at{read}[row] * x{k}_0"

    def _pointer(self, k: int) -> str:
        return super()._pointer(k) if k < self.count else f"y{k - self.count}r"


@lru_cache(4096)
def _text(outline: Outline, *layout: Any) -> Text:
    return EntriesWriter(outline.form, *layout).written()


@kernel(summed_entries)
def summed_entries_bind(
    xp: ModuleType, out: Any, *arrays: Any, form: Form, reads: tuple[int, ...], size: int, scratch: Scratch
) -> list[Call] | None:
    return summed(out, form, arrays, reads, scratch)


def summed(
    out: np.ndarray, form: Form, arrays: Sequence[np.ndarray], reads: Sequence[int], scratch: Scratch
) -> list[Call] | None:
    """Calls of `summed_entries`."""
    entries, size = arrays[-1].size, len(out)
    parts = max(1, min(PARTS, entries * out.size // size // LEAST, entries // (2 * size)))
    places = out[None] if parts == 1 else scratch.empty((parts, *out.shape), out.dtype)
    calls = _calls(form, arrays, reads, [places[0]], [entries, -(-entries // parts), out.size], parts)
    if calls is None or parts == 1:
        return calls
    joining = single(OPS["sum"], out, [places], {"axis": (0,), "keepdims": False})
    return None if joining is None else [*calls, *joining]


def put(
    outs: Sequence[np.ndarray], form: Form, arrays: Sequence[np.ndarray], reads: Sequence[int]
) -> list[Call] | None:
    """Calls that put the results of a form in rows of `outs`, by distinct ids; one behind the last row is left out."""
    jobs = arrays[-1].size
    grain = grain_of(jobs, len(outs) * math.prod(form.space) * outs[0].itemsize)
    return _calls(form, arrays, reads, outs, (), jobs, grain)


def _calls(
    form: Form,
    arrays: Sequence[np.ndarray],
    reads: Sequence[int],
    outs: Sequence[np.ndarray],
    of_jobs: Sequence[int],
    jobs: int,
    grain: int = 1,
) -> list[Call] | None:
    """The function of a form for arrays, if there is one: with sizes `of_jobs` results are added, else they are put."""
    count, split = len(form.types), form.split
    known = all(n.op in MOVES or expression_of(n.op) for n in form.lines)
    if (
        not known
        or not all(o.flags.c_contiguous for o in outs)
        or any(v.type.dtype.name not in CTYPES for v in form.values())
    ):
        return None
    tables, calls = in_order(*(a for a, r in zip(arrays, reads) if r >= 0))
    ids, more = in_order(*arrays[count:], dtype=np.int64)
    looked_up = iter(tables)
    given = [a if r < 0 else next(looked_up) for a, r in zip(arrays, reads)]
    laid = [Laid(x.shape, x.strides, x.dtype) if r < 0 else _by_entry(form, x) for x, r in zip(given, reads)]
    laid += [_by_entry(form, out) for out in outs]
    if any(s % x.dtype.itemsize for x in laid for s in x.strides):
        return None
    sizes, axes, strides = merged(form, [*zip((*range(count), *form.results), laid)])
    if len(sizes) - axes > 1:  # the columns lie in no one row
        return None
    steps, inner = [s[:axes] or [0] for s in strides], [s[axes] if axes < len(s) else 0 for s in strides]
    for step, x, r in zip(steps, given, reads):
        step[0] = step[0] if r < 0 else math.prod(x.shape[1:])
    rows, columns = sizes[:axes] or [1], math.prod(form.space[split:])
    layout = GroupLayout(len(rows), (*(tuple(map(bool, s)) for s in steps), *[()] * len(ids)),
                         tuple(s if s in (0, 1) else "s" for s in inner))  # fmt: skip
    places = (*(r - count if r >= 0 else -1 for r in reads), len(ids) - 1)
    text = _text(form.outline, layout, places, columns if columns <= FIXED else 0, bool(of_jobs))
    made = source(text.text, "group")
    words = [*given, *outs, *ids, *rows, columns, len(outs[0]), *(s for own in steps for s in own if s)]
    words += [
        *(s for s in inner if s not in (0, 1)),
        *of_jobs,
        *(float(v) if "float" in d else int(v) for d, v in text.numbers),
    ]
    return None if made is None else [*calls, *more, CCall(made, "group", words, jobs, grain)]


def _by_entry(form: Form, x: np.ndarray) -> Laid:
    """Rows as an array over the entries, along which it doesn't move by itself."""
    return Laid((*form.space[: form.split], *x.shape[1:]), (*[0] * form.split, *x.strides[1:]), x.dtype)
