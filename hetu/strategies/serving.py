"""A strategy that gives variables to servers, as plain data.

`hybrid.py` decides which variables; the connection belongs to a process (`on_servers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ..core.errors import ArgumentError
from ..core.graph import Node
from ..dist.cut.kept import Served
from ..dist.cut.strategy import Strategy, exactly
from ..ps.store.codec import Compress
from ..ps.store.consistency import Consistency, consistency
from ..ps.store.policies import Cache
from .servable import Servable


@dataclass
class Serving(Strategy):
    """Layouts of the variables on ranks, and beside them variables that are `Served`.

    consistency: the mode of the servers; None for the mode that they were started with.
    cache: the rows that each rank keeps of the tables.
    compress: how what travels is made smaller.
    apart: the ranks know the servers only. Each works like a job of one rank, which the layouts describe: on its part
        of each feed, split along the first axis, with a loss of its own.
    batch_size: of all ranks together, for the bytes that a placement shows.
    """

    consistency: Consistency | None = None
    cache: Cache | None = None
    apart: bool = False
    batch_size: int = 256
    compress: Compress | None = None
    kind: ClassVar[str] = "serving"
    readers: ClassVar[dict[str, Callable[[Any], Any]]] = Strategy.readers | {
        "consistency": lambda mode: None if mode is None else consistency(mode),
        "cache": lambda cache: None if cache is None else Cache(**cache),
        "apart": exactly(bool),
        "batch_size": exactly(int),
        "compress": lambda compress: None if compress is None else Compress(**compress),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wishes(self.consistency, self.cache, self.batch_size, self.compress)

    def check(self, outputs: Sequence[Node], world_size: int) -> None:
        """The checks of any strategy; ArgumentError also for a variable that servers cannot keep."""
        super().check(outputs, world_size)
        servable = Servable(outputs)
        able = {v.name for v in (*servable.steps, *servable.slots(servable.steps))}
        for name in self.variables.keys() - able:
            if self.variables[name].served:
                raise ArgumentError(
                    f"{name!r} is to be kept on servers, which cannot update it",
                    fix="keep it on ranks, or train it by a rule of single elements, see ht.optim.update_rule",
                )

        lying = "" if self.compress is None else self.compress.at_rest
        if lying and servable.steps and not any(self.variables.get(v.name) == Served() for v in servable.steps):
            fix = "name tables in served=, or leave it out: other variables lie as they are"
            raise ArgumentError(f"at_rest={lying!r}, but servers keep no table", fix=fix)

    def __str__(self) -> str:
        asked: dict[str, Any] = {"consistency": self.consistency, "cache": self.cache, "compress": self.compress}
        asked["ranks"] = "apart" if self.apart else None
        return "\n".join([super().__str__(), *(f"{name}: {value}" for name, value in asked.items() if value)])

    def data(self) -> dict[str, Any]:
        mode = None if self.consistency is None else str(self.consistency)
        cache = None if self.cache is None else asdict(self.cache)
        compress = None if self.compress is None else asdict(self.compress)
        more = {"consistency": mode, "cache": cache, "compress": compress}
        return super().data() | more | {"apart": self.apart, "batch_size": self.batch_size}


def check_wishes(mode: Consistency | None, cache: Cache | None, batch_size: int, compress: Compress | None) -> None:
    """ArgumentError for what a strategy cannot ask of servers."""
    if not isinstance(mode, Consistency | None):
        raise ArgumentError(f"consistency={mode!r}", fix="pass hetu.ps.BSP(), SSP(3) or ASP()")
    if not isinstance(cache, Cache | None):
        raise ArgumentError(f"cache={cache!r}", fix='pass hetu.ps.Cache("lru", rows=0.1), or None')
    if not isinstance(compress, Compress | None):
        raise ArgumentError(f"compress={compress!r}", fix='pass hetu.ps.Compress(rows="float16"), or None')
    if not isinstance(batch_size, int) or batch_size < 0:
        raise ArgumentError(f"batch_size={batch_size!r}", fix="count the rows that all ranks together feed in a step")
