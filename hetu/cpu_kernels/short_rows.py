"""A fused group over short rows, as a C function: 32 rows at a time are turned, and loops go over rows.

Along a row of few columns there is little to compute at once, and its folds are all tree. Turned, the numbers of one
column are what is computed at once, and a value per row is an array of 32. Folds over rows alone compute as many at
once as there are columns, so they are turned below 32. A sum over columns adds them in order; one over rows adds row n
to lane n mod 32 and halves the lanes at the end. So the bits are the same at any vector width and for any number of
threads, and the number of columns alone decides which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..fuse.form import Form, Known
from .group_text import LANES, GroupLayout, GroupWriter, indented

SIZES = {"float32": 4, "float64": 8, "bool": 1, "int32": 4, "int64": 8}
MOST = 95  # columns, but for two blocks of lanes, whose folds are as fast in place
WHOLE = (16, 24)  # columns that are whole vectors, of those below LANES


def is_short(values: Sequence[Known], columns: int) -> bool:
    """Whether the rows of a group that folds are better turned. Folds over rows alone only lack whole vectors there."""
    folds = {v.fold for v in values} - {""}
    if folds <= {"rows"}:
        return bool(folds) and 2 <= columns < LANES and columns not in WHOLE
    return 2 <= columns <= MOST and columns != 2 * LANES


class ShortRowsWriter(GroupWriter):
    """Writes the function. In its loops `l` is a row of the block and `j` a column; scratch holds turned arrays."""

    def __init__(self, form: Form, layout: GroupLayout) -> None:
        super().__init__(form, layout)
        full = [n for n, v in enumerate(self.values) if v.inner and v.rows and not v.fold]
        arrays = dict(zip(range(self.count), range(self.count))) | {r: self.count + k for r, k in self.slot.items()}
        self.turned = {n: arrays[n] for n in full if n in arrays}
        self.once = [r for r in self.slot if self.values[r].inner and not (self.values[r].rows or self.values[r].fold)]
        self.kept |= {n: self._row() for n in (*self.turned, *self.once) if n not in self.kept}
        self.decided = {n: (self._row(), self._row()) for n in self.draws}  # by random numbers, as drawn and turned

    @property
    def headers(self) -> list[str]:
        return ["turn.h", *super().headers]

    @property
    def in_jobs(self) -> bool:
        return True

    def _rows(self, first: str, last: str) -> Iterator[str]:
        yield f"for (long long start = {first}; start < {last}; start += {LANES}) {{"
        yield f"    const int count = {last} - start < {LANES} ? {last} - start : {LANES};"
        yield "    const int wide = (count + 15) / 16 * 16;"
        yield from indented(self._turned_in())
        for phase in range(1 + max(v.phase + (v.fold == "columns") for v in self.values)):
            yield from indented(self._outer(phase))
            yield from indented(self._columns(phase))
        yield from indented(self._turned_out())
        yield "}"

    # -- a block of rows -----------------------------------------------------------------------------------------------

    def _of_rows(self, k: int) -> bool:
        """Whether a value is one number per row."""
        return not (self.values[k].inner or self._constant(k)) and self.values[k].fold not in ("rows", "all")

    def _turned_in(self) -> Iterator[str]:
        """Where the rows of each array lie, the last of them again where the block is not full; and what is read."""
        whole = {*self.turned.values()}
        moved = [(k, *p) for k, p in enumerate(self._pointers()) if k in whole or any(self.layout.moves[k])]
        yield from (f"{t}* {name}r[{LANES}];" for _, t, name in moved)
        read = [k for k in range(self.count) if self._of_rows(k)]
        yield from (f"{self.type(k)} r{k}[{LANES}];" for k in read)
        yield "for (int l = 0; l < wide; l++) {"
        yield "    const long long row = start + (l < count ? l : count - 1);"
        yield from indented(self._places())
        yield from (f"    {name}r[l] = {name} + {self._start(k)};" for k, _, name in moved)
        yield from (f"    r{k}[l] = {self._first(k)};" for k in read)
        yield "}"
        yield from (self._turn("in", n, "wide") for n in self.turned if n < self.count)
        for n, (drawn, turned) in self.decided.items():
            yield f"int* const d{n} = (int*)(scratch + {drawn} * pitch);"
            yield f"int* const k{n} = (int*)(scratch + {turned} * pitch);"
            yield self._draw(n, "start * columns", "count * columns", f"d{n}")
            yield f"const int* d{n}r[{LANES}];"
            yield f"for (int l = 0; l < wide; l++) d{n}r[l] = d{n} + (l < count ? l : count - 1) * columns;"
            yield f"turn_in_4((void*)d{n}r, 1, columns, wide, (void*)k{n});"

    def _turned_out(self) -> Iterator[str]:
        yield from (self._turn("out", n, "count") for n in self.turned if n >= self.count)
        for r in self.once:
            place = self._place(self.count + self.slot[r])
            yield f"if (!start) for (long long j = 0; j < columns; j++) {place} = t{self.kept[r]}[j * {LANES}];"
        for r, k in self.slot.items():
            if self._of_rows(r):
                yield f"for (int l = 0; l < count; l++) {self._first(self.count + k)} = r{r}[l];"

    def _first(self, k: int) -> str:
        """The first number of an array in row l."""
        return f"{self._name(k)}r[l][0]" if any(self.layout.moves[k]) else f"{self._name(k)}[0]"

    def _turn(self, way: str, n: int, count: str) -> str:
        """A value out of the rows of its array, or into them."""
        k = self.turned[n]
        move = self.layout.inner[k]
        step = f"{self._name(k)}_s" if move == "s" else move
        size = SIZES[self.values[n].type.dtype.name]
        return f"turn_{way}_{size}((void*){self._name(k)}r, {step}, columns, {count}, (void*)t{self.kept[n]});"

    # -- loops over rows -----------------------------------------------------------------------------------------------

    def _outer(self, phase: int) -> Iterator[str]:
        """The lines of a phase that are one number per row, and folds of such over rows."""
        outer = [n for n in self.lines if self.values[n].phase == phase and not self._is_inner(n)]
        mine = [n for n in outer if not self._constant(n)]
        made = [n for n in mine if self._of_rows(n)]
        yield from (f"{self.type(n)} r{n}[{LANES}];" for n in made)
        body: list[str] = []
        for n in mine:
            v, o = self.values[n], self.operands(n)
            if v.fold in ("rows", "all"):
                body.append(self._added(f"part{n}[l]", n))
            else:
                body.append(f"const {self.local(n)} v{n} = v{o[0]};" if v.fold else self._statement(n))
        if mine:
            body += [f"r{n}[l] = v{n};" for n in made]
            yield from self._over_rows(mine, [*self._loaded(mine), *body], [f"r{n}[" for n in made])

    def _columns(self, phase: int) -> Iterator[str]:
        """The loop over the columns of a phase."""
        mine = [n for n in self.lines if self.values[n].phase == phase and self._is_inner(n)]
        folds = [n for n in mine if self.values[n].fold == "columns"]
        yield from (f"{self.type(n)} r{n}[{LANES}];" for n in folds)
        if folds:
            yield from self._over_rows((), [f"r{n}[l] = {self.fold(n)[1]};" for n in folds])
        if not mine:
            return
        yield "for (long long j = 0; j < columns; j++) {"
        reads = dict.fromkeys(o for n in mine for o in self.operands(n))
        alike = [o for o in reads if o < self.count and self.values[o].inner and o not in self.kept]
        yield from (f"    const {self.local(o)} v{o} = {self._place(o)};" for o in alike)
        body = [line for n in mine for line in self._inner(n)]
        kept = [f"t{self.kept[n]}[j * {LANES} + " for n in mine if n in self.kept and not self.values[n].fold]
        kept += [f"r{n}[" for n in folds]
        yield from indented(self._over_rows(mine, [*self._loaded(mine), *body], kept))
        yield "}"

    def _inner(self, n: int) -> Iterator[str]:
        fold = self.values[n].fold
        if not fold:
            if n in self.decided:
                yield f"const int kept{n} = k{n}[j * {LANES} + l];"
            yield self._statement(n)
            if n in self.kept:
                yield f"t{self.kept[n]}[j * {LANES} + l] = v{n};"
        elif fold == "columns":
            yield f"r{n}[l] = {self.combined(n, f'r{n}[l]', f'v{self.operands(n)[0]}')};"
        else:
            yield self._added(f"t{self.totals[n]}[j * {LANES} + l]" if n in self.totals else f"part{n}[l]", n)

    def _added(self, total: str, n: int) -> str:
        return f"{total} = {self.combined(n, total, f'v{self.operands(n)[0]}')};"

    def _over_rows(self, mine: Iterable[int], body: Iterable[str], kept: Iterable[str] = ()) -> Iterator[str]:
        """A loop that makes these values and keeps some in arrays: whole vectors, as other loops read those.

        Folds over rows want those alone that are there; then what is kept of the last stands for the others.
        """
        folds = any(self.values[n].fold in ("rows", "all") for n in mine)
        yield f"EACH for (int l = 0; l < {'count' if folds else 'wide'}; l++) {{"
        yield from indented(body)
        yield "}"
        if folds and (copies := [f"{place}l] = {place}count - 1];" for place in kept]):
            yield "for (int l = count; l < wide; l++) {"
            yield from indented(copies)
            yield "}"

    def _loaded(self, mine: Sequence[int]) -> Iterator[str]:
        """Turned values and values per row that lines read and other loops have made."""
        for o in dict.fromkeys(o for n in mine for o in self.operands(n)):
            if o in self.kept and o not in mine:
                yield f"const {self.local(o)} v{o} = t{self.kept[o]}[j * {LANES} + l];"
            elif self._of_rows(o) and o not in mine:
                yield f"const {self.local(o)} v{o} = r{o}[l];"

    # -- folds over rows -----------------------------------------------------------------------------------------------

    def _begin_totals(self) -> Iterator[str]:
        for n in self.across:
            neutral = self.fold(n)[1]
            if n in self.totals:
                yield f"for (long long k = 0; k < {LANES} * columns; k++) t{self.totals[n]}[k] = {neutral};"
            else:
                yield f"{self.type(n)} part{n}[{LANES}];"
                yield f"for (int l = 0; l < {LANES}; l++) part{n}[l] = {neutral};"

    def _end_totals(self) -> Iterator[str]:
        for n in self.across:
            place = self._place(self.count + self.slot[n])
            if n in self.totals:
                yield "for (long long j = 0; j < columns; j++) {"
                yield f"    {self.type(n)}* const part = t{self.totals[n]} + j * {LANES};"
                yield from indented(self._halved(n, "part", place))
                yield "}"
            else:
                yield from self._halved(n, f"part{n}", f"y{self.slot[n]}j[0]")

    def _halved(self, n: int, lanes: str, to: str) -> Iterator[str]:
        half = self.combined(n, f"{lanes}[l]", f"{lanes}[l + width]")
        yield f"for (int width = {LANES // 2}; width; width /= 2)"
        yield f"    for (int l = 0; l < width; l++) {lanes}[l] = {half};"
        yield f"{to} = {lanes}[0];"
