"""Layers: names, sharing, shapes, marks on their nodes, and errors that say what a layer was built for."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import nn
from hetu.core.errors import ArgumentError, ShapeError
from hetu.core.graph import Graph, topological

IMAGES = (None, 6, 8, 8)


def images():
    return ht.placeholder("x", IMAGES)


def sequences(features=8, time=5):
    return ht.placeholder("x", (None, time, features))


# layer, input, shape of the output behind the batch axis, names of the variables behind the layer's own
LAYERS = {
    "linear": (lambda: nn.Linear(8, 3), sequences, (5, 3), ["weight", "bias"]),
    "linear without bias": (lambda: nn.Linear(8, 3, bias=False), sequences, (5, 3), ["weight"]),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3, padding=1, stride=2, groups=2), images, (4, 4, 4), ["weight", "bias"]),
    "conv2d same": (lambda: nn.Conv2d(6, 4, (3, 5), padding="same", bias=False), images, (4, 8, 8), ["weight"]),
    "conv_transpose2d": (
        lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1),
        images,
        (4, 16, 16),
        ["weight", "bias"],
    ),
    "batch_norm": (lambda: nn.BatchNorm(6), images, (6, 8, 8), ["scale", "bias", "running_mean", "running_var"]),
    "layer_norm": (lambda: nn.LayerNorm(8), sequences, (5, 8), ["scale", "bias"]),
    "rms_norm": (lambda: nn.RMSNorm(8), sequences, (5, 8), ["scale"]),
    "group_norm": (lambda: nn.GroupNorm(3, 6), images, (6, 8, 8), ["scale", "bias"]),
    "embedding": (lambda: nn.Embedding(9, 3), lambda: ht.placeholder("x", (None, 5), "int64"), (5, 3), ["weight"]),
    "dropout": (lambda: nn.Dropout(0.5), images, (6, 8, 8), []),
    "max_pool2d": (lambda: nn.MaxPool2d(2), images, (6, 4, 4), []),
    "avg_pool2d": (lambda: nn.AvgPool2d(3, stride=1, padding=1), images, (6, 8, 8), []),
    "global_avg_pool2d": (lambda: nn.GlobalAvgPool2d(), images, (6,), []),
    "flatten": (lambda: nn.Flatten(), images, (384,), []),
    "rnn": (lambda: nn.RNN(8, 3), sequences, (5, 3), ["weight", "bias"]),
    "gru": (lambda: nn.GRU(8, 3), sequences, (5, 3), ["weight", "bias", "recurrent", "recurrent_bias"]),
    "lstm": (lambda: nn.LSTM(8, 3), sequences, (5, 3), ["weight", "bias"]),
    "multi_head_attention": (
        lambda: nn.MultiHeadAttention(8, 2, causal=True, bias=False),
        sequences,
        (5, 8),
        ["query/weight", "key/weight", "value/weight", "output/weight"],
    ),
}


@pytest.mark.usefixtures("meaning")  # the kernels of the operators in them have tests of their own
@pytest.mark.parametrize("case", LAYERS)
def test_layer(case):
    """Shape, variable names, the mark on its nodes, gradients to every variable, values at two batch sizes."""
    make, feed, shape, names = LAYERS[case]
    with ht.scope("model"):
        layer, x = make(), feed()
        y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    own = f"model/{case.split()[0]}"
    assert layer.name == own and own in repr(layer)
    assert y.shape[1:] == shape
    assert [v.name for v in layer.variables] == [f"{own}/{name}" for name in names]
    assert y.tags["layer"].startswith(own)
    trained = [v for v in layer.variables if v.attrs["trainable"]]
    ex = ht.Executor([y, *ht.gradients(ht.sum(y * y), trained)])
    for batch in (2, 3):
        array = np.random.default_rng(0).normal(size=(batch, *x.shape[1:]))
        value, *slopes = ex.run({x: array.astype(np.float32) if x.dtype == np.float32 else np.ones(array.shape, int)})
        assert value.shape == (batch, *shape) and np.isfinite(value).all()
        assert [s.shape for s in slopes] == [v.shape for v in trained]


def test_names_count_within_their_scope_and_start_anew_in_another():
    def build():
        with ht.scope("twice"):
            return [nn.Linear(2, 2).name, nn.Linear(2, 2).name, nn.Linear(2, 2, name="head").name, nn.LSTM(2, 2).name]

    first, second = build(), build()
    assert first == second == ["twice/linear", "twice/linear_1", "twice/head", "twice/lstm"]


def test_calling_twice_shares_the_variables():
    with ht.scope("shared"):
        layer = nn.Linear(3, 3)
    x = ht.placeholder("x", (4, 3))
    graph = Graph((layer(layer(x)),))
    graph.verify()
    assert graph.leaves("variable") == [layer.weight, layer.bias]
    assert nn.Sequential(layer, ht.relu, layer).variables == [layer.weight, layer.bias]


def test_sequential_and_nested_layers():
    with ht.scope("nested"):
        model = nn.Sequential(nn.Conv2d(1, 2, 3, activation=ht.relu), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(338, 5))
        block = nn.TransformerBlock(8, 2, hidden=12, dropout=0.1)
    y = model(ht.placeholder("x", (None, 1, 28, 28)))
    assert y.shape[1:] == (5,) and len(model) == 4 and model[3].inputs == 338
    assert repr(model).count("\n") == 4 and "1,715 parameters" in repr(model)
    names = [v.name.removeprefix("nested/transformer_block/") for v in block.variables]
    assert names[:4] == [
        "attention_norm/scale",
        "attention_norm/bias",
        "attention/query/weight",
        "attention/query/bias",
    ]
    assert names[-4:] == ["up/weight", "up/bias", "down/weight", "down/bias"] and len(names) == 16
    x = sequences()
    marks = {n.tags.get("layer") for n in topological([block(x)]) if n.inputs}
    assert {"nested/transformer_block", "nested/transformer_block/attention/query"} <= marks


@pytest.mark.parametrize(
    ("make", "shape", "text"),
    [
        (lambda: nn.Linear(784, 10), (4, 28, 28), "784 entries in the last axis, got f32[4, 28, 28]"),
        (lambda: nn.Linear(784, 10), (), "784 entries"),
        (lambda: nn.Conv2d(3, 8, 3), (4, 28, 28, 3), "3 entries in the axis 1 (channels) and 4 axes"),
        (lambda: nn.Conv2d(3, 8, 3), (3, 28, 28), "4 axes"),
        (lambda: nn.BatchNorm(3), (4, 5), "3 entries"),
        (lambda: nn.LSTM(8, 4), (4, 8), "8 entries in the last axis and 3 axes"),
        (lambda: nn.GRU(8, 4), (4, None, 7), "8 entries in the last axis and 3 axes, got f32[4, ?, 7]"),
        (lambda: nn.MultiHeadAttention(8, 2), (4, 5, 9), "8 entries"),
    ],
)
def test_a_wrong_input_is_told_what_the_layer_was_built_for(make, shape, text):
    with ht.scope("wrong"):
        layer = make()
    with pytest.raises(ShapeError) as caught:
        layer(ht.placeholder("x", shape))
    assert text in str(caught.value) and layer.name in str(caught.value)
    assert "layer(ht.placeholder" in str(caught.value)  # the user's line


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(0, 3),
        lambda: nn.Linear(3, 2.5),
        lambda: nn.Conv2d(3, 4, 3, groups=2),
        lambda: nn.GroupNorm(4, 6),
        lambda: nn.MultiHeadAttention(10, 3),
        lambda: nn.Dropout(1.0),
        lambda: nn.Sequential([nn.Dropout(0.5)]),
    ],
)
def test_impossible_sizes_are_refused(make):
    with pytest.raises(ArgumentError):
        make()


def test_batch_norm_moves_its_statistics_in_training_only():
    with ht.scope("moving"):
        layer = nn.BatchNorm(3, momentum=0.25)
    x = ht.placeholder("x", (None, 3))
    y = layer(x)
    loss = ht.mean(y * y)
    ex = ht.Executor({"train": [y, ht.optim.SGD(0.0).minimize(loss)], "eval": [y]})
    batch = np.random.default_rng(0).normal(2.0, 3.0, (50, 3)).astype(np.float32)
    ex.run("eval", {x: batch})
    np.testing.assert_array_equal(ex.state[layer.running_mean], 0)
    (value, *_) = ex.run("train", {x: batch})
    np.testing.assert_allclose(value.mean(0), 0, atol=1e-5)
    mean, var = batch.mean(0) * 0.25, 0.75 + 0.25 * batch.var(0, ddof=1)
    np.testing.assert_allclose(ex.state[layer.running_mean], mean, rtol=1e-5)
    np.testing.assert_allclose(ex.state[layer.running_var], var, rtol=1e-5)
    (value,) = ex.run("eval", {x: batch})
    np.testing.assert_allclose(value, (batch - mean) / np.sqrt(var + 1e-5), rtol=1e-4, atol=1e-5)


CALLS = {  # how a layer is applied to a and b, and what its statistics follow, in turn
    "twice": (lambda layer, a, b: layer(a) * layer(b), lambda a, b: [a, b]),
    "used_in_another_order": (lambda layer, a, b: (lambda first: layer(b) * first)(layer(a)), lambda a, b: [a, b]),
    "to_what_it_gave": (lambda layer, a, b: layer(layer(a)) * b, lambda a, b: [a, normal(a)]),
    "recomputed": (lambda layer, a, b: ht.recompute(lambda v: ht.tanh(layer(v * 2)))(a) * b, lambda a, b: [2 * a]),
    "recomputed_twice": (lambda layer, a, b: ht.recompute(lambda v: layer(v) * layer(b))(a), lambda a, b: [a, b]),
}


def normal(batch):
    return (batch - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-5)


@pytest.mark.parametrize("call", CALLS)
def test_statistics_follow_each_call_of_a_layer_in_turn(call):
    apply, seen = CALLS[call]
    with ht.scope("calls"):
        layer = nn.BatchNorm(3, momentum=0.25)
    a, b = (ht.placeholder(name, (None, 3)) for name in "ab")
    loss = ht.sum(apply(layer, a, b))
    ex = ht.Executor({"train": [loss, ht.optim.SGD(0.0).minimize(loss)], "eval": [layer(a)]})
    batches = np.random.default_rng(0).normal(2.0, 3.0, (2, 2, 50, 3)).astype(np.float32)
    mean, var = np.zeros(3), np.ones(3)
    for first, second in batches:
        ex.run("train", {a: first, b: second})
        for batch in seen(first, second):
            mean, var = 0.75 * mean + 0.25 * batch.mean(0), 0.75 * var + 0.25 * batch.var(0, ddof=1)
    np.testing.assert_allclose(ex.state[layer.running_mean], mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ex.state[layer.running_var], var, rtol=1e-4)


def test_an_embedding_trains_the_rows_it_looked_up():
    """Adam with repeated ids: touched rows as if their gradients were summed, other rows and their moments stay."""
    with ht.scope("rows"):
        layer = nn.Embedding(6, 2)
    ids, target = ht.placeholder("ids", (None,), "int64"), ht.placeholder("target", (None, 2))
    loss = ht.sum(ht.square(layer(ids) - target))
    ex = ht.Executor({"train": [loss, ht.optim.Adam(0.1).minimize(loss)]})
    names = [layer.weight.name, f"{layer.weight.name}/adam_m", f"{layer.weight.name}/adam_v"]
    p, m, v = (ex.state[name].astype(np.float64) for name in names)
    rng = np.random.default_rng(0)
    for t, batch in enumerate(([1, 4, 1], [2, 2, 4], [0, 1, 0]), start=1):
        wanted = rng.normal(size=(3, 2))
        g = np.zeros_like(p)
        for i, goal in zip(batch, wanted):
            g[i] += 2 * (p[i] - goal)
        rows = np.unique(batch)
        m[rows], v[rows] = 0.9 * m[rows] + 0.1 * g[rows], 0.999 * v[rows] + 0.001 * g[rows] ** 2
        p[rows] -= 0.1 * (m[rows] / (1 - 0.9**t)) / (np.sqrt(v[rows] / (1 - 0.999**t)) + 1e-8)
        ex.run("train", {ids: batch, target: wanted.astype(np.float32)})
        for name, right in zip(names, (p, m, v)):
            np.testing.assert_allclose(ex.state[name], right, rtol=1e-4, atol=1e-6)
