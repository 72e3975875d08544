"""Attention written out becomes one operator with its gradient, in many spellings; what only looks like it stays."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import Graph, topological
from hetu.core.simplify import interpret, simplify
from hetu.cpu_kernels.find_attention import find_attention

N, HEADS, S, T, D = 2, 3, 6, 7, 4
LENGTHS = (np.arange(T) < np.array([[3], [5]]))[:, None, None]
TRIANGLE = np.tri(S, T, dtype=bool)
BIAS = np.linspace(-1, 1, S * T).reshape(S, T)


def scores(q, k):
    return q @ ht.matrix_transpose(k)


def weighed(of_scores):
    return lambda q, k, v: (ht.softmax(of_scores(q, k), axis=-1) @ v,)


FOUND = {
    "bare": weighed(scores),
    "scaled": weighed(lambda q, k: scores(q, k) * 0.5),
    "divided": weighed(lambda q, k: scores(q, k) / 2.0),
    "scaled before": weighed(lambda q, k: scores(q * 0.5, k)),
    "axes": weighed(lambda q, k: 0.5 * (q @ ht.permute_dims(k, (0, 1, 3, 2)))),
    "hidden": weighed(lambda q, k: ht.where(LENGTHS, scores(q, k) * 0.5, -1e9)),
    "filled": weighed(lambda q, k: ht.where(~LENGTHS, -np.inf, scores(q, k) / 2.0)),
    "twice": weighed(lambda q, k: ht.where(TRIANGLE, ht.where(LENGTHS, scores(q, k), -1e9), -1e9)),
    "biased": weighed(lambda q, k: scores(q, k) * 0.5 + BIAS),
    "added": weighed(lambda q, k: np.where(LENGTHS, 0, -1e9) + scores(q, k) * 0.5),
    "number": weighed(lambda q, k: scores(q, k) + 2.0),
    "keys": weighed(lambda q, k: ht.where(LENGTHS[0, 0, 0], scores(q, k), -1e9)),
    "all": weighed(lambda q, k: ht.where(TRIANGLE, scores(q, k) * 0.5 + BIAS + BIAS, -1e9)),
    "float mask": lambda q, k, v: (ht.scaled_dot_product_attention(q, k, v, BIAS),),
}


def read_weights(q, k, v):
    weights = ht.softmax(scores(q, k), axis=-1)
    return weights @ v, weights


def learned_bias(q, k, v):
    """The gradient of what is added needs the slopes of the scores."""
    return weighed(lambda q, k: scores(q, k) + scores(v[..., :1], v[..., 1:2])[..., :1])(q, k, v)[0][..., :1], q


LEFT = {
    "weights": read_weights,
    "near": weighed(lambda q, k: ht.where(TRIANGLE, scores(q, k), -5.0)),
    "scaled masks": weighed(lambda q, k: (scores(q, k) + BIAS) * 0.5),
    "inverse": weighed(lambda q, k: 0.5 / scores(q, k)),
    "other axis": lambda q, k, v: (ht.softmax(scores(q, k), axis=-2) @ v,),
    "broadcast": lambda q, k, v: weighed(scores)(q, k[0, 0], v),
    "16 bits": lambda *parts: weighed(scores)(*(ht.astype(x, "float16") for x in parts)),
}


def parts():
    shapes = {"q": (N, HEADS, S, D), "k": (N, HEADS, T, D), "v": (N, HEADS, T, D)}
    return [ht.placeholder(name, shape, "float64") for name, shape in shapes.items()]


def graph(composition, gradients):
    """Its outputs, with the gradients of all, or of some inputs, and what to feed."""
    inputs = parts()
    outputs = composition(*inputs)
    loss = ht.sum(ht.square(outputs[0]))
    made = [*outputs, *(ht.gradients(loss, [inputs["qkv".index(i)] for i in gradients]) if gradients else ())]
    rng = np.random.default_rng(0)
    return simplify(made), {p: rng.standard_normal(p.shape) for p in inputs}


def counts(outputs):
    names = [n.op.name for n in topological(outputs)]
    return {name: names.count(name) for name in ("attention", "attention_dx", "softmax")}


@pytest.mark.parametrize("gradients", ["", "qkv", "k", "v"])
@pytest.mark.parametrize("composition", FOUND.values(), ids=FOUND)
def test_a_composition_becomes_attention(composition, gradients):
    outputs, feed = graph(composition, gradients)
    made = find_attention(outputs)
    Graph(made).verify()
    assert [o.type for o in made] == [o.type for o in outputs]
    assert counts(made) == {"attention": 1, "attention_dx": int(bool(gradients)), "softmax": 0}
    for a, b in zip(interpret(made, feed), interpret(outputs, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.compiled
@pytest.mark.parametrize("far", [-1e3, -1e5, -1e9, -1e30, 1e7])
def test_what_is_added_to_all_scores_of_a_query_leaves_the_gradient_as_it_was(far):
    """Of so large a sum of powers the logarithm is rounded to more than the share of each key."""
    bias = np.where(np.arange(70)[:, None] % 3, 0, far).astype("f4")
    arrays = [np.random.default_rng(i).normal(size=(2, n, 8)).astype("f4") for i, n in enumerate((70, 300, 300))]
    inputs = [ht.placeholder(name, a.shape) for name, a in zip("qkv", arrays)]
    (y,) = weighed(lambda q, k: scores(q, k) * 0.25 + bias)(*inputs)
    outputs = [y, *ht.gradients(ht.sum(ht.square(y)), inputs)]
    feed = dict(zip(inputs, arrays))
    assert counts(find_attention(simplify(outputs)))["attention_dx"] == 1
    wanted = ht.Executor(outputs, passes=[]).run(feed)
    for found in (ht.Executor(outputs).run(feed), interpret(find_attention(simplify(outputs)), feed)):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max())


@pytest.mark.parametrize("gradients", ["", "qkv"])
@pytest.mark.parametrize("composition", LEFT.values(), ids=LEFT)
def test_what_it_leaves_alone(composition, gradients):
    outputs, _ = graph(composition, gradients)
    assert find_attention(outputs) == outputs


@pytest.mark.parametrize("read", [False, True], ids=["", "weights of the last"])
def test_layers_read_each_other(read):
    (q, k, v), feed = parts(), graph(FOUND["hidden"], "")[1]
    h = q
    for _ in range(3):
        y, weights = read_weights(h, k, v)
        h = h + y
    outputs = simplify([h, *ht.gradients(ht.sum(h * h), [q, k, v]), *([weights] if read else [])])
    feed = dict(zip((q, k, v), feed.values()))
    made = find_attention(outputs)
    assert counts(made) == {"attention": 3 - read, "attention_dx": 3 - read, "softmax": int(read)}
    for a, b in zip(interpret(made, feed), interpret(outputs, feed), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
