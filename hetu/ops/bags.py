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
from ..core.types import TensorType, numbers
from ..ranges import AtLeast1
from .creation import full
from .elementwise import square
from .index import embedding, in_range, require_indices, scatter_rows
from .linalg import permute_dims
from .reduction import sum as sum_
from .shape import expand_dims, reshape

__all__ = ["bag_ids", "embedding_bag", "field_bags", "field_products", "pair_products"]


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


@bag_ids.check
def bag_ids_check(xp: ModuleType, starts: Any, ids: Any) -> None:
    ends = xp.concat([starts, xp.asarray([ids.shape[0]], dtype=starts.dtype)])
    wrong = xp.nonzero((ends[1:] < ends[:-1]) | ((ends[:-1] != 0) & (xp.arange(starts.shape[0]) == 0)))[0]
    if wrong.shape[0] or int(ends[0]) != 0:
        at = int(wrong[0]) if wrong.shape[0] else 0
        said = f"bag {at} begins at {int(ends[at])}" if starts.shape[0] else "there are no bags"
        raise ValueRangeError(
            f"{said}, of {ids.shape[0]} entries",
            fix="let starts begin with 0 and never fall, such as np.cumsum(lengths) - lengths",
        )


@op(infer=lambda bags, fields, *, count: numbers(bags, fields), dims="e,e->e", differentiable=False)
def field_bag_ids(xp: ModuleType, bags: Any, fields: Any, *, count: AtLeast1) -> Any:
    """The number of the bag of each entry, where each bag is `count` of them, one for each field.

    >>> import hetu as ht
    >>> ht.evaluate(field_bag_ids([0, 2, 2], [1, 0, 1], count=2)).tolist()
    [1, 4, 5]
    """
    return bags * count + fields


in_range(field_bag_ids, lambda bags, fields, *, count: [(fields, count, "field")])


@public
def embedding_bag(table: Any, ids: Any, starts: Any, weights: Any = None) -> Node:
    """The sum of the rows of `table` in each bag, each times its weight: (v, ...) -> (bags, ...).

    The product of a sparse matrix, row by row, and a table: of logistic regression, where the table is (v,).

    >>> import hetu as ht
    >>> table = ht.constant([[1.0, 2.0], [3.0, 4.0]])
    >>> ht.evaluate(embedding_bag(table, [0, 1, 1], [0, 2, 2], [1.0, 0.5, 2.0])).tolist()
    [[2.5, 4.0], [0.0, 0.0], [6.0, 8.0]]
    """
    bags = bag_ids(starts, ids)
    return _sums(_rows(table, ids, weights), bags, bags.inputs[0].shape[0])


@public
def pair_products(table: Any, ids: Any, starts: Any, weights: Any = None) -> Node:
    """The sum of w_i w_j <table[i], table[j]> over all pairs of entries of each bag: (v, k) -> (bags,).

    What a factorization machine adds to a linear model. S. Rendle, "Factorization Machines", ICDM 2010, eq. 5.

    >>> import hetu as ht
    >>> table = ht.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> ht.evaluate(pair_products(table, [0, 1, 2], [0, 2], [1.0, 0.5, 2.0])).tolist()
    [5.5, 0.0]
    """
    bags, rows = bag_ids(starts, ids), _rows(table, ids, weights)
    count = bags.inputs[0].shape[0]
    return 0.5 * sum_(square(_sums(rows, bags, count)) - _sums(square(rows), bags, count), axis=1)


@public
def field_bags(table: Any, ids: Any, fields: Any, count: AtLeast1, starts: Any, weights: Any = None) -> Node:
    """As `embedding_bag`, apart for the entries of each of `count` fields: (v, ...) -> (bags, count, ...).

    `fields` (entries,) are from 0 to count - 1; ValueRangeError for others.

    >>> import hetu as ht
    >>> table = ht.constant([[1.0], [3.0]])
    >>> ht.evaluate(field_bags(table, [0, 1, 1], [1, 0, 1], 2, [0])).tolist()
    [[[3.0], [4.0]]]
    """
    return _field_sums(_rows(table, ids, weights), bag_ids(starts, ids), fields, count)


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
    table = as_node(table)
    if table.ndim != 2 or not isinstance(table.shape[1], int) or table.shape[1] % count:
        raise ArgumentError(f"a table {table.type} for {count} fields", fix="give it count * k columns")
    width = table.shape[1] // count
    bags, rows = bag_ids(starts, ids), _rows(table, ids, weights)
    whole = reshape(_field_sums(rows, bags, fields, count), (-1, count, count, width))
    own = embedding(constant(value=np.repeat(np.eye(count, dtype=table.dtype), width, axis=1)), fields)
    alone = sum_(_sums(square(rows) * own, bags, bags.inputs[0].shape[0]), axis=1)
    return 0.5 * (sum_(whole * permute_dims(whole, (0, 2, 1, 3)), axis=(1, 2, 3)) - alone)


def _rows(table: Any, ids: Any, weights: Any) -> Node:
    """The row of each entry, times its weight."""
    rows = embedding(table, ids)
    if weights is None:
        return rows
    return rows * (expand_dims(weights, axis=tuple(range(1, rows.ndim))) if rows.ndim > 1 else weights)


def _field_sums(rows: Node, bags: Node, fields: Any, count: int) -> Node:
    sums = _sums(rows, field_bag_ids(bags, fields, count=count), bags.inputs[0].shape[0] * count)
    return reshape(sums, (-1, count, *rows.shape[1:]))


def _sums(rows: Node, places: Node, size: Any) -> Node:
    return scatter_rows(full(shape=(size, *rows.shape[1:]), fill_value=0.0, dtype=rows.dtype), places, rows)
