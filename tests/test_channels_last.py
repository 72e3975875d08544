"""What lies between convolutions follows them to images with their channels last, or stays; no number changes.

All sizes are equal, so that an axis mistaken for another is no error but another number.
"""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS, topological
from hetu.core.op import Role
from hetu.core.simplify import interpret
from hetu.passes import channels_last

SIZE = 16
IMAGES = (SIZE,) * 4
VECTOR = np.linspace(-1, 1, SIZE)


@ht.op(dims=lambda x, **attrs: OPS["cumsum"].dims(x, **attrs), infer=lambda x, *, axis: x)
def strangers_maximum(xp, x, *, axis: int):
    return np.maximum.accumulate(x, axis=axis)


@ht.op(dims="nch!w!->", infer=lambda x: ht.core.types.TensorType((), x.dtype), differentiable=False)
def strangers_steepness(xp, x):
    return xp.sum(xp.abs(x[:, :, 1:] - x[:, :, :-1]))


@ht.op(dims="a!b!c!d!->a!b!c!d!", infer=lambda x: x, differentiable=False)
def strangers_count(xp, x):
    return x + xp.reshape(xp.arange(x.size, dtype=x.dtype), x.shape)


@ht.op(dims=lambda x, *, factors: "abcd->abcd", infer=lambda x, *, factors: x)
def strangers_polynomial(xp, x, *, factors: tuple[float, ...]):
    return sum(factor * x**k for k, factor in enumerate(factors))


strangers_polynomial.grad(lambda g, out, x, *, factors: g * factors[1])  # any, too
strangers_maximum.grad(lambda g, out, x, *, axis: g * ht.exp(out))  # any, as only its layout counts

FOLLOW = {
    "joint": lambda y: ht.concat([y, ht.relu(y)], axis=1),
    "joint of pixels": lambda y: ht.concat([y, y * y], axis=2)[:, :, 3:19],
    "cut": lambda y: ht.relu(y)[:, 2:9] * y[:, -7:],
    "strided cut": lambda y: y[:, ::2, 1::3],
    "turned over": lambda y: ht.flip(y, axis=3) + y,
    "padding": lambda y: ht.pad(y, pad_width=((0, 0), (0, 0), (1, 2), (0, 3))),
    "gate": lambda y: y * ht.reshape(ht.sigmoid(ht.mean(y, axis=(2, 3))), (SIZE, SIZE, 1, 1)),
    "gate of pixels": lambda y: y * ht.sigmoid(ht.max(y, axis=1, keepdims=True)),
    "gate of rows": lambda y: y * ht.constant(VECTOR) + ht.constant(VECTOR[:, None]) * y,
    "mean and deviation": lambda y: (y - ht.mean(y, axis=(0, 3), keepdims=True)) * ht.rsqrt(ht.var(y, axis=1)[:, None]),
    "larger": lambda y: ht.interpolate(y, scale=2),
    "probabilities": lambda y: ht.softmax(y, axis=1) * ht.log_softmax(y, axis=2),
    "sums": lambda y: ht.cumsum(y, axis=3, reverse=True),
    "rolled": lambda y: ht.roll(y, shift=(1, 3), axis=(1, 2)),
    "chosen": lambda y: ht.where(ht.constant(VECTOR[:, None, None] > 0), y, ht.exp(y)),
    "stretched": lambda y: ht.broadcast_to(ht.sum(y, axis=2, keepdims=True), IMAGES) - y,
    "a stranger's": lambda y: strangers_maximum(y, axis=1),
    "four numbers that are no axes": lambda y: strangers_polynomial(y, factors=(1.0, 2.0, 0.0, 0.1)),
}
STAY = {
    "smaller": lambda y: ht.interpolate(y, 5),  # whose slopes are those of rows
    "dropout": lambda y: ht.dropout(y, 0.5),
    "product": lambda y: y @ y,
    "triangle": lambda y: ht.tril(y),
    "reshape": lambda y: ht.reshape(ht.reshape(y, (SIZE, 4, 4, SIZE, SIZE))[:, ::-1], IMAGES),
    "merged": lambda y: ht.reshape(y, (SIZE, SIZE, SIZE * SIZE, 1)),
    "turned": lambda y: ht.permute_dims(y, (1, 0, 2, 3)),
    "norm of rows": lambda y: ht.layer_norm(y, ht.constant(VECTOR), ht.constant(VECTOR)),
    "convolution of few": lambda y: ht.conv2d(y, ht.constant(np.ones((1, 16, 1, 1)))) + y,
    "one pixel of one image": lambda y: (
        ht.relu(ht.conv2d(y[:1, :, :1, :1], ht.constant(np.ones((16, 16, 1, 1))))) * 2.0
    ),
    "rolled as one row": lambda y: ht.roll(y, shift=3),
    "a new axis": lambda y: ht.sum(ht.expand_dims(y, 4) * ht.constant(VECTOR), axis=4),
    "more than images": lambda y: ht.sum(y * ht.constant(np.ones((2, 1, 1, 1, 1))), axis=0),
    "an axis of a larger table": lambda y: ht.sum(
        ht.take(ht.constant(np.ones((1, 1, 1, 1, 16))), ht.astype(y[:1, :, :1] > 0, "int64"), axis=4) + ht.max(y)
    ),
    "axes that are where they always are": lambda y: y + strangers_steepness(y) + ht.stop_gradient(strangers_count(y)),
    "less than images": lambda y: ht.max(y, axis=1) + ht.sum(y, axis=(0, 2)) + ht.mean(y),
}


def outputs_of(between):
    x, w = ht.placeholder("x", IMAGES, "float64"), ht.placeholder("w", (SIZE, SIZE, 1, 1), "float64")
    z = between(ht.relu(ht.conv2d(x, w)))
    loss = ht.sum(ht.tanh(z) * 0.1)
    return [loss, z, *ht.gradients(loss, [x, w])], [x, w]


def transposed(outputs):
    """The transposes of something as large as images."""
    found = [n for n in topological(outputs) if n.op.name == "permute_dims" and n.tensor.size > SIZE**3]
    return [n for n in found if n.inputs[0].role is not Role.PLACEHOLDER and n not in outputs]


@pytest.mark.parametrize("name", [*FOLLOW, *STAY])
def test_nothing_changes(name):
    outputs, inputs = outputs_of((FOLLOW | STAY)[name])
    made = channels_last(outputs)
    rng = np.random.default_rng(0)
    feed = {n: rng.standard_normal(n.shape) for n in inputs}
    for node in topological(outputs):
        if node.role is Role.VARIABLE:
            feed[node] = np.zeros(node.shape, node.dtype)
    for before, after in zip(interpret(outputs, feed), interpret(made, feed), strict=True):
        np.testing.assert_allclose(after, before, rtol=0, atol=1e-11 * np.abs(before).max())


@pytest.mark.parametrize("name", FOLLOW)
def test_what_follows_needs_no_transposes(name):
    outputs, _ = outputs_of(FOLLOW[name])
    assert transposed(channels_last(outputs)) == []
