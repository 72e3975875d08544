"""Plans of every kind that the planner proposes train as one process does, and are chosen where they are faster."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.dist import Link, Pipeline, run_ranks
from hetu.plan import Cluster, MachineProfile, Plan, Within, auto
from hetu.plan.search.candidates import Bucketed, Layered
from hetu.plan.search.stage_cut import LayerCosts, cut_stages
from hetu.plan.search.uneven import UnevenStages, varied
from hetu.plan.why import Candidate

from ..dist.models import BATCH, losses, mlp, transformer

SPLIT = {"mlp/up/weight": 1, "mlp/up/bias": 0, "mlp/down/weight": 0}
BUILDERS = {
    "copies": (mlp, 4, Layered(1, 2, {}, SPLIT, feeds={"x": 0, "t": 0}, copies=2)),
    "copies and data": (mlp, 8, Layered(2, 2, {}, SPLIT, copies=2)),
    "updated in parts": (mlp, 2, Layered(1, 2, {}, {}, updated={"mlp/up/weight": 1}, feeds={"x": 0, "t": 0})),
    "buckets": (mlp, 2, Bucketed(Layered(2, 1, {}), 256)),
    "one and two": (mlp, 3, UnevenStages([(1, 1), (2, 1)], 2)),
    "two that share, two that split": (mlp, 4, UnevenStages([(2, 1), (1, 2)], 3, "gpipe", {"*/weight": 1})),
    "three and two": (transformer, 5, UnevenStages([(3, 1), (2, 1)], 2)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", BUILDERS)
def test_every_kind_of_plan_trains_as_one_process(name):
    model, ranks, builder = BUILDERS[name]
    wanted = losses(model, steps=3)
    for found in run_ranks(ranks, lambda comm: losses(model, builder, comm, 3), deadline=120):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_a_pipeline_that_is_too_large_is_looked_at_with_what_is_computed_again():
    profile = MachineProfile(cluster=Cluster(inner=Link(1e-6, 1e10)))
    rows = 40 * BATCH  # which take more than what instructions are bound to
    free = auto(batch_size=rows, profile=profile, hints={"stages": 2}).choose(mlp()[0], world_size=2).why().best
    tight = auto(free.peak - 1, batch_size=rows, profile=profile, hints={"stages": 2}).choose(mlp()[0], world_size=2)
    made = [r.builder for r in tight.why().rated if isinstance(r.builder, Within)]
    assert len(made) == 1 and isinstance(made[0].builder, Pipeline)


def test_small_buckets_are_chosen_where_a_slow_link_can_be_hidden():
    h = ht.placeholder("x", (None, 256))
    for _ in range(4):
        h = ht.nn.Linear(256, 256, activation=ht.tanh)(h)
    loss = ht.mean(h**2)
    profile = MachineProfile(cluster=Cluster(inner=Link(50e-6, 1e8)))
    chooser = auto(batch_size=256, profile=profile, hints={"data": 2, "zero": 0})
    made = chooser.choose([loss, ht.optim.SGD(0.1).minimize(loss)], world_size=2)
    assert made.name.startswith("dp2, buckets of ")
    assert Plan.from_json(made.to_json()).strategy.bucket_bytes < 1 << 20
    rated = {r.name: r.seconds for r in made.why().rated}
    assert rated[made.name] < 0.9 * rated["dp2"]


def costs(seconds, trained, reads, updates=0.0) -> LayerCosts:
    none = [0.0] * len(seconds)
    return LayerCosts([*"abcd"[: len(seconds)]], seconds, none, none, [updates] * len(none), trained, trained, reads)


STAGES = {  # layers, speeds, micro-batches -> grids, the layer at which each begins, seconds
    "three quarters of the work, and all variables": (
        (costs([9e-3, 3e-3], [0, 10**8], [{}, {0: 0}]), [1.0] * 4, 4), [(3, 1), (1, 1)], "ab", 3e-3 + 3e-3 + 3 * 3e-3),
    "towers pass at the same time": (
        (costs([2e-3, 2e-3, 1e-3], [10**8] * 3, [{}, {}, {0: 0, 1: 0}]), [1.0] * 3, 1), [(1, 1)] * 3, "abc", 3e-3),
    "too many variables to sum": (
        (costs([2e-3, 1e-3], [10**8] * 2, [{}, {0: 0}]), [1.0] * 3, 2), [(1, 1), (1, 2)], "ab", 5e-3),
    "updates wait for nobody": (
        (costs([2e-3, 2e-3], [10**8] * 2, [{}, {0: 0}], updates=1e-3), [1.0] * 2, 1), [(1, 1)] * 2, "ab", 5e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_stages_get_the_ranks_that_their_layers_need(name):
    (layers, speeds, count), grids, begins, seconds = STAGES[name]
    found, stages, cut = cut_stages(layers, speeds, count, Link(1e-6, 1e9))
    assert stages == grids and [min(n for n in cut if cut[n] == k) for k in range(len(grids))] == [*begins]
    assert found == pytest.approx(seconds, rel=1e-2)


def test_layers_that_fit_into_no_stages_are_said():
    layers = costs([1.0] * 3, [6, 6, 6], [{}, {0: 0}, {1: 0}])
    with pytest.raises(ht.core.errors.ArgumentError, match="3 layers, of up to 6 bytes, fit into no stages on 2 ranks"):
        cut_stages(layers, [1.0] * 2, 4, Link(1e-6, 1e9), budget=10)


def test_a_pipeline_varies_by_a_layer_its_parts_a_schedule_and_the_ranks_of_its_stages():
    plan = Candidate("pp2, 2 micro-batches, 3, 1 layers", UnevenStages([(1, 1), (2, 1)], 2))
    made = {c.name: c.builder for c in varied(plan, {"a": 0, "b": 0, "c": 1}, [1, 2, 4, 8])}
    names = [
        "pp2, 2 micro-batches, 1, 2 layers",
        "pp2, 1 micro-batches, 3, 1 layers",
        "pp2, 4 micro-batches, 3, 1 layers",
        "pp2, 2 micro-batches, gpipe",
        "pp2 of 1, 2 alike ranks, 2 micro-batches",
        "pp2 of 2, 1 ranks, 2 micro-batches",
    ]
    assert [*made] == names
    assert made[names[0]].cut == {"a": 0, "b": 1, "c": 1}
    assert [made[name].grids for name in names[4:]] == [[(1, 1), (1, 2)], [(2, 1), (1, 1)]]
