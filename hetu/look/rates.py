"""Which learning rate to begin with: one short training in which the rate rises at each step, until the loss explodes.

L. Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3. Left out: several seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ..core.errors import ArgumentError, DataError, public
from ..core.executor import Executor
from ..core.graph import Node
from ..ranges import Positive, Range
from ..schedules import RateSchedule, exponential
from .columns import in_columns
from .curves import curves_svg

SMOOTH = 0.9  # the weight of the losses before, in their mean
EXPLODED = 4.0  # times the lowest loss


@dataclass(frozen=True)
class RateCurve:
    """Rates, and the smoothed loss behind a step by each. `print` shows ten of them, a notebook the curve."""

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def suggestion(self) -> float:
        """The rate at which the loss falls fastest, by the logarithm of the rate."""
        slopes = np.gradient(np.array(self.losses), np.log(self.rates))
        return self.rates[int(np.argmin(slopes))]

    def __str__(self) -> str:
        shown = range(0, len(self.rates), max(1, len(self.rates) // 10))
        rows = [["rate", "loss"], *([f"{self.rates[i]:.1e}", f"{self.losses[i]:.4f}"] for i in shown)]
        table = in_columns(rows, right=range(2))
        return "\n".join([*table, f"falls fastest at {self.suggestion:.1e}"])

    def _repr_svg_(self) -> str:
        return curves_svg({"loss": self.losses}, self.rates, label="rate", up="loss", log_x=True)


@public
def find_rate(
    loss: Node,
    optimizer: Callable[[RateSchedule], Any],
    loader: Iterable[Sequence[Any]],
    inputs: Sequence[Node | str],
    *,
    low: Positive = 1e-6,
    high: Positive = 1.0,
    steps: Annotated[int, Range(2, 100_000)] = 101,
    **options: Any,
) -> RateCurve:
    """Train from the first values for `steps` steps by rates from `low` to `high`, each the same factor above the last.

    `optimizer` makes one of a schedule, as the classes of `ht.optim` do; `loader` is gone through again if it is short,
    and `inputs` are as in `fit`; `options` are those of an `Executor`. It ends early where the loss is no number, or 4
    times its lowest.

    >>> import hetu as ht
    >>> x, w = ht.placeholder("x", (None,)), ht.variable("w", 0.0, ())
    >>> curve = find_rate(ht.mean((x - w) ** 2), ht.optim.SGD, [([1.0, 3.0],)], [x], low=1e-3, high=10.0)
    >>> 0.01 < curve.suggestion < 1.0
    True
    """
    if not 0 < low < high or steps < 2:
        raise ArgumentError(f"low={low!r}, high={high!r}, steps={steps!r}", fix="pass 0 < low < high, and steps >= 2")
    factor = (high / low) ** (1 / (steps - 1))
    updates = optimizer(exponential(low, factor)).minimize(loss)
    executor = Executor({"train": [loss, updates]}, **options)
    rates, losses, mean = list[float](), list[float](), 0.0
    for step, batch in zip(range(steps), _again_and_again(loader)):
        if len(batch) != len(inputs):
            said = f"a batch has {len(batch)} arrays, and there are {len(inputs)} inputs"
            raise DataError(said, fix="name an input for each array of a batch, in their order")
        value = float(executor.run("train", dict(zip(inputs, batch)))[0])
        mean = SMOOTH * mean + (1 - SMOOTH) * value
        smooth = mean / (1 - SMOOTH ** (step + 1))
        if not math.isfinite(smooth) or (len(losses) > 1 and smooth > EXPLODED * max(min(losses), 0)):
            break
        rates.append(low * factor**step)
        losses.append(smooth)
    if len(losses) < 2:
        raise DataError(f"the loss is {value} after {step + 1} steps", fix="begin with a lower rate: low=")
    return RateCurve(tuple(rates), tuple(losses))


def _again_and_again(loader: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """The batches of a loader without end; DataError if it has none, perhaps none any more."""
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise DataError("the loader has no batches", fix="pass one that can be gone through again, such as a list")
