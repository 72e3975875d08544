"""One line of a group as a statement, `const float v3 = v1 * v2;`, which is the same text in C and in CUDA.

A line computes in one dtype, in which its operands meet; 16-bit floats are stored, not computed with. Numbers among the
operands are arguments of the function, so that another number needs no other text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from ..core.op import Op
from ..core.types import as_dtype, promote
from ..ops.random import _threshold
from .form import DROPOUT, FOLDS, MOVES, Attrs, Form, Known, Operand, expression_of, numbers_of

_NAME = re.compile(r"\b[^\W\d]\w*\b")


class LineWriter:
    """Writes the lines of a form; `types` are the names of types in a language, by dtype.

    Value number n is called `v<n>`. `numbers` are the arguments `c0`, `c1`, ..., each a dtype and a value.
    """

    def __init__(self, form: Form, types: Mapping[str, str]) -> None:
        self.form, self.types = form, types
        self.values: list[Known] = form.values()
        self.count = len(form.types)
        self.lines = range(self.count, len(self.values))
        self.slot = {r: k for k, r in enumerate(form.results)}
        self.states = form.states()
        self.draws = [n for n in self.lines if form.lines[n - self.count].op is DROPOUT]
        self.numbers: list[tuple[str, float]] = []
        self._read = [[self._operand(o) for o in line.operands] for line in form.lines]

    def type(self, n: int) -> str:
        return self.types[self.values[n].type.dtype.name]

    def local(self, n: int) -> str:
        """That of its variable. A truth is as wide as a number: gcc vectorizes no loop that has it in a byte."""
        return "int" if self.values[n].type.dtype == bool else self.type(n)

    def operands(self, n: int) -> list[int]:
        """The values that a line reads."""
        return [o for o in self.form.lines[n - self.count].operands if isinstance(o, int)]

    def source(self, n: int) -> Known:
        """What a fold folds."""
        return self.values[self.operands(n)[0]]

    def drawn(self, n: int) -> tuple[int, int]:
        """The stream of a draw, and the threshold that 16 random bits have to reach."""
        attrs = dict(self.form.lines[n - self.count].attrs)
        return attrs["stream"], _threshold(attrs["rate"])

    def fold(self, n: int) -> tuple[str, str]:
        """How the line combines two numbers, and what it begins with."""
        return FOLDS[self.form.lines[n - self.count].op]

    def combined(self, n: int, a: str, b: str) -> str:
        return _NAME.sub(lambda m: {"a": a, "b": b}.get(m[0], m[0]), self.fold(n)[0])

    def statement(self, n: int, column: str) -> str:
        """A line that is no fold; `column` is what the number of its column is called."""
        line, known, result = self.form.lines[n - self.count], self._read[n - self.count], self.values[n].type.dtype
        if line.op in MOVES:
            return f"const {self.local(n)} v{n} = {known[0][0]};"
        words = {"column": column, "kept": f"kept{n}"}
        text = expression(line.op, known, numbers_of(line), result, self.types, words)
        named = re.sub(r"[^\w.]", "_", line.op.name)  # a comment must not go on in the next line
        return f"const {self.local(n)} v{n} = {text};  // {named}"

    def _operand(self, o: Operand) -> tuple[str, np.dtype]:
        if isinstance(o, int):
            return f"v{o}", self.values[o].type.dtype
        dtype = as_dtype(o[0])
        self.numbers.append((compute_dtype(o[0]), o[1]))
        return f"c{len(self.numbers) - 1}", dtype


def expression(
    op: Op[..., Any],
    operands: Sequence[tuple[str, np.dtype]],
    attrs: Attrs,
    result: np.dtype,
    types: Mapping[str, str],
    words: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """What an operator computes of operands, each a name and a dtype; `words` stand for other names in its code."""
    text = (expression_of(op) or "").removeprefix("y = ")
    used = set(_NAME.findall(text))
    named = {name: o for name, o in zip(op.inputs, operands) if name in used}
    meet = compute_dtype(_meeting([d for _, d in named.values()], [v for k, v in attrs if k in used], result).name)
    known = {"T": types[meet], **words}
    for name, (value, dtype) in named.items():
        decides = dtype == np.bool_ and f"{name} ?" in text  # and nobody computes with it
        made = value if decides or dtype.name == meet else f"(({types[meet]}){value})"
        known[name] = f"of_integer{made}" if dtype.kind in "iu" and "float" in meet else made
    known |= {k: literal(v, meet, types) for k, v in attrs}
    text = _NAME.sub(lambda m: known.get(m[0], m[0]), text)
    return f"({text}) != 0" if result == np.bool_ else text


def _meeting(operands: Sequence[np.dtype], numbers: Sequence[float], result: np.dtype) -> np.dtype:
    """In which dtype an expression computes: that of its result, unless this cannot hold what it computes with."""
    if result.kind == "b" or (result.kind != "f" and any(d.kind == "f" for d in operands)):
        result = promote(*operands)
    fractions = result.kind != "f" and any(math.isfinite(v) and v != int(v) for v in numbers)
    return np.dtype(np.float64) if fractions else result


def compute_dtype(dtype: str) -> str:
    """The dtype in which values of `dtype` are computed: 16-bit floats are stored, not computed with."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def literal(value: float, dtype: str, types: Mapping[str, str]) -> str:
    """A number as C writes it; one that integers of the dtype do not have is the nearest that they have."""
    if "float" not in dtype:
        limits = np.iinfo(np.uint8 if dtype == "bool" else dtype)
        whole = min(max(int(value), int(limits.min)), int(limits.max))
        return f"(({types[dtype]}){whole}{'U' if whole >= 1 << 63 else ''})"
    if value != value or value in (float("inf"), float("-inf")):
        return "NAN" if value != value else "INFINITY" if value > 0 else "(-INFINITY)"
    text = f"{float(value)!r}{'f' if dtype == 'float32' else ''}"
    return f"({text})" if value < 0 else text
