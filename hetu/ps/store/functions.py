"""Server functions: questions answered where the table lives, so that only the answer travels.

`@server_function` registers a function by its name; a client calls it with `client.call(table, name, ...)`. The servers
must import the module that holds it (`imports=` of `hetu.ps.Options`). The model is Angel's PSFunc (J. Jiang et al.,
"Angel: a new large-scale machine learning system", NSR 2018). What changes tables is no code of a worker: update rules
(`rules.py`) and functions of single elements travel as data, compositions of operators (`hetu.ops.composition`) that a
notebook cell can send. With `scale`, `axpy` and `dot` as one line each these are what vector-style servers offer. A
`reduction` answers what all workers give together (`reductions.py`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...core.errors import (
    ArgumentError,
    DTypeError,
    HetuError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
    did_you_mean,
)
from ...core.types import is_float
from ...ops.composition import Composition, parsed
from ...ops.trees import best_cuts
from .messages import Message, RefusedError, wire_array
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


Answer = tuple[np.ndarray, np.ndarray]
FUNCTIONS: dict[str, Callable[..., Answer]] = {}


def server_function(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Register `f(table, **arguments) -> (row ids, rows)`, run on each server's own rows of a table.

    `table` (rows, cols) is read-only.

    >>> @server_function
    ... def rows_above(table, limit):
    ...     ids = np.flatnonzero(table.max(axis=1) > limit)
    ...     return ids, table[ids]
    >>> call_function("rows_above", np.array([[1.0], [5.0]]), {"limit": 2})[0].tolist()
    [1]
    """
    FUNCTIONS[function.__name__] = function
    return function


def call_function(name: str, table: np.ndarray, arguments: dict[str, Any]) -> Answer:
    if name not in FUNCTIONS:
        raise UnknownNameError(f"no server function {name!r}", fix=did_you_mean(name, FUNCTIONS))
    view = table.view()
    view.flags.writeable = False
    try:  # a user's function must not end the server
        ids, rows = FUNCTIONS[name](view, **arguments)
        ids, rows = wire_array(ids, np.dtype("<i8")), wire_array(rows)
    except HetuError:
        raise
    except Exception as error:
        raise RefusedError("function", f"{name}: {type(error).__name__}: {error}") from error
    if ids.ndim != 1 or rows.ndim != 2 or len(ids) != len(rows):
        raise ShapeError(f"{name} returned ids {ids.shape} and rows {rows.shape}", fix="return (k,) and (k, cols)")
    return ids, rows


@server_function
def top_k(table: np.ndarray, k: int = 10, column: int = 0) -> Answer:
    """The `k` rows with the largest values in `column`, best first.

    >>> top_k(np.array([[1.0], [3.0], [2.0]]), k=2)[0].tolist()
    [1, 2]
    """
    values = table[:, column]
    best = np.argsort(-values if is_float(values.dtype) else ~values, kind="stable")[: max(0, k)]  # -1 may be 255
    return best, table[best]


# -- reductions ----------------------------------------------------------------------------------------------------

KeptArrays = dict[int, np.ndarray]
REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {}


def reduction(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Register `f(kept, parts, **arguments) -> rows`: what a server makes of the parts of all workers, one shape each.

    `kept` is what such functions keep on this server from one round to the next, arrays by number.
    """
    REDUCTIONS[function.__name__] = function
    return function


def reduced(name: str, kept: KeptArrays, parts: list[np.ndarray], arguments: dict[str, Any]) -> np.ndarray:
    if name not in REDUCTIONS:
        raise UnknownNameError(f"no reduction {name!r}", fix=did_you_mean(name, REDUCTIONS))
    try:
        rows = wire_array(REDUCTIONS[name](kept, parts, **arguments))
    except HetuError:
        raise
    except Exception as error:
        raise RefusedError("function", f"{name}: {type(error).__name__}: {error}") from error
    if rows.ndim != 2:
        raise ShapeError(f"{name} returned {rows.shape}", fix="return (rows, cols)")
    return rows


@reduction
def total(kept: KeptArrays, parts: list[np.ndarray]) -> np.ndarray:
    """The sum, added in the order of workers."""
    return sum(parts[1:], start=parts[0])


@reduction
def most(kept: KeptArrays, parts: list[np.ndarray]) -> np.ndarray:
    """The maxima."""
    found: np.ndarray = np.maximum.reduce(parts)
    return found


@reduction
def side_by_side(kept: KeptArrays, parts: list[np.ndarray]) -> np.ndarray:
    """The parts of all workers, one after the other."""
    return np.concatenate(parts)


@reduction
def best_cut(
    kept: KeptArrays, parts: list[np.ndarray], size: int, nodes: list[int], at: list[int], less: list[int],
    least: list[float], l2: list[float], drop: list[int],
) -> np.ndarray:  # fmt: skip
    """The `best_columns` of nodes of trees, among those of this server.

    Parts are histograms (columns, counted * size * channels). Node k has that which was counted at `at[k]`, or what the
    kept node `less[k]`, unless that is -1, has beyond it. It is kept by its number `nodes[k]`, unless that is -1; those
    to `drop` are kept no more.

    >>> kept, part = {}, np.array([[3, 1, 4, 1, -5, 1], [2, 3, 0, 0, 0, 0]])
    >>> asked = {"size": 3, "nodes": [7], "at": [0], "less": [-1], "least": [0.0], "l2": [0.0], "drop": []}
    >>> (row,) = best_cut(kept, [part], **asked)
    >>> row[:1].view(np.float64).tolist(), row[1:].tolist(), [*kept]
    ([49.5], [0, 1, 1, 7, 2], [7])
    """
    shape = _shape_asked(kept, parts[0], size, drop, nodes=nodes, at=at, less=less, least=least, l2=l2)
    for node in drop:
        kept.pop(node, None)
    found = total(kept, parts).reshape(shape).take(at, axis=1)
    for k, (node, parent) in enumerate(zip(nodes, less)):
        if parent >= 0:
            np.subtract(kept[parent], found[:, k], out=found[:, k])
        if node >= 0:
            kept[node] = found[:, k].copy()
    return best_columns(found, np.array(least, np.float64), np.array(l2, np.float64))


def _shape_asked(
    kept: KeptArrays, part: np.ndarray, size: int, drop: list[int], **lists: list[Any]
) -> tuple[int, int, int, int]:
    """(columns, counted, size, channels) of the histograms of a `best_cut`; an error before memory is taken, or
    anything is changed, where what workers ask does not fit."""
    nodes, at, less = (lists[name] for name in ("nodes", "at", "less"))
    for name, values in {**lists, "drop": drop, "size": [size]}.items():
        kinds = (int, float) if name in ("least", "l2") else (int,)
        if not isinstance(values, list) or not all(type(value) in kinds for value in values):
            raise DTypeError(f"best_cut got {name}={values!r:.80}", fix="pass a list of numbers, whole ones of nodes")
        if name in lists and not 0 < len(values) == len(nodes):
            raise ShapeError(f"best_cut got {len(values)} of {name} for {len(nodes)} nodes", fix="pass one for each")
    counts = Counter(at)
    if min(at) < 0 or max(counts.values()) > 2:
        text = f"best_cut got at={at!r:.80}"
        raise ValueRangeError(text, fix="a histogram is counted for a node, and at most for its sibling")
    columns, width, counted = *part.shape, max(at) + 1
    if part.dtype.name not in ("int32", "int64") or size < 1 or not width or width % (counted * size):
        text = f"best_cut got {part.dtype} {part.shape} for {counted} histograms of {size} bins"
        raise ShapeError(text, fix="pass int32 or int64 (columns, histograms * bins * channels)")
    shape = columns, size, width // (counted * size)
    for parent in less:
        own = kept.get(parent) if parent not in drop else None
        if parent >= 0 and (own is None or own.shape != shape or own.dtype != part.dtype):
            raise ValueRangeError(f"of node {parent} no histogram {shape} is kept", fix="count both of its children")
    return columns, counted, *shape[1:]


def best_columns(found: np.ndarray, least: np.ndarray, l2: np.ndarray) -> np.ndarray:
    """Of histograms (columns, nodes, size, channels) the best cut of each node, int64 (nodes, 4 + channels).

    First are the bits of its score, and its column, the first of equal ones; for the rest see `hetu.ops.best_cuts`.
    `least` and `l2` are of each node.
    """
    columns, nodes, _, channels = found.shape
    best = np.zeros((nodes, 4 + channels), np.int64)
    best[:, 0] = np.float64(-np.inf).view(np.int64)
    for some in [l2 == value for value in np.unique(l2)] if columns else []:
        part = found if some.all() else found[:, some]
        out = np.empty((part.shape[1], columns)), np.empty((part.shape[1], columns, 2 + channels), np.int64)
        asked = part, part[0].sum(axis=1, dtype=part.dtype), least[some]
        for call in best_cuts.bound(np, out, asked, {"l2": float(l2[some][0])}):
            call()
        best[some] = first_best(*out)
    return best


def first_best(scores: np.ndarray, facts: np.ndarray) -> np.ndarray:
    """Of (nodes, places) the bits of the best score of each node, its place, the first of equal ones, and the facts
    there."""
    at, place = np.arange(len(scores)), scores.argmax(axis=1)
    return np.column_stack([scores[at, place].view(np.int64), place, facts[at, place]])


@reduction
def forget(kept: KeptArrays, parts: list[np.ndarray]) -> np.ndarray:
    """Keep nothing any more."""
    kept.clear()
    return parts[0]
