"""Where rows of a table lie that are not dealt in turn: the part that owns each, and copies of some at other parts.

Part k lies on server k, so a worker k beside it finds the rows of part k on its own host. `bigraph.py` finds such a
division; any other will do. The division is known to workers, who send rows by their places; a server knows only its
number, by which it refuses those who mean another. Left out: moving rows once the table is there.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from ...core.errors import ArgumentError, ValueRangeError
from ...ranges import Count, unmasked
from .first_values import MOST_SERVERS


@dataclass(frozen=True, eq=False)
class Placed:
    """The part that owns each row of a table, `owners` int (rows,), and of which rows each part keeps `replicas`.

    There are as many parts as `parts` says, or else as are named. ArgumentError or ValueRangeError for other owners
    and replicas.

    >>> placed = Placed(np.array([1, 0, 1, 0, 1]), replicas=[np.array([2]), np.array([], int)])
    >>> placed
    Placed(5 rows in 2 parts of 2 to 3 rows, copies 1)
    >>> placed.places.tolist(), placed.ids.tolist()
    ([2, 0, 3, 1, 4], [1, 3, 0, 2, 4])
    """

    owners: np.ndarray
    replicas: Sequence[np.ndarray] = ()
    parts: Count = 0

    def __post_init__(self) -> None:
        owners = unmasked(self.owners, "owners").copy()
        replicas = [np.unique(unmasked(kept, "replicas")) for kept in self.replicas]
        if owners.ndim != 1 or owners.dtype.kind not in "iu" or not owners.size:
            raise ArgumentError(f"owners are {owners.dtype} of shape {owners.shape}", fix="give the part of each row")
        parts = self.parts or len(replicas) or max(0, int(owners.max())) + 1
        whole = isinstance(parts, int | np.integer) and not isinstance(parts, bool)
        if not whole or not 1 <= parts <= MOST_SERVERS or len(replicas) not in (0, parts):
            fix = f"make 1 to {MOST_SERVERS} parts, and replicas for each or for none"
            raise ArgumentError(f"{parts} parts with replicas for {len(replicas)}", fix=fix)
        if not 0 <= owners.min() <= owners.max() < parts:
            raise ValueRangeError(f"owners {owners.min()}..{owners.max()} of {parts} parts", fix="count parts from 0")
        for part, kept in enumerate(replicas):
            if kept.size and (kept.dtype.kind not in "iu" or not 0 <= kept[0] <= kept[-1] < len(owners)):
                text = f"replicas {kept[0]}..{kept[-1]} of part {part}, in a table of {len(owners)} rows"
                raise ValueRangeError(text, fix="give ids of its rows")
        owners = owners.astype("<i4")
        owners.flags.writeable = False
        made = {"owners": owners, "replicas": tuple(kept.astype("<i8") for kept in replicas), "parts": int(parts)}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Placed) and self._bytes() == other._bytes()

    def __hash__(self) -> int:
        return self.number

    def __repr__(self) -> str:
        rows, copies = np.diff(self.edges), sum(map(len, self.replicas))
        size = f"{len(self.owners)} rows in {self.parts} parts of {rows.min()} to {rows.max()} rows"
        return f"Placed({size}, copies {copies})" if copies else f"Placed({size})"

    def _bytes(self) -> tuple[int, list[bytes]]:
        return self.parts, [array.tobytes() for array in (self.owners, *self.replicas)]

    @cached_property
    def number(self) -> int:
        """By which a server knows the division; never 0, which stands for none."""
        return zlib.crc32(self.owners.tobytes(), self.parts) or 1

    @cached_property
    def edges(self) -> list[int]:
        """Where the places of each part begin, and where the last ends."""
        return [0, *accumulate(np.bincount(self.owners, minlength=self.parts).tolist())]

    @cached_property
    def ids(self) -> np.ndarray:
        """The row at each place: those of part 0 come first, each part's in the order of their ids."""
        return np.argsort(self.owners, kind="stable").astype("<i8", copy=False)

    @cached_property
    def places(self) -> np.ndarray:
        """The place of each row."""
        return np.argsort(self.ids)

    def kept_by(self, worker: Count) -> np.ndarray:
        """The rows of which a worker keeps copies."""
        return self.replicas[worker % self.parts] if self.replicas else np.empty(0, "<i8")

    def of(self, rows: slice) -> Placed:
        """The division of some rows that are a table of their own, as where ids of all tables were divided together.

        >>> Placed(np.array([0, 1, 1, 0])).of(slice(2, 4)).owners.tolist()
        [1, 0]
        """
        start, stop, step = rows.indices(len(self.owners))
        if step != 1 or start >= stop:
            raise ArgumentError(f"{rows} of {len(self.owners)} rows", fix="take at least one row, in steps of 1")
        inside = [kept[(start <= kept) & (kept < stop)] - start for kept in self.replicas]
        return Placed(self.owners[start:stop], inside, self.parts)

    @classmethod
    def joined(cls, several: Sequence[Placed]) -> Placed:
        """The division of tables of as many parts, whose rows follow each other in one."""
        first = accumulate((len(each.owners) for each in several), initial=0)
        copies = [[each.kept_by(part) + start for part in range(each.parts)] for each, start in zip(several, first)]
        owners, some = np.concatenate([each.owners for each in several]), any(each.replicas for each in several)
        return cls(owners, [*map(np.concatenate, zip(*copies))] if some else (), several[0].parts)

    def data(self) -> dict[str, Any]:
        """As plain data."""
        replicas = [kept.tolist() for kept in self.replicas]
        return {"owners": self.owners.tolist(), "replicas": replicas, "parts": self.parts}

    @classmethod
    def parse(cls, told: dict[str, Any]) -> Placed:
        """From plain data; ArgumentError or ValueRangeError unless it is a division."""
        if type(told) is not dict or told.keys() != {"owners", "replicas", "parts"}:
            raise ArgumentError(f"a division {told!r:.80}", fix="give owners, replicas and parts")
        return cls(np.asarray(told["owners"]), [np.asarray(kept) for kept in told["replicas"]], told["parts"])
