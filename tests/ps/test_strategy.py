"""A one-device model trained by workers and real servers: BSP equals one process, the others learn."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.ps import Client, ParameterServer

from .network import job

ROWS, WORKERS = 8, 2


def dense(optimizer):
    x, t = ht.placeholder("x", (None, 6)), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        y = ht.nn.Linear(5, 3)(ht.nn.Linear(6, 5, activation=ht.tanh)(x))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return loss, optimizer.minimize(loss), y


def embedded(optimizer):
    ids, t = ht.placeholder("x", (None, 4), "int64"), ht.placeholder("t", (None,), "int64")
    with ht.scope("model"):
        y = ht.nn.Linear(12, 3)(ht.flatten(ht.nn.Embedding(50, 3)(ids), 1))
        loss = ht.mean(ht.softmax_cross_entropy(y, t))
        return loss, optimizer.minimize(loss), y


def batch(step: int, sparse: bool):
    rng = np.random.default_rng(step)
    x = rng.integers(0, 50, (ROWS, 4)) if sparse else rng.normal(size=(ROWS, 6)).astype("f4")
    return {"x": x, "t": rng.integers(0, 3, ROWS)}


OPTIMIZERS = {
    "sgd": lambda: ht.optim.SGD(0.3),
    "adam": lambda: ht.optim.Adam(0.05),
    "momentum-cosine": lambda: ht.optim.Momentum(ht.schedules.cosine(0.1, 10)),
}


def build(model, optimizer):
    loss, updates, y = (embedded if model == "embedded" else dense)(OPTIMIZERS[optimizer]())
    return {"train": [loss, updates], "eval": [loss, y]}


def work(client: Client, rank: int, model: str, optimizer: str, steps: int = 6):
    ht.graph.count_names_apart()
    ex = ht.Executor(build(model, optimizer), strategy=ParameterServer(client, rank, WORKERS))
    sparse = model == "embedded"
    losses = [float(ex.run("train", batch(s, sparse))[0]) for s in range(steps)]
    return losses, ex.run("eval", batch(99, sparse)), ex


@pytest.mark.parametrize("model", ["dense", "embedded"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bsp_equals_one_process_on_whole_batches(model, optimizer):
    one = ht.Executor(build(model, optimizer))
    wanted = [float(one.run("train", batch(s, model == "embedded"))[0]) for s in range(6)]
    loss, y = one.run("eval", batch(99, model == "embedded"))
    results = job("bsp", WORKERS, lambda client, rank: work(client, rank, model, optimizer))
    np.testing.assert_allclose(np.mean([r[0] for r in results], axis=0), wanted, rtol=1e-5)
    for _, (own_loss, own_y), _ in results:
        np.testing.assert_allclose(own_y, y, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(own_loss, loss, rtol=1e-5)


@pytest.mark.parametrize("mode", ["asp", "ssp:2"])
def test_other_modes_learn(mode):
    def body(client: Client, rank: int):
        ht.graph.count_names_apart()
        ex = ht.Executor(build("dense", "sgd"), strategy=ParameterServer(client, rank, WORKERS))
        return [float(ex.run("train", batch(0, False))[0]) for _ in range(40)]

    for losses in job(mode, WORKERS, body):
        assert losses[-1] < 0.5 * losses[0]


def test_a_table_that_is_only_looked_up_lives_on_the_servers():
    def body(client: Client, rank: int):
        _, _, ex = work(client, rank, "embedded", "sgd", steps=1)
        steps = [s.node for s in ex.program("train", batch(0, True)).steps if s.node.op.communicates]
        return sorted(ex.state), [n.op.name for n in steps]

    for names, steps in job("bsp", WORKERS, body):
        assert not any("embedding" in name for name in names)
        assert steps.count("pull_rows") == steps.count("push_rows") == 1
        assert steps.count("push") == steps.count("pull") == 2 and steps.count("tick") == 1


def test_a_batch_that_does_not_divide_is_refused():
    def body(client: Client, rank: int):
        ht.graph.count_names_apart()
        ex = ht.Executor(build("dense", "sgd"), strategy=ParameterServer(client, rank, WORKERS))
        with pytest.raises(ht.errors.ShapeError, match="does not divide among 2 workers"):
            ex.run("train", {name: value[:7] for name, value in batch(0, False).items()})

    job("bsp", WORKERS, body)
