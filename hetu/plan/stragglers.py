"""A running job whose ranks become slow, or fast again, divides its work anew: it measures, plans, and switches.

A strategy is seen as pipelines side by side, of one stage or several, each of some ranks that do the same or split its
weights. Slow ranks may stay where they are, come together, so that they hold up no fast one, or leave their group.
After Malleus (Haoyang Li et al., "Malleus: Straggler-Resilient Hybrid Parallel Training of Large-scale Models via
Malleable Data and Model Parallelization", 2024). How a plan is made for them is a builder's to say
(`Builder.regrouped`). Left out: to leave a rank idle, GPUs (`costs/speeds.py`), variables on servers, and jobs that
survive losses, which are given another plan where a rank is lost.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import ArgumentError, HetuError, public
from ..core.executor import Executor
from ..core.graph import Node
from ..core.program import Program
from ..dist.comm.comm import Comm
from ..dist.cut.agreement import texts
from ..dist.cut.on_ranks import OnRanks, spread
from ..dist.cut.pipeline_strategy import Staged
from ..dist.cut.regroup import RankGrid, RankGroup, WorkDivision, pipelines_of, shared_axes
from ..dist.cut.strategy import Builder, Strategy
from ..dist.cut.switch import movable, moves
from ..ranges import AtLeast1
from .costs.profile import MachineProfile, known_profile
from .costs.speeds import ROUNDS, EqualWork, Speeds, TimedSteps
from .plan import Plan
from .search.auto import Auto
from .search.stage_cut import LayerCosts, cut_stages
from .search.uneven import ALIKE, rows_by_speed
from .simulation.instructions import typed
from .simulation.simulate import simulate
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


GAIN = 0.05  # the share of a step that another plan has to save


class BetterPlan(NamedTuple):
    """A plan that would be faster, seconds of a step now and by it, and those for which ranks send it what it needs."""

    plan: Candidate
    now: float
    then: float
    wire: float


class Rebalance:
    """What `rebalance` gives; `events` tells of each switch so far."""

    def __init__(
        self, executor: Executor, every: int = 20, profile: MachineProfile | None = None, auto: Auto | None = None
    ) -> None:
        placement = _placement(executor)
        trained = [sub for sub in executor.subgraphs.values() if sub.updates]
        if not trained:
            raise ArgumentError("no sub-graph updates anything", fix="list what minimize(...) returned")
        self.executor, self.every, self.auto, self.sub = executor, every, auto, trained[0]
        self.outputs = [n for s in executor.subgraphs.values() for n in s.written.outputs]
        self.events: list[str] = []
        self.speeds = Speeds(placement.world_size)
        comm = placement.comm
        profile = profile or (auto and auto.profile) or known_profile()
        self.profile = profile = MachineProfile.from_json(texts(comm, "" if comm.rank else profile.to_json())[0])
        self.now = built = executor.strategy
        self.base = built.builder if isinstance(built, Plan) else built
        self.built = self.base.build(self.outputs, comm.world_size)
        if auto is None:  # what cannot be regrouped is told at once
            grid = pipelines_of(self.built)
            self.base.regrouped(self.outputs, comm.world_size, WorkDivision(grid, [1] * len(grid)))
        self.shared = dict[str, int]()
        with contextlib.suppress(ArgumentError):  # what `auto` has chosen may share no batch
            self.shared = shared_axes(self.built)
        self.timed = TimedSteps(comm, profile)
        self.alike: EqualWork | None = None
        self.wanted: BetterPlan | None = None
        self.steps, self.lasted = 0, 0  # so far; for which the ranks have been as fast as they are
        self.last, self.cost, self.fresh = comm.clock(), 0.0, True
        self.planned, self.search = self.speeds.factors, 0.0  # those that were planned for, and how long that took

    @property
    def factors(self) -> list[float]:
        """How many times as long as the fastest rank each takes for the same."""
        return [float(factor) for factor in self.speeds.factors]

    def __call__(self, step: int = 0, loss: float = 0.0) -> None:
        """A step is done. All ranks call this, whatever `step` and `loss` are, which `ht.fit` tells."""
        comm, now = spread(self.executor.placement).comm, self.timed.comm.clock()
        self.steps += 1
        if self.fresh:  # what a first step takes is what it costs to have another plan
            self.cost, self.last, self.fresh = now - self.last, now, False
        if self.timed.plain:
            seconds, program = self.timed.end(), self.timed.ran
            if program is not None:  # else it was of other shapes, for which there was no program yet
                if not self.speeds.unsure(program):
                    self.alike = None  # and the memory that it takes
                equal = self._equal(comm) if self.speeds.unsure(program) else 0.0
                mine = [seconds, equal, (now - self.last) / self.every, self.cost, self.search]
                told = np.empty((comm.world_size, len(mine)))
                comm.all_gather(np.array(mine), told)
                self.last = comm.clock()
                self._look(comm, program, *told.T)
        if (self.steps + 1) % self.every == 0:
            self.timed.begin(self.sub.programs.values())

    def _look(self, comm: Comm, program: Program, *told: np.ndarray) -> None:
        """Think about what all ranks have seen in a timed step."""
        seconds, equal, step, cost, search = told
        if self.executor.strategy is not self.now:  # somebody has switched
            self.now, self.wanted = self.executor.strategy, None
            self.speeds.begin()
        self.lasted += self.every
        if self.speeds.add(program, seconds, equal):
            self.lasted, self.wanted = ROUNDS * self.every, None
        lasted = step.max() * self.lasted  # what has lasted for so long may last as long again
        ratio = self.speeds.factors / self.planned
        if (1 - ratio.min() / ratio.max()) * lasted > search.max():  # no plan saves more
            self.wanted, self.planned = self._plan(comm), self.speeds.factors
            began, self.last = self.last, comm.clock()
            self.search = self.last - began
        plan = self.wanted
        if plan is not None and (1 - plan.then / plan.now) * lasted >= cost.max() + plan.wire:
            self._switch(comm, plan)

    # -- another plan ------------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Those that are fed: the largest, as a last batch may be small."""
        most = max(self.sub.programs, key=lambda key: sum(map(math.prod, key[1:])))
        return dict(zip(self.sub.placeholders, most[1:]))

    def _equal(self, comm: Comm) -> float:
        """Seconds that this rank takes for what all ranks do alike."""
        self.alike = self.alike or EqualWork(self._part(comm.world_size), self.profile, comm)
        return self.alike.seconds()

    def _part(self, parts: int) -> tuple[Node, ...]:
        """The graph with the sizes of one of so many parts of a batch, as far as ranks share one."""
        shapes = {name: [*shape] for name, shape in self.shapes.items()}
        for name, axis in self.shared.items():
            if name in shapes:
                shapes[name][axis] = max(1, shapes[name][axis] // parts)
        return typed(self.sub, shapes)

    def _plan(self, comm: Comm) -> BetterPlan | None:
        """The fastest plan for ranks as they are; None if it is not much faster than the one that they have."""
        self.timed.learn(self.factors)
        plans = [Candidate("", self.now)]
        plans += [Candidate("the plan of the beginning", self.base)] * (self.now != self.base)
        if self.auto is None:
            rows = next(self.shapes[name][axis] for name, axis in self.shared.items() if name in self.shapes)
            plans += regrouped(self.base, self.built, self.outputs, self.factors, rows, self._cut())
        else:
            with contextlib.suppress(HetuError):  # no plan fits, which is so on all ranks
                auto = replace(self.auto, profile=self.timed.profile)
                chosen = auto.choose([*self.sub.entries], comm, precision=self.executor.asked["precision"])
                plans.append(Candidate(chosen.name, chosen))
        seconds = self._rated(comm, plans)
        best = int(np.argmin(seconds))
        if seconds[best] > (1 - GAIN) * seconds[0]:
            return None
        return BetterPlan(plans[best], seconds[0], seconds[best], self._wire(plans[best].builder, comm.world_size))

    def _cut(self) -> CutStages | None:
        """How layers can be cut into stages; None where none are."""
        if not (isinstance(self.built, Staged) and self.built.cut):
            return None
        parts, link = self.built.microbatches, self.timed.profile.cluster.link(range(self.timed.comm.world_size))
        layers = LayerCosts.of(self._part(parts), self.built.feeds, 1, self.timed.profile, {})
        return lambda slow: cut_stages(layers, slow, parts, link, sizes=(1,))[::2]

    def _rated(self, comm: Comm, plans: Sequence[Candidate]) -> list[float]:
        """Seconds of a step by each plan, infinite where it is impossible; every rank plays some of them."""
        found = np.zeros(len(plans))
        more: dict[str, Any] = {"world_size": comm.world_size, "precision": self.executor.asked["precision"]}
        more |= {"shapes": self.shapes, "traced": 0}
        for k in range(comm.rank, len(plans), comm.world_size):
            try:
                found[k] = simulate(self.sub.entries, plans[k].builder, self.timed.profile, **more).time
            except HetuError:
                found[k] = math.inf
        comm.all_reduce(found, found)
        return [float(seconds) for seconds in found]

    def _wire(self, builder: Any, ranks: int) -> float:
        """Seconds in which the busiest rank has sent what others lack of the variables under another plan."""
        strategy = (builder.builder if isinstance(builder, Plan) else builder).build(self.outputs, ranks)
        sent = moves(self.executor.variables, spread(self.executor.placement).strategy, strategy).sent
        return self.timed.profile.cluster.link(range(ranks)).message(max(sent.values(), default=0))

    def _switch(self, comm: Comm, wanted: BetterPlan) -> None:
        self.last, self.fresh, self.wanted = comm.clock(), True, None
        moved = self.executor.switch(wanted.plan.builder, keep=False)
        slow = [f"rank {rank} takes {times:.2f} times as long" for rank, times in enumerate(self.factors) if times > 1]
        comm.recorder.event = (
            f"{', '.join(slow) or 'no rank is slow'}: now {wanted.plan.name}; a step is predicted to take "
            f"{1e3 * wanted.then:.3g} ms instead of {1e3 * wanted.now:.3g}, and {moved.nbytes:,} bytes moved"
        )
        self.events.append(comm.recorder.event)
        if comm.rank == 0:
            print(f"hetu: {comm.recorder.event}", file=sys.stderr, flush=True)


def _placement(executor: Executor) -> OnRanks:
    """Where the executor works; ArgumentError if its work cannot be divided anew while it runs."""
    placement = movable(executor.placement, executor)
    if not isinstance(placement, OnRanks):
        raise ArgumentError("an executor without a strategy has nothing to divide", fix='give it one, such as "dp"')
    if placement.comm.elastic:
        said = "a job that survives losses is given another plan where a rank is lost, and no other"
        raise ArgumentError(said, fix="leave out rebalance, or heturun's --elastic")
    if executor.device.kind != "cpu":
        raise ArgumentError(f"instructions are timed on CPUs, not on {executor.device}", fix="leave out rebalance")
    return placement


@public
def rebalance(
    executor: Executor, *, every: AtLeast1 = 20, profile: MachineProfile | None = None, auto: Auto | None = None
) -> Rebalance:
    """Have a running job divide its work by the speed of its ranks: `fit(..., after_step=ht.plan.rebalance(executor))`.

    It is called behind each step, on all ranks. One step in `every` is timed, instruction by instruction, without what
    a rank waits for others. Behind the first of them under each plan all ranks compute the same, for as long as a step
    about takes, which tells what is speed and what is a larger part. Where in five of them on end one of two ranks was
    slower than was thought, by a fifth at least, other plans are simulated with these speeds. The fastest is switched
    to (`Executor.switch`) once it would have saved more, since the ranks are as they are, than a switch costs: what the
    first step of the plan before took, which compiles, and the bytes that travel. So a simulation, too, waits until it
    could have saved what the last one took. The first rank tells of a switch on standard error, and so does `hetu top`.

    Varied are shares of a batch, layers of the stages, and which ranks form a group, under any strategy in which ranks
    share a batch (`Builder.regrouped`). With `auto`, such as `ht.plan.auto(...)`, it is asked instead, for any plan.
    `profile`, by default that of this host, tells what messages take, and instructions that no rank was seen to run. On
    a host that was not measured (`heturun -w 2 hetu profile`) they are those of a typical one, slow beside short steps.

    Training stays the same, to rounding: a mean is over all rows, whatever the shares, and so are the statistics of a
    batch norm; batches are in as many micro-batches as before. ArgumentError for ranks that are fed parts of a batch,
    experts, servers, GPUs, and jobs that survive losses.

    >>> import hetu as ht
    >>> def train(comm):
    ...     x = ht.placeholder("x", (None, 4))
    ...     loss = ht.mean(ht.nn.Linear(4, 4)(x) ** 2)
    ...     executor = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy="dp", comm=comm)
    ...     look = rebalance(executor, every=2)
    ...     for _ in range(4):
    ...         executor.run({x: [[1.0] * 4] * 4})
    ...         look()
    ...     return look.factors
    >>> ht.dist.run_ranks(2, train)[0]
    [1.0, 1.0]
    """
    return Rebalance(executor, every, profile, auto)
