"""Mistakes by class, the same for all callables: what is made of a right argument, or of a right call.

A mistake has the name of its class, such as "kind: text"; the table of reasons refers to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

import hetu as ht
from hetu.core.types import Dim

from .calls import Call

NAN = float("nan")


class Foreign:
    """An object of another library."""

    def __repr__(self) -> str:
        return "<foreign>"


def wrong_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Mistakes with one argument, by class."""
    yield "kind: none", None
    yield "kind: foreign", Foreign()
    yield "kind: class", Foreign if isinstance(value, int | float | str | tuple | list | dict) else type(value)
    for kinds, made in MADE.items():
        if isinstance(value, kinds):
            yield from made(value)
            return
    yield "kind: text", "a text"
    yield "kind: number", 5


def _of_truth(value: bool) -> Iterator[tuple[str, Any]]:
    yield "kind: text", "yes"
    yield "kind: number", 2


def _of_int(value: int) -> Iterator[tuple[str, Any]]:
    yield "kind: text", "three"
    yield "dtype: fraction", value + 0.5
    yield "nan", NAN
    yield "sign", -3 if value >= 0 else 3
    yield "range: zero", 0
    yield "range: huge", 2**70
    yield "rank: tuple", (value, value, value, value, value)


def _of_float(value: float) -> Iterator[tuple[str, Any]]:
    yield "kind: text", "half"
    yield "nan", NAN
    yield "range: infinite", float("inf")
    yield "sign", -1.5
    yield "range: huge", 1e30
    yield "rank: list", [value, value]


def _of_text(value: str) -> Iterator[tuple[str, Any]]:
    yield "kind: number", 5
    yield "range: no such", "no such/thing"
    yield "rank: list", [value, value]


def _of_node(node: ht.Node) -> Iterator[tuple[str, Any]]:
    if isinstance(node.type, tuple):
        return
    shape, kind = tuple(None if isinstance(s, Dim) else s for s in node.shape), node.dtype.kind

    def other(shape: tuple[int | None, ...], dtype: Any = node.dtype) -> ht.Node:
        return ht.placeholder("other", shape, str(dtype))

    yield "kind: text", "a text"
    yield "rank: more", other((*shape, 2))
    if shape:
        yield "rank: less", other(shape[:-1])
        yield "shape", other((*shape[:-1], (shape[-1] or 4) + 3))
        yield "shape: empty", other((*shape[:-1], 0))
        yield "rank: transposed", other(shape[::-1])
    yield "dtype: bool", other(shape, "bool")
    yield ("dtype: integers", other(shape, "int64")) if kind == "f" else ("dtype: floats", other(shape, "float32"))
    yield "another graph", other(shape)
    sizes = [s or 2 for s in shape]
    yield "foreign: texts", np.full(sizes, "a text")
    yield "foreign: complex", np.ones(sizes, "complex64")
    yield "foreign: objects", np.full(sizes, None)
    if kind == "f":
        yield "nan", np.full(sizes, NAN, node.dtype)


def _of_array(array: np.ndarray) -> Iterator[tuple[str, Any]]:
    yield "kind: text", "a text"
    yield "rank: more", array[..., None]
    if array.ndim:
        yield "rank: less", array[0] if len(array) else array.reshape(-1)
        yield "shape", np.concatenate([array, array, array])
        yield "shape: empty", array[:0]
    yield "foreign: texts", np.full(array.shape, "a text")
    yield "foreign: complex", array.astype("complex64") if array.dtype.kind in "biuf" else array
    yield "foreign: objects", np.full(array.shape, None)
    if array.dtype.kind == "f":
        yield "nan", np.full_like(array, NAN)
    elif array.dtype.kind in "iu":
        yield "dtype: floats", array + 0.5
        yield "range: huge", np.full(array.shape, 2**40)


def _of_list(value: list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    make = list if isinstance(value, list) else tuple
    yield "kind: text", "a text"
    yield "rank: number", 5
    yield "shape: empty", make(())
    if value:
        yield "shape: longer", make([*value, *value, *value])
        yield "kind: of none", make([None, *value[1:]])
        yield "kind: of foreign", make([Foreign(), *value[1:]])


def _of_mapping(value: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    yield "kind: text", "a text"
    yield "kind: number", 5
    yield "kind: of foreign", {k: Foreign() for k in value} or {"no such": Foreign()}
    yield "range: no such", {**value, "no such": 1}
    if any(isinstance(key, ht.Node) for key in value):
        yield "another graph", {ht.placeholder("other", (2,)): v for v in value.values()}


MADE: dict[Any, Callable[[Any], Iterator[tuple[str, Any]]]] = {
    (bool, np.bool_): _of_truth,
    (int, np.integer): _of_int,
    (float, np.floating): _of_float,
    str: _of_text,
    ht.Node: _of_node,
    np.ndarray: _of_array,
    (list, tuple): _of_list,
    Mapping: _of_mapping,
}


def wrong_calls(call: Call) -> Iterator[tuple[str, str, Call]]:
    """Mistakes with one call: the argument, the class, and the wrong call."""
    names = names_of(call)
    first = 1 if call.target.method and call.args and isinstance(call.args[0], call.target.owner) else 0
    for place in range(first, len(call.args)):
        for kind, value in wrong_values(call.args[place]):
            yield names[place], kind, _with(call, place, value)
        if place + 1 < len(call.args) and type(call.args[place]) is not type(call.args[place + 1]):
            swapped = [*call.args[:place], call.args[place + 1], call.args[place], *call.args[place + 2 :]]
            yield names[place], "order", Call(call.target, tuple(swapped), call.named)
    for name, given in call.named.items():
        for kind, value in wrong_values(given):
            yield name, kind, Call(call.target, call.args, call.named | {name: value})
    if len(call.args) > first:
        yield names[len(call.args) - 1], "missing", Call(call.target, call.args[:-1], call.named)
    yield "no_such_argument", "keyword: foreign", Call(call.target, call.args, call.named | {"no_such_argument": 1})
    yield "*", "keyword: too many", Call(call.target, call.args + (1,) * 20, call.named)
    yield "*", "twice", call


def _with(call: Call, place: int, value: Any) -> Call:
    return Call(call.target, (*call.args[:place], value, *call.args[place + 1 :]), call.named)


def names_of(call: Call) -> list[str]:
    """What the arguments by position are called."""
    parameters = parameters_of(call)
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "*")
    return [places[k].name if k < len(places) else rest for k in range(len(call.args))]


def parameters_of(call: Call) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(call.target.function).parameters.values())
    except ValueError:  # of what Python itself wrote
        return []
