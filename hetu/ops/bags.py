"""Bags of ids that differ in length: rows of a sparse matrix, as linear models and factorization machines take them.

A batch is `ids` (entries,), the numbers `weights` (entries,) that stand beside them, and `starts` (bags,): where each
bag begins; it ends where the next one does, and the last with the entries. All that is made of them here is a lookup,
arithmetic and a sum where ids say (`scatter_rows`). So gradients are those of lookups, which touch rows alone, and a
pass computes all entry by entry, in one go. For bags of one length see `embedding` and `sum`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from ..core.errors import ArgumentError, ShapeError, ValueRangeError, public
from ..core.graph import Node
from ..core.leaf import constant
from ..core.op import as_node, op
from ..core.types import TensorType, compatible
from ..ranges import AtLeast1
from .creation import full
from .elementwise import in_full, square
from .index import embedding, require_indices, scatter_rows, within
from .linalg import permute_dims
from .reduction import sum as sum_
from .shape import expand_dims, reshape

__all__ = ["bag_ids", "embedding_bag", "field_bags", "field_products", "pair_products", "pairs_of_sums"]


def _bag_ids_type(starts: TensorType, ids: TensorType) -> TensorType:
    for type_ in (starts, ids):
        require_indices(type_)
        if type_.ndim != 1:
            raise ShapeError(f"got {type_}, wanted a vector", fix="pass starts (bags,) and ids (entries,)")
    return TensorType(ids.shape, np.dtype("int64"))


@op(infer=_bag_ids_type, dims="n!,e!->e!", differentiable=False)
def bag_ids(xp: ModuleType, starts: Any, ids: Any) -> Any:
    """The number of the bag that each entry is in: (bags,), (entries,) -> (entries,).

    ValueRangeError unless the starts rise from 0 to at most the number of entries.

    >>> import hetu as ht
    >>> ht.evaluate(bag_ids([0, 2, 2], [7, 8, 9])).tolist()  # the second is empty
    [0, 0, 2]
    """
    return xp.astype(xp.searchsorted(starts, xp.arange(ids.shape[0]), side="right") - 1, xp.int64)


def check_starts(xp: ModuleType, starts: Any, entries: int) -> None:
    """ValueRangeError unless starts of bags of so many entries rise from 0."""
    ends = xp.concat([in_full(xp, starts), xp.asarray([entries], dtype=xp.int64)])
    wrong = xp.nonzero((ends[1:] < ends[:-1]) | ((ends[:-1] != 0) & (xp.arange(starts.shape[0]) == 0)))[0]
    if wrong.shape[0] or int(ends[0]) != 0:
        at = int(wrong[0]) if wrong.shape[0] else 0
        said = f"bag {at} begins at {int(ends[at])}" if starts.shape[0] else "there are no bags"
        raise ValueRangeError(
            f"{said}, of {entries} entries",
            fix="let starts begin with 0 and never fall, such as np.cumsum(lengths) - lengths; "
            "each micro-batch of its own takes a part of a batch, and each worker of ParameterServer(), but with "
            "local_feeds=True whole bags of its own",
        )


bag_ids.check(lambda xp, starts, ids: check_starts(xp, starts, ids.shape[0]))
bag_ids.ranges(lambda starts, ids: [(starts, ids.shape[0] + 1, "start", "rises")])


@public
def embedding_bag(table: Any, ids: Any, starts: Any, weights: Any = None) -> Node:
    """The sum of the rows of `table` in each bag, each times its weight: (v, ...) -> (bags, ...).

    The product of a sparse matrix, row by row, and a table: of logistic regression, where the table is (v,).

    >>> import hetu as ht
    >>> table = ht.constant([[1.0, 2.0], [3.0, 4.0]])
    >>> ht.evaluate(embedding_bag(table, [0, 1, 1], [0, 2, 2], [1.0, 0.5, 2.0])).tolist()
    [[2.5, 4.0], [0.0, 0.0], [6.0, 8.0]]
    """
    return _sums(_rows(table, ids, weights), starts, ids)


@public
def pair_products(table: Any, ids: Any, starts: Any, weights: Any = None) -> Node:
    """The sum of w_i w_j <table[i], table[j]> over all pairs of entries of each bag: (v, k) -> (bags,).

    What a factorization machine adds to a linear model, by `pairs_of_sums`.

    >>> import hetu as ht
    >>> table = ht.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> ht.evaluate(pair_products(table, [0, 1, 2], [0, 2], [1.0, 0.5, 2.0])).tolist()
    [5.5, 0.0]
    """
    table, _ = _vectors(table, 1)
    rows = _rows(table, ids, weights)
    return pairs_of_sums(_sums(rows, starts, ids), _sums(square(rows), starts, ids))


@public
def pairs_of_sums(sums: Any, squares: Any) -> Node:
    """The inner products of all pairs of vectors (..., k) -> (...), of the sum of vectors and that of their squares.

    S. Rendle, "Factorization Machines", ICDM 2010, eq. 5.

    >>> import hetu as ht
    >>> float(ht.evaluate(pairs_of_sums([9.0, 12.0], [35.0, 56.0])))  # of (1, 2), (3, 4) and (5, 6): 11 + 17 + 39
    67.0
    """
    return 0.5 * sum_(square(sums) - squares, axis=-1)


@public
def field_bags(table: Any, ids: Any, fields: Any, count: AtLeast1, starts: Any, weights: Any = None) -> Node:
    """As `embedding_bag`, apart for the entries of each of `count` fields: (v, ...) -> (bags, count, ...).

    `fields` (entries,) are from 0 to count - 1; ValueRangeError for others.

    >>> import hetu as ht
    >>> table = ht.constant([[1.0], [3.0]])
    >>> ht.evaluate(field_bags(table, [0, 1, 1], [1, 0, 1], 2, [0])).tolist()
    [[[3.0], [4.0]]]
    """
    return _sums(_rows(table, ids, weights), starts, ids, fields, count)


@public
def field_products(table: Any, ids: Any, fields: Any, count: AtLeast1, starts: Any, weights: Any = None) -> Node:
    """As `pair_products`, of the vectors that each id has for the field of the other: (v, count * k) -> (bags,).

    The vector of id i for field f stands in columns f k to (f + 1) k. Y. Juan et al., "Field-aware Factorization
    Machines for CTR Prediction", RecSys 2016, eq. 4; sums over fields stand in for those over pairs.

    >>> import hetu as ht
    >>> table = ht.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])  # 2 * 3 + 1 * 5 + 3 * 6
    >>> ht.evaluate(field_products(table, [0, 1, 2], [0, 1, 0], 2, [0])).tolist()
    [29.0]
    """
    table, width = _vectors(table, count)
    rows = _rows(table, ids, weights)
    whole = reshape(_sums(rows, starts, ids, fields, count), (-1, count, count, width))
    own = embedding(constant(value=np.repeat(np.eye(count, dtype=table.dtype), width, axis=1)), fields)
    alone = sum_(_sums(square(rows) * own, starts, ids), axis=1)
    return 0.5 * (sum_(whole * permute_dims(whole, (0, 2, 1, 3)), axis=(1, 2, 3)) - alone)


def _vectors(table: Any, count: int) -> tuple[Node, int]:
    """A table of `count` vectors a row, and their length."""
    node = as_node(table)
    if node.ndim != 2 or not isinstance(node.shape[1], int) or node.shape[1] % count:
        raise ArgumentError(f"got a table {node.type}, wanted (v, {count} k)", fix="give it k columns for each field")
    return node, node.shape[1] // count


def _rows(table: Any, ids: Any, weights: Any) -> Node:
    """The row of each entry, times its weight."""
    rows = embedding(table, ids)
    return rows if weights is None else rows * expand_dims(_column(weights, rows, "weights"), range(1, rows.ndim))


def _column(values: Any, rows: Node, what: str) -> Node:
    """The numbers of entries with these rows; ShapeError unless there is one for each."""
    column = as_node(values)
    if column.ndim != 1 or not compatible(column.shape[0], rows.shape[0]):
        raise ShapeError(
            f"{what} {column.type} for {rows.shape[0]} ids", fix=f"pass {what} (entries,), one for each id"
        )
    return column


def _sums(rows: Node, starts: Any, ids: Any, fields: Any = None, count: int = 1) -> Node:
    """The sum of the rows of each bag (bags, ...), or of each field of it (bags, count, ...)."""
    places = bag_ids(starts, ids)
    bags = places.inputs[0].shape[0]
    if fields is not None:
        places = places * count + within(_column(fields, rows, "fields"), size=count, what="field")
    zeros = full(shape=(bags * count, *rows.shape[1:]), fill_value=0.0, dtype=rows.dtype)
    sums = scatter_rows(zeros, places, rows)
    return sums if fields is None else reshape(sums, (-1, count, *rows.shape[1:]))
