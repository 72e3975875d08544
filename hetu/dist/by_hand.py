"""Collectives that a user writes into a graph of which every rank has its own copy (one program, many data).

Without a strategy `Executor(..., comm=comm)` runs the graph as it is: each rank feeds its own data and keeps its own
variables, and only these functions connect the ranks. All ranks build the same graph, so all communicate in the same
order. **Gradients** are those of the sum of what all ranks differentiate: each function is linear in the values of all
ranks together, and its gradient is the transposed function. So the gradient of an all_reduce is an all_reduce. A loss
that all ranks share and differentiate counts once per rank: divide by their number. Left out: unequal parts, which a
strategy has, the gradients of maxima and minima, and one code on all ranks where one of them cannot compile what comes
later than the start: it warns and goes on by NumPy, whose last digits may be others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import ArgumentError, did_you_mean
from ..core.graph import OPS, Node
from ..core.op import as_node
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
