"""What would help where no plan fits into memory: a larger budget, fewer rows in a step, more ranks, each with numbers.

Nothing is guessed: the smallest plan is simulated with each of them, and recomputed as far as that goes (`fit.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ...core.errors import ArgumentError, BudgetError
from ...dist.cut.builders import Parallel
from ...dist.cut.strategy import Strategy
from ..memory.fit import TooLarge
from ..plan import Within
from ..simulation.trials import parts_of
from ..why import Rated

MOST_TIMES = 8  # as many ranks


def fitting(
    rated: Sequence[Rated],
    budget: float,
    remedy: Callable[[Rated], str] = lambda least: "raise the budget, use more ranks, or feed smaller batches",
) -> list[Rated]:
    """The plans that fit. BudgetError if none does, with a `remedy`; ArgumentError if none is possible at all."""
    possible = [r for r in rated if r.valid]
    if not possible:
        raise ArgumentError(
            f"no candidate suits: {'; '.join(f'{r.name}: {r.problem}' for r in rated) or 'the hints allow none'}",
            fix="give fewer hints, or another number of ranks",
        )
    found = [r for r in possible if r.peak <= budget]
    if not found:
        least = min(possible, key=lambda r: r.peak)
        raise BudgetError(
            f"no plan fits: the smallest, {least.name}, needs {least.peak:,} bytes on a rank, "
            f"{least.peak - budget:,.0f} more than the budget of {budget:,.0f}",
            fix=remedy(least),
        )
    return found


def remedies(search: Any, least: Rated) -> str:
    """The fix of a BudgetError, for a search (`PlanSearch`) whose smallest plan is `least`."""
    strategy, budget = least.builder.build(search.outputs, search.world), search.auto.budget
    found = [_larger_budget(search, least, strategy)]
    if rows := _fewer_rows(search, least, strategy):
        needs = search.peak(least.builder, rows=rows)
        found.append(f"feed at most {rows:,} rows a step instead of {search.batch:,} ({needs:,} bytes by {least.name})")
    for ranks in (search.world << k for k in range(1, MOST_TIMES.bit_length())):
        needs = min(search.peak(builder, world=ranks) for builder in (least.builder, _sharded(search)))
        if needs <= budget:
            found.append(f"use {ranks:,} ranks instead of {search.world:,} ({needs:,} bytes on each)")
            break
    return "; or ".join(found)


def _larger_budget(search: Any, least: Rated, strategy: Strategy) -> str:
    """The least budget for which there is a plan, by computing values again if that takes fewer bytes.

    A step of many micro-batches keeps little of each, and is long to search.
    """
    needs = 1 if strategy.microbatches == 1 else least.peak
    while needs < least.peak:
        try:
            search.simulated(Within(least.builder, needs))
            return f"raise the budget to {needs:,} bytes, for {least.name}, recomputing"
        except TooLarge as error:  # of the first rank for which it is too little
            needs = error.least
    return f"raise the budget to {least.peak:,} bytes"


def _fewer_rows(search: Any, least: Rated, strategy: Strategy) -> int:
    """The most rows in a step that fit, which the ranks and their micro-batches divide; 0 if none do."""
    unit = parts_of(strategy) * strategy.microbatches
    fits, large = 0, math.ceil((search.batch or 0) / unit)
    while large - fits > 1:
        middle = (fits + large) // 2
        if search.peak(least.builder, rows=unit * middle) <= search.auto.budget:
            fits = middle
        else:
            large = middle
    return unit * fits


def _sharded(search: Any) -> Parallel:
    """Data parallelism whose variables are sharded as far as the hints allow."""
    hints = search.hints
    return Parallel(tensor=hints.tensor or 1, zero=3 if hints.zero is None else hints.zero, split=hints.split)
