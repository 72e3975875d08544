"""Sums of what is computed entry by entry, in C: see `hetu/fuse/entries.py` for what is found, and why.

A job sums a part of the entries in rows of its own, which are added up in order. Of the rows of a table that a step
touches each has a seat, in the order in which they come first: so frequent ones lie side by side and are summed in the
cache, and each row is written once, by gradient descent too.

Gain: 2 to 5 times the speed of a step of logistic regression or of a factorization machine, see
`examples/benchmarks/wide.py`. Off by leaving `join_entries` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..core.backend import Scratch
from ..core.graph import OPS, Node
from ..core.kernels import Call
from ..fuse.entries import Joining, summed_entries
from ..fuse.form import Form, Outline
from ..fuse.places import fewest_axes
from ..fuse.unit import Limits
from .c_calls import CCall, compiles
from .compiled import source
from .group_text import CTYPES, GroupWriter, Text
from .groups import single
from .moves import in_order
from .recipes import kernel
from .touched import Touched, put_rows, rows_at, subtract_rows, touched

LIMITS = Limits(frozenset(CTYPES))
PARTS, LEAST = 8, 1 << 14  # of the entries, whose sums are made apart, and the least numbers of one
FIXED = 64  # columns: up to so many are compiled in
MANY = 4096  # entries: slopes of fewer are descended one by one, as these stay in the cache


def join_entries(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`summed_entries` in the place of sums of rows that are computed entry by entry."""
    return _OnRows(outputs, LIMITS).joined() if compiles() else tuple(outputs)


class _OnRows(Joining):
    """Gradient descent too subtracts a sum from each row once."""

    def __init__(self, outputs: Sequence[Node], limits: Limits) -> None:
        super().__init__(outputs, limits)
        self.found: Touched = {}

    def sums(self, node: Node) -> bool:
        return node.op is subtract_rows or super().sums(node)

    def replaced(self, node: Node, inputs: tuple[Node, ...]) -> Node | None:
        if node.op is not subtract_rows:
            return super().replaced(node, inputs)
        table, ids, _, rate = inputs
        if math.prod(ids.shape) < MANY:
            return None
        places, slots = touched(table, ids, node.attrs["window"], self.found)
        old = rows_at(table, places)
        sums = self.summed(node, slots, old.shape[0])
        return None if sums is None else put_rows(table, places, old - rate * sums)


# -- in C --------------------------------------------------------------------------------------------------------------


class EntriesLayout(NamedTuple):
    """As that of a group; by which array of ids each operand is read, or -1; and the columns, where they are fixed."""

    rows: int
    moves: tuple[tuple[bool, ...], ...]
    inner: tuple[int | str, ...]
    reads: tuple[int, ...]
    ids: int
    columns: int


class EntriesWriter(GroupWriter):
    """Writes the function: a job sums some of the entries in rows of its own."""

    store = "+="
    layout: Any

    def __init__(self, form: Form, layout: Any) -> None:
        super().__init__(form, layout)
        self.across = list(form.results)

    @property
    def in_jobs(self) -> bool:
        return True

    def _pointers(self) -> Iterator[tuple[str, str]]:
        yield from super()._pointers()
        yield from (("const long long", f"at{k}") for k in range(self.layout.ids))

    def _head(self) -> Iterator[str]:
        for line in super()._head():
            fixed = self.layout.columns and line.startswith("const long long columns")
            yield f"enum {{ columns = {self.layout.columns} }};" if fixed else line
        yield "const long long size = y0_job / columns;"

    def _begin_totals(self) -> Iterator[str]:
        yield from (f"for (long long j = 0; j < y{k}_job; j++) y{k}j[j] = 0;" for k in self.slot.values())

    def _flush(self) -> Iterator[str]:
        return iter(())

    def _end_totals(self) -> Iterator[str]:
        return iter(())

    def _row_pointers(self) -> Iterator[str]:
        yield f"const long long to = at{self.layout.ids - 1}[row];"
        yield "if (to < 0 || to >= size) continue;"
        yield from (f"{self.type(r)}* const y{k}r = y{k}j + to * columns;" for r, k in self.slot.items())
        yield from super()._row_pointers()

    def _start(self, k: int) -> str:
        read = self.layout.reads[k] if k < self.count else -1
        return super()._start(k) if read < 0 else f"at{read}[row] * x{k}_0"

    def _pointer(self, k: int) -> str:
        return super()._pointer(k) if k < self.count else f"y{k - self.count}r"


@lru_cache(4096)
def _text(outline: Outline, layout: EntriesLayout) -> Text:
    return EntriesWriter(outline.form, layout).written()


@kernel(summed_entries)
def summed_entries_bind(
    xp: ModuleType, out: Any, *arrays: Any, form: Form, reads: tuple[int, ...], size: int, scratch: Scratch
) -> list[Call] | None:
    count = len(form.types)
    tables, calls = in_order(*(a for a, r in zip(arrays, reads) if r >= 0))
    ids, more = in_order(*arrays[count:], dtype=np.int64)
    found = iter(tables)
    given = [a if r < 0 else next(found) for a, r in zip(arrays[:count], reads)]
    if not out.flags.c_contiguous or any(s % a.itemsize for a in given for s in a.strides):
        return None
    laid = _laid(form, given, out, tuple(r - count if r >= 0 else -1 for r in reads), len(ids))
    if laid is None:
        return None
    layout, sizes, strides = laid
    text = _text(form.outline, layout)
    made, entries = source(text.text, "group"), ids[-1].size
    if made is None:
        return None
    parts = max(1, min(PARTS, entries * sizes[-1] // LEAST, entries // (2 * size)))
    place = out if parts == 1 else scratch.empty((parts, *out.shape), out.dtype)
    words: list[Any] = [*given, place, *ids, *sizes, 0, *strides, entries, -(-entries // parts), out.size]
    words += [float(v) if "float" in d else int(v) for d, v in text.numbers]
    joining = single(OPS["sum"], out, [place], {"axis": (0,), "keepdims": False}) if parts > 1 else []
    return None if joining is None else [*calls, *more, CCall(made, "group", words, parts), *joining]


def _laid(
    form: Form, given: Sequence[np.ndarray], out: np.ndarray, reads: tuple[int, ...], ids: int
) -> tuple[EntriesLayout, list[int], list[int]] | None:
    """The layout, and the sizes and strides that are arguments; None where columns lie in no one row."""
    split, space = form.split, form.space
    laid = [(x, r) for x, r in zip(given, reads)]
    strides = [form.aligned(k, _strides(x, r, split), 0) for k, (x, r) in enumerate(laid)]
    strides.append((*_strides(out, 0, split),))
    rows, by_rows = fewest_axes(space[:split], [s[:split] for s in strides])
    columns, by_columns = fewest_axes(space[split:], [s[split:] for s in strides])
    if len(columns) > 1:
        return None
    sizes = [*(rows or [1]), *(columns or [1])]
    steps = [own or [0] for own in by_rows]
    for k, (x, r) in enumerate(laid):
        steps[k][0] = math.prod(x.shape[1:]) if r >= 0 else steps[k][0]
    inner = [own[0] if own else 0 for own in by_columns]
    layout = EntriesLayout(
        len(sizes) - 1,
        (*(tuple(s != 0 for s in own) for own in steps), *[()] * ids),
        tuple(s if s in (0, 1) else "s" for s in inner),
        reads,
        ids,
        sizes[-1] if sizes[-1] <= FIXED else 0,
    )
    return layout, sizes, [s for own in steps for s in own if s] + [s for s in inner if s not in (0, 1)]


def _strides(x: np.ndarray, read: int, split: int) -> list[int]:
    """In numbers; 0 along the axes of the entries for what is looked up."""
    own = [0 if n == 1 else s // x.itemsize for n, s in zip(x.shape, x.strides)]
    return own if read < 0 else [*[0] * split, *own[1:]]
