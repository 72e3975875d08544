"""A strategy that gives variables to servers, as plain data.

`hybrid.py` decides which variables; the connection belongs to a process (`on_servers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..core.errors import ArgumentError
from ..core.graph import Node
from ..dist.cut.kept import Kept
from ..dist.cut.pipeline_strategy import Staged
from ..dist.cut.strategy import Strategy
from ..ranges import Count
from .servable import Servable
from .served import Served


@dataclass
class Serving(Strategy):
    """Layouts of the variables on ranks, and beside them variables that are `Served`.

    apart: the ranks know the servers only. Each works like a job of one rank, which the layouts describe: on its part
        of each feed, split along the first axis, with a loss of its own.
    batch_size: of all ranks together, for the bytes that a placement shows.
    """

    apart: bool = False
    batch_size: Count = 256
    kind: ClassVar[str] = "serving"
    lives: ClassVar[Any] = dict[str, Kept | Served]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alone = self.apart
        if self.batch_size < 0:
            fix = "count the rows that all ranks together feed in a step"
            raise ArgumentError(f"batch_size={self.batch_size}", fix=fix)

    def check(self, outputs: Sequence[Node], world_size: int) -> None:
        """The checks of any strategy; ArgumentError also for a variable that servers cannot keep."""
        super().check(outputs, world_size)
        servable = Servable(outputs)
        able = {v.name for v in (*servable.steps, *servable.slots(servable.steps))}
        for name in self.variables.keys() - able:
            if self.variables[name].served:
                fix = "keep it on ranks, or train it by a rule of single elements, see ht.optim.update_rule"
                raise ArgumentError(f"{name!r} is to be kept on servers, which cannot update it", fix=fix)
        homes = {v: home for v in servable.steps if isinstance(home := self.variables.get(v.name), Served)}
        modes = {home.consistency: v.name for v, home in homes.items()}
        if None in modes and len(modes) > 1:
            silent = modes.pop(None)
            fix = 'say it of all that servers keep: consistency={..., "*": BSP()}'
            raise ArgumentError(f"a consistency is asked for {min(modes.values())!r}, and none for {silent!r}", fix=fix)
        for v, home in homes.items():
            if not home.copied and v not in servable.tables:
                text = f"{v.name!r} is to be kept on servers by rows, but a step reads all of it"
                raise ArgumentError(text, fix="copy it whole: Served(copied=True)", site=v.site)
            if home.placed is not None and len(home.placed.owners) != v.shape[0]:
                raise ArgumentError(
                    f"placed= gives owners of {len(home.placed.owners)} rows, {v.name!r} has {v.shape[0]}",
                    fix="give each table its own, as partition.placed.of(slice(first, last)) is one table's",
                    site=v.site,
                )

    def check_fresh(self, mode: str) -> None:
        """ArgumentError if ranks that look up the same rows may read different ones, as caches or the `mode` of the
        servers allow: what they all keep would drift apart."""
        tables = {name: home for name, home in self.variables.items() if isinstance(home, Served) and not home.copied}
        stale = {n: c for n, t in tables.items() if (c := t.cache) and (c.pull_bound or c.push_bound)}
        parts = [math.prod(n for role, n in fed.axes().values() if role >= 0) for fed in self.feeds.values()]
        copies = not self.apart and any(len(grid.ranks) > max(parts, default=1) for grid in self.grids())
        if copies and (stale or (tables and mode != "bsp")):
            name = min(stale or tables)
            raise ArgumentError(
                f"ranks that share samples may read different rows of {name!r}: {stale.get(name) or mode}",
                fix="let them read alike, by BSP() and Cache(pull_bound=0, push_bound=0), or split by data alone",
            )

    def __str__(self) -> str:
        return super().__str__() + "\nranks: apart" * self.apart


@dataclass
class ServingStages(Staged, Serving):
    """A strategy with stages, of which servers keep some variables. A step is one clock, however many micro-batches it
    has: each rank that looks rows up pulls them at its beginning and pushes their gradients at its end.
    """

    kind: ClassVar[str] = "serving stages"

    def check(self, outputs: Sequence[Node], world_size: int) -> None:
        """The checks of both; ArgumentError also for a schedule of which a step has several updates."""
        if self.schedule == "pipedream":
            got = "PipeDream updates after each micro-batch, but servers once a step"
            raise ArgumentError(got, fix='use schedule="1f1b"')
        super().check(outputs, world_size)


SERVING: Mapping[type[Strategy], type[Serving]] = {Strategy: Serving, Staged: ServingStages}  # what servers add to
