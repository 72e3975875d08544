"""L-BFGS: the minimum of a smooth function of many numbers, from its values and gradients.

J. Nocedal, S. Wright, "Numerical Optimization", 2nd edition, 2006: section 7.2, with steps that meet the strong Wolfe
conditions (algorithms 3.5 and 3.6). Left out: bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..ranges import AtLeast0, Count

KEPT = 14  # last changes of place and gradient, of which the curvature is told
LEAST_FALL, LEAST_BEND = 1e-4, 0.9  # c1 and c2 of the Wolfe conditions
TRIES = 25  # lengths of one step
NOTHING = 64 * np.finfo(np.float64).eps  # what a value may fall by in vain, as a share of it
EPSILON = 4 * np.finfo(np.float64).eps  # by which a value is rounded

Valued = Callable[[np.ndarray], tuple[float, np.ndarray]]
Newton = Callable[[np.ndarray, np.ndarray], np.ndarray]


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


def minimize(
    function: Valued, start: np.ndarray, max_iter: Count = 100, tol: AtLeast0 = 1e-5, newton: Newton | None = None
) -> Minimum:
    """The minimum of `function`, which gives its value and its gradient at x, both float64; `start` is (numbers,).

    `newton`, if it is given, tells the inverse Hessian at x times the gradient there, as Newton's method has it.
    Ends where no part of the gradient exceeds `tol`, and `newton` foretells that the value falls by no more than this
    share of it; where the value falls no more; or after `max_iter` steps.

    >>> def bowl(x):
    ...     return float(((x - [1, 2]) ** 2 @ [1, 10])), 2 * (x - [1, 2]) * [1, 10]
    >>> found = minimize(bowl, np.zeros(2), tol=1e-9)
    >>> found.x.round(6).tolist()
    [1.0, 2.0]
    """
    x = np.asarray(start, np.float64)
    value, gradient = function(x)
    known = _Curvature(x.size)
    for done in range(max_iter):
        way = -(newton(x, gradient) if newton else known.newton(gradient))
        here = _Point(0.0, x, value, float(way @ gradient), gradient)
        near = not newton or -here.slope <= tol * max(abs(value), NOTHING)  # gradients alone depend on scales
        if near and np.abs(gradient).max(initial=0.0) <= tol:
            return Minimum(x, value, done)
        length = 1.0 if newton or known.count else min(1.0, 1 / float(np.linalg.norm(gradient)))
        found = _search(function, here, way, length)
        if found.step == 0:
            return Minimum(x, value, done)
        moved, bent = found.x - x, found.gradient - gradient
        if not newton and moved @ bent > EPSILON * (bent @ bent):
            known.add(moved, bent)
        fell = value - found.value
        x, value, gradient = found.x, found.value, found.gradient
        if fell <= NOTHING * max(abs(value), abs(value + fell)):
            return Minimum(x, value, done + 1)
    return Minimum(x, value, max_iter)


class _Curvature:
    """The last changes of place and of gradient, and what they tell of the Hessian, in a few products of matrices.

    R. Byrd, J. Nocedal, R. Schnabel, "Representations of quasi-Newton matrices", Mathematical Programming 1994. Rows
    are written in turn; `products` are those of a change of place with changes of the gradient that are not older.
    """

    def __init__(self, size: int) -> None:
        self.moved, self.bent = np.zeros((2, KEPT, size))
        self.products, self.squares = np.zeros((2, KEPT, KEPT))
        self.count = 0

    def add(self, moved: np.ndarray, bent: np.ndarray) -> None:
        k = self.count % KEPT
        self.moved[k], self.bent[k], self.products[k] = moved, bent, 0
        self.products[:, k] = self.moved @ bent
        self.squares[k] = self.squares[:, k] = self.bent @ bent
        self.count += 1

    def newton(self, gradient: np.ndarray) -> np.ndarray:
        """The gradient times the inverse Hessian (theorem 2.2)."""
        if not self.count:
            return gradient
        last, many = (self.count - 1) % KEPT, slice(min(self.count, KEPT))
        moved, bent, products = self.moved[many], self.bent[many], self.products[many, many]
        scale, inverse = products[last, last] / self.squares[last, last], np.linalg.inv(products)
        first = inverse @ (moved @ gradient)
        second = products.diagonal() * first + scale * (self.squares[many, many] @ first - bent @ gradient)
        return scale * (gradient - first @ bent) + (second @ inverse) @ moved


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
