"""A strategy that gives variables to servers, as plain data.

`hybrid.py` decides which to give; the connection belongs to a process (`on_servers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..core.errors import ArgumentError
from ..core.graph import Node
from ..dist.cut.kept import Served
from ..dist.cut.strategy import Strategy
from ..ps.store.cache import Cache
from ..ps.store.consistency import Consistency, consistency
from .servable import Servable


@dataclass
class Serving(Strategy):
    """Layouts of what ranks keep, and beside them variables that are `Served`.

    consistency: what the servers are to run under; None for what they were started with.
    cache: what each rank keeps of the tables.
    apart: the ranks know the servers only. Each works as a job of one rank does, which the layouts are for: on its part
        of what is fed, split along the first axis, with a loss of its own.
    batch_size: for which a placement computes the bytes that it shows.
    """

    consistency: Consistency | None = None
    cache: Cache | None = None
    apart: bool = False
    batch_size: int = 256
    kind: ClassVar[str] = "serving"

    def check(self, outputs: Sequence[Node], world_size: int) -> None:
        """As of any strategy; ArgumentError also for a variable that servers cannot keep."""
        super().check(outputs, world_size)
        servable = Servable(outputs)
        able = {v.name for v in (*servable.steps, *servable.slots(servable.steps))}
        for name in self.variables.keys() - able:
            if isinstance(self.variables[name], Served):
                raise ArgumentError(
                    f"{name!r} is to be kept on servers, which cannot update it",
                    fix="keep it on ranks, or train it by a rule of single elements, see ht.optim.update_rule",
                )

    def data(self) -> dict[str, Any]:
        mode = None if self.consistency is None else str(self.consistency)
        cache = None if self.cache is None else asdict(self.cache)
        more = {"consistency": mode, "cache": cache, "apart": self.apart, "batch_size": self.batch_size}
        return super().data() | more

    @classmethod
    def arguments(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        mode, cache = data["consistency"], data["cache"]
        return super().arguments(data) | {
            "consistency": None if mode is None else consistency(mode),
            "cache": None if cache is None else Cache(**cache),
            "apart": bool(data["apart"]),
            "batch_size": int(data["batch_size"]),
        }
