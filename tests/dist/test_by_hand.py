"""Collectives that a user writes: values, gradients by finite differences over all ranks, training, and mistakes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import hetu as ht
from hetu import dist
from hetu.core.errors import ArgumentError, AxisError, GradientError, GraphError, ShapeError
from hetu.core.op import Role
from hetu.dist import DataParallel, Pipeline, run_ranks

from .models import losses, mlp

N = 3
VERBS = {  # what it does to the arrays of all ranks
    "all_reduce": (lambda x: dist.all_reduce(x), lambda xs: [sum(xs)] * N),
    "all_reduce of two": (
        lambda x: dist.all_reduce(x, ranks=(2, 0)) if dist.world().rank != 1 else x,
        lambda xs: [xs[0] + xs[2], xs[1], xs[0] + xs[2]],
    ),
    "all_gather": (lambda x: dist.all_gather(x, 1), lambda xs: [np.concatenate(xs, 1)] * N),
    "all_gather at the end": (lambda x: dist.all_gather(x, -1), lambda xs: [np.concatenate(xs, -1)] * N),
    "reduce_scatter": (lambda x: dist.reduce_scatter(x, 1), lambda xs: np.split(sum(xs), N, 1)),
    "all_to_all": (
        lambda x: dist.all_to_all(x, 1, 0),
        lambda xs: [np.concatenate([np.split(x, N, 1)[r] for x in xs], 0) for r in range(N)],
    ),
    "broadcast": (lambda x: dist.broadcast(x, 1), lambda xs: [xs[1]] * N),
    "reduce": (lambda x: dist.reduce(x, 2), lambda xs: [0 * xs[0], 0 * xs[1], sum(xs)]),
    "send_recv": (lambda x: dist.send_recv(x, [(0, 1), (1, 2)]), lambda xs: [0 * xs[0], xs[0], xs[1]]),
    "send_recv in a ring": (lambda x: dist.send_recv(x, [(0, 1), (1, 2), (2, 0)]), lambda xs: [xs[2], *xs[:2]]),
}
RNG = np.random.default_rng(0)
GIVEN = [RNG.normal(size=(2, 6, 3)) for _ in range(N)]


@pytest.mark.parametrize("verb", VERBS)
def test_values(verb):
    write, wanted = VERBS[verb]

    def run(comm):
        x = ht.placeholder("x", (2, 6, 3), "float64")
        return ht.Executor([write(x)], comm=comm).run({x: GIVEN[comm.rank]})[0]

    for found, value in zip(run_ranks(N, run, rendezvous=True), wanted(GIVEN)):
        np.testing.assert_allclose(found, value, rtol=1e-12)


@pytest.mark.parametrize("verb", VERBS)
def test_gradients_are_those_of_the_sum_over_all_ranks(verb):
    write, wanted = VERBS[verb]
    weights = [np.random.default_rng(r).normal(size=value.shape) for r, value in enumerate(wanted(GIVEN))]

    def total(xs):
        return sum(float(np.sum(np.sin(y) * w)) for y, w in zip(wanted(xs), weights))

    def run(comm):
        x = ht.placeholder("x", (2, 6, 3), "float64")
        loss = ht.sum(ht.sin(write(x)) * weights[comm.rank])
        return ht.Executor(ht.gradients(loss, [x]), comm=comm).run({x: GIVEN[comm.rank]})[0]

    found, step = run_ranks(N, run), 1e-6
    direction = [np.random.default_rng(9 + r).normal(size=x.shape) for r, x in enumerate(GIVEN)]
    up, down = ([x + s * d for x, d in zip(GIVEN, direction)] for s in (step, -step))
    slope = sum(float(np.sum(g * d)) for g, d in zip(found, direction))
    assert slope == pytest.approx((total(up) - total(down)) / (2 * step), rel=1e-6)


def test_second_order():
    def run(comm):
        x = ht.placeholder("x", (), "float64")
        (first,) = ht.gradients(dist.all_reduce(x) ** 3, [x])
        return float(ht.Executor(ht.gradients(first, [x]), comm=comm).run({x: 1.0 + comm.rank})[0])

    # n ranks differentiate S^3, then n ranks each their n 3 S^2: n^2 6 S
    assert run_ranks(2, run) == [4 * 6 * 3.0] * 2


def test_unknown_sizes_and_scalars():
    def run(comm):
        x = ht.placeholder("x", (None, 4))
        y = dist.all_gather(dist.reduce_scatter(dist.all_gather(x), axis=0), axis=1)
        ex = ht.Executor([y, dist.send_recv(ht.sum(x), [(0, 1)])], comm=comm)
        return [[value.tolist() for value in ex.run({x: np.ones((size, 4)) + comm.rank})] for size in (1, 3)]

    first, second = run_ranks(2, run)
    assert np.shape(first[1][0]) == (3, 8) and first[0][1] == 0.0
    assert second[0][0] == [[2.0] * 4 + [4.0] * 4] and [values[1] for values in second] == [4.0, 12.0]


# -- training by hand ------------------------------------------------------------------------------------------------


def data_parallel(comm, steps=20):
    """Each rank feeds its part of the batch; the gradients are averaged by hand."""
    x, t = ht.placeholder("x", (None, 10)), ht.placeholder("t", (None,), "int64")
    with ht.scope("mlp"):
        h = ht.nn.Linear(10, 16, activation=ht.relu, name="up")(x)
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(16, 5, name="down")(h), t))
        optimizer = ht.optim.Adam(0.01)
        found = optimizer.minimize(loss).gradients
        averaged = {v: dist.all_reduce(g) / comm.world_size for v, g in found.items()}
        updates = optimizer.apply(averaged)
    ex = ht.Executor([dist.all_reduce(loss) / comm.world_size, updates], comm=comm)
    parts = [{n: np.split(v, comm.world_size)[comm.rank] for n, v in feed.items()} for feed in mlp()[1][:steps]]
    kinds = Counter(s.node.op.name for s in ex.program(parts[0]).steps if s.node.role is Role.COMMUNICATION)
    return [float(ex.run(part)[0]) for part in parts], kinds


@pytest.mark.parametrize("ranks", [2, 4])
def test_data_parallelism_by_hand_is_that_of_the_strategy(ranks):
    alone = losses(mlp)
    strategy = run_ranks(ranks, lambda comm: losses(mlp, DataParallel(), comm))[0]
    for found, kinds in run_ranks(ranks, data_parallel):
        np.testing.assert_allclose(found, alone, atol=1e-5, rtol=0)
        np.testing.assert_allclose(found, strategy, atol=1e-5, rtol=0)
        assert kinds == {"all_reduce": 4 + 1}


def test_tensor_parallelism_by_hand():
    """Columns of the first weight and rows of the second on each rank; all ranks differentiate one shared loss."""
    rng = np.random.default_rng(2)
    w, v, given = (rng.normal(size=s).astype(np.float32) for s in ((6, 8), (8, 3), (5, 6)))

    def run(comm=None):
        rank, n = (comm.rank, comm.world_size) if comm else (0, 1)
        x = ht.placeholder("x", (5, 6))
        with ht.scope("by_hand"):
            up = ht.variable("up", np.split(w, n, 1)[rank])
            down = ht.variable("down", np.split(v, n, 0)[rank])
        y = ht.tanh(x @ up) @ down
        loss = ht.mean(ht.square(dist.all_reduce(y) if comm else y))
        ex = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss / n)], comm=comm)
        return [float(ex.run({x: given})[0]) for _ in range(10)]

    for found in run_ranks(2, run):
        np.testing.assert_allclose(found, run(), rtol=1e-5)


# -- mistakes --------------------------------------------------------------------------------------------------------


def test_arguments_that_do_not_fit():
    x = ht.placeholder("x", (4, 5))
    with pytest.raises(ShapeError, match="axis 1 of size 5 does not divide into 2 parts"):
        dist.reduce_scatter(x, 1, ranks=(0, 1))
    with pytest.raises(AxisError, match="axis 2 of an array of 2 axes"):
        dist.all_gather(x, 2, ranks=(0, 1))
    with pytest.raises(ArgumentError, match=r"there is no reduction 'sun'[\s\S]*did you mean 'sum'"):
        dist.all_reduce(x, "sun")
    with pytest.raises(ArgumentError, match="splits and joins axis 0"):
        dist.all_to_all(x, 0, -2)
    with pytest.raises(ArgumentError, match="ranks"):
        dist.send_recv(x, [(0, 1), (0, 2)])
    with pytest.raises(ArgumentError, match="ranks"):
        dist.all_reduce(x, ranks=())


def test_a_maximum_has_no_gradient():
    x = ht.placeholder("x", (3,))
    with pytest.raises(GradientError, match="all_reduce"):
        ht.gradients(ht.sum(dist.all_reduce(x, "max", ranks=(0, 1))), [x])


def test_a_rank_that_does_not_exist():
    def run(comm):
        return ht.Executor([dist.all_reduce(ht.constant(1.0), ranks=(0, 1, 2))], comm=comm).run({})

    with pytest.raises(ArgumentError, match=r"all_reduce on \(0, 1, 2\).* names rank 2 of 2"):
        run_ranks(2, run)


def test_without_a_communicator():
    y = dist.all_reduce(ht.placeholder("x", (3,)))
    with pytest.raises(ArgumentError, match=r"communicates, but the executor has no communicator") as caught:
        ht.Executor([y]).run({"x": [1.0, 2.0, 3.0]})
    assert "comm=ht.dist.world()" in str(caught.value) and "test_by_hand.py" in str(caught.value)
    assert ht.Executor([y], comm=dist.world()).run({"x": [1.0, 2.0, 3.0]})[0].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("strategy", [DataParallel(), Pipeline(1)])
def test_under_a_strategy(strategy):
    graph, _ = mlp()
    loss = dist.all_reduce(graph["train"][0])
    with pytest.raises(GraphError, match="written by hand, but a strategy puts in all communication itself"):
        ht.Executor([loss], strategy=strategy)
