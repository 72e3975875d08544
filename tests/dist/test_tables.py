"""Tables that are looked up: ranks send their rows or add up whole tables, whichever is less, and train as one does."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import hetu as ht
from hetu.dist import DataParallel, Heterogeneous, Parallel, Pipeline, TensorParallel, ZeRO, run_ranks
from hetu.plan import MachineProfile, simulate
from hetu.plan.search.candidates import Layered
from hetu.plan.simulation.instructions import bytes_between_ranks
from hetu.strategies import PS, PartitionedAR, RandomAxisPartitionAR, UnevenPartitionedPS

from ..pairs import in_turn, pairwise

TABLES = {"one": (1, 3), "numbers": (5,), "letters": (65, 4), "matrices": (1000, 2, 3), "words": (50_000, 2)}
SIZES = (12, 204, 2400, 24)  # of batches: at the second "letters" are fewer bytes than rows, at the third "matrices"
SPLIT = {"letters": 0, "matrices": 1}


@ht.optim.update_rule
def heavy_signs(p, m, n, g, lr, step, *, beta=0.5):
    """States that move where the gradient is 0 too."""
    m, n = beta * m + g, n + 1.0
    return p - lr * ht.sign(m) / step - 0.01 * lr * n * p, m, n


class HeavySigns(ht.optim.Optimizer):
    rule = heavy_signs


OPTIMIZERS = {
    "sgd": lambda: ht.optim.SGD(0.1),
    "momentum": lambda: ht.optim.Momentum(0.1, nesterov=True),
    "adam": lambda: ht.optim.Adam(0.01),
    "adagrad": lambda: ht.optim.AdaGrad(0.1),
    "own rule": lambda: HeavySigns(0.1),
}
STRATEGIES = {
    "data": DataParallel,
    "parts of feeds": lambda: DataParallel(local_feeds=True),
    "micro-batches": lambda: DataParallel(accumulate=2),
    "zero1": lambda: ZeRO(1),
    "zero3": lambda: ZeRO(3),
    "zero1, micro-batches apart": lambda: ZeRO(1, accumulate=2, statistics="microbatch"),
    "tensor": lambda: TensorParallel(SPLIT),
    "data x tensor": lambda: Parallel(tensor=2, split=SPLIT),
    "zero3 x tensor": lambda: Parallel(tensor=2, zero=3, split=SPLIT),
    "one home": PS,
    "homes of parts": UnevenPartitionedPS,
}
UNEVEN = {
    "unequal": lambda: Heterogeneous([(0, 1), (2,)], shares=(2, 1), split={}),
    "unequal, split": lambda: Heterogeneous([(0, 1), (2,)], shares=(2, 1), split=SPLIT),
}


def model(optimizer, tables=TABLES, twice=()):
    """The loss of products of rows; those in `twice` are looked up by two feeds."""
    x, loss = ht.placeholder("x", (None,), "float64"), 0.0
    for number, (name, shape) in enumerate(tables.items()):
        start = np.random.default_rng(number).normal(size=shape)
        table = ht.variable(name, start, shape, "float64")
        for feed in (name, *[f"{name} again"] * (name in twice)):
            rows = ht.take(table, ht.placeholder(feed, (None,), "int64"), axis=0)
            rows = ht.reshape(ht.tanh(rows), (rows.shape[0], -1))
            loss = loss + ht.mean(ht.sum(rows, axis=1) * x)
    updates = optimizer.minimize(loss)
    return {"train": [loss, updates], "eval": [*updates]}


def batch(size, tables=TABLES, twice=(), step=0, part=(0, 1)):
    """Ids of about half of the rows, and the part of them that this rank feeds."""
    rng = np.random.default_rng(step)
    fed = {"x": rng.normal(size=size)}
    for name in (*tables, *(f"{name} again" for name in twice)):
        rows = tables[name.removesuffix(" again")][0]
        fed[name] = rng.integers(0, (rows + 1) // 2, size) * 2 % rows
    rank, ranks = part
    return {name: value[size * rank // ranks : size * (rank + 1) // ranks] for name, value in fed.items()}


def trained(optimizer, strategy=None, comm=None, twice=(), part=(0, 1), passes=None):
    """All variables, states included, after a step of each size."""
    graph = model(OPTIMIZERS[optimizer](), twice=twice)
    ex = ht.Executor(graph, strategy=strategy, comm=comm, passes=passes)
    losses = [ex.run("train", batch(n, twice=twice, step=k, part=part))[0] for k, n in enumerate(SIZES)]
    return [*losses, *ex.run("eval")]


alone = cache(trained)


def check(name, optimizer, ranks, twice=(), passes=None):
    def work(comm):
        part = (comm.rank, ranks) if name == "parts of feeds" else (0, 1)
        return trained(optimizer, {**STRATEGIES, **UNEVEN}[name](), comm, twice, part, passes)

    for found in run_ranks(ranks, work):
        for value, wanted in zip(found, alone(optimizer, twice=twice, passes=passes), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (3, 4))])
@pytest.mark.parametrize(("name", "optimizer"), in_turn(3, STRATEGIES, OPTIMIZERS))
@pytest.mark.sampled(8)
def test_every_variable_is_as_in_one_process(name, optimizer, ranks):
    if ranks % 2 and " x " in name:
        ranks = 6
    check(name, optimizer, ranks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "optimizer"), in_turn(2, UNEVEN, ["momentum", "own rule"]))
def test_so_it_is_in_groups_of_unequal_size(name, optimizer):
    check(name, optimizer, 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name",), in_turn(2, [name for name in STRATEGIES if "apart" not in name]))  # joins no feeds
def test_so_are_those_that_are_looked_up_twice(name):
    check(name, "momentum", 2, twice=("numbers", "letters", "words"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name",), in_turn(2, [name for name in STRATEGIES if " x " not in name]))
def test_all_rows_move_on_where_rows_alone_are_not_to_be_updated(name):
    """Without the pass that makes updates of rows, as in one process without it: momentum moves the other rows, too."""
    check(name, "momentum", 2, passes=("simplify",))


# -- what is sent ------------------------------------------------------------------------------------------------------


def communicated(name, rows, width, ids, ranks):
    """The bytes that a rank sends in a step for one table, and the kinds of its messages."""
    tables = {"table": (rows, width)}

    def work(comm):
        graph = model(ht.optim.Momentum(0.1), tables)
        part = (comm.rank, ranks) if name == "parts of feeds" else (0, 1)
        ex = ht.Executor(graph, strategy=STRATEGIES[name](), comm=comm)
        program = ex.program("train", batch(ids, tables, part=part))
        return bytes_between_ranks(program, ranks), [
            s.node.op.collective for s in program.steps if s.node.op.collective
        ]

    return max(run_ranks(ranks, work))


SENT = pairwise(("data", "parts of feeds", "zero1", "zero3"), (1, 5, 65, 1000, 50_000), (12, 96, 1200), (2, 3, 4))


@pytest.mark.parametrize(("name", "rows", "ids", "ranks"), SENT)
@pytest.mark.sampled(16)
def test_the_way_of_fewer_bytes_is_taken(name, rows, ids, ranks, monkeypatch):
    found, kinds = communicated(name, rows, 6, ids, ranks)
    forced = []
    for sums in (False, True):
        monkeypatch.setattr("hetu.dist.cut.rewrites._sums_are_less", lambda *_, sums=sums: sums)
        forced.append(communicated(name, rows, 6, ids, ranks))
    (gathered, messages), (added, _) = forced
    assert found == min(gathered, added)
    apart = name.startswith("zero") and rows % ranks > 0  # columns are kept apart, and counts travel to all ranks
    assert len(kinds) <= len(messages) + apart


SPREAD = {
    **{name: STRATEGIES[name] for name in STRATEGIES if name != "parts of feeds" and "tensor" not in name},
    "data x rows": lambda: Parallel(tensor=2, split={"*letters": 0}),
    "data x columns": lambda: Parallel(tensor=2, split={"*letters": 1}),
    "zero1 x rows": lambda: Parallel(tensor=2, zero=1, split={"*letters": 0}),
    "zero3 x columns": lambda: Parallel(tensor=2, zero=3, split={"*letters": 1}),
    "unequal": lambda: Heterogeneous([(0, 1), (2, 3)], shares=(2, 1), split={}),
    "gradients of whole ids in parts": lambda: Layered(1, 4, {}, {}, feeds={"t": 0}),
    "stages": lambda: Pipeline(2, microbatches=2, data=2),
    "pipedream": lambda: Pipeline(2, microbatches=2, schedule="pipedream", data=2),
    "parts": PartitionedAR,
    "parts of some axis": lambda: RandomAxisPartitionAR(1),
}


@pytest.mark.parametrize(("name", "rows"), in_turn(3, SPREAD, [20, 64, 65, 5000]))
@pytest.mark.sampled(16)
def test_no_strategy_takes_the_way_of_more_bytes(name, rows, monkeypatch):
    """Simulated, on 4 ranks: all that they send together."""
    ids, t = ht.placeholder("ids", (None,), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        h = ht.nn.Linear(6, 6, name="up")(ht.take(ht.variable("letters", ht.init.zeros, (rows, 6)), ids, axis=0))
        loss = ht.mean(ht.softmax_cross_entropy(ht.nn.Linear(6, 4, name="down")(h), t))
    entries = [loss, ht.optim.Adam(0.01).minimize(loss)]

    def sent():
        shapes = {ids: (192,), t: (192,)}
        cost = simulate(entries, SPREAD[name](), MachineProfile(), world_size=4, shapes=shapes)
        return sum(cost.sent.values())

    found, forced = sent(), []
    for sums in (False, True):
        monkeypatch.setattr("hetu.dist.cut.rewrites._sums_are_less", lambda *_, sums=sums: sums)
        forced.append(sent())
    assert found == min(forced)


@pytest.mark.parametrize(("rows", "ids", "ranks"), [(65, 6144, 8), (65, 96, 4), (1000, 96, 4), (1, 96, 2)])
def test_a_table_costs_no_more_than_its_rows_or_the_sum_of_it(rows, ids, ranks):
    """By the formulas of rings, for float64; the loss is one number more."""
    width = 64
    found, _ = communicated("data", rows, width, ids, ranks)
    added = 2 * (ranks - 1) / ranks * rows * (width + 1) * 8
    gathered = (ranks - 1) / ranks * ids * width * 8
    assert found == pytest.approx(min(added, gathered) + 2 * (ranks - 1) / ranks * 8, abs=2)


@pytest.mark.parametrize("name", ["data", "zero1", "zero3"])
@pytest.mark.parametrize("ids", [96, 1200])
def test_a_simulated_step_sends_the_same(name, ids):
    tables = {"table": (64, 6)}
    graph, fed = model(ht.optim.Momentum(0.1), tables), batch(ids, tables)
    shapes = {feed: value.shape for feed, value in fed.items()}
    cost = simulate(graph["train"], STRATEGIES[name](), MachineProfile(), world_size=4, shapes=shapes)
    assert cost.sent[0, 1] == communicated(name, 64, 6, ids, 4)[0]


def test_sums_travel_with_those_of_other_gradients():
    """In one bucket, counts too: a second table adds no message."""
    one, two = {"letters": (60, 4)}, {"letters": (60, 4), "digits": (12, 3)}

    def messages(comm, tables):
        ex = ht.Executor(model(ht.optim.Adam(0.1), tables), strategy=DataParallel(), comm=comm)
        return [s.node.op.name for s in ex.program("train", batch(1200, tables)).steps if s.node.op.collective]

    for tables in (one, two):
        found = run_ranks(4, lambda comm, tables=tables: messages(comm, tables))
        assert found == [["all_reduce_start"]] * 4  # and the loss with them
