"""Functions of single elements that a worker sends as plain data: tables change by them, or their sum is the answer.

They are compositions of operators (`hetu.ops.composition`), so a notebook cell can send any of its own, and no server
runs a worker's code. With `scale`, `axpy` and `dot` as one line each they are what vector-style servers offer (J. Jiang
et al., "Angel: a new large-scale machine learning system", NSR 2018). `functions.py` has those of modules.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, ShapeError
from ...core.types import is_float
from ...ops.composition import Composition, parsed
from .messages import Message, RefusedError
from .server_table import ServerTable

BLOCK = 1 << 18  # elements that are worked on at once, so that no second table is made
HELD = 20  # bytes of memory that a byte of a function's text takes: 14 to 18, as measured


class Elements:
    """A function of the elements of a table, of those beside them in other tables, and of scalars.

    Refused is what cannot be read, tables of other shapes, and integers, which operators may make fractions of.
    """

    def __init__(self, message: Message, tables: Mapping[int, ServerTable]) -> None:
        facts, self.message = message.facts, message
        self.function: Composition = parsed(facts["function"])
        self.table, self.scalars = tables[message.key], [_number(x) for x in facts["scalars"]]
        others = [_table(tables, key) for key in facts["beside"]]
        self.arrays = [table.values for table in (self.table, *others)]
        for table in others:
            alike = table.values.shape == self.table.values.shape and table.values.dtype == self.table.values.dtype
            if table.spec.growth or not alike:
                told = f"{table.spec.name} {table.values.shape} lies not beside {self.table.spec.name}"
                raise ShapeError(told, fix="use parameters of one shape and dtype")
        if not is_float(self.table.values.dtype):
            raise ArgumentError(f"a function of elements of {self.table.values.dtype}", fix="use floating tables")
        takes = self.function.arrays, len(self.function.inputs) - self.function.arrays, len(self.function.outputs)
        if takes != (len(self.arrays), len(self.scalars), 1):
            raise ArgumentError(f"a function of {takes} arrays, scalars and results")

    @property
    def nbytes(self) -> int:
        """About what it takes in memory."""
        return HELD * len(json.dumps(self.message.facts))

    def _values(self) -> Iterator[tuple[slice, np.ndarray]]:
        rows, cols = self.arrays[0].shape
        step = max(1, BLOCK // max(1, cols))
        with np.errstate(all="ignore"):
            for start in range(0, rows, step):
                some = slice(start, start + step)
                yield some, self.function.run(np, [*(array[some] for array in self.arrays), *self.scalars])[0]

    def change(self) -> None:
        """Put the function's values in the place of the table's, and count that as an update of every row."""
        self.table.versions += 1
        for some, values in self._values():
            self.arrays[0][some] = values

    def sum(self) -> np.ndarray:
        """The sum over the elements as (1, 1), in float64, block by block in their order."""
        return np.full((1, 1), sum(values.sum(dtype=np.float64) for _, values in self._values()))


def _number(x: Any) -> float:
    if not isinstance(x, int | float) or not abs(x) < 1e300:
        raise ArgumentError(f"a scalar {x!r:.40}", fix="send finite numbers")
    return float(x)


def _table(tables: Mapping[int, ServerTable], key: Any) -> ServerTable:
    if type(key) is not int or key not in tables:
        raise RefusedError("key", f"no table {key!r:.40} on this server", fix="create it first")
    return tables[key]
