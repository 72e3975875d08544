"""Recurrent layers and attention against plain NumPy loops, in double precision, with gradients of the whole."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import nn
from hetu.core.errors import ArgumentError, DTypeError, ShapeError, ValueRangeError
from hetu.core.graph import replace

BATCH, TIME, INPUTS, FEATURES = 3, 4, 5, 6


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def values_of(layer, x, *states, **options):
    """Outputs of a layer, and its variables by their last names, with random values."""
    rng = np.random.default_rng(0)
    nodes = [ht.placeholder(f"x{i}", a.shape) for i, a in enumerate((x, *states))]
    given = () if not states else (nodes[1],) if len(states) == 1 else (tuple(nodes[1:]),)
    y = layer(nodes[0], *given, **options)
    outputs = [y] if isinstance(y, ht.Node) else [y[0], *(y[1] if isinstance(y[1], tuple) else (y[1],))]
    ex = ht.Executor(outputs)
    weights = {v.name.removeprefix(layer.name + "/"): rng.normal(0, 0.5, v.shape) for v in layer.variables}
    for name, value in weights.items():
        ex.state[f"{layer.name}/{name}"] = value
    return ex.run(dict(zip(nodes, (x, *states)))), weights


def inputs(*shape):
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def rnn_step(w, x, h):
    return (np.tanh(np.concatenate([x, h], 1) @ w["weight"] + w["bias"]),)


def lstm_step(w, x, h, c):
    i, f, g, o = np.split(np.concatenate([x, h], 1) @ w["weight"] + w["bias"], 4, axis=1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def gru_step(w, x, h):
    x_r, x_z, x_n = np.split(x @ w["weight"] + w["bias"], 3, axis=1)
    h_r, h_z, h_n = np.split(h @ w["recurrent"] + w["recurrent_bias"], 3, axis=1)
    r, z = sigmoid(x_r + h_r), sigmoid(x_z + h_z)
    return ((1 - z) * np.tanh(x_n + r * h_n) + z * h,)


CELLS = {"RNN": (nn.RNN, rnn_step, 1), "LSTM": (nn.LSTM, lstm_step, 2), "GRU": (nn.GRU, gru_step, 1)}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_unrolled_layer_equals_a_loop(cell, started):
    make, step, count = CELLS[cell]
    with ht.scope("loop"):
        layer = make(INPUTS, FEATURES)
    x, states = inputs(BATCH, TIME, INPUTS), tuple(inputs(count, BATCH, FEATURES))
    (outputs, *last), weights = values_of(layer, x, *(states if started else ()))
    state = states if started else (np.zeros((BATCH, FEATURES)),) * count
    wanted = []
    for t in range(TIME):
        state = step(weights, x[:, t], *state)
        wanted.append(state[0])
    np.testing.assert_allclose(outputs, np.stack(wanted, 1), rtol=1e-4, atol=1e-5)
    for got, right in zip(last, state, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("time", [TIME, None], ids=["fixed", "open"])
@pytest.mark.parametrize("cell", CELLS)
def test_sequences_of_different_lengths_are_as_each_alone(cell, time):
    """In both directions; an unrolled layer must know its steps."""
    with ht.scope(f"lengths {time}"):
        ahead, back = (CELLS[cell][0](INPUTS, FEATURES) for _ in range(2))
    x, n = ht.placeholder("x", (None, time, INPUTS)), ht.placeholder("n", (None,), "int64")
    if cell == "RNN" and time is None:
        with pytest.raises(ShapeError, match="number of time steps of .* is not known"):
            ahead(x, lengths=n)
        return
    (there, _), (turned, last) = ahead(x, lengths=n), back(ht.flip(x, 1, lengths=n), lengths=n)
    ex = ht.Executor([there, ht.flip(turned, 1, lengths=n), *(last if isinstance(last, tuple) else (last,))])
    values, lengths = inputs(4, TIME, INPUTS), [TIME, 1, 0, TIME - 1]
    got = ex.run({x: values, n: lengths})
    for row, length in enumerate(lengths):
        alone = values[row : row + 1].copy()
        alone[:, length:] = 7.0  # what lies beyond an end does not matter
        there, turned, *states = ex.run({x: alone, n: [length]})
        for outputs, one in zip(got, (there, turned), strict=False):
            np.testing.assert_allclose(outputs[row], one[0], rtol=1e-5, atol=1e-6)
            assert not outputs[row, length:].any()
        for state, one in zip(got[2:], states, strict=True):
            np.testing.assert_allclose(state[row], one[0], rtol=1e-5, atol=1e-6)


TAKE_LENGTHS = {
    **{cell: lambda x, n, make=make: make(INPUTS, FEATURES)(x, lengths=n)[0] for cell, (make, *_) in CELLS.items()},
    "flip": lambda x, n: ht.flip(x, 1, lengths=n),
}


@pytest.mark.parametrize("name", TAKE_LENGTHS)
def test_lengths_are_one_of_each_sequence_and_none_is_longer_than_it(name):
    """Whatever takes them: where it is made of other operators, these would broadcast, or compare with any number."""
    x = ht.placeholder("x", (None, TIME, INPUTS))
    for dtype in ("float32", "bool"):
        with pytest.raises(DTypeError, match="wanted integers"):
            TAKE_LENGTHS[name](x, ht.placeholder("n", (None,), dtype))
    with pytest.raises(ShapeError, match=r"got lengths i64\[2\] of 3 sequences[\s\S]*pass one length for each"):
        TAKE_LENGTHS[name](ht.placeholder("x", (3, TIME, INPUTS)), ht.placeholder("n", (2,), "int64"))
    for dtype in ("uint64", "int64", "int8"):
        n = ht.placeholder("n", (None,), dtype)
        ex, values = ht.Executor([TAKE_LENGTHS[name](x, n)]), inputs(2, TIME, INPUTS)
        for wrong in ([2, TIME + 1], [TIME, -1])[: 1 if dtype[0] == "u" else 2]:
            with pytest.raises(ValueRangeError, match=rf"length {wrong[1]} at position \[1\] lies outside 0 to {TIME}"):
                ex.run({x: values, n: np.array(wrong, dtype)})
        with pytest.raises(ShapeError, match=r"got lengths \w+\[1\] of 2 sequences"):
            ex.run({x: values, n: np.array([1], dtype)})
        assert ex.run({x: values, n: np.array([0, TIME], dtype)})[0].shape[:2] == (2, TIME)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cell", CELLS)
def test_a_stack_in_both_directions_reads_each_sequence_as_alone(cell):
    with ht.scope("stack"):
        first, second = (nn.Bidirectional(CELLS[cell][0], size, FEATURES) for size in (INPUTS, 2 * FEATURES))

    def executor(steps, lengths):
        x = ht.placeholder("x", (None, steps, INPUTS))
        outputs, last = second(first(x, lengths=lengths)[0], lengths=lengths)
        states = last if isinstance(last, tuple) else (last,)
        return ht.Executor([outputs, *states, ht.gradients(ht.sum(outputs), [first.back.weight])[0]])

    values, lengths = inputs(4, TIME, INPUTS), [TIME, 1, 3, TIME - 1]
    together = executor(TIME, ht.placeholder("n", (None,), "int64"))
    (outputs, *states, slope), alone = together.run({"x": values, "n": lengths}), []
    for row, length in enumerate(lengths):
        own, *last, share = executor(length, None).run({"x": values[row : row + 1, :length]})
        np.testing.assert_allclose(outputs[row, :length], own[0], rtol=1e-5, atol=1e-6)
        for state, one in zip(states, last, strict=True):
            np.testing.assert_allclose(state[row], one[0], rtol=1e-5, atol=1e-6)
        alone.append(share)
        assert not outputs[row, length:].any()
    np.testing.assert_allclose(slope, sum(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "said"), [(nn.Linear, "of Linear, which"), ("LSTM", "of 'LSTM', which"), (min, "of <built-in")]
)
def test_what_reads_no_sequence_is_refused_before_it_is_called(kind, said):
    with pytest.raises(ht.errors.ArgumentError, match=f"Bidirectional {said}.*no kind of recurrent layer") as raised:
        nn.Bidirectional(kind, 4, 3)
    assert "fix: pass a class of recurrent layers: nn.LSTM, nn.GRU or nn.RNN" in str(raised.value)


def test_the_forget_gate_starts_open():
    with ht.scope("forget"):
        bias = nn.LSTM(2, 3).bias.attrs["init"]
    assert bias.reshape(4, 3).tolist() == [[0] * 3, [1] * 3, [0] * 3, [0] * 3]


def test_the_gradient_of_an_lstm_may_lie_where_its_gates_did():
    x = ht.placeholder("x", (BATCH, TIME, INPUTS))
    w, u, b = (ht.variable(f"w{i}", inputs(*s)) for i, s in enumerate([(INPUTS, 24), (FEATURES, 24), (24,)]))
    outputs, (_, c) = ht.lstm(x, w, u, b)
    slopes = ht.gradients(ht.sum(ht.square(outputs)) + ht.sum(c), [x, w, u, b])
    shared, apart = (ht.Executor(slopes, reuse=reuse).run({x: inputs(*x.shape)}) for reuse in (True, False))
    for got, wanted in zip(shared, apart, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_state_of_another_layer_is_refused():
    with ht.scope("states"):
        layer = nn.LSTM(INPUTS, FEATURES)
    x, h = ht.placeholder("x", (BATCH, TIME, INPUTS)), ht.placeholder("h", (BATCH, FEATURES + 1))
    with pytest.raises(ShapeError, match="got 1 states, wanted 2"):
        layer(x, h)
    with pytest.raises(ShapeError, match="built for inputs with 6 entries"):
        layer(x, (h, h))
    with pytest.raises(ArgumentError, match="NoneType None cannot be an input"):
        layer(x, (None, None))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(w, x, memory, heads, seen):
    """One head after the other."""
    q, k, v = (a @ w[f"{n}/weight"] + w[f"{n}/bias"] for n, a in (("query", x), ("key", memory), ("value", memory)))
    size = q.shape[-1] // heads
    parts = []
    for head in range(heads):
        columns = slice(head * size, (head + 1) * size)
        scores = q[..., columns] @ k[..., columns].swapaxes(1, 2) / np.sqrt(size)
        parts.append(softmax(np.where(seen, scores, -1e9)) @ v[..., columns])
    return np.concatenate(parts, -1) @ w["output/weight"] + w["output/bias"]


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention(causal):
    with ht.scope("self"):
        layer = nn.MultiHeadAttention(FEATURES, 3, causal=causal)
    x = inputs(BATCH, TIME, FEATURES)
    (value,), weights = values_of(layer, x)
    seen = np.tril(np.ones((TIME, TIME), bool)) if causal else np.ones((TIME, TIME), bool)
    np.testing.assert_allclose(value, attention(weights, x, x, 3, seen), rtol=1e-3, atol=1e-4)


def test_cross_attention_with_a_mask():
    with ht.scope("cross"):
        layer = nn.MultiHeadAttention(FEATURES, 2)
    x, memory = inputs(BATCH, TIME, FEATURES), inputs(BATCH, TIME + 3, FEATURES)
    mask = np.arange(TIME + 3) < TIME  # the padding of the memory is hidden
    (value,), weights = values_of(layer, x, memory, mask=mask)
    np.testing.assert_allclose(value, attention(weights, x, memory, 2, mask), rtol=1e-3, atol=1e-4)


def test_a_causal_block_does_not_look_ahead():
    with ht.scope("ahead"):
        block = nn.TransformerBlock(FEATURES, 2, causal=True)
    x = ht.placeholder("x", (1, TIME, FEATURES))
    ex = ht.Executor([block(x)])
    before = inputs(1, TIME, FEATURES)
    after = before.copy()
    after[:, 2:] += 1
    (first,), (second,) = ex.run({x: before}), ex.run({x: after})
    np.testing.assert_allclose(first[:, :2], second[:, :2], rtol=1e-5)
    assert (abs(first[:, 2:] - second[:, 2:]) > 1e-3).any()


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU, nn.LSTM])
def test_gradients_flow_through_time(make):
    """The gradient of the last output with respect to x equals finite differences."""
    with ht.scope("through"):
        layer = make(INPUTS, FEATURES)
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.5, v.shape) for v in layer.variables]

    def last(x, *values):
        outputs, _ = layer(x)
        return replace([outputs[:, -1]], dict(zip(layer.variables, values)))[0]

    ht.check_gradients(last, (BATCH, TIME, INPUTS), *weights, order=1)


def test_a_small_transformer_learns_to_copy():
    """Adam on one batch: the loss falls to a tenth."""
    with ht.scope("copy"):
        tokens, block, head = nn.Embedding(5, 16), nn.TransformerBlock(16, 2, causal=True), nn.Linear(16, 5)
    x = ht.placeholder("x", (None, 6), "int64")
    loss = ht.mean(ht.softmax_cross_entropy(head(block(tokens(x))), x))
    ex = ht.Executor({"train": [loss, ht.optim.Adam(0.01).minimize(loss)]})
    ids = np.random.default_rng(0).integers(0, 5, (8, 6))
    losses = [float(ex.run("train", {x: ids})[0]) for _ in range(40)]
    assert losses[-1] < losses[0] / 10
