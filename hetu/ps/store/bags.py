"""Bags of rows that a server sums up, so that one row travels for a bag: what a message of them says, and the sums.

Entries come sorted by their ids, each with the number of its bag, and with a weight if these are not all 1. A bag whose
rows lie on several servers is summed by each of them, and the parts by the worker.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...core.errors import ValueRangeError
from ...ops.index import scatter_rows
from .messages import Message, given

BLOCK = 1 << 22  # elements that are looked up at once


def check_bags(message: Message) -> int:
    """How many columns weights have; ValueRangeError for bags that a message does not have."""
    bags, count = given(message.counts), message.facts["bags"]
    if len(bags) and not 0 <= bags.min() <= bags.max() < count:
        raise ValueRangeError(f"bags {bags.min()}..{bags.max()} of {count}", fix="number them from 0")
    return 1


def summed(rows: Callable[[np.ndarray], np.ndarray], cols: int, message: Message) -> np.ndarray:
    """The sums of the rows of a message's entries, (bags, cols), of which few are looked up at once."""
    ids, bags, each = given(message.ids), given(message.counts), max(1, BLOCK // max(1, cols))
    total = None
    for start in range(0, max(1, len(ids)), each):
        some = slice(start, start + each)
        found = rows(ids[some])
        with np.errstate(all="ignore"):  # what is infinite stays so
            weighted = found if message.values is None else found * message.values[some]
        sums = sums_of(bags[some], weighted, message.facts["bags"])
        total = sums if total is None else total + sums
    return given(total)


def sums_of(places: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """The sums of the rows of each of `count` places, added in their order."""
    sums = np.empty((count, *rows.shape[1:]), rows.dtype)
    for call in scatter_rows.bound(np, sums, [sums, places, rows], {"window": None}):
        call()
    return sums
