"""The best strategy of every layer of a chain within a memory budget: dynamic programming over Pareto fronts.

The recurrence is Galvatron's (X. Miao et al., "Galvatron: Efficient Transformer Training over Multiple GPUs Using
Automatic Parallelism", VLDB 2023, section 4.2), f[l, v, s] = min over s' of f[l - 1, v - bytes(l, s), s'] +
transition(l, s', s) + seconds(l, s). Instead of one state for each quantum of memory v, only those are kept that no
other beats in both time and bytes, so no size is rounded and no plan that fits is missed. For graphs that are no chain
see `elimination.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import ArgumentError, BudgetError

LEVELS = 2000  # points of a front; more than 5 layers of 6 strategies can have, so small chains are solved exactly


@dataclass(frozen=True)
class Chosen:
    """The strategy picked for each layer, the seconds they take together and the bytes they keep."""

    picks: tuple[int, ...]
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class _Front:
    """Ways to compute the layers so far that end in one strategy: bytes rise, seconds fall; `before` = (s', point)."""

    nbytes: np.ndarray
    seconds: np.ndarray
    before: np.ndarray


def cheapest_chain(
    seconds: np.ndarray, nbytes: np.ndarray, transition: np.ndarray, budget: float = np.inf, levels: int = LEVELS
) -> Chosen:
    """One strategy for each layer, least seconds in all, of those that keep at most `budget` bytes together.

    seconds, nbytes: (layers, strategies); infinite seconds forbid a strategy.
    transition: (layers - 1, strategies, strategies), seconds from the layout after s' to the one that s wants.
    levels: how many points a front may have; of more, the fastest in each of `levels` equal steps of bytes stay.
    BudgetError if nothing fits, with how much is missing.

    >>> fast_or_small = np.array([[1.0, 2.0]] * 3), np.array([[8.0, 4.0]] * 3)
    >>> cheapest_chain(*fast_or_small, np.zeros((2, 2, 2)), budget=20.0)
    Chosen(picks=(1, 0, 0), seconds=4.0, nbytes=20.0)
    """
    layers, strategies = _checked(seconds, nbytes, transition)
    allowed = np.where(np.isfinite(seconds), nbytes, np.inf)
    _check_fits(allowed, budget)
    rest = np.append(np.cumsum(allowed.min(axis=1)[::-1])[::-1], 0.0)  # bytes that layers l, l + 1, ... need at least
    fronts: list[list[_Front]] = []
    for layer in range(layers):
        room = budget - rest[layer + 1]
        before = fronts[-1] if fronts else None
        hop = transition[layer - 1] if layer else np.zeros((strategies, strategies))
        fronts.append(
            [_front(before, hop[:, s], seconds[layer, s], nbytes[layer, s], room, levels) for s in range(strategies)]
        )
    ends = [front.seconds[-1] if front.seconds.size else np.inf for front in fronts[-1]]
    pick = int(np.argmin(ends))
    if not np.isfinite(ends[pick]):
        raise ArgumentError("every way through the layers takes an infinite transition", fix="allow one of them")
    point = fronts[-1][pick].seconds.size - 1
    last = fronts[-1][pick]
    result, picks = (float(last.seconds[point]), float(last.nbytes[point])), [pick]
    for layer in range(layers - 1, 0, -1):
        pick, point = fronts[layer][pick].before[point].tolist()
        picks.append(pick)
    return Chosen(tuple(reversed(picks)), *result)


def _checked(seconds: np.ndarray, nbytes: np.ndarray, transition: np.ndarray) -> tuple[int, int]:
    layers, strategies = seconds.shape
    wanted = (max(0, layers - 1), strategies, strategies)
    if not layers or not strategies or nbytes.shape != seconds.shape or transition.shape != wanted:
        raise ArgumentError(
            f"seconds {seconds.shape}, nbytes {nbytes.shape}, transition {transition.shape}",
            fix="give (layers, strategies) twice and (layers - 1, strategies, strategies)",
        )
    return layers, strategies


def _check_fits(allowed: np.ndarray, budget: float) -> None:
    if np.isinf(allowed).all(axis=1).any():
        layer = int(np.isinf(allowed).all(axis=1).argmax())
        raise ArgumentError(f"layer {layer} has no strategy", fix="allow one: give it finite seconds")
    least = allowed.min(axis=1)
    if (need := float(least.sum())) > budget:
        raise BudgetError(
            f"the layers keep at least {need:,.0f} bytes, {need - budget:,.0f} more than the budget of {budget:,.0f}; "
            f"the largest, layer {int(least.argmax())}, keeps {float(least.max()):,.0f}",
            fix="raise the budget, use more ranks, or a smaller batch",
        )


def _front(
    before: Sequence[_Front] | None, hop: np.ndarray, seconds: float, nbytes: float, room: float, levels: int
) -> _Front:
    """All ways to end a layer in one strategy that leave room for the rest, without those that another beats."""
    if before is None:
        sizes, times, origins = np.array([nbytes]), np.array([seconds]), np.zeros((1, 2), int)
    else:
        sizes = np.concatenate([f.nbytes for f in before]) + nbytes
        times = np.concatenate([f.seconds + h for f, h in zip(before, hop)]) + seconds
        origins = np.concatenate(
            [np.stack([np.full(f.nbytes.size, s), np.arange(f.nbytes.size)], axis=1) for s, f in enumerate(before)]
        )
    fits = np.flatnonzero((sizes <= room * (1 + 1e-12)) & np.isfinite(times))
    order = fits[np.lexsort((times[fits], sizes[fits]))]
    best = np.minimum.accumulate(times[order]) if order.size else times[order]
    order = order[np.append(True, best[1:] < best[:-1])] if order.size else order
    if order.size > levels:
        steps = np.floor((sizes[order] - sizes[order[0]]) / (sizes[order[-1]] - sizes[order[0]]) * (levels - 1))
        order = order[np.append(steps[1:] != steps[:-1], True)]  # the fastest of each step; all leave room for the rest
    return _Front(sizes[order], times[order], origins[order])
