"""A chosen plan: plain data that an executor takes as its strategy, and what it was chosen against.

`planner.py` finds a plan, `why.py` explains it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..core.errors import ArgumentError
from ..core.graph import Node, topological
from ..core.op import Role
from ..core.placement import attach, attaches
from ..dist.cut.on_ranks import OnRanks, spread
from ..dist.cut.regroup import WorkDivision
from ..dist.cut.strategy import Builder, Strategy
from ..passes import Pass
from ..plain_data import from_text, to_text
from ..ranges import Count
from .costs.profile import MachineProfile
from .memory.fit import TooLarge, fit
from .memory.swap import Rewritten
from .why import Rated, Why


@dataclass(frozen=True)
class Within(Builder):
    """A strategy whose steps are made to fit into `nbytes` on each rank, variables included, by recomputing.

    With a profile whose device has `host_bandwidth`, values also wait in the memory of the host where that is faster.
    Each rank, so each stage of a pipeline, does so for itself. BudgetError, when a step is compiled, if that is
    impossible.
    """

    builder: Builder
    nbytes: int
    profile: MachineProfile | None = None

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        return self.builder.build(outputs, world_size)

    def regrouped(self, outputs: Sequence[Node], world_size: int, to: WorkDivision) -> Within:
        return replace(self, builder=self.builder.regrouped(outputs, world_size, to))


@attaches(Within)
def _(within: Within, outputs: Sequence[Node], comm: Any = None) -> OnRanks:
    placement = spread(attach(within.builder, outputs, comm))
    variables = [n for n in topological(outputs) if n.role is Role.VARIABLE]

    def fitted(fetches: Sequence[Node], updates: Mapping[Node, Node], then: Sequence[Pass]) -> Rewritten:
        kept = {placement.variable(n) for n in variables}  # those of the rank that is compiled for
        room = within.nbytes - sum(int(v.tensor.nbytes) for v in kept if v is not None)
        room -= placement.aside(topological((*fetches, *updates.values())))
        try:
            return fit(fetches, updates, room, within.profile, then)
        except TooLarge as error:
            error.least += within.nbytes - room
            raise

    placement.fitted = fitted
    return placement


@dataclass
class Plan:
    """A strategy, and how its steps are made to fit into memory: as `Within` has `memory` (its bytes) and `profile`.

    `print(plan.why())` says why it was chosen; a plan that was read from JSON does not know.

    >>> from hetu.dist import Mesh
    >>> mesh = Mesh((2,), ("data",))
    >>> plan = Plan("dp2", Strategy(mesh.layout(), {}, {"x": mesh.layout(data=0)}), memory=1 << 20)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    name: str
    strategy: Strategy
    memory: Count | None = None
    profile: MachineProfile | None = None
    reasons: Why | None = field(default=None, compare=False, repr=False)
    source: Any = field(default=None, init=False, compare=False, repr=False)  # what chose it, and does for other ranks
    called: ClassVar = "a plan", "pass what Plan.to_json wrote"

    @staticmethod
    def of(best: Rated, reasons: Why, outputs: Sequence[Node], world_size: int) -> Plan:
        """The best candidate as data."""
        strategy, within = best.builder.build(outputs, world_size), best.builder
        if isinstance(within, Within):
            return Plan(best.name, strategy, within.nbytes, within.profile, reasons)
        return Plan(best.name, strategy, reasons=reasons)

    @property
    def builder(self) -> Builder:
        """The strategy, whose steps fit into the memory."""
        return self.strategy if self.memory is None else Within(self.strategy, self.memory, self.profile)

    def why(self) -> Why:
        """What was chosen, what it costs, what the next best would cost, and what decided."""
        if self.reasons is None:
            raise ArgumentError("this plan was read, not made", fix="make it anew with ht.plan.auto(...)")
        return self.reasons

    def to_json(self) -> str:
        return to_text(self)

    @staticmethod
    def from_json(text: str) -> Plan:
        """What `to_json` wrote; ArgumentError names what is wrong."""
        return from_text(Plan, text)


@attaches(Plan)
def _(plan: Plan, outputs: Sequence[Node], comm: Any = None) -> OnRanks:
    placement = spread(attach(plan.builder, outputs, comm))
    placement.why, placement.source = plan.why, plan.source
    return placement
