"""What a state gives out: a write into it is told, for every leaf, and all that is computed of it is a plain array."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import hetu as ht

WRITES = {
    "[...] = 0": lambda value: value.__setitem__(..., 0),
    "of a part": lambda value: value[:1].__setitem__(..., 0),
    "turned": lambda value: value.T.__setitem__(..., 0),
    "reshaped": lambda value: value.reshape(-1).__setitem__(0, 0),
    "fill": lambda value: value.fill(0),
    "sort": lambda value: value.sort(),
    "partition": lambda value: value.partition(1),
    "put": lambda value: value.put(0, 0),
}


def state() -> ht.State:
    """Variables of three ranks, states of an optimizer, its step, and random state."""
    w, c = ht.variable("w", [[1.0, 2.0], [3.0, 4.0]]), ht.variable("c", [0.0, 0.0])
    loss = ht.sum(ht.dropout(w * w, 0.5)) + ht.sum(c * c) + ht.sum(ht.variable("s", 1.0, ()) ** 2)
    return ht.Executor([loss, ht.optim.Adam(0.1).minimize(loss)]).state


@pytest.mark.parametrize("how", WRITES)
def test_a_write_into_any_leaf_is_told(how: str) -> None:
    kept = state()
    assert len(kept) == 11
    for name, value in kept.items():
        if value.ndim == 0 and how in ("of a part", "sort", "partition"):
            continue  # which a scalar has no parts for
        with pytest.raises(
            ht.errors.ArgumentError, match=r"a copy, .*\n.*test_lent.py[\s\S]*fix: .*state\[name\] = value"
        ):
            WRITES[how](kept[name])
        assert np.array_equal(kept[name], value)


def test_in_place_arithmetic_is_of_a_copy_and_can_be_assigned() -> None:
    kept = state()
    kept["w"] += 1
    kept["w"] *= 2
    value = before = kept["w"]
    value -= 1
    assert value.tolist() == [[3, 5], [7, 9]] and before.tolist() == kept["w"].tolist() == [[4, 6], [8, 10]]


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.copy(),
        np.array,
        copy.copy,
        copy.deepcopy,
        lambda w: w.astype("float64"),
        lambda w: pickle.loads(pickle.dumps(w)),
    ],
)
def test_what_is_copied_can_be_written(make) -> None:
    made = make(state()["w"])
    made[0] = 5
    made.sort(axis=0)
    made += 1
    assert made.tolist() == [[4, 5], [6, 6]]


def test_what_is_computed_is_plain() -> None:
    w = state()["w"]
    for made in (w + 1, 1 - w, np.exp(w), w @ w, np.concatenate([w, w]), np.where(w > 2, w, 0), np.asarray(w) * 1):
        assert type(made) is np.ndarray and made.flags.writeable
    assert type(w.sum()) is type(w[0, 0]) is type(np.max(w)) is np.float32
    assert repr(w) == "array([[1., 2.],\n       [3., 4.]], dtype=float32)"
