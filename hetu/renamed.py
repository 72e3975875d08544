"""Weights of other libraries under our names: what names in their files mean stands in rows of a table, plain data.

    ["layers\\.(\\d+)\\.weight", "mlp/linear_\\1/weight", [1, 0]]

What the pattern matches whole is a variable of ours of that name, its axes in this order; `linear_0` is `linear`, the
first. A list of names divides the last axis, as of queries, keys and values that lie beside each other. Names that no
row matches are ours already, or left. Left out: sums, joins and pads; such weights are computed in Python, in a mapping
of arrays, which stands where a file does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .checkpoint import Checkpoint, whole
from .core.backend import fitting
from .core.errors import ArgumentError, CheckpointError, did_you_mean
from .core.graph import Node
from .core.state import FilePath
from .core.types import Box, show_shape
from .data.weights import SHOWN, PublishedWeights

NameRow = Sequence[Any]  # a pattern, a name or a list of names, and perhaps the order of the axes


class ArrayPart(NamedTuple):
    """Where a variable lies: in an array of a file, axes in this order, `part` of `parts` along the last one."""

    array: str
    axes: tuple[int, ...]
    part: int = 0
    parts: int = 1


class _InMemory(Mapping[str, tuple[int, ...]]):
    """Arrays of any library, read as those of a file are."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        def numbers(name: str, value: Any) -> np.ndarray:
            return fitting(value, np.dtype("float64"), lambda what, fix: CheckpointError(f"{name!r} {what}", fix=fix))

        self.arrays = {name: numbers(name, value) for name, value in arrays.items()}
        self.read = self.arrays.__getitem__

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


class Renamed(Checkpoint):
    """Arrays of another library, read as a checkpoint of the variables of a model; names and shapes are read first.

    It is opened when it is first looked at, by all ranks together. CheckpointError, with a table, for names that the
    model has not, for two arrays of one name, and for axes that an array has not.
    """

    fix = "add a row to names=, or change it; axes (1, 0) turn a matrix"

    def __init__(
        self, source: FilePath | Mapping[str, Any], rows: Sequence[NameRow], model: Mapping[str, Node]
    ) -> None:
        self.source, self.model, self.table = source, model, [_checked(row) for row in rows]
        self.path = Path("arrays in memory") if isinstance(source, Mapping) else Path(source)
        self.file, self.bytes, self.extra = None, [], {}

    @cached_property
    def published(self) -> _InMemory | PublishedWeights:
        return _InMemory(self.source) if isinstance(self.source, Mapping) else PublishedWeights(self.source)

    @cached_property
    def places(self) -> dict[str, ArrayPart]:
        """Where each variable lies."""
        found, wrong = dict[str, ArrayPart](), list[tuple[str, str]]()
        for array, shape in self.published.items():
            row = next(((m, names, axes) for p, names, axes in self.table if (m := p.fullmatch(array))), None)
            names, axes = ([self._first(row[0].expand(n)) for n in row[1]], row[2]) if row else ([array], ())
            axes, parts = axes or tuple(range(len(shape))), len(names)
            if sorted(axes) != [*range(len(shape))] or (parts > 1 and (not shape or shape[axes[-1]] % parts)):
                said = f"{array!r} of shape {show_shape(shape)} has no axes {axes}, the last in {parts} parts"
                wrong.append((said, "number each axis once, from 0 up, and name as many parts as there are"))
                continue
            for n, name in enumerate(names):
                if name in found:
                    said = f"{found[name].array!r} and {array!r} are both to be {name!r}"
                    wrong.append((said, "let one row match one of them alone"))
                elif row and name not in self.model:
                    said = f"{array!r} is to be {name!r}, which the model has not"
                    wrong.append((said, did_you_mean(name, self.model)))
                else:
                    found[name] = ArrayPart(array, axes, n, parts)
        if wrong:
            rows = [said for said, _ in wrong[:SHOWN]] + [f"... and {len(wrong) - SHOWN} more"][: len(wrong) > SHOWN]
            told = "\n  ".join([f"names= and {self.path.name} do not fit; nothing was loaded", *rows])
            raise CheckpointError(told, fix=wrong[0][1])
        return found

    def _first(self, name: str) -> str:
        """The name of a variable, in which what is first of its kind may have a number too."""
        plain = re.sub(r"_0(?=/|$)", "", name)
        return plain if name not in self.model and plain in self.model else name

    @cached_property
    def variables(self) -> dict[str, Any]:
        """Shape, dtype and pieces by name, as of any checkpoint."""
        made = dict[str, Any]()
        for name, place in self.places.items():
            shape = [self.published[place.array][axis] for axis in place.axes]
            shape[-1:] = [size // place.parts for size in shape[-1:]]
            dtype = self.model[name].dtype.name if name in self.model else "float32"
            made[name] = {"shape": tuple(shape), "dtype": dtype, "pieces": [(0, whole(shape))]}
        return made

    def read(self, name: str, box: Box) -> np.ndarray:
        """The values of `box` of a variable, widened from 16 bits, or narrowed to them."""
        place, dtype = self.places[name], np.dtype(self.variables[name]["dtype"])
        array = self.published.read(place.array).transpose(place.axes)
        array = np.split(array, place.parts, axis=-1)[place.part] if place.parts > 1 else array
        array = fitting(array, dtype, lambda what, fix: CheckpointError(f"{name!r} {what}", fix=fix))
        return np.asarray(array[tuple(slice(*ends) for ends in box)], dtype)

    def __fspath__(self) -> str:
        return str(self.path)  # so that it stands where a path does, as of `Executor.load`


def _checked(row: NameRow) -> tuple[re.Pattern[str], list[str], tuple[int, ...]]:
    """A row as a pattern, names and axes; ArgumentError says what is wrong with it."""
    fix = 'write ("pattern", "name"), ("pattern", ["name", "name"]), or either with axes behind: (1, 0)'
    if isinstance(row, str) or not isinstance(row, Sequence) or len(row) not in (2, 3):
        raise ArgumentError(f"{row!r:.80} is no row of names", fix=fix)
    pattern, names, axes = row if len(row) == 3 else (*row, ())
    names = [names] if isinstance(names, str) else names
    if not isinstance(pattern, str) or not isinstance(names, Sequence) or [n for n in names if not isinstance(n, str)]:
        raise ArgumentError(f"{row!r:.80} is no row of names", fix=fix)
    if not isinstance(axes, Sequence) or not all(type(axis) is int for axis in axes):
        raise ArgumentError(f"{row!r:.80} has axes {axes!r:.40}", fix=fix)
    try:
        found = re.compile(pattern)
        for name in names:
            re.sub(found, name, "")  # looks at the groups that it refers to
    except re.error as error:
        raise ArgumentError(f"{row!r:.80} is no row of names: {error}", fix=fix) from None
    return found, list(names), tuple(axes)
