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
from ..comm.comm import Comm
from ..comm.hierarchical import Hosts
from .boxes import cells, contains, cut, sizes, volume, within
from .collectives import exchanged, near
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
    """`box` of the tensor `name`, which rank `target` takes into its box number `made`, and (rank, box number) of those
    that hold it: of one once it is decided who sends."""

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
            found[cell.holders[0][0], cell.target].append(cell)
        return dict(found)

    @cached_property
    def sizes(self) -> dict[tuple[int, int], int]:
        """(source, target) -> the bytes of their message."""
        return {way: sum(cell.nbytes for cell in of) for way, of in self.between.items() if way[0] != way[1]}

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

        def old(cell: Cell) -> Any:
            (rank, number), *_ = cell.holders
            return given[cell.name][number][within(cell.box, self.moves[cell.name].held[rank][number])]

        def new(cell: Cell) -> Any:
            return made[cell.name][cell.made][within(cell.box, self.moves[cell.name].wanted[cell.target][cell.made])]

        some = next((array for arrays in (given, made) for of in arrays.values() for array in of), np.empty(0))
        packs, sends, recvs, unpacks = exchanged(comm.rank, self.between, old, new, near(some))
        own = self.between.get((comm.rank, comm.rank), ())
        moved = [c for c in own if given[c.name][c.holders[0][1]] is not made[c.name][c.made]]
        for target, source in packs:
            target[...] = source
        if sends or recvs:
            comm.exchange(sends, recvs)
        for target, source in [*unpacks, *((new(cell), old(cell)) for cell in moved)]:
            target[...] = source

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
    host_of = {rank: host for host, ranks in enumerate(hosts) for rank in ranks}
    return Fused(moves, tuple(_sent([cell for name, move in moves.items() for cell in _cells(name, move, host_of)])))


def _cells(name: str, move: Move, host_of: Mapping[int, int]) -> Iterator[Cell]:
    """The cells of a tensor that ranks want, and who holds each: themselves, else those on their host, else others."""
    boxes = [(box, (rank, number)) for rank, held in move.held.items() for number, box in enumerate(held)]
    inside = cells((box for box, _ in boxes), (box for wanted in move.wanted.values() for box in wanted))
    known: dict[Box, dict[int, int]] = {}
    for target, wanted in move.wanted.items():
        for made, box in ((made, box) for made, whole in enumerate(wanted) for box in inside[whole]):
            if box not in known:
                known[box] = dict(place for held, place in boxes if contains(held, box))
            if not (found := known[box]):
                part = ", ".join(f"{low}:{high}" for low, high in box)
                raise ArgumentError(f"no rank holds {name}[{part}]", fix="load the last checkpoint")
            beside = {rank: number for rank, number in found.items() if host_of.get(rank, -1) == host_of.get(target)}
            holders = {target: found[target]} if target in found else beside or found
            yield Cell(name, box, volume(box) * move.dtype.itemsize, target, made, tuple(holders.items()))


def _sent(wanted: Sequence[Cell]) -> Iterator[Cell]:
    """Each with who sends it: whoever has sent least so far. Those with few holders choose first, and of them the
    large; what is too much for one holder is cut."""
    lacked = [cell for cell in wanted if cell.holders[0][0] != cell.target]
    yield from (cell for cell in wanted if cell.holders[0][0] == cell.target)
    senders = {rank for cell in lacked for rank, _ in cell.holders}
    most = math.ceil(sum(cell.nbytes for cell in lacked) / (FINE * len(senders))) if lacked else 0
    sent = defaultdict[int, int](int)
    fine = [part for cell in lacked for part in _parts(cell, most)]
    for cell in sorted(fine, key=lambda cell: (len(cell.holders), -cell.nbytes)):
        holder = min(cell.holders, key=lambda holder: sent[holder[0]])
        sent[holder[0]] += cell.nbytes
        yield cell._replace(holders=(holder,))


def _parts(cell: Cell, most: int) -> Iterator[Cell]:
    """A cell cut along its longest axis, so that several holders can send of it, if it has more than `most` bytes."""
    lengths = sizes(cell.box)
    longest = max(lengths, default=1)
    count = min(len(cell.holders), math.ceil(cell.nbytes / most), longest)
    if count <= 1:
        yield cell
        return
    axis = lengths.index(longest)
    for k in range(count):
        box = (*cell.box[:axis], cut(*cell.box[axis], k, k + 1, count), *cell.box[axis + 1 :])
        yield cell._replace(box=box, nbytes=cell.nbytes // longest * sizes(box)[axis])
