"""Sums of what is computed entry by entry as one kernel each, and the updates of rows by such sums as another.

See `hetu/fuse/entries.py`. An update sums the gradients of a row where its rule changes it, so none is in memory.

Gain: rows of entries are not written and read again; how much time that saves was not measured, as no GPU was there.
Off by leaving `fuse_entries` out of `passes=` or `HETU_PASSES`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.graph import Node
from ...fuse.entries import Joining
from ...fuse.unit import Limits
from ..entries import entered
from ..source import CTYPES

LIMITS = Limits(frozenset(CTYPES))


def fuse_entries(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`summed_entries` and `update_entries` in the place of sums and updates by rows that are computed by entry."""
    return Joining(outputs, LIMITS, entered).joined()
