"""Initializers: variance, range, dtype, and the same numbers for the same seed."""

from __future__ import annotations

import inspect
import json

import numpy as np
import pytest

import hetu as ht
from hetu import init
from hetu.core.errors import HetuError, ShapeError

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


# -- laws: any rows can be made anywhere ---------------------------------------------------------------------------

DRAWN = {
    "zeros": init.zeros,
    "ones": init.ones,
    "constant": init.constant(0.5),
    "uniform": init.uniform(-1, 3),
    "normal": init.normal(2.0, 1.0),
    "truncated_normal": init.truncated_normal(2.0),
    **{name: getattr(init, name) for name in init.__all__ if name.startswith(("xavier", "he_", "lecun"))},
    "own": init.elementwise(lambda shape, dtype, rng: rng.laplace(0.0, 1.0, shape).astype(dtype)),
}
PLAIN = {  # what small arrays have always been
    "uniform": lambda shape, rng: rng.uniform(-1, 3, shape),
    "normal": lambda shape, rng: rng.normal(1.0, 2.0, shape),
    "xavier_uniform": lambda shape, rng: rng.uniform(*(s * (6 / sum(init.fans(shape))) ** 0.5 for s in (-1, 1)), shape),
    "he_normal": lambda shape, rng: rng.normal(0.0, (2 / init.fans(shape)[0]) ** 0.5, shape),
}


@pytest.mark.parametrize("shape", [(1, 7), (1, 100), (0, 5), (130, 1), (121, 3, 2), (61, 40), (200, 2), (5, 0), (9, 3)])
@pytest.mark.parametrize("name", ["ones", "uniform", "normal", "truncated_normal", "he_normal", "own"])
def test_any_rows_are_those_of_the_whole(name, shape, monkeypatch):
    monkeypatch.setattr(init, "AT_ONCE", 64)
    for dtype in map(np.dtype, ("float32", "float64", "float16", "int32") if name == "normal" else ("float32",)):
        law = init.law_of(DRAWN[name], shape if 0 not in shape else (3, 3))
        whole = law.whole(shape, dtype, np.random.default_rng(5))
        assert whole.shape == shape and whole.dtype == dtype
        for rows in (range(0, shape[0]), *(range(first, shape[0], step) for first, step in ((1, 2), (0, 3), (6, 7)))):
            found = np.full((len(rows), *shape[1:]), 77, dtype)
            for places, values in law.blocks(shape, dtype, np.random.default_rng(5), rows):
                assert (np.diff(places) > 0).all() and values.dtype == dtype
                found[places] = values
            np.testing.assert_array_equal(found, whole[rows.start :: rows.step])


@pytest.mark.parametrize("name", PLAIN)
def test_small_arrays_are_drawn_at_once(name):
    shape = (30, 20)
    wanted = PLAIN[name](shape, np.random.default_rng(0)).astype(F32)
    np.testing.assert_array_equal(draw(DRAWN[name], shape), wanted)


def test_blocks_are_unlike_and_their_law_is_that_of_small_arrays(monkeypatch):
    monkeypatch.setattr(init, "AT_ONCE", 600)
    rng = np.random.default_rng(0)
    one, other = (init.normal(2.0, 1.0)((500, 40), F32, rng) for _ in range(2))  # of one generator, one after the other
    assert len(np.unique(np.concatenate([one, other]))) > 0.99 * 2 * one.size
    assert one.mean() == pytest.approx(1.0, abs=0.06) and one.std() == pytest.approx(2.0, rel=0.03)
    assert abs(np.corrcoef(one[:-60].ravel(), one[60:].ravel())[0, 1]) < 0.03


@pytest.mark.parametrize(("step", "calls"), [(1, 120), (2, 60), (3, 40), (5, 24), (60, 2)])
def test_who_keeps_every_second_row_has_no_others_made(step, calls, monkeypatch):
    monkeypatch.setattr(init, "AT_ONCE", 600)
    made = []
    law = init.Law(lambda shape, dtype, rng: made.append(shape) or np.zeros(shape, dtype))
    for _ in law.blocks((600, 2), F32, np.random.default_rng(0), range(0, 600, step)):
        pass
    assert len(made) == calls


def test_what_a_law_is_named_by():
    assert repr(init.zeros).startswith("<function zeros") and "All 0" in init.zeros.__doc__
    assert [*inspect.signature(init.he_normal).parameters] == ["shape", "dtype", "rng"]
    for name, initializer in DRAWN.items():
        data = init.law_of(initializer, (3, 2)).data()
        assert (data is None) == (name == "own")
        if data is not None:
            assert init.Law.parse(data["law"], json.loads(json.dumps(data["numbers"])), F32).data() == data
    for number in (float("nan"), float("inf")):
        assert init.law_of(init.constant(number), (3, 2)).data() is None
    for value in (np.ones(2), None, "1", True):
        with pytest.raises(ht.errors.ArgumentError, match="constant got value="):
            init.constant(value)
    assert init.law_of(init.constant(np.float32(0.5)), (3,)).data() == {"law": "constant", "numbers": [0.5]}
    assert init.law_of(init.orthogonal(), (3, 2)) is None and init.law_of(np.ones(3), (3,)) is None


@pytest.mark.parametrize(
    ("law", "numbers", "dtype", "said"),
    [
        ("eval", [1], "f4", "no law"),
        (None, [1], "f4", "no law"),
        ("normal", {"std": 1}, "f4", "must be finite"),
        ("normal", [0.0, "1"], "f4", "must be finite"),
        ("normal", [0.0, float("inf")], "f4", "must be finite"),
        ("normal", [0.0], "f4", "numbers that it can draw by"),
        ("normal", [0.0, 1.0, 2.0], "f4", "numbers that it can draw by"),
        ("normal", [0.0, -1.0], "f4", "numbers that it can draw by"),
        ("constant", [-1], "u1", "numbers that it can draw by"),
    ],
)
def test_a_law_that_cannot_draw_is_refused(law, numbers, dtype, said):
    with pytest.raises(HetuError, match=said):
        init.Law.parse(law, numbers, np.dtype(dtype))
