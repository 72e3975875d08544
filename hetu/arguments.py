"""Whether what a public function is given is what its annotations say, and what its caller is told if not.

An annotation is a promise to a reader and to a type checker; here it is one to those who run neither. What holds for
the values of a type stands in `promises.py`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from .core.graph import Node
from .core.op import Op
from .core.types import Dim
from .promises import Holds, check_of, meant_by
from .ranges import Range, maker_of, of_numpy

OURS = {"Dim": Dim, "Node": Node}  # what annotations may name before it is there
TRIED = 10_000  # up to which a function may say itself what is wrong with a number


@dataclass(frozen=True)
class _Wanted:
    """One argument of a function: its annotation, also as text, what holds for right values, and which numbers are."""

    hint: Any
    text: str
    check: Holds
    bounds: tuple[str, ...]
    made: Callable[[Any], Any] | None  # what it is passed as: plain numbers, a dtype


@dataclass(frozen=True)
class _Plan:
    """The arguments of a function that are looked at, by position (None if not) and by name."""

    places: tuple[tuple[str, _Wanted | None], ...]
    named: Mapping[str, _Wanted]
    rest: tuple[str, _Wanted] | None  # those of `*layers`
    others: _Wanted | None  # those of `**roles`
    makes: tuple[Any, ...]  # what it is passed others for: those of `maker_of`

    @property
    def looks(self) -> bool:
        """Whether anything is looked at."""
        return bool(self.named or self.rest or self.others)


@dataclass(frozen=True)
class Wrong:
    """An argument that is not what was wanted."""

    got: str
    fix: str
    large: bool = False  # so that it may take for ever to try


def look(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], strict: bool = False) -> Wrong | None:
    """The first argument of a call that is not what the function says that it takes.

    Where `strict`, what may become a node is none.
    """
    plan = plan_of(function, strict)
    if plan.rest is not None:
        option, each = plan.rest
        for value in args[len(plan.places) :]:
            if not each.check(value):
                return _told(option, value, each)
    for (option, wanted), value in zip(plan.places, args):
        if wanted is not None and not wanted.check(value):
            return _told(option, value, wanted)
    for option, value in kwargs.items():
        if (found := plan.named.get(option, plan.others)) is not None and not found.check(value):
            return _told(option, value, found)
    return None


def plain(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], strict: bool = False
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments of a call: numbers of NumPy as Python's where numbers are wanted, and dtypes by their names.

    >>> from hetu.dist import Link
    >>> plain(Link.__init__, (None, np.float64(0.5)), {"bandwidth": np.array(3)})
    ((None, 0.5), {'bandwidth': 3})
    """
    plan = plan_of(function, strict)
    if not plan.makes:
        return args, kwargs
    if not (np.dtype in plan.makes or any(map(of_numpy, args)) or any(map(of_numpy, kwargs.values()))):
        return args, kwargs
    places = itertools.chain((wanted for _, wanted in plan.places), itertools.repeat(None))
    made = (w.made(value) if w and w.made else value for value, w in zip(args, places))
    return tuple(made), {n: w.made(v) if (w := plan.named.get(n)) and w.made else v for n, v in kwargs.items()}


def _told(option: str, value: Any, wanted: _Wanted) -> Wrong:
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool) and wanted.bounds
    fix = " or ".join(dict.fromkeys(wanted.bounds)) if number else wanted.text
    if isinstance(value, type):
        fix += f", an object such as {value.__name__}(...) makes"
    elif isinstance(value, float | np.floating) and not math.isfinite(value) and "inf" not in fix:
        fix += ", finite" if number else ", a finite number"
    elif isinstance(value, Fraction | Decimal):
        fix += f", such as float({reprlib.repr(value)})"
    elif isinstance(value, Iterable) and not hasattr(value, "__getitem__") and "Sequence" in str(wanted.hint):
        fix += f", {'in an order, such as sorted' if isinstance(value, set | frozenset) else 'such as list'}({option})"
    elif isinstance(value, tuple) and "ndarray" in wanted.text:
        fix += f"; if {value} is a shape, pass it as shape="
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        fix += ", a number that fits in 64 bits"
    large = isinstance(value, int) and value > TRIED
    return Wrong(f"got {option}={reprlib.repr(value)}", f"pass {option} as {fix}", large)


@functools.lru_cache(None)
def plan_of(function: Any, strict: bool) -> _Plan:
    """What a function is looked at for."""
    op = function if isinstance(function, Op) else None
    inside = inspect.unwrap(op.forward if op else function)
    parameters = list(inspect.signature(op or inside).parameters.values())
    wanted: dict[str, _Wanted] = {}
    for p in parameters:
        if p.kind is p.VAR_KEYWORD and str(p.annotation).startswith("Unpack["):
            wanted |= _of_options(inside.__globals__.get(str(p.annotation)[7:-1]), strict)
        elif op and (p.kind is not p.KEYWORD_ONLY or p.name == "dtype"):
            continue  # `op.py` makes nodes of inputs, and names of dtypes
        elif p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in ("self", "cls"):
            found = _wanted(_written_in(inside, p.name), p.name, p.annotation, p.default, strict)
            wanted |= {p.name: found} if found else {}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    all_of_them = op is not None and not op.variadic  # attributes by position
    places = [(p.name, wanted.get(p.name)) for p in parameters if all_of_them or p.kind in by_position]
    each = next((p for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    rest = _wanted(inside.__globals__, each.name, each.annotation, ..., strict) if each and not op else None
    every = next(
        (p for p in parameters if p.kind is p.VAR_KEYWORD and not str(p.annotation).startswith("Unpack[")), None
    )
    others = _wanted(inside.__globals__, every.name, every.annotation, ..., strict) if every and not op else None
    makes = tuple(each.made for each in wanted.values() if each.made)
    return _Plan(tuple(places), wanted, (each.name, rest) if each and rest else None, others, makes)


def _written_in(function: Any, argument: str) -> dict[str, Any]:
    """The names that an annotation may use: of a field of a dataclass, those where the base stands that declares it."""
    made = function.__globals__.get(function.__qualname__.partition(".")[0])
    bases = made.__mro__ if inspect.isclass(made) and function.__name__ == "__init__" else ()
    of = next((base for base in bases if argument in vars(base).get("__annotations__", {})), None)
    return function.__globals__ if of is None else vars(sys.modules[of.__module__])


def _of_options(options: Any, strict: bool) -> dict[str, _Wanted]:
    """What a `TypedDict` of options says of each."""
    names, inside = getattr(options, "__annotations__", {}), vars(sys.modules[getattr(options, "__module__", __name__)])
    found = {name: _wanted(inside, name, said, ..., strict) for name, said in names.items()}
    return {name: wanted for name, wanted in found.items() if wanted is not None}


def _wanted(inside: dict[str, Any], name: str, annotation: Any, default: Any, strict: bool) -> _Wanted | None:
    if annotation is inspect.Parameter.empty:
        if not isinstance(default, bool | float):
            return None
        annotation = type(default).__name__
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    hint = _resolved(inside, name, annotation.removeprefix("*") if isinstance(annotation, str) else annotation)
    if str(annotation).startswith("*") and get_args(hint):  # of `*layers: *tuple[...]`, the last stands for each
        hint = get_args(hint)[-1]
        annotation = "a layer or a function of a node"
    check = _unresolved(str(annotation)) if hint is None else check_of(hint, strict)
    if check is None:
        return None
    return _Wanted(
        hint, _text(annotation, inside), lambda value: value is default or check(value), _bounds(hint), maker_of(hint)
    )


def _text(annotation: Any, inside: Mapping[str, Any]) -> str:
    """An annotation as a reader is told of it: names of ranges as what they are."""

    def said(name: re.Match[str]) -> str:
        hint = inside.get(name[0])
        if get_origin(hint) is Literal:
            return " or ".join(map(repr, get_args(hint)))
        return NAMED.get(name[0]) or (_numbers(hint) if get_origin(hint) is Annotated else name[0])

    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = re.sub(r"Annotated\[str, OneOf\((.*?)\)\]", lambda texts: texts[1].replace(", ", " or "), text)
    text = re.sub(r"\b[A-Z]\w*", said, text)
    for pattern, words in COLLECTIONS * 3:  # from the inside
        text = re.sub(pattern, words, text)
    return text.replace(" | ", " or ")


def _numbers(hint: Any) -> str:
    kind, meant = get_args(hint)[0], meant_by(hint)
    if not meant:
        return str(kind.__name__)
    return str(meant[0]) if kind is str else f"a {'whole ' if kind is int else ''}number {meant[0]}"


COLLECTIONS = (
    (r"\bMapping\[([^][,]*), ([^][]*)\]", r"{\1: \2}"),
    (r"\b(?:Sequence|Collection|Iterable)\[([^][]*)\]", r"a list of \1"),
)
NAMED = {
    "Activation": "a function of nodes, such as ht.relu",
    "ArrayLike": "an array",
    "Batches": "a DataLoader or a list of batches",
    "Feed": "{placeholder: array}",
    "Initializer": "a function of ht.init",
    "Rate": f"a number {Range(0)}, a node or a schedule of ht.schedules",
    "RowsScore": "a function of targets and answers",
    "Shape": "a tuple of sizes",
    "Solver": '"lbfgs" or what makes an optimizer: ht.optim.FTRL, or functools.partial(ht.optim.FTRL, 0.1)',
}


def _resolved(inside: dict[str, Any], option: str, annotation: Any) -> Any:
    """The type that an annotation names, or None."""
    said = types.SimpleNamespace(__annotations__={option: annotation})
    with suppress(NameError, TypeError, AttributeError, SyntaxError):
        return get_type_hints(said, inside, OURS, include_extras=True)[option]
    return None


def _unresolved(annotation: str) -> Holds | None:
    """What can be told by the name of a type that is not there: that an object of it is no class."""
    able = ("type[", "Callable", "Any", "object", "Protocol")
    return None if any(word in annotation for word in able) else lambda value: not isinstance(value, type)


def _bounds(hint: Any) -> tuple[str, ...]:
    if get_origin(hint) is Annotated:
        return (_numbers(hint),) if any(isinstance(each, Range) for each in meant_by(hint)) else ()
    return tuple(found for each in get_args(hint) if not isinstance(each, list) for found in _bounds(each))
