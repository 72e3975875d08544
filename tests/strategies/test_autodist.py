"""AutoDist's builders: all train as one process does, and each sends the bytes that its name says."""

from __future__ import annotations

import functools
import itertools
import random
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

import hetu as ht
from hetu.checkpoint import Checkpoint
from hetu.codec import codec
from hetu.core.errors import ArgumentError, GraphError, UnknownNameError
from hetu.dist import DataParallel, Strategy, run_ranks
from hetu.dist.comm.comm import SerialComm
from hetu.dist.cut.coded import LOST_OF, sum_coded
from hetu.dist.cut.on_ranks import OnRanks
from hetu.plan import MachineProfile, simulate
from hetu.plan.simulation.simulate import SERVERS
from hetu.strategies import (
    PS,
    AllReduce,
    Connected,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    UnevenPartitionedPS,
)

from ..dist.links import CountingComm, around
from ..dist.models import MODELS, losses, mlp
from .test_hybrid import job

STEPS, RANKS, ROWS = 3, 4, 12
SHAPES = {"up/weight": (10, 16), "up/bias": (16,), "down/weight": (16, 5), "down/bias": (5,)}
Sent = Counter[tuple[int, int]]


def size(name: str) -> int:
    return int(4 * np.prod(SHAPES[name]))


def reads(name: str) -> int:
    """How often ranks get a weight that they do not keep: the backward pass reads that of the second layer again."""
    return 1 + (name == "down/weight")


def summed(*buckets: tuple[str, ...]) -> Sent:
    """All-reduces of these gradients."""
    rings = (around(range(RANKS), 2 * (RANKS - 1) * sum(map(size, names)) // RANKS) for names in buckets)
    return sum(rings, Counter())


def by_hosts() -> Sent:
    """Between ranks of a host halves of what divides, twice; a half of each half between hosts; the rest in a ring."""
    even = sum(map(size, SHAPES)) - size("down/bias")
    within = around((0, 2), even // 2 * 2) + around((1, 3), even // 2 * 2)
    between = around((0, 1), even // 2) + around((2, 3), even // 2)
    return within + between + around((0, 2, 1, 3), 2 * (RANKS - 1) * size("down/bias") // RANKS)


def homes(**rows: dict[int, int]) -> Sent:
    """Each variable has so many rows on some ranks, which get gradients from all others and give them new values."""
    sent: Sent = Counter()
    for name, home in ((name.replace("_", "/"), home) for name, home in rows.items()):
        assert sum(home.values()) == SHAPES[name][0]
        for (owner, count), other in itertools.product(home.items(), range(RANKS)):
            nbytes = size(name) // SHAPES[name][0] * count
            sent += {} if other == owner else Counter({(other, owner): nbytes, (owner, other): nbytes * reads(name)})
    return sent


def parted(**axes: int) -> Sent:
    """A rank has a part along this axis, of the size of the largest: it gets its sum, and gives it to all."""
    each = {name.replace("_", "/"): axis for name, axis in axes.items()}
    parts = {name: size(name) // SHAPES[name][axis] * -(-SHAPES[name][axis] // RANKS) for name, axis in each.items()}
    return around(range(RANKS), (RANKS - 1) * sum(part * (1 + reads(name)) for name, part in parts.items()))


class Row(NamedTuple):
    builder: ht.dist.Builder
    sent: Sent  # in a step on four ranks, beside the sum of the loss
    ring: tuple[int, ...] = (0, 1, 2, 3)  # of all ranks


TABLE = {
    "PS": Row(PS(), homes(up_weight={0: 10}, up_bias={0: 16}, down_weight={0: 16}, down_bias={0: 5})),
    "PSLoadBalancing": Row(
        PSLoadBalancing(), homes(up_weight={0: 10}, down_weight={1: 16}, up_bias={2: 16}, down_bias={3: 5})
    ),
    "PartitionedPS": Row(  # 5 rows have no 2 to 4 even parts
        PartitionedPS(),
        homes(up_weight={0: 5, 1: 5}, down_weight={2: 8, 3: 8}, up_bias={2: 8, 3: 8}, down_bias={2: 5}),
    ),
    "UnevenPartitionedPS": Row(
        UnevenPartitionedPS(),
        homes(
            up_weight={0: 3, 1: 3, 2: 4},
            down_weight={0: 5, 1: 5, 3: 6},
            up_bias={0: 5, 2: 5, 3: 6},
            down_bias={2: 2, 3: 3},
        ),
    ),
    "AllReduce": Row(AllReduce(), summed(tuple(SHAPES))),
    "AllReduce in chunks": Row(AllReduce(3), summed(("up/weight", "up/bias", "down/weight"), ("down/bias",))),
    "AllReduce by hosts": Row(AllReduce(hosts=[(0, 2), (1, 3)]), by_hosts(), (0, 2, 1, 3)),
    "PartitionedAR": Row(PartitionedAR(), parted(up_weight=0, up_bias=0, down_weight=0, down_bias=0)),
    "RandomAxisPartitionAR": Row(RandomAxisPartitionAR(1), parted(up_weight=0, up_bias=0, down_weight=1, down_bias=0)),
}


def coded(nbytes, *groups: tuple[int, ...], within: bool = False) -> Sent:
    """Each rank gives what its code makes of n numbers to all others of its group; `within` hosts halves are summed."""
    found, even = Counter(), sum(map(size, SHAPES)) - size("down/bias")
    for name in SHAPES:
        apart = within and name != "down/bias"
        for group in groups if apart else [(0, 2, 1, 3) if within else (0, 1, 2, 3)]:
            found += around(group, (len(group) - 1) * nbytes(size(name) // (8 if apart else 4)))
    halves = around((0, 2), even // 2 * 2) + around((1, 3), even // 2 * 2)
    return found + halves if within else found


HOSTS = [(0, 2), (1, 3)]
WIRES = {
    "16 bits": Row(
        AllReduce(wire="float16"), around(range(RANKS), 2 * (RANKS - 1) * sum(map(size, SHAPES)) // 2 // RANKS)
    ),
    "1 bit": Row(AllReduce(wire="1bit"), coded(lambda n: 8 + -(-n // 8))),
    "a tenth": Row(AllReduce(2, wire="topk:0.1"), coded(lambda n: 8 * -(-n // 10))),
    "8 bits between hosts": Row(
        AllReduce(hosts=HOSTS, wire="int8"), coded(lambda n: n + 4, (0, 1), (2, 3), within=True), (0, 2, 1, 3)
    ),
}


@functools.cache
def alone(name: str) -> list[float]:
    return losses(MODELS[name], steps=STEPS)


def outputs(graph) -> list[ht.Node]:
    return [graph["train"][0], *graph["train"][1].values()]


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
@pytest.mark.sampled(10)
def test_training_equals_that_of_one_process_by_the_strategy_as_json_too(name, model):
    strategy = TABLE[name].builder.build(outputs(MODELS[model]()[0]), RANKS)
    again = Strategy.from_json(strategy.to_json())
    assert again == strategy and again.to_json() == strategy.to_json()
    for found in run_ranks(RANKS, lambda comm: losses(MODELS[model], Strategy.from_json(again.to_json()), comm, STEPS)):
        np.testing.assert_allclose(found, alone(model), rtol=1e-6)


@pytest.mark.parametrize("name", TABLE | WIRES)
def test_each_link_carries_the_bytes_that_are_counted_by_hand(name):
    """In the simulation, and between communicators."""
    builder, wanted, ring = (TABLE | WIRES)[name]
    wanted = wanted + around(ring, 2 * (RANKS - 1) * 4 // RANKS)  # the loss

    def body(comm) -> Sent:
        graph, batches = mlp(ht.optim.SGD(0.1))
        ex = ht.Executor(graph, strategy=builder, comm=(counting := CountingComm(comm)))
        ex.run("train", batches[0])
        counting.sent.clear()  # what it took to begin
        ex.run("train", batches[1])
        return counting.sent

    assert sum(run_ranks(RANKS, body), Counter()) == wanted
    graph, batches = mlp(ht.optim.SGD(0.1))
    cost = simulate(graph["train"], builder, MachineProfile(), world_size=RANKS, shapes=batches[0])
    assert {link: nbytes for link, nbytes in cost.sent.items() if nbytes} == wanted


# -- gradients in fewer bytes ---------------------------------------------------------------------------------------

RATE, SHAPE = 0.1, (6, 3)


def regression(wire: str = "", hosts=(), comm=None) -> list[np.ndarray]:
    """The weights after each step."""
    return weights(regressor(wire, hosts, comm), regressed())


def weights(ex: ht.Executor, batches) -> list[np.ndarray]:
    return [ex.run({"x": a, "t": b}) and ex.state["w"].copy() for a, b in batches]


def regressor(wire: str = "", hosts=(), comm=None) -> ht.Executor:
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None, 3))
    w = ht.variable("w", np.zeros(SHAPE, "float32"))
    loss = ht.sum((x @ w - t) ** 2)
    graph = [loss, ht.optim.SGD(RATE).minimize(loss)]
    strategy = None
    if comm is not None:
        written = AllReduce(hosts=hosts, wire=wire).build([loss, *graph[1].values()], comm.world_size)
        strategy = Strategy.from_json(written.to_json())
        assert strategy.variables["w"].wire == wire and f"gradients as {wire}" in str(strategy)
    return ht.Executor(graph, strategy=strategy, comm=comm)


def regressed() -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of two sizes, for which there are two programs."""
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(n, 6)).astype("f") / 4, rng.normal(size=(n, 3)).astype("f")) for n in (8, 4, 4, 8, 8, 4)]


@pytest.mark.parametrize("hosts", [(), HOSTS], ids=["ring", "hosts"])
@pytest.mark.parametrize("wire", ["int8", "topk:0.3", "1bit"])
def test_what_a_code_loses_is_added_to_the_next_gradient(wire, hosts):
    """By loops in NumPy: each rank's gradient, or what a host has summed of it, and what its code has left out."""
    code, w, wanted = codec(wire), np.zeros(SHAPE), []
    each = [((h, h + 1), slice(3 * k, 3 * k + 3)) for h in (0, 2) for k in range(2)]  # parts of the batch, rows
    parts = each if hosts else [((k,), slice(None)) for k in range(RANKS)]
    lost = [0.0 for _ in parts]
    for x, t in regressed():
        of_ranks, total = zip(np.split(x, RANKS), np.split(t, RANKS)), 0 * w
        terms = [2 * a.T @ (a @ w - b) for a, b in of_ranks]
        for k, (ranks, rows) in enumerate(parts):
            given = sum(terms[r][rows] for r in ranks).reshape(1, -1) + lost[k]
            told = code.decode(code.encode(given.astype("f")), given.size)
            total[rows] += told.reshape(-1, 3)
            lost[k] = given - told
        w = w - RATE * total
        wanted.append(w)
    for found in run_ranks(RANKS, lambda comm: regression(wire, hosts, comm)):
        np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_what_was_lost_is_forgotten_with_the_values_that_it_was_of(tmp_path):
    """A run that goes back to a checkpoint goes on as one that begins there."""

    def body(comm):
        ex = regressor("1bit", (), comm)
        ex.save(tmp_path / "begun")
        first, further = weights(ex, regressed()), weights(ex, regressed())
        ex.load(tmp_path / "begun")
        return first, further, weights(ex, regressed())

    for first, further, again in run_ranks(RANKS, body):
        np.testing.assert_array_equal(again, first)
        assert not np.array_equal(first, further)


@pytest.mark.parametrize("hosts", [(), HOSTS], ids=["ring", "hosts"])
@pytest.mark.parametrize("wire", ["int8", "topk:0.3", "1bit"])
@pytest.mark.parametrize("way", ["at once", "a thread"])
def test_a_run_from_a_checkpoint_goes_on_with_what_was_lost(wire, hosts, way, tmp_path):
    """Bit for bit as one that was not interrupted, and so does one that goes back to it."""

    def body(comm):
        begun, further = regressed()[:3], regressed()[3:]
        ex = regressor(wire, hosts, comm)
        weights(ex, begun)
        if way == "at once":
            ex.save(tmp_path / "saved")
        else:
            checkpoints = ht.Checkpoints(ex, tmp_path / "saved")
            checkpoints.save()
            checkpoints.wait()
        wanted, found = weights(ex, further), []
        for again in (regressor(wire, hosts, comm), ex):
            again.load(tmp_path / "saved", only="w")
            found.append(weights(again, further))
        return wanted, *found

    for wanted, *found in run_ranks(RANKS, body):
        for weights_of in found:
            np.testing.assert_array_equal(weights_of, wanted)


def test_other_ranks_are_told_that_they_begin_without_what_was_lost(tmp_path):
    def saved(comm):
        ex = regressor("1bit", (), comm)
        weights(ex, regressed()[:2])
        ex.save(tmp_path / "saved")
        return ex.state["w"]

    def loaded(comm):
        ex = regressor("1bit", (), comm)
        ex.load(tmp_path / "saved", only="w")
        return ex.state["w"], weights(ex, regressed())

    def begun(comm):
        ex = regressor("1bit", (), comm)
        ex.state["w"] = values
        return values, weights(ex, regressed())

    values = run_ranks(RANKS, saved)[0]
    with pytest.warns(RuntimeWarning, match="what codes of gradients lost on 4 ranks is dropped on 2: gradients begin"):
        found = run_ranks(2, loaded)
    for ours, theirs in zip(found, run_ranks(2, begun), strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])


def test_what_was_lost_under_another_strategy_is_told_and_saved_no_more(tmp_path):
    def body(comm):
        ex = regressor("1bit", (), comm)
        weights(ex, regressed()[:2])
        ex.save(tmp_path / "first")
        other = regressor("int8", (), comm)
        other.load(tmp_path / "first", only="w")
        other.save(tmp_path / "same")  # nobody has trained: it may be for whoever loads this
        weights(other, regressed()[2:])
        other.save(tmp_path / "second")

    with pytest.warns(RuntimeWarning, match="what codes lost of gradients such as that of 'w' under another"):
        run_ranks(RANKS, body)
    codes = [
        {name.split()[2] for name in Checkpoint(tmp_path / saved).beside(0, LOST_OF)}
        for saved in ("first", "same", "second")
    ]
    assert codes == [{"1bit"}, {"1bit"}, {"int8"}]


@pytest.mark.parametrize(("wire", "eps"), [("float16", 2**-11), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("hosts", [(), HOSTS], ids=["ring", "hosts"])
def test_sums_in_16_bits_are_rounded_and_no_more(wire, eps, hosts):
    if wire == "bfloat16":
        pytest.importorskip("ml_dtypes")
    wanted, each = regression(), run_ranks(RANKS, lambda comm: regression(wire, hosts, comm))
    largest = np.abs(np.diff(wanted, axis=0)).max()  # of a step
    for found in each:
        assert 0 < np.abs(np.subtract(found, wanted)).max() < len(wanted) * RANKS * largest * eps
        np.testing.assert_array_equal(found, each[0])


@pytest.mark.parametrize("optimizer", [ht.optim.SGD(0.1), ht.optim.Adam(0.1), ht.optim.Adam(0.1, clip_norm=1.0)])
def test_what_ranks_sum_of_a_small_table_is_coded_under_any_rule(optimizer):
    """Beside it goes how often each row was looked up, which decides what the rule changes, as it is."""
    ids = ht.placeholder("ids", (None, 3), "int64")
    with ht.scope("model"):
        loss = ht.mean(ht.square(ht.nn.Embedding(5, 8, name="small")(ids) + 1))
    graph, feed = [loss, optimizer.minimize(loss)], {ids: np.arange(36).reshape(12, 3) % 4}
    wanted = [float(ex.run(feed)[0]) for ex in [ht.Executor(graph)] for _ in range(STEPS)]

    def body(comm):
        ex = ht.Executor(graph, strategy=AllReduce(wire="int8"), comm=comm)
        sums = [s.node for s in ex.program(feed).steps if s.node.op is sum_coded]
        return [s.inputs[0].shape for s in sums], [float(ex.run(feed)[0]) for _ in range(STEPS)]

    for shapes, found in run_ranks(2, body):
        assert shapes == [(5, 8)]
        np.testing.assert_allclose(found, wanted, rtol=1e-2)


def test_a_gradient_of_unequal_parts_cannot_be_coded_and_a_wire_has_a_name():
    graph, batches = mlp()
    groups = ht.dist.Heterogeneous([(0, 1), (2,)], (1, 1), split={"*up/weight": 1})
    strategy = groups.build(outputs(graph), 3)
    kept = strategy.variables["mlp/up/weight"]
    strategy.variables["mlp/up/weight"] = replace(kept, wire="int8")
    with pytest.raises(GraphError, match=r"to travel as int8, but ranks that sum it have unequal parts[\s\S]*float16"):
        simulate(graph["train"], strategy, MachineProfile(), world_size=3, shapes=batches[0])
    with pytest.raises(UnknownNameError, match="no way 'float8' for numbers to travel"):
        AllReduce(wire="float8").build(outputs(graph), 2)
    with pytest.raises(ArgumentError, match=r"wire='int8' on a GPU[\s\S]*fix: use wire=\"float16\""):
        sum_coded.bind_rule(object(), (), np.zeros(1), group=(0,), code="int8", order=1, comm=None)


class Alike(SerialComm):
    """One of some ranks, of which all have the same."""

    def split(self, ranks):
        return self

    def all_gather(self, x, out):
        out[...] = x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("wire", ["int8", "topk:0.01", "topk:1", "1bit"])
def test_what_codes_take_beside_the_plan_counts_as_memory_of_a_rank(wire, dtype):
    for ranks in (2, 8):
        x = ht.placeholder("x", (100, 300), dtype)
        node = sum_coded.make((x,), {"group": tuple(range(ranks)), "code": wire, "order": 1})
        out, value = tuple(np.empty(t.shape, t.dtype) for t in node.type), np.ones(x.shape, dtype)
        tracemalloc.start()
        [run] = sum_coded.bind_rule(np, out, value, **node.attrs, comm=Alike())
        run(), run()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        room = OnRanks(DataParallel().build([x], 1), SerialComm()).aside([node])
        assert most < room + 4000 and room < 3 * most


# -- with servers ---------------------------------------------------------------------------------------------------

WIDTHS = {"large": (500, 8), "small": (40, 2)}  # tables: rows, and numbers of a row


def looked_up() -> dict[str, list]:
    fed = {name: ht.placeholder(name, (None, 3), "int64") for name in WIDTHS}
    with ht.scope("model"):
        found = [ht.nn.Embedding(*WIDTHS[name], name=name)(ids) for name, ids in fed.items()]
        y = ht.nn.Linear(30, 3, name="down")(ht.flatten(ht.concat(found, axis=2), 1))
        loss = ht.mean(ht.softmax_cross_entropy(y, ht.placeholder("t", (None,), "int64")))
        return {"train": [loss, ht.optim.SGD(0.3).minimize(loss)]}


def fed(step: int) -> dict[str, np.ndarray]:
    """No rank looks a row up twice."""
    rng = np.random.default_rng(step)
    found = {name: rng.permutation(rows)[:36].reshape(ROWS, 3) for name, (rows, _) in WIDTHS.items()}
    return found | {"t": rng.integers(0, 3, ROWS)}


def test_parallax_trains_as_one_process_does_and_sends_rows_to_servers_and_sums_between_ranks():
    ex = ht.Executor(looked_up())
    wanted = [float(ex.run("train", fed(step))[0]) for step in range(STEPS)]

    def body(client, comm):
        graph, counting = looked_up(), CountingComm(comm)
        strategy = Strategy.from_json(Parallax().build(outputs(graph), RANKS).to_json())
        assert {name for name, home in strategy.variables.items() if home.served} == {
            f"model/{name}/weight" for name in WIDTHS
        }
        ex = ht.Executor(graph, strategy=strategy, comm=Connected(counting, client))
        found = [float(ex.run("train", fed(step))[0]) for step in range(STEPS - 1)]
        counting.sent.clear()
        client.clock().wait(), comm.barrier()
        before, _ = client.status()[0], comm.barrier()
        found.append(float(ex.run("train", fed(STEPS - 1))[0]))
        client.clock().wait(), comm.barrier()
        after = client.status()[0]
        return found, counting.sent, tuple(after[way] - before[way] for way in ("received", "sent"))

    each = ROWS // RANKS * 3  # rows of each table that a rank looks up
    rows = sum(4 * width * each for _, width in WIDTHS.values())
    ids = len(WIDTHS) * 8 * each
    between = around(range(RANKS), 2 * (RANKS - 1) * 4 * (30 * 3 + 3) // RANKS)
    between += around(range(RANKS), 2 * (RANKS - 1) * 4 // RANKS)
    losses_of, sent, moved = zip(*job(RANKS, body))
    np.testing.assert_allclose(losses_of, [wanted] * RANKS, rtol=1e-6)
    assert sum(sent, Counter()) == between and {*moved} == {(RANKS * (2 * ids + rows), RANKS * rows)}
    graph = looked_up()
    cost = simulate(graph["train"], Parallax(), MachineProfile(), world_size=RANKS, shapes=fed(0))
    servers = {(rank, SERVERS): 2 * ids + rows for rank in range(RANKS)} | {(SERVERS, r): rows for r in range(RANKS)}
    assert cost.sent == between + Counter(servers)


@pytest.mark.parametrize("builder", [AllReduce(2), AllReduce(hosts=[(0, 1), (2, 3)])], ids=["ring", "hosts"])
def test_gradients_of_what_is_placed_on_other_ranks_stay_there(builder):
    x, where = ht.placeholder("x", (None, 4)), (0, 1)
    with ht.scope("model"), ht.dist.place(where):
        loss = ht.mean(ht.square(ht.nn.Linear(4, 4, name="placed")(x)))
        graph = {"train": [loss, ht.optim.SGD(0.3).minimize(loss)]}
    kept = builder.build(outputs(graph), RANKS).variables["model/placed/weight"]
    assert (kept.store.ranks, kept.bucket, kept.through) == (where, 0, ())


# -- homes ----------------------------------------------------------------------------------------------------------


def test_an_axis_is_drawn_by_a_seed():
    graph, _ = mlp()
    assert len({str(RandomAxisPartitionAR(seed).build(outputs(graph), 2)) for seed in range(20)}) > 1


def test_the_largest_load_is_at_most_four_thirds_of_the_best():
    for seed in range(12):
        draw = random.Random(seed)
        sizes = [draw.randint(1, 60) for _ in range(7)]
        with ht.scope(f"load_{seed}"):
            variables = [ht.variable(f"v{i}", ht.init.zeros, (size,)) for i, size in enumerate(sizes)]
        kept = PSLoadBalancing().build([ht.sum(ht.concat(variables, axis=0))], 3).variables
        load = [sum(s for s, v in zip(sizes, variables) if kept[v.name].store.ranks == (r,)) for r in range(3)]
        every = itertools.product(range(3), repeat=len(sizes))
        best = min(max(sum(s for s, at in zip(sizes, p) if at == r) for r in range(3)) for p in every)
        assert sum(load) == sum(sizes) and max(load) <= 4 / 3 * best
