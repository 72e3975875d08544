"""A model of open sizes, fed, and the same model of those sizes written down compile to one and the same program."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import hetu as ht
from hetu.dist import DataParallel, Pipeline, TensorParallel, ZeRO, run_ranks
from hetu.passes import PASSES

from .dist import models as spread
from .test_lowering import MODELS as LOWERED

PLACEHOLDER = ht.placeholder


def readme(rng):
    """The ten lines of README."""
    x, t = ht.placeholder("x", (None, 784)), ht.placeholder("t", (None,), "int64")
    h = ht.nn.Linear(784, 256, activation=ht.relu)(x)
    y = ht.nn.Linear(256, 10)(h)
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    return [loss, y], {x: rng.random((128, 784), np.float32), t: rng.integers(0, 10, 128)}


def lenet(rng):
    """LeNet with dropout: two poolings, and an image flattened."""
    x, t = ht.placeholder("x", (None, 1, 28, 28)), ht.placeholder("t", (None,), "int64")
    h = ht.max_pool2d(ht.nn.Conv2d(1, 6, 5, padding=2, activation=ht.relu)(x), 2)
    h = ht.max_pool2d(ht.nn.Conv2d(6, 16, 5, activation=ht.relu)(h), 2)
    y = ht.nn.Linear(84, 10)(ht.dropout(ht.nn.Linear(400, 84, activation=ht.relu)(ht.flatten(h, 1)), 0.2))
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    return [loss, y], {x: rng.random((32, 1, 28, 28), np.float32), t: rng.integers(0, 10, 32)}


def images(rng):
    """Images of open height and width, whose number of pixels at the border follows from it."""
    x, w = ht.placeholder("x", (None, 8, None, None)), ht.variable("w", rng.random((32, 8, 3, 3), np.float32))
    h = ht.relu(ht.conv2d(x, w, stride=2, padding="same"))
    return [ht.mean(ht.square(h))], {x: rng.random((4, 8, 9, 10), np.float32)}


def block(rng):
    """A block of GPT over open batches of sequences of open length."""
    ids, t = ht.placeholder("ids", (None, None), "int64"), ht.placeholder("t", (None, None), "int64")
    h = ht.nn.TransformerBlock(16, 4, causal=True, dropout=0.1)(ht.nn.Embedding(20, 16)(ids))
    loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(16, 20)(h), t))
    return [loss], {ids: rng.integers(0, 20, (3, 6)), t: rng.integers(0, 20, (3, 6))}


def rows(rng):
    """A table of which a step updates the rows that were looked up, and arithmetic with an open size."""
    ids, y = ht.placeholder("ids", (None, 3), "int64"), ht.placeholder("y", (None,))
    table = ht.variable("table", rng.standard_normal((50, 4), np.float32))
    h = ht.sum(ht.take(table, ids, axis=0), (1, 2)) / ids.shape[0]
    positions = ht.astype(ht.arange(ids.shape[0]), "float32")
    return [ht.mean(ht.square(h - y) * positions)], {ids: rng.integers(0, 50, (9, 3)), y: rng.random(9, np.float32)}


MODELS = {"readme": readme, "dropout": lenet, "images": images, "block": block, "rows": rows, **LOWERED}
STEPS = {"forward": None, "sgd": lambda: ht.optim.SGD(0.1), "adam": lambda: ht.optim.Adam(0.01)}


@pytest.fixture
def written(monkeypatch):
    """Calls a builder that leaves sizes open so that its placeholders have those of a feed."""

    def build(make, feed):
        shapes = {getattr(key, "name", key): value.shape for key, value in feed.items()}
        with monkeypatch.context() as patch:
            patch.setattr(ht, "placeholder", lambda name, shape, *rest: PLACEHOLDER(name, shapes[name], *rest))
            return make()

    return build


def compiled(model, step, **options):
    with ht.scope("model"):  # names count anew
        fetches, feed = MODELS[model](np.random.default_rng(0))
        updates = [] if STEPS[step] is None else [STEPS[step]().minimize(fetches[0])]
    return ht.Executor([*fetches, *updates], **options), {key.name: value for key, value in feed.items()}


def shown(program):
    """A program as it prints, and the types that its instructions read: a printed number does not tell its own."""
    return str(program), [[str(i.type) for i in step.node.inputs] for step in program.steps]


@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("model", MODELS)
def test_open_and_fixed_sizes_give_the_same_program(model, step, precision, written):
    for passes in (None, PASSES):
        build = functools.partial(compiled, model, step, precision=precision, passes=passes)
        ex, feed = build()
        fixed, _ = written(build, feed)
        assert shown(ex.program(feed)) == shown(fixed.program(feed))
        if precision == "float32":
            for ours, theirs in zip(ex.run(feed), fixed.run(feed), strict=True):
                np.testing.assert_array_equal(ours, theirs)


SPLITS = {"*/up/weight": 1, "*/up/bias": 0, "*/down/weight": 0}
STRATEGIES = {
    "data": DataParallel,
    "zero": lambda: ZeRO(3),
    "tensor": lambda: TensorParallel(SPLITS),
    "pipeline": lambda: Pipeline(stages=2, microbatches=3),
}


@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_open_and_fixed_sizes_give_each_rank_the_same_program(model, way, written):
    def programs(comm):
        graph, feeds = build()
        ex = ht.Executor(graph, strategy=STRATEGIES[way](), comm=comm)
        return shown(ex.program("train", feeds[0])), shown(ex.program("eval", {"x": feeds[0]["x"]}))

    build = spread.MODELS[model]
    sizes = build()[1][0]
    assert run_ranks(2, programs) == written(lambda: run_ranks(2, programs), sizes)
