"""Rows that travel from the ranks that hold them to those that work on them, and back: tokens of experts by all-to-all.

An operator of `ROUTES` whose rows and rooms are split among the same ranks works on rooms of this rank's own rows,
one for each choice. One all-to-all brings what lies in them to the rooms of all, or fetches it from there (D. Lepikhin
et al., "GShard", 2020, where rooms belong to groups, so that all messages have one size). All ranks know all ids, so
nobody says what comes. What leaves a rank are its rows, however many rooms there are. Left out: hosts, within which
such an exchange could go first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ...core.backend import Scratch
from ...core.graph import OPS, Node
from ...core.kernels import Call
from ...core.types import Shape, TensorType
from ...ops.routing import moe_dispatch_check
from ..comm.comm import Comm
from ..comm.nccl import on_host
from ..ops import communicates
from .collectives import groups
from .deduce import Grid
from .layout import DUP, Layout
from .one_axis import ROUTES

Spans = tuple[tuple[int, int], ...]  # (from, to), for each rank of a group


class Traffic(NamedTuple):
    """Who takes part in one, in their order, and the rows and the experts that each of them has."""

    group: tuple[int, ...]
    rows: Spans
    experts: Spans


@dataclass(frozen=True)
class Rooms:
    """The rooms of all experts, and who has what: the rows and the experts of each rank of a group."""

    rows: Spans
    experts: Spans
    count: int  # of all experts
    capacity: int  # rooms of an expert
    away: bool  # rows go to the rooms of their experts; else from there to the rooms of the rank that has the rows


def exchanges(node: Node, wants: Sequence[Layout], outs: Sequence[Layout]) -> list[Traffic]:
    """Those of all groups of ranks in which rows of `node` travel; none where its rooms are whole."""
    if (route := ROUTES.get(node.op)) is None:
        return []
    held = [(want, i.shape) for want, i in zip(wants, node.inputs)] + [(outs[0], node.tensor.shape)]
    rooms, shape = held[-1 if route.at is None else route.at]
    rows, tokens = held[-1 if route.at == 0 else 0]
    axis = len(shape) - 3
    roles = {a: DUP if role == axis else role for a, (role, _) in rooms.axes().items()}
    there, here = rooms.pieces(shape), rows.pieces(tokens)
    return [
        Traffic(group, tuple(here[r].box[-2] for r in group), tuple(there[r].box[axis] for r in group))
        for group in groups(rooms, Grid.of(rooms).layout(roles))
    ]


def exchanged(
    node: Node, inputs: Sequence[Node], mine: Traffic, rank: int, order: int, fetched: dict[tuple[Node, Node], Node]
) -> Node:
    """The local node of one whose rows travel: on rooms of the rows that `rank` has, sent or fetched.

    What is `fetched`, by rooms and ids, is not fetched again.
    """
    route, place = ROUTES[node.op], mine.group.index(rank)
    ids, (low, high) = inputs[route.ids], mine.rows[place]
    choices = OPS["getitem"](ids, key=(*(slice(None) for _ in ids.shape[:-2]), slice(low, high)))
    count = (high - low) * int(ids.shape[-1])
    own = np.arange(count).reshape(high - low, -1)
    given = [*inputs]
    given[route.ids] = OPS["where"](OPS["less"](choices, 0), choices, own)
    *_, experts, capacity, _ = node.tensor.shape if route.at is None else node.inputs[route.at].shape
    rooms = Rooms(mine.rows, mine.experts, int(experts), int(capacity), route.at is None)
    attrs = {"group": mine.group, "rooms": rooms, "place": place, "order": order}
    if route.at is None:
        filled = node.op.make(tuple(given), {**node.attrs, "experts": 1, "capacity": count})
        return OPS["item"].make((route_rows.make((filled, ids), attrs),), {"index": 1})
    if (key := (inputs[route.at], ids)) not in fetched:
        fetched[key] = OPS["item"].make((route_rows.make(key, attrs),), {"index": 1})
    given[route.at] = fetched[key]
    return node.op.make(tuple(given), node.attrs)


def _types(given: TensorType, ids: TensorType, *, rooms: Rooms, place: int, **_: Any) -> tuple[TensorType, TensorType]:
    """What leaves at most, and the rooms here: those of this rank's experts, or of its rows."""
    (low, high), (first, end) = rooms.rows[place], rooms.experts[place]
    here: Shape = (end - first, rooms.capacity) if rooms.away else (1, (high - low) * int(ids.shape[-1]))
    packed = TensorType((int(given.size) // int(given.shape[-1]), given.shape[-1]), given.dtype)
    return packed, TensorType((*given.shape[:-3], *here, given.shape[-1]), given.dtype)


@communicates("route_rows", _types, "all_to_all", scratch=True)
def route_rows(
    xp: ModuleType,
    out: Any,
    given: Any,
    ids: Any,
    *,
    group: tuple[int, ...],
    rooms: Rooms,
    place: int,
    order: int,
    scratch: Scratch,
    comm: Comm | None = None,
) -> list[Call]:
    """Bring rows to the rooms of their experts, or from there to the rooms of this rank's rows; zeros elsewhere."""
    room = (xp if scratch.block is None else scratch).empty(out[1].shape, out[1].dtype)
    return [] if comm is None else [partial(_travel, xp, comm.split(group), out, room, given, ids, rooms)]


def _travel(xp: ModuleType, members: Comm, out: tuple[Any, Any], room: Any, given: Any, ids: Any, rooms: Rooms) -> None:
    """Pack what goes to each rank, exchange it, and put what comes, into the `room` for it, in its place."""
    slots, width = on_host(ids), given.shape[-1]
    moe_dispatch_check(np, None, slots, None, experts=rooms.count, capacity=rooms.capacity)
    leaving, coming = _meeting(slots, rooms, members.rank)[:: 1 if rooms.away else -1]
    counts = [[width * len(places) for places in way] for way in (leaving, coming)]
    packed, made = out[0][: sum(map(len, leaving))], out[1]
    unbuffered = {"mode": "clip"} if xp is np else {}
    xp.take(given.reshape(-1, width), xp.asarray(np.concatenate(leaving)), axis=0, out=packed, **unbuffered)
    arrived = room.reshape(-1, width)[: sum(map(len, coming))]
    members.all_to_all(packed, arrived, (counts[0], counts[1]))
    made.fill(0)
    made.reshape(-1, width)[xp.asarray(np.concatenate(coming))] = arrived


def _meeting(slots: np.ndarray, rooms: Rooms, place: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """For each rank of the group: which rooms of this rank's rows have its rooms, and which rooms here have its rows.

    Both in the order of the rows, so that sender and receiver agree.
    """
    slots = slots.reshape(-1, *slots.shape[-2:])

    def rows(of: int) -> np.ndarray:
        return slots[:, slice(*rooms.rows[of])].reshape(len(slots), -1)

    def within(choices: np.ndarray, of: int) -> np.ndarray:
        first, end = rooms.experts[of]
        return (choices >= first * rooms.capacity) & (choices < end * rooms.capacity)

    mine, (first, end) = rows(place), rooms.experts[place]
    own, here = [], []
    for other in range(len(rooms.rows)):
        own.append(np.flatnonzero(within(mine, other)))
        group, at = np.nonzero(within(theirs := rows(other), place))
        here.append((group * (end - first) - first) * rooms.capacity + theirs[group, at])
    return own, here
