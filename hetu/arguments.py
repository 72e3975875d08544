"""Whether what a public function is given is what its annotations say, and what its caller is told if not.

An annotation is a promise to a reader and to a type checker; here it is one to those who run neither. A float is
not NaN unless `AnyFloat` says so, and within its finite `Range` where there is one: `Annotated[float, Range(0)]`.
Sequences of any kind stand for each other, and what may become a node for a node. Types that only a type checker
knows are not looked at, but a class is never taken for an instance.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import re
import reprlib
import sys
import types
import typing
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence, Set, ValuesView
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import numpy as np

from .core.graph import Node
from .core.op import Op
from .core.types import Dim
from .ranges import ANY, MOST, OneOf, Or, Range, is_dtype, maker_of, of_numpy

Holds = Callable[[Any], bool]
OURS = {"Dim": Dim, "Node": Node}  # what annotations may name before it is there
FEW = 64  # elements that are looked at
LISTED = (list, tuple, Set, deque, dict, KeysView, ValuesView)  # whose elements lie in memory
MAPPED = (dict, types.MappingProxyType, UserDict, ChainMap)
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
    kind, meant = get_args(hint)[0], _meant(hint)
    if not meant:
        return str(kind.__name__)
    return str(meant[0]) if kind is str else f"a {'whole ' if kind is int else ''}number {meant[0]}"


COLLECTIONS = (
    (r"\bMapping\[([^][,]*), ([^][]*)\]", r"{\1: \2}"),
    (r"\b(?:Sequence|Collection|Iterable)\[([^][]*)\]", r"a list of \1"),
)
NAMED = {
    "ArrayLike": "an array",
    "Batches": "a DataLoader or a list of batches",
    "Feed": "{placeholder: array}",
    "Initializer": "a function of ht.init",
    "Rate": f"a number {Range(0)} or a schedule of ht.schedules",
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
        return (_numbers(hint),) if any(isinstance(each, Range) for each in _meant(hint)) else ()
    return tuple(found for each in get_args(hint) if not isinstance(each, list) for found in _bounds(each))


def _meant(hint: Any) -> list[Range | OneOf]:
    """What an annotation says of its values beside their type."""
    extras = (Range(each.start, most=each.stop) if isinstance(each, range) else each for each in hint.__metadata__)
    return [each for each in extras if isinstance(each, Range | OneOf)]


def check_of(hint: Any, strict: bool = False) -> Holds:
    """What holds for the values of a type, as far as can be told of a value.

    >>> [check_of(float)(value) for value in (1, 1.5, math.nan, "1", True)]
    [True, True, False, False, False]
    """
    origin = get_origin(hint) or hint
    if origin is Annotated:
        inner, extras = get_args(hint)[0], hint.__metadata__
        if ANY in extras:
            return _is_any_number
        meant = _meant(hint)
        check = _is_whole if inner is int and meant else check_of(inner, strict)  # the range says how large
        if short := tuple(each.kind for each in extras if isinstance(each, Or)):
            return lambda value: isinstance(value, short) or check(value)
        return lambda value: check(value) and (isinstance(value, Dim) or all(each.holds(value) for each in meant))
    if origin in (Union, types.UnionType):
        checks = [check_of(each, strict) for each in get_args(hint)]
        return lambda value: any(check(value) for check in checks)
    if origin is Literal:
        if not strict:  # which of them is not known, the function tells
            return lambda value: any(isinstance(value, type(each)) for each in get_args(hint))
        return lambda value: any(type(value) is type(each) and value == each for each in get_args(hint))
    return _check_of_class(origin, get_args(hint), strict) if isinstance(origin, type) else _anything


def _anything(value: Any) -> bool:
    return True


def _check_of_class(origin: type, args: tuple[Any, ...], strict: bool) -> Holds:
    if origin in SIMPLE:
        return SIMPLE[origin]
    if origin is np.ndarray and len(args) == 2 and get_args(args[1]):  # NDArray[np.int64]
        return _arrays_of(get_args(args[1])[0], strict)
    if origin in (np.ndarray, Node) and not strict:
        return _may_be_array if origin is np.ndarray else _may_be_node
    if issubclass(origin, Mapping) or origin is Mapping:
        return _mappings(origin, [check_of(each, strict) for each in args])
    if origin in (tuple, list, Sequence, Iterable, Collection):
        return _sequences(origin, args, strict)
    if issubclass(origin, Set):
        inside = _sequences(Collection, args, strict)
        return lambda value: isinstance(value, origin) and inside(value)
    if origin.__name__ == "Callable":
        return _callables(args[-1] if args else Any)
    if getattr(origin, "_is_protocol", False):
        names = typing._get_protocol_attrs(origin) - {"__reversed__"}  # type: ignore[attr-defined]  # any sequence is
        return lambda value: not isinstance(value, type | str) and all(hasattr(value, n) for n in names)
    if inspect.isabstract(origin):  # what does the same may stand for it
        methods: Iterable[str] = getattr(origin, "__abstractmethods__", ())
        return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in methods)
    if cast(Any, origin) in (Any, object, type) or typing.is_typeddict(origin):
        return _anything
    return lambda value: isinstance(value, origin)


def _callables(made: Any) -> Holds:
    """What can be called; a class only where one of its objects is what is to be made."""
    kind = get_origin(made) or made
    if kind is Any:
        return callable
    if not isinstance(kind, type):
        return lambda value: callable(value) and not _makes_callables(value)
    if getattr(kind, "_is_protocol", False):
        names = typing._get_protocol_attrs(kind)  # type: ignore[attr-defined]
        return lambda value: callable(value) and (not isinstance(value, type) or all(hasattr(value, n) for n in names))
    return lambda value: callable(value) and (not isinstance(value, type) or issubclass(value, kind))


def _makes_callables(value: Any) -> bool:
    """Whether a value is a class whose objects are what can be called: `nn.Linear` where a layer was meant."""
    return isinstance(value, type) and any("__call__" in vars(each) for each in value.__mro__)


def _is_whole(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu":
        value = value.item()
    return isinstance(value, Dim) or (isinstance(value, int | np.integer) and not isinstance(value, bool))


def _is_int(value: Any) -> bool:
    return _is_whole(value) and (isinstance(value, Dim) or bool(-MOST <= value < 2 * MOST))


def _is_any_number(value: Any) -> bool:
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf":
        value = value.item()
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return _is_any_number(value) and bool(value == value)


SIMPLE: dict[type, Holds] = {
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: _is_int,
    float: _is_float,
    complex: lambda value: isinstance(value, bool | int | float | complex | np.number),
    type(None): lambda value: value is None,
    os.PathLike: lambda value: isinstance(value, os.PathLike),
    np.dtype: is_dtype,
}


def _may_be_array(value: Any) -> bool:
    if isinstance(value, tuple) and value and all(isinstance(size, int) for size in value):
        return False  # a shape
    return (
        (hasattr(value, "__array__") and not isinstance(value, type | Node)) or _is_listed(value) or _is_number(value)
    )


def _arrays_of(scalar: Any, strict: bool) -> Holds:
    """Arrays whose numbers an array of this kind may hold, such as bytes for int64."""
    if not (isinstance(scalar, type) and issubclass(scalar, np.integer | np.floating)):
        return _may_be_array
    kinds = "biu" if issubclass(scalar, np.integer) else "biuf"

    def check(value: Any) -> bool:
        if isinstance(value, np.ndarray):
            return value.dtype.kind in kinds
        return not strict and _may_be_array(value)

    return check


def _may_be_node(value: Any) -> bool:
    return isinstance(value, Node | Dim | np.ndarray) or _is_listed(value) or _is_number(value)


def _is_listed(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.generic)


def _mappings(origin: type, inside: list[Holds]) -> Holds:
    """Mappings of any kind; names and values of those that lie in memory, as far as they are few."""
    if len(inside) != 2:
        return lambda value: isinstance(value, Mapping)
    key, each = inside

    def check(value: Any) -> bool:
        if not isinstance(value, Mapping):
            return False
        return not isinstance(value, MAPPED) or all(key(k) and each(v) for k, v in itertools.islice(value.items(), FEW))

    return check


def _sequences(origin: type, args: tuple[Any, ...], strict: bool) -> Holds:
    """Sequences of any kind, but no text; their elements, as far as they lie in memory and are few."""
    fixed = [check_of(each, strict) for each in args] if origin is tuple and args and args[-1] is not Ellipsis else None
    each = check_of(args[0], strict) if args and fixed is None else _anything
    lazy = origin in (Iterable, Collection)

    def check(value: Any) -> bool:
        if isinstance(value, str | bytes | type) or not hasattr(value, "__iter__"):
            return False
        if not (lazy or (hasattr(value, "__getitem__") and not isinstance(value, Mapping))):
            return False
        if fixed is not None and isinstance(value, list | tuple):
            return len(value) == len(fixed) and all(holds(one) for holds, one in zip(fixed, value))
        in_memory = isinstance(value, LISTED) or (isinstance(value, np.ndarray) and value.ndim > 0)
        return not in_memory or all(map(each, itertools.islice(value, FEW)))

    return check
