"""Collectives of many arrays at once, in two operators: one starts, and the other waits as late as its readers allow.

Packed, the arrays are blocks, one for each rank of the group. In `bucket.py` is what is joined; the operators get the
group's communicator when a program is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ...core.kernels import Call
from ...core.op import Role, op
from ...core.types import TensorType
from ..comm.comm import Comm, Handle
from ..layout.boxes import sizes
from ..layout.collectives import copy
from ..layout.tiling import Tiling

_under_way: WeakKeyDictionary[Comm, dict[int, Handle]] = WeakKeyDictionary()


def _room(pieces: Sequence[Tiling]) -> int:
    return sum(p.most for p in pieces)


def _copies(pairs: Iterator[tuple[Any, Any]], packs: bool) -> list[Call]:
    return [copy(block, array) if packs else copy(array, block) for block, array in pairs]


def _each(pieces: Sequence[Tiling], arrays: Sequence[Any], blocks: Any) -> Iterator[tuple[Any, Any]]:
    at = 0
    for p, array in zip(pieces, arrays, strict=True):
        yield from p.pairs(blocks[:, at : at + p.most], array)
        at += p.most


def _flat(arrays: Sequence[Any], rooms: Sequence[int], block: Any) -> Iterator[tuple[Any, Any]]:
    at = 0
    for array, room in zip(arrays, rooms, strict=True):
        yield block[at : at + array.size].reshape(array.shape), array
        at += room


def _begin(comm: Comm, order: int, start: Callable[[], Handle]) -> Callable[[], None]:
    handles = _under_way.setdefault(comm, {})

    def begin() -> None:
        handles[order] = start()

    return begin


def _finish(comm: Comm, order: int) -> Callable[[], None]:
    """Wait for the collective, unless this was done."""
    handles = _under_way.setdefault(comm, {})

    def finish() -> None:
        if (handle := handles.pop(order, None)) is not None:
            handle.wait()

    return finish


def _run(bound: Callable[..., list[Call]], out: Any, *xs: Any, **attrs: Any) -> Any:
    """The result of operators that only know how to be bound."""
    for call in bound(None, out, *xs, **attrs):
        call()
    return out


def _made(xp: ModuleType, types: Sequence[TensorType]) -> tuple[Any, ...]:
    return tuple(xp.empty(t.shape, t.dtype) for t in types)


# -- sums of whole arrays --------------------------------------------------------------------------------------


def _flat_type(*xs: TensorType, **_: Any) -> TensorType:
    return TensorType((sum(int(x.size) for x in xs),), xs[0].dtype)


@op(
    name="all_reduce_start",
    role=Role.COMMUNICATION,
    collective="all_reduce",
    infer=_flat_type,
    differentiable=False,
)
def reduce_start(xp: ModuleType, *xs: Any, group: tuple[int, ...], op: str, order: int, comm: Comm) -> Any:
    """Copy the arrays into one flat buffer and start to reduce it over `group`; `reduce_wait` finishes it."""
    out = xp.empty(sum(x.size for x in xs), xs[0].dtype)
    return _run(reduce_start_bind, out, *xs, group=group, op=op, order=order, comm=comm)


@reduce_start.bind
def reduce_start_bind(
    xp: ModuleType | None, out: Any, *xs: Any, group: tuple[int, ...], op: str, order: int, comm: Comm
) -> list[Call]:
    members = comm.split(group)
    packed = _copies(_flat(xs, [x.size for x in xs], out), True)
    return [*packed, _begin(comm, order, lambda: members.all_reduce_async(out, out, op))]


@op(
    name="all_reduce_wait",
    role=Role.COMMUNICATION,
    infer=lambda x, **_: x,
    differentiable=False,
    lazy=True,
    inplace={0: (0,)},
)
def reduce_wait(xp: ModuleType, x: Any, *, order: int, comm: Comm) -> Any:
    """The reduced buffer, as soon as the reduction that `reduce_start` began has ended."""
    return _run(arrived, xp.empty(x.shape, x.dtype), x, order=order, comm=comm)


def arrived(xp: ModuleType | None, out: Any, x: Any, *held: Any, order: int, comm: Comm) -> list[Call]:
    """Wait for what arrives in `x`; `held` is what the collective reads until then."""
    finish = _finish(comm, order)
    return [finish] if np.shares_memory(out, x) else [finish, copy(out, x)]


reduce_wait.bind(arrived)


# -- sums of which each rank gets a part -----------------------------------------------------------------------


def _scatter_types(*xs: TensorType, pieces: Sequence[Tiling], **_: Any) -> tuple[TensorType, TensorType]:
    """What is sent, a block for each rank, and this rank's block of the sum."""
    ranks, room = len(pieces[0].boxes), _room(pieces)
    return TensorType((ranks, room), xs[0].dtype), TensorType((room,), xs[0].dtype)


@op(
    name="reduce_scatter_start",
    role=Role.COMMUNICATION,
    collective="reduce_scatter",
    infer=_scatter_types,
    differentiable=False,
)
def scatter_start(
    xp: ModuleType,
    *xs: Any,
    group: tuple[int, ...],
    op: str,
    order: int,
    pieces: tuple[Tiling, ...],
    ends: int | None = None,
    comm: Comm,
) -> Any:
    """Copy the pieces of the arrays into a block for each rank of `group`, and start to reduce and scatter them.

    Before, the one that has the order `ends` is waited for. What it sends comes behind the arrays: it is needed so
    long.
    """
    out = _made(xp, _scatter_types(*(TensorType(x.shape, x.dtype) for x in xs), pieces=pieces))
    return _run(scatter_start_bind, out, *xs, group=group, op=op, order=order, pieces=pieces, ends=ends, comm=comm)


@scatter_start.bind
def scatter_start_bind(
    xp: ModuleType | None,
    out: Any,
    *xs: Any,
    group: tuple[int, ...],
    op: str,
    order: int,
    pieces: tuple[Tiling, ...],
    ends: int | None = None,
    comm: Comm,
) -> list[Call]:
    (blocks, mine), members = out, comm.split(group)
    before: list[Call] = [] if ends is None else [_finish(comm, ends)]
    if any(p.tile is None for p in pieces):
        before.append(partial(blocks.fill, 0))  # what pads is added too
    packed = _copies(_each(pieces, xs[: len(pieces)], blocks), True)
    return [*before, *packed, _begin(comm, order, lambda: members.reduce_scatter_async(blocks, mine, op))]


@op(
    name="reduce_scatter_wait",
    role=Role.COMMUNICATION,
    infer=lambda x, *_, **attrs: x,
    differentiable=False,
    lazy=True,
    inplace={0: (0,)},
)
def scatter_wait(xp: ModuleType, mine: Any, *held: Any, order: int, comm: Comm) -> Any:
    """This rank's block of the sum, as soon as what `scatter_start` began has ended."""
    return _run(arrived, xp.empty(mine.shape, mine.dtype), mine, *held, order=order, comm=comm)


scatter_wait.bind(arrived)


# -- whole arrays of the parts of all ranks --------------------------------------------------------------------


def _gather_types(*xs: TensorType, pieces: Sequence[Tiling], **_: Any) -> tuple[TensorType, TensorType]:
    """This rank's block, and the blocks of all ranks."""
    ranks, room = len(pieces[0].boxes), _room(pieces)
    return TensorType((room,), xs[0].dtype), TensorType((ranks, room), xs[0].dtype)


@op(
    name="all_gather_start",
    role=Role.COMMUNICATION,
    collective="all_gather",
    infer=_gather_types,
    differentiable=False,
)
def gather_start(
    xp: ModuleType, *xs: Any, group: tuple[int, ...], order: int, pieces: tuple[Tiling, ...], comm: Comm
) -> Any:
    """Copy this rank's pieces of arrays into one block, and start to gather those of `group`."""
    out = _made(xp, _gather_types(*(TensorType(x.shape, x.dtype) for x in xs), pieces=pieces))
    return _run(gather_start_bind, out, *xs, group=group, order=order, pieces=pieces, comm=comm)


@gather_start.bind
def gather_start_bind(
    xp: ModuleType | None,
    out: Any,
    *xs: Any,
    group: tuple[int, ...],
    order: int,
    pieces: tuple[Tiling, ...],
    comm: Comm,
) -> list[Call]:
    (mine, blocks), members = out, comm.split(group)
    packed = _copies(_flat(xs, [p.most for p in pieces], mine), True)
    return [*packed, _begin(comm, order, lambda: members.all_gather_async(mine, blocks))]


def _whole_types(blocks: TensorType, *_: TensorType, pieces: Sequence[Tiling], **__: Any) -> tuple[TensorType, ...]:
    return tuple(TensorType(sizes(p.box), blocks.dtype) for p in pieces)


@op(
    name="all_gather_wait",
    role=Role.COMMUNICATION,
    infer=_whole_types,
    differentiable=False,
    lazy=True,
)
def gather_wait(
    xp: ModuleType, blocks: Any, mine: Any, *, order: int, pieces: tuple[Tiling, ...], comm: Comm
) -> tuple[Any, ...]:
    """The whole arrays, as soon as what `gather_start` began has ended."""
    out = _made(xp, _whole_types(TensorType(blocks.shape, blocks.dtype), pieces=pieces))
    _run(gather_wait_bind, out, blocks, mine, order=order, pieces=pieces, comm=comm)
    return out


@gather_wait.bind
def gather_wait_bind(
    xp: ModuleType | None, out: Any, blocks: Any, mine: Any, *, order: int, pieces: tuple[Tiling, ...], comm: Comm
) -> list[Call]:
    return [_finish(comm, order), *_copies(_each(pieces, out, blocks), False)]
