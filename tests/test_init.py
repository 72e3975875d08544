"""Initializers: variance, range, dtype, and the same numbers for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from hetu import init
from hetu.core.errors import ShapeError

F32 = np.dtype("float32")
SHAPES = [(120, 80), (40, 20, 5, 5)]
VARIANCES = {
    "xavier": lambda fan_in, fan_out: 2 / (fan_in + fan_out),
    "he": lambda fan_in, fan_out: 2 / fan_in,
    "lecun": lambda fan_in, fan_out: 1 / fan_in,
}


def draw(initializer, shape, seed=0):
    return initializer(shape, F32, np.random.default_rng(seed))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["uniform", "normal"])
@pytest.mark.parametrize("family", VARIANCES)
def test_variance_follows_the_fans(family, form, shape):
    values = draw(getattr(init, f"{family}_{form}"), shape)
    wanted = VARIANCES[family](*init.fans(shape))
    assert values.dtype == F32 and values.shape == shape
    assert values.var() == pytest.approx(wanted, rel=0.05)
    assert abs(values.mean()) < 4 * (wanted / values.size) ** 0.5
    if form == "uniform":
        assert abs(values).max() <= (3 * wanted) ** 0.5


def test_fans_of_linear_and_convolution_weights():
    assert init.fans((784, 256)) == (784, 256)
    assert init.fans((16, 6, 5, 3)) == (6 * 15, 16 * 15)
    with pytest.raises(ShapeError, match="fan in"):
        draw(init.xavier_uniform, (10,))


def test_truncated_normal_keeps_its_deviation_and_its_bounds():
    values = draw(init.truncated_normal(0.3, mean=1.0), (20_000,))
    assert values.std() == pytest.approx(0.3, rel=0.02)
    assert values.mean() == pytest.approx(1.0, abs=0.01)
    assert abs(values - 1).max() <= 2 * 0.3 / init.TRUNCATED_STD * 1.0001


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (3, 2, 2, 2), (5, 5)])
def test_orthogonal(shape):
    w = draw(init.orthogonal(2.0), shape).reshape(shape[0], -1).astype(np.float64)
    gram = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    np.testing.assert_allclose(gram, 4 * np.eye(len(gram)), atol=1e-5)


@pytest.mark.parametrize("maker", [init.uniform(), init.normal(), init.truncated_normal(), init.orthogonal()])
def test_a_seed_fixes_the_values(maker):
    shape = (7, 3)
    np.testing.assert_array_equal(draw(maker, shape), draw(maker, shape))
    assert (draw(maker, shape) != draw(maker, shape, seed=1)).any()


def test_constants_and_scalars():
    assert draw(init.constant(0.5), ()).tolist() == 0.5
    assert draw(init.zeros, (2,)).tolist() == [0, 0] and draw(init.ones, (2,)).tolist() == [1, 1]
    assert draw(init.truncated_normal(), ()).shape == ()
