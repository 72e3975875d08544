"""Layouts: one annotation that says which rank holds which part of a tensor.

A `Layout` is a union of `Shard`s. A shard arranges its ranks in a grid, and every axis of the grid has a role:
it splits a dimension of the tensor, holds duplicates, or holds terms that are still to be combined (`SUM`,
`MAX`, `MIN`). The axis between the shards has a role too; shards may differ in size (heterogeneous groups) and in
their share of the work (`ratio`). Data, tensor, pipeline, expert and sharded-data parallelism are all values of
this one type, after HSPMD in Hetu v2 (Haoyang Li et al., 2025) and the placements of GSPMD.

`Layout.pieces` gives the whole meaning: rank -> (box, term, copy). Sizes need not divide: boundaries are rounded down.
Left out: strided and block-cyclic splits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from ...core.errors import ArgumentError, AxisError, did_you_mean
from ...core.types import Box, Size
from ...plain_data import form, read
from ...ranges import Count, Or, Whole
from .boxes import cut, sizes

DUP, SUM, MAX, MIN = -1, -2, -3, -4
NAMES = {DUP: "dup", SUM: "sum", MAX: "max", MIN: "min"}
PENDING: dict[int | None, str] = {role: NAMES[role] for role in (SUM, MAX, MIN)}  # how to combine; not None
ROLES = {name: role for role, name in NAMES.items()}

ACROSS = (-1, 0)  # the identity of the axis between the parts; the others are (part, position)

MeshAxis = tuple[int, int]
PendingTerm = tuple[tuple[tuple[int, int, int], int], ...]


class Piece(NamedTuple):
    """What one rank holds: an index range per dimension, a term of a pending sum, and the copy that it belongs to.

    `term` lists ((role, axis position, degree), coordinate) for every pending axis; () is a complete value.
    Each `copy` is complete on its own; pieces of different copies must not be combined.
    """

    box: Box
    term: PendingTerm
    copy: int

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the array that the rank holds."""
        return sizes(self.box)


def _check_role(role: object, where: str) -> None:
    if not isinstance(role, int) or role < MIN:
        raise ArgumentError(f"{where} has role {role!r}", fix="use a dimension (0, 1, ...), DUP, SUM, MAX or MIN")


def _axis(axis: object) -> tuple[int, int]:
    """A checked (role, degree) pair."""
    if not isinstance(axis, Sequence) or len(axis) != 2 or not isinstance(axis[1], int) or axis[1] < 1:
        raise ArgumentError(
            f"{axis!r} is no axis of a shard", fix="give pairs (role, degree), such as ((0, 2), (SUM, 4))"
        )
    _check_role(axis[0], "an axis of a shard")
    return axis[0], axis[1]


@dataclass(frozen=True, slots=True)
class Shard:
    """Ranks in a row-major grid; `axes` holds (role, degree) from the outermost (slowest) axis to the innermost.

    The position of an axis is its identity, so duplicate axes are kept. Without axes one rank holds everything.

    >>> Shard((0, 1, 2, 3), ((0, 2), (DUP, 2)))
    Shard([0/2, dup/2] on 0-3)
    """

    ranks: tuple[int, ...]
    axes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "axes", tuple(map(_axis, self.axes)))
        if not self.ranks or len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise ArgumentError(f"a shard on ranks {self.ranks}", fix="name one or more different ranks from 0 up")
        if (cells := math.prod(n for _, n in self.axes)) != len(self.ranks):
            raise ArgumentError(
                f"axes {self.axes} make {cells} cells for {len(self.ranks)} ranks",
                fix="the degrees of the axes must multiply to the number of ranks",
            )

    def coordinates(self, index: int) -> tuple[int, ...]:
        """The place of the `index`-th rank in the grid."""
        place = []
        for _, n in reversed(self.axes):
            index, coordinate = divmod(index, n)
            place.append(coordinate)
        return tuple(reversed(place))

    def __str__(self) -> str:
        axes = ", ".join(f"{NAMES.get(role, role)}/{n}" for role, n in self.axes)
        return f"[{axes}] on {show_ranks(self.ranks)}"

    def __repr__(self) -> str:
        return f"Shard({self})"


@dataclass(frozen=True, slots=True)
class Layout:
    """`parts` side by side; `across` is the role of the outermost axis, between them; `ratio` their uneven shares.

    >>> hetero = Layout((Shard((0, 1), ((1, 2),)), Shard((2,))), across=0, ratio=(2, 1))
    >>> hetero
    Layout([1/2] on 0-1 | [] on 2, across 0 as 2:1)
    >>> hetero.pieces((6, 4))[1].box
    ((0, 4), (2, 4))
    """

    parts: Annotated[tuple[Shard, ...], Or(Shard)]
    across: Whole = DUP
    ratio: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parts = (self.parts,) if isinstance(self.parts, Shard) else tuple(self.parts)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "ratio", tuple(self.ratio))
        _check_role(self.across, "the relation between parts")
        if not parts or len(set(self.ranks)) != len(self.ranks):
            raise ArgumentError(f"a layout on ranks {self.ranks}", fix="give parts that share no rank")
        if self.ratio and (len(self.ratio) != len(parts) or min(self.ratio) < 1 or self.across < 0):
            raise ArgumentError(
                f"ratio {self.ratio} for {len(parts)} parts, across {NAMES.get(self.across, self.across)}",
                fix="give one positive share per part, and only where `across` is a dimension",
            )
        if len({role for role, _ in self.axes().values() if role in PENDING}) > 1:
            raise ArgumentError(f"{self} mixes pending sums, maxima and minima", fix="use one kind in a layout")

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of all parts."""
        return tuple(rank for part in self.parts for rank in part.ranks)

    @property
    def pending(self) -> int | None:
        """The role (`SUM`, `MAX` or `MIN`) with which the terms are still to be combined; None if complete."""
        return next((role for role, _ in self.axes().values() if role in PENDING), None)

    def axes(self) -> dict[MeshAxis, tuple[int, int]]:
        """Axis -> (role, degree), the outermost first: `ACROSS`, then (part, position) for every axis of each part."""
        found = {ACROSS: (self.across, len(self.parts))}
        for p, part in enumerate(self.parts):
            found.update({(p, position): axis for position, axis in enumerate(part.axes)})
        return found

    def places(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """(rank, part, coordinates inside the part) of every rank, in the order of the layout."""
        for p, part in enumerate(self.parts):
            for index, rank in enumerate(part.ranks):
                yield rank, p, part.coordinates(index)

    def pieces(self, shape: Sequence[Size]) -> Mapping[int, Piece]:
        """What every rank holds of a tensor of `shape`. AxisError if the layout splits a dimension it lacks."""
        return _pieces(self, tuple(shape))

    def local_shape(self, shape: Sequence[Size], rank: int) -> tuple[int, ...]:
        """The shape of the array that `rank` holds."""
        return self.pieces(shape)[rank].shape

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dump`; `from_json` reads it back."""
        parts = [{"ranks": [*p.ranks], "axes": [[NAMES.get(r, r), n] for r, n in p.axes]} for p in self.parts]
        return {"parts": parts, "across": NAMES.get(self.across, self.across), "ratio": [*self.ratio]}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Layout:
        """The layout that `to_json` wrote.

        >>> layout = Layout(Shard((0, 1), ((SUM, 2),)))
        >>> Layout.from_json(layout.to_json()) == layout
        True
        """
        try:
            whole = functools.partial(read, tuple[int, ...])
            parts = [Shard(whole(p["ranks"]), tuple((_role(r), n) for r, n in p["axes"])) for p in data["parts"]]
            return Layout(tuple(parts), _role(data["across"]), whole(data["ratio"]))
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"{data!r} is not a layout ({error!r})", fix="pass what to_json returned") from None

    def __str__(self) -> str:
        text = " | ".join(map(str, self.parts))
        if len(self.parts) > 1:
            text += f", across {NAMES.get(self.across, self.across)}"
        return text + (f" as {':'.join(map(str, self.ratio))}" if self.ratio else "")

    def __repr__(self) -> str:
        return f"Layout({self})"


form(Layout, Layout.to_json, Layout.from_json)


@functools.lru_cache(maxsize=1 << 14)  # asked for rank by rank, and in every micro-batch
def _pieces(layout: Layout, shape: tuple[Size, ...]) -> Mapping[int, Piece]:
    if (most := max(role for role, _ in layout.axes().values())) >= len(shape):
        fix = f"split dimensions 0 to {len(shape) - 1}" if shape else "a scalar cannot be split"
        raise AxisError(f"{layout} splits dimension {most} of a tensor of shape {shape}", fix=fix)
    weights = layout.ratio or (1,) * len(layout.parts)
    found = {}
    for rank, p, place in layout.places():
        box = [(0, int(size)) for size in shape]
        term = []
        if layout.across >= 0:
            box[layout.across] = cut(*box[layout.across], sum(weights[:p]), sum(weights[: p + 1]), sum(weights))
        elif layout.across in PENDING:
            term.append(((layout.across, -1, len(layout.parts)), p))
        for position, ((role, n), at) in enumerate(zip(layout.parts[p].axes, place)):
            if role >= 0:
                box[role] = cut(*box[role], at, at + 1, n)
            elif role in PENDING:
                term.append(((role, position, n), at))
        found[rank] = Piece(tuple(box), tuple(term), p if layout.across == DUP else 0)
    return MappingProxyType(found)


def _role(value: int | str) -> int:
    """The role of its JSON form: a dimension, or a name such as "sum"."""
    if isinstance(value, int):
        return value
    if value not in ROLES:
        raise ArgumentError(f"unknown role {value!r}", fix=did_you_mean(value, ROLES))
    return ROLES[value]


class Mesh:
    """Ranks in a grid with named axes; it writes layouts.

    >>> mesh = Mesh((2, 4), ("data", "model"))
    >>> mesh.layout(data=0), mesh.layout(model=1)
    (Layout([0/2, dup/4] on 0-7), Layout([dup/2, 1/4] on 0-7))
    >>> mesh.group("model", rank=5)
    (4, 5, 6, 7)
    """

    def __init__(self, sizes: Sequence[int], names: Sequence[str], ranks: Sequence[int] | None = None) -> None:
        if len(sizes) != len(names) or len(set(names)) != len(names):
            raise ArgumentError(f"mesh of sizes {sizes} and names {names}", fix="give every axis one name of its own")
        self.sizes, self.names = tuple(sizes), tuple(names)
        self.ranks = tuple(range(math.prod(sizes)) if ranks is None else ranks)
        self._shard = Shard(self.ranks, tuple((DUP, n) for n in self.sizes))

    def layout(self, **roles: Whole) -> Layout:
        """The layout with these roles of the named axes; the other axes hold duplicates."""
        for name in roles:
            self._position(name)
        return Layout((Shard(self.ranks, tuple((roles.get(name, DUP), n) for name, n in zip(self.names, self.sizes))),))

    def group(self, name: str, rank: Count) -> tuple[int, ...]:
        """The ranks that differ from `rank` along the axis `name` only, and `rank` itself."""
        position = self._position(name)
        if rank not in self.ranks:
            raise ArgumentError(f"rank {rank} is not in the mesh", fix=f"its ranks are {show_ranks(self.ranks)}")
        stride = math.prod(self.sizes[position + 1 :])
        index = self.ranks.index(rank)
        first = index - self._shard.coordinates(index)[position] * stride
        return tuple(self.ranks[first + i * stride] for i in range(self.sizes[position]))

    def _position(self, name: str) -> int:
        if name not in self.names:
            raise ArgumentError(f"the mesh has no axis {name!r}", fix=did_you_mean(name, self.names))
        return self.names.index(name)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={n}" for name, n in zip(self.names, self.sizes))
        return f"Mesh({axes} on {show_ranks(self.ranks)})"


def show_ranks(ranks: Sequence[int]) -> str:
    """`0-3` for consecutive ranks, else `0,2,4`."""
    if len(ranks) > 1 and tuple(ranks) == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
