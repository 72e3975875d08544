"""The best configuration of every operator of a graph, by eliminating one operator after another.

Costs are tables: one for each operator, one for each edge between two. OptCNN (Z. Jia et al., "Exploring Hidden
Dimensions in Parallelizing Convolutional Neural Networks", ICML 2018, section 5.2) replaces an operator between two
others by an edge that takes the minimum over its configurations, and adds parallel edges up. Both are cases of one
step, which takes all tables that an operator is in, adds them and minimizes over it. So any graph can be solved, at the
price of a table over the neighbors of the operator: C^3 for chains, Inception blocks and residual connections. Memory
does not count here; it does in `knapsack.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...core.errors import ArgumentError

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
