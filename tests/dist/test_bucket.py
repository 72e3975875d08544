"""Collectives in buckets, beside the computation: the same values, fewer messages, less time on the wire."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import hetu as ht
from hetu.dist import Builder, Kept, Link, Parallel, Pipeline, VirtualClock, run_ranks
from hetu.dist.cut.bucket import AHEAD
from hetu.dist.cut.kept import owners_of

from ..at_once import only_bound
from ..pairs import in_turn, pairwise

LAYERS = 6


class Buckets(Builder):
    """Another builder's strategy, data parallelism by default, with a given bucket size."""

    def __init__(self, limit: int, builder: Builder | None = None) -> None:
        self.limit, self.builder = limit, builder or Parallel()

    def build(self, outputs, world_size):
        return replace(self.builder.build(outputs, world_size), bucket_bytes=self.limit)


def model(width: int = 16, clip: float | None = None):
    x, t = ht.placeholder("x", (None, width)), ht.placeholder("t", (None, width))
    with ht.scope("model"):
        h = x
        for _ in range(LAYERS):
            h = ht.nn.Linear(width, width, activation=ht.tanh)(h)
        loss = ht.mean(ht.mse_loss(h, t))
        return loss, ht.optim.Momentum(0.1, clip_norm=clip).minimize(loss)


def batch(step: int, width: int = 16, rows: int = 8):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(rows, width)).astype("f4"), "t": rng.normal(size=(rows, width)).astype("f4")}


@functools.cache
def alone(width: int = 16):
    loss, updates = model(width)
    ex = ht.Executor([loss, updates])
    return [float(ex.run(batch(s, width))[0]) for s in range(4)]


def trained(comm, limit: int, builder: Builder | None = None, width: int = 16):
    loss, updates = model(width)
    ex = ht.Executor([loss, updates], strategy=Buckets(limit, builder), comm=comm)
    losses = [float(ex.run(batch(s, width))[0]) for s in range(4)]
    return losses, [s.node.op.name for s in ex.program(batch(0, width)).steps]


class Numbered(Builder):
    """Another builder's strategy, in which every two layers have a bucket of their own."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder

    def build(self, outputs, world_size):
        strategy = self.builder.build(outputs, world_size)
        trained = dict.fromkeys(owners_of(outputs).values())
        for index, variable in enumerate(trained):
            kept = strategy.variables.get(variable.name, Kept(strategy.whole, strategy.whole))
            strategy.variables[variable.name] = replace(kept, bucket=index // 4)
        return strategy


PRODUCTS = ("matmul", "linear")  # the second without kernels, which take it apart
WAYS = {  # ranks, the layers of the first, updates in a step
    "whole batches": (2, LAYERS, 1, lambda zero: Parallel(zero=zero)),
    "micro-batches": (2, LAYERS, 1, lambda zero: Parallel(zero=zero, accumulate=4)),
    "own micro-batches": (2, LAYERS, 1, lambda zero: Parallel(zero=zero, accumulate=4, statistics="microbatch")),
    "stages": (4, LAYERS // 2, 1, lambda zero: Pipeline(2, 4, data=2, zero=zero)),
    "stages, gpipe": (4, LAYERS // 2, 1, lambda zero: Pipeline(2, 4, "gpipe", data=2, zero=zero)),
    "pipedream": (4, LAYERS // 2, 4, lambda zero: Pipeline(2, 4, "pipedream", data=2, zero=zero)),
}


@functools.cache
def stashed():
    """PipeDream's losses, with each micro-batch on one rank a stage and each gradient by itself."""
    return run_ranks(2, lambda comm: trained(comm, 0, Pipeline(2, 4, "pipedream"))[0])[0]


@pytest.mark.parametrize(("limit", "zero", "way"), pairwise([0, 2000, 1 << 20], [0, 1, 3], WAYS))
@pytest.mark.sampled(16)
def test_losses_equal_one_process(limit, zero, way):
    ranks, _, updates, builder = WAYS[way]
    wanted = alone() if updates == 1 else stashed()
    np.testing.assert_allclose(run_ranks(ranks, lambda c: trained(c, limit, builder(zero))[0]), [wanted] * ranks, 1e-5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("limit", [0, 64, 2000, 1 << 20])
def test_losses_where_parts_are_of_unequal_size(limit):
    found = run_ranks(3, lambda comm: trained(comm, limit, Parallel(zero=3), 10)[0])
    np.testing.assert_allclose(found, [alone(10)] * 3, 1e-5)


@pytest.mark.parametrize(("limit", "buckets"), [(0, 0), (1100, LAYERS), (1 << 20, 1)])
def test_as_many_reductions_as_buckets(limit, buckets):
    counts = Counter(run_ranks(2, lambda comm: trained(comm, limit))[0][1])
    assert counts["all_reduce_start"] == counts["all_reduce_wait"] == buckets
    assert counts["all_reduce"] == (0 if limit else 1 + 2 * LAYERS)  # the loss, and every gradient when kept apart


@pytest.mark.parametrize("reads", [False, True])
def test_a_sum_travels_with_gradients_unless_they_depend_on_it(reads):
    x, w = ht.placeholder("x", (None, 16)), ht.variable("w", ht.init.ones, (16, 16))
    mean = ht.mean(ht.tanh(ht.matmul(x, w)))
    loss = ht.exp(mean) if reads else mean + 1.0
    entries = [mean, ht.optim.SGD(0.1).minimize(loss)]
    wanted = ht.Executor(entries)
    values = [float(wanted.run({"x": batch(s)["x"]})[0]) for s in range(3)]

    def work(comm):
        ex = ht.Executor(entries, strategy=Parallel(), comm=comm)
        found = [float(ex.run({"x": batch(s)["x"]})[0]) for s in range(3)]
        steps = ex.program({"x": batch(0)["x"]}).steps
        return found, [(s.node.op.name, len(s.node.inputs)) for s in steps if s.node.op.collective]

    joined = [("all_reduce", 1), ("all_reduce_start", 1)] if reads else [("all_reduce_start", 2)]
    for found, sent in run_ranks(2, work):
        np.testing.assert_allclose(found, values, rtol=1e-5)
        assert sent == joined


SHARDED = [  # zero, limit, gathers and scatters of n layers; a gradient of the first needs no weight of its own
    (1, 0, lambda n: (2 * n, 2 * n)),
    (1, 1100, lambda n: (n, n)),  # a weight and its bias
    (1, 1 << 20, lambda n: (1, 1)),
    (2, 1 << 20, lambda n: (1, 1)),
    (3, 0, lambda n: (2 * n + n - 1, 2 * n)),
    (3, 1100, lambda n: (n + n - 1, n)),
    (3, 1 << 20, lambda n: (2, 1)),  # once forward, once backward
]


@pytest.mark.parametrize(("case", "way"), in_turn(2, SHARDED, WAYS))
@pytest.mark.sampled(8)
def test_what_zero_sends_is_joined(case, way):
    (zero, limit, wanted), (_, layers, updates, _) = case, WAYS[way]
    counts = Counter(node.op.name for node in steps(way, zero, limit)[0])
    for kind, once in zip(("all_gather", "reduce_scatter"), wanted(layers)):
        found = once * updates
        assert counts[f"{kind}_start"] == counts[f"{kind}_wait"] == (found if limit else 0)
        assert counts[kind] == (0 if limit else found)
    if way == "whole batches":
        assert counts["all_reduce_start" if limit else "all_reduce"] == 1  # the loss


@pytest.mark.parametrize(("way", "zero", "limit", "clip"), pairwise(WAYS, [0, 1, 3], [0, 1100], [None, 1e9]))
def test_what_has_a_number_travels_with_what_has_the_same(way, zero, limit, clip):
    """Whatever the limit is of what has none, and though a norm reads all gradients before any update does."""
    ranks, layers, updates, builder = WAYS[way]

    def body(comm):
        loss, updates = model(clip=None if way == "pipedream" else clip)  # which refuses norms of all gradients
        ex = ht.Executor([loss, updates], strategy=Buckets(limit, Numbered(builder(zero))), comm=comm)
        return [float(ex.run(batch(s))[0]) for s in range(4)], [s.node for s in ex.program(batch(0)).steps]

    (losses, nodes), *_ = run_ranks(ranks, body)
    np.testing.assert_allclose(losses, alone() if updates == 1 else stashed(), 1e-5)
    sums = [n for n in nodes if n.op.name in ("all_reduce_start", "reduce_scatter_start")]
    found = sorted(len(n.attrs.get("pieces", n.inputs)) for n in sums)
    assert [count for count in found if count > 1] == updates * [2] * (layers % 2) + updates * [4] * (layers // 2)
    assert len(found) - len([count for count in found if count > 1]) <= 1 + bool(clip)  # the loss, and norms together


def steps(way: str, zero: int = 3, limit: int = 1100):
    """What each rank runs, by the name of its way."""
    ranks, *_, builder = WAYS[way]

    def nodes(comm):
        loss, updates = model()
        ex = ht.Executor([loss, updates], strategy=Buckets(limit, builder(zero)), comm=comm)
        with only_bound():
            return [s.node for s in ex.program(batch(0)).steps]

    return run_ranks(ranks, nodes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_follow_one_another_though_the_first_waits_for_weights(way):
    """None begins while another waits: stages would get all of them late, and keep all of them in memory."""
    for nodes in steps(way):
        found = [node.tags.get("event", 0) for node in nodes if node.op.name in PRODUCTS]
        assert found == sorted(found) and len(found) > LAYERS


BESIDE = {  # the passes that find weights on their way since the pass before, by stage; a step begins without
    "micro-batches": (1,),  # the first backward pass; all later ones use the same weights
    "own micro-batches": (1,),
    "stages": (1, 1),
    "stages, gpipe": (1, 1),
    "pipedream": (5, 4),  # all but those that follow the update of their weights
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", BESIDE)
def test_the_first_weights_of_a_pass_are_asked_for_before_the_pass_before(way):
    ranks = steps(way)
    for rank, nodes in enumerate(ranks):
        asked, beside, passes = {}, 0, set()
        for at, node in enumerate(nodes):
            if node.op.name == "all_gather_start":
                asked[node.attrs["order"]] = at
            elif node.op.name == "all_gather_wait" and node.tags["event"] not in passes:
                passes.add(node.tags["event"])
                beside += any(n.op.name in PRODUCTS for n in nodes[asked[node.attrs["order"]] : at])
        assert beside == BESIDE[way][rank * len(BESIDE[way]) // len(ranks)]
        assert nodes[0].op.name == "all_gather_start"  # a later stage waits for it while it waits for the first


CONDITIONS = {
    "plain": {},
    "clip_norm": {"clip_norm": 0.1},
    "clip_value": {"clip_value": 0.1},
    "l2": {"weight_decay": 0.1},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "precision", "zero"), pairwise(CONDITIONS, ["float32", "float16"], [0, 1, 3]))
def test_what_an_optimizer_makes_of_gradients_leaves_them_in_buckets(name, precision, zero):
    """Whole gradients and the loss need one message; parts of them one more for it, a norm, and for being finite."""
    x, t = ht.placeholder("x", (None, 16)), ht.placeholder("t", (None, 16))
    loss = ht.mean(ht.mse_loss(ht.nn.Linear(16, 16)(ht.tanh(ht.nn.Linear(16, 16)(x))), t))
    entries = [loss, ht.optim.Momentum(0.1, **CONDITIONS[name]).minimize(loss)]
    wanted = ht.Executor(entries, precision=precision)
    losses = [float(wanted.run(batch(s))[0]) for s in range(4)]

    def work(comm):
        ex = ht.Executor(entries, strategy=Buckets(1 << 20, Parallel(zero=zero)), comm=comm, precision=precision)
        found = [float(ex.run(batch(s))[0]) for s in range(4)]
        nodes = [s.node for s in ex.program(batch(0)).steps if s.node.op.collective in ("all_reduce", "reduce_scatter")]
        return (
            found,
            Counter(n.inputs[0].dtype.name for n in nodes),
            [len(n.inputs) for n in nodes if not n.inputs[0].ndim],
        )

    norm, finite = bool(zero and name == "clip_norm"), bool(zero and precision == "float16")
    for found, messages, numbers in run_ranks(2, work):
        np.testing.assert_allclose(found, losses, rtol=1e-5 if precision == "float32" else 1e-2)
        assert messages == Counter(float32=1 + bool(zero) + norm, bool=finite)
        assert numbers == ([1] * (1 + norm + finite) if zero else [5])


def test_weights_are_asked_for_ahead_and_only_so_far():
    names = run_ranks(2, lambda comm: trained(comm, 1100, Parallel(zero=3)))[0][1]
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
        ex = ht.Executor([loss, updates], strategy=Buckets(1100, Parallel(zero=1)), comm=comm)
        program = ex.program(batch(0))
        nodes = [s.node for s in program.steps]
        starts = [n for n in nodes if n.op.name == "reduce_scatter_start"]
        ends = [program.plan.storage(n, 0).last for n in starts]
        order = program.plan.order
        begins = [order.index(n) for n in starts]
        products = [at for at, n in enumerate(order) if n.op.name in PRODUCTS]
        return begins, ends, products

    begins, ends, products = run_ranks(2, steps)[0]
    assert sum(begins[0] < at for at in products) >= LAYERS - 1
    assert all(sum(b <= at <= e for b, e in zip(begins, ends)) <= AHEAD + 1 for at in begins)


def test_backward_goes_on_between_start_and_wait():
    names = run_ranks(2, lambda comm: trained(comm, 1100))[0][1]
    first, last = names.index("all_reduce_start"), len(names) - names[::-1].index("all_reduce_start") - 1
    assert sum(name in PRODUCTS for name in names[first:last]) >= LAYERS - 1
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
