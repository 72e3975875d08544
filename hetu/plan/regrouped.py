"""The same plan for ranks of unequal speed: other shares of a batch, other cuts, other groups.

A strategy is seen as pipelines side by side, of one stage or several, each of some ranks that do the same or split its
weights. Slow ranks may stay where they are, come together, so that they hold up no fast one, or leave their group.
After Malleus (Haoyang Li et al., "Malleus: Straggler-Resilient Hybrid Parallel Training of Large-scale Models via
Malleable Data and Model Parallelization", 2024). How a plan is made for them is a builder's to say
(`Builder.regrouped`). Left out: to leave a rank idle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice

from ..core.graph import Node
from ..dist.cut.regroup import RankGrid, WorkDivision, pipelines_of
from ..dist.cut.strategy import Builder, Strategy
from ..dist.layout.groups import RankGroup
from .search.uneven import ALIKE, rows_by_speed
from .why import Candidate

CutStages = Callable[[Sequence[float]], tuple[float, Mapping[str, int]]]  # factors -> seconds, and layer -> stage


def regrouped(
    builder: Builder,
    strategy: Strategy,
    outputs: Sequence[Node],
    factors: Sequence[float],
    batch: int,
    cut: CutStages | None,
) -> Iterator[Candidate]:
    """Plans like that of `builder`, which writes `strategy`, for ranks that take so many times as long.

    `cut` tells, for factors on the time of each stage, how long a pipeline takes whose layers are cut best, and how.
    """
    staged = len(strategy.grids()) > 1
    for grid in dict.fromkeys(_grids(pipelines_of(strategy), factors, staged)):
        slow = [[max(factors[rank] for rank in stage) / len(stage) for stage in pipeline] for pipeline in grid]
        seconds, cuts = [max(stages) for stages in slow], None
        if cut is not None:
            ways = [cut(stages) for stages in slow]
            seconds, cuts = [took for took, _ in ways], [way for _, way in ways]
        rows = rows_by_speed(batch // strategy.microbatches, seconds)
        if min(rows):
            shares = [n // math.gcd(*rows) for n in rows]
            to = WorkDivision(grid, shares, cuts)
            yield Candidate(_name(to), builder.regrouped(outputs, len(factors), to))


def _name(to: WorkDivision) -> str:
    """Which ranks have what, such as 0+1 -> 2 | 3 for a group of two, which sends to rank 2, beside rank 3."""
    name = " | ".join(" -> ".join("+".join(map(str, stage)) for stage in pipeline) for pipeline in to.pipelines)
    if len(to.shares) > 1:
        name += f" share as {':'.join(map(str, to.shares))}"
    layers = [", ".join(str(n) for n in Counter(cut.values()).values()) for cut in to.cuts or ()]
    return f"{name}, layers {' | '.join(layers)}" if layers else name


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
