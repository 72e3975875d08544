"""The same plan for ranks of unequal speed: other shares of a batch, other cuts, other groups.

A plan is seen as pipelines side by side, of one stage or several, each of some ranks that split its weights. Slow ranks
may stay where they are, come together, so that they hold up no fast one, or leave their group. After Malleus (Haoyang
Li et al., "Malleus: Straggler-Resilient Hybrid Parallel Training of Large-scale Models via Malleable Data and Model
Parallelization", 2024). Left out: to leave a rank idle; experts, whose ranks have equal parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any

from ..core.errors import ArgumentError
from ..core.graph import Node
from ..dist.cut.builders import DataParallel, Parallel, TensorParallel, ZeRO
from ..dist.cut.heterogeneous import Heterogeneous
from ..dist.cut.pipeline_builder import Pipeline
from ..dist.cut.pipelines import Pipelines
from ..dist.cut.strategy import Builder
from .search.uneven import ALIKE, rows_by_speed
from .why import Candidate

RankGroup = tuple[int, ...]
RankGrid = tuple[tuple[RankGroup, ...], ...]  # pipelines of stages of ranks
Cut = Mapping[str, int]
KINDS = (Parallel, DataParallel, ZeRO, TensorParallel, Heterogeneous, Pipeline, Pipelines)


@dataclass(frozen=True)
class Regroupable:
    """A plan as pipelines of stages of ranks: `make` gives that of others with these shares and cuts.

    `parts`: in how many a batch is fed, one after the other.
    """

    grid: RankGrid
    parts: int
    staged: bool
    make: Callable[[RankGrid, Sequence[int], Sequence[Cut] | None], Builder]

    @staticmethod
    def of(builder: Any, outputs: Sequence[Node], world_size: int) -> Regroupable:
        """ArgumentError for a plan that cannot be regrouped."""
        if isinstance(inner := getattr(builder, "builder", None), Builder):
            one = Regroupable.of(inner, outputs, world_size)
            return Regroupable(one.grid, one.parts, one.staged, lambda *of: builder.but(builder=one.make(*of)))
        if type(builder) not in KINDS or builder.experts or builder.local_feeds:
            raise ArgumentError(
                f"{builder!r:.200} divides its work alike, or by parts that ranks are fed",
                fix="use data, tensor or pipeline parallelism of hetu.dist, fed whole batches, or pass auto=",
            )
        staged = isinstance(builder, Pipeline | Pipelines)
        parts = builder.microbatches if staged else builder.accumulate
        found = Regroupable(_grid(builder, outputs, world_size), parts, staged, lambda *of: _made(builder, staged, *of))
        found.make(found.grid, [1] * len(found.grid), None).build(outputs, world_size)  # a graph with marks is refused
        return found

    def regrouped(
        self, factors: Sequence[float], batch: int, names: Sequence[str], seconds: Sequence[float]
    ) -> Iterator[Candidate]:
        """Plans for ranks that take so many times as long; names and seconds are those of the layers."""
        for grid in dict.fromkeys(_grids(self.grid, factors, self.staged)):
            powers = [[len(stage) / max(factors[r] for r in stage) for stage in pipeline] for pipeline in grid]
            slowest, cuts = [1 / power for power, *_ in powers], None
            if self.staged:
                cut = [cut_by_power(seconds, power) for power in powers]
                slowest = [s for s, _ in cut]
                cuts = [{name: sum(at <= k for at in starts[1:]) for k, name in enumerate(names)} for _, starts in cut]
            rows = rows_by_speed(batch // self.parts, slowest)
            if min(rows):
                shares = [n // math.gcd(*rows) for n in rows]
                yield Candidate(_name(grid, shares, cuts), self.make(grid, shares, cuts))


def cut_by_power(seconds: Sequence[float], powers: Sequence[float]) -> tuple[float, list[int]]:
    """How long the slowest stage takes for layers of so many seconds, and where each begins, by the best cut into
    stages that compute so many seconds in one.

    >>> cut_by_power([1.0] * 7, [1.0, 1.0, 0.5, 1.0])
    (2.0, [0, 2, 4, 5])
    """
    total = [0.0, *accumulate(seconds)]
    found: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for power in powers:
        longer: dict[int, tuple[float, list[int]]] = {}
        for first, (slowest, starts) in found.items():
            for last in range(first + 1, len(total)):
                here = max(slowest, (total[last] - total[first]) / power), [*starts, first]
                longer[last] = min(longer.get(last, here), here)
        found = longer
    return found[len(seconds)]


def _name(grid: RankGrid, shares: Sequence[int], cuts: Sequence[Cut] | None) -> str:
    """Which ranks have what, such as 0+1 -> 2 | 3 for a group of two, which sends to rank 2, beside rank 3."""
    name = " | ".join(" -> ".join("+".join(map(str, stage)) for stage in pipeline) for pipeline in grid)
    if len(shares) > 1:
        name += f" share as {':'.join(map(str, shares))}"
    layers = [", ".join(str(n) for n in Counter(cut.values()).values()) for cut in cuts or ()]
    return f"{name}, layers {' | '.join(layers)}" if layers else name


def _grid(builder: Any, outputs: Sequence[Node], world_size: int) -> RankGrid:
    if isinstance(builder, Pipelines):
        return tuple(map(tuple, builder.pipelines))
    if isinstance(builder, Heterogeneous):
        return tuple((group,) for group in builder.groups.groups)
    stages = [grid.ranks for grid in builder.build(outputs, world_size).grids()]
    data, tensor = builder.mesh(stages[0]).sizes[-2:]
    return tuple(tuple(ranks[d * tensor : (d + 1) * tensor] for ranks in stages) for d in range(data))


def _made(builder: Any, staged: bool, grid: RankGrid, shares: Sequence[int], cuts: Sequence[Cut] | None) -> Builder:
    alone = all(len(stage) == 1 for stage in chain.from_iterable(grid))
    given = {"split": {} if alone else builder.split, "zero": builder.zero, "statistics": builder.statistics}
    if staged:
        return Pipelines(grid, shares, builder.microbatches, builder.schedule, cuts=cuts, **given)
    return Heterogeneous([stage for (stage,) in grid], shares, accumulate=builder.accumulate, **given)


def _grids(grid: RankGrid, factors: Sequence[float], staged: bool) -> Iterator[RankGrid]:
    """The grid; slow ranks together, behind all others; where groups may have any size, slow ranks alone."""
    yield grid
    ranks = sorted(chain.from_iterable(chain.from_iterable(grid)), key=lambda rank: (factors[rank], rank))
    rest = iter(ranks)
    yield tuple(tuple(tuple(islice(rest, len(stage))) for stage in pipeline) for pipeline in grid)
    if not staged:
        fast = [rank for rank in ranks if factors[rank] <= ALIKE * min(factors)]
        alone: RankGrid = tuple(((rank,),) for rank in ranks[len(fast) :])
        most = max(len(stage) for (stage,) in grid)
        yield (*((group,) for group in _halved(fast, most)), *alone)


def _halved(ranks: Sequence[int], size: int) -> Iterator[RankGroup]:
    """
    >>> [*_halved([0, 1, 2, 3, 4, 5, 6], 4)]
    [(0, 1, 2, 3), (4, 5), (6,)]
    """
    first = 0
    while first < len(ranks):
        while size > len(ranks) - first:
            size //= 2
        yield tuple(ranks[first : first + size])
        first += size
