"""Weights of other libraries under our names: what names in their files mean stands in rows of a table, plain data.

    ["layers\\.(\\d+)\\.weight", "mlp/linear_\\1/weight", [1, 0]]

What the pattern matches whole is a variable of ours of that name, its axes in this order. A list of names divides the
last axis, as of queries, keys and values that lie beside each other. Names that no row matches are ours already, or
left. Left out: sums, pads and numbers; such weights are computed in Python, and set by `executor.state`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .checkpoint import Checkpoint, whole
from .core.errors import ArgumentError, CheckpointError, did_you_mean
from .core.graph import Node
from .core.state import FilePath
from .core.types import Box, is_float, show_shape
from .data.weights import PublishedWeights

NameRow = Sequence[Any]  # a pattern, a name or a list of names, and perhaps the order of the axes


class ArrayPart(NamedTuple):
    """Where a variable lies: in an array of a file, axes in this order, `part` of `parts` along the last one."""

    array: str
    axes: tuple[int, ...]
    part: int = 0
    parts: int = 1


class Renamed(Checkpoint):
    """Files of another library, read as a checkpoint of the variables of a model; names and shapes are read first.

    CheckpointError for a name that the model has not, for two arrays of one name, and for axes that an array has not.
    """

    def __init__(self, path: FilePath, rows: Sequence[NameRow], model: Mapping[str, Node]) -> None:
        self.published = PublishedWeights(path)
        self.path, self.file, self.bytes, self.extra = self.published.path, None, [], {}
        self.places, self.variables = dict[str, ArrayPart](), dict[str, Any]()
        table = [_checked(row) for row in rows]
        for array, shape in self.published.items():
            found = next(((m, names, axes) for p, names, axes in table if (m := p.fullmatch(array))), None)
            if found is None:
                self._add(array, ArrayPart(array, tuple(range(len(shape)))), model)
                continue
            match, names, axes = found
            for n, name in enumerate(map(match.expand, names)):
                if name not in model:
                    said = f"{array!r} is to be {name!r}, which the model has not"
                    raise CheckpointError(said, fix=did_you_mean(name, model))
                self._add(name, ArrayPart(array, axes or tuple(range(len(shape))), n, len(names)), model)

    def _add(self, name: str, place: ArrayPart, model: Mapping[str, Node]) -> None:
        shape = self.published[place.array]
        if name in self.places:
            said = f"{self.places[name].array!r} and {place.array!r} are both to be {name!r}"
            raise CheckpointError(said, fix="let one row match one of them alone")
        fits = sorted(place.axes) == [*range(len(shape))]
        turned = [shape[axis] for axis in place.axes] if fits else []
        if not fits or (place.parts > 1 and (not turned or turned[-1] % place.parts)):
            told = f"no axes {place.axes}, the last in {place.parts} parts"
            fix = "number each axis once, from 0 up, and name as many parts as there are"
            raise CheckpointError(f"{place.array!r} of shape {show_shape(shape)} has {told}", fix=fix)
        if turned:
            turned[-1] //= place.parts
        dtype = model[name].dtype if name in model and is_float(model[name].dtype) else np.dtype("float32")
        self.places[name] = place
        self.variables[name] = {"shape": tuple(turned), "dtype": dtype.name, "pieces": [(0, whole(turned))]}

    def read(self, name: str, box: Box) -> np.ndarray:
        """The values of `box` of a variable, widened from 16 bits, or narrowed to them."""
        place = self.places[name]
        array = self.published.read(place.array).transpose(place.axes)
        array = np.split(array, place.parts, axis=-1)[place.part] if place.parts > 1 else array
        return np.asarray(array[tuple(slice(*ends) for ends in box)], self.variables[name]["dtype"])

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
