"""A variable that servers keep, and what it asks of them, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from ..codec import Compress
from ..core.errors import ArgumentError
from ..dist.cut.kept import WRITTEN, Home
from ..plain_data import form
from ..ps.store.consistency import Consistency, consistency
from ..ps.store.placed import Placed
from ..ps.store.policies import Cache


@dataclass(frozen=True)
class Served(Home):
    """A variable that servers keep and update, by the gradients that ranks send.

    If it is `copied`, each rank has all of it and fetches it anew after each step. Otherwise a rank keeps nothing: it
    fetches the rows of a table that it looks up, and only the servers use the state of an optimizer.

    consistency: how stale what ranks read may be: BSP(), SSP(3) or ASP(). None for the mode that servers were started
        with; one strategy says it of all or of none. Workers may be as far apart as the loosest of these modes allows.
    compress: how what travels is made smaller, and rows that lie on servers.
    cache: the rows of the table that each rank keeps all the same, and how stale they may be.
    placed: which server owns each row, and of which each rank keeps copies; else rows are dealt in turn.
    pooled: whether servers sum up bags of rows, so that no row travels.

    ArgumentError for a cache of bags, which needs the rows, and for what a copied variable is asked that only rows can
    do, or the other way round.

    >>> Served(cache=Cache("lru", rows=100)).words
    ('by rows', 'servers', "Cache(policy='lru', rows=100)")
    """

    copied: bool = False
    consistency: Consistency | None = None
    compress: Compress | None = None
    cache: Cache | None = None
    placed: Placed | None = None
    pooled: bool = False
    served: ClassVar[bool] = True
    called: ClassVar = "a variable on servers", WRITTEN

    def __post_init__(self) -> None:
        rows, fix = [name for name in OF_ROWS if getattr(self, name)], "leave one out: a cache needs the rows"
        if self.pooled and self.cache:
            raise ArgumentError("pooled= of a table of which each rank keeps rows", fix=fix)
        if self.copied and rows:
            raise ArgumentError(f"{rows[0]}= of a variable that is copied whole", fix="use it for tables, copied=False")
        if self.compress is not None and self.compress.part(sparse=not self.copied) != self.compress:
            fix = f"say {'gradients= and values=' if self.copied else 'rows= and at_rest='} of it alone"
            raise ArgumentError(f"{brief(self.compress)} of what travels {self.words[0]}", fix=fix)

    @property
    def words(self) -> tuple[str, str, str]:
        asked = [] if self.consistency is None else [str(self.consistency)]
        asked += [brief(value) for value in (self.compress, self.cache) if value is not None]
        asked += [str(self.placed)] * (self.placed is not None) + ["bags summed there"] * self.pooled
        return "whole" if self.copied else "by rows", "servers", ", ".join(asked)


def brief(asked: Any) -> str:
    """A dataclass without the fields that are as they are by default."""
    said = [f"{f.name}={value!r}" for f in fields(asked) if (value := getattr(asked, f.name)) != f.default]
    return f"{type(asked).__name__}({', '.join(said)})"


OF_ROWS = "cache", "placed", "pooled"  # of tables alone
form(Consistency, str, consistency)
form(Placed, Placed.data, Placed.parse)
