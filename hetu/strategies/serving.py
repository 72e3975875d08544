"""A strategy that gives variables to servers, as plain data.

`hybrid.py` decides which variables; the connection belongs to a process (`on_servers.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from ..core.errors import ArgumentError, UnknownNameError, did_you_mean
from ..core.graph import Node
from ..dist.cut.kept import Served
from ..dist.cut.strategy import Strategy, exactly
from ..ps.store.codec import Compress
from ..ps.store.consistency import Consistency, consistency
from ..ps.store.placed import Placed
from ..ps.store.policies import Cache
from ..ranges import Count
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
    placed: by patterns of the names of tables, which server owns each row, and of which each rank keeps copies.
    pooled: patterns of the names of tables of which servers sum up bags.
    """

    consistency: Consistency | None = None
    cache: Cache | None = None
    apart: bool = False
    batch_size: Count = 256
    compress: Compress | None = None
    placed: Mapping[str, Placed] = field(default_factory=dict)
    pooled: tuple[str, ...] = ()
    kind: ClassVar[str] = "serving"
    readers: ClassVar[dict[str, Callable[[Any], Any]]] = Strategy.readers | {
        "consistency": lambda mode: None if mode is None else consistency(mode),
        "cache": lambda cache: None if cache is None else Cache(**cache),
        "apart": exactly(bool),
        "batch_size": exactly(int),
        "compress": lambda compress: None if compress is None else Compress(**compress),
        "placed": lambda placed: {name: Placed.parse(each) for name, each in placed.items()},
        "pooled": lambda names: tuple(map(exactly(str), exactly(list)(names))),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alone = self.apart
        if self.batch_size < 0:
            raise ArgumentError(
                f"batch_size={self.batch_size}", fix="count the rows that all ranks together feed in a step"
            )

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
        tables = [v for v in servable.steps if self.variables.get(v.name) == Served()]
        for asked in ("placed", "pooled") if servable.steps else ():
            for pattern in getattr(self, asked):
                if not any(fnmatch.fnmatch(v.name, pattern) for v in tables):
                    fix = did_you_mean(pattern, [v.name for v in tables]) if tables else "name tables in served="
                    raise UnknownNameError(f"{asked}={pattern!r} fits no table that servers keep", fix=fix)
        if self.pooled and self.cache:
            fix = "leave one out: a cache needs the rows"
            raise ArgumentError(f"pooled={self.pooled} of tables of which each rank keeps rows", fix=fix)
        for v in tables:
            self.placed_rows(v)

    def placed_rows(self, table: Node) -> Placed | None:
        """Where the rows of a table lie, if it says so; ArgumentError for the owners of another number of rows."""
        placed = next((each for pattern, each in self.placed.items() if fnmatch.fnmatch(table.name, pattern)), None)
        if placed is not None and len(placed.owners) != table.shape[0]:
            raise ArgumentError(
                f"placed= gives owners of {len(placed.owners)} rows, {table.name!r} has {table.shape[0]}",
                fix="give each table its own, as partition.placed.of(slice(first, last)) is one table's",
                site=table.site,
            )
        return placed

    def __str__(self) -> str:
        asked: dict[str, Any] = {"consistency": self.consistency, "cache": self.cache, "compress": self.compress}
        asked["ranks"] = "apart" if self.apart else None
        asked["pooled"] = ", ".join(self.pooled)
        asked["placed"] = ", ".join(f"{name} {placed}" for name, placed in self.placed.items())
        return "\n".join([super().__str__(), *(f"{name}: {value}" for name, value in asked.items() if value)])

    def data(self) -> dict[str, Any]:
        mode = None if self.consistency is None else str(self.consistency)
        cache = None if self.cache is None else asdict(self.cache)
        compress = None if self.compress is None else asdict(self.compress)
        placed = {name: each.data() for name, each in self.placed.items()}
        more = {"consistency": mode, "cache": cache, "compress": compress, "placed": placed, "pooled": [*self.pooled]}
        return super().data() | more | {"apart": self.apart, "batch_size": self.batch_size}
