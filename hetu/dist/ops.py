"""Communication as operators: one per way a tensor gets from one layout to another.

`cut/partition.py` makes them, with the global shape and their place in the one order of communication that all ranks
share; a user makes them by hand (`by_hand.py`) from this rank's part alone. They get the communicator when a program is
bound.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from ..core.backend import Scratch
from ..core.errors import AxisError, ShapeError
from ..core.graph import Node
from ..core.kernels import Call
from ..core.op import Op, Role, op
from ..core.types import Shape, TensorType, as_dtype
from .comm.hierarchical import Hosts
from .comm.world import world
from .layout.collectives import Collective
from .layout.deduce import Grid
from .layout.layout import DUP, PENDING, SUM, Layout
from .layout.redistribute import KINDS, Redistribution, plan

ADJOINT = {  # kind -> that of its gradient, which goes the other way with sums and duplicates exchanged
    "all_reduce": "all_reduce", "all_gather": "reduce_scatter", "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all", "broadcast": "reduce", "reduce": "broadcast", "send_recv": "send_recv",
}  # fmt: skip


def communicates(
    name: str, infer: Callable[..., Any], collective: str = "", **rules: Any
) -> Callable[[Callable[..., list[Call]]], Op[..., Any]]:
    """Makes an operator of what binds it, `f(xp, out, *arrays, **attrs)`: that is all it knows, also to run once."""

    def made(bind: Callable[..., list[Call]]) -> Op[..., Any]:
        def forward(xp: ModuleType, *xs: Any, **attrs: Any) -> Any:
            types = infer(*(TensorType(x.shape, x.dtype) for x in xs), **attrs)
            if attrs.get("comm") is None:
                attrs["comm"] = world()
            several = isinstance(types, tuple)
            made = [xp.empty(t.shape, t.dtype) for t in (types if several else (types,))]
            out = tuple(made) if several else made[0]
            for call in bind(xp, out, *xs, **attrs, **({"scratch": Scratch()} if rules.get("scratch") else {})):
                call()
            return out

        given = inspect.signature(bind).parameters.values()
        forward.__doc__, forward.__module__ = bind.__doc__, bind.__module__
        vars(forward)["__signature__"] = inspect.Signature([p for p in given if p.name not in ("out", "scratch")])
        asked: dict[str, Any] = {"name": name, "infer": infer, "collective": collective, "differentiable": False}
        found: Op[..., Any] = op(role=Role.COMMUNICATION, **asked | rules)(forward)
        found.bind(bind)
        return found

    return made


def _local_type(
    *xs: TensorType, src: Layout, dst: Layout, shape: Shape | None = None, rank: int = 0, dtype: str = "", **_: Any
) -> TensorType:
    """What this rank holds afterward; a rank that only sends holds an empty array, as a token."""
    if shape is None:
        return TensorType(_even_shape(xs[0].shape, src, dst), xs[0].dtype)
    here = dst.pieces(shape).get(rank)
    return TensorType((0,) if here is None else here.shape, as_dtype(dtype))


def _even_shape(local: Shape, src: Layout, dst: Layout) -> Shape:
    """The local shape in `dst` from that in `src`, where all ranks have parts of one size."""
    if (most := max(role for layout in (src, dst) for role, _ in layout.axes().values())) >= len(local):
        raise AxisError(f"axis {most} of an array of {len(local)} axes", fix="number the axes from 0")
    whole, parts = _whole_shape(local, src), _degrees(dst, len(local))
    for axis, (size, n) in enumerate(zip(whole, parts)):
        if isinstance(size, int) and size % n:
            raise ShapeError(f"axis {axis} of size {size} does not divide into {n} parts", fix="make it a multiple")
    return tuple(size // n for size, n in zip(whole, parts))


def _whole_shape(local: Shape, layout: Layout) -> Shape:
    return tuple(size * n for size, n in zip(local, _degrees(layout, len(local))))


def _degrees(layout: Layout, ndim: int) -> list[int]:
    """Into how many parts each axis is split."""
    return [math.prod(n for role, n in layout.parts[0].axes if role == axis) for axis in range(ndim)]


def _bind(
    xp: ModuleType,
    out: Any,
    *x: Any,
    src: Layout,
    dst: Layout,
    shape: Shape | None = None,
    rank: int = 0,
    dtype: str = "",
    order: int | None = None,
    hosts: Hosts = (),
    comm: Any = None,
    scratch: Scratch | None = None,
) -> list[Call]:
    if comm is None and shape is None:
        return []  # a plan does not know the rank of what is written by hand
    comm = _Counted(rank) if comm is None else comm
    scratch = scratch if scratch is not None and scratch.block is not None else None
    way = plan(src, dst, _whole_shape(x[0].shape, src) if shape is None else shape).over(hosts)
    given = x[0] if comm.rank in way.before else None
    target = out if comm.rank in way.after else None
    calls = [partial(out.fill, 0)] if target is None and out.size else []  # by hand, others than targets get zeros
    if given is not None and not given.flags.c_contiguous:
        packed = (scratch or xp).empty(given.shape, given.dtype)
        calls.append(partial(np.copyto, packed, given))
        given = packed
    # Groups are made here and not in the first step, in which ranks may come to theirs in other orders.
    # What is written by hand a rank binds alone when it is fed a new size.
    return [*calls, *way.bind(comm, given, target, order is not None, scratch)]


class _Counted:
    """In the place of a communicator where a plan counts what is packed: nothing is bound."""

    world_size, widens = sys.maxsize, True

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def split(self, group: Sequence[int]) -> _Counted:
        return _Counted(group.index(self.rank))

    def bind(self, *call: Any) -> Callable[[], None]:
        return lambda: None

    bind_exchange = run = bind


def whole_reduction(way: Redistribution, rank: int) -> Collective | None:
    """The all-reduce of the whole array of `rank`, if this is all that its group takes part in: nothing is packed.

    What one member does, such as to join it with others, all must do, so the answer is one for a whole group.
    """
    mine = next((c for c in way.collectives if rank in c.group), None)
    if mine is None or mine.kind != "all_reduce":
        return None
    others = [c for c in way.collectives if c is not mine and not set(c.group).isdisjoint(mine.group)]
    return mine if not others and all(way.before[r].box == mine.box for r in mine.group) else None


def _make(kind: str) -> Op[..., Node]:
    inplace = {0: (0,)} if kind == "all_reduce" else None
    rules: dict[str, Any] = {"differentiable": kind in ADJOINT, "inplace": inplace, "scratch": True}
    made: Op[..., Node] = communicates(kind, _local_type, kind, **rules)(_bind)
    made.__doc__ = f"The change of layout called `{kind}`; see `hetu.dist.layout.redistribute.Redistribution`."

    @made.grad
    def gradient(g: Any, y: Any, x: Any, *, src: Layout, dst: Layout, **_: Any) -> Any:
        if src.pending not in (None, SUM):
            return NotImplemented
        return RESHARD[ADJOINT[kind]].make((g,), {"src": _transposed(dst), "dst": _transposed(src)})

    return made


def _transposed(layout: Layout) -> Layout:
    """The transpose of a linear map: what was copied is summed, and what was summed is copied."""
    swap = {DUP: SUM, SUM: DUP}
    return Grid.of(layout).layout({axis: swap.get(role, role) for axis, (role, _) in layout.axes().items()})


RESHARD = {kind: _make(kind) for kind in (*KINDS, "broadcast", "reduce")}


def _shard_type(x: TensorType, *, layout: Layout) -> TensorType:
    layout.pieces(tuple(s if isinstance(s, int) else 1 for s in x.shape))  # AxisError for a dimension x lacks
    return x


@op(role=Role.HINT, infer=_shard_type, dims="...->...")
def shard(xp: ModuleType, x: Any, *, layout: Layout) -> Any:
    """`x`, with a hint to lay it out as `layout`; its gradient gets the same layout. Without a strategy it is `x`.

    A strategy inserts the collective that leads there: all-gather to duplicates, all-reduce or reduce-scatter of a
    pending sum, all-to-all to another split. The gradient of a pending sum is complete: a sum in the forward pass
    communicates nothing in the backward pass.

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
