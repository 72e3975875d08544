"""Tables of tests that are products of several choices: every pair of choices in each run, all products nightly.

Of those that are `sampled` besides, each run has each choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def nightly(cases: Iterable[Iterable[Any]]) -> list[Any]:
    """Parameters of these cases, all of them nightly."""
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in cases]


def pairwise(*choices: Iterable[Any]) -> list[Any]:
    """Parameters of all products, of which those are nightly that no pair of two choices needs.

    >>> [case.values for case in pairwise("ab", [0, 1], [2, 3]) if not case.marks]
    [('a', 0, 2), ('a', 1, 3), ('b', 0, 3), ('b', 1, 2)]
    """
    cases = [*product(*map(tuple, choices))]
    pairs = [{*combinations(enumerate(case), 2)} for case in cases]
    lacking, needed = set().union(*pairs), set()
    while lacking:
        best = max(range(len(cases)), key=lambda k: len(pairs[k] & lacking))
        needed.add(best)
        lacking -= pairs[best]
    return [pytest.param(*case, marks=() if k in needed else pytest.mark.nightly) for k, case in enumerate(cases)]


def in_turn(every: int, *choices: Iterable[Any]) -> list[Any]:
    """Parameters of all products, of which those are nightly whose places do not add up to a multiple of `every`.

    >>> [case.values for case in in_turn(2, "abc", [0, 1, 2]) if not case.marks]
    [('a', 0), ('a', 2), ('b', 1), ('c', 0), ('c', 2)]
    """
    cases = product(*map(enumerate, choices))
    sums = [(sum(place for place, _ in case), [choice for _, choice in case]) for case in cases]
    return [pytest.param(*case, marks=pytest.mark.nightly if places % every else ()) for places, case in sums]
