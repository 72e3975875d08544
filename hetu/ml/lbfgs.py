"""L-BFGS: the minimum of a smooth function of many numbers, from its values and gradients.

J. Nocedal, S. Wright, "Numerical Optimization", 2nd edition, 2006: algorithm 7.5, with steps that meet the strong Wolfe
conditions (algorithms 3.5 and 3.6). Left out: bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..ranges import AtLeast0, Count

KEPT = 10  # last changes of place and gradient, of which the curvature is told
LEAST_FALL, LEAST_BEND = 1e-4, 0.9  # c1 and c2 of the Wolfe conditions
TRIES = 25  # lengths of one step
NOTHING = 64 * np.finfo(np.float64).eps  # what a value may fall by in vain, as a share of it
EPSILON = 4 * np.finfo(np.float64).eps  # by which a value is rounded

Valued = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Minimum(NamedTuple):
    """Where a function is least, what it is there, and after how many steps."""

    x: np.ndarray
    value: float
    iterations: int


class _Point(NamedTuple):
    """A point along a direction: how far it is, and the value, the slope along the way, and the gradient there."""

    step: float
    x: np.ndarray
    value: float
    slope: float
    gradient: np.ndarray


def minimize(function: Valued, start: np.ndarray, max_iter: Count = 100, tol: AtLeast0 = 1e-5) -> Minimum:
    """The minimum of `function`, which gives its value and its gradient at x, both float64; `start` is (numbers,).

    Ends where no part of the gradient exceeds `tol`, where the value falls no more, or after `max_iter` steps.

    >>> def bowl(x):
    ...     return float(((x - [1, 2]) ** 2 @ [1, 10])), 2 * (x - [1, 2]) * [1, 10]
    >>> found = minimize(bowl, np.zeros(2), tol=1e-9)
    >>> found.x.round(6).tolist()
    [1.0, 2.0]
    """
    x = np.asarray(start, np.float64)
    value, gradient = function(x)
    changes: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=KEPT)
    for done in range(max_iter):
        if np.abs(gradient).max(initial=0.0) <= tol:
            return Minimum(x, value, done)
        way = -_newton(gradient, changes)
        here = _Point(0.0, x, value, float(way @ gradient), gradient)
        length = 1.0 if changes else min(1.0, 1 / float(np.linalg.norm(gradient)))
        found = _search(function, here, way, length)
        if found.step == 0:
            return Minimum(x, value, done)
        moved, bent = found.x - x, found.gradient - gradient
        if moved @ bent > EPSILON * (bent @ bent):
            changes.append((moved, bent))
        fell = value - found.value
        x, value, gradient = found.x, found.value, found.gradient
        if fell <= NOTHING * max(abs(value), abs(value + fell)):
            return Minimum(x, value, done + 1)
    return Minimum(x, value, max_iter)


def _newton(gradient: np.ndarray, changes: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The gradient times the inverse Hessian that the changes tell of (algorithm 7.4)."""
    way, shares, room = gradient.copy(), [], np.empty_like(gradient)  # room, as to ask for more each time takes longer
    for moved, bent in reversed(changes):
        shares.append((moved @ way) / (moved @ bent))
        way -= np.multiply(shares[-1], bent, out=room)
    if changes:
        moved, bent = changes[-1]
        way *= (moved @ bent) / (bent @ bent)
    for (moved, bent), share in zip(changes, reversed(shares)):
        way += np.multiply(share - (bent @ way) / (moved @ bent), moved, out=room)
    return way


def _search(function: Valued, start: _Point, way: np.ndarray, step: float) -> _Point:
    """A place along the way that meets the strong Wolfe conditions (algorithm 3.5); `start` if there is none."""

    def at(step: float) -> _Point:
        value, gradient = function(x := start.x + step * way)
        return _Point(step, x, value, float(gradient @ way), gradient)

    last = start
    for _ in range(TRIES):
        now = at(step)
        if not _falls(start, now) or (last is not start and not now.value < last.value):
            return _narrowed(at, start, last, now)
        if abs(now.slope) <= -LEAST_BEND * start.slope:
            return now
        if now.slope >= 0:
            return _narrowed(at, start, now, last)
        last, step = now, 2 * step
    return last


def _narrowed(at: Callable[[float], _Point], start: _Point, low: _Point, high: _Point) -> _Point:
    """As `_search`, between two places, of which `low` has the lower value and falls towards the other (3.6)."""
    for _ in range(TRIES):
        now = at(_between(low, high))
        if not _falls(start, now) or not now.value < low.value + EPSILON * abs(low.value):
            high = now
            continue
        if abs(now.slope) <= -LEAST_BEND * start.slope:
            return now
        if now.slope * (high.step - low.step) >= 0:
            high = low
        low = now
    return low


def _falls(start: _Point, now: _Point) -> bool:
    """Whether the value falls enough on the way, as far as that is not lost in rounding."""
    return bool(now.value <= start.value + LEAST_FALL * now.step * start.slope + EPSILON * abs(start.value))


def _between(low: _Point, high: _Point) -> float:
    """Where the cubic of both values and slopes is least (equation 3.59), but not near to either."""
    width = np.float64(high.step - low.step)  # which may be 0, where slopes have no end
    with np.errstate(all="ignore"):
        bend = low.slope + high.slope - 3 * (high.value - low.value) / width
        root = np.sqrt(np.float64(bend * bend - low.slope * high.slope)) * np.sign(width)
        part = 1 - (high.slope + root - bend) / (high.slope - low.slope + 2 * root)
    return float(low.step + width * (np.clip(part, 0.1, 0.9) if np.isfinite(part) else 0.5))
