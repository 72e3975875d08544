"""Operators split one by one: better than any product of degrees on graphs made for it, and trained all the same."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

import hetu as ht
from hetu.core.executor import SubGraph
from hetu.core.op import Role
from hetu.dist import Link, Staged, rehearse, run_ranks
from hetu.dist.layout.layout import DUP, SUM
from hetu.passes import specialize
from hetu.plan import Cluster, MachineProfile, Plan, auto, simulate
from hetu.plan.search.candidates import Hints, Layered, candidates, expert_parallel
from hetu.plan.search.elimination import eliminate
from hetu.plan.search.operators import DUAL, HALF, Operators, experts_of
from hetu.plan.search.planner import shapes_of

from ..dist.models import losses
from ..dist.test_hints import expert_feeds, mixture

RANKS, BATCH, STEPS = 4, 256, 3


def classified(x: dict[str, ht.Node], y: ht.Node, classes: int):
    t = ht.placeholder("t", (None,), "int64")
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    graph = {"train": [loss, ht.optim.Adam(0.01).minimize(loss)]}
    rng = np.random.default_rng(0)
    shapes = {name: (BATCH, *node.shape[1:]) for name, node in x.items()}
    fed = {n: rng.normal(size=s) if x[n].dtype.kind == "f" else rng.integers(0, 50, s) for n, s in shapes.items()}
    return graph, [fed | {"t": rng.integers(0, classes, BATCH)}] * STEPS


def towers():
    """One with large weights and few activations, one with small weights and many activations."""
    x, z = ht.placeholder("x", (None, 32)), ht.placeholder("z", (None, 64, 32))
    with ht.scope("towers"):
        a = ht.nn.Linear(32, 1024, activation=ht.relu, name="wide_in")(x)
        a = ht.nn.Linear(1024, 32, activation=ht.relu, name="wide_out")(a)
        b = ht.nn.Linear(32, 32, activation=ht.tanh, name="deep_in")(z)
        b = ht.mean(ht.nn.Linear(32, 32, activation=ht.tanh, name="deep_out")(b), axis=1)
        y = ht.nn.Linear(64, 8, name="join")(ht.concat([a, b], axis=1))
        return classified({"x": x, "z": z}, y, 8)


def wide_and_deep():
    """A linear model on many features beside a network on a long sequence of few."""
    x, z = ht.placeholder("x", (None, 2048)), ht.placeholder("z", (None, 64, 16))
    with ht.scope("wide_and_deep"):
        deep = ht.mean(ht.nn.Linear(16, 32, activation=ht.tanh, name="deep")(z), axis=1)
        y = ht.nn.Linear(2048, 32, name="wide")(x) + ht.nn.Linear(32, 32, name="out")(deep)
        return classified({"x": x, "z": z}, y, 32)


def residual():
    """A large block beside which its input passes, after a layer with many activations."""
    x = ht.placeholder("x", (None, 64, 32))
    with ht.scope("residual"):
        h = ht.mean(ht.nn.Linear(32, 32, activation=ht.tanh, name="first")(x), axis=1)
        more = ht.nn.Linear(32, 1024, activation=ht.relu, name="widen")(h)
        y = h + ht.nn.Linear(1024, 32, name="narrow")(more)
        return classified({"x": x}, y, 32)


MODELS = {"towers": towers, "wide_and_deep": wide_and_deep, "residual": residual}
PROFILE = MachineProfile(cluster=Cluster(inner=Link(latency=1e-5, bandwidth=1e8)))


@functools.cache
def chosen(name: str) -> Plan:
    choose = auto(batch_size=BATCH, profile=PROFILE, hints={"stages": 1}).choose
    return run_ranks(RANKS, lambda comm: choose(MODELS[name]()[0], comm), deadline=120)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_branches_are_split_each_its_own_way_and_beat_every_product(name):
    graph, _ = MODELS[name]()
    made = chosen(name)
    shapes = shapes_of(SubGraph("train", graph["train"]), BATCH)
    seconds = [
        simulate(graph["train"], c.builder, PROFILE, world_size=RANKS, shapes=shapes).time
        for c in candidates(graph["train"][:1], RANKS, Hints(), BATCH)
        if "pp" not in c.name
    ]
    why = made.why()
    assert "operators over" in made.name and why.best.seconds < 0.9 * min(seconds)
    assert "split: " in str(why) and f"{name}/" in str(why)


@pytest.mark.nightly
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_split_by_operator_trains_as_one_process(name):
    wanted = losses(MODELS[name], steps=STEPS)
    read = Plan.from_json(chosen(name).to_json())
    assert read == chosen(name)
    for found in run_ranks(RANKS, lambda comm: losses(MODELS[name], read, comm, STEPS)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5)


# -- the tables -----------------------------------------------------------------------------------------------------


def operators(graph, batch=BATCH, profile=PROFILE, **more) -> Operators:
    sub = SubGraph("train", graph["train"])
    shapes = shapes_of(sub, batch)
    outputs = specialize(sub.written.outputs, {(name, 0): shape[0] for name, shape in shapes.items()})
    trained = {v.name: 3 for v in sub.updates if v.attrs["trainable"]}
    return Operators(outputs, shapes, trained, profile, RANKS, **more)


def test_the_options_of_a_product_are_those_of_its_rule():
    x, w = ht.placeholder("x", (8, 16)), ht.variable("w", ht.init.zeros, (16, 4))
    loss = ht.sum(x @ w)
    found = operators({"train": [loss, ht.optim.SGD(0.1).minimize(loss)]})
    (product,) = (o for n, o in zip(found.nodes, found.options) if n.op.name == "matmul")
    assert {(o.wants, o.outs) for o in product} == {
        ((DUP, DUP), (DUP,)),
        ((0, DUAL), (0,)),  # the batch: of the gradient of w, each rank has terms
        ((1, 0), (SUM,)),  # what is summed over
        ((DUAL, 1), (1,)),  # the outputs
        ((DUP, DUAL), (HALF,)),  # the whole, and a gradient of which each rank has some rows
        ((DUP, HALF - 1), (HALF - 1,)),  # or some columns
    }


def convolved():
    """Channels that do not divide the features they make, so that a layer behind them reads what all ranks have."""
    x = ht.placeholder("x", (None, 1, 16, 16))
    with ht.scope("convolved"):
        h = ht.max_pool2d(ht.relu(ht.nn.Conv2d(1, 18, 3, padding=1, name="conv")(x)), 2)
        h = ht.nn.Linear(18 * 64, 256, activation=ht.relu, name="hidden")(ht.flatten(h, 1))
        return classified({"x": x}, ht.nn.Linear(256, 2, name="last")(h), 2)


def looked_up():
    """A table of which a step touches few rows, and a layer over them."""
    ids = ht.placeholder("ids", (None, 8), "int64")
    with ht.scope("looked_up"):
        h = ht.flatten(ht.nn.Embedding(5_000, 16, name="table")(ids), 1)
        return classified({"ids": ids}, ht.nn.Linear(128, 10, name="last")(h), 10)


def two_looked_up():
    """A table of which a step touches many rows, one of which it touches few, and a wide layer over both."""
    ids, few = ht.placeholder("ids", (None, 26), "int64"), ht.placeholder("few", (None, 2), "int64")
    with ht.scope("two_looked_up"):
        h = [ht.flatten(ht.nn.Embedding(500, 64, name="many")(ids), 1)]
        h.append(ht.flatten(ht.nn.Embedding(2_000, 64, name="few")(few), 1))
        y = ht.nn.Linear(1792, 64, activation=ht.relu, name="hidden")(ht.concat(h, axis=1))
        return classified({"ids": ids, "few": few}, ht.nn.Linear(64, 2, name="last")(y), 2)


CHANNELS, CUT = {"conv/weight": 0, "conv/bias": 0}, {"x": 0, "z": 0, "ids": 0, "few": 0, "t": 0}
TOLD = [  # a model; how many share the batch; axes of what ranks compute in parts, what they update in parts, and feeds
    (convolved, 1, CHANNELS | {"hidden/weight": 0}, {}, {}),
    (convolved, 1, CHANNELS | {"hidden/weight": 1, "hidden/bias": 0}, {}, {}),
    (looked_up, 1, {}, {"table/weight": 0}, CUT),
    (looked_up, 1, {}, {"table/weight": 1}, CUT),
    (looked_up, 2, {}, {"table/weight": 0}, CUT),
    (looked_up, 2, {}, {"table/weight": 1}, CUT),
    (looked_up, 2, {}, {}, CUT),
    (looked_up, 2, {}, {"table/weight": 0, "last/weight": 0}, CUT),
    (residual, 2, {}, {"first/weight": 0, "widen/weight": 1, "narrow/weight": 0}, CUT),
]
HALVES = [  # of which all ranks compute the whole, and gradients in parts: rows beside cut feeds, columns behind a bias
    (two_looked_up, 1, {}, {}, {}),
    (two_looked_up, 1, {}, {}, {"ids": 0}),
    (two_looked_up, 1, {}, {}, {"few": 0}),
    (two_looked_up, 1, {}, {}, {"t": 0}),
    (two_looked_up, 1, {"few/weight": 0}, {}, {"t": 0}),
    (two_looked_up, 1, {"few/weight": 0}, {"many/weight": 0}, CUT),
    (two_looked_up, 1, {"hidden/bias": 0}, {}, {}),
    (two_looked_up, 1, {"hidden/bias": 0, "last/weight": 0}, {}, {}),
    (residual, 1, {}, {}, {"t": 0}),
    (residual, 1, {"widen/bias": 0}, {}, {}),
    (towers, 1, {"wide_in/bias": 0}, {}, {"z": 0}),
]
BESIDE = [  # of what batches are that meet weights which are split, also behind what cannot be split as they are
    (convolved, 1, CHANNELS | {"hidden/weight": 0}, {}, CUT),
    (convolved, 1, CHANNELS | {"hidden/weight": 1, "hidden/bias": 0}, {}, CUT),
    (convolved, 1, {"hidden/weight": 0}, {}, CUT),
    (convolved, 1, {"hidden/weight": 1, "hidden/bias": 0}, {}, CUT),
    (convolved, 1, {"hidden/weight": 1, "hidden/bias": 0}, {}, {"x": 0}),
    (looked_up, 1, {"last/weight": 0}, {}, CUT),
    (looked_up, 1, {"last/weight": 1, "last/bias": 0}, {}, CUT),
    (residual, 1, {"first/weight": 0}, {}, CUT),
    (residual, 1, {"first/weight": 1, "first/bias": 0}, {}, {"x": 0}),
    (residual, 1, {"widen/weight": 1, "widen/bias": 0, "narrow/weight": 0}, {}, CUT),
    (towers, 1, {"wide_in/weight": 1, "wide_in/bias": 0, "wide_out/weight": 0}, {}, {"z": 0}),
    (wide_and_deep, 1, {"wide/weight": 0}, {}, CUT),
    (wide_and_deep, 1, {"wide/weight": 0}, {}, {"z": 0}),
    (wide_and_deep, 1, {"wide/weight": 1, "wide/bias": 0}, {}, {"x": 0}),
]


@pytest.mark.kernels
@pytest.mark.parametrize(("model", "data", "split", "updated", "feeds"), TOLD + HALVES + BESIDE)
def test_tables_tell_what_the_simulator_tells(model, data, split, updated, feeds):
    """Gradients that read what all have, sums that pass a change of shape, rows and columns of a table."""
    graph, _ = model()
    found = operators(graph, BATCH // data, data=data)
    shapes = shapes_of(SubGraph("train", graph["train"]), BATCH)
    split, updated = ({f"{model.__name__}/{n}": axis for n, axis in of.items()} for of in (split, updated))
    feeds = {name: axis for name, axis in feeds.items() if name in shapes}
    costs, wanted = [found._seconds(n, 0.0) for n in found.nodes], split | updated | feeds
    for n, of, options in zip(found.nodes, costs, found.options):
        read = [(k, split.get(i.name, DUP)) for k, i in enumerate(n.inputs) if i.role is Role.VARIABLE]
        for k, o in enumerate(options):
            if any(max(o.wants[at], DUP) != role for at, role in read):
                of[k] = math.inf
            if not n.inputs and o.outs[0] != wanted.get(n.name, DUP):  # as it is kept
                of[k] = math.inf
    told, _ = eliminate(costs, [*found._edges()])
    layered = Layered(data, found.ranks, {}, split, updated=updated, feeds=feeds)
    took = simulate(graph["train"], layered, PROFILE, world_size=data * found.ranks, shapes=shapes, traced=0).time
    assert 1 / 1.2 < told / took < 1.2, (told, took)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("model", "data", "split", "updated", "feeds"), TOLD[-2:] + HALVES + BESIDE)
def test_batches_beside_weights_that_are_split_train_as_one_process(model, data, split, updated, feeds):
    """What one reader has brought to it serves those that come later, also moved on: its rows, turned."""
    named = {f"{model.__name__}/{n}": axis for n, axis in split.items()}
    updated = {f"{model.__name__}/{n}": axis for n, axis in updated.items()}
    layered = Layered(data, RANKS // data, {}, named, updated=updated, feeds=feeds)
    wanted = losses(model, steps=STEPS)
    for found in run_ranks(RANKS, lambda comm: losses(model, layered, comm, STEPS)):
        np.testing.assert_allclose(found, wanted, rtol=4e-5)


MOVED = [  # values that are read behind a change of shape in a layout to which they were brought before it
    (convolved, {"hidden/weight": 1, "hidden/bias": 0}, {"x": 0}),
    (residual, {"widen/weight": 1, "widen/bias": 0, "narrow/weight": 0}, {"x": 0, "t": 0}),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "split", "feeds"), MOVED)
def test_micro_batches_send_what_a_whole_batch_does_and_train_as_one_process(model, split, feeds):
    loss, updates = model()[0]["train"]
    shapes = shapes_of(SubGraph("train", [loss, updates]), BATCH)
    named = {f"{model.__name__}/{n}": axis for n, axis in split.items()}
    whole = Layered(1, RANKS, {}, named, feeds=feeds).build([loss, *updates.values()], RANKS)
    same = whole.whole, whole.variables, whole.feeds, whole.bucket_bytes
    staged = Staged(*same, stages=(whole.whole,), microbatches=2)
    sent = [simulate([loss, updates], s, PROFILE, world_size=RANKS, shapes=shapes).sent for s in (whole, staged)]
    assert sum(sent[0].values()) == sum(sent[1].values())
    wanted = losses(model, steps=STEPS)
    for found in run_ranks(RANKS, lambda comm: losses(model, staged, comm, STEPS)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5)


def test_less_memory_costs_more_seconds_and_is_kept_to():
    found = operators(towers()[0])
    free = found.best()
    bytes_of = {n.name: 3 * int(n.tensor.nbytes) for n in found.nodes if n.role is Role.VARIABLE}

    def kept(result):
        return sum(b / (RANKS if n in result.split | result.stored else 1) for n, b in bytes_of.items())

    low, high = sum(bytes_of.values()) / RANKS, kept(free)
    tight = found.best(room=(low + high) / 2)
    assert low <= kept(tight) <= (low + high) / 2 < high and tight.stored
    assert tight.seconds > free.seconds


def test_an_infinitely_fast_link_splits_all_that_can_be_and_a_slow_one_nothing():
    model = towers()[0]
    fast = operators(model, profile=MachineProfile(cluster=Cluster(inner=Link(0.0, math.inf)))).best()
    slow = operators(model, profile=MachineProfile(cluster=Cluster(inner=Link(1.0, 1.0)))).best()
    assert fast.seconds < 0.5 * slow.seconds
    assert not slow.split and not slow.stored and not slow.feeds


# -- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 1.25])
def test_experts_are_found_where_their_room_follows_from_an_open_batch(capacity):
    x = ht.placeholder("x", (None, 8))
    with ht.scope("layer"):
        y, _ = ht.nn.MixtureOfExperts(8, 6, 4, ht.nn.TopKGate(8, 4), capacity=capacity)(x)
    assert experts_of([y]).items() >= {"layer/mixture_of_experts/experts/up": 0}.items()


def test_experts_with_their_biases_over_ranks_that_share_no_rows_train_as_one_process():
    x, t = ht.placeholder("x", (None, 8)), ht.placeholder("t", (None, 8))
    with ht.scope("whole"):
        y, _ = ht.nn.MixtureOfExperts(8, 6, 4, ht.nn.TopKGate(8, 4), capacity=1.25)(x)
    loss = ht.mean((x + y - t) ** 2)
    entries, rng = [loss, ht.optim.SGD(0.1).minimize(loss)], np.random.default_rng(0)
    feeds = {name: rng.standard_normal((24, 8), "float32") for name in "xt"}
    named = {"up", "up_bias", "down", "down_bias"}
    assert experts_of([loss]) == {f"whole/mixture_of_experts/experts/{name}": 0 for name in named}
    made = expert_parallel([loss], Hints(), Cluster(), 3)
    ways = {c.name: rehearse(entries, c.builder, feeds, world_size=3, steps=3).losses for c in made}
    alone = rehearse(entries, None, feeds, world_size=1, steps=3).losses
    assert [*ways] == ["ep3", "experts over 3"]
    for losses_of in ways.values():
        assert losses_of == pytest.approx(alone, rel=1e-5)


def test_experts_are_found_by_their_rule_and_are_a_candidate():
    graph = mixture(RANKS, hinted=False)
    assert experts_of([graph["train"][0]]) == {"mixture/up": 0, "mixture/down": 0}
    assert experts_of([towers()[0]["train"][0]]) == {}
    fast = MachineProfile(cluster=Cluster((2, 2), inner=Link(1e-7, 1e10), outer=Link(1e-7, 1e10)))
    hints = {"data": RANKS, "zero": 0}
    plans = run_ranks(RANKS, lambda comm: auto(profile=fast, hints=hints).choose(graph, comm), deadline=120)
    rated = {r.name: r for r in plans[0].why().rated}
    assert rated["ep4"].peak < rated["dp4"].peak
    assert rated["ep4"].builder.hosts == ((0, 1), (2, 3))
    with pytest.raises(ht.errors.BudgetError, match="the smallest, ep4, needs"):
        run_ranks(RANKS, lambda comm: auto(1.0, profile=fast).choose(graph, comm), deadline=120)
    budget = (rated["ep4"].peak + rated["dp4"].peak) // 2
    made = run_ranks(RANKS, lambda comm: auto(budget, profile=fast, hints=hints).choose(graph, comm), deadline=120)[0]
    model = lambda: (mixture(RANKS, hinted=False), expert_feeds(STEPS))  # noqa: E731
    assert made.name == "ep4"
    wanted = losses(model, steps=STEPS)
    for found in run_ranks(RANKS, lambda comm: losses(model, Plan.from_json(made.to_json()), comm, STEPS)):
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)
