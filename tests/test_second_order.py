"""Gradients of functions of gradients, for every kind of layer: right through each pass and through all of them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu import nn
from hetu.core.graph import OPS, Graph
from hetu.passes import PASSES, chosen_passes

from .at_once import compiled_at_once
from .nn.test_layers import LAYERS, images, sequences
from .pairs import in_turn

KINDS = {name: (make, source) for name, (make, source, _, _) in LAYERS.items()} | {
    "relu": (lambda: nn.Sequential(nn.Linear(8, 8, activation=ht.relu), nn.Linear(8, 3)), sequences),
    "gelu": (lambda: nn.Sequential(nn.Linear(8, 8), ht.gelu), sequences),
    "log_softmax": (lambda: nn.Sequential(nn.Linear(8, 8), ht.log_softmax), sequences),
    "block": (lambda: nn.TransformerBlock(8, 2, causal=True), sequences),
    "conv and pooling": (lambda: nn.Sequential(nn.Conv2d(6, 4, 3, activation=ht.relu), nn.MaxPool2d(2)), images),
    "conv, norm and pooling": (
        lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm(4), ht.relu, nn.MaxPool2d(2)),
        images,
    ),
}
ENDS = {
    "penalty": lambda loss, slopes: loss * 0.1 + ht.sum(ht.square(slopes[0])),
    "matching": lambda loss, slopes: sum(ht.sum(ht.square(g - 0.1)) for g in slopes),
}
TOGETHER = {"of a CPU": None, "of a GPU": [run.__name__ for run in chosen_passes(None, "gpu")], "all": [*PASSES]}
ALONE = {name: [name] for name in PASSES}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "together"), in_turn(6, KINDS, TOGETHER))
def test_second_gradients_pass_through_all_passes(kind, together, monkeypatch):
    """What is no device's own choice runs line by line, as to compile so long groups takes most of the time."""
    if together != "of a CPU":
        monkeypatch.setenv("HETU_CC", "0")
    check(kind, "matching", {together: TOGETHER[together]})


@pytest.mark.nightly
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_second_gradients_pass_through_each_pass(kind, end):
    check(kind, end, TOGETHER | ALONE)


def check(kind, end, chosen):
    make, source = KINDS[kind]
    x, rng = source(time=2) if source is sequences else source(), np.random.default_rng(0)
    ids, shape = x.dtype.kind == "i", (4, *x.shape[1:])
    shift = ht.variable("shift", rng.normal(size=x.shape[1:]).astype("f")) if not ids else None
    y = make()(x if shift is None else x + shift)
    y = y[0] if isinstance(y, tuple) else y
    trained = [v for v in Graph([y]).leaves("variable") if v.attrs["trainable"]]
    loss = ht.mean(ht.square(y) * ht.constant(rng.uniform(0.5, 1.5, y.shape[1:]).astype("f")))
    second = ENDS[end](loss, ht.gradients(loss, trained))
    fetches = [second, *ht.gradients(second, trained), ht.optim.SGD(0.01).minimize(second)]
    feed = {x: rng.integers(0, 9, shape) if ids else rng.normal(size=shape).astype("f")}

    def run(passes):
        return ht.Executor(fetches, passes=passes, seed=0).run(feed)[:-1]

    compiled_at_once(partial(ht.Executor(fetches, passes=passes).program, feed) for passes in ([], *chosen.values()))
    wanted = run([])
    scale = max(float(np.abs(w).max()) for w in wanted[1:])  # what is 0 but for rounding has no scale of its own
    for name, passes in chosen.items():
        for got, want in zip(run(passes), wanted, strict=True):
            bound = 2e-3 * max(scale, float(np.abs(want).max()))
            assert np.isfinite(got).all() and np.abs(got - want).max(initial=0) <= bound, f"with the passes {name}"


def test_a_result_that_views_what_another_overwrites_is_copied_first():
    """Also in an operator of a stranger, whose forward function gives a view of an operand."""

    @ht.op(infer=lambda x: (x, x), inplace={0: (0,)}, differentiable=False)
    def powers(xp, x):
        return xp.exp(x), x[::-1]

    values = np.arange(3, dtype="f")
    x = ht.placeholder("x", (3,))
    first, last = powers(ht.sin(x) + 1.0)
    for passes in (None, []):
        got = ht.Executor([first, last], passes=passes).run({x: values})
        np.testing.assert_allclose(got, [np.exp(np.sin(values) + 1), (np.sin(values) + 1)[::-1]], rtol=1e-6)
    assert OPS["powers"] is powers
