"""A program to take away: the functions, the table, the memory and the weights of a step as one C file with a `main`.

It is what the step runs, text for text. Only BLAS is replaced by plain loops, and there is one thread.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ArgumentError
from ..core.leaf import random_state
from .c_calls import NUMBERS, CCall, address
from .compiled import text_of
from .compiler import compiler
from .openblas import Symbol

FLAGS = "-O3 -march=native -fno-math-errno -fno-trapping-math -fno-strict-aliasing -fwrapv -Wno-psabi"
KEYWORDS = (
    "T INT typedef struct union enum static inline const void char short int long signed unsigned float double bool "
    "sizeof"
)
CTYPES = {**NUMBERS, "uint64": "unsigned long long", "uint32": "unsigned", "int8": "signed char", "bool": "bool"}
CTYPES["uint16"] = "unsigned short"
PRINTED = {"float32": ("%.9g", "double"), "float64": ("%.17g", "double"), "uint64": ("%llu", CTYPES["uint64"])}
SPECIAL = {"inf": "INFINITY", "-inf": "-INFINITY", "nan": "NAN", "-0": "-0.0"}
MAIN = """
int main(int count, char** arguments) {
    const char* const given = count > 1 ? arguments[1] : "none";
    FILE* const inputs = count > 1 ? fopen(given, "rb") : 0;
    char* end = "";
    const long steps = count > 2 ? strtol(arguments[2], &end, 10) : 1;
    if (steps < 1 || *end) return fprintf(stderr, "give a number of steps, not %s\\n", arguments[2]), 1;"""
_NOTHING = re.compile(r"//[^\n]*|^#(?:[^\n]*\\\n)*[^\n]*", re.M)  # comments and what the preprocessor reads
_TOKEN = re.compile(r"[A-Za-z_]\w*|[(){};]")
_MACROS = re.compile(r"^#define (\w+)", re.M)
_OF_NAMES = re.compile(r"^#define (\w+)\((\w+).*?\)((?:[^\n]*\\\n)*[^\n]*)", re.M)  # macros: first argument, body
_UNSAID = re.compile(r'[^ -~]|["\\%]')  # what cannot stand both in a comment and in a format
_FILE = re.compile(r"\w[\w .-]*")


def export_c(program: Any, folder: str | os.PathLike[str], name: str, *, random: bool) -> Path:
    """Write a program and what lies in its buffers now into a folder: `name`.c, and `name`.inputs with what was fed.

    With `random`, steps are counted in the random state. ArgumentError where a call has no C, where C cannot print a
    result, and for a name or a folder that no file can have.
    """
    calls = [(step.node, call) for step in program.steps for call in step.calls]
    lacking = {f"{node.op.name} {node.type}": node.site for node, call in calls if not isinstance(call, CCall)}
    if lacking:
        fix = (
            "leave them out of what is exported, or give them float32 and arrays that are not empty, which C knows best"
        )
        fix = "find a C compiler with `hetu doctor`" if compiler() is None else fix
        said = f"these operators of {name!r} have no C: {', '.join(lacking)}"
        raise ArgumentError(said, fix=fix, site=next(iter(lacking.values())))
    strange = sorted({str(f.dtype) for f in program.fetches} - CTYPES.keys())
    if strange:
        fix = "give them to `ht.astype`, with float32 for instance"
        raise ArgumentError(f"results of {name!r} are {', '.join(strange)}, which C cannot print", fix=fix)
    if not _FILE.fullmatch(name):
        fix = "give the sub-graph a name that begins with a letter and has letters, digits, _, -, . and spaces"
        raise ArgumentError(f"no file can be called {name!r}", fix=fix)
    text = "\n".join(_File(program, calls, random).text(name))
    try:
        path = Path(folder) / f"{name}.c"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        path.with_suffix(".inputs").write_bytes(b"".join(array.tobytes() for array in program.feeds.values()))
    except (OSError, TypeError) as error:
        fix = "give the path of a folder that you can write"
        raise ArgumentError(f"nothing can be written to {folder!r}: {error}", fix=fix) from error
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
                self._enter(re.sub(r"\W", "_", f"{kind}_{name}", flags=re.ASCII), array)

    def _enter(self, name: str, array: np.ndarray) -> None:
        while any(name == taken for _, taken, _ in self.regions.values()):
            name += "_"
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
        return f"((char*){self.regions[start][1]} + {at - start})" if at > start else self.regions[start][1]

    def _element(self, array: np.ndarray) -> str:
        """Where the element with the number k of an array lies, in C; it may be a view."""
        steps, inner = [], 1
        for size, stride in zip(array.shape[::-1], array.strides[::-1]):
            steps += [f"k / {inner} % {size} * {stride}"] if size > 1 and stride else []
            inner *= size
        steps = [f"k * {array.itemsize}"] if array.flags.c_contiguous else steps
        return " + ".join((f"(char*){self._place(array)}", *steps))

    def _word(self, word: Any) -> str:
        if isinstance(word, np.ndarray):
            return f"{{.p = {self._place(word)}}}"
        if isinstance(word, Symbol):
            return f"{{.p = {word.name}}}"
        return f"{{.{'x' if isinstance(word, float | np.floating) else 'n'} = {_number(word)}}}"

    # -- parts of the text ---------------------------------------------------------------------------------------------

    def text(self, name: str) -> Iterator[str]:
        table, main = list(self._table()), list(self._main())  # which find the memory that there is
        inputs = ", ".join(f"{_said(n)} {a.dtype}{list(a.shape)}" for n, a in self.program.feeds.items()) or "none"
        yield f"// {name}: a step of hetu as one program. Inputs, one after the other in a file: {inputs}.\n//"
        file, runs, fed = map(shlex.quote, (f"{name}.c", name, f"{name}.inputs"))
        yield f"//     cc {FLAGS} {file} -o {runs} -lm -lpthread && ./{runs} {fed} 1\n//"
        yield "// The number of steps stands last. Below: what every function may use, the functions, the walker, the"
        yield "// memory, the step as a table, and at the end the numbers.\n"
        yield from self.functions()
        yield _line("memory")
        for _, region, array in self.regions.values():
            yield self._memory(region, array) + ";"
        yield _line("the step")
        yield from (*table, *main)
        yield _line("numbers")
        for _, region, array in self.regions.values():
            if region != "arena" and not region.startswith("feed_") and array.tobytes().strip(b"\0"):
                yield f"{self._memory(region, array)} = {{{_numbers(array)}}};"

    @staticmethod
    def _memory(name: str, array: np.ndarray) -> str:
        known = CTYPES.get(array.dtype.name)
        return f"static _Alignas(64) {known or 'char'} {name}[{array.size if known else array.nbytes}]"

    def functions(self) -> Iterator[str]:
        """Texts whose names are their own, as another may have the same ones, between what all need."""
        yield text_of("prelude.h")
        yield "#include <stdio.h>\n#include <string.h>\n"
        yield f"{_line('functions')}\n\n#define INT long long\n{text_of('plain_blas.c')}\n#undef INT\n"
        for number, (made, clashing) in enumerate(zip(self.sources, self.clashing)):
            yield from (f"#define {name} {name}_{number}" for name in sorted(clashing))
            yield made.text
            yield from (f"#undef {name}" for name in sorted(clashing | {*_MACROS.findall(made.text)}))
            yield ""
        yield text_of("walk.c")

    def _table(self) -> Iterator[str]:
        rows = []
        for k, (node, call) in enumerate(self.calls):
            words = ", ".join(map(self._word, call.words)) or "{.n = 0}"
            yield f"static const Word words_{k}[] = {{{words}}};  // {_said(repr(node))}"
            doubt = "0" if call.doubt is None else f"(const void*){self._place(call.doubt)}"
            number = self.sources.index(call.source)
            name = f"{call.function}_{number}" if call.function in self.clashing[number] else call.function
            rows.append(f"    {{{name}, words_{k}, {call.jobs}, {call.grain}, {doubt}}},")
        yield "\nstatic const Row table[] = {"
        yield from rows
        yield f"    {{0, 0, 0, 0, 0}}\n}};\n\nstatic const char* const checked[{len(self.calls) + 1}] = {{"
        for k, (node, call) in enumerate(self.calls):
            if call.doubt is not None:
                yield f'    [{k}] = "{_said(repr(node))}",'
        yield f"    [{len(self.calls)}] = 0,\n}};"

    def _main(self) -> Iterator[str]:
        size, count = max((call.scratch for _, call in self.calls), default=0), len(self.calls)
        yield MAIN
        for name, array in self.program.feeds.items():
            said = f'fprintf(stderr, "give a file with {array.nbytes} bytes of {_said(name)}, not %s\\n", given)'
            read = f"fread({self._place(array)}, 1, {array.nbytes}, inputs)"
            yield f"    if (!inputs || {read} != {array.nbytes}) return {said}, 1;"
        yield "    for (long step = 0; step < steps; step++) {"
        yield f"        const long long left = walk(table + {count}, {size}, 0, 0, table);"
        yield '        if (left < 0) return fprintf(stderr, "no memory to work in\\n"), 1;'
        yield f'        if (left) return fprintf(stderr, "%s met ids out of range\\n", checked[{count} - left]), 1;'
        if self.random:
            yield f"        {self._place(self.program.state.arrays[random_state.name])}[1]++;"
        yield from (f"        {line}" for line in (*self._results(), *self._commits()))
        yield "    }\n    return 0;\n}"

    def _results(self) -> Iterator[str]:
        """Print each result in a line, with all digits."""
        for k, fetch in enumerate(self.program.fetches):
            array = self.program.arrays[fetch]
            shown, wide = PRINTED.get(array.dtype.name, ("%lld", "long long"))
            value = f"({wide})*(const {CTYPES[array.dtype.name]}*)({self._element(array)})"
            yield f'printf("{k}:");'
            yield f'for (long long k = 0; k < {array.size}; k++) printf(" {shown}", {value});'
            yield 'printf("\\n");'

    def _commits(self) -> Iterator[str]:
        """Copy new values into variables; those that lie in a variable which gets another one are read before."""
        rows = [row for row in self.program.commits if row[0].size]
        for k, (_, value, aside) in enumerate(rows):
            if aside:
                yield f"static char aside_{k}[{value.nbytes}];"
                yield _copied(value, f"aside_{k} + k * {value.itemsize}", self._element(value))
        for k, (target, value, aside) in enumerate(rows):
            read = f"aside_{k} + k * {value.itemsize}" if aside else self._element(value)
            yield _copied(value, self._element(target), read)


def _copied(array: np.ndarray, to: str, read: str) -> str:
    return f"for (long long k = 0; k < {array.size}; k++) memcpy({to}, {read}, {array.itemsize});"


def _said(text: str) -> str:
    """A text as it may stand in a comment and in a format."""
    return _UNSAID.sub("_", text)


def _line(title: str) -> str:
    return f"\n// -- {title} ".ljust(120, "-") + "\n"


def _numbers(array: np.ndarray) -> str:
    flat = array.ravel(order="K")
    if flat.dtype.name not in CTYPES:
        return ", ".join(map(str, flat.view(np.int8)))
    if flat.dtype == np.float32:
        return ", ".join(SPECIAL.get(t := f"{x:.9g}", t) for x in flat.tolist())
    return ", ".join(map(_number, flat.tolist()))


def _number(x: Any) -> str:
    """A number as C writes it."""
    if isinstance(x, float | np.floating):
        return SPECIAL.get(t := repr(float(x)), t)
    return "-0x7fffffffffffffff - 1" if (n := int(x)) == -(2**63) else f"{n}{'u' * (n >= 2**63)}"


@cache
def _defined(text: str) -> frozenset[str]:
    """Names that a C text gives outside of functions, and some that it only uses there; arguments of macros too.

    Those that begin with an underscore are the compiler's, and those of the prelude are the same for all texts.
    """
    prelude = text_of("prelude.h")
    found = {*_outside(text), *_pasted(text)} - {
        *KEYWORDS.split(),
        *_outside(prelude),
        *_MACROS.findall(prelude + text),
    }
    return frozenset(name for name in found if name[0] != "_")


def _outside(text: str) -> set[str]:
    """The words of a C text that stand outside of functions, or in the call of a macro there."""
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
    return found


def _pasted(text: str) -> Iterator[str]:
    """Names that macros make outside of functions, each of a word and the first argument, as TILES(whole) few_whole."""
    for macro, argument, body in _OF_NAMES.findall(text):
        words = re.findall(rf"(\w+)##{argument}\b", body)
        yield from (w + name for name in re.findall(rf"^{macro}\((\w+)", text, re.M) for w in words)
