"""A program to take away: the functions, the table, the memory and the weights of a step as one C file with a `main`.

It is what the step runs, text for text. Only BLAS is replaced by plain loops, and there is one thread.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ArgumentError
from ..core.leaf import random_state
from .c_calls import NUMBERS, CCall, address
from .compiled import CSource, text_of
from .compiler import compiler
from .openblas import Symbol

FLAGS = "-O3 -march=native -fno-math-errno -fno-trapping-math -fno-strict-aliasing"
KEYWORDS = (
    "T INT typedef struct union enum static inline const void char short int long unsigned float double bool sizeof "
    "__attribute__"
)
CTYPES = {**NUMBERS, "uint64": "unsigned long long", "uint32": "unsigned", "int8": "signed char", "bool": "bool"}
_NOTHING = re.compile(r"//[^\n]*|^#(?:[^\n]*\\\n)*[^\n]*", re.M)  # comments and what the preprocessor reads
_TOKEN = re.compile(r"[A-Za-z_]\w*|[(){};]")
_MACROS = re.compile(r"^#define (\w+)", re.M)


def export_c(program: Any, folder: str | os.PathLike[str], name: str, *, random: bool) -> Path:
    """Write a program and what lies in its buffers now into a folder: `name`.c, and `name`.inputs with what was fed.

    With `random`, steps are counted in the random state. ArgumentError where a call has no C.
    """
    calls = [(step.node, call) for step in program.steps for call in step.calls]
    lacking = sorted({node.op.name for node, call in calls if not isinstance(call, CCall)})
    if lacking:
        fix = "find a C compiler with `hetu doctor`" if compiler() is None else "leave them out of what is exported"
        raise ArgumentError(f"these operators of {name!r} have no C: {', '.join(lacking)}", fix=fix)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.c"
    path.write_text("\n".join(_File(program, calls, random).text(name)), "utf-8")
    (folder / f"{name}.inputs").write_bytes(b"".join(array.tobytes() for array in program.feeds.values()))
    return path


class _File:
    """Puts the text together; `regions` are pieces of memory by their first address."""

    def __init__(self, program: Any, calls: Sequence[tuple[Any, CCall]], random: bool) -> None:
        self.program, self.calls, self.random = program, calls, random
        self.sources = list(dict.fromkeys(call.source for _, call in calls))
        names = [_defined(s.text) for s in self.sources]
        count = Counter(name for some in (*names, _defined(text_of("walk.c"))) for name in some)
        self.clashing = [{name for name in some if count[name] > 1} for some in names]
        self.regions: dict[int, tuple[int, str, np.ndarray]] = {}  # its end, its name, and the array that it holds
        self._enter("arena", program.block)
        for kind, arrays in (("feed", program.feeds), ("variable", program.state.arrays)):
            for name, array in arrays.items():
                self._enter("_".join((kind, *re.findall(r"\w+", name))), array)

    def _enter(self, name: str, array: np.ndarray) -> None:
        if array.nbytes:
            self.regions[address(array)] = address(array) + array.nbytes, name, array

    def _place(self, array: np.ndarray) -> str:
        """Where an array lies, in C."""
        if not array.size:
            return "0"
        at = address(array)
        start = next((s for s, (end, _, _) in self.regions.items() if s <= at < end), None)
        if start is None:
            owner = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            start, end = np.lib.array_utils.byte_bounds(owner)
            memory = (ctypes.c_char * (end - start)).from_address(start)
            self._enter(f"fixed_{len(self.regions)}", np.frombuffer(memory, owner.dtype))
        return f"(char*){self.regions[start][1]} + {at - start}" if at > start else self.regions[start][1]

    def _word(self, word: Any) -> str:
        if isinstance(word, np.ndarray):
            return f"{{.p = {self._place(word)}}}"
        if isinstance(word, Symbol):
            return f"{{.p = {word.name}}}"
        return f"{{.x = {float(word)!r}}}" if isinstance(word, float | np.floating) else f"{{.n = {int(word)}}}"

    # -- parts of the text ---------------------------------------------------------------------------------------------

    def text(self, name: str) -> Iterator[str]:
        table, main = list(self._table()), list(self._main())  # which find the memory that there is
        inputs = ", ".join(f"{n} {a.dtype}{list(a.shape)}" for n, a in self.program.feeds.items()) or "none"
        yield f"// {name}: a step of hetu as one program. Inputs, one after the other in a file: {inputs}.\n//"
        yield f"//     cc {FLAGS} {name}.c -o {name} -lm -lpthread && ./{name} {name}.inputs 1\n//"
        yield "// The number of steps stands last. Below: what every function may use, the functions, the walker, the"
        yield "// memory, the step as a table, and at the end the numbers.\n"
        yield text_of("prelude.h")
        yield "#include <stdio.h>\n#include <string.h>\n"
        yield f"{_line('functions')}\n\n#define INT long long\n{text_of('plain_blas.c')}\n#undef INT\n"
        for number, made in enumerate(self.sources):
            yield from self._functions(made, number)
        yield text_of("walk.c")
        yield _line("memory")
        for _, region, array in self.regions.values():
            yield f"static _Alignas(64) {self._ctype(array)} {region}[{array.size}];"
        yield _line("the step")
        yield from (*table, *main)
        yield _line("numbers")
        for _, region, array in self.regions.values():
            if region != "arena" and not region.startswith("feed_") and array.any():
                yield f"static _Alignas(64) {self._ctype(array)} {region}[{array.size}] = {{{_numbers(array)}}};"

    @staticmethod
    def _ctype(array: np.ndarray) -> str:
        return CTYPES.get(array.dtype.name, "char")

    def _functions(self, s: CSource, number: int) -> Iterator[str]:
        """A text whose names are its own, as another may have the same ones."""
        names = sorted(self.clashing[number])
        yield from (f"#define {name} {name}_{number}" for name in names)
        yield s.text
        yield from (f"#undef {name}" for name in sorted({*names, *_MACROS.findall(s.text)}))
        yield ""

    def _table(self) -> Iterator[str]:
        rows = []
        for k, (node, call) in enumerate(self.calls):
            words = ", ".join(map(self._word, call.words)) or "{.n = 0}"
            yield f"static const Word words_{k}[] = {{{words}}};  // {node!r}".replace("\n", " ")
            doubt = "0" if call.doubt is None else f"(const long long*){self._place(call.doubt)}"
            number = self.sources.index(call.source)
            name = f"{call.function}_{number}" if call.function in self.clashing[number] else call.function
            rows.append(f"    {{{name}, words_{k}, {call.jobs}, {call.grain}, {doubt}}},")
        yield "\nstatic const Row table[] = {"
        yield from rows
        yield "};"

    def _main(self) -> Iterator[str]:
        size, count = max(call.scratch for _, call in self.calls), len(self.calls)
        yield "\nint main(int count, char** arguments) {"
        yield '    FILE* const inputs = count > 1 ? fopen(arguments[1], "rb") : 0;'
        for name, array in self.program.feeds.items():
            said = f'fprintf(stderr, "give a file with {array.nbytes} bytes of {name}\\n")'
            read = f"fread({self._place(array)}, 1, {array.nbytes}, inputs)"
            yield f"    if (!inputs || {read} != {array.nbytes}) return {said}, 1;"
        yield "    for (int step = 0; step < (count > 2 ? atoi(arguments[2]) : 1); step++) {"
        yield f"        const long long left = walk(table + {count}, {size}, 0, 0, table);"
        yield '        if (left < 0) return fprintf(stderr, "no memory to work in\\n"), 1;'
        yield f'        if (left) return fprintf(stderr, "call %lld met ids out of range\\n", {count} - left), 1;'
        if self.random:
            yield f"        {self._place(self.program.state.arrays[random_state.name])}[1]++;"
        yield from (f"        {line}" for line in self._results())
        for target, value, _ in self.program.commits:
            yield f"        memcpy({self._place(target)}, {self._place(value)}, {target.nbytes});"
        yield "    }\n    return 0;\n}"

    def _results(self) -> Iterator[str]:
        """Print each result in a line."""
        for k, fetch in enumerate(self.program.fetches):
            array = self.program.arrays[fetch]
            place = f"((const {self._ctype(array)}*)({self._place(array)}))[k]"
            yield f'printf("{k}:");'
            yield f'for (int k = 0; k < {array.size}; k++) printf(" %.9g", (double){place});'
            yield 'printf("\\n");'


def _line(title: str) -> str:
    return f"\n// -- {title} ".ljust(120, "-") + "\n"


def _numbers(array: np.ndarray) -> str:
    flat = array.ravel(order="K")
    if flat.dtype.kind == "f":
        special = {"inf": "INFINITY", "-inf": "-INFINITY", "nan": "NAN"}
        return ", ".join(special.get(t := f"{x:.{9 if flat.itemsize < 8 else 17}g}", t) for x in flat.tolist())
    return ", ".join(map(str, flat.view(np.int8).tolist() if flat.dtype.name not in CTYPES else map(int, flat)))


@cache
def _defined(text: str) -> frozenset[str]:
    """Names that a C text gives outside of functions, and some that it only uses there; arguments of macros too."""
    found, braces, parentheses, before, is_macro, is_enum = set[str](), 0, 0, "", False, False
    for token in _TOKEN.findall(_NOTHING.sub("", text)):
        if token in "{}":
            braces += 1 if token == "{" else -1
            is_enum = token == "{" and before == "enum"
        elif token in "()":
            parentheses += 1 if token == "(" else -1
            is_macro = token == "(" and (before.isupper() if parentheses == 1 else is_macro)
        elif token != ";" and (braces == 0 or is_enum) and (parentheses == 0 or is_macro):
            found.add(token)
        before = token
    return frozenset(found - {*KEYWORDS.split(), *_TOKEN.findall(text_of("prelude.h")), *_MACROS.findall(text)})
