"""Gradients reduced in buckets while backward goes on: the same values, fewer messages, less time on the wire."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import hetu as ht
from hetu.dist import DataParallel, Link, VirtualClock, run_ranks

LAYERS = 6


class Buckets(DataParallel):
    """Data parallelism with a given bucket size."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def build(self, outputs, world_size):
        return replace(super().build(outputs, world_size), bucket_bytes=self.limit)


def model(width: int = 16):
    x, t = ht.placeholder("x", (None, width)), ht.placeholder("t", (None, width))
    with ht.scope("model"):
        h = x
        for _ in range(LAYERS):
            h = ht.nn.Linear(width, width, activation=ht.tanh)(h)
        loss = ht.mean(ht.mse_loss(h, t))
        return loss, ht.optim.Momentum(0.1).minimize(loss)


def batch(step: int, width: int = 16, rows: int = 8):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(rows, width)).astype("f4"), "t": rng.normal(size=(rows, width)).astype("f4")}


def trained(comm, limit: int):
    loss, updates = model()
    ex = ht.Executor([loss, updates], strategy=Buckets(limit), comm=comm)
    losses = [float(ex.run(batch(s))[0]) for s in range(4)]
    return losses, [s.node.op.name for s in ex.program(batch(0)).steps]


@pytest.mark.parametrize("limit", [0, 64, 2000, 1 << 20])
def test_losses_equal_one_process(limit):
    loss, updates = model()
    ex = ht.Executor([loss, updates])
    wanted = [float(ex.run(batch(s))[0]) for s in range(4)]
    for losses, _ in run_ranks(2, lambda comm: trained(comm, limit)):
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)


@pytest.mark.parametrize(("limit", "buckets"), [(0, 0), (1100, LAYERS), (1 << 20, 1)])
def test_as_many_reductions_as_buckets(limit, buckets):
    counts = Counter(run_ranks(2, lambda comm: trained(comm, limit))[0][1])
    assert counts["all_reduce_start"] == counts["all_reduce_wait"] == buckets
    assert counts["all_reduce"] == 1 + (0 if limit else 2 * LAYERS)  # the loss, and every gradient when kept apart


def test_backward_goes_on_between_start_and_wait():
    names = run_ranks(2, lambda comm: trained(comm, 1100))[0][1]
    first, last = names.index("all_reduce_start"), len(names) - names[::-1].index("all_reduce_start") - 1
    assert names[first:last].count("matmul") >= LAYERS - 1
    assert names.index("all_reduce_wait") > last


def test_buckets_and_overlap_save_time_at_a_latency_of_50_microseconds():
    """On the virtual clock: compute is measured, the wire is a model."""

    def seconds(comm, limit: int) -> float:
        clock = VirtualClock(comm, Link(latency=50e-6, bandwidth=1e9))
        loss, updates = model(32)
        ex = ht.Executor([loss, updates], strategy=Buckets(limit), comm=clock)
        ex.run(batch(0, 32))
        begin = clock.now
        for step in range(5):
            ex.run(batch(step, 32))
        return clock.now - begin

    def ratio(limit_a: int, limit_b: int) -> float:
        return max(run_ranks(2, lambda c: seconds(c, limit_a))) / max(run_ranks(2, lambda c: seconds(c, limit_b)))

    assert sorted(ratio(0, 1 << 20) for _ in range(3))[1] >= 1.2
