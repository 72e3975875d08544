"""Group collectives for a change of layout: finding the one that fits, and running it over packed buffers.

Roles only propose the groups: the ranks that differ along axes whose role changes. The boxes of a group then decide
whether a collective fits: they must join to one block. For a change of one axis this means that no later axis may split
the old or the new dimension. Pieces of slightly different sizes are padded to the largest.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, combinations
from typing import Any

import numpy as np

from ...core.backend import Scratch
from ...core.kernels import Call
from ...core.types import Box, Shape
from ..comm.call import CollectiveCall, PeerMessage, is_half
from ..comm.comm import Comm
from ..comm.hierarchical import Hosts, all_to_all, within_hosts
from ..comm.recorder import Ranks
from .boxes import cells, contains, hull, intersect, sizes, volume, within
from .layout import ACROSS, DUP, PENDING, Layout, Piece
from .tiling import Tiling

KEPT = 64 << 10  # bytes of buffers that a program keeps for a collective
Empty = Callable[[tuple[int, ...], np.dtype], np.ndarray]
CopyPair = tuple[np.ndarray, np.ndarray]  # the target and the source of a copy


@dataclass(frozen=True)
class Collective:
    """One collective of the ranks `group` on the part `box` of a tensor, from their `old` to their `new` pieces.

    `bind` takes the communicator of the group, so `comm.rank` is the place in all three tuples. `rows` are the places
    by host, for an all_to_all that goes within hosts first. `alone` says whether the ranks have nothing else.
    """

    kind: str
    group: Ranks
    box: Box
    old: tuple[Piece, ...]
    new: tuple[Piece, ...]
    op: str = ""
    rows: Hosts = ()
    alone: bool = True

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

    @functools.cached_property
    def tiling(self) -> Tiling:
        """How the pieces that an all_gather joins, or a reduce_scatter makes, lie in the box."""
        return Tiling.of(self.old if self.kind == "all_gather" else self.new, self.box)

    def bind(
        self, comm: Comm, x: np.ndarray, out: np.ndarray, together: bool = True, scratch: Scratch | None = None
    ) -> list[Call]:
        """What fills `out` on this rank from `x`, in order, again and again. What is packed lies in `scratch`.

        All ranks of the group bind the collective itself, or none: that depends on sizes, and on whether they bind it
        `together`.
        """
        if self.rows or not (scratch or self._lies_ready or volume(self.box) * x.itemsize <= KEPT):
            return [partial(self.run, comm, x, out)]  # large buffers are not kept from step to step
        return ACTIONS[self.kind](self, comm, x, out, together, scratch.empty if scratch else near(x))

    @property
    def _lies_ready(self) -> bool:
        """Whether nothing is packed on any rank."""
        return self.alone and (self.kind == "all_reduce" or (self.kind != "all_to_all" and self.tiling.in_line))

    def run(self, comm: Comm, x: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` on this rank from `x`, once."""
        for action in ACTIONS[self.kind](self, comm, x, out, False, near(x)):
            action()


def _call(comm: Comm, fixed: bool, *call: Any) -> Call:
    return comm.bind(CollectiveCall(*call)) if fixed else partial(comm.run, CollectiveCall(*call))


def copy(target: np.ndarray, source: np.ndarray) -> Call:
    """A copy to do later; both may lie on a device."""
    return partial(target.__setitem__, ..., source)


def near(x: np.ndarray) -> Empty:
    """What makes arrays on the device of `x`."""
    return partial(np.empty, like=x)


def exchanged(
    rank: int,
    between: Mapping[tuple[int, int], Sequence[Any]],
    given: Callable[[Any], np.ndarray],
    made: Callable[[Any], np.ndarray],
    empty: Empty,
) -> tuple[list[CopyPair], list[PeerMessage], list[PeerMessage], list[CopyPair]]:
    """The one message from each rank to each of what lies `between` them, which is `given` here and `made` there.

    (target, source) of what to pack, the messages sent and received, and (target, source) of what to unpack. What lies
    in one piece travels as it lies.
    """
    packs, sends, recvs, unpacks = list[CopyPair](), list[PeerMessage](), list[PeerMessage](), list[CopyPair]()
    for (source, target), of in between.items():
        if (source == rank) != (target == rank):
            views = [given(cell) if source == rank else made(cell) for cell in of]
            flat, parts = _in_one_piece(views, empty)
            if source == rank:
                sends.append((target, flat))
                packs += zip(parts, views)
            else:
                recvs.append((source, flat))
                unpacks += zip(views, parts)
    return packs, sends, recvs, unpacks


def _in_one_piece(views: Sequence[np.ndarray], empty: Empty) -> tuple[np.ndarray, list[np.ndarray]]:
    """Memory for all elements in a row, and its parts; the only view itself if it is that already, and no parts."""
    if len(views) == 1 and views[0].flags.c_contiguous:
        return views[0], []
    kinds = {view.dtype for view in views}
    dtype = views[0].dtype if len(kinds) == 1 else np.dtype(np.uint8)
    ends = [nbytes // dtype.itemsize for nbytes in accumulate(view.nbytes for view in views)]
    flat = empty((ends[-1],), dtype)
    parts = [flat[start:end].view(view.dtype) for view, start, end in zip(views, [0, *ends], ends)]
    return flat, [part.reshape(view.shape) for part, view in zip(parts, views)]


def _dense(x: np.ndarray, empty: Empty) -> tuple[np.ndarray, list[Call]]:
    """`x` in one piece of memory, and what makes it so."""
    if x.flags.c_contiguous:
        return x, []
    packed = empty(x.shape, x.dtype)
    return packed, [copy(packed, x)]


def _all_reduce(self: Collective, comm: Comm, x: np.ndarray, out: np.ndarray, fixed: bool, empty: Empty) -> list[Call]:
    if comm.widens and is_half(x.dtype):
        wide = empty(x.shape, np.dtype(np.float32))
        return [copy(wide, x), _call(comm, fixed, self.kind, wide, wide, self.op), copy(out, wide)]
    given, before = _dense(x, empty)
    made = out if out.flags.c_contiguous else empty(out.shape, out.dtype)
    return [*before, _call(comm, fixed, self.kind, given, made, self.op), *_unpadded(out, made)]


def _reduce_scatter(
    self: Collective, comm: Comm, x: np.ndarray, out: np.ndarray, fixed: bool, empty: Empty
) -> list[Call]:
    tiling = self.tiling
    if tiling.in_line and x.flags.c_contiguous and out.flags.c_contiguous:
        return [_call(comm, fixed, self.kind, x, out, self.op)]
    blocks = empty((len(self.new), tiling.most), x.dtype)
    mine = out if out.size == tiling.most and out.flags.c_contiguous else empty((tiling.most,), x.dtype)
    pad = [partial(blocks.fill, 0)] if tiling.tile is None else []
    pack = [copy(block, part) for block, part in tiling.pairs(blocks, x)]
    return [*pad, *pack, _call(comm, fixed, self.kind, blocks, mine, self.op), *_unpadded(out, mine)]


def _unpadded(out: np.ndarray, mine: np.ndarray) -> list[Call]:
    return [] if mine is out else [copy(out, mine.reshape(-1)[: out.size].reshape(out.shape))]


def _all_gather(self: Collective, comm: Comm, x: np.ndarray, out: np.ndarray, fixed: bool, empty: Empty) -> list[Call]:
    tiling = self.tiling
    given, before = _dense(x, empty)
    if tiling.in_line and out.flags.c_contiguous:
        return [*before, _call(comm, fixed, self.kind, given, out)]
    blocks = empty((len(self.group), tiling.most), x.dtype)
    if x.size < tiling.most:
        given = empty((tiling.most,), x.dtype)
        before = [partial(given.fill, 0), copy(given[: x.size].reshape(x.shape), x)]
    unpack = [copy(part, block) for block, part in tiling.pairs(blocks, out)]
    return [*before, _call(comm, fixed, self.kind, given, blocks), *unpack]


def _all_to_all(self: Collective, comm: Comm, x: np.ndarray, out: np.ndarray, fixed: bool, empty: Empty) -> list[Call]:
    mine, wanted = self.old[comm.rank].box, self.new[comm.rank].box
    sent = [intersect(mine, piece.box) for piece in self.new]
    received = [intersect(piece.box, wanted) for piece in self.old]
    counts = tuple(map(volume, sent)), tuple(map(volume, received))
    packed, blocks = empty((sum(counts[0]),), x.dtype), empty((out.size,), out.dtype)
    if self.rows:
        table = [[volume(intersect(old.box, new.box)) for new in self.new] for old in self.old]
        trade: Call = partial(all_to_all, comm, packed, blocks, table, self.rows)
    else:
        trade = _call(comm, fixed, self.kind, packed, blocks, "", 0, counts)
    pack = [copy(part, x[within(box, mine)]) for box, part in _parts(packed, sent) if part.size]
    unpack = [copy(out[within(box, wanted)], part) for box, part in _parts(blocks, received) if part.size]
    return [*pack, trade, *unpack]


def _parts(flat: np.ndarray, boxes: Sequence[Box]) -> Iterator[tuple[Box, np.ndarray]]:
    """Each box with its part of a flat array that holds them one after the other."""
    at = 0
    for box in boxes:
        yield box, flat[at : at + volume(box)].reshape(sizes(box))
        at += volume(box)


ACTIONS = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}


def find(src: Layout, dst: Layout, shape: Shape) -> tuple[Collective, ...]:
    """The collectives that take `src` to `dst`, in the order in which every rank runs its own; none if none fits."""
    before, after = src.pieces(shape), dst.pieces(shape)
    found = []
    for group in groups(src, dst):
        old, new = tuple(before[rank] for rank in group), tuple(after[rank] for rank in group)
        box = hull([piece.box for piece in (*old, *new)])
        if volume(box):
            kind = _kind(old, new, box)
            found.append(
                Collective(kind, group, box, old, new, PENDING.get(src.pending, "") if "reduce" in kind else "")
            )
    members = {rank for collective in found for rank in collective.group}
    stay = all(rank in members or _stays(before.get(rank), piece) for rank, piece in after.items())
    if stay and len({collective.kind for collective in found}) == 1 and found[0].kind:
        return tuple(found)
    return _split(src, dst, before, after)


def groups(src: Layout, dst: Layout) -> list[Ranks]:
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


def _stays(old: Piece | None, new: Piece) -> bool:
    """Whether a rank has its new piece already, or needs none."""
    return not volume(new.box) or (old is not None and old.term == new.term and contains(old.box, new.box))


def _whole(pieces: Sequence[Piece], box: Box) -> bool:
    return all(piece.box == box for piece in pieces)


def _partition(pieces: Sequence[Piece], box: Box) -> bool:
    """Whether the pieces cover the box once. As they come from one grid, any two are equal or do not meet."""
    return sum(volume(piece.box) for piece in pieces) == volume(box) and len({p.box for p in pieces}) == len(pieces)


def padded(pieces: Sequence[Piece]) -> int:
    """The elements that each rank of an all_gather or reduce_scatter communicates: those of the largest piece."""
    return max(volume(piece.box) for piece in pieces)


def _alike(pieces: Sequence[Piece]) -> bool:
    """Whether all pieces padded to the largest are at most twice as much."""
    return len(pieces) * padded(pieces) <= 2 * sum(volume(piece.box) for piece in pieces)


def _split(src: Layout, dst: Layout, before: Mapping[int, Piece], after: Mapping[int, Piece]) -> tuple[Collective, ...]:
    """Collectives of one rank of each part, on the cells that they have in common: parts may cut a tensor differently.

    So gradients of unequal groups are added up, and what such groups divide is reduced or gathered. None if they would
    send more than messages do: in pieces that have to be padded, or between two ranks twice.
    """
    inside_pending = any(role in PENDING for part in src.parts for role, _ in part.axes)
    if src.parts != dst.parts or inside_pending or not (src.across in PENDING or dst.across == DUP):
        return ()
    common, inside = before if src.across in PENDING else after, defaultdict[Ranks, list[Box]](list)
    boxes = [piece.box for piece in (*before.values(), *after.values())]
    for cell in sorted({cell for found in cells(boxes, boxes).values() for cell in found}):
        members = [[rank for rank in part.ranks if contains(common[rank].box, cell)] for part in src.parts]
        if len({len(ranks) for ranks in members}) > 1:
            return ()  # parts with different numbers of duplicates do not pair up
        for group in zip(*members):
            inside[group].append(cell)
    found = []
    for group, parts in inside.items():
        whole = hull(parts)
        for box in [whole] if sum(map(volume, parts)) == volume(whole) else parts:
            old, new = (tuple(of[r]._replace(box=intersect(of[r].box, box)) for r in group) for of in (before, after))
            alone = all(before[rank] == a and after[rank] == b for rank, a, b in zip(group, old, new))
            op = PENDING.get(src.across, "")
            found.append(Collective(_kind(old, new, box), group, box, old, new, op, alone=alone))
    return tuple(found) if _saves(found, after) else ()


def _saves(found: Sequence[Collective], after: Mapping[int, Piece]) -> bool:
    """Whether these are of one kind, give all ranks what they need, and send no more than messages would."""
    made = sum(volume(piece.box) for collective in found for piece in collective.new)
    if len({collective.kind for collective in found}) != 1 or made != sum(volume(p.box) for p in after.values()):
        return False
    if found[0].kind == "all_reduce":
        return True
    pieces = [c.new if c.kind == "reduce_scatter" else c.old for c in found]
    even = all(len(of) * padded(of) == volume(c.box) for c, of in zip(found, pieces))
    pairs = Counter(pair for c in found for pair in combinations(c.group, 2))
    return bool(found[0].kind) and even and max(pairs.values()) == 1
