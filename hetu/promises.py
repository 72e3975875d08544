"""Annotations as functions of a value: whether it is what a type says, as far as can be told of a value.

A float is not NaN unless `AnyFloat` says so, and within its finite `Range` where there is one: `Annotated[float,
Range(0)]`. Sequences of any kind stand for each other, and what may become a node for a node. Types that only a type
checker knows are not looked at, but a class is never taken for an instance. `arguments.py` reads annotations of calls.
"""

from __future__ import annotations

import inspect
import itertools
import os
import types
import typing
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence, Set, ValuesView
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import numpy as np

from .core.graph import Node
from .core.types import Dim
from .ranges import ANY, MOST, OneOf, Or, Range, is_dtype

Holds = Callable[[Any], bool]
FEW = 64  # elements that are looked at
LISTED = (list, tuple, Set, deque, dict, KeysView, ValuesView)  # whose elements lie in memory
MAPPED = (dict, types.MappingProxyType, UserDict, ChainMap)


def meant_by(hint: Any) -> list[Range | OneOf]:
    """What an annotation says of its values beside their type."""
    extras = (Range(each.start, most=each.stop) if isinstance(each, range) else each for each in hint.__metadata__)
    return [each for each in extras if isinstance(each, Range | OneOf)]


def check_of(hint: Any, strict: bool = False) -> Holds:
    """What holds for the values of a type, as far as can be told of a value.

    >>> [check_of(float)(value) for value in (1, 1.5, np.nan, "1", True)]
    [True, True, False, False, False]
    """
    origin = get_origin(hint) or hint
    if origin is Annotated:
        inner, extras = get_args(hint)[0], hint.__metadata__
        if ANY in extras:
            return _is_any_number
        meant = meant_by(hint)
        check = _is_whole if inner is int and meant else check_of(inner, strict)  # the range says how large
        short = tuple(each.kind for each in extras if isinstance(each, Or))

        def fits(value: Any) -> bool:
            return isinstance(value, short) or (
                check(value) and (isinstance(value, Dim) or all(each.holds(value) for each in meant))
            )

        return fits
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
        if names == {"__array__"}:
            return lambda value: is_array(value) and not isinstance(value, Node)
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


def is_array(value: Any) -> bool:
    """Whether a value is an array of any library, which DLPack, `__array__` or the buffer protocol gives out."""
    if isinstance(value, type | bytes):
        return False
    if hasattr(value, "__dlpack__") or hasattr(value, "__array__"):
        return True
    try:
        memoryview(value)
    except (TypeError, BufferError, ValueError):  # the last of one that was released
        return False
    return True


def _may_be_array(value: Any) -> bool:
    if isinstance(value, tuple) and value and all(isinstance(size, int) for size in value):
        return False  # a shape
    return (is_array(value) and not isinstance(value, Node)) or _is_listed(value) or _is_number(value)


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
    return isinstance(value, Node | Dim) or is_array(value) or _is_listed(value) or _is_number(value)


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
