"""Group collectives for a change of layout: finding the one that fits, and running it over packed buffers.

Roles only propose the groups: the ranks that differ along axes whose role changes. The boxes of a group then decide
whether a collective fits: they must join to one block. For a change of one axis this means that no later axis may split
the old or the new dimension. Pieces of slightly different sizes are padded to the largest. Of the split collectives of
Hetu v2 only the all_reduce saves bytes over messages, so the others go the generic way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...core.types import Box, Shape
from ..comm.comm import Comm
from ..comm.hierarchical import Hosts, all_to_all, within_hosts
from ..comm.recorder import Ranks
from .boxes import cells, contains, hull, intersect, sizes, volume, within
from .layout import ACROSS, DUP, PENDING, Layout, Piece


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of the ranks `group` on the part `box` of a tensor, from their `old` to their `new` pieces.

    `run` takes the communicator of the group, so `comm.rank` is the place in all three tuples. `rows` are the places
    by host, for an all_to_all that goes within hosts first.
    """

    kind: str
    group: Ranks
    box: Box
    old: tuple[Piece, ...]
    new: tuple[Piece, ...]
    op: str = ""
    rows: Hosts = ()

    def over(self, hosts: Hosts) -> Collective:
        """The same for ranks that share hosts like this."""
        return replace(self, rows=within_hosts(self.group, hosts)) if self.kind == "all_to_all" else self

    @property
    def moved(self) -> int:
        """Elements that cross between ranks, over all ranks, with a bandwidth-optimal algorithm."""
        stay = sum(volume(intersect(o.box, n.box)) for o, n in zip(self.old, self.new))
        return {
            "all_reduce": 2 * (len(self.group) - 1) * volume(self.box),
            "reduce_scatter": (len(self.group) - 1) * volume(self.box),
            "all_gather": (len(self.group) - 1) * volume(self.box),
            "all_to_all": volume(self.box) - stay,
        }[self.kind]

    def run(self, comm: Comm, x: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` on this rank from `x`."""
        RUN[self.kind](self, comm, x, out)


def _dense(x: np.ndarray) -> np.ndarray:
    return x if x.flags.c_contiguous else x.copy()


def _all_reduce(self: Collective, comm: Comm, x: np.ndarray, out: np.ndarray) -> None:
    index = within(self.box, self.old[comm.rank].box)
    if x[index].size == x.size:
        comm.all_reduce(_dense(x), out, self.op)
    else:  # this group has a part of the array, other groups the rest
        cell = x[index].copy()
        comm.all_reduce(cell, cell, self.op)
        out[index] = cell


def _reduce_scatter(self: Collective, comm: Comm, x: np.ndarray, out: np.ndarray) -> None:
    parts = [x[within(piece.box, self.box)].reshape(-1) for piece in self.new]
    if _even(self.new):
        return comm.reduce_scatter(np.concatenate(parts), out, self.op)
    blocks = np.zeros((len(parts), padded(self.new)), x.dtype, like=x)
    for block, part in zip(blocks, parts):
        block[: part.size] = part
    mine = np.empty_like(blocks[0])
    comm.reduce_scatter(blocks, mine, self.op)
    out[...] = mine[: out.size].reshape(out.shape)


def _all_gather(self: Collective, comm: Comm, x: np.ndarray, out: np.ndarray) -> None:
    blocks = np.empty((len(self.group), padded(self.old)), x.dtype, like=x)
    if x.size < blocks.shape[1]:
        given = np.zeros(blocks.shape[1], x.dtype, like=x)
        given[: x.size] = x.reshape(-1)
        x = given
    comm.all_gather(_dense(x), blocks)
    for piece, block in zip(self.old, blocks):
        out[within(piece.box, self.box)] = block[: volume(piece.box)].reshape(piece.shape)


def _all_to_all(self: Collective, comm: Comm, x: np.ndarray, out: np.ndarray) -> None:
    mine, wanted = self.old[comm.rank].box, self.new[comm.rank].box
    sent = [intersect(mine, piece.box) for piece in self.new]
    received = [intersect(piece.box, wanted) for piece in self.old]
    counts = [volume(box) for box in sent], [volume(box) for box in received]
    packed = np.concatenate([x[within(box, mine)].reshape(-1) for box in sent])
    blocks = np.empty(out.size, out.dtype, like=out)
    if self.rows:
        table = [[volume(intersect(old.box, new.box)) for new in self.new] for old in self.old]
        all_to_all(comm, packed, blocks, table, self.rows)
    else:
        comm.all_to_all(packed, blocks, counts)
    for box, block in zip(received, np.split(blocks, np.cumsum(counts[1])[:-1])):
        out[within(box, wanted)] = block.reshape(sizes(box))


RUN = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def find(src: Layout, dst: Layout, shape: Shape) -> tuple[Collective, ...]:
    """The collectives that take `src` to `dst`, in the order in which every rank runs its own; none if none fits."""
    before, after = src.pieces(shape), dst.pieces(shape)
    found = []
    for group in _groups(src, dst):
        old, new = tuple(before[rank] for rank in group), tuple(after[rank] for rank in group)
        box = hull([piece.box for piece in (*old, *new)])
        if volume(box):
            kind = _kind(old, new, box)
            found.append(
                Collective(kind, group, box, old, new, PENDING.get(src.pending, "") if "reduce" in kind else "")
            )
    if len({collective.kind for collective in found}) == 1 and found[0].kind:
        return tuple(found)
    return _split_all_reduce(src, dst, before)


def _groups(src: Layout, dst: Layout) -> list[Ranks]:
    """The ranks that differ only along axes whose role changes; none unless both layouts use the same grid."""
    before, after = src.axes(), dst.axes()
    if [part.ranks for part in src.parts] != [part.ranks for part in dst.parts]:
        return []
    if {axis: n for axis, (_, n) in before.items()} != {axis: n for axis, (_, n) in after.items()}:
        return []
    changed = {axis for axis, (role, n) in before.items() if n > 1 and after[axis][0] != role}
    if ACROSS in changed and any(len({part.axes for part in layout.parts}) > 1 for layout in (src, dst)):
        return []
    groups = defaultdict(list)
    for rank, p, place in src.places():
        fixed = tuple(at for position, at in enumerate(place) if (p, position) not in changed)
        groups[(-1 if ACROSS in changed else p), fixed].append(rank)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _kind(old: Sequence[Piece], new: Sequence[Piece], box: Box) -> str:
    """The collective that takes a group from its `old` to its `new` pieces of `box`; "" if there is none."""
    terms = {piece.term for piece in old}
    if len({piece.term for piece in new}) > 1:
        return ""  # each member would keep a term of its own
    if len(terms) == len(old) and _whole(old, box):
        if _whole(new, box):
            return "all_reduce"
        return "reduce_scatter" if _partition(new, box) and _alike(new) else ""
    if terms == {new[0].term} and _partition(old, box):
        if _whole(new, box):
            return "all_gather" if _alike(old) else ""
        return "all_to_all" if _partition(new, box) else ""
    return ""


def _whole(pieces: Sequence[Piece], box: Box) -> bool:
    return all(piece.box == box for piece in pieces)


def _partition(pieces: Sequence[Piece], box: Box) -> bool:
    """Whether the pieces cover the box once. As they come from one grid, any two are equal or do not meet."""
    return sum(volume(piece.box) for piece in pieces) == volume(box) and len({p.box for p in pieces}) == len(pieces)


def padded(pieces: Sequence[Piece]) -> int:
    """The elements that each rank of an all_gather or reduce_scatter communicates: those of the largest piece."""
    return max(volume(piece.box) for piece in pieces)


def _even(pieces: Sequence[Piece]) -> bool:
    return len({volume(piece.box) for piece in pieces}) == 1


def _alike(pieces: Sequence[Piece]) -> bool:
    """Whether all pieces padded to the largest are at most twice as much."""
    return len(pieces) * padded(pieces) <= 2 * sum(volume(piece.box) for piece in pieces)


def _split_all_reduce(src: Layout, dst: Layout, before: Mapping[int, Piece]) -> tuple[Collective, ...]:
    """One all_reduce per cell, for gradients of unequal groups, which cut their terms differently."""
    pending_inside = any(role in PENDING for part in src.parts for role, _ in part.axes)
    if src.parts != dst.parts or pending_inside or src.across not in PENDING or dst.across != DUP:
        return ()
    boxes = [piece.box for piece in before.values()]
    found = []
    for cell in sorted({cell for inside in cells(boxes, boxes).values() for cell in inside}):
        owners = [[rank for rank in part.ranks if contains(before[rank].box, cell)] for part in src.parts]
        if len({len(ranks) for ranks in owners}) > 1:
            return ()  # parts with different numbers of duplicates do not pair up
        for group in zip(*owners):
            pieces = tuple(before[rank] for rank in group)
            found.append(Collective("all_reduce", group, cell, pieces, pieces, PENDING[src.across]))
    return tuple(found)
