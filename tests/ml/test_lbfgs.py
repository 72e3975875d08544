"""L-BFGS beside minima that are known, and how often it asks for a value."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.ml.lbfgs import minimize


class Counted:
    """A function of numbers that knows how often it was asked."""

    def __init__(self, value, gradient):
        self.value, self.gradient, self.asked = value, gradient, 0

    def __call__(self, x):
        self.asked += 1
        return float(self.value(x)), self.gradient(x)


def banana(x):
    return np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def slope_of_banana(x):
    g, bend = np.zeros_like(x), x[1:] - x[:-1] ** 2
    g[1:] += 200 * bend
    g[:-1] -= 400 * x[:-1] * bend + 2 * (1 - x[:-1])
    return g


CURVES = np.logspace(0, 2, 30)
FUNCTIONS = {  # name: function, its gradient, where it begins, its minimum, and how often it may be asked
    "banana of 2": (banana, slope_of_banana, np.array([-1.2, 1.0]), np.ones(2), 60),
    "banana of 100": (banana, slope_of_banana, np.tile([-1.2, 1.0], 50), np.ones(100), 900),
    "bowl": (lambda x: CURVES @ (x - 3) ** 2, lambda x: 2 * CURVES * (x - 3), np.zeros(30), np.full(30, 3.0), 120),
    "kink": (lambda x: max(x[0], 0) ** 2, lambda x: 2 * np.maximum(x, 0), np.full(1, 1e6), np.zeros(1), 20),
    "steep": (lambda x: np.exp(x[0]) - 2 * x[0], lambda x: np.exp(x) - 2, np.full(1, 30.0), np.log([2.0]), 60),
    "no way at all": (lambda x: 0 * x[0], lambda x: np.full(1, np.inf), np.ones(1), np.ones(1), 100),
    "no number on the way": (  # the first steps lead to where the logarithm has no value
        lambda x: x[0] - np.log(x[0]),
        lambda x: 1 - 1 / x,
        np.full(1, 50.0),
        np.ones(1),
        40,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_finds_the_minimum_with_few_questions(name):
    value, gradient, start, wanted, most = FUNCTIONS[name]
    counted = Counted(value, gradient)
    with np.errstate(all="ignore"):
        found = minimize(counted, start, max_iter=1000, tol=1e-8)
    np.testing.assert_allclose(found.x, wanted, rtol=1e-6, atol=1e-6)
    assert found.value == value(found.x)
    assert found.iterations < counted.asked <= most


def test_it_stays_where_nothing_falls_and_ends_when_it_is_told_to():
    assert minimize(Counted(lambda x: 5.0, np.zeros_like), np.ones(3)).iterations == 0
    lying = minimize(Counted(lambda x: x @ x, lambda x: -2 * x), np.ones(3))  # the gradient points the wrong way
    np.testing.assert_allclose(lying.x, np.ones(3), rtol=1e-12)
    assert minimize(Counted(banana, slope_of_banana), np.array([-1.2, 1.0]), max_iter=3).iterations == 3


def test_newtons_steps_are_taken_where_they_are_told():
    function, slope, start, wanted, _ = FUNCTIONS["bowl"]
    found = minimize(
        asked := Counted(function, slope), start, tol=1e-9, newton=lambda x, gradient: gradient / (2 * CURVES)
    )
    np.testing.assert_allclose(found.x, wanted, rtol=1e-12)
    assert found.iterations == 1 and asked.asked == 2
