"""Ranks with real servers train as one process does: dense parameters by all-reduce, tables on the servers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu import dist, plan, ps
from hetu.core.op import Role
from hetu.core.passes import PASSES
from hetu.dist import run_ranks
from hetu.dist.comm.guard import RANK_VARIABLES
from hetu.dist.launch.servers import ADDRESSES, TOKEN
from hetu.plan import bytes_between_ranks
from hetu.ps import Client, Options, ServerProcess
from hetu.ps.wire import environment
from hetu.strategies import Choice, Connected, Hybrid, ParameterServer, PartialReduce

from ..dist.test_launch import heturun
from ..pairs import nightly
from ..ps.network import ServerThread
from ..samples.update import stranger

ROWS, STEPS, DEADLINE = 12, 6, 30.0


class Stranger(ht.optim.Optimizer):
    rule = stranger


OPTIMIZERS = {
    "sgd": lambda: ht.optim.SGD(0.3),
    "adam": lambda: ht.optim.Adam(0.05, epsilon=1e-3),  # by a smaller one its first steps make much of rounding
    "stranger": lambda: Stranger(0.05),  # of which no server process has heard
    "adagrad-cosine": lambda: ht.optim.AdaGrad(ht.schedules.cosine(0.1, 10)),
}


def model(optimizer: Any) -> dict[str, list[Any]]:
    """Two columns of one large table, one small table (which stays on the ranks), and dense layers."""
    ids, few = ht.placeholder("ids", (None, 3), "int64"), ht.placeholder("few", (None,), "int64")
    t = ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        large = ht.flatten(ht.nn.Embedding(500, 8, name="large")(ids), 1)
        h = ht.concat([large, ht.nn.Embedding(3, 2, name="small")(few)], axis=1)
        y = ht.nn.Linear(16, 3, name="down")(ht.nn.Linear(26, 16, activation=ht.tanh, name="up")(h))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return {"train": [loss, optimizer.minimize(loss)], "eval": [loss, y]}


def batch(step: int, rows: int = ROWS) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 40, (rows, 3)) ** 2 % 500
    return {"ids": ids, "few": rng.integers(0, 3, rows), "t": rng.integers(0, 3, rows)}


def job(
    ranks: int,
    body: Callable[[Client, dist.Comm], Any],
    servers: int = 1,
    kind: Callable[[Options], Any] = ServerThread,
) -> list[Any]:
    """`body(client, comm)` on thread ranks, with servers."""
    started: list[Any] = []

    def work(comm: dist.Comm) -> Any:
        with Client([server.address for server in started], comm.rank, "a token", timeout=DEADLINE) as client:
            return body(client, comm)

    try:
        for _ in range(servers):
            started.append(kind(Options(ranks, "a token")))
        return run_ranks(ranks, work, deadline=DEADLINE)
    finally:
        for server in started:
            server.stop()


def hybrid(**more: Any) -> Hybrid:
    """With two ranks a table moves no fewer bytes by servers: it has to be named."""
    return Hybrid(served=["*/large/*"], batch_size=ROWS, **more)


def trained(ex: ht.Executor) -> tuple[list[float], np.ndarray]:
    losses = [float(ex.run("train", batch(step))[0]) for step in range(STEPS)]
    losses.append(float(ex.run("train", batch(99, rows=5))[0]))  # a last batch that does not divide
    return losses, ex.run("eval", batch(100))[1]


COPIES = dist.Layout((dist.Shard((1,), ((0, 1),)), dist.Shard((2, 0), ((0, 2),))))  # of a batch, cut differently
PARALLEL = {"copies": lambda: dist.Strategy(COPIES, feeds=dict.fromkeys(("ids", "few", "t"), COPIES))}
PARALLEL |= {"data": dist.DataParallel, "zero": lambda: dist.ZeRO(3), "tensor": lambda: dist.Parallel(tensor=2)}
CASES = [(2, "data", name) for name in ("stranger", "adagrad-cosine")]
CASES += [pytest.param(2, "data", name, marks=pytest.mark.nightly) for name in ("sgd", "adam")]
CASES += [(4, "data", "adam"), (2, "zero", "adam"), (4, "tensor", "sgd"), (2, "tensor", "sgd")]
CASES += [(3, "copies", "stranger")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ranks", "parallel", "optimizer"), CASES)
def test_training_equals_that_of_one_process(ranks, parallel, optimizer):
    losses, y = trained(ht.Executor(model(OPTIMIZERS[optimizer]())))

    def body(client: Client, comm: dist.Comm):
        strategy = Hybrid(PARALLEL[parallel](), served=["*/large/*"])
        return trained(ht.Executor(model(OPTIMIZERS[optimizer]()), strategy=strategy, comm=Connected(comm, client)))

    kind = ServerProcess if optimizer == "stranger" else ServerThread
    for own_losses, own_y in job(ranks, body, servers=ranks // 2, kind=kind):
        np.testing.assert_allclose(own_losses, losses, rtol=1e-4)
        np.testing.assert_allclose(own_y, y, rtol=1e-3, atol=5e-4)  # Adam amplifies rounding


WHOLE = [name for name in PASSES if name != "sparsify_updates"]


@pytest.mark.parametrize(("optimizer", "served"), [("sgd", ["*/large/*"]), ("adam", [])])
def test_whole_tables_are_updated_if_that_is_asked_for(optimizer, served):
    """Servers move only the rows that are looked up, which is the same for plain gradient descent alone."""
    wanted = trained(ht.Executor(model(OPTIMIZERS[optimizer]()), passes=WHOLE))[0]

    def body(client: Client, comm: dist.Comm):
        comm, strategy = Connected(comm, client), Hybrid(served=served, batch_size=0)
        with pytest.raises(ht.errors.ArgumentError, match=r"adam moves all rows of 'model/large/weight', and servers"):
            ht.Executor(model(OPTIMIZERS["adam"]()), strategy=hybrid(), comm=comm, passes=WHOLE)
        return trained(ht.Executor(model(OPTIMIZERS[optimizer]()), strategy=strategy, comm=comm, passes=WHOLE))[0]

    for found in job(2, body):
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_what_is_kept_where_and_how_it_moves():
    def body(client: Client, comm: dist.Comm):
        ex = ht.Executor(model(OPTIMIZERS["adam"]()), strategy=hybrid(), comm=Connected(comm, client))
        steps = [s.node.op.name for s in ex.program("train", batch(0)).steps if s.node.role is Role.COMMUNICATION]
        return str(ex.placement), sorted(ex.state), sorted(client.parameters), Counter(steps)

    for table, variables, parameters, steps in job(2, body):
        assert parameters == ["model/large/weight"]
        assert "model/small/weight" in variables and not any("large" in name for name in variables)
        assert (steps["pull_rows"], steps["push_rows"], steps["tick"], steps["push"], steps["pull"]) == (1, 1, 1, 0, 0)
        assert steps["all_reduce_start"] == 1  # one bucket of all dense gradients
        kept = {line.split()[0]: line.split()[-1] for line in table.splitlines()[1:]}
        assert kept.pop("model/large/weight") == "servers"
        assert len(kept) == 5 and set(kept.values()) == {"ranks"}
        assert table.splitlines()[1].split()[-4:] == ["36", "1,440", "2,880", "servers"]


def looks(ex: ht.Executor) -> list[np.ndarray]:
    """Values of nodes that nobody fetches, after three steps: of lookups, of variables, and of what they make."""
    for step in range(3):
        ex.run("train", batch(step))
    loss, y = ex.subgraphs["eval"].entries
    dense = [v for v in ex.variables if v.name.startswith(("model/up/", "model/down/")) and v.attrs["trainable"]]
    given = {name: value for name, value in batch(7).items() if name != "t"}
    seen = [ex.value(y, given), ex.value(ht.norm(y), given), ex.value(loss, batch(7))]
    return seen + [ex.value(v * 2) for v in dense]


@pytest.mark.parametrize("strategy", [hybrid(), ParameterServer()], ids=["tables", "all"])
def test_a_look_at_a_node_has_what_servers_keep(strategy):
    wanted = looks(ht.Executor(model(OPTIMIZERS["sgd"]())))

    def body(client: Client, comm: dist.Comm):
        ex = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=Connected(comm, client))
        found, table = looks(ex), next(v for v in ex.variables if "/large/" in v.name)
        with pytest.raises(ht.errors.ArgumentError, match="is to be kept on servers by rows, but a step reads all"):
            ex.value(table)
        return found

    for found in job(2, body):
        for value, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-4, atol=1e-6)


def fetching(what: str) -> dict[str, list[Any]]:
    """The model, with a sub-graph that fetches its large table, whole or as a step would make it."""
    graph = model(OPTIMIZERS["sgd"]())
    updates = graph["train"][1]
    table = next(v for v in updates if "/large/" in v.name)
    return graph | {"look": [{"table": table, "half": table * 0.5, "next step": updates[table]}[what]]}


@pytest.mark.parametrize("what", ["table", "half", "next step"])
@pytest.mark.parametrize("everything", [False, True])
def test_a_table_that_is_fetched_is_no_table_of_rows(what, everything):
    """Servers that keep all variables give copies; a table of rows, and what servers make of one, are refused."""
    feed = batch(0) if what == "next step" else {}
    one = ht.Executor(fetching(what))
    one.run("train", batch(1))
    wanted = one.run("look", feed)[0]

    def body(client: Client, comm: dist.Comm):
        strategy = ParameterServer() if everything else hybrid()
        ex = ht.Executor(fetching(what), strategy=strategy, comm=Connected(comm, client))
        ex.run("train", batch(1))
        return ex.run("look", feed)[0]

    if everything and what != "next step":
        for found in job(2, body):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
        return
    said = "servers make the new value of .*, but a step fetches it" if feed else "fits no table that is only looked up"
    with pytest.raises(ht.errors.HetuError, match=f"{said}[\\s\\S]*fix: "):
        job(2, body)


def test_the_choice_is_by_bytes():
    dense, table = Choice("w", (100, 100), 4, None, ranks=4), Choice("t", (1000, 16), 4, lookups=40, ranks=4)
    assert (dense.by_ranks, dense.by_servers, dense.on_servers) == (240_000, 320_000, False)
    assert (table.by_ranks, table.by_servers, table.on_servers) == (3 * 40 * 72, 2 * 4 * 10 * 72, True)
    small = Choice("s", (10, 16), 4, lookups=4000, ranks=4)
    assert (small.by_ranks, small.by_servers, small.on_servers) == (6 * 10 * 17 * 4, 2 * 4 * 10 * 72, False)
    assert not Choice("t", (1000, 16), 4, lookups=39, ranks=3).on_servers  # 2 gather each, or each sends and receives
    assert Choice("t", (1000, 16), 4, lookups=40, ranks=2, named=True).on_servers
    assert not Choice("t", (1000, 16), 4, lookups=40, ranks=1).on_servers  # alone nothing need be sent


def measured(strategy: dist.Builder, ranks: int) -> int:
    """Bytes that all ranks and the server send for one step, beside what it takes to begin."""

    def body(client: Client, comm: dist.Comm):
        ids, t = ht.placeholder("ids", (None, 4), "int64"), ht.placeholder("t", (None, 30))
        with ht.scope("model"):
            tables = [ht.nn.Embedding(rows, 6, name=f"of{rows}")(ids) for rows in (5, 100, 20_000)]
            y = ht.nn.Linear(72, 30)(ht.flatten(ht.concat(tables, axis=1), 1))
            loss = ht.mean(ht.square(y - t))
            subgraphs = {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}
        ex = ht.Executor(subgraphs, strategy=strategy, comm=Connected(comm, client))
        rng = np.random.default_rng(0)
        feed = {"ids": rng.integers(0, 5, (48, 4)), "t": np.zeros((48, 30), "f")}
        program = ex.program("train", feed)
        comm.barrier()
        before = client.status()
        comm.barrier()
        ex.run("train", feed)
        client.clock().wait()
        comm.barrier()
        after = client.status()
        served = sum(a[k] - b[k] for a, b in zip(after, before) for k in ("received", "sent"))
        return bytes_between_ranks(program, ranks), served

    found = job(ranks, body)
    return sum(between for between, _ in found) + max(served for _, served in found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hybrid_moves_no_more_bytes_than_the_better_of_servers_and_all_reduce(ranks):
    servers = measured(ParameterServer(), ranks)
    all_reduce = measured(dist.DataParallel(), ranks)
    both = measured(Hybrid(batch_size=48), ranks)
    assert both <= min(servers, all_reduce)
    if ranks == 4:
        assert both < 0.8 * min(servers, all_reduce)


# -- cached tables, rows asked for ahead, checkpoints -------------------------------------------------------------


def test_bounds_of_zero_train_as_no_cache_and_asking_ahead_changes_nothing():
    def body(client: Client, comm: dist.Comm, cache: ps.Cache | None, ahead: int):
        strategy = hybrid(cache=cache)
        ex = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=Connected(comm, client))
        coming = [[batch(k) for k in range(s + 1, min(8, s + 1 + ahead))] for s in range(8)]
        losses = [float(ex.run("train", batch(s), ahead=coming[s])[0]) for s in range(8)]
        return losses, ex.run("eval", batch(100))[1].tolist(), ex.placement.comm.rows.counters

    plain = job(2, lambda client, comm: body(client, comm, None, 0))
    early = job(2, lambda client, comm: body(client, comm, None, 1))
    assert [found[:2] for found in early] == [found[:2] for found in plain]
    for cache in (ps.Cache("lru", 60, 0, 0), ps.Cache("dynamic", 60, 0, 0, 3), ps.Cache("constant", 60, 0, 0, 7)):
        cached = job(2, lambda client, comm, cache=cache: body(client, comm, cache, cache.looks))
        np.testing.assert_allclose([losses for losses, *_ in cached], [losses for losses, *_ in plain], rtol=1e-5)
        assert all(0 < seen.fetched < seen.unique for *_, seen in cached)


@pytest.mark.parametrize("cache", [None, ps.Cache("dynamic", 60, 0, 0, 3)], ids=["none", "dynamic"])
def test_a_loader_may_fill_the_same_arrays_for_each_batch(cache):
    class Refilled:
        def __init__(self, whole: list[np.ndarray]) -> None:
            self.arrays = [np.empty_like(array) for array in whole]

        def __len__(self) -> int:
            return 8

        def __iter__(self):
            for step in range(8):
                for array, numbers in zip(self.arrays, batch(step).values(), strict=True):
                    array[...] = numbers
                yield self.arrays

    def body(client: Client, comm: dist.Comm, refilled: bool) -> list[float]:
        ex = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=hybrid(cache=cache), comm=Connected(comm, client))
        loader = Refilled([*batch(0).values()]) if refilled else [tuple(batch(step).values()) for step in range(8)]
        return ht.fit(ex, loader, epochs=2, inputs=[*batch(0)], progress=False)["loss"]

    fresh, same = (job(2, lambda client, comm, how=how: body(client, comm, how)) for how in (False, True))
    assert fresh == same


@pytest.mark.parametrize("mode", [ps.ASP(), ps.SSP(1)], ids=str)
def test_tables_under_other_modes_learn(mode):
    def body(client: Client, comm: dist.Comm):
        strategy = hybrid(consistency=mode, cache=ps.Cache("lfu", 60))
        ex = ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=Connected(comm, client))
        assert client.status()[0]["consistency"] == str(mode)
        return [float(ex.run("train", batch(0), ahead=batch(0))[0]) for _ in range(30)]

    for losses in job(2, body):
        assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_checkpoints_pass_between_one_process_and_a_hybrid_and_training_goes_on(optimizer, tmp_path):
    def build() -> dict[str, list[Any]]:
        with ht.scope("optimizer"):
            rule = OPTIMIZERS[optimizer]()
        return model(rule)

    one = ht.Executor(build())
    for s in range(3):
        one.run("train", batch(s))
    one.save(tmp_path / "one", {"note": 7})

    def body(client: Client, comm: dist.Comm):
        cache = ps.Cache("lru", 60, 2, 2) if optimizer == "sgd" else None
        ex = ht.Executor(build(), strategy=hybrid(cache=cache), comm=Connected(comm, client))
        extra = ex.load(tmp_path / "one")
        ex.save(tmp_path / "same", extra)
        ex.run("train", batch(3))
        ex.save(tmp_path / "four")
        first = [float(ex.run("train", batch(s))[0]) for s in (4, 5)]
        ex.load(tmp_path / "four")
        assert [float(ex.run("train", batch(s))[0]) for s in (4, 5)] == first or cache
        return extra

    assert job(2, body, servers=2) == [{"note": 7}] * 2
    other = ht.Executor(build(), seed=1)
    assert other.load(tmp_path / "same") == {"note": 7}
    for name, value in one.state.items():
        np.testing.assert_array_equal(other.state[name], value, err_msg=name)


class Grey(dist.Strategy):
    """A stranger's kind of strategy, of which a hybrid cannot know what it adds."""

    kind = "grey"


@pytest.mark.parametrize("served", [(), "*"], ids=["tables", "all"])
@pytest.mark.parametrize("parallel", [Grey(dist.Mesh((2,), ("data",)).layout()), PartialReduce()])
def test_a_strategy_of_another_kind_is_refused(parallel, served):
    """So are partners, who wait for each other, and would for the servers as well."""
    kind, hybrid = getattr(parallel, "kind", "partial reduce"), Hybrid(parallel, served=served)
    with pytest.raises(ht.errors.ArgumentError, match=f"a hybrid of servers and a strategy of the kind {kind!r}"):
        run_ranks(2, lambda comm: ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=hybrid, comm=comm))


# -- planned ------------------------------------------------------------------------------------------------------


def planned(optimizer: str, **options: Any) -> list[Any]:
    """What `auto` chooses on two ranks of a job with servers, and what training with the plan read from JSON gives."""

    def body(client: Client, comm: dist.Comm):
        here = Connected(comm, client)
        made = plan.auto(batch_size=ROWS, **options).choose(model(OPTIMIZERS[optimizer]()), here)
        read = plan.Plan.from_json(made.to_json())
        assert read == made
        return made, trained(ht.Executor(model(OPTIMIZERS[optimizer]()), strategy=read, comm=here))[0]

    return job(2, body)


def served(made: plan.Plan) -> set[str]:
    return {name for name, kept in made.strategy.variables.items() if kept.served}


def caches(made: plan.Plan) -> list[ps.Cache | None]:
    return [kept.cache for kept in made.strategy.variables.values() if kept.served]


def test_the_planner_gives_tables_to_servers_where_they_do_not_fit_on_ranks():
    hints = {"data": 2, "zero": 0}
    free = {r.name: r for r in planned("sgd", hints=hints)[0][0].why().rated}
    assert {"dp2", "dp2, 1 of 2 tables on servers", "dp2, 2 of 2 tables on servers"} <= {*free}
    wanted = trained(ht.Executor(model(OPTIMIZERS["sgd"]())))[0]
    budget = (free["dp2"].peak + free["dp2, 1 of 2 tables on servers"].peak) // 2
    for made, losses in planned("sgd", hints=hints, budget=budget):
        assert served(made) == {"model/large/weight"} and caches(made) == [None]
        assert "on servers: model/large/weight" in str(made.why())
        assert "decided by memory: " in str(made.why())
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)


def test_tables_are_cached_only_if_a_hint_says_so():
    cache = ps.Cache("lru", 60, 0, 0)
    hints = {"data": 2, "zero": 0, "cache": cache}
    wanted = trained(ht.Executor(model(OPTIMIZERS["sgd"]())))[0]
    rated = {r.name: r for r in planned("sgd", hints=hints)[0][0].why().rated}
    budget = (rated["dp2"].peak + rated["dp2, 1 of 2 tables on servers, cached"].peak) // 2
    for made, losses in planned("sgd", hints=hints, budget=budget):
        assert caches(made) == [cache] and served(made) == {"model/large/weight"}
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    with pytest.raises(ht.errors.ArgumentError, match="whose update is adam: a cache sends sums"):
        planned("adam", hints=hints)


# -- under heturun ------------------------------------------------------------------------------------------------


def test_ranks_find_what_the_launcher_leaves_in_their_environment(monkeypatch):
    assert (environment.RANK_VARIABLES, environment.ADDRESSES, environment.TOKEN) == (RANK_VARIABLES, ADDRESSES, TOKEN)
    monkeypatch.setenv("PMI_RANK", "2")
    monkeypatch.setenv("PMI_SIZE", "3")
    assert environment.place() == (2, 3)
    monkeypatch.delenv(ADDRESSES, raising=False)
    with pytest.raises(ht.errors.ArgumentError, match="no parameter servers"):
        ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=ParameterServer())


@pytest.mark.parametrize(
    ("options", "servers", "shown"),
    [
        ("--strategy ps --consistency ssp:3 --cache off", 1, ["strategy             ps", "MB under ssp:3"]),
        *nightly(
            [("", 2, ["strategy             hybrid", "between workers ", "MB under bsp", "lfuopt, 50% of each table"])]
        ),
    ],
)
def test_the_example_trains_with_servers(options, servers, shown):
    command = ["examples/ctr/train.py", "--limit", "2048", "--epochs", "4", *options.split()]
    job = heturun("-w", 2, "-s", servers, "python", *command)
    assert (job.returncode, job.stderr.count("Traceback")) == (0, 0), job.stderr
    last = job.stdout.splitlines()[-1]
    found = re.fullmatch(r"\[rank 0\] wide_deep on adult: test AUC (0\.\d+), loss \d\.\d+", last)
    assert found and float(found[1]) > 0.8, job.stdout
    assert all(text in job.stdout for text in shown), job.stdout
    assert "[rank 1]" not in job.stdout
