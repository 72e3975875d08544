"""What a table without a bound of its rows may hold: how many bytes, which ids get a row, and which rows go.

A server makes a row when its id is pushed, and until then, or once the row has gone, gives its first value, which
follows from the id alone (`ps/store/growing.py`). Left out: sizes that change while a job runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from .answers import answer_calls
from .core.errors import ArgumentError
from .ranges import AtLeast1, Count, OneOf, Range, Share

__all__ = ["UNBOUNDED", "Growth"]

UNBOUNDED = (1 << 63) - 1  # rows of such a table: any id of int64 from 0 on, but for the last
BESIDE = 32  # bytes of a row beside its numbers: 8 of its id and of its version, 4 of its clock, and up to 12 of the
# index, see `Directory`
COUNT, PLACE, SKETCH = 4, 8, 2  # bytes of a row that its count adds, where it lies, and a filter: see `Admission`
MOST = (1 << 30) - 1  # rows of each tier
Evict = Annotated[str, OneOf("age", "frequency")]
After = Annotated[int, Range(1, 255)]


@dataclass(frozen=True)
class Growth:
    """Rows of a table without a bound, of all servers together.

    Args:
        budget: bytes of memory that rows, their optimizer state, ids and all else may take.
        disk: bytes of files in which rows lie, with their state, that were not trained lately.
        evict: which rows go if room is needed: those that were updated longest ago ("age"), or least often
            ("frequency", of which counts are halved now and then, so that what was once hot goes too). None goes for
            another that is pushed in the same message; a push is cut into messages of 1 MB.
        after: an id gets its row by its `after`-th update; those before are dropped. Counts are kept in a sketch (as in
            the counting Bloom filter of DeepRec and TensorFlow Recommenders Addons), so some ids get theirs earlier: of
            those that come once up to a quarter at 2, one in a hundred at 3. They are halved now and then, so that an
            id that comes seldom gets none. Snapshots of servers hold them; servers of another number count anew.
        chance: an id without a row gets one by an update with this probability.

    >>> Growth(1 << 30).rows(128, servers=2), Growth(1 << 30, disk=1 << 31).rows(128, servers=2)
    ((3355443, 3355443), (1198372, 9586980))
    """

    budget: AtLeast1
    disk: Count = 0
    evict: Evict = "age"
    after: After = 1
    chance: Share = 1.0

    @property
    def beside(self) -> int:
        """Bytes of a row beside its numbers."""
        return BESIDE + COUNT * (self.evict == "frequency") + PLACE * (self.disk > 0) + SKETCH * (self.after > 1)

    def rows(self, row_bytes: AtLeast1, servers: AtLeast1 = 1, table: str = "a table") -> tuple[int, int]:
        """How many rows of so many bytes, optimizer state included, one of the servers may hold: in memory, and in all.

        ArgumentError if there is no memory for one, or for the ids of those in files.
        """
        each, cold = row_bytes + self.beside, min(self.disk // servers // row_bytes, MOST)
        hot = (self.budget // servers - cold * self.beside) // each
        if hot < 1:
            ids = f", and {self.beside} of each of {servers * cold} on disk" if cold else ""
            raise ArgumentError(
                f"budget={self.budget} of {table}, of which a row takes {each} bytes{ids}, on {servers} "
                f"server{'s' * (servers > 1)}",
                fix=f"use at least {servers * (each + cold * self.beside)}, and enough for all ids of a batch",
            )
        return min(hot, MOST), min(hot, MOST) + cold


answer_calls(__name__)
