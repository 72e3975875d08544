"""Products with a sparse matrix: what a graph network does when nodes gather from their neighbors.

The matrix is a list of entries (row, column, value), in any order; entries at one place add up. `sparse_matmul` is its
product with a dense matrix, `sampled_matmul` the product of two dense ones where it has entries; each is the gradient
of the other. Entries and features may be split over ranks, rows and nodes may not. Left out: products of two sparse
matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..core.backend import fixed_value
from ..core.errors import ArgumentError, ShapeError
from ..core.graph import Node
from ..core.op import op
from ..core.types import Size, TensorType, compatible, promote, require_float
from .index import check_range, in_range, require_indices

__all__ = ["sampled_matmul", "sparse_matmul"]


@op(dims="e,e,e,m!k->n!k", linear=(2, 3))
def sparse_matmul(xp: ModuleType, rows: Any, columns: Any, values: Any, x: Any, *, size: Size) -> Any:
    """y[i] = sum of values[k] x[columns[k]] over all k with rows[k] = i: (size, features).

    `rows` and `columns` are integers (entries,), `values` floats (entries,), `x` is (nodes, features). Pass rows and
    columns as NumPy arrays or constants if they are the same in every step. The gradient for `x` is the product with
    the transpose, that for `values` is `sampled_matmul`. ValueRangeError for an entry outside the matrix.

    >>> import hetu as ht
    >>> x = ht.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> ht.evaluate(sparse_matmul([0, 0, 1], [1, 2, 0], [1.0, 0.5, 2.0], x, size=2)).tolist()
    [[5.5, 7.0], [2.0, 4.0]]
    """
    if _is_fixed(rows, columns):
        _check_entries(xp, rows, columns, int(size), x.shape[0])
    terms = values[:, None] * x[columns]
    y = xp.zeros((size, x.shape[1]), dtype=terms.dtype)
    xp.add.at(y, rows, terms)
    return y


@sparse_matmul.normalize
def sparse_matmul_attrs(*types: TensorType, size: Any) -> dict[str, Any]:
    if isinstance(size, bool) or (isinstance(size, int) and size < 0):
        raise ArgumentError(f"size={size!r}", fix="pass the number of rows of the matrix")
    return {"size": size}


@sparse_matmul.infers
def sparse_matmul_type(
    rows: TensorType, columns: TensorType, values: TensorType, x: TensorType, *, size: Size
) -> TensorType:
    _check_types((rows, columns, values), (x,))
    return TensorType((size, x.shape[1]), promote(values.dtype, x.dtype))


def _check_types(entries: Sequence[TensorType], dense: Sequence[TensorType]) -> None:
    """Rows, columns and perhaps values of the entries, and the dense matrices."""
    for indices in entries[:2]:
        require_indices(indices)
    require_float(*entries[2:], *dense)
    if any(t.ndim != 1 or not compatible(t.shape[0], entries[0].shape[0]) for t in entries):
        shown = ", ".join(map(str, entries))
        raise ShapeError(f"got entries {shown}", fix="pass vectors of one length")
    for x in dense:
        if x.ndim != 2:
            raise ShapeError(f"got {x}, wanted (nodes, features)", fix="reshape it to two axes")


def _ranges(rows: Any, columns: Any, size: int, nodes: int) -> list[tuple[Any, int, str]]:
    return [(rows, size, "row"), (columns, nodes, "column")]


def _check_entries(xp: ModuleType, rows: Any, columns: Any, size: int, nodes: int) -> None:
    for ids, count, what in _ranges(rows, columns, size, nodes):
        check_range(xp, ids, count, what)


def _is_fixed(*arrays: Any) -> bool:
    return all(fixed_value(a) is not None for a in arrays)


def _changing_ranges(rows: Any, columns: Any, values: Any, x: Any, *, size: int) -> list[tuple[Any, int, str]]:
    """`bind` looks once at entries that are fixed, and forward where it has to run."""
    return [] if _is_fixed(rows, columns) else _ranges(rows, columns, int(size), x.shape[0])


in_range(sparse_matmul, _changing_ranges)


@sparse_matmul.grad
def sparse_matmul_grad(
    g: Node, y: Node, rows: Node, columns: Node, values: Node, x: Node, *, size: Size
) -> tuple[None, None, Node, Node]:
    return None, None, sampled_matmul(rows, columns, g, x), sparse_matmul(columns, rows, values, g, size=x.shape[0])


# -- the product of two dense matrices at the entries of a sparse one -------------------------------------------------


@op(dims="e,e,n!k,m!k->e", linear=(2, 3))
def sampled_matmul(xp: ModuleType, rows: Any, columns: Any, a: Any, b: Any) -> Any:
    """y[k] = the dot product of a[rows[k]] and b[columns[k]]: the entries of a @ b.T at some places, (entries,).

    `rows` and `columns` are integers (entries,), `a` is (size, features), `b` (nodes, features). With a row of
    queries and of keys for each node these are the scores of graph attention. The gradients are products with the
    sparse matrix that has the incoming gradient as its values. ValueRangeError for a row or column that is not there.

    >>> import hetu as ht
    >>> a, b = [[1.0, 2.0], [3.0, 4.0]], ht.constant([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> ht.evaluate(sampled_matmul([0, 0, 1], [1, 2, 0], a, b)).tolist()
    [2.0, 3.0, 3.0]
    """
    return xp.sum(xp.take(a, rows, axis=0) * xp.take(b, columns, axis=0), axis=1)


@sampled_matmul.infers
def sampled_matmul_type(rows: TensorType, columns: TensorType, a: TensorType, b: TensorType) -> TensorType:
    _check_types((rows, columns), (a, b))
    if not compatible(a.shape[1], b.shape[1]):
        raise ShapeError(f"got rows of {a} and {b}", fix="give both matrices as many features")
    return TensorType(rows.shape, promote(a.dtype, b.dtype))


in_range(sampled_matmul, lambda rows, columns, a, b: _ranges(rows, columns, a.shape[0], b.shape[0]))


@sampled_matmul.grad
def sampled_matmul_grad(g: Node, y: Node, rows: Node, columns: Node, a: Node, b: Node) -> tuple[None, None, Node, Node]:
    da = sparse_matmul(rows, columns, g, b, size=a.shape[0])
    return None, None, da, sparse_matmul(columns, rows, g, a, size=b.shape[0])


# -- the greatest entry of each row -----------------------------------------------------------------------------


def _maxima_type(rows: TensorType, values: TensorType, *, size: Size) -> TensorType:
    _check_types((rows, rows, values), ())
    return TensorType((size,), values.dtype)


@op(infer=_maxima_type, dims="e,e->n!", reduce="max", differentiable=False)
def row_maxima(xp: ModuleType, rows: Any, values: Any, *, size: Size) -> Any:
    """y[i] = the greatest values[k] of all k with rows[k] = i, -inf of none: (size,). A softmax subtracts it.

    >>> import hetu as ht
    >>> ht.evaluate(row_maxima([0, 2, 0], [1.0, 5.0, 3.0], size=3)).tolist()
    [3.0, -inf, 5.0]
    """
    y = xp.full(size, -math.inf, dtype=values.dtype)
    xp.maximum.at(y, rows, values)
    return y


row_maxima.normalize(sparse_matmul_attrs)
in_range(row_maxima, lambda rows, values, *, size: [(rows, int(size), "row")])
