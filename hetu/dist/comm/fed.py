"""Whether ranks go on being fed alike: hashes of samples, compared together with the calls of the ranks.

The first feeds of each shape are compared whole (`cut/agreement.py`), which costs a look at every number. Of all others
a sample is hashed that begins elsewhere in each step, so loaders that have drifted apart differ in the next one, and a
difference in few numbers that stays is found when a sample meets it. Left out: one that no sample meets.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import FeedError
from .line import mixed
from .recorder import Entry, Ranks, Raw, named

SAMPLE = 16  # numbers, or up to twice as many
KEPT = 64  # batches of each feed: as many as comparisons that are under way may be of
FED = "fed: "  # begins the series of feeds in the recorder
WeighedFeed = tuple[int, Raw]
FIX = (
    "feed all ranks the whole batch, or each its own part, of one size: local_feeds=True and DataLoader(shard=True); "
    "shuffle by one seed"
)


class FedAlike:
    """What some places of a group must be fed alike: arrays as they are in `dtype`, or no more than their shapes.

    Digests of one number, times the `weight` of each rank, add up to 0 over the ranks if they are equal.
    """

    def __init__(self, comm: Any, title: str, places: Sequence[int], dtype: np.dtype | None) -> None:
        group = tuple(comm.ranks[place] for place in places)
        self.ring, self.dtype = comm.recorder.ring(group, FED + title, KEPT), dtype
        mine = places.index(comm.rank)
        self.weight = mixed((title, places[mine - 1])) - mixed((title, places[mine]))

    def note(self, value: np.ndarray) -> WeighedFeed:
        """Its entry in the recorder, with a digest in the place of the size."""
        return self.weight, self.ring.add("batch", value, self._digest(value, self.ring.made), None)

    def _digest(self, value: np.ndarray, number: int) -> int:
        if self.dtype is None:
            return hash(value.shape)
        apart = value.size // SAMPLE | 1  # odd, or all samples might lie in one column
        sample = value.flat[number % apart :: apart]
        if sample.dtype != self.dtype:
            with np.errstate(all="ignore"):
                sample = sample.astype(self.dtype)
        return hash((zlib.crc32(sample.tobytes()), *value.shape))


def drifted(entries: Iterable[tuple[int, Entry]]) -> FeedError:
    """The error for feeds that differ, from what ranks have noted of them."""
    told: dict[tuple[int, str, Ranks], dict[int, Entry]] = defaultdict(dict)
    for rank, entry in entries:
        if entry.series.startswith(FED):
            told[entry.number, entry.series, entry.group][rank] = entry
    rows = sorted(told.items())
    found = [_shown(*key, of) for key, of in rows if len({e.size for e in of.values()}) > 1]
    found += [f"batch {n} of {series.removeprefix(FED)}, by {named([*of])} alone" for (n, series, _), of in rows[-1:]]
    return FeedError(f"the ranks are fed differently: {next(iter(found), 'they do not remember which')}", fix=FIX)


def _shown(number: int, series: str, group: Ranks, told: Mapping[int, Entry]) -> str:
    one = min(told)
    other = next(rank for rank in sorted(told) if told[rank].size != told[one].size)
    words = (f"rank {rank} has {told[rank].type} of hash {told[rank].size & 0xFFFFFFFF:08x}" for rank in (one, other))
    title = series.removeprefix(FED)
    return f"batch {number} of {title}, for {named(group)}\n  " + ",\n  ".join(words)
