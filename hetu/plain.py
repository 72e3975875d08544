"""What a public function is passed for a value: Python's numbers for those of NumPy, and a dtype for its name.

So a size that `np.prod` has computed is a size, and a rate out of an array is a rate. Left out: where arrays or nodes
are wanted, whose dtype is that of the value, and arrays inside of mappings.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np

from .core.graph import Node

LOOKED_AT = 64  # elements of a sequence


def maker_of(hint: Any) -> Callable[[Any], Any] | None:
    """What makes of a value what a function is passed; None where it is the value itself."""
    kinds = _kinds(hint)
    if hint is np.dtype:
        return np.dtype
    return _number if kinds & {bool, int, float} and not kinds & {Node, np.ndarray, complex, object, Any} else None


def _kinds(hint: Any) -> set[Any]:
    """The types of the values, or of those in a sequence or mapping, that an annotation speaks of."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kinds(inside[0])
    if origin in (Union, types.UnionType, tuple, list, Sequence, Iterable, Mapping):
        return set().union(*map(_kinds, inside))
    return {origin or hint}


def of_numpy(value: Any) -> bool:
    """Whether a value is, or has inside, a number of NumPy."""
    if isinstance(value, list | tuple):
        return any(map(of_numpy, value[:LOOKED_AT]))
    if type(value) is dict:
        return any(isinstance(each, np.generic) for each in value.values())
    return isinstance(value, np.generic | np.ndarray)


def _number(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_number, value))
    if type(value) is dict:
        return {key: each.item() if isinstance(each, np.generic) else each for key, each in value.items()}
    if isinstance(value, np.ndarray) and value.ndim:
        return tuple(map(_number, value))
    return value.item() if isinstance(value, np.generic | np.ndarray) else value


def is_dtype(value: Any) -> bool:
    """Whether NumPy knows a dtype by this."""
    with suppress(TypeError):
        return isinstance(value, np.dtype | type | str) and np.dtype(value) != object
    return False
