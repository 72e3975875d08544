"""Models of published names: low-rank updates, which alone are trained, and what may be fine-tuned apart."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.models import bert, gpt2

RNG = np.random.default_rng(0)
IDS, CLASSES = RNG.integers(0, 11, (8, 6)), RNG.integers(0, 3, 8)


def trained(made, variables, steps=3):
    """Values before and after some steps, and the losses."""
    loss = ht.mean(ht.softmax_cross_entropy(made.chances(made(ht.constant(value=IDS))), CLASSES))
    ex = ht.Executor({"train": [loss, ht.optim.Adam(0.01).minimize(loss, variables)]})
    before = dict(ex.state)
    losses = [float(ex.run("train")[0]) for _ in range(steps)]
    moved = {name for name in before if not np.array_equal(before[name], ex.state[name])}
    return losses, {n for n in moved if "adam" not in n and "optimizer" not in n}


def classifier():
    return bert.BERT(11, 8, 2, 2, positions=6, classes=3, name="bert")


def test_low_rank_updates_alone_are_trained():
    with ht.scope("a"):
        made = classifier()
        low = made.adapt(r"self\.(query|value)$", rank=2, scale=4.0)
        losses, moved = trained(made, low)
    assert len(low) == 8 and [v.shape for v in low[:2]] == [(8, 2), (2, 8)]
    assert moved == {v.name for v in low}
    assert losses[-1] < losses[0]
    with ht.scope("a"):
        plain = classifier()
        first, moved = trained(plain, plain.variables[-2:])
    assert first[0] == pytest.approx(losses[0], abs=1e-6)  # zeros at first
    assert moved == {"a/bert/classifier.weight", "a/bert/classifier.bias"}


def test_a_low_rank_update_is_a_product_that_is_added_to_the_weight():
    made = gpt2.GPT2(11, 8, 1, 2, positions=6)
    names = [n for n in made.maps if "attn" in n]
    plain, ids = made(x := ht.placeholder("x", IDS.shape, "int64")), {"x": IDS}
    made.adapt("attn", rank=3, scale=0.5)
    ex = ht.Executor({"low": [made(x)], "plain": [plain]})
    for name in names:
        ex.state[made.updates[name][1]] = RNG.standard_normal(made.updates[name][1].shape)
    low = ex.run("low", ids)[0]
    for name in names:
        down, up, scale = made.updates[name]
        weight = made.weights[f"{name}.weight"]
        ex.state[weight] += scale * ex.state[down] @ ex.state[up]
    np.testing.assert_allclose(low, ex.run("plain", ids)[0], rtol=1e-4, atol=1e-5)


def test_a_pattern_that_names_nothing_is_refused():
    made = gpt2.GPT2(11, 8, 1, 2)
    with pytest.raises(ArgumentError, match="'wte' names no linear map without an update"):
        made.adapt("wte")
    made.adapt("c_attn")
    with pytest.raises(ArgumentError, match="h.0.attn.c_attn.query, h.0.attn.c_attn.key"):
        made.adapt("c_attn")
