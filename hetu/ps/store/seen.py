"""What a server tells of itself, as plain data: clocks, traffic, how long requests take, and its largest tables.

Nothing here costs more than its counting: which rows are hot follows from their versions, which count updates anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .rules import name_of
from .server_table import ServerTable

SHOWN, HOTTEST = 30, 3  # tables of one server, and rows of a table
SEARCHED = 1 << 22  # rows of a table in which the hottest are looked for, within some milliseconds
STEPS, LEAST = 4, 1e-6  # of a latency's scale: steps per octave, and the seconds at which it begins


class Latencies:
    """How long things took: numbers of them by their size, in steps of a fifth, rounded up, whatever their number.

    >>> seen = Latencies()
    >>> for seconds in 0.001, 0.001, 0.5:
    ...     seen.add(seconds)
    >>> f"{quantile(seen.counts, 0.5):.4f} {quantile(seen.counts, 0.99):.2f}"
    '0.0010 0.52'
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def add(self, seconds: float) -> None:
        step = str(max(0, math.ceil(STEPS * math.log2(max(seconds, LEAST) / LEAST))))  # a key of JSON
        self.counts[step] = self.counts.get(step, 0) + 1


def quantile(counts: Mapping[str, int], part: float) -> float:
    """The seconds within which this part of what was counted lasted; 0 of nothing."""
    left = part * sum(counts.values())
    for step in sorted(map(int, counts)):
        left -= counts[str(step)]
        if left <= 0:
            return float(LEAST * 2 ** (step / STEPS))
    return 0.0


def status_of(store: Any) -> dict[str, Any]:
    """The state of a `ParameterStore`: counts since its start, seconds, bytes."""
    tables = sorted(store.tables.values(), key=lambda table: -table.spec.footprint)
    return {
        "consistency": str(store.consistency),
        "workers": len(store.members),
        "clocks": {str(worker): clock for worker, clock in store.clocks.of.items()},
        "silent": {str(worker): store.members[worker].silence(store.now) for worker in store.clocks.of},
        "left": [w for w, m in enumerate(store.members) if w not in store.clocks.of and not m.lost],
        "lead": store.clocks.lead,
        "widest": store.clocks.widest,
        "parked": len(store.parked),
        "partners": store.partial.waiting(store.now),
        "bytes": store.bytes_used,
        "requests": {kind.name.lower(): n for kind, n in store.counts.items() if n},
        "received": store.traffic[0],
        "sent": store.traffic[1],
        "handled": store.handled.counts,
        "seconds": store.now - store.started,
        "tables": len(tables),
        "largest": [_table(table) for table in tables[:SHOWN]],
        "restored": store.restored,
    }


def _table(table: ServerTable) -> dict[str, Any]:
    spec = table.spec
    return {
        "name": spec.name,
        "start": spec.start,
        "rows": spec.rows,
        "columns": spec.cols,
        "dtype": spec.dtype,
        "at_rest": spec.at_rest,
        "rule": name_of(spec.rule),
        "bytes": spec.footprint,
        "asked": table.asked,
        "fetched": table.fetched,
        "joined": spec.joined,
        "placed": bool(spec.placed),
        "hot": hottest(table.versions) if 1 < spec.rows <= SEARCHED and not spec.growth else [],
        "grown": table.grown,
    }


def hottest(versions: np.ndarray) -> list[tuple[int, int]]:
    """The rows that were updated most, and how much more often than the one that was least.

    >>> hottest(np.array([7, 9, 7, 8]))
    [(1, 2), (3, 1)]
    """
    left, least, found = versions.copy(), versions.min(), list[tuple[int, int]]()
    while len(found) < HOTTEST and left[row := int(left.argmax())] > least:
        found.append((row, int(left[row] - least)))
        left[row] = least
    return found
