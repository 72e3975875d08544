"""Server functions: questions answered where the table lives, so that only the answer travels.

`@server_function` registers a function by its name; a client calls it with `client.call(table, name, ...)`. The servers
must import the module that holds it (`imports=` of `hetu.ps.Options`). The model is Angel's PSFunc (J. Jiang et al.,
"Angel: a new large-scale machine learning system", NSR 2018). What changes tables is no code of a worker: update rules
(`rules.py`) and functions of single elements (`elements.py`) travel as data. A `reduction` answers what all workers
give together (`reductions.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...core.errors import HetuError, ShapeError, UnknownNameError, did_you_mean
from ...core.types import is_float
from ...ops.trees import best_cuts
from .messages import RefusedError, wire_array

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


@server_function
def best_cut(
    table: np.ndarray, places: int, size: int, used: list[int], totals: list[int], least: float, l2: float
) -> Answer:
    """Of the columns of a tree's node, each a row in every place, the one with the best cut: bits of the score, facts.

    Rows are histograms (size, channels); the node's are those of the first place `used` without those of the others.
    RefusedError unless they sum up to its `totals`. For the rest see `hetu.ops.best_cuts`.

    >>> table = np.array([[3, 1, 4, 1, -5, 1], [2, 3, 0, 0, 0, 0]])
    >>> column, (row,) = best_cut(table, places=1, size=3, used=[0], totals=[2, 3], least=0.0, l2=0.0)
    >>> column.tolist(), row[:1].view(np.float64).tolist(), row[1:].tolist()
    ([0], [49.5], [1, 1, 7, 2])
    """
    placed = table.reshape(places, -1, 1, size, len(totals))
    found, sums = placed[used[0]].copy(), np.array([totals], table.dtype)
    for place in used[1:]:
        found -= placed[place]
    if (np.einsum("abcd->abd", found) != sums).any():
        raise RefusedError(
            "lost", "a node's columns lack rows: a worker is not there any more", fix="start the job again"
        )
    out = np.empty((1, len(found))), np.empty((1, len(found), 2 + len(totals)), np.int64)
    for call in best_cuts.bound(np, out, (found, sums, np.array([least])), {"l2": l2}):
        call()
    best = out[0].argmax(axis=1)
    return best, np.hstack([out[0][:, best].view(np.int64), out[1][0, best]])


# -- reductions ----------------------------------------------------------------------------------------------------

Kept = dict[int, np.ndarray]
REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {}


def reduction(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Register `f(kept, parts, **arguments) -> rows`: what a server makes of the parts of all workers, one shape each.

    `kept` is what such functions keep on this server from one round to the next, arrays by number.
    """
    REDUCTIONS[function.__name__] = function
    return function


def reduced(name: str, kept: Kept, parts: list[np.ndarray], arguments: dict[str, Any]) -> np.ndarray:
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
def total(kept: Kept, parts: list[np.ndarray]) -> np.ndarray:
    """The sum, added in the order of workers."""
    return sum(parts[1:], start=parts[0])


@reduction
def most(kept: Kept, parts: list[np.ndarray]) -> np.ndarray:
    """The maxima."""
    found: np.ndarray = np.maximum.reduce(parts)
    return found


@reduction
def side_by_side(kept: Kept, parts: list[np.ndarray]) -> np.ndarray:
    """The parts of all workers, one after the other."""
    return np.concatenate(parts)


@reduction
def forget(kept: Kept, parts: list[np.ndarray]) -> np.ndarray:
    """Keep nothing any more."""
    kept.clear()
    return parts[0]
