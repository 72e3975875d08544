"""Steps of deep models that follow from a few blocks, against the whole model; and the plans found."""

from __future__ import annotations

import re

import pytest

from hetu.core.errors import BudgetError
from hetu.dist.cut.builders import MEGATRON, Parallel
from hetu.dist.cut.pipeline_builder import Pipeline
from hetu.plan import MachineProfile, auto, cluster, simulate
from hetu.plan.forecast import forecast, gpt, read_model
from hetu.plan.search import deep as searching
from hetu.plan.search.deep import DeepSearch
from hetu.plan.simulation import deep
from hetu.plan.simulation.deep import SHALLOW, DeepSteps

LAYERS, BATCH = 8, 32
DGX = cluster("dgx-h100:2")


@pytest.fixture(scope="module")
def model(meaning):
    return gpt(layers=LAYERS, features=2048, heads=16, vocabulary=8192, length=1024)


PLANS = {
    "stages alone": Pipeline(4, 8),
    "as few micro-batches as stages": Pipeline(4, 4, data=2),
    "stages that do not divide the blocks": Pipeline(3, 8, data=2),
    "stages, data and tensors": Pipeline(2, 8, data=2, tensor=2, split=MEGATRON),
    "stages with sharded state": Pipeline(2, 8, data=4, zero=1),
    "data": Parallel(data=8),
    "sharded data": Parallel(data=8, zero=3),
    "data and tensors": Parallel(data=2, tensor=4, split=MEGATRON),
    "gradients accumulate": Parallel(data=4, accumulate=8),
}


USUAL = ("as few micro-batches as stages",)


@pytest.mark.kernels
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in USUAL else pytest.mark.nightly) for n in PLANS])
def test_a_step_that_follows_from_a_few_blocks_is_that_of_the_whole_model(model, name):
    """Seconds, bytes of the fullest rank, and bytes sent; the whole model is compiled with every micro-batch."""
    builder, profile = PLANS[name], MachineProfile.of(DGX)
    world = (getattr(builder, "stages", None) or 1) * (builder.data or 1) * builder.tensor
    steps = DeepSteps(model, profile, 96 * world, "float16")
    found = steps.simulate(builder, world)
    if isinstance(builder, Pipeline):
        builder = builder.but(cut=steps.cut(builder, world, model.sub))
    shapes = model.shapes(steps.batch)
    whole = simulate(model.entries, builder, profile, world_size=world, shapes=shapes, precision="float16")
    assert found.time == pytest.approx(whole.time, rel=0.02)
    assert max(found.peak) == pytest.approx(max(whole.peak), rel=0.04)
    assert sum(found.sent.values()) == pytest.approx(sum(whole.sent.values()), rel=0.02, abs=1000)
    assert sum(found.timeline.spent) == pytest.approx(found.time)
    assert max(held.most for held in found.timeline.held.values()) == pytest.approx(max(found.peak), rel=1e-6)


@pytest.fixture(scope="module")
def searched(model, meaning):
    """A search for 4 devices, the depths that it compiled, and its plan."""
    depths, job = [], deep.SimulatedJob

    class Counted(job):
        def __init__(self, entries, *given):
            super().__init__(entries, *given)
            depths.append(len({name for name in map(block_named, self.sub.written.nodes) if name}))

    def block_named(node):
        return (re.match(r"plan/transformer_block\w*", node.name or "") or [""])[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deep, "SimulatedJob", Counted)
        search = DeepSearch(auto(12e9, batch_size=BATCH, profile=MachineProfile.of(DGX)), model, 4, "float16")
        return search, depths, search.run(Bar())


class Bar:
    total = 0

    def update(self, count):
        pass


def test_few_blocks_are_compiled_and_few_plans_are_foretold(searched):
    search, depths, plan = searched
    possible, rated = [*search._candidates()], plan.why().rated
    assert max(depths) <= len(SHALLOW) and len(rated) < len(possible) / 3
    assert len(depths) == len(search.steps.compiled) <= 4 * len(search.floors) + 2 * len(rated)


def test_no_plan_takes_less_than_its_bound_or_keeps_less(searched):
    search, _, plan = searched
    for r in plan.why().rated:
        bound, kept = search._bound(r.builder)
        assert r.valid and bound <= r.seconds and kept <= r.peak, r.name
    assert all(f"{r.name}: " in plan.why().to_svg() for r in (plan.why().best, *plan.why().next_best[:1]))


@pytest.mark.nightly
def test_few_plans_of_the_largest_models_are_foretold():
    """GPT-3, of 175 billion weights, on 1,024 devices: of 576 candidates, without their smaller forms."""
    large = gpt(layers=96, features=12288, heads=96, vocabulary=51200, length=2048)
    found = forecast(large, cluster("dgx-h100:128"), 1536, precision="bfloat16")
    assert len(found.plan.why().rated) <= 6 and found.plan.why().best.peak <= 80e9
    assert found.plan.name == "dp16 tp4 pp16, 96 micro-batches, zero1"


@pytest.mark.nightly
def test_what_is_found_is_the_best_of_all(searched, model, monkeypatch):
    monkeypatch.setattr(searching.DeepSearch, "_bound", lambda search, builder: (0.0, 0.0))
    search = DeepSearch(searched[0].auto, model, 4, "float16")
    assert search.run(Bar()).why().best.seconds == searched[2].why().best.seconds


def test_the_plan_is_one_for_the_whole_model(searched, model):
    plan = searched[2]
    plan.strategy.check(model.sub.written.outputs, 4)
    best, shapes = plan.why().best, model.shapes(BATCH)
    cost = simulate(model.entries, plan, MachineProfile.of(DGX), world_size=4, shapes=shapes, precision="float16")
    assert cost.time == pytest.approx(best.seconds, rel=0.03), best.name and max(cost.peak) <= 1.04 * best.peak


def test_where_no_plan_fits_the_error_says_how_much_the_smallest_needs(model):
    tiny = auto(1e6, batch_size=BATCH, profile=MachineProfile.of(DGX))
    search = DeepSearch(tiny, model, 1, "float16")
    with pytest.raises(BudgetError, match=r"no plan fits: the smallest, .*, needs [\d,]+ bytes on a rank"):
        search.run(Bar())


DEEP = """
import hetu as ht
layers = 9
def entries(layers):
    x, t = ht.placeholder("x", (None, 2048)), ht.placeholder("t", (None, 2048))
    h = x
    for _ in range(layers):
        h = ht.nn.Linear(2048, 2048, activation=ht.relu)(h)
    loss = ht.mean((ht.nn.Linear(2048, 2048)(h) - t) ** 2)
    return [loss, ht.optim.Adam(0.1).minimize(loss)]
"""


@pytest.mark.nightly
def test_a_file_may_make_its_model_at_any_depth(tmp_path):
    (tmp_path / "deep.py").write_text(DEEP)
    found = read_model(tmp_path / "deep.py")
    assert found.layers == 9 and len(found.sub.variables) == len(read_model(tmp_path / "deep.py").sub.variables)
    whole = forecast(found, cluster("dgx-h100"), 4096)
    assert "foretold from 5 of 9 blocks" in str(whole.plan.why())
    plain = auto(batch_size=4096, profile=MachineProfile.of(cluster("dgx-h100")), hints={"stages": 1})
    best = plain.choose(found.entries, world_size=8).why().best
    assert whole.seconds <= 1.03 * best.seconds
