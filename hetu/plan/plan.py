"""A chosen plan: plain data that an executor takes as its strategy, and what it was chosen against.

Ignored on purpose: how it was found (`planner.py`), and how it is told (`why.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..core.errors import ArgumentError
from ..core.graph import Node, topological
from ..core.op import Role
from ..dist.cut.placement import Placement
from ..dist.cut.strategy import Strategy
from ..ps.served import Served
from ..ps.store.cache import Cache
from .costs.profile import Profile
from .hybrid import Hybrid
from .memory.fit import fit
from .why import Rated, Why


@dataclass(frozen=True)
class Within:
    """A strategy whose steps are made to fit into so many bytes on each rank, variables included, by recomputing.

    With a profile whose device has `host_bandwidth`, values also wait in the memory of the host where that is faster.
    It is for strategies without pipelines.
    """

    builder: Any
    nbytes: int
    profile: Profile | None = None

    def build(self, outputs: Sequence[Node], world_size: int) -> Strategy:
        """The strategy for a graph on `world_size` ranks."""
        return self.builder.build(outputs, world_size)

    def attach(self, outputs: Sequence[Node], comm: Any = None) -> Placement:
        """What an executor works with. BudgetError, when a step is compiled, if it cannot be made to fit."""
        placement = self.builder.attach(outputs, comm)
        variables = {placement.variable(n) for n in topological(outputs) if n.role is Role.VARIABLE} - {None}
        room = self.nbytes - sum(int(v.tensor.nbytes) for v in variables)
        placement.last = functools.partial(fit, budget=room, profile=self.profile)
        return placement


@dataclass
class Plan:
    """A strategy, what is kept on servers, what ranks cache of that, and the bytes a rank may use if its steps must be
    made to fit, with the profile by which they are if values may wait in the memory of the host.

    `print(plan.why())` says why it was chosen; a plan read from JSON does not know.

    >>> from hetu.dist import Mesh
    >>> mesh = Mesh((2,), ("data",))
    >>> plan = Plan("dp2", Strategy(mesh.layout(), {}, {"x": mesh.layout(data=0)}), memory=1 << 20)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    name: str
    strategy: Strategy
    served: tuple[str, ...] = ()
    memory: int | None = None
    cache: Cache | None = None
    profile: Profile | None = None
    reasons: Why | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(best: Rated, reasons: Why, outputs: Sequence[Node], world_size: int) -> Plan:
        """The best candidate as data."""
        builder, memory, served, cache, profile = best.builder, None, (), None, None
        if isinstance(builder, Within):
            builder, memory, profile = builder.builder, builder.nbytes, builder.profile
        if isinstance(builder, Hybrid):
            choices = builder.choices(Served(outputs), world_size)
            served, cache = tuple(c.name for c in choices.values() if c.on_servers), builder.cache
            builder = builder.parallel
        return Plan(best.name, builder.build(outputs, world_size), served, memory, cache, profile, reasons)

    def attach(self, outputs: Sequence[Node], comm: Any = None) -> Placement:
        """What an executor works with."""
        builder: Any = self.strategy
        if self.served:
            builder = Hybrid(self.strategy, served=self.served, batch_size=0, cache=self.cache)
        if self.memory is not None:
            builder = Within(builder, self.memory, self.profile)
        placement = builder.attach(outputs, comm)
        placement.why = self.why
        return placement

    def why(self) -> Why:
        """What was chosen, what it costs, what the next best would cost, and what decided."""
        if self.reasons is None:
            raise ArgumentError("this plan was read, not made", fix="make it anew with ht.plan.auto(...)")
        return self.reasons

    def to_json(self) -> str:
        data = {"name": self.name, "served": self.served, "memory": self.memory}
        data["profile"] = None if self.profile is None else json.loads(self.profile.to_json())
        data["cache"] = None if self.cache is None else asdict(self.cache)
        return json.dumps({**data, "strategy": json.loads(self.strategy.to_json())}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """What `to_json` wrote."""
        try:
            data = json.loads(text)
            strategy = Strategy.from_json(json.dumps(data["strategy"]))
            memory = None if data["memory"] is None else int(data["memory"])
            cache = None if data["cache"] is None else Cache(**data["cache"])
            profile = None if data["profile"] is None else Profile.from_json(json.dumps(data["profile"]))
            return Plan(str(data["name"]), strategy, tuple(map(str, data["served"])), memory, cache, profile)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"not a plan: {error!r}", fix="pass what Plan.to_json wrote") from None
