"""What a server is told of a table: its name, its place in the whole, its rule, and how its numbers travel and lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from ...codec import Rounding, codec, rounding
from ...core.errors import ArgumentError
from ...core.types import as_dtype, is_float
from ...growth import UNBOUNDED, Growth
from ...ranges import AtLeast1, Count, Seed
from .consistency import Consistency, consistency
from .door import check_facts
from .first_values import MOST_SERVERS, Drawn, PlacedRows, drawn, parsed_part
from .messages import DTYPES, LARGEST, Kind, Message
from .rules import RuleSpec, check_rule

REDUCTIONS = ("mean", "sum")
TURNS = ("ask", "wait", "pass")  # of a worker that may be asked for first values, see `givers.py`
OVERHEAD = 4096  # bytes of a table without rows, of which nobody should make millions


@dataclass(frozen=True)
class TableSpec:
    """The description of a table: its name, its first row in the whole, its size, and how pushes change it.

    `reduce` is "mean" (a push weighs 1 / workers, as in large-batch training) or "sum" (a push counts as it is). A
    higher `generation` of an existing table means that all its rows get new values. `push` and `pull` say how numbers
    travel, and `at_rest` how they lie, see `codec.py`. Rows of the whole are dealt among `parts` blocks: here are
    `first`, `first + parts`, ..., or if they are `placed`, by a division of this number, the
    rows of part `first`. By `seed` they are rounded at rest. `joined` names the tables
    whose rows follow each other in this one, and how many each has, for those who look. One that `grows` makes its rows
    as they are pushed, `rows` at most, with first values by a `law`; see `growing.py`. A `fleeting` one is of the
    lives of the workers that made it, and goes with the last of these. Its `consistency` is that of the job, or one of
    its own that lets no worker lead by more.

    >>> TableSpec.parse({"name": "w", "start": 0, "rows": 2, "cols": 3}).footprint
    4138
    """

    name: str
    start: Count
    rows: Count
    cols: Count
    dtype: str = "float32"
    rule: RuleSpec = "sgd"
    options: dict[str, Any] = field(default_factory=dict)
    reduce: str = "mean"
    generation: Count = 0
    push: str = ""
    pull: str = ""
    parts: AtLeast1 = 1
    first: Count = 0
    at_rest: str = ""
    seed: Seed = 0
    joined: list[list[Any]] = field(default_factory=list)
    grows: dict[str, Any] = field(default_factory=dict)
    law: dict[str, Any] = field(default_factory=dict)
    placed: Count = 0
    fleeting: bool = False
    consistency: str = ""

    @classmethod
    def parse(cls, meta: dict[str, Any]) -> TableSpec:
        """The description in a CREATE message; ArgumentError unless every field is there and in its range."""
        check_facts(Message(Kind.CREATE, meta=meta))
        spec = cls(**{name: value for name, value in meta.items() if name not in ("draw", "turn")})
        if (turn := meta.get("turn", "ask")) not in TURNS:
            raise ArgumentError(f"turn={turn!r} of a CREATE", fix="use ask, wait or pass")
        if "draw" in meta:
            spec.drawn(meta["draw"])
        if spec.growth is not None:
            spec.first_law()
        return spec

    def __post_init__(self) -> None:
        if max(1, self.rows) * max(1, self.cols) * 8 > LARGEST:  # of an empty table too, because none could be made
            raise ArgumentError(f"a table of {self.rows} rows and {self.cols} columns", fix="no memory is that large")
        if not 1 <= self.parts <= MOST_SERVERS:
            raise ArgumentError(f"a table in {self.parts} parts", fix=f"use 1 to {MOST_SERVERS}")
        if not all(type(each) is list and [*map(type, each)] == [str, int] for each in self.joined):
            raise ArgumentError(f"joined={self.joined!r:.80}", fix="give a name and a number of rows for each table")
        if self.reduce not in REDUCTIONS:
            raise ArgumentError(f"reduce={self.reduce!r} of a table", fix="use mean or sum")
        if self.dtype not in [dtype.name for dtype in DTYPES]:
            raise ArgumentError(f"a table of {self.dtype}", fix="use float32, float64, float16, int32, int64 or uint8")
        if self.reduce == "mean" and not is_float(as_dtype(self.dtype)):
            raise ArgumentError(f"the mean of pushes of {self.dtype}", fix='use reduce="sum" for integers')
        check_rule(self.rule, self.options)
        consistency(self.consistency or "bsp")  # ArgumentError for what is none
        coded = [codec(self.push), codec(self.pull), rounding(self.at_rest)]
        if self.growth is not None and self.at_rest:
            raise ArgumentError("at_rest= of a table without a bound", fix="leave it out: such rows lie as they are")
        if self.growth is not None and not 1 <= self.rows < 1 << 31:
            raise ArgumentError(f"a table without a bound with room for {self.rows} rows", fix="use 1 to 2**31 - 1")
        if any(coded) and not is_float(as_dtype(self.dtype)):
            how = self.push or self.pull or self.at_rest
            raise ArgumentError(f"{self.dtype} that travels or lies as {how}", fix="code floats only")

    def meta(self) -> dict[str, Any]:
        return asdict(self)

    def unlike(self, other: TableSpec) -> str:
        """In what another description differs, but for the generation."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        names = [name for name in names if name != "generation"]
        return ", not ".join(", ".join(f"{name}={getattr(s, name)!r:.60}" for name in names) for s in (self, other))

    def drawn(self, told: dict[str, Any]) -> Iterator[PlacedRows]:
        """The first values that a CREATE tells of; ArgumentError unless a server can draw them."""
        return drawn(told, (self.rows, self.cols), as_dtype(self.dtype))

    @cached_property
    def growth(self) -> Growth | None:
        """What it may hold if it has no bound of its rows; ArgumentError unless `grows` says what that is."""
        return Growth(**self.grows) if self.grows else None

    def first_law(self) -> Drawn:
        """The law of the first values of a table without a bound; ArgumentError if it has none."""
        return parsed_part(self.law, self.cols, as_dtype(self.dtype))

    @cached_property
    def mode(self) -> Consistency | None:
        """Its own consistency, if it has one."""
        return consistency(self.consistency) if self.consistency else None

    @property
    def footprint(self) -> int:
        """Bytes that a server needs: values, optimizer state, versions, what any table costs, and of one that is
        updated as a whole its gradient."""
        arrays = check_rule(self.rule, self.options).states + self.whole
        lying = self.row_bytes if self.lying is None else self.lying.width(self.cols)
        if self.growth is not None:
            return OVERHEAD + self.hot_rows * self.row_bytes * (arrays + 1) + self.rows * self.growth.beside
        return OVERHEAD + self.rows * (self.row_bytes * arrays + lying + 9)

    @property
    def numbered(self) -> int:
        """How many rows may be named: of a table without a bound this part's share of all ids."""
        return self.rows if self.growth is None else len(range(self.first, UNBOUNDED, self.parts))

    @property
    def hot_rows(self) -> int:
        """Of a table without a bound, the rows that lie in memory."""
        if self.growth is None or not self.growth.disk:
            return self.rows
        states = check_rule(self.rule, self.options).states
        return min(self.rows, self.growth.rows(self.row_bytes * (states + 1), self.parts)[0])

    @property
    def row_bytes(self) -> int:
        return self.cols * np.dtype(self.dtype).itemsize

    @property
    def lying(self) -> Rounding | None:
        """How rows lie, if they are smaller so: of one float32 a byte and its scale are not."""
        found = rounding(self.at_rest)
        return None if found is None or found.width(self.cols) >= self.row_bytes else found

    @property
    def whole(self) -> bool:
        """Whether it is a block of a dense parameter, or like one; all others are updated by rows."""
        return self.rows == 1 and self.lying is None and self.growth is None
