"""Names and keywords of other libraries with our word for each; the table is `elsewhere.txt`, read when one is missed.

A name is answered with a sentence or what to call, a keyword with that of ours which the callable takes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from .core.errors import ELSEWHERE

TABLE = Path(__file__).with_suffix(".txt")


@functools.cache
def names() -> dict[str, str]:
    """What hetu has instead of each name, as text."""
    return {left: right for left, right in _rows() if not left.endswith("=")}


@functools.cache
def keywords() -> dict[str, Sequence[str]]:
    """Which keywords of ours may be meant by each, the likeliest first."""
    return {left[:-1]: right.split() for left, right in _rows() if left.endswith("=")}


def remedy(name: str) -> str:
    """What to do about a name of another library; empty if it is none.

    >>> remedy("ReLU")
    'it is ht.relu here'
    """
    return f"it is {found} here" if (found := names().get(name)) else ""


def _rows() -> list[tuple[str, str]]:
    lines = [line.strip() for line in TABLE.read_text("utf-8").splitlines()]
    rows = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    return [(left, right.strip()) for left, right in rows]


ELSEWHERE.append(lambda name: (keywords().get(name, ()), remedy(name)))
