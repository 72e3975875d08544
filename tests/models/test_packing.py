"""Texts that are packed into one row see nothing of each other: each place is as in a padded row of its own."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DataError
from hetu.models.bert import BERT

RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(1, 20, n) for n in RNG.integers(1, 9, 40)]


def test_packed_texts_are_those_of_padded_rows():
    model = BERT(20, 16, 2, 2, positions=8)
    x, seen = ht.placeholder("x", (None, 8), "int64"), ht.placeholder("seen", (None, 8), "bool")
    ids, part, place = (ht.placeholder(name, (None, 8), "int64") for name in ("ids", "part", "place"))
    alike = ht.equal(ht.expand_dims(part, axis=2), ht.expand_dims(part, axis=1))
    ex = ht.Executor({"padded": [model(x, mask=seen)], "packed": [model(ids, mask=alike, places=place)]})
    for weight in model.weights.values():
        if weight.name in ex.state:
            ex.state[weight] = RNG.standard_normal(weight.shape)
    rows = np.array([np.pad(text, (0, 8 - len(text))) for text in TEXTS])
    padded = ex.run("padded", {"x": rows, "seen": rows > 0})[0]
    packed = dict(zip(("ids", "part", "place"), ht.data.packed(TEXTS, 8)))
    found = ex.run("packed", packed)[0]
    assert len(found) < 0.7 * len(padded)
    starts = np.argwhere((packed["place"] == 0) & (packed["part"] > 0))
    assert len(starts) == len(TEXTS)
    left = list(range(len(TEXTS)))
    for n, start in starts:
        size = int((packed["part"][n] == packed["part"][n, start]).sum())
        own = packed["ids"][n, start : start + size]
        k = next(k for k in left if np.array_equal(TEXTS[k], own))
        left.remove(k)
        np.testing.assert_allclose(found[n, start : start + size], padded[k, :size], rtol=1e-4, atol=1e-4)
    assert not left


def test_rows_that_fit_nowhere_are_refused():
    with pytest.raises(DataError, match="a row of 9 ids does not fit into 8"):
        ht.data.packed([np.arange(9)], 8)
    assert [array.shape for array in ht.data.packed([], 8)] == [(0, 8)] * 3
