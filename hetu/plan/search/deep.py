"""The plan for a model of many equal blocks: all are bounded from below by a few figures, the best bounds are foretold.

Branch and bound: a plan whose bound is not below the best time found is never compiled. The bound is what all blocks
take for the rows of a micro-batch, shared by so many ranks, the time to fill the pipeline, or to go through it and back
for as many micro-batches as it has stages, and the update behind the gradients' way over the data-parallel ranks. More
tensor-parallel ranks are taken to compute no less in all, and to wait no less for each other.
`simulation/deep.py` tells what a step takes. Left out of the candidates: what differs between equal blocks, unequal
ranks, and servers.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...core.errors import HetuError
from ...dist.cut.builders import Parallel
from ...dist.cut.pipeline_builder import Pipeline
from ..costs.links import in_bucket
from ..costs.profile import known_profile
from ..plan import Plan
from ..simulation.deep import COMPUTING, SEEN, DeepSteps, Described, Passes, parts_of
from ..simulation.simulate import Cost
from ..simulation.timeline import Spent
from ..why import Candidate, Rated, Why
from .candidates import Hints, candidates, divisors
from .remedies import fitting

LEAST = 8  # blocks; fewer are simulated as they are


class Floor(NamedTuple):
    """At a degree of tensor parallelism: seconds of all passes of a micro-batch and of each of its rows, (computing,
    waiting for others), the part of one block in them, and those of the update; bytes that are kept of a row in one
    block between its passes, of variables with their state, of gradients, and of sums of them over micro-batches.
    """

    once: tuple[float, float]
    row: tuple[float, float]
    block: float
    update: float
    stored: float
    variables: float
    gradients: float
    sums: float


class DeepSearch:
    """The choice for `blocks` on `world` ranks, by what `auto` (an `Auto`) says."""

    def __init__(self, auto: Any, blocks: Described, world: int, precision: str) -> None:
        self.auto, self.blocks, self.world, self.hints = auto, blocks, world, Hints.of(auto.hints)
        self.steps = DeepSteps(blocks, auto.profile or known_profile(), auto.batch_size, precision)
        self.floors: dict[int, Floor] = {}

    def run(self, shown: Any) -> Plan:
        """The fastest plan that fits; errors are those of any search. `shown` is a bar."""
        queue = [(0.0, k, c) for k, c in enumerate(self._candidates())]
        tensors = {c.builder.tensor for *_, c in queue}
        turn, rated, best, costs = itertools.count(len(queue)), list[Rated](), math.inf, dict[str, Cost]()
        least: tuple[float, Candidate | None] = math.inf, None  # bytes that a plan keeps at least, and the plan
        while queue and queue[0][0] < best:
            known, _, c = heapq.heappop(queue)
            bound, kept = self._bound(c.builder)
            unknown = [t for t in tensors if t <= c.builder.tensor and t not in self.floors]
            if bound <= known and unknown:
                self.floors[min(unknown)] = self._floor(min(unknown), c.builder.split)
            if bound > known or unknown:
                heapq.heappush(queue, (bound, next(turn), c))
                continue
            least, fits = min(least, (kept, c), key=lambda found: found[0]), kept <= self.auto.budget
            if fits:
                rated.append(r := self._rate(c, costs))
                shown.total += 1
                shown.update(1)
                fits = not r.valid or r.peak <= self.auto.budget
                best = min(best, r.seconds) if r.valid and fits else best
            if not fits and (smaller := self._smaller(c)) is not None:
                heapq.heappush(queue, (bound, next(turn), smaller))
        if not rated and least[1] is not None:  # to say how much it needs
            rated.append(self._rate(least[1], costs))
        plan = min(fitting(rated, self.auto.budget), key=lambda r: r.seconds)
        sub = self.blocks.sub
        if isinstance(plan.builder, Pipeline):
            cut = self.steps.cut(plan.builder, self.world, sub)
            plan = replace(plan, builder=plan.builder.but(cut=cut))
        play = functools.partial(self.steps.simulate, world=self.world)
        why = Why(plan, tuple(rated), costs[plan.name], self.auto.budget, self.world, play=play)
        return Plan.of(plan, why, sub.written.outputs, self.world)

    def _candidates(self) -> Iterator[Candidate]:
        """Every product of degrees, of pipelines with each number of micro-batches."""
        for c in candidates(self.steps.at(1).written.outputs, self.world, self.hints):
            stages = parts_of(c.builder)[0]
            if stages == 1:
                yield c
            for count in self._counts(c.builder) if 1 < stages <= self.blocks.layers else ():
                yield self._fed_in(c, count)

    def _counts(self, builder: Parallel) -> list[int]:
        """The numbers of micro-batches of which each gives each of the data-parallel ranks equally many rows."""
        batch, data = self.auto.batch_size, builder.data or 1
        return divisors(batch // data)[1:] if batch % data == 0 else []

    def _fed_in(self, c: Candidate, count: int) -> Candidate:
        name = f"{c.name.partition(',')[0]}, {count} micro-batches"
        kind = "microbatches" if isinstance(c.builder, Pipeline) else "accumulate"
        return Candidate(name, c.builder.but(**{kind: count}))

    def _smaller(self, c: Candidate) -> Candidate | None:
        """A plan that is too large in the next smaller form: more micro-batches, or more of it sharded over data."""
        if not isinstance(c.builder, Pipeline):
            return next((self._fed_in(c, n) for n in self._counts(c.builder) if n > c.builder.accumulate), None)
        zero = {0: 1, 1: 3}.get(c.builder.zero)
        if zero is None or c.builder.data == 1 or self.hints.zero is not None:
            return None
        return Candidate(f"{c.name.partition(', zero')[0]}, zero{zero}", c.builder.but(zero=zero))

    def _floor(self, tensor: int, split: Mapping[str, int]) -> Floor:
        """What is known of a degree of tensor parallelism, from batches that are larger than those of any plan."""
        plain = Parallel(data=1, tensor=tensor, split=split, accumulate=SEEN)
        rows, layers, found = self.auto.batch_size, self.blocks.layers, dict[int, tuple[Passes, Passes]]()
        for batch in (rows, 2 * rows):
            one, two = (self.steps.seen(plain, depth, tensor, SEEN * batch)[0] for depth in (1, 2))
            found[batch] = two.more(one, -1), one.more(two.more(one, -1), layers - 1)
        (block, whole), (_, twice) = found.values()
        more = twice.more(whole, -1)
        once, row = (self._passes(each) for each in (whole.more(more, -1), more))
        sizes = [sum(int(v.tensor.nbytes) for v in self.steps.at(n).updates if v.attrs["trainable"]) for n in (1, 2)]
        gradients = (sizes[0] + (layers - 1) * (sizes[1] - sizes[0])) / tensor
        stored, variables = float(block.kept[1]) / rows, float(whole.kept[0])
        computing, waiting = (each / rows for each in row)
        part, sums = sum(self._passes(block)) / sum(self._passes(whole)), layers * float(block.kept[2])
        return Floor(once, (computing, waiting), part, whole.of("finish"), stored, variables, gradients, sums)

    @staticmethod
    def _passes(found: Passes) -> tuple[float, float]:
        computing = found.of("F", COMPUTING) + found.of("B", COMPUTING)
        return computing, found.of("F") + found.of("B") - computing

    def _bound(self, builder: Parallel) -> tuple[float, float]:
        """Seconds that a plan takes and bytes that it keeps at least, as far as is known."""
        if not (less := [t for t in self.floors if t <= builder.tensor]):
            return 0.0, 0.0
        once, row, block, *others = self.floors[max(less)]
        share = max(less) / builder.tensor
        update, stored, variables, gradients, sums = (share * each for each in others)
        (stages, micro), data = parts_of(builder), builder.data or 1
        rows = self.auto.batch_size / (data * micro)
        whole = {0: variables, 3: 0.0}.get(builder.zero, gradients)  # what data-parallel ranks do not share
        kept = (whole + (variables - whole) / data + (sums if micro > 1 else 0.0)) / stages
        kept += stored * rows * self.blocks.layers / stages * min(micro, stages)
        size, cluster = data * builder.tensor, self.steps.profile.cluster
        sent = in_bucket(cluster.link((0, size - 1)), "all_reduce", data, int(gradients / stages))
        hop = cluster.link((0, min(2 * size, self.world) - 1)).message(int(rows * self.steps.sent))
        busy = share * (once[0] + row[0] * rows) + once[1] + row[1] * rows
        slowest = busy * max(1 / stages, -(-self.blocks.layers // stages) * block)
        around = busy + 2 * (stages - 1) * hop  # by then the first stage may have begun `stages` micro-batches
        work = max(around * (1 + n) + slowest * (micro - 1 - n * stages) for n in (0, (micro - 1) // stages))
        end = update / stages / (data if builder.zero else 1)
        return (max(work, sent) if stages * micro == 1 else work + sent) + end, kept

    def _rate(self, c: Candidate, costs: dict[str, Cost]) -> Rated:
        try:
            cost = costs[c.name] = self.steps.simulate(c.builder, self.world)
        except HetuError as error:
            return Rated(c.name, c.builder, c.detail, -1.0, problem=error.message)
        computing, waiting, _ = cost.timeline.spent
        spent = Spent(computing, waiting, cost.time - computing - waiting)
        return Rated(c.name, c.builder, c.detail, cost.time, max(cost.peak), spent=spent)
