"""Communication as operators: one per way a tensor gets from one layout to another.

They are made by the pass in `partition.py`, never by a model. Each carries the two layouts, the global shape and its
place in the one order of communication that all ranks share; the communicator itself arrives when a program is bound.
Ignored on purpose: what moves and how, see `redistribute.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..op import Op, op
from ..types import TensorType, as_dtype
from .collectives import Collective
from .comm import Comm
from .deduce import Grid
from .layout import DUP, PENDING, Layout
from .redistribute import Plan, plan

KINDS = (
    "all_reduce all_gather reduce_scatter all_to_all split_all_reduce split_reduce_scatter split_all_gather "
    "split_all_to_all send_recv batched slice nothing"
).split()


def _local_type(*_: TensorType, dst: Layout, shape: tuple[int, ...], rank: int, dtype: str, **__: Any) -> TensorType:
    """What this rank holds afterwards; a rank that only sends holds an empty token."""
    here = dst.pieces(shape).get(rank)
    return TensorType((0,) if here is None else here.shape, as_dtype(dtype))


def _forward(
    xp: ModuleType,
    *x: Any,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    rank: int,
    dtype: str,
    order: int,
    comm: Comm,
) -> Any:
    type_ = _local_type(dst=dst, shape=shape, rank=rank, dtype=dtype)
    out = np.empty(type_.shape, type_.dtype)
    for call in _bind(xp, out, *x, src=src, dst=dst, shape=shape, rank=rank, dtype=dtype, order=order, comm=comm):
        call()
    return out


def _bind(
    xp: ModuleType,
    out: Any,
    *x: Any,
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    rank: int,
    dtype: str,
    order: int,
    comm: Comm,
) -> list[Callable[[], Any]]:
    way = plan(src, dst, shape)
    target = out if rank in way.after else None
    if (reduction := _whole_reduction(way, comm.rank)) is not None and x[0].flags.c_contiguous:
        return [comm.split(reduction.group).bind_all_reduce(x[0], out, reduction.op)]
    if not x or x[0].flags.c_contiguous:
        return [partial(way.run, comm, x[0] if x else None, target)]
    packed = np.empty(x[0].shape, x[0].dtype)
    return [partial(np.copyto, packed, x[0]), partial(way.run, comm, packed, target)]


def _whole_reduction(way: Plan, rank: int) -> Collective | None:
    """The all-reduce of the whole array that this is for `rank`, if it is one: then nothing need be packed."""
    mine = [c for c in way.collectives if rank in c.group]
    if len(mine) != 1 or mine[0].kind != "all_reduce" or way.before[rank].box != mine[0].box:
        return None
    return mine[0]


def _make(kind: str) -> Op:
    made = op(
        _forward,
        name=kind,
        infer=_local_type,
        differentiable=False,
        communicates=True,
        inplace={0: (0,)} if kind == "all_reduce" else None,
    )
    made.bind(_bind)
    made.__doc__ = f"The change of layout that is called `{kind}`; see `hetu.dist.redistribute.Plan`."
    return made


RESHARD = {kind: _make(kind) for kind in KINDS}


def _shard_type(x: TensorType, *, layout: Layout) -> TensorType:
    layout.pieces(tuple(s if isinstance(s, int) else 1 for s in x.shape))  # AxisError for a dimension x lacks
    return x


@op(infer=_shard_type, dims="...->...")
def shard(xp: ModuleType, x: Any, *, layout: Layout) -> Any:
    """`x`, with a hint that it is to be laid out so; its gradient gets the same layout. Without a strategy it is `x`.

    Whatever collective leads there is inserted: all-gather to duplicates, all-reduce or reduce-scatter of a pending
    sum, all-to-all to another split. The gradient of a pending sum is complete, so a sum forward is nothing backward.

    >>> import hetu as ht
    >>> from hetu.dist import Mesh
    >>> x = ht.placeholder("x", (None, 8))
    >>> shard(x, layout=Mesh((2,), ("model",)).layout(model=1)).shape[1]
    8
    """
    return x


@shard.grad
def shard_grad(g: Any, y: Any, x: Any, *, layout: Layout) -> Any:
    roles = {axis: DUP if role in PENDING else role for axis, (role, _) in layout.axes().items()}
    return shard(g, layout=Grid.of(layout).layout(roles))


@shard.view
def shard_view(xp: ModuleType, x: Any, *, layout: Layout) -> Any:
    return x
