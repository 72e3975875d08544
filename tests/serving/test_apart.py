"""Which rows may share a run, of graphs that nobody wrote: where they are said to be apart, they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import hetu as ht
from hetu.serving.apart import rows_apart

X = np.random.default_rng(0).standard_normal((11, 4)).astype("float32")
TABLE = ht.constant(np.random.default_rng(1).standard_normal((3, 4)).astype("float32"))

MIXED: list[Callable[[np.random.Generator, ht.Node], ht.Node]] = [  # of rows, or not, as an axis is drawn
    lambda draw, x: ht.tanh(x),
    lambda draw, x: ht.softmax(x, axis=draw.integers(2)),
    lambda draw, x: ht.cumsum(x, axis=draw.integers(2)),
    lambda draw, x: ht.flip(x, axis=draw.integers(2)),
    lambda draw, x: ht.roll(x, 1, axis=draw.integers(2)),
    lambda draw, x: ht.sort(x, axis=draw.integers(2)),
    lambda draw, x: x - ht.max(x, axis=draw.integers(2), keepdims=True),
    lambda draw, x: ht.sum(x[:, None, :] * x[None, :, :], axis=draw.integers(2)),
    lambda draw, x: ht.matrix_transpose(ht.cumsum(ht.matrix_transpose(x), axis=draw.integers(2))),
    lambda draw, x: ht.reshape(ht.softmax(ht.reshape(x, (-1, 2)), axis=draw.integers(2)), x.shape),
    lambda draw, x: ht.take((x, TABLE)[draw.integers(2)], ht.argmax(x[:, :3], axis=1), axis=0),
    lambda draw, x: x + ht.full((x.shape[0], (1, 4)[draw.integers(2)]), 0.5),
    lambda draw, x: x * ht.astype(ht.arange(1, 5), "float32") if draw.integers(2) else x / x.shape[0],
    lambda draw, x: ht.reshape(ht.reshape(x, (-1, 2, 2))[:, ::-1], x.shape),
    lambda draw, x: x @ ht.matrix_transpose(x) @ x if draw.integers(2) else x @ ht.matrix_transpose(TABLE) @ TABLE,
    lambda draw, x: (
        ht.pad(x, ((1, 0), (0, 0)))[: x.shape[0]] if draw.integers(2) else ht.pad(x[:, 1:], ((0, 0), (1, 0)))
    ),
    lambda draw, x: (lambda axis: ht.squeeze(ht.nn.LSTM(4, 4)(ht.expand_dims(x, axis))[0], axis))(draw.integers(2)),
]


def drawn(x: ht.Node, draw: np.random.Generator) -> ht.Node:
    values = [x]
    for _ in range(draw.integers(1, 5)):
        made = MIXED[draw.integers(len(MIXED))](draw, values[draw.integers(len(values))])
        values.append(made + values[draw.integers(len(values))] if draw.integers(2) else made)
    return values[-1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("lot", range(12))
def test_no_drawn_graph_mixes_rows_that_are_said_to_be_apart(lot: int) -> None:
    found = 0
    for seed in range(20):
        x = ht.placeholder("x", (None, 4))
        with ht.scope("drawn"):
            y = drawn(x, np.random.default_rng([lot, seed]))
        if rows_apart([y], {"x": x}, {}):
            ex = ht.Executor([y], passes=[])
            alone = [ex.run({"x": part})[0] for part in (X[:1], X[1:4], X[4:6], X[6:])]
            np.testing.assert_allclose(ex.run({"x": X})[0], np.concatenate(alone), rtol=1e-4, atol=1e-5)
            found += 1
    assert 0 < found < 20  # some of each kind
