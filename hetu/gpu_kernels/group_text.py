"""A fused group as a CUDA kernel: threads visit the places of its space, and each line is the statement that C has.

There are three kernels, by what the group folds: nothing, rows or columns. Types are strict: a 16-bit float is rounded
after every line, so that a group gives what its operators give one by one. A row that waits for its own fold is visited
again, and what it needs is computed again instead of being kept. `groups.py` launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from ..fuse.form import Form, own_column
from ..fuse.line_text import LineWriter
from .reduce import definitions, wide_dtype
from .source import CTYPES, assemble

TYPES = {**CTYPES, "bool": "unsigned char"}  # of values, as in C; in memory they lie as `bool`


class Geometry(NamedTuple):
    """What of the arrays' geometry is compiled in; sizes and strides are arguments of the kernel.

    `moves[k][axis]` says whether array k has a stride on that (merged) axis. The first `outer` axes number the rows,
    the others the columns. If `unit`, strides on the last axis are 1, and neighbors move in packs; a thread handles
    `span` neighbors, one pack or several. `ragged` are arrays whose rows begin anywhere, but all at the same places:
    these alone move in packs then, up to a few elements before and behind, and so do results; else there are none.
    """

    moves: tuple[tuple[bool, ...], ...]
    outer: int
    unit: bool
    pack: int
    span: int
    index: str
    ragged: tuple[int, ...] = ()

    @property
    def axes(self) -> int:
        return len(self.moves[0]) if self.moves else self.outer + 1

    def sizes(self) -> list[int]:
        """The axes whose sizes are arguments: of the first among rows, or columns, no position needs it."""
        return [a for a in range(self.axes) if a not in (0, self.outer)]

    def strides(self) -> list[tuple[int, int]]:
        """The (array, axis) whose strides are arguments."""
        moving = [(k, a) for k, moves in enumerate(self.moves) for a in range(self.axes) if moves[a]]
        return [(k, a) for k, a in moving if not (self.unit and a == self.axes - 1)]


class CudaText(NamedTuple):
    """The text of a kernel, and the numbers and streams of draws that it takes."""

    text: str
    numbers: tuple[tuple[str, float], ...]
    streams: tuple[int, ...]


@lru_cache(4096)
def text_of(form: Form, layout: Geometry, kind: str, stored: tuple[str, ...]) -> CudaText:
    """The kernel "places", "rows" or "columns" of a form; `stored` are the dtypes of its results in memory.

    Its arguments are arrays, a stream for each draw, results, numbers, counts, sizes and strides.

    >>> from hetu.core.types import TensorType
    >>> import numpy as np, hetu as ht
    >>> from hetu.fuse.form import Line
    >>> form = Form((TensorType((8,), np.dtype("f4")),), (Line(ht.square, (0,), ()),), (1,), (8,), 0, (False,) * 2)
    >>> "v1 = v0 * v0;" in text_of(form, Geometry(((True,),), 0, True, 1, 1, "int32"), "places", ("float32",)).text
    True
    """
    writer = {"places": _PlacesWriter, "rows": _RowsWriter, "columns": _ColumnsWriter}[kind](form, layout, stored)
    return writer.whole()


class _CudaWriter(LineWriter):
    kind, column = "", "col"
    counts: Sequence[str] = ()

    def __init__(self, form: Form, layout: Geometry, stored: Sequence[str]) -> None:
        super().__init__(form, TYPES)
        self.layout, self.stored = layout, stored
        self.q = "q + " if layout.span > layout.pack else ""  # the pack of a thread, if it has several
        self.pack = "N" if layout.ragged else str(layout.pack)  # how many neighbors are visited at once
        self.folds = [n for n in self.lines if self.values[n].fold]
        self.full = [r for r in form.results if not self.values[r].fold and self.values[r].shape == form.space]
        self.narrow = [r for r in form.results if r not in self.full and r not in self.folds]

    def body(self) -> str:
        raise NotImplementedError

    def whole(self) -> CudaText:
        """The folds, and the kernel with its parameters."""
        body = self.body()
        parameters = [
            f"const Word* x{k}" if k in self.states else f"const {self.stored_type(k)}* x{k}" for k in range(self.count)
        ]
        parameters += [f"Word stream{n}" for n in self.draws]
        parameters += [f"{CTYPES[d]}* y{slot}" for slot, d in enumerate(self.stored)]
        parameters += [f"{CTYPES[d]} c{k}" for k, (d, _) in enumerate(self.numbers)]
        parameters += [f"Index {n}" for n in self.counts]
        parameters += [f"Index size{a}" for a in self.layout.sizes()]
        parameters += [f"Index stride{k}_{a}" for k, a in self.layout.strides()]
        text = "".join(map(self._functions, self.folds))
        text += f'extern "C" __global__ void {self.kind}({", ".join(parameters)}) {{\n{body}}}\n'
        streams = tuple(self.drawn(n)[0] for n in self.draws)
        return CudaText(
            assemble(text, f"{self.kind} of a group", Index=self.layout.index), tuple(self.numbers), streams
        )

    def _functions(self, n: int) -> str:
        """The functions of one fold, in a namespace of its own."""
        dtype = self.source(n).type.dtype.name
        wide = wide_dtype(dtype)
        types = f"typedef {CTYPES[dtype]} S; typedef {CTYPES[wide]} T;\n"
        inside = definitions(self.form.lines[n - self.count].op, wide)
        return f"namespace fold{n} {{\n{types}{inside}}}\ntypedef fold{n}::T T{n};\n"

    def stored_type(self, n: int) -> str:
        return CTYPES[self.values[n].type.dtype.name]

    def totals(self, folds: Iterable[int]) -> Iterator[str]:
        """The totals of a thread, one for each of the neighbors that it handles."""
        for n in folds:
            yield f"T{n} t{n}[{self.layout.span}];"
            yield f"for (T{n}& t : t{n}) t = fold{n}::identity();"

    # -- one place -----------------------------------------------------------------------------------------------------

    def hoisted(self, n: int) -> bool:
        """Whether a value is known before the places of a row are visited."""
        return False

    def needed(self, values: Iterable[int]) -> list[int]:
        """The values that have to be known at a place, in order."""
        found: set[int] = set()
        waiting = [*values]
        while waiting:
            n = waiting.pop()
            if n not in found and n not in self.states and not self.hoisted(n):
                found.add(n)
                waiting += self.operands(n) if n >= self.count else []
        return sorted(found)

    def visit(self, folds: Sequence[int], results: Sequence[int]) -> list[str]:
        """What a thread does at the span that begins in (`row`, `col`), which is number `i` of the space.

        16 neighbors share one draw of random words, and no span reaches beyond them.
        """
        pack, span, q = self.pack, self.layout.span, self.q
        needed = self.needed([*results, *(self.operands(n)[0] for n in folds)])
        full = [r for r in results if r in self.full]
        before, inside = self._loads(needed)
        drawn = [n for n in self.draws if n in needed]
        words = [f"Word words{n}[4]; philox(x{self.operands(n)[1]}, stream{n}, i / 16, words{n});" for n in drawn]
        place = f"{q}at" if span == 16 else f"i % 16 + {q}at"
        inside += [f"const bool kept{n} = kept(words{n}, {place}, {self.drawn(n)[1]});" for n in drawn]
        numbered = any(self.form.lines[n - self.count].op is own_column for n in needed if n >= self.count)
        inside += [f"const Index j = {q}col + at;"] if numbered else []
        inside += [self.statement(n, "j") for n in needed if n >= self.count]
        inside += [f"r{self.slot[r]}.v[at] = v{r};" for r in full]
        inside += [self._narrow(r) for r in results if r not in self.full]
        inside += [f"t{n}[{q}at] = fold{n}::combine(t{n}[{q}at], v{self.operands(n)[0]});" for n in folds]
        body = [
            *self._coordinates(f"({q}{self.column})" if q else self.column, self.layout.outer, self.layout.axes),
            *before,
            *(f"Pack<{self.stored_type(r)}, {pack}> r{self.slot[r]};" for r in full),
            f"for (int at = 0; at < {pack}; at++) {{",
            *indented(inside),
            "}",
            *(f"store(y{self.slot[r]} + {q}i, r{self.slot[r]});" for r in full),
        ]
        return [*words, *([f"for (int q = 0; q < {span}; q += {pack}) {{", *indented(body), "}"] if q else body)]

    def _loads(self, needed: Sequence[int]) -> tuple[list[str], list[str]]:
        """What loads arrays once for neighbors, and what takes one of each pack."""
        before, inside = [], []
        for k in (k for k in needed if k < self.count):
            if self.layout.unit and self.layout.moves[k][-1] and self.layout.ragged and k not in self.layout.ragged:
                inside.append(f"const {self.local(k)} v{k} = x{k}[{self._place(k)} + at];")
            elif self.layout.unit and self.layout.moves[k][-1]:
                before.append(f"const auto p{k} = load<{self.pack}>(x{k} + {self._place(k)});")
                inside.append(f"const {self.local(k)} v{k} = p{k}.v[at];")
            else:
                before.append(self.load(k))
        return before, inside

    def load(self, k: int) -> str:
        return f"const {self.local(k)} v{k} = x{k}[{self._place(k)}];"

    def _place(self, k: int) -> str:
        unit = self.layout.axes - 1 if self.layout.unit else None
        moving = [a for a, moves in enumerate(self.layout.moves[k]) if moves]
        return " + ".join(f"i{a}" if a == unit else f"i{a} * stride{k}_{a}" for a in moving) or "0"

    def _narrow(self, r: int) -> str:
        """Store a result that is one number per row, or one in all."""
        first, place = (self.column, "row") if self.values[r].rows else ("i", "0")
        return f"if ({self.q}{first} + at == 0) y{self.slot[r]}[{place}] = v{r};"

    def rows(self) -> Iterator[str]:
        """The place of a row along each of its axes."""
        return self._coordinates("row", 0, self.layout.outer)

    def _coordinates(self, number: str, first: int, end: int) -> Iterator[str]:
        """A number taken apart into one coordinate an axis, the last varying fastest."""
        rest = number
        for a in range(end - 1, first, -1):
            yield f"const Index i{a} = {rest} % size{a}, rest{a} = {rest} / size{a};"
            rest = f"rest{a}"
        if end > first:
            yield f"const Index i{first} = {rest};"


class _PlacesWriter(_CudaWriter):
    """Bytes: each array and each result once. FLOP: those of the lines, far below what memory lets pass.

    Launch: a grid-stride loop, one span a thread.
    """

    kind, column, counts = "places", "i", ("n",)

    def body(self) -> str:
        span = self.layout.span
        lines = [
            f"const Index step = (Index)gridDim.x * blockDim.x * {span};",
            f"for (Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * {span}; i < n; i += step) {{",
            *indented(self.visit((), self.form.results)),
            "}",
        ]
        return joined(lines)


class _RowsWriter(_CudaWriter):
    """A row is cut into `chunks` of `each` columns; a team of threads folds one of them, in one loop for each phase.

    Bytes: each array and result once, and what later phases read again. Launch: (32, 8) threads where `each` is up to
    1024, else (256, 1).
    """

    kind, counts = "rows", ("rows", "width", "chunks", "each")

    def hoisted(self, n: int) -> bool:
        known = self.values[n]
        return bool(known.fold) or not (known.inner or known.shape == self.form.space)

    def body(self) -> str:
        lines = [
            "const Index row = k / chunks, begin = k % chunks * each;",
            "const Index end = begin + each < width ? begin + each : width;",
            *self.rows(),
            *(self.load(k) for k in range(self.count) if self.hoisted(k) and k not in self.states),
        ]
        loops = {self.values[n].phase for n in (*self.folds, *self.full)}
        for phase in range(1 + max(self.values[n].phase + 1 for n in self.lines)):
            lines += [self.statement(n, "0") for n in self.lines if self._once(n, phase)]
            if phase in loops:
                folds = [n for n in self.folds if self.values[n].phase == phase]
                lines += self._loop(folds, self.full if phase == max(loops) else ())
        lines += [self._stored(r) for r in self.narrow]
        return joined(
            [
                "for (Index k = (Index)blockIdx.x * blockDim.y + threadIdx.y; k < rows * chunks;",
                "     k += (Index)gridDim.x * blockDim.y) {",
                *indented(lines),
                "}",
            ]
        )

    def _once(self, n: int, phase: int) -> bool:
        """Whether a line is one number per row of this phase."""
        return self.hoisted(n) and n not in self.folds and self.values[n].phase == phase

    def _loop(self, folds: Sequence[int], results: Sequence[int]) -> Iterator[str]:
        span = self.layout.span
        yield from self.totals(folds)
        if self.layout.ragged:
            yield f"for_packs<{span}>(row * width + begin, begin, end, [&](auto neighbors, Index col) {{"
            yield "    constexpr int N = neighbors.count;"
        else:
            yield f"for (Index col = begin + threadIdx.x * {span}; col < end; col += blockDim.x * {span}) {{"
        yield "    const Index i = row * width + col;"
        yield from indented(self.visit(folds, results))
        yield "});" if self.layout.ragged else "}"
        for n in folds:
            yield f"for (int j = 1; j < {span}; j++) t{n}[0] = fold{n}::combine(t{n}[0], t{n}[j]);"
            yield f"t{n}[0] = team_fold(t{n}[0], fold{n}::identity(), fold{n}::combine);"
            yield f"const {self.local(n)} v{n} = t{n}[0];"
            if n in self.slot:
                yield f"if (threadIdx.x == 0) y{self.slot[n]}[k] = t{n}[0];"

    def _stored(self, r: int) -> str:
        first, place = ("begin", "row") if self.values[r].rows else ("k", "0")
        return f"if (threadIdx.x == 0 && {first} == 0) y{self.slot[r]}[{place}] = v{r};"


class _ColumnsWriter(_CudaWriter):
    """A block of (32, 8) threads folds `each` rows of 32 spans of columns. Grid (spans / 32, chunks of rows)."""

    kind, counts = "columns", ("rows", "width", "each")

    def body(self) -> str:
        folds = self.folds
        lines = [
            *(f"__shared__ T{n} part{n}[8][32];" for n in folds),
            f"const Index col = ((Index)blockIdx.x * 32 + threadIdx.x) * {self.layout.span};",
            "const Index begin = blockIdx.y * each, end = begin + each < rows ? begin + each : rows;",
            *self.totals(folds),
            "if (col < width)",
            "    for (Index row = begin + threadIdx.y; row < end; row += 8) {",
            "        const Index i = row * width + col;",
            *indented(indented([*self.rows(), *self.visit(folds, [r for r in self.form.results if r not in folds])])),
            "    }",
            "#pragma unroll  // totals stay in registers",
            f"for (int j = 0; j < {self.layout.span}; j++) {{  // one column of each span at a time",
            *(f"    part{n}[threadIdx.y][threadIdx.x] = t{n}[j];" for n in folds),
            "    __syncthreads();",
            "    if (threadIdx.y == 0 && col < width) {",
        ]
        for n in folds:
            lines += [
                f"        for (int y = 1; y < 8; y++) t{n}[j] = fold{n}::combine(t{n}[j], part{n}[y][threadIdx.x]);",
                f"        y{self.slot[n]}[blockIdx.y * width + col + j] = t{n}[j];",
            ]
        return joined([*lines, "    }", "    __syncthreads();", "}"])


def indented(lines: Iterable[str]) -> Iterator[str]:
    return ("    " + line for line in lines)


def joined(lines: Iterable[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
