"""The rate finder: rates by a factor, losses smoothed, an end where the loss explodes, and a suggestion that trains."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, DataError
from hetu.look.rates import RateCurve, find_rate

BATCHES = [(np.float32([1.0, 3.0]),), (np.float32([2.0, 4.0]),)]


def parabola():
    x = ht.placeholder("x", (None,))
    with ht.scope("parabola"):
        return ht.mean((x - ht.variable("w", 0.0, ())) ** 2), x


def test_each_step_has_its_rate_and_the_loss_before_it():
    loss, x = parabola()
    curve = find_rate(loss, ht.optim.SGD, BATCHES, [x], low=1e-3, high=0.1, steps=5)
    np.testing.assert_allclose(curve.rates, np.geomspace(1e-3, 0.1, 5))
    w, seen, mean = 0.0, [], 0.0
    for n, (rate, (batch,)) in enumerate(zip(curve.rates, itertools.cycle(BATCHES)), 1):
        mean = 0.9 * mean + 0.1 * float(np.mean((batch - w) ** 2))
        seen.append(mean / (1 - 0.9**n))
        w -= rate * float(np.mean(2 * (w - batch)))
    np.testing.assert_allclose(curve.losses, seen, rtol=1e-5)


def test_it_ends_where_the_loss_explodes_and_suggests_a_rate_that_trains():
    loss, x = parabola()
    curve = find_rate(loss, ht.optim.SGD, BATCHES, [x], low=1e-4, high=1e3)
    assert curve.rates[-1] < 100  # of a parabola rates above 1 diverge
    assert 1e-3 < curve.suggestion < 1
    executor = ht.Executor([loss, ht.optim.SGD(curve.suggestion).minimize(loss)])
    losses = [float(executor.run({"x": BATCHES[0][0]})[0]) for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]


def test_it_is_shown_as_a_table_and_as_a_curve():
    curve = RateCurve((1e-3, 1e-2, 1e-1), (2.0, 1.5, 1.75))
    assert str(curve).splitlines() == [
        "   rate    loss",
        "1.0e-03  2.0000",
        "1.0e-02  1.5000",
        "1.0e-01  1.7500",
        "falls fastest at 1.0e-03",
    ]
    assert curve._repr_svg_().startswith("<svg")


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"low": 0.0}, ArgumentError, "got low=0.0"),
        ({"low": 2.0}, ArgumentError, "low=2.0, high=1.0"),
        ({"steps": 1}, ArgumentError, "steps=1"),
        ({"low": 1e20, "high": 1e30}, DataError, "begin with a lower rate"),
    ],
)
def test_what_shows_nothing_is_told(options, error, said):
    loss, x = parabola()
    with pytest.raises(error, match=said):
        find_rate(loss, ht.optim.SGD, BATCHES, [x], **options)


@pytest.mark.parametrize("loader", [[], iter(BATCHES[:1])])
def test_a_loader_without_batches_is_told(loader):
    """A loop without a step in it had no end."""
    loss, x = parabola()
    with pytest.raises(DataError, match="the loader has no batches"):
        find_rate(loss, ht.optim.SGD, loader, [x], steps=5)
