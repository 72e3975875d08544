"""Kernels generated from the `code=` expressions of operators: what they compute, and their CUDA C text.

A kernel visits every place of a shape once, evaluates a list of steps there (`y = a + b`), writes some of the values to
memory and folds others into sums or extrema of whole rows or columns. Types are strict: an expression computes in `T`,
which follows from the dtypes of the operator, and a 16-bit float is rounded after every step, so that a fused group
gives what its operators give one by one. A graph pass decides what to fuse; `elementwise.py` launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .reduce import definitions, wide_dtype
from .source import CTYPES, assemble, compute_dtype, number_text


class Expression(NamedTuple):
    """One expression of a generated kernel. Plain hashable data.

    `inputs` pairs its variables with values: 0, 1, ... are the arrays of the kernel, and after them come the results
    of earlier steps. `numbers` are its other variables. The inputs meet in the dtype `meet`; `dtype` is the result's.
    """

    expression: str
    inputs: tuple[tuple[str, int], ...]
    numbers: tuple[tuple[str, float], ...]
    meet: str
    dtype: str


class Fold(NamedTuple):
    """A value that is reduced, by an operation of `reduce.COMBINE`."""

    value: int
    operation: str


class Work(NamedTuple):
    """What a kernel does at each place: the steps, the values that it writes, and those that it folds.

    Each of `draws` is one more value, numbered behind the arrays: whether 16 random bits reach this threshold.
    """

    steps: tuple[Expression, ...]
    results: tuple[int, ...]
    folds: tuple[Fold, ...] = ()
    draws: tuple[int, ...] = ()

    def dtypes(self, arrays: Sequence[str]) -> list[str]:
        """Those of all values by number, given those of the arrays."""
        return [*arrays, *("bool" for _ in self.draws), *(step.dtype for step in self.steps)]


class Geometry(NamedTuple):
    """What of the arrays' geometry is compiled in; sizes and strides are arguments of the kernel.

    `moves[k][axis]` says whether array k has a stride on that (merged) axis. The first `outer` axes number the rows,
    the others the columns. If `unit`, strides on the last axis are 1, and neighbors move in packs; a thread handles
    `span` neighbors, one pack or several.
    """

    moves: tuple[tuple[bool, ...], ...]
    outer: int
    unit: bool
    pack: int
    span: int
    index: str

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


def elementwise_text(work: Work, dtypes: Sequence[str], layout: Geometry) -> str:
    """The text of the kernel `elementwise(arrays..., draws..., results..., n, sizes, strides)`.

    Bytes: each array and each result once. FLOP: those of the expressions, far below what memory lets pass. Launch: a
    grid-stride loop, one span a thread.

    >>> square = Work((Expression("y = x * x", (("x", 0),), (), "float32", "float32"),), (1,))
    >>> "y = x * x;" in elementwise_text(square, ["float32"], Geometry(((True,),), 0, True, 1, 1, "int32"))
    True
    """
    loop = (
        f"    const Index step = (Index)gridDim.x * blockDim.x * {layout.span};\n"
        f"    for (Index i = ((Index)blockIdx.x * blockDim.x + threadIdx.x) * {layout.span}; i < n; i += step) {{\n"
        f"        const Index col = i;\n{_visit(work, dtypes, layout)}    }}\n"
    )
    return _kernel("elementwise", work, dtypes, [], layout, ["n"], loop)


def rows_text(work: Work, dtypes: Sequence[str], totals: Sequence[str], layout: Geometry) -> str:
    """The kernel `fold_rows(arrays..., draws..., results..., folds..., rows, width, chunks, each, sizes, strides)`.

    A row is cut into `chunks` of `each` columns; a team of threads folds one of them. Bytes: each array and result
    once. Launch: (32, 8) threads where `each` is up to 1024, else (256, 1).
    """
    span = layout.span
    loop = (
        "    for (Index k = (Index)blockIdx.x * blockDim.y + threadIdx.y; k < rows * chunks;\n"
        "         k += (Index)gridDim.x * blockDim.y) {\n"
        "        const Index row = k / chunks, begin = k % chunks * each;\n"
        "        const Index end = begin + each < width ? begin + each : width;\n"
        f"{_totals(work, layout)}"
        f"        for (Index col = begin + threadIdx.x * {span}; col < end; col += blockDim.x * {span}) {{\n"
        f"        const Index i = row * width + col;\n{_visit(work, dtypes, layout)}        }}\n"
    )
    for f, _ in enumerate(work.folds):
        loop += (
            f"        for (int j = 1; j < {span}; j++) t{f}[0] = fold{f}::combine(t{f}[0], t{f}[j]);\n"
            f"        t{f}[0] = team_fold(t{f}[0], fold{f}::identity(), fold{f}::combine);\n"
            f"        if (threadIdx.x == 0) total{f}[k] = t{f}[0];\n"
        )
    return _kernel("fold_rows", work, dtypes, totals, layout, ["rows", "width", "chunks", "each"], f"{loop}    }}\n")


def columns_text(work: Work, dtypes: Sequence[str], totals: Sequence[str], layout: Geometry) -> str:
    """The kernel `fold_columns(arrays..., draws..., results..., folds..., rows, width, each, sizes, strides)`.

    A block of (32, 8) threads folds `each` rows of 32 spans of columns. Grid (spans / 32, chunks of rows).
    """
    folds = range(len(work.folds))
    body = (
        "".join(f"    __shared__ T{f} part{f}[8][32];\n" for f in folds)
        + f"    const Index col = ((Index)blockIdx.x * 32 + threadIdx.x) * {layout.span};\n"
        "    const Index begin = blockIdx.y * each, end = begin + each < rows ? begin + each : rows;\n"
        f"{_totals(work, layout)}"
        "    if (col < width)\n        for (Index row = begin + threadIdx.y; row < end; row += 8) {\n"
        f"        const Index i = row * width + col;\n{_visit(work, dtypes, layout)}        }}\n"
        "#pragma unroll  // totals stay in registers\n"
        f"    for (int j = 0; j < {layout.span}; j++) {{  // one column of each span at a time\n"
        + "".join(f"        part{f}[threadIdx.y][threadIdx.x] = t{f}[j];\n" for f in folds)
        + "        __syncthreads();\n        if (threadIdx.y == 0 && col < width) {\n"
    )
    for f in folds:
        body += (
            f"            for (int y = 1; y < 8; y++) t{f}[j] = fold{f}::combine(t{f}[j], part{f}[y][threadIdx.x]);\n"
            f"            total{f}[blockIdx.y * width + col + j] = t{f}[j];\n"
        )
    body += "        }\n        __syncthreads();\n    }\n"
    return _kernel("fold_columns", work, dtypes, totals, layout, ["rows", "width", "each"], body)


def _kernel(
    name: str,
    work: Work,
    dtypes: Sequence[str],
    totals: Sequence[str],
    layout: Geometry,
    numbers: Sequence[str],
    body: str,
) -> str:
    """The whole text: the folds, the function of one place, and the kernel with its parameters."""
    known = work.dtypes(dtypes)
    parameters = [f"const {CTYPES[d]}* a{k}" for k, d in enumerate(dtypes)]
    parameters += [f"const Word* state{d}, Word stream{d}" for d, _ in enumerate(work.draws)]
    parameters += [f"O{r}* out{r}" for r, _ in enumerate(work.results)]
    parameters += [f"{CTYPES[d]}* total{f}" for f, d in enumerate(totals)]
    parameters += [f"Index {n}" for n in numbers]
    parameters += [f"Index size{a}" for a in layout.sizes()] + [f"Index stride{k}_{a}" for k, a in layout.strides()]
    text = "".join(_fold(f, fold, known[fold.value]) for f, fold in enumerate(work.folds))
    text += f'{_evaluate(work, dtypes)}\nextern "C" __global__ void {name}({", ".join(parameters)}) {{\n{body}}}\n'
    stored = {f"O{r}": known[value] for r, value in enumerate(work.results)}
    return assemble(text, f"{name}.cu", **stored, Index=layout.index)


def _fold(f: int, fold: Fold, dtype: str) -> str:
    """The functions of one fold, in a namespace of its own."""
    wide = wide_dtype(dtype)
    types = f"typedef {CTYPES[dtype]} S; typedef {CTYPES[wide]} T;\n"
    return f"namespace fold{f} {{\n{types}{definitions(fold.operation, wide)}}}\ntypedef fold{f}::T T{f};\n"


def _totals(work: Work, layout: Geometry) -> str:
    """The totals of a thread, one for each of the neighbors that it handles."""
    lines = []
    for f, _ in enumerate(work.folds):
        lines += [f"T{f} t{f}[{layout.span}];", f"for (T{f}& t : t{f}) t = fold{f}::identity();"]
    return "".join(f"        {line}\n" for line in lines)


# -- one place ---------------------------------------------------------------------------------------------------------


def _visit(work: Work, dtypes: Sequence[str], layout: Geometry) -> str:
    """What a thread does at the span that begins in (`row`, `col`), which is number `i` of the results.

    16 neighbors share one draw of random words, and no span reaches beyond them.
    """
    before, lines, values, pack = [], [*_coordinates(layout)], [], layout.pack
    for k, (dtype, moves) in enumerate(zip(dtypes, layout.moves)):
        packed = layout.unit and moves[-1]
        whole = [a for a, moving in enumerate(moves) if moving]
        terms = [f"c{a}" if packed and a == whole[-1] else f"c{a} * stride{k}_{a}" for a in whole]
        ctype, place = CTYPES[dtype], " + ".join(terms) or "0"
        if packed:
            lines.append(f"const Pack<{ctype}, {pack}> p{k} = *(const Pack<{ctype}, {pack}>*)(a{k} + {place});")
        else:
            lines.append(f"const {ctype} p{k} = a{k}[{place}];")
        values.append(f"p{k}.v[j]" if packed else f"p{k}")
    for d, threshold in enumerate(work.draws):
        before.append(f"Word words{d}[4]; philox(state{d}, stream{d}, i / 16, words{d});")
        values.append(f"kept(words{d}, {'' if layout.span == 16 else 'i % 16 + '}q + j, {threshold})")
    for r, _ in enumerate(work.results):
        lines.append(f"Pack<O{r}, {pack}> r{r};")
        values.append(f"r{r}.v[j]")
    values += [f"t{f}[q + j]" for f, _ in enumerate(work.folds)]
    lines.append(f"for (int j = 0; j < {pack}; j++) evaluate({', '.join(values)});")
    lines += [f"*(Pack<O{r}, {pack}>*)(out{r} + i + q) = r{r};" for r, _ in enumerate(work.results)]
    turns = f"for (int q = 0; q < {layout.span}; q += {pack}) {{"
    return "".join(f"            {line}\n" for line in (*before, turns, *lines, "}"))


def _coordinates(layout: Geometry) -> Iterator[str]:
    """The numbers of the row and of the column taken apart into one coordinate an axis, the last varying fastest."""
    for name, first, end in (("row", 0, layout.outer), ("(col + q)", layout.outer, layout.axes)):
        rest = name
        for a in range(end - 1, first, -1):
            yield f"const Index c{a} = {rest} % size{a}, rest{a} = {rest} / size{a};"
            rest = f"rest{a}"
        if end > first:
            yield f"const Index c{first} = {rest};"


def _evaluate(work: Work, dtypes: Sequence[str]) -> str:
    """The device function that takes one element of each array to one element of each result, and into each fold."""
    known = work.dtypes(dtypes)[: len(dtypes) + len(work.draws)]
    parameters = [f"{CTYPES[d]} v{k}" for k, d in enumerate(known)]
    parameters += [f"O{r}& r{r}" for r, _ in enumerate(work.results)]
    parameters += [f"T{f}& t{f}" for f, _ in enumerate(work.folds)]
    lines = [f"__device__ inline void evaluate({', '.join(parameters)}) {{"]
    for step in work.steps:
        lines += [f"    {CTYPES[step.dtype]} v{len(known)}; {{", *step_lines(step, len(known)), "    }"]
        known.append(step.dtype)
    lines += [f"    r{r} = v{value};" for r, value in enumerate(work.results)]
    lines += [f"    t{f} = fold{f}::combine(t{f}, fold{f}::value(v{x.value}));" for f, x in enumerate(work.folds)]
    return "\n".join([*lines, "}"])


def step_lines(step: Expression, number: int) -> list[str]:
    """One expression in a block of its own, with its variables in the dtypes in which they meet."""
    meet = CTYPES[compute_dtype(step.meet)]
    result = CTYPES[compute_dtype(step.dtype)]
    real = meet if "float" in step.meet or step.dtype != "bool" else "float"  # predicates test `(T)x`
    rows = [f"typedef {real if step.dtype == 'bool' else result} T;"]
    for name, value in step.inputs:
        rows.append(f"const {meet} {name} = ({meet})v{value};")
    for name, value in step.numbers:
        rows.append(f"const {meet} {name} = ({meet}){number_text(_saturated(value, step.meet))};")
    rows += [f"{result} y;", f"{step.expression};", f"v{number} = y;"]
    return [f"        {row}" for row in rows]


def _saturated(value: float, dtype: str) -> float:
    """The nearest number that an integer dtype has: no uint8 lies below -1, so a bound of -1 acts as 0."""
    if isinstance(value, bool) or "int" not in dtype:
        return value
    limits = np.iinfo(dtype)
    return min(max(value, int(limits.min)), int(limits.max))
