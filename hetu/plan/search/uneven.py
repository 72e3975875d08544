"""Plans that are not alike on all ranks: rows by the speed of each, and stages of unequal size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ...dist.cut.heterogeneous import Heterogeneous
from ...dist.cut.pipelines import Pipelines
from ..why import Candidate

ALIKE = 1.05  # a rank that takes no longer than so many times the fastest gets as many rows


def rows_by_speed(batch: int, speeds: Sequence[float]) -> list[int]:
    """The rows of a batch that each rank computes in about the same time; `speeds` are factors on its time.

    >>> rows_by_speed(12, [1.0, 1.0, 2.0, 1.0])
    [4, 4, 1, 3]
    """
    wanted = batch / np.array(speeds) / (1 / np.array(speeds)).sum()
    rows = np.floor(wanted).astype(int)
    for _ in range(batch - int(rows.sum())):  # one more to whom it makes the latest end least later
        rows[np.argmin((rows + 1) * np.array(speeds))] += 1
    return [int(n) for n in rows]


def by_speed(batch: int | None, speeds: Sequence[float]) -> Iterator[Candidate]:
    """Data parallelism in which slow ranks get fewer rows."""
    if batch is None or max(speeds) <= ALIKE * min(speeds) or min(rows := rows_by_speed(batch, speeds)) == 0:
        return
    shares = [n // math.gcd(*rows) for n in rows]
    builder = Heterogeneous([(rank,) for rank in range(len(speeds))], shares)
    yield Candidate(f"dp{len(speeds)}, rows by speed", builder, f"rows of each rank: {', '.join(map(str, rows))}")


def uneven_stages(world_size: int, split: Mapping[str, int], microbatches: int) -> Iterator[Candidate]:
    """Two stages of unequal numbers of ranks, each of which divides its weights; the smaller has a third at least."""
    for first in range(-(-world_size // 3), world_size - world_size // 3):
        if 2 * first != world_size:
            builder = Pipelines([[range(first), range(first, world_size)]], None, microbatches, split=split)
            yield Candidate(f"pp2 of {first} and {world_size - first} ranks, {microbatches} micro-batches", builder)
