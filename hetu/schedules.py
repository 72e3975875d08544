"""Learning rates that change with the step: functions from the step node to a rate node.

A schedule is a part of the graph, so one program serves all steps and a resumed run continues where it stopped. The
step counts finished updates: 0 in the first. All arithmetic is in float64. For a schedule by epoch, multiply by the
number of batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np

from .answers import AnswersCalls, answer_calls
from .core.errors import ArgumentError, public
from .core.graph import OPS, Node
from .core.leaf import unique_name, variable
from .core.op import as_node
from .ops import astype, cos, floor, minimum, where
from .ops import sum as sum_
from .ranges import AnyFloat, AtLeast0, AtLeast1, Count

__all__ = ["Plateau", "RateSchedule", "constant", "cosine", "exponential", "multistep", "step_decay", "warmup"]

RateSchedule = Callable[[Node], Node]


def _real(step: Any) -> Node:
    return astype(as_node(step), "float64")


def _rate(value: float) -> float:
    if not isinstance(value, int | float) or not value >= 0:
        raise ArgumentError(f"a learning rate is a number >= 0, got {value!r}", fix="pass a rate such as 1e-3")
    return float(value)


def _count(value: int, what: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{what} is a positive number of steps, got {value!r}", fix="pass an integer such as 1000")
    return value


@public
def constant(rate: AtLeast0) -> RateSchedule:
    """Always `rate`.

    >>> import hetu as ht
    >>> float(ht.evaluate(constant(0.5)(7)))
    0.5
    """
    rate = _rate(rate)
    return lambda step: OPS["constant"](value=np.array(rate))


@public
def step_decay(rate: AtLeast0, every: AtLeast1, factor: AtLeast0 = 0.1) -> RateSchedule:
    """`rate` times `factor` after each `every` steps.

    >>> import hetu as ht
    >>> [float(ht.evaluate(step_decay(1.0, every=10, factor=0.5)(step))) for step in (9, 10, 25)]
    [1.0, 0.5, 0.25]
    """
    rate, every = _rate(rate), _count(every, "every")
    return lambda step: rate * factor ** floor(_real(step) / every)


@public
def multistep(rate: AtLeast0, milestones: Sequence[AtLeast1], factor: AtLeast0 = 0.1) -> RateSchedule:
    """`rate` times `factor` from each milestone on.

    >>> import hetu as ht
    >>> [float(ht.evaluate(multistep(1.0, [10, 20], factor=0.5)(step))) for step in (9, 10, 25)]
    [1.0, 0.5, 0.25]
    """
    rate, places = _rate(rate), np.array([_count(m, "a milestone") for m in milestones], np.int64)
    return lambda step: rate * factor ** sum_(astype(step >= places, "float64"))


@public
def exponential(rate: AtLeast0, factor: AtLeast0, every: AtLeast1 = 1) -> RateSchedule:
    """`rate` times `factor` to the power step / every: a smooth decay.

    >>> import hetu as ht
    >>> float(ht.evaluate(exponential(1.0, 0.25, every=10)(5)))
    0.5
    """
    rate, every = _rate(rate), _count(every, "every")
    return lambda step: rate * factor ** (_real(step) / every)


@public
def cosine(rate: AtLeast0, steps: AtLeast1, final: AtLeast0 = 0.0) -> RateSchedule:
    """From `rate` down to `final` along half a cosine in `steps` steps, then `final`.

    I. Loshchilov, F. Hutter, "SGDR", ICLR 2017, eq. 5 without restarts.

    >>> import hetu as ht
    >>> [round(float(ht.evaluate(cosine(1.0, steps=10)(step))), 3) for step in (0, 5, 10, 99)]
    [1.0, 0.5, 0.0, 0.0]
    """
    rate, steps, final = _rate(rate), _count(steps, "steps"), _rate(final)
    half = (rate - final) / 2
    return lambda step: final + half * (1 + cos(minimum(_real(step) / steps, 1.0) * math.pi))


@public
def warmup(schedule: AtLeast0 | RateSchedule, steps: AtLeast1) -> RateSchedule:
    """Rises along a line to the first rate of `schedule` in `steps` steps, then follows it from its step 0.

    >>> import hetu as ht
    >>> rate = warmup(cosine(1.0, steps=10), steps=4)
    >>> [round(float(ht.evaluate(rate(step))), 3) for step in (0, 3, 4, 9, 14)]
    [0.25, 1.0, 1.0, 0.5, 0.0]
    """
    after, steps = schedule if callable(schedule) else constant(schedule), _count(steps, "steps")

    def rate(step: Any) -> Node:
        step = as_node(step)
        rising = minimum((_real(step) + 1.0) / steps, 1.0)
        return rising * after(where(step >= steps, step - steps, 0))

    return rate


class Plateau(AnswersCalls):
    """A rate that falls by `factor` when a metric has not improved for `patience` updates in a row.

    `update(metric, state)` is called on the host, usually once per epoch with a validation loss. The rate, the best
    metric and the count lie in one variable `.variable` of shape (3,), so a checkpoint holds them. Improving by less
    than `threshold` (relative) does not count. `mode` is "min" or "max".

    >>> plateau = Plateau(1.0, factor=0.5, patience=1)
    >>> state = {plateau.variable.name: plateau.variable.attrs["init"]}
    >>> [plateau.update(loss, state) for loss in (3.0, 2.0, 2.0, 2.0)]
    [1.0, 1.0, 1.0, 0.5]
    """

    def __init__(
        self,
        rate: AtLeast0,
        *,
        factor: AtLeast0 = 0.1,
        patience: Count = 10,
        mode: str = "min",
        threshold: AtLeast0 = 1e-4,
        lowest: AtLeast0 = 0.0,
    ) -> None:
        if mode not in ("min", "max"):
            raise ArgumentError(f"mode is {mode!r}", fix="use 'min' for a loss, 'max' for an accuracy")
        self.factor, self.patience, self.mode = factor, patience, mode
        self.threshold, self.lowest = threshold, lowest
        worst = math.inf if mode == "min" else -math.inf
        self.variable = variable(unique_name("plateau"), np.array([_rate(rate), worst, 0.0]), trainable=False)

    def __call__(self, step: Any) -> Node:
        return self.variable[0]

    def update(self, metric: AnyFloat, state: MutableMapping[str, np.ndarray]) -> float:
        """Take note of a new metric, write the variable in `state` and return the rate from now on."""
        rate, best, waited = map(float, np.array(state[self.variable.name], np.float64))
        margin = self.threshold * abs(best) if math.isfinite(best) else 0.0
        if metric < best - margin if self.mode == "min" else metric > best + margin:
            best, waited = float(metric), 0
        else:
            waited += 1
            if waited > self.patience:
                rate, waited = max(rate * self.factor, self.lowest), 0
        state[self.variable.name] = np.array([rate, best, waited])
        return rate


answer_calls(__name__)
