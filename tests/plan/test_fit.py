"""Steps that are made to fit: the same numbers to the last bit, in less memory."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import nn
from hetu.core.errors import BudgetError
from hetu.core.graph import OPS, topological
from hetu.core.memory import plan
from hetu.core.subgraph import SubGraph
from hetu.dist import DataParallel, Pipeline, SerialComm, run_ranks
from hetu.passes import chosen_passes
from hetu.plan import MachineProfile, Within, simulate
from hetu.plan.memory.fit import fit
from hetu.plan.memory.split import BatchSplit, batched

from ..dist.models import BATCH, losses, transformer


def vgg(batch: int = 48, size: int = 24):
    """Blocks of convolutions and a pooling, as in VGG."""
    x, t = ht.placeholder("x", (None, 3, size, size)), ht.placeholder("t", (None,), "int64")
    h, channels, images = x, 3, size
    with ht.scope("vgg"):
        for block, features in enumerate((24, 28)):
            for k in range(4):
                h = ht.relu(nn.Conv2d(channels, features, 3, padding=1, name=f"conv_{block}_{k}")(h))
                channels = features
            h, images = ht.avg_pool2d(h, 2), images // 2
        y = nn.Linear(channels * images**2, 10, name="head")(ht.flatten(h, 1))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        graph = {"train": [loss, ht.optim.Momentum(0.05).minimize(loss)]}
    rng = np.random.default_rng(0)
    feed = {"x": rng.normal(size=(batch, 3, size, size)).astype("float32"), "t": rng.integers(0, 10, batch)}
    return graph, feed


ROWS = 2048


def deep(layers=8):
    """Layers that keep much more of a batch than they have weights."""
    x, t = ht.placeholder("x", (None, 8)), ht.placeholder("t", (None, 8))
    h = x
    with ht.scope("deep"):
        for k in range(layers):
            h = nn.Linear(8, 8, activation=ht.tanh, name=f"layer_{k}")(h)
        loss = ht.mean((h - t) ** 2)
        graph = {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}
    rng = np.random.default_rng(0)
    return graph, [dict(zip("xt", rng.normal(size=(2, ROWS, 8)).astype("float32"))) for _ in range(3)]


def arena(entries, feed) -> int:
    shapes = {name: value.shape for name, value in feed.items()}
    fetches, updates, _ = SubGraph("step", entries).lower(shapes, chosen_passes(None))
    return plan(fetches, updates).arena_bytes


@pytest.mark.compiled
def test_a_cnn_trains_in_half_of_its_memory_with_the_same_bits():
    graph, feed = vgg()
    outside = sum(v.nbytes for v in feed.values()) + sum(int(v.tensor.nbytes) for v in graph["train"][1])
    whole = arena(graph["train"], feed)
    tight = Within(DataParallel(), whole // 2 + outside)
    alone, small = ht.Executor(graph), ht.Executor(graph, strategy=tight, comm=SerialComm())
    assert sorted(alone.state) == sorted(small.state)
    assert small.program("train", feed).plan.arena_bytes <= whole // 2 < alone.program("train", feed).plan.arena_bytes
    for _ in range(2):  # after the first step momenta are gradients
        assert alone.run("train", feed)[0] == small.run("train", feed)[0]
        for name in alone.state:
            np.testing.assert_array_equal(alone.state[name], small.state[name])


@pytest.mark.compiled
def test_ranks_recompute_their_own_part():
    graph, _ = deep()
    whole = simulate(
        graph["train"], DataParallel(), MachineProfile(), world_size=2, shapes={"x": (ROWS, 8), "t": (ROWS, 8)}
    )
    tight = Within(DataParallel(), max(whole.peak) * 6 // 10)
    small = simulate(graph["train"], tight, MachineProfile(), world_size=2, shapes={"x": (ROWS, 8), "t": (ROWS, 8)})
    assert max(small.peak) <= max(whole.peak) * 6 // 10 and small.time > whole.time
    alone = losses(deep, steps=3)
    for found in run_ranks(2, lambda comm: losses(deep, tight, comm, 3)):
        np.testing.assert_allclose(found, alone, rtol=2e-6)


def test_what_cannot_fit_says_what_is_missing():
    graph, feed = vgg(batch=4, size=8)
    fetches, updates, _ = SubGraph("step", graph["train"]).lower({k: v.shape for k, v in feed.items()}, [])
    with pytest.raises(BudgetError, match=r"a step needs at least [\d,]+ bytes beside variables, [\d,]+ more than"):
        fit(fetches, updates, 1000)


# -- splitting ----------------------------------------------------------------------------------------------------


def values(outputs, feed):
    return ht.Executor([*outputs], passes=[]).run(feed)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_dropped_values_change_nothing_however_many_parts(parts):
    rng = np.random.default_rng(0)
    x, w = ht.placeholder("x", (7, 6)), ht.placeholder("w", (6, 6))
    a = ht.tanh(x @ w)
    b = ht.softmax(ht.reshape(a, (7, 2, 3)) * 2.0, axis=-1)
    c = ht.exp(ht.reshape(b, (7, 6)) + x)
    loss = ht.sum(c * a)
    outputs = [loss, *ht.gradients(loss, [x, w])]
    feed = {"x": rng.normal(size=(7, 6)), "w": rng.normal(size=(6, 6))}
    wanted = values(outputs, feed)
    everything = set(batched(outputs))
    for dropped in ({a}, {b, c}, everything):
        for one, other in zip(values(BatchSplit(outputs, dropped, parts).run(), feed), wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_only_what_works_sample_by_sample_is_split():
    x, w = ht.placeholder("x", (8, 4)), ht.placeholder("w", (4, 4))
    y = ht.relu(x @ w)
    mean = ht.mean(y, axis=0)  # joins samples
    swapped = ht.permute_dims(y, (1, 0))
    found = batched([mean, swapped, ht.cumsum(y, axis=0), ht.cumsum(y, axis=1)])
    assert [(n.op.name, axis) for n, (_, axis) in found.items()] == [
        ("matmul", 0),
        ("relu", 0),
        ("permute_dims", 1),
        ("cumsum", 0),
    ]
    made = BatchSplit([ht.sum(y)], {y}, 4).run()
    assert [n.op.name for n in topological(made)].count("matmul") == 1  # it is kept: only relu is in parts
    assert BatchSplit([y], {y}, 4).run() == (y,)  # asked for, so it has to be there


def test_the_batch_is_split_where_it_stands():
    x = ht.placeholder("x", (7, 3))
    moved = ht.permute_dims(ht.exp(x), (1, 0))
    outputs = [ht.sin(moved) * 2.0]
    feed = {"x": np.random.default_rng(0).normal(size=(7, 3))}
    made = BatchSplit(outputs, set(batched(outputs)), 3).run()
    assert [n.attrs["axis"] for n in topological(made) if n.op.name == "set_rows"] == [1, 1]
    np.testing.assert_array_equal(values(made, feed)[0], values(outputs, feed)[0])


def test_an_assembled_array_is_filled_in_place():
    x = ht.placeholder("x", (8, 1000))
    h = ht.exp(x)
    (y,) = BatchSplit([ht.sin(h)], {h}, 4).run()
    planned = plan([y], {})
    assert planned.arena_bytes <= 4 * 8 * 1000 + 4 * 2 * 1000 + 3 * 64  # the result and one part
    assert len({id(planned.storage(n)) for n in planned.order if n.op in (OPS["set_rows"], OPS["pad"])}) == 1


def repeated():
    """Batches that take more than what instructions are bound to."""
    graph, feeds = transformer()
    return graph, [{name: np.tile(value, (40, 1)) for name, value in feed.items()} for feed in feeds]


def test_the_stages_of_a_pipeline_fit_each_for_itself_and_use_again_what_other_ranks_have_sent():
    shapes, plain = {"x": (40 * BATCH, 6), "t": (40 * BATCH, 6)}, Pipeline(2, 2, "gpipe")
    graph = transformer()[0]["train"]
    free = simulate(graph, plain, MachineProfile(), world_size=2, shapes=shapes)
    assert free.peak[1] > 1.5 * free.peak[0]  # of logits and weights
    within = Within(plain, int(0.95 * free.peak[1]))
    tight = simulate(graph, within, MachineProfile(), world_size=2, shapes=shapes)
    assert tight.peak[0] == free.peak[0] and tight.peak[1] <= within.nbytes and tight.time >= free.time
    wanted = losses(repeated, steps=3)
    for found in run_ranks(2, lambda comm: losses(repeated, within, comm, 3)):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)
