"""Graphs as the sparse matrices that layers of graph networks gather by, and samples of neighbors for large ones.

Left out: weights of edges.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..core.backend import array_from
from ..core.errors import ArgumentError, DataError, did_you_mean, public

Ids = NDArray[np.int64]
Normalized = Literal["symmetric", "mean", "none"]
KINDS = ("symmetric", "mean", "none")


class Entries(NamedTuple):
    """The entries of a sparse matrix: row and column int64 (entries,), sorted by row, and their values float32."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: NDArray[np.float32]


@public
def adjacency(edges: ArrayLike, nodes: int, normalized: Normalized = "symmetric") -> Entries:
    """The matrix by which each of `nodes` nodes gathers from its neighbors, of undirected `edges` (m, 2).

    "symmetric": every node is its own neighbor, too, and an entry is 1 / sqrt(degree of its row x degree of its column)
    (T. Kipf and M. Welling, 2017). "mean": 1 / degree of the row, so that rows of nodes with neighbors add up to 1.
    "none": 1, every node its own neighbor, too. An edge that is given twice counts twice. DataError for a node that is
    not there.

    >>> adjacency([[0, 1], [1, 2]], 3, "mean").values.tolist()
    [1.0, 0.5, 0.5, 1.0]
    """
    if normalized not in KINDS:
        raise ArgumentError(f"normalized={normalized!r}", fix=did_you_mean(str(normalized), KINDS))
    pairs = checked_edges(edges, nodes)
    own = np.arange(0 if normalized == "mean" else nodes)
    rows = np.concatenate([pairs[:, 0], pairs[:, 1], own])
    columns = np.concatenate([pairs[:, 1], pairs[:, 0], own])
    order = np.lexsort((columns, rows))
    rows, columns = rows[order], columns[order]
    degrees = np.bincount(rows, minlength=nodes)
    products = {"symmetric": degrees[rows] * degrees[columns], "mean": degrees[rows] ** 2, "none": np.ones(len(rows))}
    values = 1 / np.sqrt(products[normalized])
    return Entries(rows, columns, values.astype(np.float32))


def checked_edges(edges: ArrayLike, nodes: int) -> NDArray[np.int64]:
    """Edges as int64 (m, 2); DataError unless they are pairs of nodes."""
    pairs = array_from(edges)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
        raise DataError(f"edges are {pairs.dtype}{list(pairs.shape)}", fix="pass pairs of node numbers, (m, 2)")
    if pairs.size and not 0 <= pairs.min() <= pairs.max() < nodes:
        raise DataError(f"edges between nodes {pairs.min()} to {pairs.max()} of {nodes}", fix="count nodes from 0")
    return pairs.astype(np.int64)
