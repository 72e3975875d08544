"""A fused group as a C function: a loop over rows, and in it one over the columns for each phase.

Sizes, strides and numbers are arguments, so that no other size needs another function; compiled in is only which
strides are 0 or 1 along the columns. A sum over columns adds number j to lane j mod 32, in blocks of 4,096, and halves
the lanes; one over rows adds blocks of 64 rows in order, in jobs that share the rows out, whose sums stay apart. So the
bits are the same at any vector width, with any compiler and for any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..fuse.form import Form
from ..fuse.line_text import LineWriter

CTYPES = {"float32": "float", "float64": "double", "bool": "unsigned char", "int32": "int", "int64": "long long"}
LANES, BLOCK, STRIP = 32, 64, 4096
HALVES = (16, 8, 4, 2, 1)  # of LANES


def indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"    {line}" for line in lines)


class GroupLayout(NamedTuple):
    """What of the strides is compiled in: along the columns each array moves by 0, by 1 or by an argument ("s")."""

    rows: int  # axes
    moves: tuple[tuple[bool, ...], ...]  # of each array, along which axes of rows
    inner: tuple[int | str, ...]


class Text(NamedTuple):
    """The function, the numbers and streams of draws that it takes as arguments, and how many rows of scratch."""

    text: str
    numbers: tuple[tuple[str, float], ...]
    streams: tuple[int, ...]
    scratch: int


class GroupWriter(LineWriter):
    """Writes the function; `kept` and `totals` are the rows of scratch of values and of sums over rows."""

    store = "="  # how a result meets what is in its place
    sizes: tuple[str, ...] = ("columns", "pitch")  # behind those of the axes of rows

    def __init__(self, form: Form, layout: GroupLayout) -> None:
        super().__init__(form, CTYPES)
        self.layout = layout
        self.scratch = 0
        # Values of a line that a later loop over the same row reads again lie in a row of scratch.
        later = {o for n in self.lines for o in self.operands(n) if self.values[n].phase > self.values[o].phase}
        mine = [n for n in self.lines if self.values[n].inner and not self.values[n].fold]
        self.kept = {n: self._row() for n in mine if n in later}
        self.across = [n for n in self.lines if self.values[n].fold in ("rows", "all")]
        self.by_rows = bool(self.layout.rows or any(v.fold for v in self.values))
        self.totals = {n: self._row() for n in self.across if self.values[n].fold == "rows" and self.source(n).inner}

    @property
    def in_jobs(self) -> bool:
        """Whether a job is more than a row."""
        return bool(self.across)

    def _row(self) -> int:
        self.scratch += 1
        return self.scratch - 1

    # -- the text ------------------------------------------------------------------------------------------------------

    def written(self) -> Text:
        body, head = [*indented(self._body())], [*indented(self._head())]
        start = "void group(const Word* a, long long first, long long last, char* scratch) {"
        text = "\n".join([*(f'#include "{file}"' for file in self.headers), start, *head, *body, "}", ""])
        return Text(text, tuple(self.numbers), tuple(self.drawn(n)[0] for n in self.draws), self.scratch)

    @property
    def headers(self) -> list[str]:
        return ["draws.h"] if self.draws else []

    def _head(self) -> Iterator[str]:
        """What the words of the block are."""
        names = [f"{t}* const {name}" for t, name in self._pointers()]
        yield from (f"{name} = a[{k}].p;" for k, name in enumerate(names))
        word, sizes = len(names), [*(f"rows{a}" for a in range(self.layout.rows)), *self.sizes]
        sizes += [f"{self._name(k)}_{a}" for k, m in enumerate(self.layout.moves) for a, moves in enumerate(m) if moves]
        sizes += [f"{self._name(k)}_s" for k, s in enumerate(self.layout.inner) if s == "s"]
        if self.in_jobs:
            sizes += ["rows", "of_job", *(f"y{k}_job" for k in sorted(self.slot[n] for n in self.across))]
        yield from (self._size(name, f"a[{k}].n") for k, name in enumerate(sizes, word))
        for k, (dtype, _) in enumerate(self.numbers):
            field = "x" if "float" in dtype else "n"
            yield f"const {CTYPES[dtype]} c{k} = a[{word + len(sizes) + k}].{field};"
        word += len(sizes) + len(self.numbers)
        yield from (f"const long long stream{n} = a[{word + k}].n;" for k, n in enumerate(self.draws))
        for n, k in (*self.kept.items(), *self.totals.items()):
            yield f"{self.type(n)}* const t{k} = ({self.type(n)}*)(scratch + {k} * pitch);"

    def _size(self, name: str, word: str) -> str:
        return f"const long long {name} = {word};"

    def _pointers(self) -> Iterator[tuple[str, str]]:
        for k, t in enumerate(self.form.types):
            yield "const Bits" if k in self.states else f"const {CTYPES[t.dtype.name]}", f"x{k}"
        for k, r in enumerate(self.form.results):
            yield self.type(r), f"y{k}"

    def _name(self, k: int) -> str:
        return f"x{k}" if k < self.count else f"y{k - self.count}"

    def _body(self) -> Iterator[str]:
        yield from self._constants()
        if not self.by_rows:
            yield f"first *= {STRIP};"
            yield f"last = last * {STRIP} < columns ? last * {STRIP} : columns;"
            yield from self._row_body("first", "last")
        elif not self.in_jobs:
            yield from self._rows("first", "last")
        else:
            yield "for (long long job = first; job < last; job++) {"
            yield "    const long long begin = job * of_job, end = begin + of_job < rows ? begin + of_job : rows;"
            folded = [(self.type(n), f"y{self.slot[n]}") for n in self.across]
            yield from (f"    {t}* const {y}j = {y} + job * {y}_job;" for t, y in folded)
            yield from indented([*self._begin_totals(), *self._rows("begin", "end"), *self._end_totals()])
            yield "}"

    def _rows(self, first: str, last: str) -> Iterator[str]:
        yield f"for (long long row = {first}; row < {last}; row++) {{"
        body = [*self._places(), *self._row_pointers(), *self._row_body("0", "columns"), *self._flush()]
        yield from indented(body)
        yield "}"

    def _constants(self) -> Iterator[str]:
        """What is one number for the whole group."""
        for k, v in enumerate(self.values[: self.count]):
            if not v.inner and not v.rows and k not in self.states:
                yield f"const {self.local(k)} v{k} = x{k}[0];"
        for n in self.lines:
            if self._constant(n):
                yield from self._alone(n, "0")
                if n in self.slot:
                    yield f"if (!first) y{self.slot[n]}[0] = v{n};"

    def _constant(self, n: int) -> bool:
        v = self.values[n]
        return not (v.inner or v.rows or v.fold or v.phase)

    def _places(self) -> Iterator[str]:
        """The place of a row along each axis of rows."""
        if self.layout.rows:
            rest = "row"
            for a in reversed(range(1, self.layout.rows)):
                yield f"const long long i{a} = {rest} % rows{a}, rest{a} = {rest} / rows{a};"
                rest = f"rest{a}"
            yield f"const long long i0 = {rest};"

    def _row_pointers(self) -> Iterator[str]:
        for k, (ctype, name) in enumerate(self._pointers()):
            if any(self.layout.moves[k]):
                yield f"{ctype}* const {name}r = {name} + {self._start(k)};"

    def _start(self, k: int) -> str:
        """How far the row at a place lies from the first."""
        return " + ".join(f"i{a} * {self._name(k)}_{a}" for a, moves in enumerate(self.layout.moves[k]) if moves) or "0"

    def _pointer(self, k: int) -> str:
        folded = k >= self.count and self.form.results[k - self.count] in self.across
        return f"{self._name(k)}{'r' if any(self.layout.moves[k]) else 'j' if folded else ''}"

    def _place(self, k: int) -> str:
        move = self.layout.inner[k]
        index = "0" if move == 0 else "j" if move == 1 else f"j * {self._name(k)}_s"
        return f"{self._pointer(k)}[{index}]"

    # -- folds over rows -----------------------------------------------------------------------------------------------

    def _begin_totals(self) -> Iterator[str]:
        for n in self.across:
            neutral = self.fold(n)[1]
            if n in self.totals:
                place = self._place(self.count + self.slot[n])
                yield f"for (long long j = 0; j < columns; j++) t{self.totals[n]}[j] = {place} = {neutral};"
            else:
                yield f"{self.type(n)} total{n} = {neutral}, part{n} = {neutral};"

    def _flush(self) -> Iterator[str]:
        """Add what a block of rows gave."""
        if self.across:
            yield f"if ((row + 1) % {BLOCK} == 0 || row + 1 == end) {{"
            for n in self.across:
                neutral = self.fold(n)[1]
                if n in self.totals:
                    t, y = f"t{self.totals[n]}[j]", self._place(self.count + self.slot[n])
                    added = f"{y} = {self.combined(n, y, t)}, {t} = {neutral};"
                    yield f"    EACH for (long long j = 0; j < columns; j++) {added}"
                else:
                    yield f"    total{n} = {self.combined(n, f'total{n}', f'part{n}')}, part{n} = {neutral};"
            yield "}"

    def _end_totals(self) -> Iterator[str]:
        yield from (f"y{self.slot[n]}j[0] = total{n};" for n in self.across if n not in self.totals)

    def _statement(self, n: int) -> str:
        return self.statement(n, "j" if self.values[n].inner else "0")

    # -- one row -------------------------------------------------------------------------------------------------------

    def _row_body(self, first: str, last: str) -> Iterator[str]:
        for k, v in enumerate(self.values[: self.count]):
            if not v.inner and v.rows:
                yield f"const {self.local(k)} v{k} = {self._pointer(k)}[0];"
        for phase in range(1 + max(v.phase + (v.fold == "columns") for v in self.values)):
            for n in self.lines:
                if self.values[n].phase == phase:
                    yield from self._outer_line(n)
            yield from self._loop(phase, first, last)
        for r, k in self.slot.items():
            v = self.values[r]
            if not v.inner and v.fold not in ("rows", "all") and not self._constant(r):
                yield f"{self._pointer(self.count + k)}[0] {self.store} v{r};"

    def _outer_line(self, n: int) -> Iterator[str]:
        """A line of one number per row."""
        v = self.values[n]
        if not v.fold and not v.inner and not self._constant(n):
            yield from self._alone(n, "row")
        elif v.fold and not self.source(n).inner:
            o = self.operands(n)[0]
            if v.fold == "columns":
                yield f"const {self.local(n)} v{n} = v{o};"
            else:
                yield f"part{n} = {self.combined(n, f'part{n}', f'v{o}')};"

    def _alone(self, n: int, place: str) -> Iterator[str]:
        """A line outside of the loops over columns."""
        if n in self.draws:
            yield f"int kept{n};"
            yield self._draw(n, place, "1", f"&kept{n}")
        yield self._statement(n)

    def _loop(self, phase: int, first: str, last: str) -> Iterator[str]:
        """The loop over the columns of a row that computes the inner values of a phase."""
        mine = [n for n in self.lines if self.values[n].phase == phase and self._is_inner(n)]
        lanes = [n for n in mine if self.values[n].fold in ("columns", "all")]
        drawn = [n for n in mine if n in self.draws]
        kept = [f"const int kept{n} = drawn{n}[j - strip];" for n in drawn]
        body = [*self._loads(phase, mine), *kept, *self._inner_lines(mine), *self._stores(mine)]
        if lanes:
            yield from self._lanes(lanes, drawn, body)
        elif mine:
            each = [f"EACH for (long long j = {'strip' if drawn else first}; j < {'end' if drawn else last}; j++) {{"]
            each += [*indented(body), "}"]
            yield from self._strips(first, last, [*self._drawn(drawn), *each]) if drawn else each

    def _strips(self, first: str, last: str, body: Iterable[str]) -> Iterator[str]:
        yield f"for (long long strip = {first}; strip < {last}; strip += {STRIP}) {{"
        yield f"    const long long end = strip + {STRIP} < {last} ? strip + {STRIP} : {last};"
        yield from indented(body)
        yield "}"

    def _drawn(self, draws: Sequence[int]) -> Iterator[str]:
        """What random numbers decide in a strip."""
        row = "row * columns + " if self.by_rows else ""
        for n in draws:
            yield f"int drawn{n}[{STRIP}];"
            yield self._draw(n, f"{row}strip", "end - strip", f"drawn{n}")

    def _draw(self, n: int, first: str, count: str, kept: str) -> str:
        return f"draw(x{self.operands(n)[1]}, stream{n}, {self.drawn(n)[1]}, {first}, {count}, {kept});"

    def _is_inner(self, n: int) -> bool:
        return self.source(n).inner if self.values[n].fold else self.values[n].inner

    def _loads(self, phase: int, mine: Sequence[int]) -> Iterator[str]:
        """Inner values of arrays, and of earlier phases, that the loop reads."""
        for o in dict.fromkeys(o for n in mine for o in self.operands(n)):
            if o < self.count and self.values[o].inner:
                yield f"const {self.local(o)} v{o} = {self._place(o)};"
            elif o in self.kept and self.values[o].phase < phase:
                yield f"const {self.local(o)} v{o} = t{self.kept[o]}[j];"

    def _inner_lines(self, mine: Sequence[int]) -> Iterator[str]:
        for n in mine:
            if not self.values[n].fold:
                yield self._statement(n)
            elif self.values[n].fold == "rows":
                t = f"t{self.totals[n]}[j]"
                yield f"{t} = {self.combined(n, t, f'v{self.operands(n)[0]}')};"

    def _stores(self, mine: Sequence[int]) -> Iterator[str]:
        for n in mine:
            if not self.values[n].fold:
                if n in self.kept:
                    yield f"t{self.kept[n]}[j] = v{n};"
                if n in self.slot:
                    yield f"{self._place(self.count + self.slot[n])} {self.store} v{n};"

    def _lanes(self, lanes: Sequence[int], drawn: Sequence[int], body: Sequence[str]) -> Iterator[str]:
        """A loop whose folds over the columns go to lanes, in strips."""
        for n in lanes:
            yield f"{self.type(n)} v{n} = {self.fold(n)[1]};"
        yield from self._strips("0", "columns", [*self._drawn(drawn), *self._strip_of_lanes(lanes, body)])
        for n in lanes:
            if self.values[n].fold == "all":
                yield f"part{n} = {self.combined(n, f'part{n}', f'v{n}')};"

    def _strip_of_lanes(self, lanes: Sequence[int], body: Sequence[str]) -> Iterator[str]:
        for n in lanes:
            yield f"{self.type(n)} lanes{n}[{LANES}];"
            yield f"for (int l = 0; l < {LANES}; l++) lanes{n}[l] = {self.fold(n)[1]};"
        folds = [f"lanes{n}[l] = {self.combined(n, f'lanes{n}[l]', f'v{self.operands(n)[0]}')};" for n in lanes]
        inner = [*indented(["const long long j = start + l;", *body, *folds])]
        yield "long long start = strip;"
        yield f"for (; start + {LANES} <= end; start += {LANES}) EACH for (int l = 0; l < {LANES}; l++) {{"
        yield from inner
        yield "}"
        yield f"if (start < end) EACH for (int l = 0; l < {LANES}; l++) if (l < end - start) {{"
        yield from inner
        yield "}"
        for n in lanes:
            half = self.combined(n, f"lanes{n}[l]", f"lanes{n}[l + width]")
            loop = f"for (int l = 0; l < width; l++) lanes{n}[l] = {half};"
            if "(" in self.fold(n)[0]:  # a choice, which would be a branch for the last few
                yield from (f"for (int width = {LANES // 2}; width; width /= 2)", f"    {loop}")
            else:
                yield from (f"{{ enum {{ width = {width} }}; EACH {loop} }}" for width in HALVES)
            yield f"v{n} = {self.combined(n, f'v{n}', f'lanes{n}[0]')};"
