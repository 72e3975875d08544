"""Collectives in buckets, beside the computation: the same values, fewer messages, less time on the wire."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import hetu as ht
from hetu.dist import Link, Parallel, VirtualClock, run_ranks
from hetu.dist.cut.bucket import AHEAD

LAYERS = 6


class Buckets(Parallel):
    """Data parallelism with a given bucket size."""

    def __init__(self, limit: int, zero: int = 0) -> None:
        super().__init__(zero=zero)
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


def trained(comm, limit: int, zero: int = 0, width: int = 16):
    loss, updates = model(width)
    ex = ht.Executor([loss, updates], strategy=Buckets(limit, zero), comm=comm)
    losses = [float(ex.run(batch(s, width))[0]) for s in range(4)]
    return losses, [s.node.op.name for s in ex.program(batch(0, width)).steps]


@pytest.mark.parametrize(("zero", "ranks", "width"), [(0, 2, 16), (1, 2, 16), (3, 2, 16), (3, 3, 10)])
@pytest.mark.parametrize("limit", [0, 64, 2000, 1 << 20])
def test_losses_equal_one_process(limit, zero, ranks, width):
    loss, updates = model(width)
    ex = ht.Executor([loss, updates])
    wanted = [float(ex.run(batch(s, width))[0]) for s in range(4)]
    for losses, _ in run_ranks(ranks, lambda comm: trained(comm, limit, zero, width)):
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)


@pytest.mark.parametrize(("limit", "buckets"), [(0, 0), (1100, LAYERS), (1 << 20, 1)])
def test_as_many_reductions_as_buckets(limit, buckets):
    counts = Counter(run_ranks(2, lambda comm: trained(comm, limit))[0][1])
    assert counts["all_reduce_start"] == counts["all_reduce_wait"] == buckets
    assert counts["all_reduce"] == 1 + (0 if limit else 2 * LAYERS)  # the loss, and every gradient when kept apart


SHARDED = [  # zero, limit, gathers, scatters; a gradient of the first layer needs no weight of its own
    (1, 0, 2 * LAYERS, 2 * LAYERS),
    (1, 1100, LAYERS, LAYERS),  # a weight and its bias
    (1, 1 << 20, 1, 1),
    (2, 1 << 20, 1, 1),
    (3, 0, 2 * LAYERS + LAYERS - 1, 2 * LAYERS),
    (3, 1100, LAYERS + LAYERS - 1, LAYERS),
    (3, 1 << 20, 2, 1),  # once forward, once backward
]


@pytest.mark.parametrize(("zero", "limit", "gathers", "scatters"), SHARDED)
def test_what_zero_sends_is_joined(zero, limit, gathers, scatters):
    counts = Counter(run_ranks(2, lambda comm: trained(comm, limit, zero))[0][1])
    for kind, wanted in (("all_gather", gathers), ("reduce_scatter", scatters)):
        assert counts[f"{kind}_start"] == counts[f"{kind}_wait"] == (wanted if limit else 0)
        assert counts[kind] == (0 if limit else wanted)
    assert counts["all_reduce"] == 1  # the loss


def test_weights_are_asked_for_ahead_and_only_so_far():
    names = run_ranks(2, lambda comm: trained(comm, 1100, zero=3))[0][1]
    asked = [names[:at].count("all_gather_start") for at, name in enumerate(names) if name == "all_gather_wait"]
    begun = [names[:at].count("all_gather_wait") for at, name in enumerate(names) if name == "all_gather_start"]
    forward = [k + AHEAD for k in range(LAYERS)]
    assert (
        asked[: LAYERS - 1] == forward[: LAYERS - 1]
    )  # while a layer computes, the next one's weights are on their way
    assert all(k - came <= AHEAD for k, came in enumerate(begun))


def test_scatters_go_on_during_backward_and_no_more_of_them_than_a_few_hold_memory():
    loss, updates = model()

    def steps(comm):
        ex = ht.Executor([loss, updates], strategy=Buckets(1100, zero=1), comm=comm)
        program = ex.program(batch(0))
        nodes = [s.node for s in program.steps]
        starts = [n for n in nodes if n.op.name == "reduce_scatter_start"]
        ends = [program.plan.storage(n, 0).last for n in starts]
        order = program.plan.order
        begins = [order.index(n) for n in starts]
        products = [at for at, n in enumerate(order) if n.op.name == "matmul"]
        return begins, ends, products

    begins, ends, products = run_ranks(2, steps)[0]
    assert sum(begins[0] < at for at in products) >= LAYERS - 1
    assert all(sum(b <= at <= e for b, e in zip(begins, ends)) <= AHEAD + 1 for at in begins)


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
