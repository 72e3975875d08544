"""Exact searches: the best configuration of every operator of a graph, and the best of every layer within a budget.

Costs are tables: one for each operator, one for each edge between two. OptCNN (Z. Jia et al., "Exploring Hidden
Dimensions in Parallelizing Convolutional Neural Networks", ICML 2018, section 5.2) replaces an operator between two
others by an edge that takes the minimum over its configurations, and adds parallel edges up. Both are cases of one
step, which takes all tables that an operator is in, adds them and minimizes over it. So any graph can be solved, at the
price of a table over the neighbors of the operator: C^3 for chains, Inception blocks and residual connections. Memory
does not count there.

It does for layers between which nothing changes its layout. The recurrence is Galvatron's (X. Miao et al., "Galvatron:
Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism", VLDB 2023, section 4.2),
f[l, v] = min over s of f[l - 1, v - bytes(l, s)] + seconds(l, s). Instead of one state for each quantum of memory v,
only those are kept that no other beats in both time and bytes, so no size is rounded and no plan that fits is missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...core.errors import ArgumentError, BudgetError

MOST_ENTRIES = 1 << 24  # of a table: 128 MB
Scope = tuple[int, ...]  # the operators that a table has axes for, increasing
Edge = tuple[int, int, np.ndarray]


def eliminate(nodes: Sequence[np.ndarray], edges: Sequence[Edge]) -> tuple[float, tuple[int, ...]]:
    """The least cost of all configurations together, and those that have it.

    nodes: for each operator the seconds of each of its configurations. edges: (u, v, seconds) with a table of
    (configurations of u, configurations of v); there may be several between two operators.

    >>> agree = np.array([[0.0, 9.0], [9.0, 0.0]])
    >>> eliminate([np.array([1.0, 2.0]), np.array([5.0, 1.0])], [(0, 1, agree)])
    (3.0, (1, 1))
    """
    sizes = [len(cost) for cost in nodes]
    tables = _Tables(len(nodes))
    for v, cost in enumerate(nodes):
        tables.add((v,), np.asarray(cost, float))
    for u, v, cost in edges:
        if u == v or cost.shape != (sizes[u], sizes[v]):
            raise ArgumentError(f"edge {u} -> {v} has costs {cost.shape}", fix="join two operators, one row for each")
        tables.add((min(u, v), max(u, v)), cost if u < v else cost.T)
    decided: list[tuple[int, Scope, np.ndarray]] = []  # operator, its neighbors, its best configuration given theirs
    left = set(range(len(nodes)))
    while left:
        v = min(left, key=lambda v: (len(tables.around[v]), v))
        around = tuple(sorted(tables.around[v]))
        scope = tuple(sorted({v, *around}))
        total, axis = tables.take(v, scope, [sizes[i] for i in scope]), scope.index(v)
        decided.append((v, around, total.argmin(axis=axis)))
        tables.add(around, total.min(axis=axis))
        left.remove(v)
    picks: dict[int, int] = {}
    for v, scope, best in reversed(decided):
        picks[v] = int(best[tuple(picks[i] for i in scope)])
    return float(tables.of[()]), tuple(picks[v] for v in range(len(nodes)))


class _Tables:
    """Costs by the operators that they depend on; `around` has the neighbors of each operator that is left."""

    def __init__(self, operators: int) -> None:
        self.of: dict[Scope, np.ndarray] = {}
        self.having: list[set[Scope]] = [set() for _ in range(operators)]
        self.around: list[set[int]] = [set() for _ in range(operators)]

    def add(self, scope: Scope, cost: np.ndarray) -> None:
        self.of[scope] = self.of[scope] + cost if scope in self.of else cost
        for v in scope:
            self.having[v].add(scope)
            self.around[v].update(i for i in scope if i != v)

    def take(self, v: int, scope: Scope, sizes: Sequence[int]) -> np.ndarray:
        """The sum, over all of `scope`, of the tables that have `v`, which leave."""
        if math.prod(sizes) > MOST_ENTRIES:
            raise ArgumentError(
                f"operator {v} depends on {len(scope) - 1} others at once: a table of {math.prod(sizes):,} entries",
                fix="give fewer configurations",
            )
        total = np.zeros(sizes)
        for own in [*self.having[v]]:
            total += self.of.pop(own).reshape([size if i in own else 1 for i, size in zip(scope, sizes)])
            for i in own:
                self.having[i].discard(own)
        for i in self.around[v]:
            self.around[i].discard(v)
        return total


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
