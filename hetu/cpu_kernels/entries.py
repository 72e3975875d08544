"""What is computed entry by entry, in C: sums by ids, and the rows of tables that a step touched, which are put back.

`hetu/fuse/entries.py` finds the sums, and says why. A job sums a part of the entries in rows of its own, which are
added up in order. Of the rows of a table that a step touches each has a seat, in the order in which they come first: so
frequent ones lie side by side and are summed in the cache. Then one loop over the seats reads each row and its states,
applies a rule, whoever wrote it, and writes them once, in gradient descent too.

Gain: 3 times the speed of a step of logistic regression or of a factorization machine, 1.8 of field-aware and deep
ones, see `examples/benchmarks/wide.py`. Off by leaving `join_entries` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from functools import cache, lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..core.backend import Scratch
from ..core.graph import OPS, Node, origin_of, replace
from ..core.kernels import Call
from ..core.op import Op, op
from ..core.types import TensorType
from ..fuse.entries import Joining, summed_entries
from ..fuse.form import Form, Outline, fused
from ..fuse.places import fewest_axes
from ..fuse.unit import Limits
from ..ops.index import take
from .c_calls import CCall, compiles
from .compiled import CSource, source
from .group_text import CTYPES, GroupWriter, Text
from .groups import single
from .moves import grain_of, in_order, moved
from .recipes import kernel
from .touched import Touched, put_rows, rows_at, subtract_rows, touched, touched_rows

LIMITS = Limits(frozenset(CTYPES))
PARTS, LEAST = 8, 1 << 14  # of the entries, whose sums are made apart, and the least numbers of one
FIXED = 64  # columns: up to so many are compiled in
MANY = 4096  # entries: slopes of fewer are descended one by one, as these stay in the cache


def join_entries(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`summed_entries` in the place of sums of rows that are computed entry by entry, and `put_entries` of rows."""
    return _Puts(_OnRows(outputs, LIMITS).joined(), LIMITS).put() if compiles() else tuple(outputs)


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


class _Puts(Joining):
    """What is computed for each row that is touched, and put back, by a rule that acts on elements."""

    def sums(self, node: Node) -> bool:
        return node.op is put_rows

    def gathers(self, node: Node, entries: Any = None) -> bool:
        if node.op is take and node.inputs[1].inputs[:1] and node.inputs[1].inputs[0].op is touched_rows:
            return True  # what lies behind the table is not put back
        return super().gathers(node, entries)

    def put(self) -> tuple[Node, ...]:
        """`put_entries` in the place of all `put_rows` of a rule, which are those that share what they are made of."""
        self.new, groups = dict(zip(self.at, self.at)), list[tuple[list[Node], set[Node]]]()
        for node in self.at:
            if node.op is put_rows and node.inputs[2] in self.inner and 0 not in (*node.shape, *node.inputs[2].shape):
                lines = self._lines(node.inputs[2], node.inputs[1].shape)
                parts = {i for line in lines for i in (line, *line.inputs) if i.ndim}
                group = next((g for g in groups if not g[1].isdisjoint(parts)), None)
                if group is None:
                    groups.append(([node], parts))
                else:
                    group[0].append(node)
                    group[1].update(parts)
        made: dict[Node, Node] = {}
        for nodes, _ in groups:
            made |= zip(nodes, self._put(nodes))
        return replace(self.outputs, made)

    def _put(self, group: Sequence[Node]) -> Sequence[Node]:
        places, entries = group[0].inputs[1], group[0].inputs[1].shape
        rows = [node.inputs[2] for node in group]
        lines = sorted({line for r in rows for line in self._lines(r, entries)}, key=lambda n: self.at.get(n, -1))
        unit = self.rules.unit_of_all(lines[::-1])
        if unit is None or unit.space != rows[0].shape or not {*rows} <= {*unit.members}:
            return group
        form, given, lists, reads = self.read(lines, unit.members, rows, entries)
        looked_up = {x: k for k, x in enumerate(given) if reads[k] >= 0}
        tables = tuple(looked_up[node.inputs[0]] for node in group if node.inputs[0] in looked_up)
        if len({*tables}) < len(group) or not {node.inputs[1] for node in group} == {*lists} == {places}:
            return group
        attrs = {"form": form, "reads": tuple(r if r < 0 else len(given) for r in reads), "tables": tables}
        with origin_of(group[0]):
            new = _putting(tables).make((*given, places), attrs)
        return [OPS["item"](new, index=k) for k in range(len(group))] if len(group) > 1 else [new]


def _put_type(*types: TensorType, form: Form, reads: tuple[int, ...], tables: tuple[int, ...]) -> Any:
    return types[tables[0]] if len(tables) == 1 else tuple(types[k] for k in tables)


@op(infer=_put_type, differentiable=False)
def put_entries(xp: ModuleType, *arrays: Any, form: Form, reads: tuple[int, ...], tables: tuple[int, ...]) -> Any:
    """Arrays `tables` with the results of a form over entries in the rows that the ids, the last array, name.

    Ids are distinct; one that lies behind the table is left out. Operands are read as by `summed_entries`.
    """
    inside = arrays[-1] < len(arrays[tables[0]])
    ids = arrays[-1] * inside
    given = [a if r < 0 else take.forward(xp, a, ids) for a, r in zip(arrays, reads)]
    made = fused.forward(xp, *given, form=form)
    outs = [xp.array(arrays[k]) for k in tables]
    for out, rows in zip(outs, made if isinstance(made, tuple) else (made,)):
        out[ids[inside]] = xp.broadcast_to(rows, form.space)[inside]
    return outs[0] if len(outs) == 1 else tuple(outs)


@cache
def _putting(tables: tuple[int, ...]) -> Op[..., Any]:
    """The operator, whose results may overwrite the tables."""
    made = copy(put_entries)
    made.inplace = {k: (table,) for k, table in enumerate(tables)}
    kernel(made)(put_entries_bind)
    return made


# -- in C --------------------------------------------------------------------------------------------------------------


class EntriesLayout(NamedTuple):
    """As that of a group; by which array of ids each operand is read, or -1; the columns, where they are fixed; and
    whether results are added to those before or put in their place.
    """

    rows: int
    moves: tuple[tuple[bool, ...], ...]
    inner: tuple[int | str, ...]
    reads: tuple[int, ...]
    ids: int
    columns: int
    adds: bool


class EntriesWriter(GroupWriter):
    """Writes the function: a job sums some of the entries in rows of its own, or is an entry whose rows it puts.

    No values lie in rows of scratch, and the word for their pitch says how many rows the results have.
    """

    layout: Any

    def __init__(self, form: Form, layout: Any) -> None:
        super().__init__(form, layout)
        self.across, self.store = (list(form.results), "+=") if layout.adds else ([], "=")

    def _pointers(self) -> Iterator[tuple[str, str]]:
        yield from super()._pointers()
        yield from (("const long long", f"at{k}") for k in range(self.layout.ids))

    def _head(self) -> Iterator[str]:
        for line in super()._head():
            fixed = self.layout.columns and line.startswith("const long long columns")
            yield f"enum {{ columns = {self.layout.columns} }};" if fixed else line.replace(" pitch =", " size =")

    def _begin_totals(self) -> Iterator[str]:
        yield from (f"for (long long j = 0; j < y{k}_job; j++) y{k}j[j] = 0;" for k in self.slot.values())

    def _flush(self) -> Iterator[str]:
        return iter(())

    def _end_totals(self) -> Iterator[str]:
        return iter(())

    def _row_pointers(self) -> Iterator[str]:
        yield f"const long long to = at{self.layout.ids - 1}[row];"
        yield "if (to < 0 || to >= size) continue;"
        job = "j" if self.layout.adds else ""
        yield from (f"{self.type(r)}* const y{k}r = y{k}{job} + to * columns;" for r, k in self.slot.items())
        yield from super()._row_pointers()

    def _start(self, k: int) -> str:
        read = self.layout.reads[k] if k < self.count else -1
        return super()._start(k) if read < 0 else f"at{read}[row] * x{k}_0"

    def _pointer(self, k: int) -> str:
        return super()._pointer(k) if k < self.count else f"y{k - self.count}r"


@lru_cache(4096)
def _text(outline: Outline, layout: EntriesLayout) -> Text:
    return EntriesWriter(outline.form, layout).written()


class EntriesFunction(NamedTuple):
    """The function of a form for arrays, and what its call takes: arrays, ids of 64 bits, sizes, strides, numbers."""

    made: CSource
    given: list[np.ndarray]
    ids: list[np.ndarray]
    sizes: list[int]
    strides: list[int]
    numbers: list[int | float]
    before: list[Call]


@kernel(summed_entries)
def summed_entries_bind(
    xp: ModuleType, out: Any, *arrays: Any, form: Form, reads: tuple[int, ...], size: int, scratch: Scratch
) -> list[Call] | None:
    f = _function(form, arrays, reads, (out,), adds=True)
    if f is None:
        return None
    entries = f.ids[-1].size
    parts = max(1, min(PARTS, entries * f.sizes[-1] // LEAST, entries // (2 * size)))
    place = out if parts == 1 else scratch.empty((parts, *out.shape), out.dtype)
    words = [*f.given, place, *f.ids, *f.sizes, size, *f.strides, entries, -(-entries // parts), out.size, *f.numbers]
    joining = single(OPS["sum"], out, [place], {"axis": (0,), "keepdims": False}) if parts > 1 else []
    return None if joining is None else [*f.before, CCall(f.made, "group", words, parts), *joining]


def put_entries_bind(
    xp: ModuleType, out: Any, *arrays: Any, form: Form, reads: tuple[int, ...], tables: tuple[int, ...]
) -> list[Call] | None:
    outs = out if isinstance(out, tuple) else (out,)
    f = _function(form, arrays, reads, outs, adds=False)
    if f is None:
        return None
    copies, jobs = [call for o, k in zip(outs, tables) for call in moved(o, arrays[k])], f.ids[-1].size
    words = [*f.given, *outs, *f.ids, *f.sizes, len(outs[0]), *f.strides, *f.numbers]
    grain = grain_of(jobs, len(outs) * jobs * f.sizes[-1] * outs[0].itemsize)
    return [*f.before, *copies, CCall(f.made, "group", words, jobs, grain)]


def _function(
    form: Form, arrays: Sequence[np.ndarray], reads: tuple[int, ...], outs: Sequence[np.ndarray], *, adds: bool
) -> EntriesFunction | None:
    count = len(form.types)
    tables, calls = in_order(*(a for a, r in zip(arrays, reads) if r >= 0))
    ids, more = in_order(*arrays[count:], dtype=np.int64)
    found = iter(tables)
    given = [a if r < 0 else next(found) for a, r in zip(arrays[:count], reads)]
    if not all(o.flags.c_contiguous for o in outs) or any(s % a.itemsize for a in given for s in a.strides):
        return None
    laid = _laid(form, given, outs, tuple(r - count if r >= 0 else -1 for r in reads), len(ids), adds)
    if laid is None:
        return None
    layout, sizes, strides = laid
    text = _text(form.outline, layout)
    made = source(text.text, "group")
    numbers = [float(v) if "float" in d else int(v) for d, v in text.numbers]
    return None if made is None else EntriesFunction(made, given, ids, sizes, strides, numbers, [*calls, *more])


def _laid(
    form: Form, given: Sequence[np.ndarray], outs: Sequence[np.ndarray], reads: tuple[int, ...], ids: int, adds: bool
) -> tuple[EntriesLayout, list[int], list[int]] | None:
    """The layout, and the sizes and strides that are arguments; None where columns lie in no one row."""
    split, space = form.split, form.space
    laid = [*zip(given, reads)]
    strides = [form.aligned(k, _strides(x, r, split), 0) for k, (x, r) in enumerate(laid)]
    strides += [tuple(_strides(out, 0, split)) for out in outs]
    rows, by_rows = fewest_axes(space[:split], [s[:split] for s in strides])
    columns, by_columns = fewest_axes(space[split:], [s[split:] for s in strides])
    if len(columns) > 1:
        return None
    sizes = [*(rows or [1]), *(columns or [1])]
    steps = [own or [0] for own in by_rows]
    for k, (x, r) in enumerate(laid):
        if r >= 0:
            steps[k][0] = math.prod(x.shape[1:])
        elif not rows and x.ndim:  # one entry is read as many are, so that it needs no text of its own
            steps[k][0] = math.prod(x.shape[split:])
    inner = [own[0] if own else 0 for own in by_columns]
    moves = (*(tuple(s != 0 for s in own) for own in steps), *[()] * ids)
    kinds = tuple(s if s in (0, 1) else "s" for s in inner)
    layout = EntriesLayout(len(sizes) - 1, moves, kinds, reads, ids, sizes[-1] if sizes[-1] <= FIXED else 0, adds)
    return layout, sizes, [s for own in steps for s in own if s] + [s for s in inner if s not in (0, 1)]


def _strides(x: np.ndarray, read: int, split: int) -> list[int]:
    """In numbers; 0 along the axes of the entries for what is looked up."""
    own = [0 if n == 1 else s // x.itemsize for n, s in zip(x.shape, x.strides)]
    return own if read < 0 else [*[0] * split, *own[1:]]
