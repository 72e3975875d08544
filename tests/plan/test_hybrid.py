"""Ranks with real servers train as one process does: dense parameters by all-reduce, tables on the servers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu import dist, ps
from hetu.dist import run_ranks
from hetu.dist.mpi import SIZE_VARIABLES
from hetu.dist.recorder import RANK_VARIABLES
from hetu.dist.servers import ADDRESSES, TOKEN
from hetu.plan import Choice, Hybrid
from hetu.ps import Client, Options, ServerProcess, environment

from ..dist.test_launch import heturun

ROWS, STEPS, DEADLINE = 12, 6, 30.0
OPTIMIZERS = {
    "sgd": lambda: ht.optim.SGD(0.3),
    "adam": lambda: ht.optim.Adam(0.05),
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


def job(ranks: int, body: Callable[[Client, dist.Comm], Any], servers: int = 1) -> list[Any]:
    """`body(client, comm)` on thread ranks, with server processes."""
    processes: list[ServerProcess] = []

    def work(comm: dist.Comm) -> Any:
        with Client([p.address for p in processes], comm.rank, "a token", timeout=DEADLINE) as client:
            return body(client, comm)

    try:
        processes += [ServerProcess(Options(ranks, "a token")) for _ in range(servers)]
        return run_ranks(ranks, work, deadline=DEADLINE)
    finally:
        for process in processes:
            process.stop()


def trained(ex: ht.Executor) -> tuple[list[float], np.ndarray]:
    losses = [float(ex.run("train", batch(step))[0]) for step in range(STEPS)]
    losses.append(float(ex.run("train", batch(99, rows=5))[0]))  # a last batch that does not divide
    return losses, ex.run("eval", batch(100))[1]


PARALLEL = {"data": dist.DataParallel, "zero": lambda: dist.ZeRO(3), "tensor": lambda: dist.Parallel(tensor=2)}
CASES = [(2, "data", name) for name in OPTIMIZERS]
CASES += [(4, "data", "adam"), (2, "zero", "adam"), (4, "tensor", "sgd"), (2, "tensor", "sgd")]


@pytest.mark.parametrize(("ranks", "parallel", "optimizer"), CASES)
def test_training_equals_that_of_one_process(ranks, parallel, optimizer):
    losses, y = trained(ht.Executor(model(OPTIMIZERS[optimizer]())))

    def body(client: Client, comm: dist.Comm):
        strategy = Hybrid(client, PARALLEL[parallel](), batch_size=ROWS)
        return trained(ht.Executor(model(OPTIMIZERS[optimizer]()), strategy=strategy, comm=comm))

    for own_losses, own_y in job(ranks, body, servers=ranks // 2):
        np.testing.assert_allclose(own_losses, losses, rtol=1e-4)
        np.testing.assert_allclose(own_y, y, rtol=1e-3, atol=5e-4)  # Adam amplifies rounding


def test_what_is_kept_where_and_how_it_moves():
    def body(client: Client, comm: dist.Comm):
        ex = ht.Executor(model(OPTIMIZERS["adam"]()), strategy=Hybrid(client, batch_size=ROWS), comm=comm)
        steps = [s.node.op.name for s in ex.program("train", batch(0)).steps if s.node.op.communicates]
        return str(ex.placement), sorted(ex.state), sorted(client.parameters), Counter(steps)

    for table, variables, parameters, steps in job(2, body):
        assert parameters == ["model/large/weight"]
        assert "model/small/weight" in variables and not any("large" in name for name in variables)
        assert (steps["pull_rows"], steps["push_rows"], steps["tick"], steps["push"], steps["pull"]) == (1, 1, 1, 0, 0)
        assert steps["all_reduce_start"] == 1  # one bucket of all dense gradients
        kept = {line.split()[0]: line.split()[-1] for line in table.splitlines()[1:]}
        assert kept.pop("model/large/weight") == "servers"
        assert len(kept) == 5 and set(kept.values()) == {"ranks"}
        assert table.splitlines()[1].split()[-4:] == ["36", "32,000", "2,880", "servers"]


def test_the_choice_is_by_bytes():
    dense, table = Choice("w", (100, 100), 4, None, ranks=4), Choice("t", (1000, 16), 4, lookups=40, ranks=4)
    assert (dense.by_all_reduce, dense.by_servers, dense.on_servers) == (240_000, 320_000, False)
    assert (table.by_all_reduce, table.by_servers, table.on_servers) == (384_000, 2 * 4 * 10 * 72, True)
    assert not Choice("t", (20, 16), 4, lookups=4000, ranks=4).on_servers  # every row, and the ids on top
    assert Choice("t", (20, 16), 4, lookups=4000, ranks=4, named=True).on_servers
    assert not Choice("t", (1000, 16), 4, lookups=40, ranks=1).on_servers  # alone nothing need be sent


def test_a_pipeline_is_refused():
    strategy = Hybrid(client=None, parallel=dist.Pipeline(stages=2))
    with pytest.raises(ht.errors.ArgumentError, match="a pipeline"):
        run_ranks(2, lambda comm: ht.Executor(model(OPTIMIZERS["sgd"]()), strategy=strategy, comm=comm))


# -- under heturun ------------------------------------------------------------------------------------------------


def test_ranks_find_what_the_launcher_leaves_in_their_environment(monkeypatch):
    assert (environment.RANKS, environment.SIZES) == (RANK_VARIABLES, SIZE_VARIABLES)
    assert (environment.ADDRESSES, environment.TOKEN) == (ADDRESSES, TOKEN)
    monkeypatch.setenv("PMI_RANK", "2")
    monkeypatch.setenv("PMI_SIZE", "3")
    assert environment.place() == (2, 3)
    monkeypatch.delenv(ADDRESSES, raising=False)
    with pytest.raises(ht.errors.ArgumentError, match="no parameter servers"):
        ps.ParameterServer.from_environment()


@pytest.mark.parametrize(("strategy", "servers"), [("ps", 1), ("hybrid", 2)])
def test_the_example_trains_with_servers(strategy, servers):
    command = ["examples/ctr/train.py", "--limit", "2048", "--epochs", "4", "--strategy", strategy]
    job = heturun("-w", 2, "-s", servers, "python", *command)
    assert (job.returncode, job.stderr.count("Traceback")) == (0, 0), job.stderr
    last = job.stdout.splitlines()[-1]
    found = re.fullmatch(r"\[rank 0\] wide_deep on adult: test AUC (0\.\d+), loss \d\.\d+", last)
    assert found and float(found[1]) > 0.8, job.stdout
    assert "[rank 1]" not in job.stdout
