"""The fastest strategy of every layer within a memory budget: dynamic programming over a Pareto front.

The recurrence is Galvatron's (X. Miao et al., "Galvatron: Efficient Transformer Training over Multiple GPUs Using
Automatic Parallelism", VLDB 2023, section 4.2) for layers between which nothing changes its layout,
f[l, v] = min over s of f[l - 1, v - bytes(l, s)] + seconds(l, s). Instead of one state for each quantum of memory v,
only those are kept that no other beats in both time and bytes, so no size is rounded and no plan that fits is missed.
Where layouts change see `elimination.py`, which knows no budget.
"""

from __future__ import annotations

import numpy as np

from ...core.errors import BudgetError

LEVELS = 2000  # points of a front; more than 6 layers of 3 strategies can have, so few layers are solved exactly


def fastest_within(seconds: np.ndarray, nbytes: np.ndarray, budget: float, levels: int = LEVELS) -> tuple[int, ...]:
    """One strategy for each layer, least seconds in all, of those that keep at most `budget` bytes together.

    seconds, nbytes: (layers, strategies). levels: how many points a front may have; of more, the fastest in each of
    `levels` equal steps of bytes stay. BudgetError if nothing fits, with how much is missing.

    >>> fast_or_small = np.array([[1.0, 2.0]] * 3), np.array([[8.0, 4.0]] * 3)
    >>> fastest_within(*fast_or_small, budget=20.0)
    (1, 0, 0)
    """
    least = nbytes.min(axis=1)
    if (need := float(least.sum())) > budget:
        raise BudgetError(
            f"the layers keep at least {need:,.0f} bytes, {need - budget:,.0f} more than the budget of {budget:,.0f}; "
            f"the largest, layer {int(least.argmax())}, keeps {float(least.max()):,.0f}",
            fix="raise the budget, use more ranks, or a smaller batch",
        )
    more, times, fronts = np.zeros(1), np.zeros(1), list[np.ndarray]()  # bytes over the least of the layers so far
    for took, extra in zip(seconds, nbytes - least[:, None]):
        sizes, ends = (more[:, None] + extra).ravel(), (times[:, None] + took).ravel()
        order = np.lexsort((ends, sizes))
        order = order[sizes[order] <= (budget - need) * (1 + 1e-12)]
        best = np.minimum.accumulate(ends[order])
        order = order[np.append(True, best[1:] < best[:-1])]
        if order.size > levels:
            steps = np.floor((sizes[order] - sizes[order[0]]) / np.ptp(sizes[order]) * (levels - 1))
            order = order[np.append(steps[1:] != steps[:-1], True)]  # the fastest of each step
        more, times = sizes[order], ends[order]
        fronts.append(order)
    picks, point = list[int](), -1  # the most bytes take the fewest seconds
    for order in reversed(fronts):
        point, pick = divmod(int(order[point]), seconds.shape[1])
        picks.append(pick)
    return tuple(reversed(picks))
