"""A strategy that is yet to be chosen: what is known beforehand, until an executor asks for the plan.

`planner.py` makes the choice.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ...core.errors import ArgumentError
from ...core.placement import STRATEGY, chooses
from ...core.state import FilePath
from ...core.subgraph import SubGraph
from ...dist.comm.comm import Comm, SerialComm
from ...dist.comm.world import world
from ...progress import bar
from ...ps.wire.environment import has_servers
from ...ranges import AtLeast1, Count, Endless
from ...strategies.on_servers import Connected
from ..costs.profile import MachineProfile
from ..costs.speeds import ordinary
from ..plan import Plan
from ..simulation.trials import read_trials, trial, trials_path
from ..why import Rated, Why
from .candidates import Hints
from .planner import PlanSearch


@dataclass
class Auto:
    """A strategy that is chosen when an executor is made: `ht.Executor(..., strategy=ht.plan.auto(budget=2 << 30))`.

    budget: bytes of memory for each rank: variables, optimizer state, feeds and everything a step computes.
    batch_size: of all ranks together, where a placeholder leaves its first size open. The plan says where variables
    live, so it has to be made before the first batch is seen.
    profile: how fast things are; by default that of this host, if it has been measured (`hetu profile`).
    If its device has `host_bandwidth`, activations may wait in the memory of the host, which the budget does not count.
    hints: what is decided already, such as {"tensor": 2, "zero": 3}; see `Hints`.
    exact: False allows strategies that train otherwise than one process would: `PartialReduce`, where there are servers
    and some ranks are slower than others, as `profile.speeds` says or a second of steps shows.
    learned: a log of trial runs (`hetu.plan.trial`) on this machine by this profile, which every rank reads. What they
    teach corrects simulated seconds, if it puts plans in order that were held out; at least 8 trials teach anything.
    trials: how many of the plans that are predicted to be the fastest are run, on numbers that mean nothing, for some
    steps each, if there are several; the fastest is taken. They are added to the log `learned`, by default one beside
    this host's profile.
    """

    budget: float = math.inf
    batch_size: int = 256
    profile: MachineProfile | None = None
    hints: Mapping[str, Any] | None = None
    exact: bool = True
    learned: FilePath | None = None
    trials: int = 0
    chosen: Plan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        Hints.of(self.hints)
        for name, least in (("budget", 1), ("batch_size", 1), ("trials", 0)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= least:
                raise ArgumentError(f"{name} is {value!r}", fix=f"give a number of at least {least}")
        if self.trials and self.learned is None:
            self.learned = trials_path()
            with suppress(OSError):  # of which the first trial tells
                self.learned.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.known = [] if self.learned is None else read_trials(self.learned)
        except ArgumentError:
            if not self.trials:  # which are added to a log without any, such as one that a kill has cut off
                raise
            self.known = []

    def choose(
        self,
        subgraphs: Mapping[str, Sequence[Any]] | Sequence[Any],
        comm: Comm | None = None,
        *,
        world_size: Count = 0,
        precision: str = "float32",
        progress: bool | None = False,
    ) -> Plan:
        """The plan for what an executor is given, by the sub-graph that trains (else the first), on the ranks of `comm`
        (by default the job's) or on `world_size` ranks that need not exist. With `progress` a bar is shown meanwhile,
        with None in a terminal.

        Where `$HETU_STRATEGY` asks for it, as `heturun --auto` does, the first rank prints why on standard error.
        """
        comm = comm or (SerialComm() if world_size else world())
        entries = subgraphs if isinstance(subgraphs, Mapping) else {"default": subgraphs}
        named = [SubGraph(name, listed, precision) for name, listed in entries.items()]
        sub = next((s for s in named if s.updates), named[0])
        outputs = [n for s in named for n in s.written.outputs]
        search = PlanSearch(self, sub, outputs, comm, world_size or comm.world_size, precision)
        if self.trials:
            self._check_tried(search)
        with bar("plans", 0, progress, rank=comm.rank) as search.shown:
            self.chosen = search.run()
        if self.trials > 1 and self.chosen.why().next_best:
            self.chosen = self._tried(self.chosen.why(), search)
        self.chosen.source = self
        if comm.rank == 0 and os.environ.get(STRATEGY, "").startswith("auto"):  # nobody else could ask for it
            print(self.chosen.why(), file=sys.stderr, flush=True)
        return self.chosen

    def _check_tried(self, search: PlanSearch) -> None:
        """ArgumentError where a plan cannot be run, or would leave something behind."""
        if search.world != search.comm.world_size:
            where = f"{search.world} ranks, of which {search.comm.world_size} are there"
        elif isinstance(search.comm, Connected) or has_servers():
            where = "servers, which would keep what they leave"
        elif search.profile.device.host_bandwidth:
            where = "a GPU"
        else:
            return
        raise ArgumentError(f"trial runs on {where}", fix="leave out trials=: they are for the CPUs of a job")

    def _tried(self, why: Why, search: PlanSearch) -> Plan:
        """The fastest of the plans that are predicted to be so, by trial runs."""
        sub, shapes, found = search.sub, search.shapes, list[tuple[Rated, float]]()
        feed = {name: ordinary(shapes[name], node.dtype) for name, node in sub.placeholders.items()}
        of: Any = {"log": self.learned, "profile": search.profile, "comm": search.comm, "precision": search.precision}
        for r in [why.best, *why.next_best][: self.trials]:
            found.append((r, trial(sub.entries, Plan.of(r, why, search.outputs, search.world), feed, **of).seconds))
        best, _ = min(found, key=lambda tried: tried[1])
        why = replace(why, best=best, cost=search.simulated(best.builder), tried=tuple(found))
        return Plan.of(best, why, search.outputs, search.world)

    def why(self) -> Any:
        """Why the plan was chosen; see `Plan.why`."""
        if self.chosen is None:
            raise ArgumentError("nothing is chosen yet", fix="make the executor first: ht.Executor(..., strategy=auto)")
        return self.chosen.why()


chooses(Auto, lambda auto, subgraphs, comm, precision: auto.choose(subgraphs, comm, precision=precision))


def auto(
    budget: Endless = math.inf,
    *,
    batch_size: AtLeast1 = 256,
    profile: MachineProfile | None = None,
    hints: Mapping[str, Any] | None = None,
    exact: bool = True,
    learned: FilePath | None = None,
    trials: Count | None = None,
) -> Auto:
    """The strategy that is predicted to be the fastest for a graph on the ranks of the job; see `Auto`.

    `trials` are by default those of `$HETU_TRIALS`, as `heturun --auto --trials 4` sets it, else none.

    >>> import hetu as ht
    >>> x = ht.placeholder("x", (None, 64))
    >>> loss = ht.mean(ht.nn.Linear(64, 64)(x) ** 2)
    >>> strategy = auto(batch_size=32, profile=MachineProfile())
    >>> executor = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy=strategy)
    >>> print(str(strategy.why()).splitlines()[0][:17])
    one rank, 1 rank:
    """
    if trials is None:
        given = os.environ.get(TRIALS) or "0"
        if not given.isdecimal():
            raise ArgumentError(f"{TRIALS} is {given!r:.80}", fix="give a number of plans, such as 4")
        trials = int(given)
    return Auto(budget, batch_size, profile, hints, exact, learned, trials)


TRIALS = "HETU_TRIALS"  # the environment variable that says how many plans are tried
