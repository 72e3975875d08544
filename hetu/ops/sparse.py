"""The product of a sparse matrix and a dense one: what a graph network does when nodes gather from their neighbors.

The matrix is a list of entries (row, column, value), in any order; entries at one place add up. Where rows and columns
are constants, rows of about equal length are put together before the first step, and each step gathers blocks of them
and multiplies each by its values. Ignored on purpose: sparse results, products of two sparse matrices, splitting over
ranks (the whole product runs on each).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from .. import lanes
from ..errors import ArgumentError, ShapeError
from ..graph import OPS, Node
from ..op import op, require_float
from ..types import Size, TensorType, compatible, promote
from .index import check_range, require_indices, take

__all__ = ["sparse_matmul"]

Call = Callable[[], Any]
CHUNK = 1 << 17  # numbers gathered at a time, which stay in the second-level cache
LEAST = 1 << 12  # rows of a lane


@op
def sparse_matmul(xp: ModuleType, rows: Any, columns: Any, values: Any, x: Any, *, size: Size) -> Any:
    """y[i] = sum of values[k] x[columns[k]] over all k with rows[k] = i: (size, features).

    `rows` and `columns` are integers (entries,), `values` floats (entries,), `x` is (nodes, features). Pass rows and
    columns as NumPy arrays or constants if they are the same in every step. The gradient for `x` is the product with
    the transpose, that for `values` the products of pairs of rows. ValueRangeError for an entry outside the matrix.

    >>> import hetu as ht
    >>> x = ht.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> ht.evaluate(sparse_matmul([0, 0, 1], [1, 2, 0], [1.0, 0.5, 2.0], x, size=2)).tolist()
    [[5.5, 7.0], [2.0, 4.0]]
    """
    y = xp.zeros((size, x.shape[1]), dtype=x.dtype)
    xp.add.at(y, rows, values[:, None] * x[columns])
    return y


@sparse_matmul.normalize
def sparse_matmul_attrs(*types: TensorType, size: Any) -> dict[str, Any]:
    if isinstance(size, bool) or (isinstance(size, int) and size < 1):
        raise ArgumentError(f"size={size!r}", fix="pass the number of rows of the matrix")
    return {"size": size}


@sparse_matmul.infers
def sparse_matmul_type(
    rows: TensorType, columns: TensorType, values: TensorType, x: TensorType, *, size: Size
) -> TensorType:
    require_indices(rows)
    require_indices(columns)
    require_float(values, x)
    if any(t.ndim != 1 or not compatible(t.shape[0], rows.shape[0]) for t in (rows, columns, values)):
        raise ShapeError(f"got entries {rows}, {columns} and {values}", fix="pass three vectors of one length")
    if x.ndim != 2:
        raise ShapeError(f"x is {x}, wanted (nodes, features)", fix="reshape it to two axes")
    return TensorType((size, x.shape[1]), promote(values.dtype, x.dtype))


@sparse_matmul.check
def sparse_matmul_check(xp: ModuleType, rows: Any, columns: Any, values: Any, x: Any, *, size: int) -> None:
    if not _is_fixed(rows, columns):  # what is fixed was checked when it was bound
        _check(xp, rows, columns, x, size)


def _check(xp: ModuleType, rows: Any, columns: Any, x: Any, size: int) -> None:
    check_range(xp, rows, size, "row")
    check_range(xp, columns, x.shape[0], "column")


def _is_fixed(*arrays: Any) -> bool:
    return all(isinstance(a, np.ndarray) and not a.flags.writeable for a in arrays)


@sparse_matmul.grad
def sparse_matmul_grad(
    g: Node, y: Node, rows: Node, columns: Node, values: Node, x: Node, *, size: Size
) -> tuple[None, None, Node, Node]:
    pairs = OPS["sum"](take(g, rows, axis=0) * take(x, columns, axis=0), axis=1)
    return None, None, pairs, sparse_matmul(columns, rows, values, g, size=x.shape[0])


@sparse_matmul.bind
def sparse_matmul_bind(
    xp: ModuleType, out: Any, rows: Any, columns: Any, values: Any, x: Any, *, size: int
) -> list[Call] | None:
    if xp is not np or not _is_fixed(rows, columns) or out.dtype.char not in "fd" or out.size == 0:
        return None
    if values.dtype != out.dtype or x.dtype != out.dtype or not x.flags.c_contiguous:
        return None
    _check(xp, rows, columns, x, size)
    order, made = _Blocks(rows, columns, size), np.zeros((size + 1, out.shape[1]), out.dtype)
    weights, calls = np.zeros(len(order.entries), out.dtype), []
    if _is_fixed(values):
        order.weigh(values, weights)
    else:
        calls.append(partial(order.weigh, values, weights))
    blocks = list(order.blocks(out.shape[1]))

    def products(part: slice) -> list[Call]:
        mine, calls = blocks[part], []
        buffer = np.empty((max((e.stop - e.start for _, _, e in mine), default=0), out.shape[1]), out.dtype)
        for block, width, entries in mine:
            gathered = buffer[: entries.stop - entries.start]
            calls.append(partial(x.take, columns[order.entries[entries]], 0, gathered, "clip"))
            parts = weights[entries].reshape(-1, 1, width), gathered.reshape(-1, width, out.shape[1])
            calls.append(partial(np.matmul, *parts, made[block][:, None]))
        return calls

    def ordered(part: slice) -> list[Call]:
        return [partial(made.take, order.place[part], 0, out[part], "clip")]

    return [*calls, *lanes.over(len(blocks), products, 2), *lanes.over(size, ordered, LEAST)]


class _Blocks:
    """The rows of a sparse matrix sorted by length. Lengths are rounded up, by entries without weight."""

    def __init__(self, rows: np.ndarray, columns: np.ndarray, size: int) -> None:
        counts = np.bincount(rows, minlength=size)
        self.widths = _rounded(counts)
        self.sequence = np.argsort(self.widths, kind="stable")
        self.first = int(np.searchsorted(self.widths[self.sequence], 1))  # those before are empty
        self.place = np.empty(size, np.intp)  # of each row in the sorted result; empty rows lie at the end, in zeros
        self.place[self.sequence] = np.arange(size)
        self.place[counts == 0] = size
        by_row, starts = np.argsort(rows, kind="stable"), np.cumsum(counts) - counts
        full = self.sequence[self.first :]
        self.sorted_widths = self.widths[full]
        self.ends = np.cumsum(self.sorted_widths)
        within = np.arange(self.ends[-1] if len(full) else 0)
        within -= np.repeat(self.ends - self.sorted_widths, self.sorted_widths)
        lengths = np.repeat(counts[full], self.sorted_widths)
        self.entries = by_row[np.repeat(starts[full], self.sorted_widths) + np.minimum(within, lengths - 1)]
        self.counted = within < lengths

    def weigh(self, values: np.ndarray, weights: np.ndarray) -> None:
        np.multiply(values[self.entries], self.counted, weights)

    def blocks(self, features: int) -> Iterator[tuple[slice, int, slice]]:
        """(sorted rows, their width, their entries): rows of one width, as many as fit the cache."""
        start = 0
        while start < len(self.ends):
            width = int(self.sorted_widths[start])
            same = int(np.searchsorted(self.sorted_widths, width, side="right"))
            stop = min(same, start + max(1, CHUNK // (width * features)))
            entries = slice(int(self.ends[start]) - width, int(self.ends[stop - 1]))
            yield slice(self.first + start, self.first + stop), width, entries
            start = stop


def _rounded(counts: np.ndarray) -> np.ndarray:
    """Lengths rounded up to three binary digits, so that there are few different ones."""
    step = 1 << np.maximum(np.frexp(counts)[1] - 3, 0)
    return -(-counts // step) * step
