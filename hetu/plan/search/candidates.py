"""The strategies among which the planner chooses: Galvatron's products of degrees as builders, and plans that differ
inside.

Products (X. Miao et al., "Galvatron", VLDB 2023, section 3) are those in which all layers are alike: stages x data x
tensor, cut at the slowest links in this order, data parallelism plain or sharded. `by_operator` splits each operator
its own way. Where a plan does not fit into memory, `sharded_layers` decides for each layer how far it is sharded. The
simulator says what a candidate costs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, did_you_mean
from ...core.graph import Node, topological
from ...core.op import Role
from ...dist.cut.axes import tensor_axes
from ...dist.cut.builders import MEGATRON, Axes, ExpertParallel, Parallel, RankRows, RuleBook
from ...dist.cut.heterogeneous import Heterogeneous
from ...dist.cut.kept import Kept, owners_of
from ...dist.cut.pipeline_builder import Pipeline
from ...dist.cut.strategy import Builder, Strategy
from ...dist.layout.layout import SUM, Mesh
from ...ps.store.policies import Cache
from ...strategies.hybrid import Hybrid
from ...strategies.partners import PartialReduce
from ...strategies.servable import Servable, choices
from ..costs.links import Channel, Cluster, in_bucket
from ..why import Candidate, Rated
from .elimination import fastest_within
from .operators import Operators, experts_of

LEVELS = (0, 1, 3)  # how much is sharded over data-parallel ranks: nothing, optimizer state, variables too
GPIPE = ", gpipe"
FIRST = (1, 2, 3, 4, 8, 16)  # numbers of layers that are tried, from the first on
MICROBATCHES = (4, 2, 1, 8, 16, 32, 64)  # where a search begins, and where it goes from there
SMALLER = 0.95  # the share of another's bytes that a plan which is tried for them has to go below
NEAR = 2.0  # a pipeline that takes longer, by this factor, than a plan that fits is not looked at any closer


@dataclass(frozen=True)
class Hints:
    """What an expert knows already; None leaves it to the planner.

    stages, data, tensor: degrees. zero: 0, 1 or 3. split: name patterns -> axis for tensor parallelism. cache: what
    each rank may keep of tables on servers (`hetu.ps.Cache`): its bounds change training, so it is never chosen.
    """

    stages: int | None = None
    data: int | None = None
    tensor: int | None = None
    zero: int | None = None
    split: Mapping[str, int] | None = None
    cache: Cache | None = None

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Hints:
        """
        >>> Hints.of({"tensor": 2}).allow(data=4, tensor=2), Hints.of({"tensor": 2}).allow(tensor=1)
        (True, False)
        """
        for name in given or {}:
            if name not in Hints.__dataclass_fields__:
                raise ArgumentError(f"a hint {name!r}", fix=did_you_mean(name, Hints.__dataclass_fields__))
        hints = Hints(**(given or {}))
        for name in ("stages", "data", "tensor"):
            if (degree := getattr(hints, name)) is not None and not (isinstance(degree, int) and degree > 0):
                raise ArgumentError(f"the hint {name} is {degree!r}", fix="give a whole number of at least 1")
        if hints.zero not in (None, *LEVELS):
            raise ArgumentError(f"the hint zero is {hints.zero!r}", fix=f"give one of {', '.join(map(str, LEVELS))}")
        return hints

    def splits(self, outputs: Sequence[Node]) -> Mapping[str, int]:
        """What tensor parallelism splits: the patterns, if there is anything in this graph; else none."""
        split = RuleBook.of(MEGATRON if self.split is None else self.split)
        trained = [n for n in topological(outputs) if n.role is Role.VARIABLE and n.attrs["trainable"]]
        return split if split.axes(trained) or (split.by_graph and tensor_axes(outputs, 2)) else {}

    def allow(self, **degrees: int) -> bool:
        return all(getattr(self, name) in (None, value) for name, value in degrees.items())


def candidates(outputs: Sequence[Node], world_size: int, hints: Hints, batch: int | None = None) -> Iterator[Candidate]:
    """Every product of pipeline, data and tensor parallelism on `world_size` ranks that the hints allow."""
    split = hints.splits(outputs)
    for stages in divisors(world_size):
        for data in reversed(divisors(world_size // stages)):
            tensor = world_size // stages // data
            # of pipelines only too large ones are sharded
            levels = LEVELS if stages == 1 else (0,) if hints.zero is None else (0, 3)
            for zero in levels if data > 1 else (0,):
                allowed = hints.allow(stages=stages, data=data, tensor=tensor, **({"zero": zero} if data > 1 else {}))
                if allowed and (tensor == 1 or split):
                    yield from _products(stages, data, tensor, zero, split, batch)


def divisors(number: int) -> list[int]:
    """
    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]


def _products(
    stages: int, data: int, tensor: int, zero: int, split: Mapping[str, int], batch: int | None
) -> Iterator[Candidate]:
    """The plan with these degrees; a pipeline begins with the first number of micro-batches that divides the batch."""
    sharded = f" zero{zero}" if zero else ""
    name = f"{_degree('dp', data)}{_degree('tp', tensor)}{_degree('pp', stages)}{sharded}".strip() or "one rank"
    if stages == 1:
        yield Candidate(name, Parallel(data=data, tensor=tensor, zero=zero, split=split))
    elif counts := microbatches(batch, data):
        builder = Pipeline(stages, counts[0], data=data, tensor=tensor, zero=zero, split=split)
        yield Candidate(f"{name}, {counts[0]} micro-batches", builder)


def microbatches(batch: int | None, data: int) -> list[int]:
    """The numbers of micro-batches of which each gives each of the data-parallel ranks equally many rows."""
    return [count for count in MICROBATCHES if batch is None or batch % (count * data) == 0]


def beside(r: Rated, batch: int | None) -> Iterator[Candidate]:
    """The same pipeline with the next smaller and the next larger number of micro-batches, and the other schedule."""
    now = r.builder.microbatches
    yield from in_other_parts(r, microbatches(batch, r.builder.data))
    name, other = (r.name.removesuffix(GPIPE), "1f1b") if r.name.endswith(GPIPE) else (r.name + GPIPE, "gpipe")
    if now > 1:
        yield Candidate(name, r.builder.but(schedule=other))


def in_other_parts(r: Candidate, counts: Sequence[int]) -> Iterator[Candidate]:
    """The same pipeline with the next smaller and the next larger of these numbers of micro-batches."""
    now = r.builder.microbatches
    for count in (*sorted(n for n in counts if n < now)[-1:], *sorted(n for n in counts if n > now)[:1]):
        name = r.name.replace(f"{now} micro-batches", f"{count} micro-batches")
        yield Candidate(name, r.builder.but(microbatches=count))


def best_pipelines(rated: Sequence[Rated], budget: float) -> dict[tuple[int, int, int], Rated]:
    """Degrees -> the best pipeline that has them: one that fits or is nearest to it, of those the fastest.

    Those that are so much slower than another plan that fits that no number of micro-batches changes it are left out.
    Of plans that are too large, one that is not clearly smaller is not nearer.
    """
    least = min((r.seconds for r in rated if r.valid and r.peak <= budget), default=math.inf)
    best: dict[tuple[int, int, int], Rated] = {}
    for r in (r for r in rated if r.valid and isinstance(r.builder, Pipeline)):
        stages, count = r.builder.stages or 1, r.builder.microbatches
        # Of the passes that the last stage waits for or makes, one micro-batch would leave as many as there are stages,
        # and would be that much faster, if each took as long whatever its rows; with many there are few to wait for.
        if r.seconds > least * max(NEAR, (count + stages - 1) / min(stages, count)):
            continue
        degrees = stages, r.builder.data, r.builder.tensor
        best[degrees] = min(best.get(degrees, r), r, key=lambda r: (_excess(r.peak, budget), r.seconds))
    return best


def _excess(peak: int, budget: float) -> int:
    """How much too large a plan is, in steps of `SMALLER`."""
    return 0 if peak <= budget else 1 + int(math.log(budget / peak, SMALLER))


def expert_parallel(outputs: Sequence[Node], hints: Hints, cluster: Cluster, world_size: int) -> Iterator[Candidate]:
    """The experts of a graph that has any, divided among all ranks, or among those of groups that share no rows."""
    experts = experts_of(outputs)
    if experts and world_size > 1 and hints.allow(stages=1, data=world_size, tensor=1, zero=0):
        of = [cluster.host(r) for r in range(world_size)]
        hosts = [tuple(r for r, host in enumerate(of) if host == h) for h in range(of[-1] + 1)]
        yield Candidate(f"ep{world_size}", ExpertParallel(experts, hosts=hosts if len(hosts) > 1 else ()))
    for tensor in divisors(world_size)[1:] if experts and hints.split is None else ():
        if hints.allow(stages=1, data=world_size // tensor, tensor=tensor, zero=0):
            name = f"{_degree('dp', world_size // tensor)} experts over {tensor}".strip()
            yield Candidate(name, Layered(world_size // tensor, tensor, {}, experts))


def by_operator(operators: Operators, room: float = math.inf, copies: int = 1) -> Iterator[tuple[float, Candidate]]:
    """Each operator split over the tensor axis in ways that are fast with its neighbors, in so many copies of each
    other, or in the one that is fastest with at most `room` bytes of variables on a rank; with the seconds that the
    tables tell. None that is plain data parallelism."""
    data, tensor = operators.data, operators.ranks
    how = "updated" if math.isinf(room) else "stored"
    for found in operators.choices() if math.isinf(room) else [operators.best(room)]:
        parts: dict[str, Any] = {how: found.stored, "feeds": found.feeds, "copies": copies}
        layered = Layered(data, tensor, {}, found.split, **parts)
        name = f"{_degree('dp', data)} operators over {tensor}{f', {copies} times' if copies > 1 else ''}".strip()
        if found.split or found.stored:
            named = {"split": found.split, f"{how} in parts": found.stored}
            axes = {what: [f"{n} by axis {axis}" for n, axis in of.items()] for what, of in named.items() if of}
            counts = ", ".join(f"{len(names)} {what}" for what, names in axes.items())
            detail = "; ".join(f"{what}: {', '.join(names)}" for what, names in axes.items())
            yield found.seconds, Candidate(f"{name} ({counts})", layered, detail)
        elif found.feeds and copies > 1:
            yield found.seconds, Candidate(name, layered, f"shares of {', '.join(found.feeds)} only")
        elif not found.feeds and data == copies == 1:
            detail = "shares nothing: to communicate takes longer"
            yield found.seconds, Candidate("each rank alone", layered, detail)


def first_in_parts(
    trained: Sequence[Node], world_size: int, hints: Hints, feeds: Collection[str]
) -> Iterator[Candidate]:
    """Data parallelism in which ranks of groups, or all, update the first layers in parts. Their gradients come last,
    when nothing is left to compute meanwhile: sums over the others begin sooner, and these take fewer messages."""
    layers = [*dict.fromkeys(map(layer_of, trained))]
    free = hints.split is None and hints.zero is None
    for tensor in divisors(world_size)[1:] if free else ():
        data, counts = world_size // tensor, {n for n in (*FIRST, len(layers) - 1) if 0 < n < len(layers)}
        for count in sorted(counts) if hints.allow(stages=1, data=data, tensor=tensor) else ():
            first = [(v.name, v.shape) for v in trained if layer_of(v) in layers[:count]]
            axes = {n: d for n, shape in first for d in reversed(range(len(shape))) if shape[d] >= tensor}
            layered = Layered(data, tensor, {}, {}, updated=axes, feeds=dict.fromkeys(feeds, 0))
            name = f"{_degree('dp', data)} operators over {tensor} (first {count} of {len(layers)} layers in parts)"
            yield Candidate(name.strip(), layered, f"updated in parts: {', '.join(layers[:count])}")


def _degree(kind: str, n: int) -> str:
    return f" {kind}{n}" if n > 1 else ""


def served_candidates(outputs: Sequence[Node], hints: Hints, batch: int, world_size: int) -> Iterator[Candidate]:
    """Data parallelism with one, two, four, ..., all looked-up tables on servers: first the tables that save most bytes
    of communication, then the largest, which ranks need not keep.

    Each server has an equal range of the rows of each. If the hints give a cache, the tables are cached.
    """
    servable = Servable(outputs)
    rated = choices(servable, batch, world_size)
    for v in servable.tables if hints.cache else ():
        servable.parameter(v, sparse=True, reduce="sum", cached=True)  # ArgumentError if its rule cannot be cached
    saved = {v: rated[v].by_ranks - rated[v].by_servers for v in rated if v in servable.tables}
    order = sorted(saved, key=lambda v: (-max(0, saved[v]), -int(v.tensor.nbytes)))
    counts = {len(order), sum(rated[v].on_servers for v in order), *(1 << k for k in range(len(order).bit_length()))}
    for count in sorted(counts - {0}):
        hybrid = Hybrid(served=[v.name for v in order[:count]], batch_size=0, cache=hints.cache)
        how = f"{count} of {len(order)} tables on servers{', cached' if hints.cache else ''}"
        name = f"{_degree('dp', world_size)}, {how}".strip(" ,")
        yield Candidate(name, hybrid, f"on servers: {', '.join(v.name for v in order[:count])}")


def partial_candidates(world_size: int) -> Iterator[Candidate]:
    """Ranks that average with those who are ready: with half of all, a quarter, or all but one."""
    for group in sorted({world_size // 4, world_size // 2, world_size - 1} - {0, 1}):
        if group < world_size:
            yield Candidate(
                f"partial reduce, groups of {group}", PartialReduce(group), "trains otherwise than one process"
            )


class Layered(Parallel):
    """Data x tensor parallelism that differs from layer to layer and from variable to variable.

    levels: layer -> how far it is sharded over data-parallel ranks, by default not at all. split: name -> axis that
    tensor parallelism splits. stored: name -> axis along which tensor-parallel ranks keep a variable, which they gather
    to compute; those of `updated` all keep, but each updates its part, which are gathered. feeds: name -> axis of feeds
    that these ranks share: where nothing is split they are data parallel. copies: groups of ranks that do all alike.

    >>> Layered(2, 1, {"mlp/up": 3})
    Layered(data=2, tensor=1, levels={'mlp/up': 3})
    """

    def __init__(
        self,
        data: int,
        tensor: int,
        levels: Mapping[str, int],
        split: Mapping[str, int] | None = None,
        *,
        stored: Mapping[str, int] | None = None,
        updated: Mapping[str, int] | None = None,
        feeds: Mapping[str, int] | None = None,
        copies: int = 1,
    ) -> None:
        super().__init__(data=data, tensor=tensor, split=split)
        self.levels, self.feeds, self.copies = dict(levels), dict(feeds or {}), copies
        self.stored, self.updated = dict(stored or {}), dict(updated or {})

    def mesh(self, ranks: Sequence[int]) -> RankRows:
        """These ranks in a grid with the axes `data` and `tensor`, or in several of them."""
        if self.copies == 1:
            return super().mesh(ranks)
        return Mesh((self.copies, self.data or 1, self.tensor), ("copies", "data", "tensor"), ranks)

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        strategy = super().build(outputs, world_size)
        mesh = self.mesh(range(world_size))
        for name, axis in self.feeds.items():
            if name in strategy.feeds:
                strategy.feeds[name] = mesh.layout(data=0, tensor=axis)
        return strategy

    def _axes(self, outputs: Sequence[Node], mesh: RankRows) -> Axes:
        axes = super()._axes(outputs, mesh)
        return {**axes, "tensor": {**self.updated, **self.stored, **axes["tensor"]}}

    def _kept(self, node: Node, owner: Node, mesh: RankRows, axes: Axes) -> Kept | None:
        uniform = Parallel(data=self.data, tensor=self.tensor, zero=self.levels.get(layer_of(owner), 0))
        kept = uniform._kept(node, owner, mesh, axes)
        if node is owner and kept and node.name in self.updated:  # of whose gradient each sums its part alone
            part = mesh.layout(data=SUM, tensor=self.updated[node.name])
            return Kept(mesh.layout(), mesh.layout(), through=(part,) if (self.data or 1) > 1 else ())
        return Kept(mesh.layout(), kept.store) if node is owner and node.name in self.stored and kept else kept


@dataclass(frozen=True)
class Bucketed(Builder):
    """A strategy whose sums and gathered variables are joined in buckets of at most `nbytes`: of smaller ones more
    travel beside the computation, of larger ones fewer wait for messages."""

    builder: Builder
    nbytes: int

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        return replace(self.builder.build(outputs, world_size), bucket_bytes=self.nbytes)


def shards_layers(builder: Any) -> bool:
    """Whether the layers of a plan can be sharded one by one over data-parallel ranks."""
    plain = isinstance(builder, Parallel) and not isinstance(builder, Pipeline | Heterogeneous) and not builder.experts
    return plain and builder.data != 1


def layer_of(variable: Node) -> str:
    """The layer of a trained variable: its name without the last part."""
    return variable.name.rpartition("/")[0]


def sharded_layers(
    outputs: Sequence[Node], plan: Candidate, cluster: Cluster, world_size: int, budget: float
) -> Candidate:
    """The same plan with the fastest levels of its layers at which variables and their state take at most `budget`
    bytes.

    The time of a level is that of its collectives on the link of the data-parallel ranks. BudgetError if none fits.
    """
    mesh = plan.builder.mesh(range(world_size))
    data, group = mesh.sizes[-2], mesh.group("data", 0)
    owners = owners_of(outputs)
    layers = [*dict.fromkeys(map(layer_of, owners.values()))]
    seconds, nbytes = np.zeros((len(layers), len(LEVELS))), np.zeros((len(layers), len(LEVELS)))
    uniform = [layered(plan, dict.fromkeys(layers, z)).builder for z in LEVELS]
    link, built = cluster.link(group), [builder.build(outputs, world_size) for builder in uniform]
    for node, owner in owners.items():
        for k, (level, strategy) in enumerate(zip(LEVELS, built)):
            row = layers.index(layer_of(owner))
            nbytes[row, k] += int(np.prod(strategy.store(node).local_shape(node.shape, 0))) * node.dtype.itemsize
            if node is owner:
                whole = int(np.prod(strategy.leaf(node, False).local_shape(node.shape, 0))) * node.dtype.itemsize
                seconds[row, k] += _synchronize(link, level, data, whole)
    picks = fastest_within(seconds, nbytes, budget)
    return layered(plan, {name: LEVELS[pick] for name, pick in zip(layers, picks)})


def layered(plan: Candidate, levels: Mapping[str, int]) -> Candidate:
    """The same plan with its layers sharded as far as `levels` says."""
    counts = ", ".join(f"{sum(v == z for v in levels.values())} at zero{z}" for z in LEVELS if z in levels.values())
    parallel, more = plan.builder, dict[str, Any]()
    if isinstance(parallel, Layered):
        more = {name: getattr(parallel, name) for name in ("stored", "updated", "feeds", "copies")}
    builder = Layered(parallel.data, parallel.tensor, levels, parallel.split, **more)
    name = plan.name.partition(", layers")[0].partition(" zero")[0]
    return Candidate(f"{name}, layers: {counts}", builder, plan.detail)


def _synchronize(link: Channel, level: int, ranks: int, nbytes: int) -> float:
    """Seconds to bring the gradient of one variable together and its new value to all that read it.

    Sharding costs latencies too, though buckets share them: what is too small to save memory stays whole.
    """
    if ranks == 1:
        return 0.0
    if level == 0:
        return in_bucket(link, "all_reduce", ranks, nbytes)
    return link.seconds("reduce_scatter", ranks, nbytes) + link.seconds("all_gather", ranks, nbytes // ranks)
