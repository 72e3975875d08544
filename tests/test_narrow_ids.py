"""Ids of few bits beside axes longer than these count: as ids of 64 bits, however they are computed.

Class 43 in 8 bits is not class 299 too, which is 43 in 8 bits. The oracle is the plain meaning of ids of 64 bits.
"""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import OPS
from hetu.core.simplify import interpret
from hetu.core.types import is_float

from .at_once import compiled_at_once
from .test_ops import as_tuple

IDS, ROWS, SLOTS = np.array([1, 5, 43, 127]), np.array([[1, 5, 43, 127]] * 3), np.array([[[0], [2]]] * 50)


def part(name, **attrs):
    """An operator on the part that a rank has of an axis of 1,000."""
    return lambda *nodes: [OPS[name](*nodes, **attrs, window=((a, a + 100, 1000),)) for a in (0, 100, 300)]


CASES = {  # what is built, ids, and the shapes of floats behind them
    "one_hot": (lambda ids: ht.one_hot(ids, 300), IDS),
    "take": (lambda ids, x: ht.take(x, ids), IDS, (300, 2)),
    "scatter_add": (lambda ids, x, y: ht.scatter_add(x, ids, y), IDS, (300, 2), (4, 2)),
    "take_along_axis": (lambda ids, x: ht.take_along_axis(x, ids, axis=1), ROWS, (3, 300)),
    "nll_loss": (lambda ids, x: ht.nll_loss(x, ids), IDS, (4, 300)),
    "cross_entropy": (lambda ids, x: ht.softmax_cross_entropy(x, ids), IDS, (4, 300)),
    "smoothed": (lambda ids, x: ht.softmax_cross_entropy(x, ids, label_smoothing=0.1, ignore_index=300), IDS, (4, 300)),
    "embedding_bag": (lambda ids, x: ht.embedding_bag(x, np.arange(300) % 9, ids - ids[:1]), IDS, (9, 2)),
    "sparse_matmul": (lambda ids, v, x: ht.sparse_matmul(ids, ids, v, x, size=300), IDS, (4,), (300, 2)),
    "sampled_matmul": (lambda ids, x, y: ht.sampled_matmul(ids, ids, x, y), IDS, (300, 2), (300, 2)),
    "flip": (lambda ids, x: ht.flip(x, 1, lengths=ids), IDS, (4, 300)),
    "moe_slots": (lambda ids: ht.moe_slots(ids, count=3, capacity=300), SLOTS[0]),
    "moe_dispatch": (lambda s, x, w: ht.moe_dispatch(x, s, w, experts=3, capacity=2), SLOTS, (50, 2, 4), (50, 2, 1)),
    "moe_combine": (lambda s, y, w: ht.moe_combine(y, s, w), SLOTS, (50, 3, 2, 4), (50, 2, 1)),
    "moe_products": (lambda s, x, y: OPS["moe_products"](x, y, s), SLOTS, (50, 2, 4), (50, 3, 2, 4)),
    "part of take": (lambda ids, x: part("take")(x, ids), IDS, (100, 2)),
    "part of take_along_axis": (lambda ids, x: part("take_along_axis")(x, ids), ROWS, (3, 100)),
    "part of put_along_axis_add": (lambda ids, x, y: part("put_along_axis_add")(x, ids, y), ROWS, (3, 100), (3, 4)),
    "part of scatter_rows": (lambda ids, x, y: part("scatter_rows")(x, ids, y), IDS, (100, 2), (4, 2)),
    "part of cross_entropy": (
        lambda ids, g, x, total: part("softmax_cross_entropy_dx")(g, x, ids, total), IDS, (4,), (4, 100), (4,)
    ),
    "part of sgd_rows": (lambda ids, p, rows, lr: part("sgd_rows")(p, ids, rows, lr), IDS, (100, 2), (4, 2), ()),
}  # fmt: skip


def made(build, dtype, ids, *shapes):
    """Outputs, with the gradients of the first if it has some, and a feed."""
    rng = np.random.default_rng(0)
    feed = {ht.placeholder("ids", ids.shape, dtype): ids.astype(dtype)}
    feed |= {ht.placeholder(f"x{k}", s, "float64"): np.asarray(rng.random(s)) for k, s in enumerate(shapes)}
    outputs, floats = as_tuple(build(*feed)), [n for n in feed if is_float(n.dtype)]
    if floats and len(outputs) == 1:
        outputs += tuple(ht.gradients(outputs[0], floats, ht.ones_like(outputs[0])))
    return outputs, feed


def runs(dtype, name):
    build, *given = CASES[name]
    outputs, feed = made(build, dtype, *given)
    return [(ht.Executor(list(outputs), passes=passes), feed) for passes in (None, [])]


@pytest.fixture(scope="module")
def all_compiled():
    compiled_at_once(lambda ex=ex, feed=feed: ex.program(feed) for n in CASES for ex, feed in runs("int8", n))


@pytest.mark.usefixtures("all_compiled")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64"])
@pytest.mark.parametrize("name", CASES)
def test_ids_of_few_bits_are_those_of_many(name, dtype):
    build, *given = CASES[name]
    wanted = interpret(*made(build, "int64", *given))
    for found in (interpret(*made(build, dtype, *given)), *(ex.run(feed) for ex, feed in runs(dtype, name))):
        for got, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, right, rtol=1e-6)
