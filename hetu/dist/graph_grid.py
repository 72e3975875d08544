"""One graph over a grid of ranks, for graph networks that see all nodes at once: neither nodes nor edges fit one rank.

Ranks stand in P / c rows of c columns. Row i keeps block i of the nodes' features, each of its ranks the same, and of
the graph's matrix the entries of these nodes, divided by columns among its ranks. To gather, each column of ranks
passes round the blocks of its part, one after the other, and the rows add up what their ranks have made: the more
replicas c, the fewer blocks each rank has to receive. A. Tripathy, K. Yelick and A. Buluc, "Reducing Communication in
Graph Neural Network Training", SC 2020, section 4.2 (1.5D); so does the original Hetu. Left out: numbers of nodes that
the rows do not divide; add nodes without edges.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ArgumentError, DataError, ShapeError, public
from ..core.graph import Node
from ..core.leaf import placeholder
from ..ops import sparse_matmul
from .by_hand import all_reduce, broadcast

Array = NDArray[Any]


class GraphGrid:
    """What `rank` of `ranks` keeps of a graph of `nodes`, and how it gathers, with `replicas` (c) of every block.

    Call it in the place of a graph: `nn.GraphConv(...)(x, grid)` for the features x (nodes / rows, f) of this rank's
    block, in a graph that every rank builds alike and runs with `Executor(comm=comm)`. A rank receives nodes f / c
    numbers, and sums nodes f c / ranks of them over c ranks.

    >>> import hetu as ht
    >>> from hetu.dist import run_ranks
    >>> edges, x = [[0, 1], [1, 2], [2, 3]], np.arange(8.0, dtype="float32").reshape(4, 2)
    >>> def run(comm):
    ...     grid = GraphGrid(comm.rank, comm.world_size, 4, replicas=2)
    ...     y = grid(ht.constant(x[grid.block]))
    ...     return ht.Executor([y], comm=comm).run(grid.feed(ht.data.adjacency(edges, 4, "none")))[0].tolist()
    >>> run_ranks(4, run)[::2]
    [[[2.0, 4.0], [6.0, 9.0]], [[12.0, 15.0], [10.0, 12.0]]]
    """

    def __init__(self, rank: int, ranks: int, nodes: int, *, replicas: int = 1) -> None:
        if replicas < 1 or ranks % (replicas * replicas):
            raise ArgumentError(
                f"{replicas} replicas on {ranks} ranks",
                fix="the square of the replicas divides the ranks: 1 on any number, 2 on 4, 8, 12 ...",
            )
        self.rows, self.replicas = ranks // replicas, replicas
        if nodes % self.rows:
            raise ShapeError(
                f"{nodes} nodes in {self.rows} rows of ranks",
                fix=f"add {-nodes % self.rows} nodes without edges",
            )
        self.row, self.column = divmod(rank, replicas)
        self.nodes, self.size = nodes, nodes // self.rows
        self.block = slice(self.row * self.size, (self.row + 1) * self.size)
        stages = self.rows // replicas
        self.stages = range(self.column * stages, (self.column + 1) * stages)  # the blocks that its column passes round
        self.entries: list[Any] = [
            tuple(placeholder(f"{name}_{k}", (None,), kind) for name, kind in KINDS) for k in range(len(self.stages))
        ]

    @public
    def feed(self, graph: tuple[Array, Array, Array]) -> dict[Node, Array]:
        """What this rank is fed of a graph's entries (rows, columns, values); DataError for others."""
        rows, columns, values = map(np.asarray, graph)
        for name, ids in (("rows", rows), ("columns", columns)):
            if ids.size and not 0 <= ids.min() <= ids.max() < self.nodes:
                raise DataError(f"{name} {ids.min()} to {ids.max()} of {self.nodes} nodes", fix="count nodes from 0")
        fed = dict[Node, Array]()
        for entries, stage in zip(self.entries, self.stages):
            mine = (rows // self.size == self.row) & (columns // self.size == stage)
            parts = rows[mine] - self.block.start, columns[mine] - stage * self.size, values[mine]
            fed |= dict(zip(entries, parts))
        return fed

    @public
    def __call__(self, x: Node) -> Node:
        """The block of A x of this rank's row."""
        column = [row * self.replicas + self.column for row in range(self.rows)]
        passed = [broadcast(x, column[stage], column) if self.rows > 1 else x for stage in self.stages]
        each = zip(self.entries, passed)
        made = [sparse_matmul(rows, columns, values, block, size=self.size) for (rows, columns, values), block in each]
        total: Node = functools.reduce(operator.add, made)
        if self.replicas == 1:
            return total
        return all_reduce(total, ranks=[self.row * self.replicas + column for column in range(self.replicas)])


KINDS = (("rows", "int64"), ("columns", "int64"), ("values", "float32"))
