"""LengthLoader: each element once, batches of one shape per length, weights that make a mean over tokens."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.errors import DataError
from hetu.data import LengthLoader

RNG = np.random.default_rng(0)
SIZES = RNG.integers(1, 41, 50)
TEXTS = [100 * number + np.arange(size) for number, size in enumerate(SIZES)]
NEXT = [np.stack([row, -row], axis=1).astype("float32") for row in TEXTS]  # elements of a shape of their own
ASKED = {"lengths": (5, 10, 40), "tokens": 85}


def loader(columns=(TEXTS,), batch_size=12, **options):
    return LengthLoader(columns, batch_size, **ASKED | options)


def steps_of(loader):
    return [*loader]


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"tokens": 40}, {"lengths": (40,)}, {"batch_size": 50}])
def test_each_element_comes_once_in_batches_of_one_shape(options):
    made = loader(**options)
    seen = []
    for number, step in enumerate(steps_of(made)):
        lengths = [ids.shape[1] for ids, _ in step]
        assert lengths == sorted(lengths, reverse=bool(number % 2))
        for ids, weights in step:
            assert ids.shape == weights.shape == (made.tokens // ids.shape[1], ids.shape[1])
            for row, mask in zip(ids, weights > 0):
                count = int(mask.sum())
                assert mask[:count].all() and not row[count:].any()
                assert count == 0 or next(n for n in made.lengths if n >= count) == ids.shape[1]
                seen += row[:count].tolist()
    assert sorted(seen) == sorted(np.concatenate(TEXTS).tolist())
    assert len(steps_of(made)) == len(made) == -(-50 // made.batch_size)


def test_sums_by_the_weights_are_means_over_the_tokens_of_a_step():
    for at, step in enumerate(steps_of(loader())):
        tokens = np.concatenate(TEXTS[12 * at : 12 * at + 12])
        found = np.mean([(ids * weights).sum() for ids, weights in step])
        np.testing.assert_allclose(found, tokens.mean(), rtol=1e-5)


def test_columns_stay_beside_each_other():
    for step in loader((TEXTS, NEXT), shuffle=True):
        for ids, pairs, weights in step:
            np.testing.assert_array_equal(pairs, np.stack([ids, -ids], axis=2))
            assert pairs.dtype == weights.dtype == "float32"


def test_orders_follow_from_the_seed_and_a_position_leads_on():
    first, second = (steps_of(loader(shuffle=True, seed=4)) for _ in range(2))
    other = steps_of(loader(shuffle=True, seed=5))
    same = [np.array_equal(a[0][0], b[0][0]) for a, b in zip(first, second)]
    assert all(same) and not all(np.array_equal(a[0][0], b[0][0]) for a, b in zip(first, other))
    read, resumed = loader(shuffle=True, seed=4), loader(shuffle=True)
    epochs = [*steps_of(read), *steps_of(read)]
    again = loader(shuffle=True, seed=4)
    walk = iter(again)
    for _ in range(3):
        next(walk)
    resumed.load_state(again.state())
    for got, wanted in zip([*steps_of(resumed), *steps_of(resumed)], epochs[3:]):
        for a, b in zip(got, wanted):
            np.testing.assert_array_equal(a[0], b[0])


def test_a_last_step_of_fewer_sequences_is_left_out():
    assert (len(loader()), len(loader(drop_last=True))) == (5, 4)
    assert len(steps_of(loader(drop_last=True))) == 4


WRONG = [
    ({"lengths": ()}, r"lengths=\(\)"),
    ({"lengths": (10, 5)}, r"lengths=\(10, 5\)"),
    ({"lengths": (0, 40)}, r"lengths=\(0, 40\)"),
    ({"lengths": (40,), "tokens": 39}, "batches of 39 tokens"),
    ({"lengths": (5, 30)}, r"has \d+ places, lengths go from 1 to 30"),
    ({"columns": ()}, "no sequences"),
    ({"columns": ([],)}, "no sequences"),
    ({"columns": ([1, 2],)}, "no sequences"),
    ({"columns": ([[1], []],)}, "a sequence is empty"),
    ({"columns": (TEXTS, TEXTS[::-1])}, "column 1 has sequences of other lengths"),
    ({"batch_size": 51}, "batch_size=51 of 50"),
]


@pytest.mark.parametrize(("options", "match"), WRONG, ids=[match for _, match in WRONG])
def test_what_does_not_fit_is_told(options, match):
    with pytest.raises(DataError, match=match) as caught:
        loader(**options)
    assert caught.value.fix
