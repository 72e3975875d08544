"""A model of open sizes, fed, and the same model of those sizes written down compile to one and the same program."""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import subprocess
import sys
import warnings
from contextlib import nullcontext

import numpy as np
import pytest

import hetu as ht
from hetu.core.types import Dim
from hetu.dist import DataParallel, Pipeline, TensorParallel, ZeRO, run_ranks
from hetu.passes import PASSES

from .at_once import compiled_at_once, only_bound, own_items
from .dist import models as spread
from .pairs import in_turn, pairwise
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


@pytest.fixture(scope="module")
def at_once(request):
    cases = [i.callspec.params for i in own_items(request) if "at_once" in i.fixturenames]
    names = {(case["model"], case["step"]) for case in cases if case["precision"] == "float32"}
    made = (compiled(*name, passes=passes) for name, passes in itertools.product(sorted(names), (None, PASSES)))
    compiled_at_once(functools.partial(ex.program, feed) for ex, feed in made)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("model", "step", "precision"), pairwise(MODELS, STEPS, ["float32", "float16"]))
@pytest.mark.sampled(16)
def test_open_and_fixed_sizes_give_the_same_program(model, step, precision, written):
    runs = precision == "float32"
    for passes in (None, PASSES):
        build = functools.partial(compiled, model, step, precision=precision, passes=passes)
        ex, feed = build()
        fixed, _ = written(build, feed)
        with nullcontext() if runs else only_bound():
            assert shown(ex.program(feed)) == shown(fixed.program(feed))
        if runs:
            for ours, theirs in zip(ex.run(feed), fixed.run(feed), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def axes(rng):
    """Sums, softmax, a norm and a gate along open axes, and a number per channel."""
    x, per_channel = ht.placeholder("x", (None, 6, None)), ht.variable("c", rng.random((6, 1), np.float32))
    h = ht.relu(x * per_channel + 1.0)
    mean = ht.mean(h, -1, keepdims=True)
    z = (h - mean) / ht.sqrt(ht.var(h, -1, keepdims=True) + 1e-3)
    gates = ht.softmax(z * 2.0, -1) * ht.sum(h, 0, keepdims=True) + ht.sum(ht.square(x), (0, 1))
    return [ht.mean(ht.abs(gates)), gates], {x: rng.random((5, 6, 9), np.float32)}


def pairs(rng):
    """Distances between all of two open sets."""
    x, y, scale = ht.placeholder("x", (None, 4)), ht.placeholder("y", (None, 4)), ht.variable("scale", np.ones(4, "f"))
    apart = ht.sum(ht.square(ht.expand_dims(x * scale, 1) - ht.expand_dims(y, 0)), -1)
    return [ht.mean(ht.logsumexp(-apart, 1)), ht.exp(-apart)], {
        x: rng.random((6, 4), np.float32),
        y: rng.random((7, 4), np.float32),
    }


def pixels(rng):
    """A class of each pixel of images of any size."""
    x, t = ht.placeholder("x", (None, 3, None, None)), ht.placeholder("t", (None, None, None), "int64")
    h = ht.permute_dims(ht.nn.Conv2d(8, 4, 1)(ht.nn.Conv2d(3, 8, 5, padding=2, activation=ht.relu)(x)), (0, 2, 3, 1))
    feed = {x: rng.random((6, 3, 10, 13), np.float32), t: rng.integers(0, 4, (6, 10, 13))}
    return [ht.mean(ht.softmax_cross_entropy(h, t))], feed


MODELS |= {"axes": axes, "pairs": pairs, "pixels": pixels}
LENGTHS = (1, 2, 3, 5, 16, 33, 100, 127, 128, 200, 5000)


@pytest.mark.compiled
@pytest.mark.parametrize(("model", "step"), in_turn(2, MODELS, ["forward", "adam"]))
@pytest.mark.sampled(8)
def test_what_other_sizes_want_is_compiled_with_the_first(model, step):
    ahead = pytest.importorskip("hetu.cpu_kernels.ahead")
    ex, feed = compiled(model, step)
    (sub,), shapes = ex.subgraphs.values(), {name: value.shape for name, value in feed.items()}

    def texts(shapes):
        """The texts of groups that a program wants; written kernels are compiled once a machine."""
        with ahead.noting() as wanted:
            ex.program({name: np.zeros(shape, feed[name].dtype) for name, shape in shapes.items()})
        return {source.shown for source in wanted if source.shared}

    known = texts(shapes).union(*map(texts, ahead.others(sub, shapes)))
    places = {name: [isinstance(n, Dim) for n in sub.placeholders[name].shape] for name in shapes}
    opened = sorted({n for name in shapes for n, is_open in zip(shapes[name], places[name]) if is_open})
    for seed in range(12 if opened else 0):
        lengths = LENGTHS[:-1] if len(opened) > 2 else LENGTHS
        sizes = dict(zip(opened, np.random.default_rng(seed).choice(lengths, len(opened)).tolist()))
        other = {k: tuple(sizes[n] if o else n for n, o in zip(shapes[k], places[k])) for k in shapes}
        assert texts(other) <= known, other


def test_threads_are_warned_as_ever_while_other_sizes_are_tried(monkeypatch):
    ahead = pytest.importorskip("hetu.cpu_kernels.ahead")
    x, seen, filters = ht.placeholder("x", (None, 3)), [], [*warnings.filters]
    lacking, ex = argparse.Namespace(loaded=lambda: False), ht.Executor([x * 2])
    monkeypatch.setattr(
        ht.Executor, "trial", lambda *_: seen.append((warnings.filters == filters, *np.geterr().values()))
    )
    with ahead.along(ex, ex.subgraphs["default"], {"x": (8, 3)}):
        ahead.with_others([lacking])
    assert seen and all(of == (True, *["ignore"] * 4) for of in seen)


SPLITS = {"*/up/weight": 1, "*/up/bias": 0, "*/down/weight": 0}
STRATEGIES = {
    "data": DataParallel,
    "zero": lambda: ZeRO(3),
    "tensor": lambda: TensorParallel(SPLITS),
    "pipeline": lambda: Pipeline(stages=2, microbatches=3),
}


@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
@pytest.mark.sampled(8)
def test_open_and_fixed_sizes_give_each_rank_the_same_program(model, way, written):
    def programs(comm):
        graph, feeds = build()
        ex = ht.Executor(graph, strategy=STRATEGIES[way](), comm=comm)
        with only_bound():
            return shown(ex.program("train", feeds[0])), shown(ex.program("eval", {"x": feeds[0]["x"]}))

    build = spread.MODELS[model]
    sizes = build()[1][0]
    assert run_ranks(2, programs) == written(lambda: run_ranks(2, programs), sizes)


ONCE = """
import numpy as np
import hetu as ht
from hetu.cpu_kernels import compiled
x, bias = ht.placeholder("x", (None, 6, None)), ht.variable("bias", np.ones((6, 1), "f"))
h, z = ht.softmax(ht.relu(x * bias), -1), ht.sum(x * bias, (1, 2))
loss = ht.mean(ht.square(h)) + ht.mean(ht.softplus(z) - z)
entries = {"train": [loss, ht.optim.Adam(0.1).minimize(loss)], "eval": [ht.tanh(h) - ht.max(h, 0), loss]}
ex, plain = (ht.Executor(entries, passes=passes) for passes in (None, []))
sizes, times = [(8, 6, 12), (1, 6, 12), (1, 6, 1), (8, 6, 1), (8, 6, 130), (1, 6, 130), (40000, 6, 3)], []
for name, size in [(name, size) for name in entries for size in sizes]:
    fed = np.random.default_rng(0).random(size, "f")
    np.testing.assert_allclose(ex.run(name, {x: fed})[0], plain.run(name, {x: fed})[0], rtol=1e-4, atol=1e-6)
    times.append(compiled.spent())
print(len(set(times)), times[0] > 0)
"""


@pytest.mark.compiled
def test_a_machine_that_has_compiled_nothing_compiles_for_the_first_sizes_alone(tmp_path):
    variables = {k: v for k, v in os.environ.items() if not k.startswith("HETU_")} | {"XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", ONCE]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout.split(), ran.stderr) == (0, ["1", "True"], "")
