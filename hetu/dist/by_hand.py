"""Collectives that a user writes into a graph of which every rank has its own copy (one program, many data).

Without a strategy `Executor(..., comm=comm)` runs the graph as it is: each rank feeds its own data and keeps its own
variables, and only these functions connect the ranks. All ranks build the same graph, so all communicate in the same
order. **Gradients** are those of the sum of what all ranks differentiate: each function is linear in the values of all
ranks together, and its gradient is the transposed function. So the gradient of an all_reduce is an all_reduce. A loss
that all ranks share and differentiate counts once per rank: divide by their number. Left out: unequal parts, which a
strategy has, the gradients of maxima and minima, and one code on all ranks where one of them cannot compile what comes
later than the start: it warns and goes on by NumPy, whose last digits may be others.

With them one large graph is divided over a grid of ranks, for graph networks that see all nodes at once. Ranks stand in
P / c rows of c columns. Row i keeps block i of the nodes' features, each of its ranks the same, and of the graph's
matrix the entries of these nodes, divided by columns among its ranks. To gather, each column of ranks passes round the
blocks of its part, one after the other, and the rows add up what their ranks have made: the more replicas c, the fewer
blocks each rank has to receive. A. Tripathy, K. Yelick and A. Buluc, "Reducing Communication in Graph Neural Network
Training", SC 2020, section 4.2 (1.5D); so does the original Hetu. Left out: numbers of nodes that the rows do not
divide; add nodes without edges.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ArgumentError, DataError, ShapeError, did_you_mean, public
from ..core.graph import OPS, Node
from ..core.leaf import placeholder
from ..core.op import as_node
from ..ops import sparse_matmul
from .comm.world import world
from .layout.layout import DUP, MAX, MIN, ROLES, SUM, Layout, Shard
from .ops import RESHARD

GroupRanks = Sequence[int] | None


def all_reduce(x: Node, op: str = "sum", ranks: GroupRanks = None) -> Node:
    """The sum ("max", "min") of the `x` of all `ranks`, on each of them.

    In all these functions, `ranks` are those of the executor's communicator, by default all of the job. Other ranks
    get zeros.

    >>> import hetu as ht
    >>> from hetu.dist import run_ranks
    >>> run_ranks(3, lambda comm: float(ht.evaluate(all_reduce(ht.constant(float(comm.rank))))))
    [3.0, 3.0, 3.0]
    """
    return _made("all_reduce", x, _over(ranks, _pending(op)), _over(ranks, DUP))


def all_gather(x: Node, axis: int = 0, ranks: GroupRanks = None) -> Node:
    """The `x` of all `ranks`, joined along `axis` in their order, on each of them."""
    return _made("all_gather", x, _over(ranks, _axis(axis, x)), _over(ranks, DUP))


def reduce_scatter(x: Node, axis: int = 0, op: str = "sum", ranks: GroupRanks = None) -> Node:
    """The sum of the `x` of all `ranks`; each keeps its part along `axis`. ShapeError if it does not divide."""
    return _made("reduce_scatter", x, _over(ranks, _pending(op)), _over(ranks, _axis(axis, x)))


def all_to_all(x: Node, split_axis: int, concat_axis: int, ranks: GroupRanks = None) -> Node:
    """Part j of `x` along `split_axis` goes to the j-th of `ranks`; what arrives is joined along `concat_axis`."""
    split, concat = _axis(split_axis, x), _axis(concat_axis, x)
    if split == concat:
        raise ArgumentError(f"all_to_all splits and joins axis {split}", fix="reshape x to have an axis for each")
    return _made("all_to_all", x, _over(ranks, concat), _over(ranks, split))


def broadcast(x: Node, root: int = 0, ranks: GroupRanks = None) -> Node:
    """The `x` of rank `root`, on all `ranks`."""
    return _made("broadcast", x, Layout((Shard((root,)),)), _over(ranks, DUP))


def reduce(x: Node, root: int = 0, op: str = "sum", ranks: GroupRanks = None) -> Node:
    """The sum of the `x` of all `ranks`, on rank `root`; zeros on the others."""
    return _made("reduce", x, _over(ranks, _pending(op)), Layout((Shard((root,)),)))


def send_recv(x: Node, pairs: Sequence[tuple[int, int]]) -> Node:
    """The `x` of the source, on the target, for each pair (source, target); zeros on all other ranks.

    A rank sends to at most one other and receives from at most one other. All ranks make the same node.

    >>> import hetu as ht
    >>> from hetu.dist import run_ranks
    >>> ring = [(0, 1), (1, 2), (2, 0)]
    >>> run_ranks(3, lambda comm: float(ht.evaluate(send_recv(ht.constant(float(comm.rank)), ring))))
    [2.0, 0.0, 1.0]
    """
    if not x.ndim:
        return OPS["reshape"](send_recv(OPS["reshape"](x, shape=(1,)), pairs), shape=())
    sources, targets = zip(*pairs, strict=True) if pairs else ((), ())
    return _made("send_recv", x, _over(sources, 0), _over(targets, 0))


def _made(kind: str, x: Node, src: Layout, dst: Layout) -> Node:
    return RESHARD[kind].make((as_node(x),), {"src": src, "dst": dst})


def _over(ranks: GroupRanks, role: int) -> Layout:
    """A layout of `ranks` in one row, along which an array has this role."""
    ranks = world().ranks if ranks is None else tuple(ranks)
    if not ranks:
        raise ArgumentError("a collective of no ranks", fix="name ranks, or leave ranks= out for all of the job")
    return Layout((Shard(ranks, ((role, len(ranks)),)),))


def _pending(op: str) -> int:
    if ROLES.get(op) not in (SUM, MAX, MIN):
        raise ArgumentError(f"there is no reduction {op!r}", fix=did_you_mean(op, ["sum", "max", "min"]))
    return ROLES[op]


def _axis(axis: int, x: Node) -> int:
    return axis + x.ndim if axis < 0 else axis


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
                f"{nodes} nodes in {self.rows} rows of ranks", fix=f"add {-nodes % self.rows} nodes without edges"
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
