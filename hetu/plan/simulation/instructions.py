"""The instruction list of every rank of a job, without running one: what computes, and what communicates with whom.

A rank's graph is cut, optimized and scheduled as its executor would do it. Ranks in the same stage that hold parts of
equal sizes have equal lists up to whom they talk to, so a thousand ranks are compiled as a few. Left out: uneven splits
of results that are even in every feed and variable.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import GraphError, ShapeError, UnknownNameError, did_you_mean
from ...core.graph import Node
from ...core.memory import Storage, types_of
from ...core.placement import attach
from ...core.program import Program
from ...core.subgraph import SubGraph
from ...core.types import Dim, has_dim, show_shape
from ...dist.comm.seat import Seat
from ...dist.cut.kept import Kept
from ...dist.cut.on_ranks import spread
from ...dist.layout.boxes import intersect, volume
from ...dist.layout.collectives import Collective as Change
from ...dist.layout.collectives import padded
from ...dist.layout.layout import Layout
from ...dist.layout.redistribute import Redistribution, plan
from ...dist.ops import RESHARD
from ...passes import chosen_passes, specialize
from ..costs.profile import MachineProfile
from ..memory.fit import beside, bound, bytes_held, planned_for

FedShape = Sequence[int] | np.ndarray  # an array stands for its shape
Shapes = Mapping[Node, FedShape] | Mapping[str, FedShape]
NOMINAL = 32  # an unknown size that is not that of the batch
AT_ONCE = -1  # the token of a collective that is waited for where it begins


class SimulatedCollective(NamedTuple):
    """One of the ranks `group`, of which each gives `nbytes`. With a `token` of its own it is only started."""

    kind: str
    group: tuple[int, ...]
    nbytes: int
    token: int = AT_ONCE


class Wait(NamedTuple):
    """Until the collective started with this token has ended."""

    token: int


class Exchange(NamedTuple):
    """Messages (rank, bytes) that leave without waiting, and the ranks whose messages are waited for."""

    sends: tuple[tuple[int, int], ...]
    recvs: tuple[int, ...]


class Serve(NamedTuple):
    """Bytes to the servers, and bytes from them, which are waited for."""

    sent: int
    received: int


Communication = SimulatedCollective | Wait | Exchange | Serve


@dataclass(frozen=True)
class RankProgram:
    """What the ranks `ranks` run: the nodes in order, bytes of the arena, of feeds and results, and of variables and
    all else that a rank has; and where values lie."""

    ranks: tuple[int, ...]
    order: tuple[Node, ...]
    arena: int
    fed: int
    kept: int
    storages: tuple[Storage, ...]

    @functools.cached_property
    def awaited(self) -> set[int]:
        """The orders of collectives that are only started, and waited for later."""
        return {n.attrs["order"] for n in self.order if n.op.lazy}

    @functools.cached_property
    def live(self) -> list[int]:
        """Bytes of the values in the arena during each node."""
        found: list[int] = bytes_held(self.storages, len(self.order)).tolist()
        return found

    @property
    def peak(self) -> int:
        return self.arena + self.fed + self.kept


class SimulatedJob:
    """The programs of all ranks under a strategy."""

    def __init__(
        self,
        entries: Sequence[Any],
        strategy: Any,
        world_size: int,
        shapes: Shapes,
        precision: str = "float32",
        profile: MachineProfile | None = None,
    ) -> None:
        self.sub, self.world_size = SubGraph("plan", entries, precision), world_size
        self.profile = profile or MachineProfile()
        self.shapes = _fed(self.sub, shapes)
        self.placement = spread(attach(strategy, self.sub.written.outputs, Seat(0, world_size)))
        self.strategy = self.placement.strategy
        self.programs = [self._compile(ranks) for ranks in self._alike().values()]

    def _alike(self) -> dict[Any, tuple[int, ...]]:
        """The ranks in classes that hold parts of equal sizes at equal places of a pipeline."""
        found: dict[int, list[Any]] = {r: [] for r in range(self.world_size)}
        if self.strategy.alone:
            return {(): tuple(found)}
        for stage, layout in enumerate(self.strategy.grids()):
            for rank, part, _ in layout.places():
                found[rank].append((stage, part, rank if len(layout.parts) > 1 else -1))
        leaves = {n.name: tuple(map(int, n.shape)) for n in self.sub.variables} | self.shapes
        held = {(layout, leaves[n]) for n, layout in self.strategy.feeds.items() if n in leaves}
        parts = self.strategy.microbatches  # which divide among the ranks otherwise than the batch
        held |= {(layout, (shape[0] // parts, *shape[1:])) for layout, shape in held if shape and parts > 1}
        for name, kept in self.strategy.variables.items():
            if isinstance(kept, Kept) and name in leaves:
                held |= {(kept.compute, leaves[name]), (kept.store, leaves[name])}
        for layout, shape in held:
            for rank, piece in layout.pieces(shape).items():
                found[rank].append(piece.shape)
        classes: dict[Any, list[int]] = defaultdict(list)
        for rank, key in found.items():
            classes[tuple(key)].append(rank)
        return {key: tuple(ranks) for key, ranks in classes.items()}

    def _compile(self, ranks: tuple[int, ...]) -> RankProgram:
        self.placement.comm = Seat(ranks[0], self.world_size)
        fetches, updates, _ = self.sub.lower(self.shapes, chosen_passes(None), self.placement)
        made = planned_for(self.profile, (fetches, updates))
        mine = {self.placement.variable(v) for v in self.sub.variables}
        storages = tuple({id(s): s for s in map(Storage.final, made.storages.values())}.values())
        kept = sum(int(v.tensor.nbytes) for v in mine if v is not None)
        kept += self.placement.aside(made.order) + bound(self.profile, made)
        return RankProgram(ranks, tuple(made.order), made.arena_bytes, beside(made, fetches), kept, storages)

    # -- communication -------------------------------------------------------------------------------------------

    def action(self, node: Node, program: RankProgram, rank: int) -> list[Communication]:
        """What a communicating node of `program` does on `rank`."""
        a = node.attrs
        if node.op is RESHARD.get(node.op.collective):
            if a["shape"] is None:
                raise GraphError(
                    f"{node!r} is communication written by hand, of which only real ranks know the parts",
                    fix="plan the model without it: a strategy adds its own",
                    site=node.site,
                )
            return routes(a["src"], a["dst"], a["shape"], node.tensor.dtype.itemsize).get(rank, [])
        if node.op.lazy:
            return [Wait(a["order"])]
        if node.op.collective == "served":
            given = sum(int(i.tensor.nbytes) for i in node.inputs if a["parameter"])
            return [Serve(given, sum(int(t.nbytes) for t in types_of(node)))] if a.get("acts", True) else []
        if node.op.collective:
            group = self._moved(a.get("group", range(self.world_size)), program.ranks[0], rank)
            token = a["order"] if a.get("order") in program.awaited else AT_ONCE
            before = [] if a.get("ends") is None else [Wait(a["ends"])]
            return [*before, SimulatedCollective(node.op.collective, tuple(group), sent(node), token)]
        fix = 'declare it: @ht.op(role=Role.COMMUNICATION, collective="all_reduce")'
        raise GraphError(f"{node!r} does not say what it sends", fix=fix, site=node.site)

    def _moved(self, group: tuple[int, ...], of: int, to: int) -> tuple[int, ...]:
        """The group that is to the rank `to` what `group` is to the rank `of`: it varies along the same axes."""
        if to in group or of == to:
            return group
        places, ranks = self._places
        varies = [len({places[r][k] for r in group}) > 1 for k in range(len(places[to]))]
        return tuple(ranks[tuple(g if v else mine for g, v, mine in zip(places[r], varies, places[to]))] for r in group)

    @functools.cached_property
    def _places(self) -> tuple[dict[int, tuple[int, ...]], dict[tuple[int, ...], int]]:
        places = {rank: (part, *at) for rank, part, at in self.strategy.base.places()}
        return places, {place: rank for rank, place in places.items()}


def shapes_of(sub: SubGraph, batch_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what is fed: an open first size is that of the batch, any other open size is `NOMINAL`."""

    def known(node: Node) -> tuple[int, ...]:
        return tuple(s if not isinstance(s, Dim) else NOMINAL if k else batch_size for k, s in enumerate(node.shape))

    return {name: known(node) for name, node in sub.placeholders.items()}


def typed(sub: SubGraph, shapes: Mapping[str, Sequence[int]], parts: int = 1) -> tuple[Node, ...]:
    """The graph as it is written, with the sizes of one of so many parts of the batch."""
    sizes = {
        (name, axis): size // (1 if axis else parts)
        for name, shape in shapes.items()
        for axis, size in enumerate(shape)
        if isinstance(sub.placeholders[name].shape[axis], Dim)
    }
    return specialize(sub.written.outputs, sizes)


def _fed(sub: SubGraph, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shape of every placeholder: the one in `shapes`, else its own, if that is known."""
    named = {
        key.name if isinstance(key, Node) else key: tuple(shape.shape if isinstance(shape, np.ndarray) else shape)
        for key, shape in shapes.items()
    }
    for name in named.keys() - sub.placeholders.keys():
        fix = did_you_mean(name, sub.placeholders) or "nothing is fed"
        raise UnknownNameError(f"there is no placeholder {name!r}", fix=fix)
    found = {name: named.get(name, node.shape) for name, node in sub.placeholders.items()}
    for name, shape in found.items():
        if has_dim(shape):
            raise ShapeError(f"the shape of {name!r} is {show_shape(shape)}", fix=f"say it: shapes={{{name!r}: (...)}}")
    return {name: tuple(map(int, shape)) for name, shape in found.items()}


@functools.lru_cache(maxsize=4096)
def routes(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int) -> dict[int, list[Communication]]:
    """What each rank does to bring a tensor from one layout to another: `Redistribution.run` in words."""
    way = plan(src, dst, shape)
    found: dict[int, list[Communication]] = defaultdict(list)
    for change in way.collectives:
        for rank, given in zip(change.group, _given(change)):
            found[rank].append(SimulatedCollective(change.kind, change.group, itemsize * given))
    if not way.collectives and way.kind not in ("nothing", "slice"):
        found |= _messages(way, itemsize)
    return found


def _given(change: Change) -> list[int]:
    """Elements that each rank gives to a collective."""
    n = len(change.group)
    if change.kind in ("all_gather", "reduce_scatter"):
        return [padded(change.old) if change.kind == "all_gather" else n * padded(change.new)] * n
    boxes = [piece.box for piece in change.old]
    return [volume(box if change.kind == "all_to_all" else intersect(box, change.box)) for box in boxes]


def _messages(way: Redistribution, itemsize: int) -> dict[int, list[Communication]]:
    sends: dict[int, list[tuple[int, int]]] = defaultdict(list)
    recvs: dict[int, list[int]] = defaultdict(list)
    for (source, target), boxes in way.between.items():
        if source != target:
            sends[source].append((target, itemsize * sum(map(volume, boxes))))
            recvs[target].append(source)
    return {r: [Exchange(tuple(sends[r]), tuple(recvs[r]))] for r in {*sends, *recvs}}


# The bytes that each of n ranks sends when its operand has `nbytes`.
SENDS: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda n, nbytes: 2 * (n - 1) * nbytes // n,
    "reduce_scatter": lambda n, nbytes: (n - 1) * nbytes // n,
    "all_to_all": lambda n, nbytes: (n - 1) * nbytes // n,
    "all_gather": lambda n, nbytes: (n - 1) * nbytes,
}


def sent(node: Node) -> int:
    """The bytes that a rank gives to a collective: its inputs, or what packs them, the first of several results."""
    types = node.type[:1] if isinstance(node.type, tuple) else [i.tensor for i in node.inputs]
    return sum(int(t.nbytes) for t in types)


def bytes_between_ranks(program: Program, ranks: int) -> int:
    """Bytes that this rank sends to others per step, if all ranks take part in each collective.

    >>> import hetu as ht
    >>> from hetu.dist import DataParallel, run_ranks
    >>> def work(comm):
    ...     x, w = ht.placeholder("x", (None, 100)), ht.variable("w", ht.init.zeros, (100, 1))
    ...     loss = ht.mean(x @ w)
    ...     ex = ht.Executor([ht.optim.SGD(0.1).minimize(loss)], strategy=DataParallel(), comm=comm)
    ...     return bytes_between_ranks(ex.program({x: np.ones((4, 100))}), comm.world_size)
    >>> import numpy as np
    >>> run_ranks(2, work)
    [400, 400]
    """
    nodes = [s.node for s in program.steps if s.node.op.collective in SENDS]
    return sum(SENDS[n.op.collective](ranks, sent(n)) for n in nodes)
