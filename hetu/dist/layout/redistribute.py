"""Moving a tensor from one layout to another: what each rank sends, or the collective that does it faster.

`plan(src, dst, shape)` is a pure function that every rank evaluates alike, so all agree on the order without talking.
Its `transfers` are batched send/receive as in Hetu v2, for any two layouts: they cut the tensor at all boundaries of
both, and each rank that needs a cell takes each term of it from itself, or else from the owner that has sent least so
far. Where a collective does the same, the plan names it. It does not know the network's topology, and never moves in
two steps.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from ...core.backend import Scratch
from ...core.errors import ArgumentError, DTypeError, ShapeError
from ...core.kernels import Call
from ...core.types import Box, Shape, is_float
from ...ranges import OneOf
from ..comm.call import REDUCE, PeerMessage
from ..comm.comm import Comm
from ..comm.hierarchical import Hosts
from .boxes import cells, contains, sizes, volume, within
from .collectives import KEPT, Collective, Empty, copy, exchanged, find, near
from .deduce import Grid
from .layout import DUP, MAX, MIN, PENDING, SUM, Layout, PendingTerm, Piece

PartOf = Callable[[Box], np.ndarray]
_NOTHING = np.empty(0)  # of a rank outside one of the layouts


class Transfer(NamedTuple):
    """`target` takes one term of the cell `box` from `source`; both are the same rank for what it already holds."""

    source: int
    target: int
    box: Box
    term: PendingTerm


KINDS = (
    "nothing slice all_reduce reduce_scatter all_gather all_to_all split_all_reduce split_reduce_scatter "
    "split_all_gather split_all_to_all send_recv batched"
).split()


@dataclass(frozen=True)
class Redistribution:
    """How a tensor of `shape` gets from `src` to `dst`.

    `kind` is nothing, slice (local), all_reduce, reduce_scatter, all_gather, all_to_all, one of these that is split_
    (groups that overlap), send_recv (whole arrays between pairs of ranks) or batched (anything else). `transfers`
    always hold the generic way; a thousand ranks have a million of them, so they are found on demand.

    >>> from hetu.dist import SUM, Layout, Shard
    >>> plan(Layout(Shard((0, 1), ((SUM, 2),))), Layout(Shard((0, 1), ((0, 2),))), (4, 3))
    Redistribution(reduce_scatter on (0, 1): [sum/2] on 0-1 -> [0/2] on 0-1)
    """

    kind: Annotated[str, OneOf(*KINDS)]
    src: Layout
    dst: Layout
    shape: Shape
    collectives: tuple[Collective, ...] = ()

    @functools.cached_property
    def before(self) -> Mapping[int, Piece]:
        """What every rank of `src` holds."""
        return self.src.pieces(self.shape)

    @functools.cached_property
    def after(self) -> Mapping[int, Piece]:
        """What every rank of `dst` will hold."""
        return self.dst.pieces(self.shape)

    @functools.cached_property
    def of_rank(self) -> Mapping[int, Sequence[Collective]]:
        """The collectives of every rank that has some, in its order."""
        return _grouped((rank, collective) for collective in self.collectives for rank in collective.group)

    @functools.cached_property
    def last(self) -> int:
        """The last rank of both layouts."""
        return max(*self.src.ranks, *self.dst.ranks)

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What every rank takes from which."""
        return tuple(_transfers(self.before, self.after))

    @functools.cached_property
    def between(self) -> dict[tuple[int, int], list[Box]]:
        """(source, target) -> the cells of their one message, in the order of both."""
        return _grouped(((t.source, t.target), t.box) for t in self.transfers)

    @functools.cached_property
    def into(self) -> dict[int, list[Transfer]]:
        """What every rank of `dst` is made of."""
        return _grouped((t.target, t) for t in self.transfers)

    @property
    def moved(self) -> int:
        """Elements that cross between ranks, over all ranks, with bandwidth-optimal algorithms."""
        if self.collectives:
            return sum(collective.moved for collective in self.collectives)
        return sum(volume(t.box) for t in self.transfers if t.source != t.target)

    def over(self, hosts: Hosts) -> Redistribution:
        """The same for ranks that share hosts like this: an all_to_all between hosts then goes within them first."""
        return replace(self, collectives=tuple(c.over(hosts) for c in self.collectives)) if hosts else self

    def run(self, comm: Comm, x: np.ndarray | None, out: np.ndarray | None) -> None:
        """Fill `out` (this rank's part in `dst`) from `x` (its part in `src`); None where it has none.

        All ranks of both layouts call it; the layouts name ranks of `comm`. ShapeError or DTypeError if a buffer is
        not the part that its layout describes.
        """
        self._check(comm, x, out)
        if x is None and out is None:
            return
        given, made = (_NOTHING if array is None else array for array in (x, out))
        mine = self.of_rank.get(comm.rank, ())
        for collective in mine:
            collective.run(comm.split(collective.group), *self._parts(collective, comm.rank, given, made))
        in_place = x is not None and out is not None and np.may_share_memory(x, out)
        if not mine and not in_place:  # what stays on this rank lies in place already
            # Beside collectives of other ranks, only what stays on this rank is left to copy.
            arrived = dict[int, np.ndarray]()
            if not self.collectives:
                before, sends, arrived = self._terms(comm.rank, given, made, near(given if out is None else made))
                for pack in before:
                    pack()
                comm.exchange(sends, [*arrived.items()])
            if out is not None:
                self._assemble(comm.rank, given, out, arrived)

    def bind(
        self,
        comm: Comm,
        x: np.ndarray | None,
        out: np.ndarray | None,
        together: bool = True,
        scratch: Scratch | None = None,
    ) -> list[Call]:
        """What does `run` on these arrays again and again, prepared if ranks bind it `together`, as far as possible.

        What is packed, and terms that arrive, lie in `scratch`.
        """
        self._check(comm, x, out)
        given, made = (_NOTHING if array is None else array for array in (x, out))
        if mine := self.of_rank.get(comm.rank, ()):
            parts = [self._parts(collective, comm.rank, given, made) for collective in mine]
            return [a for c, on in zip(mine, parts) for a in c.bind(comm.split(c.group), *on, together, scratch)]
        pending, again = self.src.pending is not None or self.dst.pending is not None, partial(self.run, comm, x, out)
        if self.collectives or self.kind in ("nothing", "slice") or (pending and scratch is None):
            return [again]
        if not pending or scratch is None:
            return self._bind_messages(comm, given, made, scratch) or [again]
        before, sends, arrived = self._terms(comm.rank, given, made, scratch.empty)
        calls = [*before, comm.bind_exchange(sends, [*arrived.items()])]
        if out is None:
            return calls
        total = scratch.empty(out.shape, np.dtype(np.float32)) if self._widens(out) else out
        calls.append(partial(self._assemble, comm.rank, given, total, arrived))
        return calls if total is out else [*calls, copy(out, total)]

    def _parts(self, of: Collective, rank: int, x: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The parts of this rank's arrays that a collective is about."""
        place = of.group.index(rank)
        old, new = of.old[place].box, of.new[place].box
        return x[within(old, self.before[rank].box)], out[within(new, self.after[rank].box)]

    def _bind_messages(self, comm: Comm, x: np.ndarray, out: np.ndarray, scratch: Scratch | None) -> list[Call] | None:
        """Messages of complete values: parts of arrays as they lie where they are in one piece, else packed."""
        given, made = self._cells(comm.rank, x, out)
        empty = scratch.empty if scratch else near(out if x is _NOTHING else x)
        packs, sends, recvs, unpacks = exchanged(comm.rank, self.between, given, made, empty)
        if sum(part.nbytes for part, _ in packs) + sum(part.nbytes for _, part in unpacks) > KEPT and scratch is None:
            return None  # nobody else need know
        stays = ((made(box), given(box)) for box in self.between.get((comm.rank, comm.rank), ()))
        return [*starmap(copy, [*packs, *stays]), comm.bind_exchange(sends, recvs), *starmap(copy, unpacks)]

    def _cells(self, rank: int, x: np.ndarray, out: np.ndarray) -> tuple[PartOf, PartOf]:
        """What gives the parts of this rank's arrays that lie in a box."""
        return lambda box: x[within(box, self.before[rank].box)], lambda box: out[within(box, self.after[rank].box)]

    def _terms(
        self, rank: int, x: np.ndarray, out: np.ndarray, empty: Empty
    ) -> tuple[list[Call], list[PeerMessage], dict[int, np.ndarray]]:
        """What packs the messages to others, these, and by source the memory for those that arrive."""
        sent = {way: boxes for way, boxes in self.between.items() if way[0] == rank}
        packs, sends, *_ = exchanged(rank, sent, *self._cells(rank, x, out), empty)
        arrived = {
            source: empty((sum(map(volume, boxes)),), out.dtype)
            for (source, target), boxes in self.between.items()
            if source != rank == target
        }
        return [*starmap(copy, packs)], sends, arrived

    def _widens(self, out: np.ndarray) -> bool:
        return self.src.pending is not None and is_float(out.dtype) and out.itemsize == 2

    def _assemble(self, rank: int, x: np.ndarray, out: np.ndarray, arrived: dict[int, np.ndarray]) -> None:
        """Write each cell of `out` from its terms, in their order, so that duplicates add alike.

        Terms in 16-bit floats are combined in 32 and rounded once.
        """
        if self._widens(out):
            wide = np.empty(out.shape, np.float32, like=out)
            self._assemble(rank, x, wide, arrived)
            out[...] = wide
            return
        if self.dst.pending is not None:
            out.fill(identity(self.dst.pending, out.dtype))
        used: dict[int, int] = defaultdict(int)
        written = set()
        for source, _, box, _ in self.into.get(rank, ()):
            if source == rank:
                value = x[within(box, self.before[rank].box)]
            else:
                start, used[source] = used[source], used[source] + volume(box)
                value = arrived[source][start : used[source]].reshape(sizes(box))
            cell = out[within(box, self.after[rank].box)]
            if box in written:
                REDUCE[PENDING[self.src.pending]](cell, value, out=cell)
            else:
                cell[...] = value
                written.add(box)

    def _check(self, comm: Comm, x: np.ndarray | None, out: np.ndarray | None) -> None:
        if self.last >= comm.world_size:
            raise ArgumentError(f"{self} names rank {self.last} of {comm.world_size}", fix="use ranks of the group")
        for name, array, pieces in (("x", x, self.before), ("out", out, self.after)):
            wanted = pieces[comm.rank].shape if comm.rank in pieces else None
            if wanted != (got := None if array is None else array.shape):
                raise ShapeError(f"rank {comm.rank} passes {name} of shape {got}, its part has {wanted} in {self}")
        if x is not None and out is not None and x.dtype != out.dtype:
            raise DTypeError(f"x is {x.dtype} and out is {out.dtype}", fix="use one dtype for both")

    def __repr__(self) -> str:
        groups = ", ".join(str(collective.group) for collective in self.collectives)
        return f"Redistribution({self.kind}{' on ' * bool(groups)}{groups}: {self.src} -> {self.dst})"


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Key -> what stands beside it, in turn."""
    found = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return dict(found)


def identity(role: int, dtype: np.dtype) -> float | int | bool:
    """What changes nothing when combined by `role`: 0, or the lowest (MAX) or highest (MIN) value of the dtype."""
    if role == SUM:
        return 0
    if dtype.kind == "b":
        return role == MIN
    if is_float(dtype):
        return -np.inf if role == MAX else np.inf
    limits = np.iinfo(dtype)
    return limits.min if role == MAX else limits.max


def plan(src: Layout, dst: Layout, shape: Shape) -> Redistribution:
    """The cheapest known way from `src` to `dst`: nothing, a local slice, collectives, or batched send/receive.

    A pending sum that only `dst` has is made by giving the value to the first rank of its axis and zeros (for MAX
    and MIN the identity) to the others; a pending axis that both have at one position stays as it is.
    """
    return _plan(src, dst, tuple(shape))


@functools.lru_cache(maxsize=4096)
def _plan(src: Layout, dst: Layout, shape: Shape) -> Redistribution:
    before, after = src.pieces(shape), dst.pieces(shape)
    here = all(rank in before and contains(before[rank].box, piece.box) for rank, piece in after.items())
    complete = src.pending is None and dst.pending is None  # then a rank takes what it has from itself
    if here and (complete or all(t.source == t.target for t in _transfers(before, after))):
        return Redistribution("nothing" if before == after else "slice", src, dst, shape)
    if collectives := find(src, dst, shape):
        members = [rank for collective in collectives for rank in collective.group]
        kind = "split_" * (len(set(members)) < len(members)) + collectives[0].kind
        return Redistribution(kind, src, dst, shape, collectives)
    whole = _whole_arrays(_transfers(before, after), before, after)
    return Redistribution("send_recv" if whole else "batched", src, dst, shape)


def cut_first(src: Layout, dst: Layout, shape: Shape) -> Layout | None:
    """A layout on the way, which each rank cuts out of what it has, and from which collectives lead on; or None.

    >>> from hetu.dist import SUM, Mesh
    >>> mesh = Mesh((2, 2), ("data", "tensor"))
    >>> cut_first(mesh.layout(data=SUM), mesh.layout(tensor=0), (4, 3))
    Layout([sum/2, 0/2] on 0-3)
    """
    grid, after = Grid.of(src), dst.axes()
    if grid != Grid.of(dst):
        return None
    cut = grid.layout({axis: after[axis][0] if role == DUP else role for axis, (role, _) in src.axes().items()})
    ready = cut != src and plan(src, cut, shape).kind == "slice"
    return cut if ready and plan(cut, dst, shape).collectives else None


def _transfers(before: Mapping[int, Piece], after: Mapping[int, Piece]) -> Iterator[Transfer]:
    """For every cell, needer and term of it, who gives it; load balanced."""
    inside = cells([piece.box for piece in before.values()], [piece.box for piece in after.values()])
    needers: dict[tuple[int, Box], list[int]] = defaultdict(list)
    for rank, piece in after.items():
        for box in inside[piece.box]:
            needers[piece.copy, box].append(rank)
    sent: dict[int, int] = defaultdict(int)
    ends = np.array([piece.box for piece in before.values()]).reshape(len(before), -1, 2)  # looked through at once
    for (_, box), targets in needers.items():
        low, high = np.array(box, ends.dtype).reshape(-1, 2).T
        around = np.all((ends[:, :, 0] <= low) & (high <= ends[:, :, 1]), axis=1)
        owners: dict[int, dict[PendingTerm, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )  # any copy is all of it
        for rank, piece in itertools.compress(before.items(), around):
            owners[piece.copy][piece.term].append(rank)
        # Ranks that will hold different terms of one value must take them from one copy: copies are cut differently.
        together = len({after[rank].term for rank in targets}) > 1
        for unit in [targets] if together else [[rank] for rank in targets]:
            for source, target, term in _choose({rank: after[rank].term for rank in unit}, owners, sent):
                yield Transfer(source, target, box, term)
                sent[source] += volume(box) if source != target else 0


def _choose(
    wanted: dict[int, PendingTerm], copies: dict[int, dict[PendingTerm, list[int]]], sent: dict[int, int]
) -> list[tuple[int, int, PendingTerm]]:
    """(source, target, term) of all terms that the targets must combine, from the copy that costs the fewest receipts;
    `copies` are copy -> term -> the ranks that hold it.

    A source term belongs to the target term with its coordinates, 0 where the source has no such axis; so each
    belongs to exactly one, and the total is kept.
    """
    options = []
    for terms in copies.values():
        option = [
            (target if target in ranks else min(ranks, key=lambda r: sent[r]), target, term)
            for (term, ranks), (target, mine) in itertools.product(sorted(terms.items()), wanted.items())
            if all(dict(term).get(axis, 0) == coordinate for axis, coordinate in mine)
        ]
        foreign = [source for source, target, _ in option if source != target]
        options.append((len(foreign), sum(sent[rank] for rank in foreign), option))
    return min(options, key=lambda option: option[:2])[2]


def _whole_arrays(transfers: Iterable[Transfer], before: Mapping[int, Piece], after: Mapping[int, Piece]) -> bool:
    """Whether whole arrays go from one rank to one other, nothing cut or added: plain point-to-point."""
    sources, targets = set[int](), set[int]()
    for t in transfers:  # mostly the first of a million says no
        if t.source in sources or t.target in targets or not t.box == before[t.source].box == after[t.target].box:
            return False
        sources.add(t.source)
        targets.add(t.target)
    return True


def redistribute(
    comm: Comm, x: np.ndarray | None, src: Layout, dst: Layout, shape: Sequence[int], dtype: DTypeLike | None = None
) -> np.ndarray | None:
    """This rank's part of a tensor of `shape` in the layout `dst`, from its part `x` in the layout `src`.

    All ranks of both layouts call it, and `x` stays as it was. A rank outside `src` passes None and the dtype; a
    rank outside `dst` gets None. Layouts name ranks of `comm`. ShapeError if `x` is not the part that `src` describes.
    """
    way = plan(src, dst, tuple(shape))
    out, kind = None, dtype if dtype is not None or x is None else x.dtype
    if comm.rank in way.after:
        if kind is None:
            raise ArgumentError(f"rank {comm.rank} holds nothing in {src}", fix="pass dtype= for what it receives")
        out = np.empty(way.after[comm.rank].shape, kind)
    way.run(comm, x, out)
    return out
