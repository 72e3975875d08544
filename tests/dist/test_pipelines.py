"""Pipelines that are not alike train as one process does: other stages, other ranks in a stage, other shares."""

from __future__ import annotations

import math
import re
import sys

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.core.graph import topological
from hetu.core.op import Role
from hetu.dist import MEGATRON, Pipeline, Pipelines, Staged, Strategy, run_ranks
from hetu.dist.comm.world import world
from hetu.plan import MachineProfile, simulate

from ..pairs import nightly
from .test_launch import heturun
from .test_pipeline import MODELS, alone, staged_mlp, train

SPLIT = MEGATRON | ht.dist.RuleBook({"*/weight": 1})
CASES = {
    "stages of 2 and 1": ([[(0, 1), (2,)]], None),
    "stages of 1 and 2": ([[(2,), (0, 1)]], None),
    "2 stages beside 1": ([[(0,), (1,)], [(2,)]], (2, 1)),
    "3 stages beside 1": ([[(0,), (1,), (2,)], [(3,)]], (3, 1)),
    "2 x 2 beside 2": ([[(0, 1), (2, 3)], [(4,), (5,)]], (3, 1)),
    "2 and 1 beside 3 stages": ([[(0, 1), (2,)], [(3,), (4,), (5,)]], (1, 1)),
    "three": ([[(0,)], [(1,), (2,)], [(3,), (4, 5)]], (2, 3, 3)),
}


def ranks_of(pipelines) -> int:
    return sum(len(stage) for pipeline in pipelines for stage in pipeline)


def built(name: str, model: str = "mlp", **options) -> tuple[dict, list, Staged]:
    graph, feeds = MODELS[model]()
    loss, updates = graph["train"]
    pipelines, shares = CASES[name]
    builder = Pipelines(pipelines, shares, 2, split=SPLIT, **options)
    return graph, feeds, builder.build([loss, *updates.values()], ranks_of(pipelines))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", CASES)
def test_losses_equal_those_of_one_process(name, schedule, model):
    pipelines, shares = CASES[name]
    wanted, output = alone(model)
    builder = Pipelines(pipelines, shares, 2, schedule, split=SPLIT)
    for losses, y in run_ranks(ranks_of(pipelines), lambda comm: train(model, builder, comm), rendezvous=True):
        np.testing.assert_allclose(losses, wanted, atol=1e-5, rtol=0)
        np.testing.assert_allclose(y, output, atol=1e-3, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["3 stages beside 1", *nightly([["2 and 1 beside 3 stages"]])])
def test_processes_train_as_one_does(name):
    ranks = ranks_of(CASES[name][0])
    job = heturun("-w", ranks, "python", "-m", "tests.dist.test_pipelines", name)
    assert (job.returncode, job.stderr, job.stdout.count("equal")) == (0, "", ranks)


def test_microbatches_of_their_own_train_as_in_equal_pipelines():
    pipelines, shares = CASES["2 stages beside 1"]
    unequal = run_ranks(
        3, lambda comm: train("mlp", Pipelines(pipelines, shares, 2, statistics="microbatch"), comm), rendezvous=True
    )
    alike = run_ranks(2, lambda comm: train("mlp", Pipeline(2, 2, statistics="microbatch"), comm), rendezvous=True)
    np.testing.assert_allclose(unequal[0][0], alike[0][0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_it_is_plain_data_that_can_be_simulated(name):
    graph, feeds, strategy = built(name)
    assert Strategy.from_json(strategy.to_json()) == strategy
    cost = simulate(graph["train"], strategy, MachineProfile(), world_size=ranks_of(CASES[name][0]), shapes=feeds[0])
    assert cost.time > 0 and min(cost.peak) > 0


def test_each_pipeline_keeps_every_weight_once():
    for name, (pipelines, _) in CASES.items():
        graph, _, strategy = built(name)
        for node in (n for n in topological(graph["train"][:1]) if n.role is Role.VARIABLE and n.ndim == 2):
            pieces = strategy.store(node).pieces(node.shape)
            for pipeline in pipelines:
                mine = [math.prod(pieces[rank].shape) for stage in pipeline for rank in stage if rank in pieces]
                assert sum(mine) == math.prod(node.shape), (name, node)


def test_a_stage_of_two_ranks_gets_twice_the_work():
    _, _, strategy = built("stages of 2 and 1", "transformer")
    assert [*strategy.cut.values()].count(0) > [*strategy.cut.values()].count(1)


def test_gradients_of_shared_layers_are_the_bytes_of_their_cells():
    """One rank beside two: each gradient crosses once each way, whatever pieces the pipelines keep."""
    graph, feeds, strategy = built("2 stages beside 1")
    strategy.bucket_bytes = 0
    cost = simulate(graph["train"], strategy, MachineProfile(), world_size=3, shapes=feeds[0])
    _, updates = graph["train"]
    weights = sum(int(v.tensor.nbytes) for v in updates if v.attrs["trainable"])
    across = sum(nbytes for (a, b), nbytes in cost.sent.items() if 2 in (a, b))
    assert weights * 2 <= across <= weights * 2 + 200  # the loss, and scalars of the optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[]],), "pipelines [[]]"),
        (([[(0,), ()]],), "pipelines [[(0,), ()]]"),
        (([],), "pipelines []"),
        (([[(0,)], [(0,)]],), "groups [(0,), (0,)]"),
        (([[(0,)], [(1,)]], (1,)), "with shares (1,)"),
        (([[(0,), (1,)]], None, 2, "zigzag"), "zigzag"),
    ],
)
def test_what_are_no_pipelines(arguments, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Pipelines(*arguments)


def test_cuts_that_do_not_fit():
    with pytest.raises(ArgumentError, match=re.escape("1 cuts of 2 pipelines")):
        Pipelines([[(0,)], [(1,)]], cuts=[{}])
    graph, _ = MODELS["mlp"]()
    outputs = [graph["train"][0], *graph["train"][1].values()]
    for cut in ({}, {"mlp/hidden_0": 0, "mlp/hidden_1": 1, "mlp/hidden_2": 0, "mlp/head": 1}):
        with pytest.raises(ArgumentError, match="in this order: mlp/hidden_0, mlp/hidden_1, mlp/hidden_2, mlp/head"):
            Pipelines([[(0,), (1,)]], cuts=[cut]).build(outputs, 2)
    loss, updates = staged_mlp(2)
    with pytest.raises(ArgumentError, match="the graph marks stages, but each of these pipelines has its own"):
        Pipelines([[(0,), (1,)]]).build([loss, *updates.values()], 2)


if __name__ == "__main__":
    case = CASES[sys.argv[1]]
    losses, _ = train("transformer", Pipelines(*case, 2, split=SPLIT), world())
    np.testing.assert_allclose(losses, alone("transformer")[0], atol=1e-5, rtol=0)
    print("equal")
