"""Improve a plan by random proposals: Markov chain Monte Carlo over the configuration of every operator.

After FlexFlow (Z. Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 6): a
random operator gets a random configuration; what is cheaper is accepted, what is dearer with a probability that falls
exponentially. The cost is any function, such as a simulation. Every proposal is simulated whole.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from ...core.errors import ArgumentError

Picks = tuple[int, ...]
STEEPNESS = 40.0  # a plan that is 2.5 % slower is accepted with probability 1 / e
DRAWS = 4  # for each plan that may be costed: plans met before are free, so a walk may go round for a while


def polish(
    cost: Callable[[Picks], float],
    choices: Sequence[int],
    start: Picks | None = None,
    *,
    proposals: int = 2000,
    seed: int = 0,
) -> tuple[float, Picks]:
    """The least cost of the plans that are tried, at most `proposals`, and its configurations.

    choices: how many configurations each operator has. start: where to begin, by default the first of each, such as
    data parallelism. An infinite cost is a plan that must not be; the start may be one.

    >>> polish(lambda picks: 1.0 + sum(picks), [3, 3, 3], start=(2, 2, 2), proposals=200)
    (1.0, (0, 0, 0))
    """
    if not choices or min(choices) < 1:
        raise ArgumentError(f"choices {list(choices)}", fix="give each operator at least one configuration")
    draw = random.Random(seed)
    here = best = (0,) * len(choices) if start is None else tuple(start)
    known = {here: cost(here)}
    for _ in range(DRAWS * proposals):
        place = draw.randrange(len(choices))
        there = (*here[:place], draw.randrange(choices[place]), *here[place + 1 :])
        if there not in known:
            if len(known) > proposals:
                break
            known[there] = cost(there)
        now, then = known[here], known[there]
        if then <= now or (math.isfinite(then) and draw.random() < math.exp(STEEPNESS * (now - then) / abs(now))):
            here = there
        best = min(best, here, key=known.__getitem__)
    return known[best], best
