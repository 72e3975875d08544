"""Rows placed beside the workers that look them up: training stays what it is, and fewer bytes go to other servers.

Ignored on purpose: how well a model learns from samples in another order, see `examples/benchmarks/bigraph.py`.
"""

from __future__ import annotations

import contextlib
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import hetu as ht
from hetu import dist, ps
from hetu.core.errors import HetuError
from hetu.data import ArrayDataset, DataLoader
from hetu.dist.comm.threads import count_names_apart
from hetu.ps import Cache, Client, Placed, partition_bigraph
from hetu.ps.wire.environment import Place
from hetu.strategies import Connected, Hybrid, ParameterServer

from ..ps import network
from ..ps.network import ServerThread, connect, options
from ..ps.test_bigraph import KINDS
from .test_hybrid import job

PARTS, SAMPLES, BATCH, SIZES, COLS = 4, 960, 160, (160, 240), 16
ROWS = sum(SIZES)


@functools.cache
def data() -> tuple[ArrayDataset, ps.BigraphPartition]:
    """Samples of two fields, each with a table of its own, whose ids go by kinds, and how they are divided."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, KINDS, SAMPLES)
    fields = [np.where(rng.random(SAMPLES) < 0.8, kinds + KINDS * rng.integers(0, size // KINDS, SAMPLES),
                       rng.integers(0, size, SAMPLES)) for size in SIZES]  # fmt: skip
    ids, clicked = np.stack(fields, axis=1), (kinds % 2).astype("float32")
    found = partition_bigraph(ids + [0, SIZES[0]], PARTS, rows=ROWS, batch_size=BATCH // PARTS, replicas=0.1)
    return ArrayDataset(ids, clicked), found


def graphs(optimizer: str) -> tuple[dict[str, list[Any]], tuple[ht.Node, ht.Node]]:
    with ht.scope("optimizer"):  # counts its name afresh
        rule = ht.optim.Adam(0.05) if optimizer == "adam" else ht.optim.SGD(3.0)
    ids, clicked = ht.placeholder("ids", (None, 2), "int64"), ht.placeholder("clicked", (None,))
    with ht.scope("model"):
        found = [ht.nn.Embedding(size, COLS, name=f"table{k}")(ids[:, k]) for k, size in enumerate(SIZES)]
        y = ht.squeeze(ht.nn.Linear(2 * COLS, 1)(ht.concat(found, axis=1)), 1)
        loss = ht.mean(ht.binary_cross_entropy_with_logits(y, clicked))
        return {"train": [loss, rule.minimize(loss)], "eval": [y]}, (ids, clicked)


def by_table(placed: Placed) -> dict[str, Placed]:
    return {"*table0/*": placed.of(slice(0, SIZES[0])), "*table1/*": placed.of(slice(SIZES[0], ROWS))}


def trained(client: Client, comm: Any, strategy: Hybrid, optimizer: str, whole: bool, checkpoint: Any = None) -> Any:
    """Losses of two epochs, the answers for all samples, and the bytes to and from each server meanwhile."""
    count_names_apart()
    (samples, found), (made, (ids, clicked)) = data(), graphs(optimizer)
    executor = ht.Executor(made, strategy=strategy, comm=Connected(comm, client))
    shard = (0, 1) if whole else (comm.rank, comm.world_size)
    batches = DataLoader(samples, BATCH, shuffle=True, drop_last=True, division=found.samples, shard=shard)
    before, losses = client.traffic(), []
    for _ in range(2):
        losses += [float(executor.run("train", {ids: some, clicked: said})[0]) for some, said in batches]
    moved = [sum(after) - sum(then) for after, then in zip(client.traffic(), before)]
    executor.placement.comm.rows.flush()
    if checkpoint is not None:
        executor.save(checkpoint)
    all_ids = samples.arrays[0] if whole else np.array_split(samples.arrays[0], comm.world_size)[comm.rank]
    return losses, executor.run("eval", {ids: all_ids})[0], moved


def apart(strategy: Hybrid, optimizer: str = "sgd", servers: int = PARTS, **more: Any) -> list[Any]:
    """What each of the workers found that know the servers only."""

    def body(client: Client, rank: int) -> Any:
        return trained(client, Place(rank, PARTS), strategy, optimizer, whole=True, **more)

    return network.job("bsp", PARTS, body, servers=servers, kind=ServerThread)


def same(found: list[Any], wanted: list[Any]) -> None:
    for (losses, answers, _), (wanted_losses, wanted_answers, _) in zip(found, wanted, strict=True):
        assert losses == wanted_losses
        np.testing.assert_array_equal(answers, wanted_answers)


@pytest.mark.parametrize(("optimizer", "servers"), [("adam", PARTS), ("sgd", 3)])
def test_placed_rows_train_as_rows_dealt_in_turn(optimizer, servers):
    """Bit for bit: it is the same rows, drawn alike, that have the same gradients added in the same order."""
    placed = ParameterServer(placed=by_table(data()[1].placed))
    dealt = apart(ParameterServer(), optimizer, servers)
    same(apart(placed, optimizer, servers), dealt)
    assert dealt[0][0][-1] < 0.9 * dealt[0][0][0]


def test_copies_that_may_miss_nothing_train_as_no_copies():
    """Sums of own steps, which servers add, round otherwise than their mean, so this is beside a cache of others."""
    placed = by_table(data()[1].placed)
    copies = apart(ParameterServer(placed=placed, cache=Cache("replicas", 0.1, 0, 0, inter_bound=0)))
    same(copies, apart(ParameterServer(placed=placed, cache=Cache("lru", 0.1, 0, 0))))
    plain = apart(ParameterServer())
    np.testing.assert_allclose(copies[0][0], plain[0][0], rtol=1e-5)


def test_workers_ask_the_server_beside_them_for_most_rows():
    """Dense gradients travel among the ranks, so what sockets to servers carry is rows and ends of clocks."""
    found = data()[1]

    def moved(owners: np.ndarray) -> tuple[np.ndarray, list[float]]:
        strategy = Hybrid(dist.DataParallel(local_feeds=True), served="*table*", placed=by_table(Placed(owners)))

        def body(client: Client, comm: dist.Comm) -> Any:
            return trained(client, comm, strategy, "sgd", whole=False)

        all_found = job(PARTS, body, servers=PARTS)
        return np.array([bytes_moved for *_, bytes_moved in all_found]), all_found[0][0]

    random, losses = moved(np.random.default_rng(0).permutation(np.arange(ROWS) % PARTS))
    mine, same_losses = moved(found.placed.owners)
    assert losses == same_losses
    others, before = (found.sum() - np.trace(found) for found in (mine, random))
    assert others <= 0.5 * before, others / before


def test_a_checkpoint_of_placed_rows_is_read_however_rows_lie(tmp_path):
    placed = ParameterServer(placed=by_table(data()[1].placed))
    answers = apart(placed, "adam", checkpoint=tmp_path)[0][1]

    def body(client: Client | None = None, rank: int = 0, strategy: Hybrid | None = None) -> np.ndarray:
        count_names_apart()
        made, (ids, _) = graphs("adam")
        where = {} if client is None else {"strategy": strategy, "comm": Connected(Place(rank, 1), client)}
        executor = ht.Executor(made, **where)
        executor.load(tmp_path)
        return executor.run("eval", {ids: data()[0].arrays[0]})[0]

    with ThreadPoolExecutor(1) as alone:  # whose names are counted as those of workers are
        np.testing.assert_allclose(alone.submit(body).result(), answers, rtol=1e-5, atol=1e-6)
    reverse = ParameterServer(placed={"*table1/*": Placed(1 - np.arange(SIZES[1]) % 2)})
    for strategy, servers in ((ParameterServer(), 2), (placed, 1), (reverse, 3)):
        [found] = network.job("bsp", 1, functools.partial(body, strategy=strategy), servers=servers, kind=ServerThread)
        np.testing.assert_allclose(found, answers, rtol=1e-5, atol=1e-6)


def test_bounds_hold_where_rows_lie_on_several_servers():
    """Worker w adds 1 to column w of what it looked up, so a row shows whose updates it holds."""
    rng, bounds = np.random.default_rng(1), {"pull_bound": 4, "push_bound": 1, "inter_bound": 2}
    placed = Placed(rng.integers(0, 3, 12), [np.arange(8), np.arange(4, 12), []])
    table = ps.Parameter((12, 2), sparse=True, rule="add", reduce="sum", placed=placed)
    stale = 0
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ServerThread(options("asp", 3))) for _ in range(3)]
        clients = [stack.enter_context(connect([s.address for s in servers], worker)) for worker in range(3)]
        for client in clients:
            client.create({"t": table}, {"t": np.zeros((12, 2))})
        caches = [ps.CachedTable(client, "t", Cache("replicas", **bounds)) for client in clients[:2]]
        seen = [[np.zeros((12, 2))] for _ in caches]  # of each worker, what servers had at its clocks
        for _ in range(150):
            worker, ids = int(rng.integers(2)), rng.choice(12, 4, replace=False)
            truth, other = clients[2].pull("t").wait(), 1 - worker
            seen[worker].append(truth)
            rows = caches[worker].lookup(ids)
            for i, row in zip(ids, rows):
                assert truth[i, other] - row[other] <= bounds["pull_bound"]
                assert row[other] in [then[i, other] for then in seen[worker][-1 - bounds["inter_bound"] :]]
                stale += row[other] != truth[i, other]
            caches[worker].update(ids, np.eye(2, dtype="f")[[worker] * 4])
            clients[worker].clock().wait()
    assert stale > 20  # or no read was stale, and nothing is shown


WRONG = {
    "no table": ({"placed": {"*nothing": Placed([0, 1])}}, r"placed='\*nothing' fits no table"),
    "another length": ({"placed": Placed([0, 1])}, r"owners of 2 rows, 'model/table0/weight' has 160"),
    "what is none": ({"placed": [0, 1]}, "placed="),
    "no replicas": ({"cache": Cache("replicas")}, "whose rows are dealt in turn"),
    "none named": (
        {"cache": Cache("replicas"), "placed": {f"*table{k}/*": Placed([0] * n) for k, n in enumerate(SIZES)}},
        "division names no replicas",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_placed_is_told(what):
    more, text = WRONG[what]

    def body(client: Client, rank: int) -> None:
        made, _ = graphs("sgd")
        ht.Executor(made, strategy=ParameterServer(**more), comm=Connected(Place(rank, 1), client))

    with pytest.raises(HetuError, match=text):
        network.job("bsp", 1, body, kind=ServerThread)


def test_workers_that_place_rows_otherwise_are_refused():
    def body(client: Client, rank: int) -> None:
        placed = Placed(np.roll([0, 0, 1, 1], rank))
        client.create({"t": ps.Parameter((4, 1), sparse=True, placed=placed)}, {"t": np.zeros((4, 1))})

    with pytest.raises(HetuError, match="placed="):
        network.job("bsp", 2, body, kind=ServerThread)
