"""Dataclasses as plain data for JSON, and back: each field is written and read as its type says.

A class of another form is told to `form` once. Of one that says what it is `called`, and what helps, an error names the
field that is wrong, or the version, and none may lack; any other is made of its data by its constructor, which has to
check it. Left out: classes that only their data could tell apart.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .core.errors import ArgumentError, HetuError, did_you_mean
from .ranges import OneOf, Range

T = TypeVar("T")
FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {}


def form(kind: type, write: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
    """Values of a class, and of what derives from it, are written and read so."""
    FORMS[kind] = write, read


def written(value: Any) -> Any:
    """A value as JSON has it; ArgumentError for one that has no such form.

    >>> from hetu.codec import Compress
    >>> written({"compress": Compress("int8"), "cuts": ((1, 2), None)})["cuts"]
    [[1, 2], None]
    """
    if (own := _form_of(type(value))) is not None:
        return own[0](value)
    if is_dataclass(value):
        return write_fields(value)
    if isinstance(value, Mapping):
        return {str(key): written(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [*map(written, value)]
    if not isinstance(value, str | int | float | None):
        raise ArgumentError(f"{value!r:.80} has no form as data", fix="describe it by plain numbers and texts")
    return value


def read(kind: Any, data: Any) -> Any:
    """The value of a type of which `written` made this; ArgumentError says what is wrong.

    >>> read(tuple[int, ...] | None, [1, 2]), read(dict[int, float], {"3": 2})
    ((1, 2), {3: 2.0})
    """
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        value = read(inside[0], data)
        for meant in (each for each in inside[1:] if isinstance(each, Range | OneOf) and not each.holds(value)):
            raise ArgumentError(f"{value!r:.80} is not {meant}")
        return value
    if origin in (Union, types.UnionType):
        return None if data is None and type(None) in inside else read(_nearest(inside, data), data)
    if (own := _form_of(origin)) is not None:
        return own[1](data)
    if is_dataclass(origin):
        return origin(**read_fields(origin, data))  # type: ignore[operator]
    if hasattr(origin, "_fields"):  # a named tuple
        return origin(*(read(of, each) for of, each in zip(_hints(origin).values(), data, strict=True)))
    if origin in (dict, Mapping):
        key, value = inside or (Any, Any)
        return {int(k) if key is int else k: read(value, each) for k, each in _exactly(dict, data).items()}
    if origin is tuple:
        return tuple(read(inside[0], each) for each in _exactly(list, data))
    if origin is float and type(data) is int:
        return float(data)
    return _exactly(origin, data) if origin in (bool, int, float, str) else data


def to_text(value: Any) -> str:
    """A value as JSON."""
    return json.dumps(written(value), indent=1)


def from_text(kind: type[T], text: str) -> T:
    """The value of a class that is `called` something, of which `to_text` made this."""
    what, fix = kind.called  # type: ignore[attr-defined]
    try:
        found: T = read(kind, json.loads(text))
    except HetuError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"not {what}: {error}", fix=fix) from None
    return found


def write_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON has them."""
    return {name: written(getattr(value, name)) for name in kinds_of(type(value))}


def read_fields(kind: Any, data: Any, **others: Any) -> dict[str, Any]:
    """The fields of a class by name, of which `others` have other types than it says; ArgumentError names one that is
    wrong, or missing."""
    kinds = kinds_of(kind) | others
    if (called := getattr(kind, "called", None)) is None:
        return {name: read(kinds.get(name, Any), value) for name, value in _exactly(dict, data).items()}
    what, fix = called
    wanted, version = getattr(kind, "version", None), data.get("version") if isinstance(data, dict) else None
    if version is not None and version != wanted:
        raise ArgumentError(f"{what} of version {version!r:.80}, wanted {wanted}", fix=fix)
    if wrong := {*data} ^ kinds.keys() if isinstance(data, dict) else {*kinds}:
        names = f"{', '.join(kinds) or 'nothing'}; wrong or missing: {', '.join(sorted(wrong))}"
        unknown = sorted(wrong - kinds.keys())
        raise ArgumentError(f"not {what}: wanted {names}", fix=did_you_mean(unknown[0], kinds) if unknown else fix)
    found = {}
    for name, value in data.items():
        try:
            found[name] = read(kinds[name], value)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            why, better = (error.message, error.fix) if isinstance(error, HetuError) else (repr(error), "")
            raise ArgumentError(f"not {what}: {name} is {value!r:.80}: {why}", fix=better or fix) from None
    return found


def kinds_of(kind: Any) -> dict[str, Any]:
    """The types of the fields that are written: those that are compared."""
    return {f.name: _hints(kind)[f.name] for f in fields(kind) if f.init and f.compare}


@functools.lru_cache(None)
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _form_of(kind: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    return next((FORMS[base] for base in getattr(kind, "__mro__", ()) if base in FORMS), None)


def _nearest(kinds: Collection[Any], data: Any) -> Any:
    """Of several classes the one that has most fields of these names; anything goes where there is another type."""
    able = [kind for kind in kinds if kind is not type(None)]
    if len(able) > 1 and not all(map(is_dataclass, able)):
        return Any
    named = {*data} if isinstance(data, dict) else set[str]()
    return max(able, key=lambda kind: len(named & kinds_of(kind).keys()) if is_dataclass(kind) else 0)


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ArgumentError(f"wanted {kind.__name__}")
    return value
