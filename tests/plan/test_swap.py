"""Values that wait in the memory of the host: the same numbers to the last bit, in a smaller arena."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import GraphError
from hetu.core.graph import OPS
from hetu.core.memory import plan
from hetu.core.subgraph import SubGraph
from hetu.cpu_kernels.compiler import compiler
from hetu.dist import DataParallel, SerialComm, ZeRO, run_ranks
from hetu.passes import chosen_passes
from hetu.plan import MachineProfile, Plan, Within, auto, simulate
from hetu.plan.costs.links import DeviceFigures
from hetu.plan.memory.fit import fit
from hetu.plan.memory.swap import Swap, gaps
from hetu.plan.simulation.instructions import SimulatedJob

from ..apart import APART
from ..dist.models import losses
from .test_fit import ROWS, deep, vgg

FAST = MachineProfile(
    DeviceFigures(flops=1e9, bandwidth=1e9, host_bandwidth=1e12)
)  # beside it, to compute again takes an age
SLOW = MachineProfile(DeviceFigures(flops=1e15, bandwidth=1e15, launch=0.0, host_bandwidth=1e6))


def lowered(graph, feed):
    return SubGraph("step", graph["train"]).lower({k: v.shape for k, v in feed.items()}, chosen_passes(APART))[:2]


def counts(planned) -> Counter:
    return Counter(node.op.name for node in planned.order)


def test_a_cnn_trains_in_six_tenths_of_its_memory_by_swapping_alone():
    graph, feed = vgg(batch=24)
    outside = sum(v.nbytes for v in feed.values()) + sum(int(v.tensor.nbytes) for v in graph["train"][1])
    before = plan(*lowered(graph, feed))
    room = before.arena_bytes * 6 // 10
    alone = ht.Executor(graph, passes=APART)
    tight = Within(DataParallel(), room + outside, FAST)
    small = ht.Executor(graph, strategy=tight, comm=SerialComm(), passes=APART)
    program = small.program("train", feed)
    assert program.plan.arena_bytes <= room < alone.program("train", feed).plan.arena_bytes
    found = counts(program.plan)
    copies = found.pop("to_host"), found.pop("from_host")
    assert copies[0] == copies[1] > 0 and found == counts(before)  # nothing is computed twice
    assert program.plan.host_bytes > 0 and f"{program.plan.host_bytes:,} bytes of the host" in str(program)
    for _ in range(2):
        assert alone.run("train", feed)[0] == small.run("train", feed)[0]
    for name in alone.state:
        np.testing.assert_array_equal(alone.state[name], small.state[name])


@pytest.mark.parametrize("profile, swapped", [(FAST, True), (SLOW, False), (MachineProfile(), False)])
def test_a_step_goes_the_way_that_takes_less_time(profile, swapped):
    fetches, updates = lowered(*vgg(batch=24))
    before = plan(fetches, updates)
    found = counts(plan(*fit(fetches, updates, before.arena_bytes * 8 // 10, profile))) - counts(before)
    assert (
        (set(found) == {"to_host", "from_host"}) == swapped == (found["conv2d_last" if compiler() else "conv2d"] == 0)
    )


def test_so_does_each_value():
    """To compute the product again takes longer than to bring it back; with the sines it is the other way round."""
    shapes = {"x": (64, 512), "w": (512, 64), "s": (64, 64), "large": (1024, 64)}
    x, w, s, large = (ht.placeholder(name, shape) for name, shape in shapes.items())
    product, sines = x @ w, ht.sin(s)
    middle = ht.sum(ht.exp(large * ht.mean(product * sines)))
    outputs = [ht.sum(product + middle), ht.sum(sines * middle)]
    before = plan(outputs, {})
    fed = sum(4 * a * b for a, b in shapes.values())
    profile = MachineProfile(DeviceFigures(flops=1e9, bandwidth=1e9, launch=0.0, host_bandwidth=1e8))
    step = fit(outputs, {}, before.arena_bytes + fed - 20_000, profile)
    assert counts(plan(*step)) - counts(before) == {"to_host": 1, "from_host": 1, "sin": 1}
    rng = np.random.default_rng(0)
    feed = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    for one, other in zip(ht.Executor(outputs).run(feed), ht.Executor([*step[0]], passes=[]).run(feed), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.sampled(2)
@pytest.mark.compiled
@pytest.mark.parametrize("strategy", [DataParallel(), ZeRO(3)])
def test_ranks_swap_beside_their_communication(strategy):
    build = partial(deep, layers=4)
    graph, shapes = build()[0], {"x": (ROWS, 8), "t": (ROWS, 8)}
    whole = simulate(graph["train"], strategy, FAST, world_size=2, shapes=shapes)
    tight = Within(strategy, max(whole.peak) * 9 // 10, FAST)
    small = simulate(graph["train"], tight, FAST, world_size=2, shapes=shapes)
    assert max(small.peak) <= max(whole.peak) * 9 // 10 and small.time > whole.time
    assert all(
        "to_host" in [n.op.name for n in p.order] for p in SimulatedJob(graph["train"], tight, 2, shapes).programs
    )
    wanted = run_ranks(2, lambda comm: losses(build, strategy, comm, 3))
    assert run_ranks(2, lambda comm: losses(build, tight, comm, 3)) == wanted


def test_copies_run_as_soon_and_as_late_as_they_may():
    a = ht.sin(ht.placeholder("x", (64, 4)))
    b = ht.reshape(a, (256,))  # a view, which is read before and after
    c = ht.exp(ht.exp(ht.sum(b)))
    y, z = ht.sum(b * c), ht.sum(a * 2.0)
    planned = plan([y, z], {})
    step, _ = Swap([y, z], {}, planned, {a}).step
    after = plan(step, {})
    names = [node.op.name for node in after.order]
    assert names[:5] == ["sin", "to_host", "sum", "exp", "exp"] and names[5] == "from_host"
    assert names.count("from_host") == 1  # all later readers share it
    away, back = (next(n for n in after.order if n.op.name == name) for name in ("to_host", "from_host"))
    assert after.storage(away).on_host and not after.storage(back).on_host
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    for one, other in zip(ht.Executor([y, z]).run({"x": x}), ht.Executor([*step], passes=[]).run({"x": x})):
        np.testing.assert_array_equal(one, other)


def test_the_memory_of_the_host_is_shared_too():
    """Two values whose times there do not overlap lie in the same place."""
    x = h = ht.placeholder("x", (256,))
    for _ in range(2):
        a = ht.sin(h)
        h = ht.sin(ht.exp(ht.exp(a))) * a
    planned = plan([h], {})
    found = [node for node in planned.order if (node, 0) in gaps(planned, [h])]
    after = plan(Swap([h], {}, planned, found).step[0], {})
    assert len(found) == 2 and counts(after)["to_host"] == 2
    assert after.host_bytes == x.tensor.nbytes


def test_only_from_host_reads_what_lies_there():
    away = OPS["to_host"](ht.placeholder("x", (4,)))
    with pytest.raises(GraphError, match=r"reads .*to_host.*, which lies in the memory of the host"):
        plan([away + 1.0], {})
    with pytest.raises(GraphError, match="is fetched"):
        plan([away], {})


@pytest.mark.nightly
@pytest.mark.compiled
def test_the_planner_swaps_where_the_way_is_fast():
    graph, feed = vgg(batch=8, size=16)
    shapes = {name: value.shape for name, value in feed.items()}
    whole = simulate(graph["train"], DataParallel(), FAST, world_size=1, shapes=shapes)
    budget = max(whole.peak) * 8 // 10
    strategy = auto(budget, batch_size=8, profile=FAST)
    executor = ht.Executor(graph, strategy=strategy, comm=SerialComm())
    program = executor.program("train", feed)
    assert counts(program.plan)["to_host"] and "or swapping" in str(strategy.why())
    read = Plan.from_json(strategy.chosen.to_json())
    assert read == strategy.chosen and read.profile == FAST
    again = ht.Executor(graph, strategy=read, comm=SerialComm()).program("train", feed)
    assert counts(again.plan) == counts(program.plan)
    recomputing = auto(budget, batch_size=8, profile=replace(FAST, device=replace(FAST.device, host_bandwidth=0.0)))
    chosen = recomputing.choose(graph, SerialComm())
    assert chosen.profile is None and recomputing.chosen.reasons.best.seconds > strategy.chosen.reasons.best.seconds
