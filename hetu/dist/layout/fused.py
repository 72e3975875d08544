"""Many tensors at once from where they lie to where they shall lie: one message between two ranks, of the least bytes.

`fused(moves)` is a pure function that every rank evaluates alike. As `redistribute.py` does for one tensor, it cuts
each at all boundaries of what is held and what is wanted; whoever holds a cell takes it from itself. What is left is
shared out among the holders over all tensors together, after the fused BSR of Hetu v2 (Haoyang Li et al., 2025). Who
holds what is given as boxes, so that ranks may be gone, hold copies for others, or hold nothing yet. Left out: values
that are still to be summed, and moving in two steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import ArgumentError
from ...core.types import Box, Shape
from ...look.columns import in_columns
from ..comm.call import PeerMessage
from ..comm.comm import Comm
from ..comm.hierarchical import Hosts
from .boxes import cells, contains, cut, sizes, volume, within
from .collectives import near
from .layout import Layout

Boxes = Mapping[int, Sequence[Box]]  # rank -> the parts of a tensor that it has, each in an array of its own
FINE = 4  # cells are cut until the largest is this part of what a holder sends on average


@dataclass(frozen=True)
class Move:
    """A tensor of complete values: the boxes that each rank holds of it, and those that it wants."""

    dtype: np.dtype
    held: Boxes
    wanted: Boxes

    @staticmethod
    def between(src: Layout, dst: Layout, shape: Shape, dtype: np.dtype) -> Move:
        """From one layout to another. ArgumentError for terms that are still to be combined."""
        if src.pending is not None or dst.pending is not None:
            raise ArgumentError(
                f"{src} to {dst}: terms that are still to be combined", fix="use hetu.dist.redistribute"
            )
        before, after = ({r: (piece.box,) for r, piece in of.pieces(shape).items()} for of in (src, dst))
        return Move(np.dtype(dtype), before, after)


class Cell(NamedTuple):
    """`target` takes `box` of the tensor `name`: from box number `given` of `source`, to its own box number `made`."""

    name: str
    box: Box
    source: int
    given: int
    target: int
    made: int


class Need(NamedTuple):
    """A cell that a rank lacks, and (rank, box number) of those that hold it."""

    name: str
    box: Box
    nbytes: int
    target: int
    made: int
    holders: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Fused:
    """How tensors get from `held` to `wanted`; `print` shows the bytes from rank to rank.

    >>> from hetu.dist import DUP, Layout, Shard
    >>> whole, split = Layout(Shard((0, 1), ((DUP, 2),))), Layout(Shard((0, 1, 2, 3), ((0, 4),)))
    >>> ways = {name: Move.between(whole, split, (8, 2), np.dtype("float32")) for name in ("w", "v")}
    >>> print(fused(ways))
    2 tensors: 4 messages, 64 bytes
    from   to 2  to 3
       0     16    16
       1     16    16
    """

    moves: Mapping[str, Move]
    cells: tuple[Cell, ...]

    @cached_property
    def between(self) -> dict[tuple[int, int], list[Cell]]:
        """(source, target) -> the cells of their one message, in the order of both: wide numbers first, so that each
        lies at a multiple of its size. With source == target, what a rank has already."""
        found = defaultdict(list)
        for cell in sorted(self.cells, key=lambda cell: -self.moves[cell.name].dtype.itemsize):
            found[cell.source, cell.target].append(cell)
        return dict(found)

    @cached_property
    def sizes(self) -> dict[tuple[int, int], int]:
        """(source, target) -> the bytes of their message."""
        return {way: sum(map(self._nbytes, of)) for way, of in self.between.items() if way[0] != way[1]}

    @property
    def messages(self) -> int:
        """How many there are, at most one from each rank to each other."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes that cross between ranks: those that are wanted where they are not held."""
        return sum(self.sizes.values())

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that each rank sends, of those that send."""
        found = defaultdict[int, int](int)
        for (source, _), nbytes in self.sizes.items():
            found[source] += nbytes
        return dict(found)

    def run(
        self, comm: Comm, given: Mapping[str, Sequence[np.ndarray]], made: Mapping[str, Sequence[np.ndarray]]
    ) -> None:
        """Fill this rank's `made`, an array for each box wanted, from all ranks' `given`, one for each box held.

        All ranks call it. Beside the arrays it takes memory for the messages that this rank sends and receives. An
        array that is given and made is left as it is.
        """
        sends, recvs, arrived = list[PeerMessage](), list[PeerMessage](), list[tuple[Any, Any]]()
        for (source, target), of in self.between.items():
            if comm.rank not in (source, target):
                continue
            old = [given[c.name][c.given][within(c.box, self._held(c))] for c in of] if source == comm.rank else []
            new = [made[c.name][c.made][within(c.box, self._wanted(c))] for c in of] if target == comm.rank else []
            if source == target:
                kept = [given[c.name][c.given] is made[c.name][c.made] for c in of]
                arrived += [(there, here) for here, there, same in zip(old, new, kept) if not same]
                continue
            flat = near((old or new)[0])((self.sizes[source, target],), np.dtype(np.uint8))
            (sends if old else recvs).append((target if old else source, flat))
            for packed, here in zip(self._packed(flat, of), old or new):
                if old:
                    packed[...] = here
                else:
                    arrived.append((here, packed))
        if sends or recvs:
            comm.exchange(sends, recvs)
        for there, here in arrived:
            there[...] = here

    def _packed(self, flat: np.ndarray, of: Sequence[Cell]) -> Iterator[np.ndarray]:
        """Where the cells of a message lie in it."""
        end = 0
        for cell in of:
            at, end = end, end + self._nbytes(cell)
            yield flat[at:end].view(self.moves[cell.name].dtype).reshape(sizes(cell.box))

    def _nbytes(self, cell: Cell) -> int:
        return volume(cell.box) * self.moves[cell.name].dtype.itemsize

    def _held(self, cell: Cell) -> Box:
        return self.moves[cell.name].held[cell.source][cell.given]

    def _wanted(self, cell: Cell) -> Box:
        return self.moves[cell.name].wanted[cell.target][cell.made]

    def __str__(self) -> str:
        head = f"{len(self.moves):,} tensors: {self.messages:,} messages, {self.nbytes:,} bytes"
        sources, targets = (sorted({way[end] for way in self.sizes}) for end in (0, 1))
        rows = [[f"{s}", *(f"{self.sizes.get((s, t), 0):,}" for t in targets)] for s in sources]
        titles = ["from", *(f"to {target}" for target in targets)]
        return "\n".join([head, *in_columns([titles, *rows] if rows else [], right=range(len(titles)))])


def fused(moves: Mapping[str, Move], hosts: Hosts = ()) -> Fused:
    """What each rank sends to each, so that all get what they want: bytes are the least, holders send alike.

    Of holders those on the host of the rank that lacks a cell are preferred, where `hosts` (the ranks of each) are
    known. ArgumentError if nobody holds something that is wanted.
    """
    kept, needs = list[Cell](), list[Need]()
    for name, move in moves.items():
        _sort(name, move, kept, needs)
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    chosen = [_nearest(need, host_of) for need in needs] if hosts else needs
    return Fused(moves, (*kept, *_senders(chosen)))


def _sort(name: str, move: Move, kept: list[Cell], needs: list[Need]) -> None:
    """The cells of a tensor that ranks have, and those that they lack."""
    boxes = [(box, (rank, number)) for rank, held in move.held.items() for number, box in enumerate(held)]
    inside = cells((box for box, _ in boxes), (box for wanted in move.wanted.values() for box in wanted))
    holders: dict[Box, dict[int, int]] = {}
    for target, wanted in move.wanted.items():
        for made, whole in enumerate(wanted):
            for box in inside[whole]:
                if box not in holders:
                    holders[box] = dict(place for held, place in boxes if contains(held, box))
                found = holders[box]
                if target in found:
                    kept.append(Cell(name, box, target, found[target], target, made))
                elif found:
                    nbytes = volume(box) * move.dtype.itemsize
                    needs.append(Need(name, box, nbytes, target, made, tuple(found.items())))
                else:
                    part = ", ".join(f"{low}:{high}" for low, high in box)
                    raise ArgumentError(f"no rank holds {name}[{part}]", fix="load the last checkpoint")


def _nearest(need: Need, host_of: Mapping[int, int]) -> Need:
    """The same with the holders on its host alone, if there are such."""
    host = host_of.get(need.target)
    beside = tuple(holder for holder in need.holders if host_of.get(holder[0]) == host)
    return need._replace(holders=beside) if beside else need


def _senders(needs: Sequence[Need]) -> Iterator[Cell]:
    """Who sends each: whoever has sent least so far. Those with few holders choose first, and of them the large."""
    senders = {rank for need in needs for rank, _ in need.holders}
    most = math.ceil(sum(need.nbytes for need in needs) / (FINE * len(senders))) if needs else 0
    sent = defaultdict[int, int](int)
    fine = [part for need in needs for part in _parts(need, most)]
    for need in sorted(fine, key=lambda need: (len(need.holders), -need.nbytes)):
        source, given = min(need.holders, key=lambda holder: sent[holder[0]])
        sent[source] += need.nbytes
        yield Cell(need.name, need.box, source, given, need.target, need.made)


def _parts(need: Need, most: int) -> Iterator[Need]:
    """A cell cut along its longest axis, so that several holders can send of it, if it has more than `most` bytes."""
    lengths = sizes(need.box)
    count = min(len(need.holders), math.ceil(need.nbytes / most), max(lengths, default=1))
    axis = lengths.index(max(lengths)) if count > 1 else 0
    for k in range(count) if count > 1 else ():
        box = (*need.box[:axis], cut(*need.box[axis], k, k + 1, count), *need.box[axis + 1 :])
        yield need._replace(box=box, nbytes=need.nbytes // lengths[axis] * sizes(box)[axis])
    if count <= 1:
        yield need
