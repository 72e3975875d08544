"""The first values of tables on servers are those of one process, for all initializers and numbers of servers."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu import init
from hetu.dist.comm.threads import count_names_apart
from hetu.ps import Client
from hetu.ps.store.messages import Kind
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, ParameterServer

from ..ps.network import ServerThread, job

SHAPE, WORKERS = (130, 3), 2
CALLS: list[tuple[int, ...]] = []


@ht.init.elementwise
def own(shape, dtype, rng):
    CALLS.append(shape)
    return rng.laplace(0.0, 0.1, shape).astype(dtype)


def whole(shape, dtype, rng):
    CALLS.append(shape)
    return rng.permutation(np.prod(shape)).reshape(shape).astype(dtype)


INITIALIZERS = {
    "normal": ht.init.normal(0.02),
    "truncated normal": ht.init.truncated_normal(),
    "xavier": ht.init.xavier_uniform,
    "zeros": ht.init.zeros,
    "orthogonal": ht.init.orthogonal(),
    "own, declared": own,
    "own": whole,
    "an array": np.arange(390, dtype="f4").reshape(SHAPE),
}
TOGETHER = [("normal", "zeros", "xavier"), ("own, declared", "normal", "own")]
TRAVEL = {"normal", "truncated normal", "xavier", "zeros"}


def tables(*what: str) -> dict:
    ids, rows = ht.placeholder("ids", (None,), "int64"), []
    with ht.scope("model"):
        for number, name in enumerate(what):
            shape = SHAPE if len(what) == 1 else (40 + 30 * number, 3)
            rows.append(ht.embedding(ht.variable(f"table{number}", INITIALIZERS[name], shape), ids))
    loss = sum(ht.mean(ht.square(some)) for some in rows)
    return {"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("what", [(name,) for name in INITIALIZERS] + TOGETHER, ids=" and ".join)
def test_the_first_values_are_those_of_one_process(what, servers, monkeypatch):
    """Of one table, and of several that servers keep as one."""
    monkeypatch.setattr(init, "AT_ONCE", 100)  # several blocks

    def body(client: Client, rank: int):
        count_names_apart()
        comm, sent, submit = Connected(Place(rank, WORKERS), client), [], client.transport.submit
        client.transport.submit = lambda *to, **more: sent.append((to[1], more.get("key"))) or submit(*to, **more)
        ex = ht.Executor(tables(*what), strategy=ParameterServer(), comm=comm, seed=1 << 70)
        (name,) = {*ex.placement.names.values()}
        return client.pull(name).wait(), [
            block.key for block in client.blocks[name] if (Kind.ASSIGN, block.key) in sent
        ]

    state = ht.Executor(tables(*what), seed=1 << 70).state
    CALLS.clear()
    results, wanted = (
        job("asp", WORKERS, body, servers, ServerThread),
        np.concatenate([state[name] for name in state if "table" in name]),
    )
    for found, _ in results:
        np.testing.assert_array_equal(found, wanted)
    assert any(given for _, given in results) == (not {*what} <= TRAVEL)
    if what == ("own",):
        assert len(CALLS) <= servers  # each asks one worker
    elif what == ("own, declared",):
        assert max(shape[0] for shape in CALLS) < SHAPE[0] and sum(shape[0] for shape in CALLS) == SHAPE[0]
