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
from ...core.types import TensorType
from ..comm.comm import Comm, Handle
from ..layout.boxes import sizes
from ..layout.collectives import copy
from ..layout.tiling import Tiling
from ..ops import communicates

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


# -- sums of whole arrays --------------------------------------------------------------------------------------


def _flat_type(*xs: TensorType, **_: Any) -> TensorType:
    return TensorType((sum(int(x.size) for x in xs),), xs[0].dtype)


@communicates("all_reduce_start", _flat_type, "all_reduce")
def reduce_start(
    xp: ModuleType, out: Any, *xs: Any, group: tuple[int, ...], op: str, order: int, comm: Comm
) -> list[Call]:
    """Copy the arrays into one flat buffer and start to reduce it over `group`; `reduce_wait` finishes it."""
    members = comm.split(group)
    packed = _copies(_flat(xs, [x.size for x in xs], out), True)
    return [*packed, _begin(comm, order, lambda: members.all_reduce_async(out, out, op))]


def _arrived(xp: ModuleType, out: Any, x: Any, *held: Any, order: int, comm: Comm) -> list[Call]:
    """What a start has begun to bring into `x`, as soon as it is there; `held` is what the collective reads until then.

    The reduced buffer, or this rank's block of the sum.
    """
    finish = _finish(comm, order)
    return [finish] if np.shares_memory(out, x) else [finish, copy(out, x)]


reduce_wait, scatter_wait = (
    communicates(f"{kind}_wait", lambda x, *_, **attrs: x, lazy=True, inplace={0: (0,)})(_arrived)
    for kind in ("all_reduce", "reduce_scatter")
)


# -- sums of which each rank gets a part -----------------------------------------------------------------------


def _scatter_types(*xs: TensorType, pieces: Sequence[Tiling], **_: Any) -> tuple[TensorType, TensorType]:
    """What is sent, a block for each rank, and this rank's block of the sum."""
    ranks, room = len(pieces[0].boxes), _room(pieces)
    return TensorType((ranks, room), xs[0].dtype), TensorType((room,), xs[0].dtype)


@communicates("reduce_scatter_start", _scatter_types, "reduce_scatter")
def scatter_start(
    xp: ModuleType,
    out: Any,
    *xs: Any,
    group: tuple[int, ...],
    op: str,
    order: int,
    pieces: tuple[Tiling, ...],
    ends: int | None = None,
    comm: Comm,
) -> list[Call]:
    """Copy the pieces of the arrays into a block for each rank of `group`, and start to reduce and scatter them.

    Before, the one that has the order `ends` is waited for. What it sends comes behind the arrays: it is needed so
    long.
    """
    (blocks, mine), members = out, comm.split(group)
    before: list[Call] = [] if ends is None else [_finish(comm, ends)]
    if any(p.tile is None for p in pieces):
        before.append(partial(blocks.fill, 0))  # what pads is added too
    packed = _copies(_each(pieces, xs[: len(pieces)], blocks), True)
    return [*before, *packed, _begin(comm, order, lambda: members.reduce_scatter_async(blocks, mine, op))]


# -- whole arrays of the parts of all ranks --------------------------------------------------------------------


def _gather_types(*xs: TensorType, pieces: Sequence[Tiling], **_: Any) -> tuple[TensorType, TensorType]:
    """This rank's block, and the blocks of all ranks."""
    blocks, mine = _scatter_types(*xs, pieces=pieces)
    return mine, blocks


@communicates("all_gather_start", _gather_types, "all_gather")
def gather_start(
    xp: ModuleType, out: Any, *xs: Any, group: tuple[int, ...], order: int, pieces: tuple[Tiling, ...], comm: Comm
) -> list[Call]:
    """Copy this rank's pieces of arrays into one block, and start to gather those of `group`."""
    (mine, blocks), members = out, comm.split(group)
    packed = _copies(_flat(xs, [p.most for p in pieces], mine), True)
    return [*packed, _begin(comm, order, lambda: members.all_gather_async(mine, blocks))]


def _whole_types(blocks: TensorType, *_: TensorType, pieces: Sequence[Tiling], **__: Any) -> tuple[TensorType, ...]:
    return tuple(TensorType(sizes(p.box), blocks.dtype) for p in pieces)


@communicates("all_gather_wait", _whole_types, lazy=True)
def gather_wait(
    xp: ModuleType, out: Any, blocks: Any, mine: Any, *, order: int, pieces: tuple[Tiling, ...], comm: Comm
) -> list[Call]:
    """The whole arrays, as soon as what `gather_start` began has ended."""
    return [_finish(comm, order), *_copies(_each(pieces, out, blocks), False)]
