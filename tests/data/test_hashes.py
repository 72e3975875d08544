"""Ids of texts and numbers: the same for equal values, spread evenly, other ones in another field."""

from __future__ import annotations

import numpy as np
import pytest

from hetu.core.errors import DTypeError
from hetu.data import hashed
from hetu.growth import UNBOUNDED

VALUES = {
    "texts": np.array([f"user {i}" for i in range(5000)]),
    "bytes": np.array([f"user {i}".encode() for i in range(5000)]),
    "numbers": np.arange(5000),
    "unsigned": (np.arange(5000) << 40).astype("u8"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_ids_are_those_of_the_values_and_spread_evenly(kind):
    values = VALUES[kind]
    ids, again = hashed(values, "a"), hashed(values.reshape(50, 100)[::-1], "a")
    assert ids.dtype == np.int64 and (again[::-1].reshape(-1) == ids).all()
    assert len(np.unique(np.concatenate([ids, hashed(values, "b")]))) == 10_000
    assert ids.min() >= 0 and ids.max() < UNBOUNDED
    for parts in (2, 3, 7):  # by which servers deal them
        assert np.bincount(ids % parts, minlength=parts).min() > 0.9 * len(ids) / parts


def test_no_values_single_ones_and_halves_of_characters_have_ids():
    for values in ([], [[], []], np.zeros((0, 3))):
        assert hashed(values).shape == np.shape(values) and hashed(values).dtype == np.int64
    with np.errstate(all="raise"):
        assert hashed(7) == hashed([7])[0] and hashed("oak") == hashed(["oak"])[0]
    assert len({*hashed(["\ud800", "\ud801", "?"]).tolist()}) == 3 and hashed(7, "\ud800") != hashed(7)


def test_what_has_no_exact_value_is_refused():
    for values in ([1.5], [None], [{}]):
        with pytest.raises(DTypeError, match=r"ids of values (float64|object)") as told:
            hashed(values)
        assert "astype(str)" in told.value.fix
