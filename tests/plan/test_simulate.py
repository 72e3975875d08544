"""Simulated steps against real ranks: the same lists, the same bytes, and on a virtual clock the same time."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError
from hetu.core.op import Role
from hetu.dist import (
    DataParallel,
    Heterogeneous,
    Link,
    Parallel,
    Pipeline,
    TensorParallel,
    VirtualClock,
    ZeRO,
    run_ranks,
)
from hetu.dist.by_hand import all_reduce
from hetu.dist.cut import partition, pipeline_layouts
from hetu.dist.cut.pipeline_layouts import StageGrid, stage_grid
from hetu.dist.layout.deduce import deduce
from hetu.plan import Cluster, MachineProfile, simulate
from hetu.plan.costs.links import DeviceFigures
from hetu.plan.memory.fit import bound
from hetu.plan.simulation.instructions import SimulatedJob
from hetu.plan.simulation.simulate import SERVERS
from hetu.plan.simulation.timeline import COMMUNICATION, COMPUTE, Event, Timeline, draw
from hetu.strategies import Connected, ParameterServer

from ..dist.models import mlp, transformer
from ..pairs import nightly
from ..strategies.test_hybrid import ROWS, batch, hybrid, job, model

WIRE = Link(latency=50e-6, bandwidth=1e8)
FREE = MachineProfile(DeviceFigures(math.inf, math.inf, launch=0.0), Cluster(inner=WIRE, outer=WIRE))
SPLIT = {"*up/weight": 1, "*up/bias": 0, "*down/weight": 0}
STRATEGIES = {
    "data": DataParallel(),
    "zero": ZeRO(3),
    "tensor": TensorParallel(),
    "data and tensor": Parallel(tensor=2, zero=1),
    "pipeline and data": Pipeline(2, microbatches=3, data=2),
    "gpipe and tensor": Pipeline(2, microbatches=2, schedule="gpipe", tensor=2),
    "pipedream": Pipeline(2, microbatches=2, schedule="pipedream", data=2),
    "unequal": Heterogeneous([(0, 1), (2, 3)], [2, 1]),
}


def simulated(make, strategy, profile=FREE, world_size=4, **options):
    graph, feeds = make()
    shapes = {name: array.shape for name, array in feeds[0].items()}
    return simulate(graph["train"], strategy, profile, world_size=world_size, shapes=shapes, **options)


CASES = [(mlp, name) for name in STRATEGIES] + nightly((transformer, n) for n in ("data", "pipeline and data"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("make", "name"), CASES, ids=lambda value: value if isinstance(value, str) else value.__name__)
def test_without_computing_it_is_what_real_ranks_take_on_a_virtual_clock_and_in_memory(make, name):
    strategy = STRATEGIES[name]

    def rank(comm):
        clock = VirtualClock(comm, WIRE, timer=lambda: 0.0)
        graph, feeds = make()
        executor = ht.Executor(graph["train"], strategy=strategy, comm=clock)
        program = executor.program(feeds[0])
        executor.run(feeds[0]), clock.barrier()  # the ranks compare their graphs and values in the first step
        before = clock.now
        executor.run(feeds[0])
        arrays = [*program.feeds.values(), *executor.state.arrays.values(), *(copy() for copy in program.results)]
        return (
            before,
            clock.now,
            program.plan.arena_bytes + sum(a.nbytes for a in arrays) + bound(MachineProfile(), program.plan),
        )

    real = run_ranks(4, rank)
    cost = simulated(make, strategy)
    assert {before for before, *_ in real} == {real[0][0]}
    assert cost.time == pytest.approx(max(end for _, end, _ in real) - real[0][0], rel=1e-9)
    assert cost.peak == tuple(peak for *_, peak in real)


def test_the_instructions_are_those_of_the_executor():
    graph, feeds = transformer()
    job = SimulatedJob(graph["train"], Parallel(tensor=2), 4, {n: a.shape for n, a in feeds[0].items()})

    def rank(comm):
        graph, feeds = transformer()
        executor = ht.Executor(graph["train"], strategy=Parallel(tensor=2), comm=comm)
        return [(s.node.op.name, str(s.node.type)) for s in executor.program(feeds[0]).steps]

    mine = [(n.op.name, str(n.type)) for n in job.programs[0].order]
    assert run_ranks(4, rank) == [mine] * 4


def test_ranks_with_equal_parts_are_compiled_once():
    graph, _ = mlp()
    shapes = {"x": (64, 10), "t": (64,)}
    assert [p.ranks for p in SimulatedJob(graph["train"], DataParallel(), 32, shapes).programs] == [tuple(range(32))]
    staged = SimulatedJob(graph["train"], Pipeline(2, microbatches=2, data=4), 8, shapes)
    assert [p.ranks for p in staged.programs] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    uneven = SimulatedJob(graph["train"], DataParallel(), 3, {"x": (64, 10), "t": (64,)})
    assert [p.ranks for p in uneven.programs] == [(0, 1), (2,)]


def test_a_thousand_ranks():
    graph, _ = mlp()
    strategy, shapes = Parallel(tensor=8, split=SPLIT), {"x": (1000, 10), "t": (1000,)}
    assert len(SimulatedJob(graph["train"], strategy, 1000, shapes).programs) == 1
    cost = simulate(graph["train"], strategy, FREE, world_size=1000, shapes=shapes)
    assert len(cost.peak) == 1000
    assert {rank for link in cost.sent for rank in link} == {*range(1000)}
    assert {event.rank for event in cost.timeline.events} == {*range(16)}


def test_a_thousand_ranks_whose_weights_do_not_divide_are_compiled_as_a_few_and_send_along_rings():
    x, t = ht.placeholder("x", (None, 1500)), ht.placeholder("t", (None,), "int64")
    with ht.scope("odd"):
        y = ht.nn.Linear(1500, 1100)(x)
    loss = ht.mean(ht.softmax_cross_entropy(y, t))
    entries, shapes = [loss, ht.optim.Adam(0.01).minimize(loss)], {x: (1000, 1500), t: (1000,)}
    job = SimulatedJob(entries, ZeRO(1), 1000, shapes)
    assert len(job.programs) == 3  # one or two rows of the weight, and of the bias one or two elements
    kinds = {node.op.collective for node in job.programs[0].order if node.role is Role.COMMUNICATION}
    assert kinds == {"", "all_reduce", "reduce_scatter", "all_gather"}  # a wait sends nothing
    assert len(simulate(entries, ZeRO(1), FREE, world_size=1000, shapes=shapes).sent) == 1000


@pytest.mark.parametrize("name", ["data", "pipeline and data", "gpipe and tensor", "pipedream", "unequal"])
def test_a_graph_is_laid_out_once_and_each_class_of_ranks_gets_what_it_would_alone(monkeypatch, name):
    graph, feeds = mlp()
    given = graph["train"], STRATEGIES[name], 4, {name: array.shape for name, array in feeds[0].items()}
    laid = []
    for room in (pipeline_layouts, partition):
        monkeypatch.setattr(room, "deduce", lambda *a, **k: laid.append(0) or deduce(*a, **k))
    ranks = [p.ranks[0] for p in SimulatedJob(*given).programs]
    together, alone = len(laid), {}
    for rank in ranks:  # a job whose first class is that of `rank` lays the graph out for it
        monkeypatch.setattr(SimulatedJob, "_alike", lambda job, rank=rank: {(): (rank,)})
        laid.clear()
        alone[rank] = [(n.op.name, str(n.type)) for n in SimulatedJob(*given).programs[0].order]
        assert len(laid) == together
    monkeypatch.setattr(SimulatedJob, "_alike", lambda job: {rank: (rank,) for rank in ranks})
    found = {p.ranks[0]: [(n.op.name, str(n.type)) for n in p.order] for p in SimulatedJob(*given).programs}
    assert found == alone


@pytest.mark.nightly
def test_the_stages_of_a_pipeline_share_the_layouts_that_are_deduced(monkeypatch):
    made, make = [], StageGrid._layout

    def counted(grid, roles):
        made.append((grid, *roles.items()))
        return make(grid, roles)

    monkeypatch.setattr(StageGrid, "_layout", counted)
    stage_grid.cache_clear()
    graph, _ = transformer()
    strategy, shapes = Pipeline(2, microbatches=2, data=125, tensor=4, split=SPLIT), {"x": (1000, 6), "t": (1000, 6)}
    assert len(SimulatedJob(graph["train"], strategy, 1000, shapes).programs) == 2
    assert len(made) == len(set(made)) > 0


def compute_only(profile, strategy=None, **options):
    return simulated(
        mlp, strategy or DataParallel(), replace(profile, cluster=Cluster(inner=Link(0.0, math.inf))), **options
    )


def test_a_straggler_holds_up_everybody():
    profile = MachineProfile(DeviceFigures(1e9, 1e9, launch=1e-5))
    even = compute_only(profile).time
    assert compute_only(replace(profile, speeds={2: 3.0})).time == pytest.approx(3 * even)


def test_a_bucket_is_reduced_while_backward_goes_on():
    profile = MachineProfile(DeviceFigures(1e9, 1e9, launch=1e-4), Cluster(inner=WIRE))
    strategy = DataParallel().build(mlp()[0]["train"][:1] + [*mlp()[0]["train"][1].values()], 4)
    waiting, hidden = [], []
    for limit, found in ((0, waiting), (256, hidden)):
        cost = simulated(mlp, replace(strategy, bucket_bytes=limit), profile)
        found.extend([cost.timeline.overlap(0).both, cost.time])
    assert waiting[0] == pytest.approx(0.0, abs=1e-15)
    assert hidden[0] > 0.0
    assert hidden[1] < waiting[1]


@pytest.fixture(scope="module")
def hosted(meaning):
    """Simulated steps of a transformer on one host of 8 GPUs: seconds, and bytes that one rank sends to the next."""
    ids, wanted = (ht.placeholder(name, (None, 32), "int64") for name in ("ids", "wanted"))
    with ht.scope("gpt"):
        h = ht.nn.Embedding(1024, 512)(ids)
        for _ in range(4):
            h = ht.nn.TransformerBlock(512, 4, causal=True)(h)
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(512, 1024)(h), wanted))
    entries = [loss, ht.optim.Adam(0.01).minimize(loss)]
    profile, shapes = MachineProfile.of(ht.plan.cluster("dgx-h100")), {ids: (64, 32), wanted: (64, 32)}

    def found(zero):
        return simulate(entries, Parallel(zero=zero), profile, world_size=8, shapes=shapes)

    return {zero: found(zero) for zero in range(4)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("zero", "most", "sends"), [(1, 1.3, 1.0), (2, 1.3, 1.0), (3, 1.6, 1.5)])
def test_what_zero_sends_is_hidden_behind_the_computation(hosted, zero, most, sends):
    assert hosted[zero].time <= most * hosted[0].time
    assert hosted[zero].sent[0, 1] == pytest.approx(sends * hosted[0].sent[0, 1], rel=0.03)
    assert max(hosted[zero].peak) < 0.51 * max(hosted[0].peak)


def test_bytes_are_counted_by_link():
    size = sum(v.nbytes for v in ht.Executor(mlp()[0]["train"][:1]).state.arrays.values())
    cost = simulated(mlp, DataParallel(), world_size=2)
    assert set(cost.sent) == {(0, 1), (1, 0)}
    assert cost.sent[0, 1] == cost.sent[1, 0] == size + 4  # gradients, and the loss


def test_products_in_16_bits_take_the_rate_of_16_bits():
    x, w = ht.placeholder("x", (512, 512)), ht.variable("w", 1.0, (512, 512))
    profile = MachineProfile(DeviceFigures(flops=4e9, flops32=1e9, bandwidth=1e15, launch=0.0))
    told = {
        p: simulate([x @ w], DataParallel(), profile, world_size=1, precision=p).time for p in ("float32", "float16")
    }
    assert told == {"float32": pytest.approx(2 * 512**3 / 1e9), "float16": pytest.approx(2 * 512**3 / 4e9, rel=0.1)}
    with pytest.raises(ArgumentError, match="unknown precision 'half'") as caught:
        simulate([x @ w], DataParallel(), profile, world_size=1, precision="half")
    assert "float16" in caught.value.fix


def test_ranks_compiled_together_talk_to_their_own_groups():
    links = {(0, 2), (2, 0), (1, 3), (3, 1)}  # gradients, in buckets, over the ranks with equal parts of the weights
    cost = simulated(mlp, Parallel(tensor=2, split=SPLIT))
    assert links <= set(cost.sent)
    assert len({cost.sent[link] for link in links}) == 1


def test_servers_are_told_and_asked_what_real_ranks_tell_and_ask_them():
    def rank(client, comm):
        strategy, entries = hybrid(), model(ht.optim.SGD(0.3))["train"]
        steps = ht.Executor(entries, strategy=strategy, comm=Connected(comm, client)).program(batch(0)).steps
        shapes = {name: array.shape for name, array in batch(0).items()}
        found = (
            SimulatedJob(entries, strategy, 2, shapes).programs,
            simulate(entries, strategy, FREE, world_size=2, shapes=shapes),
        )
        return [s.node.op.name for s in steps], *found

    (real, (program,), cost), (other, *_) = job(2, rank)
    assert [node.op.name for node in program.order] == real == other
    ids, rows = ROWS // 2 * 3 * 8, ROWS // 2 * 3 * 8 * 4  # bytes of int64 and of rows of 8 float32
    assert cost.sent[0, SERVERS] == cost.sent[1, SERVERS] == 2 * ids + rows  # what to pull, and what to push
    assert cost.sent[SERVERS, 0] == rows
    assert cost.time > WIRE.message(ids + rows)


def test_hosts_apart_take_the_slow_link():
    slow = Link(latency=1e-3, bandwidth=1e6)
    one, two = (replace(FREE, cluster=Cluster(hosts, inner=WIRE, outer=slow)) for hosts in ((4,), (2, 2)))
    assert simulated(mlp, DataParallel(), two).time > 10 * simulated(mlp, DataParallel(), one).time


def test_overlap_and_traces_of_a_timeline(tmp_path):
    rows = (
        Event(0, COMPUTE, "a", 0.0, 2.0),
        Event(0, COMPUTE, "b", 3.0, 4.0),
        Event(0, COMMUNICATION, "all_reduce", 1.0, 3.5),
        Event(1, COMPUTE, "<c>", 0.0, 1.0),
    )
    timeline = Timeline(rows)
    overlap = timeline.overlap(0)
    assert (overlap.compute, overlap.communication, overlap.both, overlap.hidden) == (3.0, 2.5, 1.5, 0.6)
    assert timeline.overlap(1).hidden == 1.0
    timeline.chrome_trace(tmp_path / "trace.json")
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in events][2] == (0, 1, 1e6, 2.5e6)
    svg = timeline.to_svg()
    assert svg.count("<title>") == len(rows) and "60 % hidden" in svg and "&lt;c&gt;" in svg


@pytest.mark.parametrize("strategy", [DataParallel(), ZeRO(3), Pipeline(2, microbatches=4, data=2)], ids=str)
def test_what_ranks_hold_stands_below_what_they_do(strategy, tmp_path):
    (graph, feeds), cost = mlp(), simulated(mlp, strategy)
    job = SimulatedJob(graph["train"], strategy, 4, {name: array.shape for name, array in feeds[0].items()})
    assert {*cost.timeline.held} == {0, 1, 2, 3}
    for program in job.programs:
        held = cost.timeline.held[program.ranks[0]]
        times, meanwhile = zip(*held.steps)
        assert times == tuple(sorted(times)) and times[0] == 0.0 and times[-1] <= cost.time
        assert held.kept == program.fed + program.kept and max(program.live) == max(meanwhile)
        assert 0.8 * program.peak <= held.most <= program.peak  # an arena has gaps
    cost.timeline.chrome_trace(tmp_path / "trace.json")
    counted = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "C"]
    assert len(counted) == sum(len(held.steps) for held in cost.timeline.held.values())
    picture = draw({"ours": cost.timeline, "<theirs>": cost.timeline})
    assert picture.count(" all the time</title>") == 8 and "&lt;theirs&gt;: " in picture and "ours: " in picture


def test_bytes_alive_are_those_of_values_that_have_come_and_are_read_later():
    graph, feeds = mlp()
    shapes = {name: array.shape for name, array in feeds[0].items()}
    (program,) = SimulatedJob(graph["train"], DataParallel(), 1, shapes).programs
    own = [s for s in program.storages if s.home is None]
    alive = [sum(s.nbytes for s in own if s.first <= k <= s.last) for k in range(len(program.order))]
    assert program.live == alive and max(alive) <= program.arena


def test_errors_are_those_of_the_executor():
    with pytest.raises(ht.errors.ArgumentError, match="2 x 2"):
        simulated(mlp, Parallel(data=2, tensor=2), world_size=8)


@pytest.mark.parametrize(
    ("strategy", "shapes", "kind", "text"),
    [
        (DataParallel(), {}, "ShapeError", r"the shape of 'x' is \(\?, 4\)\n.*\n.*\n.*\n  fix: .*shapes=\{'x'"),
        (DataParallel(), {"X": (8, 4)}, "UnknownNameError", "there is no placeholder 'X'"),
        (None, {"x": (8, 4)}, "ArgumentError", r"Alone\(\) spreads nothing over ranks"),
    ],
)
def test_what_is_missing_is_named(strategy, shapes, kind, text):
    with pytest.raises(getattr(ht.errors, kind), match=text):
        simulate([ht.mean(ht.placeholder("x", (None, 4)))], strategy, FREE, world_size=2, shapes=shapes)


def test_communication_by_hand_is_refused():
    x = ht.placeholder("x", (8,))
    y = all_reduce(x, ranks=(0, 1, 2, 3))
    with pytest.raises(ht.errors.GraphError, match="written by hand"):
        simulate([y], DataParallel(), FREE, world_size=4, shapes={})


def test_nothing_is_allocated():
    h = x = ht.placeholder("x", (None, 1 << 15))
    with ht.scope("large"):
        for _ in range(24):
            h = ht.nn.Linear(1 << 15, 1 << 15)(h)  # 4 GiB each
    cost = simulate([ht.sum(h)], TensorParallel({"*": 1}), FREE, world_size=4, shapes={x: (8, 1 << 15)})
    assert min(cost.peak) > 24 << 30
    assert np.isfinite(cost.time)


def test_a_value_may_be_larger_than_any_memory():
    x = ht.placeholder("x", (None, 1 << 10))
    cost = simulate([ht.sum(ht.exp(x))], DataParallel(), FREE, world_size=2, shapes={x: (1 << 33, 1 << 10)})
    assert min(cost.peak) > 1 << 44


def test_ranks_that_know_the_servers_only_send_each_weight_there_and_back():
    graph, feeds = mlp()
    cost = simulate(graph["train"], ParameterServer(), FREE, world_size=3, shapes=feeds[0])
    nbytes = sum(int(v.tensor.nbytes) for v in ht.Graph(graph["train"][:1]).leaves("variable"))
    assert cost.sent == {edge: nbytes for rank in range(3) for edge in ((SERVERS, rank), (rank, SERVERS))}


@pytest.mark.parametrize("strategy", [ParameterServer(), hybrid()], ids=["all", "tables"])
def test_bytes_of_rows_are_told_as_the_most(strategy):
    """How many ids of a batch are distinct only a run knows."""
    entries = model(ht.optim.SGD(0.1))["train"]
    cost = simulate(entries, strategy, FREE, world_size=2, shapes=batch(0))
    assert "at most" in cost.note and "as if no id came twice" in cost.note
    assert not simulate(entries, DataParallel(), FREE, world_size=2, shapes=batch(0)).note


def test_what_takes_turns_overlaps_by_nothing_however_it_is_rounded():
    lanes = (COMPUTE, COMMUNICATION)
    for count in range(2, 60):
        events = tuple(Event(0, lanes[k % 2], "it", k / 7, (k + 1) / 7) for k in range(count))
        assert 0.0 <= Timeline(events).overlap(0).both < 1e-12
