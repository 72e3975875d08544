"""AutoDist's builders: all train as one process does, and each puts variables where its name says."""

from __future__ import annotations

import functools
import itertools
import random

import numpy as np
import pytest

import hetu as ht
from hetu.core.graph import topological
from hetu.core.op import Role
from hetu.dist import Strategy, run_ranks
from hetu.plan import builders
from hetu.plan.costs.profile import MachineProfile
from hetu.plan.simulation.simulate import simulate

from ..dist.models import MODELS, losses, mlp

BUILDERS = {
    "ps": builders.PS(),
    "balanced": builders.LoadBalancedPS(),
    "partitioned": builders.PartitionedPS(),
    "uneven": builders.UnevenPartitionedPS(),
    "all-reduce": builders.AllReduce(1 << 10),
    "partitioned-all-reduce": builders.PartitionedAllReduce(),
    "random-axis": builders.RandomAxisAllReduce(1),
}
STEPS = 3


@functools.cache
def alone(name: str) -> list[float]:
    return losses(MODELS[name], steps=STEPS)


def built(name: str, graph, ranks: int) -> Strategy:
    outputs = [graph["train"][0], *graph["train"][1].values()]
    return BUILDERS[name].build(outputs, ranks)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("model", "ranks"), [("mlp", 3), ("transformer", 2)])
@pytest.mark.sampled(10)
def test_training_equals_that_of_one_process_by_the_strategy_as_json_too(name, model, ranks):
    strategy = built(name, MODELS[model]()[0], ranks)
    again = Strategy.from_json(strategy.to_json())
    assert again == strategy and again.to_json() == strategy.to_json()
    for found in run_ranks(ranks, lambda comm: losses(MODELS[model], Strategy.from_json(again.to_json()), comm, STEPS)):
        np.testing.assert_allclose(found, alone(model), rtol=2e-6)


def homes(strategy: Strategy) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Variable -> (ranks, rows of each part) of what is kept somewhere in particular."""
    graph, _ = mlp()
    nodes = {n.name: n for n in topological([*graph["train"][1].values()]) if n.role is Role.VARIABLE}
    found = {}
    for name, kept in strategy.variables.items():
        if nodes[name].attrs["trainable"]:
            pieces = kept.store.pieces(nodes[name].shape)
            found[name] = tuple(sorted(pieces)), tuple(pieces[r].shape[0] for r in sorted(pieces))
    return found


def test_homes_are_where_the_names_say():
    graph, _ = mlp()  # weights (10, 16) and (16, 5)
    of = {name: homes(built(name, graph, 4)) for name in BUILDERS}
    assert all(ranks == (0,) for ranks, _ in of["ps"].values())
    assert [r for r, _ in of["balanced"].values()] == [(0,), (2,), (1,), (3,)]
    assert of["partitioned"]["mlp/up/weight"] == ((0, 1), (5, 5))
    assert of["partitioned"]["mlp/down/weight"] == ((2, 3), (8, 8))
    assert of["partitioned"]["mlp/down/bias"][1] == (5,)  # 5 rows: no part of 2 to 4 is even
    assert of["uneven"]["mlp/up/weight"][1] == (3, 3, 4)
    assert of["uneven"]["mlp/down/weight"][1] == (5, 5, 6)
    assert of["all-reduce"] == {}
    assert of["partitioned-all-reduce"]["mlp/up/weight"] == ((0, 1, 2, 3), (2, 3, 2, 3))
    assert len({str(BUILDERS["random-axis"].__class__(s).build([graph["train"][0]], 2)) for s in range(20)}) > 1


def test_the_largest_load_is_at_most_four_thirds_of_the_best():
    for seed in range(12):
        draw = random.Random(seed)
        sizes = [draw.randint(1, 60) for _ in range(7)]
        with ht.scope(f"load_{seed}"):
            variables = [ht.variable(f"v{i}", ht.init.zeros, (size,)) for i, size in enumerate(sizes)]
        kept = builders.LoadBalancedPS().build([ht.sum(ht.concat(variables, axis=0))], 3).variables
        load = [sum(s for s, v in zip(sizes, variables) if kept[v.name].store.ranks == (r,)) for r in range(3)]
        every = itertools.product(range(3), repeat=len(sizes))
        best = min(max(sum(s for s, at in zip(sizes, p) if at == r) for r in range(3)) for p in every)
        assert sum(load) == sum(sizes) and max(load) <= 4 / 3 * best


def test_one_home_has_all_the_traffic_and_balanced_homes_share_it():
    graph, _ = mlp(ht.optim.SGD(0.1))
    shapes = {"x": (12, 10), "t": (12,)}
    bytes_of = {v.name: int(v.tensor.nbytes) for v in graph["train"][1]}
    most = {}
    for name in ("ps", "balanced", "partitioned"):
        sent = simulate(graph["train"], BUILDERS[name], MachineProfile(), world_size=4, shapes=shapes).sent
        assert all(a != b for a, b in sent)
        loads = [sum(n for (a, _), n in sent.items() if a == rank) for rank in range(4)]
        most[name] = max(loads)
    assert most["ps"] >= 3 * sum(bytes_of.values())  # the new values, to three others
    assert most["partitioned"] <= most["balanced"] < 0.75 * most["ps"]
