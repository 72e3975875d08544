"""Which rows a cache keeps, how many and how stale: policies, what coming batches will use, and whether it is worth it.

A policy that goes by the past scores each line it has. Who can see the coming batches need not guess: HET-KG counts
their ids, of entities and of relations apart, and keeps those used most, either once and for all ("constant") or of
ever the next few batches ("dynamic"). S. Dong et al., "HET-KG: Communication-Efficient Knowledge Graph Embedding
Training via Hotness-Aware Cache", ICDE 2022, section 4 (CPS and DPS). Left out: fetching such rows before they are
looked up, which takes a message, and no row fewer.

What a cache has done is counted, and `Cache("auto")` goes by whether it is worth having. Bytes are reckoned from counts
of rows: the numbers of a row, and `SMALL` for an id, a version or a count, which travel packed (`packing.py`). No clock
is read, so that a run decides as it did before. Left out: what a message costs beside its rows, which is the same with
a cache and without.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np

from ...answers import answer_calls
from ...core.errors import ArgumentError, UnknownNameError, did_you_mean
from ...growth import UNBOUNDED
from ...ranges import AtLeast1, Count, Share

__all__ = ["Cache", "hot_rows"]

PERMANENT_USES = 10  # after so many uses lfuopt evicts a row only once its count was halved below
NEVER = np.iinfo(np.int64).max  # the score of what is not evicted

Score = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _lfu(uses: np.ndarray, last: np.ndarray) -> np.ndarray:
    score: np.ndarray = (uses << 32) + last
    return score


def _lfuopt(uses: np.ndarray, last: np.ndarray) -> np.ndarray:
    return np.where(uses < PERMANENT_USES, _lfu(uses, last), NEVER)


class CachePolicy(NamedTuple):
    """The score of every line, from its uses and the lookup that used it last, of which the lowest is evicted first;
    whether the cache is off while it saves too little; whether it keeps what coming batches use, chosen once; and
    whether the table says which rows."""

    score: Score | None
    switches: bool = False
    foresees: bool = False
    once: bool = False
    placed: bool = False


POLICIES = {
    "lru": CachePolicy(lambda uses, last: last),
    "lfu": CachePolicy(_lfu),
    "lfuopt": CachePolicy(_lfuopt),
    "hot": CachePolicy(None),  # the rows used most in the last batches, or those that `keep` names
    "auto": CachePolicy(_lfuopt, switches=True),
    "constant": CachePolicy(None, foresees=True, once=True),
    "dynamic": CachePolicy(None, foresees=True),
    "replicas": CachePolicy(None, placed=True),
}


@dataclass(frozen=True)
class Cache:
    """The rows that a worker keeps of each table: `ParameterServer(cache=Cache(...))` and `Hybrid(cache=Cache(...))`.

    `rows` is their number, or as a float their share of the table, or both by patterns of the names of tables. `policy`
    says which they are: "lru", "lfu", "lfuopt" (LFU; rows used often stay as long as they are), "hot" (those used most
    in the last batches, or those that `CachedTable.keep` names), or "auto": LFUOpt, but no rows while that does not
    save 10 % of the bytes (`Worth`). A cache takes a worker's time, so one that saves little is better off.
    "replicas" keeps those that the table's `Placed` names for this worker, whatever `rows` says.
    `pull_bound` limits how many updates that servers know of a row may miss when it is read, `push_bound` how many of
    its own a worker may hold back: a read among W workers misses at most pull_bound + (W - 1) push_bound.
    `inter_bound` limits how far the rows of one look-up are apart: each is as servers had it at this worker's clock or
    at most so many clocks before, but for own updates, so those of one sample are no further apart ("inter-embedding"
    staleness in HET-GMP, SIGMOD 2022); None for no such limit.

    Two policies keep the rows that the next `ahead` batches use most, which `ht.fit` tells them, or a loop of yours by
    `run(..., ahead=[...])`: "dynamic" chooses again once these are over, "constant" only as long as it has not seen so
    many, and wants to see an epoch, `ahead=len(loader)`. Ids that follow from others in the graph cannot be seen: draw
    negatives in the loader.

    >>> Cache(rows=0.1).capacity(26_000), Cache("lru", rows=500).capacity(400)
    (2600, 400)
    >>> Cache("dynamic", ahead=8).looks, Cache("lru").looks
    (8, 1)
    >>> Cache("dynamic", rows={"*relations": 1.0, "*": 200}).capacity(50, "triples/relations")
    50
    """

    policy: str = "lfuopt"
    rows: AtLeast1 | Share | Mapping[str, AtLeast1 | Share] = 0.1
    pull_bound: Count = 10
    push_bound: Count = 10
    ahead: AtLeast1 = 16
    inter_bound: Count | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UnknownNameError(f"no cache policy {self.policy!r}", fix=did_you_mean(self.policy, POLICIES))

    @property
    def looks(self) -> int:
        """How many of the coming batches it has use for: the next one is asked for early in any case."""
        return self.ahead if POLICIES[self.policy].foresees else 1

    def capacity(self, rows: Count, table: str = "") -> int:
        """The number of rows that are kept of a table of `rows` rows and this name."""
        asked = self.rows
        if isinstance(asked, Mapping):
            table = re.sub(r" \(\d+\)$", "", table)  # by which servers tell executors apart
            fits = [pattern for pattern in asked if fnmatch.fnmatch(table, pattern)]
            if not fits:
                fix = 'name it, or say what all others keep: {..., "*": 0.1}'
                raise ArgumentError(f"the cache has rows for {', '.join(asked)}, and none for {table!r}", fix=fix)
            asked = asked[fits[0]]
        if isinstance(asked, float) and rows == UNBOUNDED:
            raise ArgumentError(
                f"a cache of a share, {asked}, of {table or 'a table'}, which has no bound",
                fix="use a count: rows=10_000",
            )
        return max(1, round(rows * asked)) if isinstance(asked, float) else min(rows, asked)


def hot_rows(batches: Iterable[np.ndarray], count: Count) -> np.ndarray:
    """The `count` ids that the coming batches (HET-KG: the next D, or an epoch) use most, for `CachedTable.keep`.

    >>> hot_rows([np.array([5, 2, 5]), np.array([[5, 2], [2, 9]])], count=2).tolist()
    [2, 5]
    """
    ids, uses = np.unique(np.concatenate([np.ravel(batch) for batch in batches]), return_counts=True)
    return np.sort(ids[np.argsort(-uses, kind="stable")[:count]])


def worth_keeping(batches: Sequence[np.ndarray], held: np.ndarray, shares: Sequence[tuple[int, int]]) -> np.ndarray:
    """The ids to keep while these batches come, increasing: of each table, (rows, how many of them), its own.

    A row saves a pull in each batch that uses it, but for the first if it is not among those `held`. Where there is
    room, held rows stay that no batch uses, and then rows come that one batch uses, as later ones may.

    >>> batches = [np.array([0, 5, 6]), np.array([0, 6, 9, 0]), np.array([1, 9])]
    >>> worth_keeping(batches, np.array([1, 2]), [(5, 2), (5, 1)]).tolist()
    [0, 1, 6]
    >>> worth_keeping(batches, np.array([1, 2]), [(5, 3), (5, 3)]).tolist()
    [0, 1, 2, 5, 6, 9]
    """
    ids, uses = np.unique(np.concatenate([held, *map(np.unique, batches)]), return_counts=True)
    saved = uses - 1  # of a held row, which has been counted once more than it is used, and of another
    mine = np.isin(ids, held)
    order = np.lexsort((ids, ~mine, -saved))
    kept, first = list[np.ndarray](), 0
    for rows, count in shares:
        inside = (first <= ids[order]) & (ids[order] < first + rows)
        kept.append(np.sort(ids[order[inside][:count]]))
        first += rows
    return np.concatenate(kept)


answer_calls(__name__)


SMALL = 2  # bytes of an id, a version or a count
LEAST = 0.1  # the share of bytes that a cache must save, as it costs its worker time
WINDOW = 4  # distinct rows looked up for each line, between two decisions
PAUSES = 4, 64  # windows without a cache, after it failed first, and at most; each failure doubles them


@dataclass
class Counters:
    """Rows since the start: requested, distinct in their batch, fetched from the server, pushed to it, evicted, and
    looked up while "auto" kept none. Bytes to and from the server: moved, and what would have been without a cache."""

    lookups: int = 0
    unique: int = 0
    fetched: int = 0
    pushed: int = 0
    evicted: int = 0
    passed: int = 0
    moved: int = 0
    plain: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*map(operator.add, astuple(self), astuple(other)))

    @property
    def hit_rate(self) -> float:
        """The share of distinct rows whose copies were fresh enough."""
        return 1 - self.of_unique if self.unique else 0.0

    @property
    def saved(self) -> float:
        """The share of bytes that the cache saved; below 0 if it moved more than none."""
        return 1 - self.moved / self.plain if self.plain else 0.0

    @property
    def of_lookups(self) -> float:
        """Fetched rows per requested row, to compare with a server that answers every id of a batch."""
        return self.fetched / max(1, self.lookups)

    @property
    def of_unique(self) -> float:
        """Fetched rows per distinct row, to compare with a server that answers every distinct id of a batch."""
        return self.fetched / max(1, self.unique)


class Worth:
    """Whether a cache of so many lines is to be on. The first window after it comes on fills its lines and tells
    nothing; after each further one it stays on if it saved `LEAST` of the bytes. If not, it is tried again after a
    pause, as other rows may have become popular, and after each failure in a row after a longer one.

    >>> worth, seen = Worth(lines=1), Counters()
    >>> def window(moved):
    ...     seen.unique, seen.plain, seen.moved = seen.unique + 4, seen.plain + 100, seen.moved + moved
    ...     return worth.decide(seen)
    >>> [window(moved) for moved in (100, 90, 91)], [window(100) for _ in range(4)]
    ([True, True, False], [False, False, False, True])
    """

    def __init__(self, lines: int) -> None:
        self.window, self.on, self.filled, self.began = WINDOW * lines, True, False, Counters()
        self.pause = self.left = PAUSES[0]

    def due(self, seen: Counters) -> bool:
        """Whether the window has passed."""
        return seen.unique - self.began.unique >= self.window

    def decide(self, seen: Counters) -> bool:
        """Whether the cache is to be on in the next window."""
        moved, plain = seen.moved - self.began.moved, seen.plain - self.began.plain
        self.began = replace(seen)
        if not self.on:
            self.left -= 1
            self.on, self.filled = self.left == 0, False
        elif not self.filled:
            self.filled = True
        elif moved <= (1 - LEAST) * plain:
            self.pause = PAUSES[0]
        else:
            self.on, self.left, self.pause = False, self.pause, min(2 * self.pause, PAUSES[1])
        return self.on
