"""Triples in groups: what a batch holds, by which odds false ones are drawn, positions, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DataError
from hetu.data import ArrayDataset, DataLoader, TripleLoader

N, ENTITIES = 26, 9
TRIPLES = ArrayDataset(*np.random.default_rng(0).integers(0, ENTITIES, (3, N)), names=("head", "relation", "tail"))


def loader(seed: int = 0, others: int = 5, **more) -> TripleLoader:
    batches = DataLoader(TRIPLES, batch_size=8, shuffle=True, drop_last=True, seed=seed)
    return TripleLoader(batches, ENTITIES, group=4, others=others, **more)


def test_a_batch_is_that_of_the_loader_with_false_ones_for_each_group():
    for (*true, heads, tails), batch in zip(loader(), DataLoader(TRIPLES, 8, shuffle=True, drop_last=True)):
        for found, wanted in zip(true, batch):
            assert found.shape == (2, 4) and found.ravel().tolist() == wanted.tolist()
        assert heads.shape == tails.shape == (2, 5) and heads.tolist() != tails.tolist()
    assert len(loader()) == 3


def test_false_ones_are_drawn_by_their_weights():
    weights = np.array([0, 1, 0, 3, 0, 0, 0, 4, 0])
    drawn = np.concatenate([np.ravel(part) for batch in loader(others=4000, weights=weights) for part in batch[3:]])
    np.testing.assert_allclose(np.bincount(drawn, minlength=ENTITIES) / len(drawn), weights / 8, atol=0.01)
    alike = np.concatenate([np.ravel(part) for batch in loader(others=4000) for part in batch[3:]])
    np.testing.assert_allclose(np.bincount(alike) / len(alike), np.full(ENTITIES, 1 / ENTITIES), atol=0.01)


def test_a_position_gives_the_batches_of_an_unbroken_run_and_a_seed_its_own():
    whole, first, again = loader(), loader(), loader(seed=7)
    epochs = [[[part.tolist() for part in batch] for batch in whole] for _ in range(2)]
    assert epochs[0] != epochs[1]
    next(iter(first))
    again.load_state(first.state())
    assert [[part.tolist() for part in batch] for batch in again] == epochs[0][1:]
    assert [[part.tolist() for part in batch] for batch in again] == epochs[1]
    assert next(iter(loader(seed=1)))[3].tolist() != epochs[0][0][3]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group": 3}, "batches of 8 triples in groups of 3 with 16 others[\\s\\S]*a group that divides batch_size"),
        ({"group": 4, "others": 0}, "groups of 4 with 0 others"),
        ({"group": 8, "weights": np.ones(5)}, r"weights \[5\] of 9 entities[\s\S]*one for each entity"),
        ({"group": 8, "weights": np.zeros(9)}, "with the sum 0.0[\\s\\S]*not all 0"),
        ({"group": 8, "weights": np.arange(9) - 1}, "none below 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, text):
    with pytest.raises(DataError, match=text):
        TripleLoader(DataLoader(TRIPLES, 8, drop_last=True), ENTITIES, **options)
    with pytest.raises(DataError, match="batches of 8, the last of 2, triples in groups of 4"):
        ht.data.TripleLoader(DataLoader(TRIPLES, 8), ENTITIES, group=4)
