"""Spaces: what is drawn lies in them, vectors say what is active, and what does not fit is told."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hetu as ht
from hetu.automl import Categorical, Float, Int, Space

SPACE = {
    "rate": Float(1e-4, 1.0, log=True),
    "model": Categorical(
        net={"width": Int(8, 64, log=True), "act": Categorical("relu", "tanh")}, ridge={"alpha": Float(0.0, 2.0)}
    ),
    "scale": Categorical(True, False, None),
}


@given(seed=st.integers(0, 2**32))
def test_what_is_drawn_or_near_is_whole_and_in_range(seed):
    space, rng = Space(SPACE), np.random.default_rng(seed)
    for config in (
        drawn := space.drawn(rng),
        space.near(drawn, rng),
        space.with_fixed({"scale": None}).near(drawn, rng),
    ):
        assert space.check(config) == config
        assert ("model.net.width" in config) == (config["model"] == "net") != ("model.ridge.alpha" in config)
        vector = space.vectors(space.places([config]))[0]
        assert vector.min() >= 0 and vector.max() <= 1 and len(vector) == 10
        assert vector[6] == 0.5 or config["model"] == "ridge"
        assert space.check(space.config(space.places([config])[0])).keys() == config.keys()


def test_a_search_begins_with_the_defaults_of_each_option():
    kernel = Categorical(line={}, ball={"size": Float(0.0, 2.0)})
    net = {"width": Int(8, 64, default=16), "act": Categorical("relu", "tanh")}
    space = Space({"model": Categorical(net=net, svm={"kernel": kernel}, none={}), "rate": Float(0.0, 1.0)})
    starts = [
        {"model": "net", "model.net.width": 16, "model.net.act": "relu", "rate": 0.5},
        {"model": "svm", "model.svm.kernel": "line", "rate": 0.5},
        {"model": "none", "rate": 0.5},
        {"model": "svm", "model.svm.kernel": "ball", "model.svm.kernel.ball.size": 1.0, "rate": 0.5},
    ]
    assert space.starts() == starts == Space.parse(space.described()).starts()
    assert space.with_fixed({"model": "net"}).starts() == starts[:1]
    assert Space(SPACE).starts() == []  # no default, no start


@given(place=st.floats(0, 1), log=st.booleans())
def test_places_and_values_are_each_others(place, log):
    whole = Int(1, 1000, log)
    for number in Float(0.01, 3.0, log), Float(1e-200, 1e200, log=True):  # whose ends are too far apart for a quotient
        assert number.place(number.at(place)) == pytest.approx(place, abs=1e-6)
    assert whole.at(whole.place(whole.at(place))) == whole.at(place)


@pytest.mark.parametrize("domain", [Float(1e-20, 1.0, log=True), Float(1.0, 1e20, log=True), Int(1, 10**15, log=True)])
def test_small_numbers_of_a_wide_range_are_as_likely_as_large_ones(domain):
    places = np.linspace(0.1, 0.9, 9)
    found = [domain.at(place) for place in places]
    low = domain.low / 2 if isinstance(domain, Int) else domain.low
    np.testing.assert_allclose(found, low * (domain.high / low) ** places, atol=0.5 if isinstance(domain, Int) else 0)


def test_whole_numbers_are_equally_likely_at_their_ends():
    at = [Int(1, 4).at(place) for place in np.linspace(0, 1, 4001)]
    np.testing.assert_allclose(np.bincount(at)[1:], 1000, atol=2)


@pytest.mark.parametrize(
    "make, told",
    [
        (lambda: Float(2.0, 1.0), "Float from 2.0 to 1.0"),
        (lambda: Float(0.0, 1.0, log=True), "log=True from 0"),
        (lambda: Float(0.0, 1.0, default=2.0), "default=2.0 of 0.0 to 1.0"),
        (lambda: Categorical("a", "a"), "each of them once"),
        (lambda: Space({}), "a space without names"),
        (lambda: Space({"x": 3}), "x is 3"),
        (lambda: Space({"a": Categorical(b={"c": Int(1, 2)}), "a.b.c": Int(1, 2)}), "a name twice"),
        (lambda: Space(SPACE).check({"rate": 2.0}), "rate=2.0"),
        (lambda: Space(SPACE).check({"rate": 0.1, "model": "net"}), "no model.net.width"),
        (lambda: Space(SPACE).check({"rat": 0.1}), "did you mean 'rate'"),
        (lambda: ht.automl.search(lambda run: 1.0, {"x": 3}), "x is 3"),
    ],
)
def test_what_does_not_fit_is_told(make, told):
    with pytest.raises(ht.errors.HetuError, match=told):
        make()
