"""A mixture of experts on the layout transform: what a dense computation gives, fast and slow paths, mistakes."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import dist
from hetu.core.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError
from hetu.core.graph import OPS


def layer(x, gate, up, down, k=2, capacity=8):
    """Top-k gated experts, each two products with a relu between."""
    values, experts = ht.topk(ht.softmax(x @ gate), k=k)
    slots = ht.moe_slots(experts, count=up.shape[0], capacity=capacity)
    rooms = ht.moe_dispatch(x, slots, ht.ones_like(values), experts=up.shape[0], capacity=capacity)
    return ht.moe_combine(ht.relu(rooms @ up) @ down, slots, values)


def weights(rng, features=6, experts=4):
    shapes = {"gate": (features, experts), "up": (experts, features, 8), "down": (experts, 8, features)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def dense(x, gate, up, down, k=2, capacity=8):
    """Each token goes through its experts by itself; a full expert turns it away."""
    scores = np.exp(x @ gate) / np.exp(x @ gate).sum(1, keepdims=True)
    order, y, taken = np.argsort(-scores, axis=1, kind="stable"), np.zeros_like(x), [0] * len(up)
    for choice in range(k):
        for n, row in enumerate(x):
            expert = order[n, choice]
            if taken[expert] < capacity:
                y[n] += scores[n, expert] * (np.maximum(row @ up[expert], 0) @ down[expert])
            taken[expert] += 1
    return y


@pytest.mark.parametrize("capacity", [2, 8])
def test_a_layer_equals_its_tokens_one_by_one(capacity):
    rng = np.random.default_rng(0)
    values, x = weights(rng), rng.standard_normal((12, 6)).astype(np.float32)
    given = ht.placeholder("x", (None, 6))
    y = layer(given, *map(ht.constant, values.values()), capacity=capacity)
    np.testing.assert_allclose(ht.Executor([y]).run({"x": x})[0], dense(x, **values, capacity=capacity), atol=1e-5)


def test_a_layer_learns_its_gate_too():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((64, 6)).astype(np.float32)
    with ht.scope("moe"):
        parameters = [ht.variable(name, value) for name, value in weights(rng).items()]
    loss = ht.mean((layer(ht.placeholder("x", (None, 6)), *parameters, capacity=64) - x) ** 2)
    updates = ht.optim.Adam(1e-2).minimize(loss)
    assert all(updates.gradients[p] is not None for p in parameters)
    executor = ht.Executor([loss, updates])
    losses = [float(executor.run({"x": x})[0]) for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # bound to NumPy's calls, and forward functions
def test_no_number_spreads_to_who_does_not_read_it(dtype):
    bad, slots = np.array([[np.nan], [1.0]], dtype), np.array([[-1, -1], [3, 2]])
    one = np.ones((2, 2), dtype)
    x, w = ht.placeholder("x", (2, 1), dtype), ht.constant(one)
    rooms, back = np.array([[[np.nan], [1.0]], [[2.0], [4.0]]], dtype), ht.placeholder("y", (2, 2, 1), dtype)
    fetches = [
        ht.moe_dispatch(x, slots, w, experts=2, capacity=2),
        ht.moe_combine(back, slots, w),
        OPS["moe_products"](ht.constant(one[:, :1]), back, slots),
    ]
    got = ht.Executor(fetches).run({"x": bad, "y": rooms})
    assert [a.ravel().tolist() for a in got] == [[0, 0, 1, 1], [0, 6], [0, 0, 4, 2]]


def test_split_tokens_and_choices_give_the_same():
    rng = np.random.default_rng(2)
    values, x = weights(rng), rng.standard_normal((12, 6)).astype(np.float32)
    with ht.scope("split"):
        parameters = [ht.variable(name, value) for name, value in values.items()]
        loss = ht.mean(layer(ht.placeholder("x", (None, 6)), *parameters) ** 2)
    updates = ht.optim.SGD(0.1).minimize(loss)

    def work(comm):
        executor = ht.Executor([loss, updates], strategy=dist.DataParallel(), comm=comm)
        return float(executor.run({"x": x})[0]), {name: value.copy() for name, value in executor.state.items()}

    (alone, one), (_, two) = dist.run_ranks(1, work)[0], dist.run_ranks(2, work)[0]
    for name, value in one.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    assert alone > 0


@pytest.mark.parametrize(
    ("slots", "text"),
    [([[4]], "slot 4 at position"), ([[-2]], "slot -2 at position"), ([[1], [1]], "slot 1 is given 2 times")],
)
def test_slots_that_cannot_be(slots, text):
    x, ids = ht.placeholder("x", (None, 3)), ht.placeholder("s", (None, 1), "int64")
    y = ht.moe_dispatch(x, ids, ht.ones_like(x[:, :1]), experts=2, capacity=2)
    with pytest.raises(ValueRangeError, match=text):
        ht.Executor([y]).run({"x": np.ones((len(slots), 3), "float32"), "s": np.array(slots)})


def test_mistakes():
    x, y, slots = ht.placeholder("x", (4, 3)), ht.placeholder("y", (2, 2, 3)), np.zeros((4, 1), int)
    w = np.ones((4, 1), np.float32)
    with pytest.raises(ShapeError, match="wanted \\(tokens, features\\)"):
        ht.moe_dispatch(y, slots, w, experts=2, capacity=2)
    with pytest.raises(ShapeError, match="ones change nothing"):
        ht.moe_dispatch(x, slots, w[:, 0], experts=2, capacity=2)
    with pytest.raises(ShapeError, match="wanted \\(experts, capacity, features\\)"):
        ht.moe_combine(x, slots, w)
    with pytest.raises(ShapeError, match="the same features"):
        OPS["moe_products"](x, np.ones((2, 2, 5), np.float32), slots)
    with pytest.raises(ShapeError, match="make them with ht.moe_slots"):
        ht.moe_combine(y, slots[:, 0], w)
    with pytest.raises(ShapeError, match="give each token a row"):
        ht.moe_slots(slots[:, 0], count=2, capacity=2)
    with pytest.raises(DTypeError, match="integers"):
        ht.moe_combine(y, w, w)
    with pytest.raises(ArgumentError, match="capacity=0"):
        ht.moe_dispatch(x, slots, w, experts=2, capacity=0)
