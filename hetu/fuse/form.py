"""The form of a fused group: lines over a space of rows and columns, which every device renders in its own way.

A line is an operator on numbered values. The space has a number of leading axes, its *rows*; the others are its
*columns*. A value is *inner* if it differs from column to column, else there is one per row, or one in all. A fold over
the columns ends a *phase*: what reads it belongs to the next loop over the same row. So a norm, a softmax or a cross
entropy with its gradient is one group. A fold over the rows is known only at the end, and nothing in the group may read
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import HetuError, Site
from ..core.graph import OPS
from ..core.op import Op, op
from ..core.types import Shape, TensorType
from ..ops.elementwise import in_full
from ..ops.random import _scale

Number = tuple[str, float]  # a dtype and a value
Operand = int | Number  # a value by number, or a number
Attrs = tuple[tuple[str, Any], ...]
Enter = Callable[[Op[..., Any]], None]

# How a reduction combines two numbers, and what it begins with, in C and in CUDA.
FOLDS = {
    OPS["sum"]: ("a + b", "0"),
    OPS["prod"]: ("a * b", "1"),
    OPS["max"]: ("fmax(a, b)", "-INFINITY"),
    OPS["min"]: ("fmin(a, b)", "INFINITY"),
    OPS["all"]: ("a && b", "1"),
    OPS["any"]: ("a || b", "0"),
}
DROPOUT = OPS["dropout"]  # its second operand is the state of the random numbers, an array that has no places
MOVES = {OPS["reshape"], OPS["expand_dims"]}  # of one number per row: the same numbers


def _truth(places: TensorType, x: TensorType) -> TensorType:
    return TensorType(x.shape, np.dtype(bool))


@op(infer=_truth, differentiable=False)
def own_column(xp: Any, places: Any, x: Any) -> Any:
    """Whether a place is in the column that `places` (..., 1) name for its row: the shape of `x` (..., columns).

    >>> import hetu as ht
    >>> ht.evaluate(own_column([[1]], [[5.0, 6.0]])).tolist()
    [[False, True]]
    """
    return xp.arange(x.shape[-1], dtype=xp.int64) == in_full(xp, places)


def expression_of(made: Op[..., Any]) -> str | None:
    """What computes a line at one place, in C and in CUDA.

    `column` is the number of the place in its row; `kept`, whether a draw of random numbers keeps the place.
    """
    own = {own_column: "y = column == places", DROPOUT: "y = kept ? x * scale : (T)0"}
    return own.get(made, made.code)


def numbers_of(line: Line) -> Attrs:
    """The attributes that its expression may name."""
    drawn = (("scale", _scale(dict(line.attrs)["rate"])),) if line.op is DROPOUT else ()
    return (*((k, v) for k, v in line.attrs if isinstance(v, bool | int | float)), *drawn)


class Line(NamedTuple):
    """One operator. Values are numbered: first what the group reads, then its lines."""

    op: Op[..., Any]
    operands: tuple[Operand, ...]
    attrs: Attrs


class MinusZero(float):
    """-0.0, which is no key for what was made of 0.0.

    >>> MinusZero(-0.0) == 0.0, MinusZero(-0.0) == MinusZero(-0.0)
    (False, True)
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MinusZero)

    def __hash__(self) -> int:
        return hash(MinusZero)


def line_of(made: Op[..., Any], operands: Sequence[Operand], attrs: Mapping[str, Any]) -> Line:
    """A line, by which texts are looked up: so numbers that give other results are not equal."""
    known = ((o[0], _exact(o[1])) if isinstance(o, tuple) else o for o in operands)
    return Line(made, tuple(known), tuple((name, _exact(value)) for name, value in attrs.items()))


def _exact(value: Any) -> Any:
    return MinusZero(value) if isinstance(value, float) and str(value) == "-0.0" else value


class PartCheck(NamedTuple):
    """The check of an operator that was taken apart: its operands are extra arrays by number, or only known by type."""

    op: Op[..., Any]
    operands: tuple[int | TensorType, ...]
    attrs: Attrs
    site: Site | None


@dataclass(frozen=True)
class Known:
    """What is known of a value of a group: `shape` is aligned to the space, `phase` the loop that computes it."""

    type: TensorType
    shape: tuple[int, ...]
    inner: bool  # differs from column to column
    rows: bool  # differs from row to row
    phase: int
    fold: str  # "", "columns", "rows", "all" or "some", which is the columns and some axes of the rows: what is folded


@dataclass(frozen=True)
class Form:
    """A group for arrays of these types: `space`, of which the first `split` axes are rows; `flat` says which of the
    arrays, and of the lines, have the axes of the rows only. Behind the arrays come those that `checks` look at.
    """

    types: tuple[TensorType, ...]
    lines: tuple[Line, ...]
    results: tuple[int, ...]
    space: tuple[Any, ...]
    split: int
    flat: tuple[bool, ...]
    checks: tuple[PartCheck, ...] = ()

    def aligned(self, number: int, items: Sequence[Any], rest: int) -> tuple[int, ...]:
        """Items per axis of a value, with `rest` for the axes of the space that it lacks."""
        columns = (rest,) * (len(self.space) - self.split if self.flat[number] else 0)
        return (*(rest,) * (len(self.space) - len(items) - len(columns)), *items, *columns)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # asked for many times
        return hash((self.types, self.lines, self.results, self.space, self.split, self.flat, self.checks))

    def values(self) -> list[Known]:
        return _values(self)

    def states(self) -> set[int]:
        """The arrays that are states of random numbers."""
        return {o for line in self.lines if line.op is DROPOUT for o in line.operands[1:] if isinstance(o, int)}

    def types_of_results(self) -> tuple[TensorType, ...]:
        values = self.values()
        return tuple(values[r].type for r in self.results)

    @cached_property
    def outline(self) -> Outline:
        """The form but for its sizes."""
        return Outline(self)

    def text(self, names: Sequence[str]) -> str:
        """The lines in one row; the arrays are called by these names.

        >>> f32 = TensorType((2,), np.dtype("float32"))
        >>> lines = (Line(OPS["exp"], (0,), ()), Line(OPS["add"], (1, ("float32", 1.0)), ()))
        >>> Form((f32,), lines, (2,), (2,), 0, (False,) * 3).text(["x"])
        'v1 = exp(x); v2 = add(v1, 1)'
        """
        known, rows = [*names[: len(self.types)]], []
        for line in self.lines:
            operands = (f"{o[1]:g}" if isinstance(o, tuple) else known[o] for o in line.operands)
            known.append(f"v{len(known)}")
            rows.append(f"{known[-1]} = {line.op.name}({', '.join(operands)})")
        return "; ".join(rows)


class Outline:
    """What the text of a form follows from; those of forms that differ in sizes alone are equal."""

    def __init__(self, form: Form) -> None:
        self.form = form
        lines = tuple(
            (line.op, line.operands, numbers_of(line), line.op is DROPOUT and line.attrs) for line in form.lines
        )
        known = tuple((v.type.dtype, v.inner, v.rows, v.phase, v.fold) for v in form.values())
        self._key = lines, known, form.results, len(form.types)
        self._hash = hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Outline) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash


def inferred(types: Sequence[TensorType], lines: Sequence[Line]) -> list[TensorType]:
    """The types of all values."""
    known: list[Any] = [*types]
    for made, operands, attrs in lines:
        inputs = [TensorType((), np.dtype(o[0])) if isinstance(o, tuple) else known[o] for o in operands]
        known.append(made.infer(*inputs, **dict(attrs)))
    return known


@lru_cache(4096)
def _values(form: Form) -> list[Known]:
    found: list[Known] = []
    rows, columns = form.space[: form.split], form.space[form.split :]
    # A batch of one is read as any other is, so that it needs no text of its own.
    one_row, one_place = bool(rows) and prod(rows) == 1, not rows and bool(columns) and prod(columns) == 1
    inner_space, states = one_place or any(n > 1 for n in columns), form.states()
    for number, type_ in enumerate(inferred(form.types, form.lines)):
        own = () if number in states else type_.shape
        shape, phase, fold = form.aligned(number, own, 1), 0, ""
        if number >= len(form.types):
            made, operands, attrs = form.lines[number - len(form.types)]
            read = [found[o] for o in operands if isinstance(o, int)]
            phase = max((v.phase + (v.fold == "columns") for v in read), default=0)
            if made in FOLDS:
                axes = dict(attrs)["axis"]
                inside, outside = (sum(wanted == (a >= form.split) for a in axes) for wanted in (True, False))
                both = "all" if outside == form.split else "some"
                fold = both if inside and outside else "columns" if inside else "rows"
        inner = inner_space and (any(n > 1 for n in shape[form.split :]) or (one_place and own != () and not fold))
        has_rows = len(own) > (0 if form.flat[number] else len(columns))
        per_row = any(n > 1 for n in shape[: form.split]) or (one_row and has_rows)
        found.append(Known(type_, shape, inner, per_row, phase, fold))
    return found


def _type(*types: TensorType, form: Form) -> Any:
    made = form.types_of_results()
    return made[0] if len(made) == 1 else made


def form_of(
    made: Op[..., Any],
    arrays: Sequence[Any],
    attrs: Mapping[str, Any],
    space: Shape,
    rows: tuple[int, bool] = (0, False),
) -> Form:
    """One operator on arrays as a group; `rows` are its axes of rows, and whether its result has these only."""
    types = tuple(TensorType(a.shape, a.dtype) for a in arrays)
    line = line_of(made, range(len(types)), attrs)
    return Form(types, (line,), (len(types),), space, rows[0], (*(False for _ in types), rows[1]))


@op(name="fused", infer=_type, differentiable=False, scratch=True)
def fused(xp: Any, *arrays: Any, form: Form) -> Any:
    """The lines of a form, one after the other: what a group means.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (2,))
    >>> lines = (Line(OPS["exp"], (0,), ()), Line(OPS["add"], (1, ("float32", 1.0)), ()))
    >>> ht.evaluate(fused(x, form=Form((x.type,), lines, (2,), (2,), 0, (False,) * 3)), {x: [0.0, 0.0]}).tolist()
    [2.0, 2.0]
    """
    known = list(arrays[: len(form.types)])
    for made, operands, attrs in form.lines:
        inputs = [xp.asarray(o[1], dtype=o[0]) if isinstance(o, tuple) else known[o] for o in operands]
        known.append(made.forward(xp, *inputs, **dict(attrs)))
    results = tuple(known[r] for r in form.results)
    return results[0] if len(results) == 1 else results


@fused.check
def fused_check(xp: Any, *arrays: Any, form: Form) -> None:
    """The checks of the operators that were taken apart."""
    for made, operands, attrs, site in form.checks:
        try:
            check: Any = made.check_rule
            check(xp, *_looked_at(arrays, form, operands), **dict(attrs))
        except HetuError as error:
            raise error.raised_by(made.name, site) from None


@fused.ranges
def fused_ranges(*arrays: Any, form: Form) -> list[tuple[Any, int, str]]:
    found: list[tuple[Any, int, str]] = []
    for made, operands, attrs, _ in form.checks:
        ranges: Any = made.ranges_rule
        found += ranges(*_looked_at(arrays, form, operands), **dict(attrs))
    return found


def _looked_at(arrays: Sequence[Any], form: Form, operands: Sequence[Any]) -> list[Any]:
    """The operands of a check: extra arrays, or any of the same type where no number is looked at."""
    extra = arrays[len(form.types) :]
    return [extra[o] if isinstance(o, int) else np.broadcast_to(np.zeros((), o.dtype), o.shape) for o in operands]


def overwritten(form: Form) -> dict[int, tuple[int, ...]]:
    """Which arrays each result may overwrite: full ones, of its type, that no later loop reads.

    The last comes first: what joins late was often made early, and its place lies among others that stay.
    """
    values, count = form.values(), len(form.types)
    last = [0] * count
    for line, value in zip(form.lines, values[count:]):
        for o in line.operands:
            if isinstance(o, int) and o < count:
                last[o] = max(last[o], value.phase)
    return {
        slot: tuple(
            k for k in reversed(range(count)) if last[k] <= values[r].phase and values[k].type == values[r].type
        )
        for slot, r in enumerate(form.results)
        if not values[r].fold and values[r].shape == form.space
    }


@cache
def overwriting(inplace: tuple[tuple[int, tuple[int, ...]], ...], enter: Enter) -> Op[..., Any]:
    """The operator of groups whose results may overwrite these arrays, entered where a device finds it."""
    made = copy(fused)
    made.inplace = dict(inplace)
    enter(made)
    return made
