"""The planner: it costs every candidate with the simulator and takes the fastest that fits into memory.

The ranks of a job share the work: each simulates some of the candidates, and all see all costs, so all choose alike. If
the fastest does not fit, its layers are sharded one by one (`candidates.sharded_layers`) and its activations are
computed again in parts or put away into the memory of the host (`fit.py`). These plans compete with the others.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...core.errors import BudgetError, HetuError
from ...core.graph import Node
from ...core.subgraph import SubGraph
from ...core.types import Dim
from ...dist.comm.comm import Comm
from ...dist.cut.agreement import texts
from ...dist.cut.builders import DataParallel, Parallel
from ...dist.cut.pipeline_builder import Pipeline
from ...ps.wire.environment import has_servers
from ...strategies.hybrid import Hybrid
from ...strategies.on_servers import Connected
from ..costs.profile import known_profile
from ..costs.speeds import EVEN, measured_seconds
from ..plan import Plan, Within
from ..simulation.instructions import SimulatedJob, shapes_of, typed
from ..simulation.partners import seconds_alone
from ..simulation.simulate import Cost, simulate
from ..simulation.timeline import Spent
from ..simulation.trials import TRACED, factor, features_of, learned, machine_of
from ..why import NOTHING, Candidate, Rated, Why
from .candidates import (
    SMALLER,
    Bucketed,
    Hints,
    Layered,
    beside,
    best_pipelines,
    by_operator,
    candidates,
    divisors,
    expert_parallel,
    first_in_parts,
    microbatches,
    partial_candidates,
    served_candidates,
    sharded_layers,
    shards_layers,
)
from .operators import Operators
from .remedies import fitting, remedies
from .stage_cut import LayerCosts, cut_stages
from .uneven import UnevenStages, by_speed, varied

MOST_BY_OPERATOR = 10  # plans whose operators are split one by one
BUCKET_BYTES, LEAST_BUCKET = 4 << 20, 4 << 10  # where a search for their size begins and ends
MOST_BUCKETED = 3  # plans that are tried with other buckets
WORTH = 0.03  # the share of its time that such a plan must wait for communication
MOST_REPLICATED = 16  # ranks for which stages of any sizes are looked at
MOST_SHIFTED, SHIFTED = 2, 1.3  # pipelines whose layers are moved, and the most times that one takes of the least
MOST_RESCUED = 8  # plans that are too large and get a second chance
INVALID, MOST_TEXT = -1.0, 400  # stands for no seconds; letters of a reason


class PlanSearch:
    """One choice, by what `auto` (an `Auto`) says: the candidates, their costs, and the one that is taken."""

    shown: Any  # a bar

    def __init__(
        self, auto: Any, sub: SubGraph, outputs: Sequence[Node], comm: Comm, world: int, precision: str
    ) -> None:
        self.auto, self.sub, self.outputs, self.comm, self.world = auto, sub, outputs, comm, world
        self.precision = precision
        self.hints, self.profile = Hints.of(auto.hints), auto.profile or known_profile()
        self.shapes = shapes_of(sub, auto.batch_size)
        batches = [s[0] for name, s in self.shapes.items() if isinstance(sub.placeholders[name].shape[0], Dim)]
        self.batch = batches[0] if batches else None
        self.known: dict[str, Rated] = {}
        self.learned = learned(auto.known, machine_of(self.profile) if auto.known else "")
        comm.broadcast(self.learned)  # that of rank 0: a log may grow meanwhile

    def run(self) -> Plan:
        """The fastest plan that fits. BudgetError if none does, ArgumentError if none is possible at all."""
        rated = self._rate(self._first())
        rated += self._climbed(rated)
        more = [*self._refined(rated), *self._rescued(rated)]
        rated += [*self._accumulated(rated), *self._rate(more)]
        rated += self._shifted(rated)
        fits = fitting(rated, self.auto.budget, lambda least: remedies(self, least))
        fits += self._begun(fits)
        best = min([*fits, *self._bucketed(fits)], key=lambda r: r.seconds)
        rated += [best] if best not in rated else []
        cost = self.simulated(best.builder)
        why = Why(best, tuple(rated), cost, self.auto.budget, self.world, self.profile.speeds, self.simulated)
        return Plan.of(best, why, self.outputs, self.world)

    def _first(self) -> list[Candidate]:
        world, found = self.world, [*candidates(self.outputs, self.world, self.hints, self.batch)]
        found += expert_parallel(self.outputs, self.hints, self.profile.cluster, world)
        found += self._by_operator()
        if self.hints.allow(stages=1, data=world, tensor=1, zero=0):
            found += by_speed(self.batch, [self.profile.speeds.get(rank, 1.0) for rank in range(world)])
        served = isinstance(self.comm, Connected) or has_servers()
        if served and self.hints.allow(stages=1, data=world, tensor=1, zero=0):
            found += served_candidates(self.outputs, self.hints, self.batch or 1, world)
            found += () if self.auto.exact else self._partial(world)
        return found

    def _partial(self, world: int) -> Iterator[Candidate]:
        """Partial reduce, where ranks are slow: among equal ones it would only change what is computed."""
        if not self.profile.speeds and self.sub.updates and world == self.comm.world_size:
            self.profile = replace(self.profile, speeds=self._measured(world))
        speeds = [self.profile.speeds.get(rank, 1.0) for rank in range(world)]
        on_cpu = not self.profile.device.host_bandwidth
        if self.batch and on_cpu and max(speeds) > EVEN * min(speeds):
            yield from partial_candidates(world)

    def _measured(self, world: int) -> dict[int, float]:
        """Factors that have the profile tell for each rank what a step was seen to take."""
        if not (took := measured_seconds(self.comm, self.sub.entries, self.sub.placeholders, self.shapes)):
            return {}
        job = SimulatedJob(self.sub.entries, DataParallel(), world, self.shapes, self.precision)
        return {rank: took[rank] / told for rank, told in enumerate(seconds_alone(job, self.profile))}

    def _climbed(self, rated: Sequence[Rated]) -> list[Rated]:
        """Pipelines with other numbers of micro-batches, each from the best so far of its degrees up and down."""
        found, asked = list[Rated](), {r.name for r in rated}
        while True:
            best = best_pipelines([*rated, *found], self.auto.budget).values()
            wanted = {c.name: c for r in best for c in beside(r, self.batch) if c.name not in asked}
            if not wanted:
                return found
            asked |= {*wanted}
            found += self._rate([*wanted.values()])

    def _refined(self, rated: Sequence[Rated]) -> Iterator[Candidate]:
        """The best pipeline of each degree, cut by seconds; one that is too large, sharded over data too."""
        found = best_pipelines(rated, self.auto.budget)
        if self.trained and self.hints == Hints(cache=self.hints.cache):
            yield from self._replicated()
        for degrees, r in found.items():
            if (cut := self._cut(r.builder, *degrees)) is not None:
                yield Candidate(f"{r.name}, cut by seconds", r.builder.but(cut=cut))
            if r.peak > self.auto.budget and r.builder.data > 1 and self.hints.zero is None:
                yield Candidate(f"{r.name}, zero3", r.builder.but(zero=3))

    def _shifted(self, rated: Sequence[Rated]) -> list[Rated]:
        """The best pipelines with one choice made otherwise (`varied`)."""
        fits, found, seen = self._fitting(rated), list[Rated](), set[Any]()
        for r in (r for r in fits if isinstance(r.builder, Pipeline | UnevenStages)):
            if len(seen) == MOST_SHIFTED or r.seconds > SHIFTED * fits[0].seconds:
                break
            if (stages := r.builder.build(self.outputs, self.world).stages) not in seen:
                found += self._improved(r, self._varied)
            seen.add(stages)
        return found

    def _varied(self, plan: Rated) -> Iterator[Candidate]:
        return varied(plan, plan.builder.build(self.outputs, self.world).cut, microbatches(self.batch, 1))

    def _improved(self, plan: Rated, otherwise: Callable[[Rated], Iterable[Candidate]]) -> list[Rated]:
        """The fastest of the plans that are `otherwise`, what is otherwise than that, and so on while that helps."""
        found = [plan]
        while tried := self._fitting(self._rate([*otherwise(found[-1])])):
            if tried[0].seconds >= found[-1].seconds:
                break
            found.append(tried[0])
        return found[1:]

    def _fitting(self, rated: Sequence[Rated]) -> list[Rated]:
        """Those that fit, the fastest first."""
        return sorted((r for r in rated if r.valid and r.peak <= self.auto.budget), key=lambda r: r.seconds)

    def _cut(self, pipeline: Pipeline, stages: int, data: int, tensor: int) -> dict[str, int] | None:
        """Layer -> stage by seconds; None if the pipeline is cut so already, or if nothing fits."""
        link = self.profile.cluster.link((0, self.world // stages))
        try:
            layers, count = self._layers(data * pipeline.microbatches, stages), pipeline.microbatches
            _, _, cut = cut_stages(layers, [1.0] * stages, count, link, tensor * self.auto.budget, sizes=(1,))
            return None if cut == pipeline.build(self.outputs, self.world).cut else cut
        except HetuError:
            return None  # stages that the user has marked, or layers that fit nowhere

    def _replicated(self) -> Iterator[Candidate]:
        """The best pipelines, as is estimated, whose stages have any numbers of ranks, and those whose rows all of
        them share alike: others exchange rows, of which the estimate knows nothing."""
        link, ways = self.profile.cluster.link(range(self.world)), dict[bool, list[Any]]()
        speeds = [self.profile.speeds.get(rank, 1.0) for rank in range(self.world)]
        for count in microbatches(self.batch, 1)[:4] if self.world <= MOST_REPLICATED else ():
            alike = [n for n in divisors((self.batch or 1) // count) if n <= self.world]
            for sizes in (None, alike):
                with contextlib.suppress(HetuError):
                    made = cut_stages(self._layers(count), speeds, count, link, self.auto.budget, sizes=sizes)
                    ways.setdefault(sizes is None, []).append((*made, count))
        for _, grids, cut, count in (f for found in ways.values() for f in sorted(found, key=lambda f: f[0])[:2]):
            if len(grids) > 1:
                builder = UnevenStages(grids, count, cut=cut)
                yield Candidate(builder.name, builder)

    def _layers(self, parts: int, stages: int = 1) -> LayerCosts:
        """What each layer takes for one of so many parts of the batch."""
        return LayerCosts.of(typed(self.sub, self.shapes, parts), self.shapes, stages, self.profile, self.trained)

    def _by_operator(self, room: Mapping[int, float] | None = None) -> list[Candidate]:
        """Operators split one by one over each tensor degree, on all ranks or the same on each of several groups: those
        of which most is hoped; with `room`, over the degrees in it, within its bytes."""
        found = list[tuple[float, Candidate]]()
        free = self.hints.split is None and self.hints.zero is None and self.trained
        times = {name: count for name, (count, _) in self.trained.items()}
        for tensor in divisors(self.world)[1:] if free else ():
            data, left = self.world // tensor, math.inf if room is None else room.get(tensor)
            if not self.hints.allow(stages=1, data=data, tensor=tensor) or left is None:
                continue
            copied = data > 1 and room is None and self.hints.data is None and self.hints.tensor is None
            for copies in (1, data) if copied else (1,):
                with contextlib.suppress(HetuError):  # sizes that do not divide; what depends on too many others
                    outputs = typed(self.sub, self.shapes, data // copies)
                    operators = Operators(outputs, self.shapes, times, self.profile, tensor, data // copies)
                    found += by_operator(operators, left, copies)
        return [c for _, c in sorted(found, key=lambda f: f[0])[:MOST_BY_OPERATOR]]

    @functools.cached_property
    def trained(self) -> dict[str, tuple[int, int]]:
        """Name of each trained variable -> how often its bytes are kept, with its state, and its bytes."""
        shapes = Counter((v.name.rpartition("/")[0], v.shape) for v in self.sub.variables)
        trained = [v for v in self.sub.updates if v.attrs["trainable"]]
        return {v.name: (1 + shapes[v.name, v.shape], int(v.tensor.nbytes)) for v in trained}

    def _too_large(self, rated: Sequence[Rated]) -> list[Rated]:
        """Plans that do not fit, though they are faster than all that do; the fastest first."""
        fits = self._fitting(rated)
        large = [r for r in rated if r.valid and r.peak > self.auto.budget]
        fast = [r for r in large if not fits or r.seconds < fits[0].seconds]
        found = sorted(fast, key=lambda r: r.seconds)
        return [*found[:MOST_RESCUED], *(r for r in found[MOST_RESCUED:] if r.peak == min(f.peak for f in found))]

    def _rescued(self, rated: Sequence[Rated]) -> list[Candidate]:
        """Smaller forms of plans that are too large."""
        found, room = list[Candidate](), dict[int, float]()
        too_large = self._too_large(rated)
        staged = [r for r in too_large if isinstance(r.builder, Pipeline | UnevenStages)]
        for r in too_large:
            parallel = r.builder
            if isinstance(parallel, Hybrid) or r in staged[1:]:  # of pipelines, which are long to search, the fastest
                continue
            swaps = self.profile.device.host_bandwidth > 0
            within = Within(parallel, int(self.auto.budget), self.profile if swaps else None)
            found.append(Candidate(f"{r.name}, recomputing{' or swapping' if swaps else ''}", within, r.detail))
            left = self.auto.budget - (r.peak - self.kept(parallel))
            if isinstance(parallel, Layered):
                room[parallel.tensor] = left
            if shards_layers(parallel) and not parallel.zero and self.hints.zero is None:
                with contextlib.suppress(BudgetError):  # even what is sharded everywhere is too large
                    cluster, world = self.profile.cluster, self.world
                    found.append(sharded_layers(self.outputs, r, cluster, world, left))
        return found + self._by_operator(room)

    def _accumulated(self, rated: Sequence[Rated]) -> list[Rated]:
        """Plans that are too large with each batch in as few micro-batches, one after the other, as fit."""
        found = list[Rated]()
        for r, name in ((r, r.name) for r in self._too_large(rated) if type(r.builder) is Parallel):
            for count in sorted(microbatches(self.batch, r.builder.mesh(range(self.world)).sizes[-2]))[1:]:
                found += self._rate([Candidate(f"{name}, {count} micro-batches", r.builder.but(accumulate=count))])
                if not found[-1].valid or found[-1].peak <= self.auto.budget or not SMALLER * r.peak > found[-1].peak:
                    break
                r = found[-1]
        return found

    def _bucketed(self, rated: Sequence[Rated]) -> list[Rated]:
        """The fastest of the plans that could become the fastest, with smaller buckets."""
        whole = min(sum(nbytes for _, nbytes in self.trained.values()), BUCKET_BYTES)

        def smaller(r: Rated) -> Iterator[Candidate]:
            made = r.builder if isinstance(r.builder, Bucketed) else Bucketed(r.builder, whole)
            if (nbytes := made.nbytes // 4) > LEAST_BUCKET:
                name = f"{r.name.partition(', buckets')[0]}, buckets of {nbytes >> 10} KiB"
                yield Candidate(name, Bucketed(made.builder, nbytes), r.detail)

        plans = [r for r in self._waiting(rated)[:MOST_BUCKETED] if not isinstance(r.builder, Within | Hybrid)]
        return [made for r in plans for made in self._improved(r, smaller)]

    def _waiting(self, rated: Sequence[Rated]) -> list[Rated]:
        """Plans that would be the fastest if nobody waited for communication; the fastest first."""
        least = min(r.seconds for r in rated)
        found = [r for r in rated if r.spent.computing < least and r.spent.communication > WORTH * r.seconds]
        return sorted(found, key=lambda r: r.seconds)

    def _begun(self, rated: Sequence[Rated]) -> list[Rated]:
        """If the fastest data-parallel plan waits, those whose first layers are updated in parts."""
        start = min(rated, key=lambda r: (not shards_layers(r.builder), r.seconds))
        if not shards_layers(start.builder) or start not in self._waiting(rated):
            return []
        trained = [v for v in self.sub.variables if v.attrs["trainable"]]
        return self._fitting(self._rate([*first_in_parts(trained, self.world, self.hints, self.shapes)]))

    def kept(self, builder: Any) -> int:
        """Bytes of variables and state on the fullest rank."""
        strategy = builder.build(self.outputs, self.world)
        load = [0] * self.world
        for variable in dict.fromkeys(self.sub.variables):
            for rank, piece in strategy.store(variable).pieces(variable.shape).items():
                load[rank] += math.prod(piece.shape) * variable.dtype.itemsize
        return max(load)

    # -- costs ---------------------------------------------------------------------------------------------------

    def _rate(self, found: Sequence[Candidate]) -> list[Rated]:
        """Seconds and peak of each candidate, of which those that are the same strategy are simulated once."""
        keys = [self._strategy(c) for c in found]
        fresh = {key: c for key, c in zip(keys, found) if key not in self.known}
        self.known |= dict(zip(fresh, self._played_by_all([*fresh.values()])))
        return [replace(self.known[k], name=c.name, builder=c.builder, detail=c.detail) for k, c in zip(keys, found)]

    def _strategy(self, plan: Candidate) -> str:
        """The strategy of a plan as text; the name of a plan that has more to it, or none."""
        with contextlib.suppress(HetuError):
            if isinstance(plan.builder, Parallel | UnevenStages | Bucketed):
                return plan.builder.build(self.outputs, self.world).to_json()
        return plan.name

    def _played_by_all(self, found: Sequence[Candidate]) -> list[Rated]:
        """Seconds and peak of each candidate; every rank simulates its share and tells the others."""
        mine = dict[int, Any]()
        self.shown.total += len(found)
        for k in range(self.comm.rank, len(found), self.comm.world_size):
            try:
                cost = self.simulated(found[k].builder)
                more = cost.time / (cost.timeline.seconds or 1.0)
                mine[k] = cost.time, int(max(cost.peak)), "", [more * seconds for seconds in cost.timeline.spent]
            except HetuError as error:
                mine[k] = INVALID, 0, error.message[:MOST_TEXT], NOTHING
            self.shown.update(min(self.comm.world_size, len(found) - k))
        told = {int(k): of for text in texts(self.comm, json.dumps(mine)) for k, of in json.loads(text).items()}
        return [
            Rated(c.name, c.builder, c.detail, seconds, peak, problem, Spent(*spent))
            for k, c in enumerate(found)
            for seconds, peak, problem, spent in [told[k]]
        ]

    def peak(self, builder: Any, *, rows: int = 0, world: int = 0) -> float:
        """The most bytes of a rank if a step has so many rows, or there are so many ranks; infinite if impossible."""
        try:
            return max(self._played(builder, rows, world, traced=0).peak)
        except HetuError:
            return math.inf

    def simulated(self, builder: Any) -> Cost:
        """The cost of a plan, as trial runs correct it."""
        cost = self._played(builder)
        if not self.learned.any():
            return cost
        found = features_of(cost, builder.build(self.outputs, self.world), self.profile)
        times = factor(self.learned, found, cost.time)
        note = f"by trial runs {times:.2f} times the {1e3 * cost.time:.3f} ms that are simulated"
        return replace(cost, time=times * cost.time, note="; ".join(filter(None, (cost.note, note))))

    def _played(self, builder: Any, rows: int = 0, world: int = 0, traced: int = TRACED) -> Cost:
        shapes, ranks = shapes_of(self.sub, rows) if rows else self.shapes, world or self.world
        more: dict[str, Any] = {"world_size": ranks, "shapes": shapes, "traced": traced, "precision": self.precision}
        return simulate(self.sub.entries, builder, self.profile, **more)
