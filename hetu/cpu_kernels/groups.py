"""Fused groups on a CPU: compiled as C, or their lines one after the other where there is no compiler.

Pattern: neighbors that a form can hold, see `hetu/fuse/`. Single operators with an expression are compiled too, so that
they are rows of the table that C walks. Gain: see `examples/benchmarks/recipes.py`. Off by leaving `fuse_groups` out of
`passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..core.backend import Scratch
from ..core.graph import Node
from ..core.kernels import Call
from ..core.op import Op
from ..core.types import TensorType
from ..fuse.form import FOLDS, Form, Line, Outline, form_of, fused
from ..fuse.group import fuse
from ..fuse.places import fewest_axes, strides_in
from ..fuse.unit import Limits, rows_of_fold, span
from .ahead import is_noted
from .c_calls import CCall, compiles
from .compiled import source
from .group_text import BLOCK, CTYPES, LANES, STRIP, GroupLayout, GroupWriter, Text
from .recipes import KERNELS, kernel
from .short_rows import ShortRowsWriter, is_short

NEVER = 1 << 30  # the line behind all
WORTH = 25_000  # numbers times lines that are worth another thread
PARTS, LEAST = 8, 1 << 15  # of the rows, whose folds are made apart, and the least numbers of one
LIMITS = Limits(frozenset(CTYPES), draws=True, whole=lambda node: KERNELS.stays_whole(node.op))


def fuse_groups(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """Groups become one operator each."""
    return fuse(outputs, LIMITS, _entered)


def _entered(group: Op[..., Any]) -> None:
    kernel(group)(bound)


@kernel(fused)
def bound(xp: Any, out: Any, *arrays: Any, form: Form, scratch: Scratch) -> list[Call]:
    """Calls that compute the results of a form into `out`."""
    outs = out if isinstance(out, tuple) else (out,)
    arrays = arrays[: len(form.types)]
    made = compiled(form, outs, arrays, scratch)
    return one_by_one(form, outs, arrays, scratch) if made is None else made


def single(op: Op[..., Any], out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]) -> list[Call] | None:
    """Calls of an operator that is one line; None where it cannot be compiled."""
    if isinstance(out, tuple) or any(a.dtype.name not in CTYPES for a in (out, *arrays)):
        return None
    space = out.shape
    rows = (0, False) if op.code is not None and span([a.shape for a in arrays], space) else None
    if op in FOLDS:
        x = arrays[0]
        space, rows = x.shape, rows_of_fold(TensorType(x.shape, x.dtype), LIMITS.folded, **attrs)
    return None if rows is None else compiled(form_of(op, arrays, attrs, space, rows), (out,), arrays, Scratch())


# -- in C --------------------------------------------------------------------------------------------------------------


class Laid(NamedTuple):
    """How an array lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


class Function(NamedTuple):
    """The text of a form for arrays that lie in some way, and what its call takes besides them."""

    text: str
    words: list[int | float]
    jobs: int
    grain: int
    scratch: int
    folded: tuple[int, ...]  # results that each job makes for its own rows
    own: tuple[str, ...]  # operators that are not hetu's, whose expressions may be at fault


def compiled(
    form: Form, outs: Sequence[np.ndarray], arrays: Sequence[np.ndarray], scratch: Scratch
) -> list[Call] | None:
    """A call of the function of a form, and those that join its folds; None where there is none for these arrays."""
    if 0 in form.space:
        return []
    function = _function(form, tuple([Laid(x.shape, x.strides, x.dtype) for x in (*arrays, *outs)]))
    made = source(function.text, "group", function.own) if function is not None and compiles() else None
    if function is None or made is None:
        return None
    places, joining = [*outs], list[Call]()
    larger = bool(function.folded) and form.space[0] > 2 and is_noted()  # a larger batch has several parts
    parts = max(2, function.jobs) if larger else function.jobs
    for k in function.folded if parts > 1 else ():
        places[k] = scratch.empty((parts, *outs[k].shape), outs[k].dtype)
        fold = form.lines[form.results[k] - len(arrays)].op
        joined = single(fold, outs[k], [places[k]], {"axis": (0,), "keepdims": False})
        if joined is None:
            return None
        joining += joined
    words = [*arrays, *places, *function.words]
    return [CCall(made, "group", words, function.jobs, function.grain, function.scratch), *joining]


@lru_cache(4096)
def _function(form: Form, laid: tuple[Laid, ...]) -> Function | None:
    """What is the same for all groups of a form; layers that are alike have many."""
    arrays = len(laid) - len(form.results)
    operands = [*zip(range(arrays), laid), *zip(form.results, laid[arrays:])]
    values = form.values()
    written = {*range(len(values))} - form.states()
    unknown = any(values[n].type.dtype.name not in CTYPES for n in written)
    if unknown or any(s % x.dtype.itemsize for _, x in operands for s in x.strides):
        return None
    sizes, split, strides = merged(form, operands)
    if len(sizes) - split > 1:  # the columns lie in no one row: a fold of all of them may go row by row
        rowwise = not form.split and not any(v.phase for v in values)
        return _function(replace(form, split=_longest_rows(form, operands)), laid) if rowwise else None
    rows, width = sizes[:split], sizes[split] if split < len(sizes) else 1
    inner = [s[split] if split < len(sizes) else 0 for s in strides]
    moves = tuple(tuple(s != 0 for s in own[:split]) for own in strides)
    layout = GroupLayout(len(rows), moves, tuple(s if s in (0, 1) else "s" for s in inner))
    short = bool(rows) and is_short(values, width)
    text = _text(form.outline, layout, short)
    pitch = -(-width * (LANES if short else 1) * 8 // 64) * 64
    words: list[int | float] = [*rows, width, pitch]
    words += [s for own in strides for s in own[:split] if s] + [s for s in inner if s not in (0, 1)]
    jobs = prod(rows) if rows or any(v.fold for v in values) else -(-width // STRIP)
    grain = max(1, WORTH // (max(1, width if rows else min(width, STRIP)) * len(form.lines)))
    folded = tuple(k for k, r in enumerate(form.results) if values[r].fold in ("rows", "all"))
    if folded or short:  # jobs are parts of the rows
        apart = [laid[arrays + k] for k in folded]
        of_job = LANES if not folded else _part(jobs, width) if all(map(_contiguous, apart)) else jobs
        words += [jobs, of_job, *(prod(x.shape) for x in apart)]
        jobs, grain = -(-jobs // of_job), 1 if folded else -(-grain // of_job)
    words += [float(v) if "float" in d else int(v) for d, v in text.numbers]
    words += text.streams
    own = tuple(line.op.name for line in form.lines if line.op.__module__.partition(".")[0] != "hetu")
    return Function(text.text, words, jobs, grain, text.scratch * pitch, folded, own)


@lru_cache(4096)
def _text(outline: Outline, layout: GroupLayout, short: bool) -> Text:
    return (ShortRowsWriter if short else GroupWriter)(outline.form, layout).written()


def _part(rows: int, columns: int) -> int:
    """The rows of a job that folds its own: whole blocks. What else the group computes does not change its bits."""
    return -(-max(LEAST // max(1, columns), -(-rows // PARTS)) // BLOCK) * BLOCK


def _contiguous(x: Laid) -> bool:
    sizes, (strides,) = fewest_axes(x.shape, [x.strides])
    return len(sizes) < 2 and set(strides) <= {x.dtype.itemsize}


def merged(form: Form, operands: Sequence[tuple[int, Laid]]) -> tuple[list[int], int, list[list[int]]]:
    """(sizes, axes of rows, strides in numbers) of the fewest axes that visit the same places in the same order.

    An axis of one is among them where a longer one would be one of its own.
    """
    strides = strides_in(form, operands)
    if not form.split and not any(line.op in FOLDS for line in form.lines):
        sizes, kept = _with_one(form, operands, *fewest_axes(form.space, strides))
        return sizes, max(0, len(sizes) - 1), kept
    ends = slice(form.split), slice(form.split, None)
    rows, columns = (fewest_axes(form.space[s], [own[s] for own in strides]) for s in ends)
    if form.split and not rows[0]:
        rows = _with_one(form, operands, *rows)
    if not form.split:
        columns = _with_one(form, operands, *columns)
    return rows[0] + columns[0], len(rows[0]), [a + b for a, b in zip(rows[1], columns[1])]


def _with_one(
    form: Form, operands: Sequence[tuple[int, Laid]], sizes: list[int], strides: list[list[int]]
) -> tuple[list[int], list[list[int]]]:
    """The axes with a first one of size 1, if the first of the space has this size and some arrays lack it."""
    axes = [len(x.shape) + (len(form.space) - form.split if form.flat[n] else 0) for n, x in operands]
    there = [n == len(form.space) and x.strides[:1] != (0,) for n, (_, x) in zip(axes, operands)]
    if not form.space or form.space[0] != 1 or (sizes and all(t or not own[0] for t, own in zip(there, strides))):
        return sizes, strides
    return [1, *sizes], [[int(t), *own] for t, own in zip(there, strides)]


def _longest_rows(form: Form, operands: Sequence[tuple[int, Laid]]) -> int:
    """The fewest first axes behind which all arrays move by one stride."""
    own = strides_in(form, operands)
    tried = range(1, len(form.space))
    return next((k for k in tried if len(fewest_axes(form.space[k:], [s[k:] for s in own])[0]) < 2), len(tried))


# -- by NumPy ----------------------------------------------------------------------------------------------------------


def one_by_one(form: Form, outs: Sequence[Any], arrays: Sequence[Any], scratch: Scratch) -> list[Call]:
    """Calls of the lines in order."""
    lines = _Lines(form, outs, arrays, scratch)
    for n in range(len(arrays), len(arrays) + len(form.lines)):
        lines.bind(n)
    pairs = zip(outs, form.results)
    return [*lines.calls, *(partial(np.copyto, out, lines.known[r]) for out, r in pairs if lines.known[r] is not out)]


class _Lines:
    """Lines bound one after the other, with as little memory as the rules of their operators allow."""

    def __init__(self, form: Form, outs: Sequence[Any], arrays: Sequence[Any], scratch: Scratch) -> None:
        self.form, self.count, self.scratch, self.values = form, len(arrays), scratch, form.values()
        self.known: list[Any] = [*arrays]
        numbered = enumerate(form.lines, self.count)
        self.last = {o: n for n, line in numbered for o in line.operands if isinstance(o, int)}
        self.calls: list[Call] = []
        # The place of a result serves only where nobody reads, from then on, what lies there now.
        self.place = {r: out for r, out in zip(form.results, outs) if not self._read_later(out, r)}
        self.until = {id(out): r for r, out in self.place.items()}  # when a place must be free
        self.spare = [*self.place.values()]

    def _read_later(self, out: np.ndarray, n: int) -> bool:
        read = (x for k, x in enumerate(self.known[: self.count]) if self.last.get(k, -1) >= n)
        return any(np.may_share_memory(out, x) for x in read)

    def bind(self, n: int) -> None:
        line = self.form.lines[n - self.count]
        inputs = [np.asarray(o[1], dtype=o[0]) if isinstance(o, tuple) else self.known[o] for o in line.operands]
        out = self._out(n, line)
        self.calls += line.op.bound(np, out, inputs, dict(line.attrs))
        self.known.append(out)
        for o in {o for o in line.operands if isinstance(o, int)}:
            if self._ends(o, n) and self.known[o] is not out:
                self.spare.append(self.known[o])

    def _ends(self, o: int, n: int) -> bool:
        """Whether the memory of a value is free behind line n."""
        return o >= self.count and self.last[o] == n and o not in self.form.results

    def _out(self, n: int, line: Line) -> Any:
        """Where a line writes: its own place, over an operand, in memory that is free until then, or in more."""
        if n in self.place:
            self.spare = [x for x in self.spare if x is not self.place[n]]
            return self.place[n]
        operands = [line.operands[at] for at in line.op.inplace.get(0, ()) if at < len(line.operands)]
        over = [
            self.known[o] for o in operands if isinstance(o, int) and line.operands.count(o) == 1 and self._ends(o, n)
        ]
        type_: Any = self.values[n].type
        end = self.last.get(n, NEVER) if n not in self.form.results else NEVER
        for x in (*over, *self.spare):
            fits = (x.shape, x.dtype) == (type_.shape, type_.dtype) and self.until.get(id(x), NEVER + 1) > end
            if fits and (id(x) not in self.until or not self._read_later(x, n)):
                self.spare = [s for s in self.spare if s is not x]
                return x
        return self.scratch.empty(type_.shape, type_.dtype)
