"""What ranks must have alike beside their calls: what they are fed, and the code by which they compute.

The first feeds of each shape are compared whole (`cut/agreement.py`), which costs a look at every number. Of all others
a sample is hashed that begins elsewhere in each step, so loaders that have drifted apart differ in the next one, and a
difference in few numbers that stays is found when a sample meets it. So are other steps on other ranks, and one too
many; all in the messages that compare calls (`agreement.py`). Compiled code and NumPy differ in last digits, so ranks
that keep variables alike all compile the same, or none does. Left out: a difference that no sample meets.
"""

from __future__ import annotations

import functools
import warnings
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.errors import FeedError
from ...core.kernels import kernels
from .line import mixed
from .recorder import Entry, Ranks, Raw, named

SAMPLE = 16  # numbers, or up to twice as many
KEPT = 64  # batches of each feed: as many as comparisons that are under way may be of
FED = "fed: "  # begins the series of feeds in the recorder
WeighedFeed = tuple[int, Raw]  # its digest, so weighed that those of all ranks add up to 0, and its entry
FIX = (
    "feed all ranks the whole batch, or each its own part, of one size: local_feeds=True and DataLoader(shard=True); "
    "shuffle by one seed"
)


class FedAlike:
    """What some places of a group must be fed alike: arrays as they are in `dtype`, or no more than their shapes.

    Digests of one batch, times the `weight` of each rank, add up to 0 over the ranks if they are equal. They are
    multiplied by a number of the batch besides, or batches could change places.
    """

    def __init__(self, comm: Any, title: str, places: Sequence[int], dtype: np.dtype | None) -> None:
        group = tuple(comm.ranks[place] for place in places)
        self.ring, self.dtype = comm.recorder.ring(group, FED + title, KEPT), dtype
        mine = places.index(comm.rank)
        self.weight = mixed((title, places[mine - 1])) - mixed((title, places[mine]))

    def note(self, value: np.ndarray, step: str) -> WeighedFeed:
        """What is fed to a sub-graph, `step`; its entry in the recorder has the digest in the place of the size."""
        number, digest = self.ring.made, of_shape(step, value.shape)
        if self.dtype is not None:
            digest = sampled(value, self.dtype, number, digest)
        return self.weight * (2 * number + 1) * digest, self.ring.add(step, value, digest, None)


def sampled(value: np.ndarray, dtype: np.dtype, number: int, digest: int) -> int:
    """The digest of a batch, from its number on, with what came before."""
    apart = value.size // SAMPLE | 1  # odd, or all samples might lie in one column
    sample = value.flat[number % apart :: apart]
    if sample.dtype != dtype:
        with np.errstate(all="ignore"):
            sample = sample.astype(dtype)
    return zlib.crc32(sample.tobytes(), digest)


@functools.lru_cache(256)
def of_shape(step: str, shape: tuple[int, ...]) -> int:
    """The digest of no more than a shape, and of which sub-graph it is fed to."""
    return zlib.crc32(repr((step, shape)).encode())


def drifted(entries: Iterable[tuple[int, Entry]]) -> FeedError:
    """The error for feeds that differ, from what ranks have noted of them."""
    told: dict[tuple[int, str, Ranks], dict[int, Entry]] = defaultdict(dict)
    for rank, entry in entries:
        if entry.series.startswith(FED):
            told[entry.number, entry.series, entry.group][rank] = entry
    rows = sorted(told.items(), key=lambda row: row[0][0])  # of one batch in the order of the feeds
    found = [_shown(*key, of) for key, of in rows if len({e.size for e in of.values()}) > 1]
    found += [f"batch {n} of {series.removeprefix(FED)}, by {named([*of])} alone" for (n, series, _), of in rows[-1:]]
    return FeedError(f"the ranks are fed differently: {next(iter(found), 'they do not remember which')}", fix=FIX)


def _shown(number: int, series: str, group: Ranks, told: Mapping[int, Entry]) -> str:
    one = min(told)
    other = next(rank for rank in sorted(told) if told[rank].size != told[one].size)
    shown = ((rank, told[rank]) for rank in (one, other))
    words = (f"rank {rank} has {e.type} of hash {e.size:08x} in {e.what!r}" for rank, e in shown)
    title = series.removeprefix(FED)
    return f"batch {number} of {title}, for {named(group)}\n  " + ",\n  ".join(words)


def compile_alike(comm: Any, failed: bytes) -> bool:
    """See `Comm.compile_alike`."""
    library, before = kernels("cpu").compiled, comm.compiles
    if comm.world_size == 1 or before is False:
        return True
    mine = np.frombuffer(failed or (bytes(8) if library is None else library.digest()), np.uint8).copy()
    everyone = np.empty((comm.world_size, mine.size), np.uint8)
    comm.all_gather(mine, everyone)
    alike = bool((everyone == everyone[0]).all())
    comm.compiles = alike and bool(mine.any())
    if alike:
        return True
    if library is not None:
        library.switch_off()
    lacking = [rank for rank, row in enumerate(everyone) if not row.any()]
    if lacking:
        reason, fix = f"ranks {lacking} compile nothing", "set HETU_CC and HETU_KERNELS alike; or see hetu doctor"
    elif before:
        reason, fix = "one could not compile what others can", "see its warning, and hetu doctor on its host"
    else:
        reason, fix = "the ranks run different versions of hetu", "install the same on all"
    if comm.rank == 0:
        warnings.warn(f"all ranks compute by NumPy: {reason} (fix: {fix})", RuntimeWarning, stacklevel=3)
    return False
