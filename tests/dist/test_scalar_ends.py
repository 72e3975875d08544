"""Losses that are drawn from a few numbers of the batch: the numbers travel, and never arrays of their copies."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.dist import DataParallel, Heterogeneous, Parallel, TensorParallel, ZeRO
from hetu.dist.rehearsal import rehearse

from ..pairs import in_turn

ROWS = 96  # more than any variable has numbers
STRATEGIES = {
    "data": (DataParallel(), 2),
    "zero1": (ZeRO(1), 4),
    "zero3": (ZeRO(3), 2),
    "tensor": (TensorParallel(), 2),
    "both": (Parallel(tensor=2, zero=1), 4),
    "unequal": (Heterogeneous([(0,), (1, 2)], [2, 1]), 3),
}
NUMBERS = [  # of outputs and targets
    lambda y, t: ht.mean((y - t) ** 2),
    lambda y, t: ht.mean(ht.abs(y)),
    lambda y, t: ht.mean(y * t) * 2.0,
    lambda y, t: ht.max(y * y),
    lambda y, t: ht.mean((y - ht.mean(y)) ** 2 * t**2),  # which goes back to all rows
    lambda y, t: ht.sum(ht.mean(y, axis=0) ** 2),
    lambda y, t: ht.mean(t * ht.broadcast_like(ht.mean(y), y)),
]
JOINED = [
    lambda a, b: a * b,
    lambda a, b: a * a + b,
    lambda a, b: a / (1.0 + b * b),
    lambda a, b: ht.sqrt(1.0 + a * a) - b,
    lambda a, b: ht.log(2.0 + a * a) * b,
]


def model():
    """Outputs and targets."""
    x, t = ht.placeholder("x", (None, 8)), ht.placeholder("t", (None, 4))
    with ht.scope("m"):
        y = ht.nn.Linear(6, 4, name="down")(ht.nn.Linear(8, 6, activation=ht.tanh, name="up")(x))
    return y, t


def plain() -> list:
    """A step whose loss is one mean."""
    loss = NUMBERS[0](*model())
    return [loss, ht.optim.SGD(1e-3).minimize(loss)]


def drawn(seed: int) -> list:
    """A step with a drawn end."""
    rng, (y, t) = np.random.default_rng(seed), model()
    loss = NUMBERS[rng.integers(len(NUMBERS))](y, t)
    for _ in range(rng.integers(1, 4)):
        other = NUMBERS[rng.integers(len(NUMBERS))](y, t) if rng.integers(4) else loss
        both = (loss, other) if rng.integers(2) else (other, loss)
        loss = JOINED[rng.integers(len(JOINED))](*both)
    loss = loss + 1e-3 * ht.mean((y - t) ** 2)  # all is read, whatever was drawn
    return [loss, ht.optim.SGD(1e-3).minimize(loss)]


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("seed", "strategy"), in_turn(2, range(40), STRATEGIES))
def test_a_number_that_all_rows_read_travels_as_a_number(seed, strategy):
    step, (x, t) = drawn(seed), np.random.default_rng(seed).normal(size=(2, ROWS, 8)).astype("float32")
    feed, (chosen, ranks) = {"x": x, "t": t[:, :4]}, STRATEGIES[strategy]
    alone = rehearse(step, None, feed, world_size=1, steps=2)
    tried = rehearse(step, chosen, feed, world_size=ranks, steps=2)
    np.testing.assert_allclose(tried.losses, alone.losses, rtol=2e-5, atol=1e-5)
    assert arrays(tried) <= arrays(rehearse(plain(), chosen, feed, world_size=ranks))


def arrays(tried) -> set:
    """What has been sent that had numbers for each row."""
    return {(kind, shape) for kind, shape in tried.sent if np.prod(shape, dtype=int) >= ROWS}
