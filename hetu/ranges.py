"""Which numbers and texts an annotation means, beside its type: `Annotated[int, Range(1)]`, and the names of those.

They say nothing to Python; `arguments.py` reads them, where a public function is called. It is passed numbers of NumPy
as Python's, so that a size which `np.prod` has computed is a size, and dtypes for their names; but where arrays or
nodes are wanted a value is passed as it is, as are arrays inside of mappings.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np

from .core.backend import Seed as Seed
from .core.errors import DataError
from .core.graph import Node

MOST = 2**63  # what whole numbers of a range stay below, also where it has no end; others fit in 64 bits


@dataclass(frozen=True)
class Range:
    """Bounds of a number, which belong to it unless it is `open` at that end: "low", "high" or "both".

    Infinite numbers belong to none but an `endless` one. Whole numbers stay below `most`.
    The core, which knows no `Range`, declares one by `range`.
    """

    low: float = -math.inf
    high: float = math.inf
    open: str = ""
    endless: bool = False
    most: int = MOST

    def holds(self, value: Any) -> bool:
        if not -math.inf < value < math.inf or (isinstance(value, int) and value >= self.most):
            return self.endless and value == math.inf
        above = value > self.low if self.open in ("low", "both") else value >= self.low
        below = value < self.high if self.open in ("high", "both") else value <= self.high
        return bool(above and below)

    def __str__(self) -> str:
        low, high = (f"{end:g}" for end in (self.low, self.high))
        if self.low == -math.inf:
            return "that is finite"
        if self.high == math.inf:
            return (f"above {low}" if self.open == "low" else f"of {low} at least") + ", or math.inf" * self.endless
        first = f"above {low}" if self.open in ("low", "both") else f"from {low}"
        return f"{first} to {'below ' if self.open in ('high', 'both') else ''}{high}"


@dataclass(frozen=True)
class OneOf:
    """Which texts are meant: `Annotated[str, OneOf("mean", "sum")]`."""

    texts: tuple[str, ...]

    def __init__(self, *texts: str) -> None:
        object.__setattr__(self, "texts", texts)

    def holds(self, value: Any) -> bool:
        return value in self.texts

    def __str__(self) -> str:
        return " or ".join(map(repr, self.texts))


@dataclass(frozen=True)
class Or:
    """What is taken for short beside the type that a field then has: `Annotated[tuple[Shard, ...], Or(Shard)]`."""

    kind: type


ANY = object()
AnyFloat = Annotated[float, ANY]  # a value among values, which may be NaN or infinite
AtLeast0 = Annotated[float, Range(0)]
Positive = Annotated[float, Range(0, open="low")]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, open="low")]
Beta = Annotated[float, Range(0, 1, open="high")]  # what a running mean keeps
Finite = Annotated[float, Range()]
Endless = Annotated[float, Range(0, open="low", endless=True)]  # seconds that one may wait, or a bound that is none
AtLeast1 = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Layers = Annotated[int, Range(0, 10_000)]  # each of which is built
Whole = Annotated[int, Range()]

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
    if origin in (Union, types.UnionType, tuple, list, Sequence, Iterable, Collection, Mapping):
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


def unmasked(values: Any, what: str, dtype: Any = None) -> np.ndarray:
    """An array of `values`; DataError for masked ones, also in a list: their mask says that they are not there.

    >>> unmasked([1, 2], "ids").tolist()
    [1, 2]
    """
    for value in (values, *(values if isinstance(values, list | tuple) else ())):
        if hasattr(value, "filled"):  # whoever made it; to import `numpy.ma` for the question takes 25 ms
            fix = "leave out what is masked: array.compressed(), or fill it: array.filled(0)"
            raise DataError(f"{what} are masked, and a mask is not taken", fix=fix)
    return np.asarray(values, dtype)
