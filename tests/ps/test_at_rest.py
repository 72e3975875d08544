"""Rows that lie on servers in fewer bytes: their bits are those of a plain model, whatever servers, replays, lives."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetu as ht
from hetu.codec import codec
from hetu.core.errors import ArgumentError, HetuError
from hetu.dist.comm.comm import SerialComm
from hetu.dist.cut.strategy import Strategy
from hetu.ps import ASP, BSP, Cache, CachedTable, Compress, Parameter, map_elements, sum_elements
from hetu.ps.store import partition
from hetu.ps.store.messages import Kind, Message
from hetu.ps.store.packing import RowsAtRest
from hetu.ps.store.rules import ServerRule
from hetu.ps.store.server_table import ServerTable
from hetu.ps.store.table_spec import TableSpec
from hetu.ps.wire.environment import Place
from hetu.ps.wire.snapshot import VERSION_JUMP
from hetu.strategies import Connected, Hybrid, ParameterServer

from ..samples.update import ON_ELEMENTS
from . import network
from .network import ServerThread, client_of
from .simulation import DENSE, SPARSE, Worker, contents, hello, new_store, run
from .test_snapshot import saved

HOWS = ["float16", "int8"]
BITS = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
job = functools.partial(network.job, kind=ServerThread)


# -- a plain model ----------------------------------------------------------------------------------------------------


def mixed(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & BITS
    return x ^ x >> 31


def rounded(how: str, row: np.ndarray, seed: int, number: int, version: int) -> np.ndarray:
    """A row as it lies, number by number: its id is `number`."""
    key = mixed(int(version) * GOLDEN + mixed(int(number) * GOLDEN + seed & BITS) & BITS)
    words = [mixed(key + (1 + j // 4) * GOLDEN & BITS) >> 16 * (j % 4) & 0xFFFF for j in range(len(row))]
    row = row.astype("f4")
    scale = np.float32(np.abs(row).max(initial=0) / np.float32(127))
    fraction, power = math.frexp(scale)
    scale = np.float32(
        math.ldexp(min(math.ceil(math.ldexp(fraction, 17)), 66052 if power == 122 else 1 << 17), power - 17)
    )
    found = []
    for x, word in zip(row, words):
        step = scale if how == "int8" else np.float32(2.0 ** max(math.frexp(x)[1] - 11, -24))
        exact = float(np.float32(x / step)) if step else 0.0
        whole = math.floor(exact) + (exact - math.floor(exact) > (word + 0.5) / 65536)
        found.append(
            max(-127, min(127, whole)) * step if how == "int8" else max(-65504, min(65504, float(whole) * float(step)))
        )
    return np.array(found, "f4")


class Model:
    """A table of one process, each row of which is rounded as it is written."""

    def __init__(self, how: str, first: np.ndarray, seed: int, rule: str = "sgd", options: dict | None = None) -> None:
        self.how, self.seed, self.versions = how, seed, np.zeros(len(first), int)
        self.rows = np.zeros(first.shape, "f4")
        self.write(range(len(first)), first)
        self.rule = ServerRule(rule, self.rows, options or {})

    def write(self, ids, rows) -> None:
        for i, row in zip(ids, rows):
            self.rows[i] = rounded(self.how, row, self.seed, int(i), int(self.versions[i]))

    def update(self, ids: np.ndarray, gradient: np.ndarray, count: int = 1) -> None:
        self.rule.apply_rows(ids, gradient)
        self.versions[ids] += count
        self.write(ids, self.rows[ids])


numbers = st.one_of(
    st.floats(-1e5, 1e5, width=32),
    st.floats(-1, 1, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, 6e-8, 1e-6, 65519, float(np.finfo("f4").max)]),
)


@settings(max_examples=60)
@given(
    st.sampled_from(HOWS),
    st.lists(numbers, max_size=9),
    st.integers(0, (1 << 62) - 1),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 31),
)
def test_a_row_is_rounded_as_the_model_says(how, row, seed, number, version):
    row = np.array(row, "f4")
    if how == "int8" and 0 < np.abs(row).max(initial=0) < 1e-30:
        return  # scales of fewer bits
    rows = RowsAtRest(codec(how), (1, len(row)), np.dtype("f4"), range(number, number + 1), np.array([version]), seed)
    rows[np.array([0])] = row[None]
    np.testing.assert_array_equal(rows[:][0], rounded(how, row, seed, number, version))
    stored = rows.stored.copy()
    rows.versions += 1 + VERSION_JUMP
    rows[:] = rows[:]  # what has been decoded lies as it lay
    assert (rows.stored == stored).all() or how == "int8"  # whose largest may have come to lie below 127 steps
    np.testing.assert_allclose(rows[:][0], rounded(how, row, seed, number, version), rtol=1e-2)


@pytest.mark.parametrize("how", HOWS)
def test_updates_far_below_a_step_are_not_lost(how):
    """Rounded to the nearest, no number would ever move."""
    table = ServerTable(TableSpec("t", 0, 50, 8, rule="add", reduce="sum", at_rest=how))
    table.assign(Message(Kind.ASSIGN, values=np.full((50, 8), 127 / 128, "f4")))
    first = table.values[:]
    small = np.full((50, 8), 0.1 * (2**-11 if how == "float16" else 1 / 128), "f4")
    small[:, 0] = 0  # the largest keeps the step
    for _ in range(100):
        table.apply([Message(Kind.PUSH, ids=np.arange(50), values=-small)], 1.0)
    moved, still = (first - table.values[:])[:, 1:], table.values[:][:, 0]
    assert (still == first[:, 0]).all() and abs(moved.mean() / (100 * small[0, 1]) - 1) < 0.05
    assert len(np.unique(moved)) > 5  # each by its own chance


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none_in_its_row(how, number):
    rows = RowsAtRest(codec(how), (2, 5), np.dtype("f4"), range(2), np.zeros(2, int))
    values = np.ones((2, 5), "f4")
    values[1, 3] = number
    rows[:] = values
    np.testing.assert_allclose(rows[:][0], 1, rtol=1e-2)
    assert not np.isfinite(rows[:][1, 3])


# -- one server -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("rule", ["add", *ON_ELEMENTS])
def test_a_table_under_any_rule_is_that_of_the_model(rule, how):
    """Two workers' pushes are one update; a push of the whole table is one of each row."""
    rng, reduce = np.random.default_rng(0), "sum" if rule == "add" else "mean"
    first = rng.standard_normal((12, 5)).astype("f4")
    spec = TableSpec("t", 7, 12, 5, rule=rule, reduce=reduce, at_rest=how, seed=99, parts=3, first=2)
    table, model = ServerTable(TableSpec.parse(spec.meta())), Model(how, np.zeros((36, 5), "f4"), 99, rule)
    mine = 2 + 3 * np.arange(12)
    table.assign(Message(Kind.ASSIGN, values=first))
    model.write(mine, first)
    for step in range(4):
        ids = np.sort(rng.choice(12, 4, replace=False)) if step else np.arange(12)
        gradient = rng.standard_normal((2, len(ids), 5)).astype("f4")
        pushes = [Message(Kind.PUSH, ids=ids if step else None, values=g, worker=w) for w, g in enumerate(gradient)]
        weight = np.float32(1 if rule == "add" else 0.5)
        table.apply(pushes, float(weight))
        model.update(mine[ids], (gradient[0] + gradient[1]) * weight, count=2)
        np.testing.assert_array_equal(table.values[:], model.rows[mine])
    for state, wanted in zip(table.rule.states, model.rule.states):
        np.testing.assert_array_equal(state, wanted[mine])


def test_a_table_takes_the_memory_of_its_bytes():
    """What a server counts, and refuses by, is what lies there."""
    taken, codes = {}, {}
    for how in ("", *HOWS):
        store = new_store(1, ASP(), memory_limit=500_000)
        before, spec = store.bytes_used, TableSpec("t", 0, 2000, 64, at_rest=how)
        [reply] = store.handle(Message(Kind.CREATE, key=9, seq=3, epoch=1, meta=spec.meta()), 0.0)
        taken[how], codes[how] = store.bytes_used - before, reply.facts.get("code")
        if how:
            table = store.tables[9]
            held = table.stored.nbytes + table.versions.nbytes + table.filled.nbytes
            assert 0 <= taken[how] - held <= 5000
            call = Message(Kind.CALL, key=9, seq=4, epoch=1, meta={"function": "top_k", "arguments": {"k": 1}})
            [reply] = store.handle(call, 0.0)
            assert reply.facts["code"] == "memory"  # all of it would be decoded
    assert codes == {"": "memory", "float16": None, "int8": None}
    assert [ServerTable(TableSpec("t", 0, 9, 64, at_rest=how)).stored.nbytes / (9 * 4) for how in HOWS] == [32, 17]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("mode", [BSP(), ASP()], ids=str)
@settings(max_examples=10)
@given(st.lists(st.integers(0, 11), max_size=60), st.lists(st.integers(0, 1000), max_size=40))
def test_what_comes_again_counts_once(how, mode, schedule, echoes):
    stores = [new_store(3, mode, "adam", at_rest=how) for _ in range(2)]
    for store, again in zip(stores, ((), echoes)):
        run(store, [Worker(rank, 3) for rank in range(3)], list(schedule), again)
    assert contents(stores[0]) == contents(stores[1])
    assert stores[0].tables[SPARSE].stored.dtype == np.uint8


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("mode", [BSP(), ASP()], ids=str)
def test_training_goes_on_from_a_snapshot_bit_for_bit(how, mode, tmp_path):
    def trained(restart: bool):
        store, crew = new_store(2, mode, "adam", at_rest=how), [Worker(rank, 2) for rank in range(2)]
        run(store, crew, [])
        if restart:
            before = [store.tables[key].stored.tobytes() for key in (DENSE, SPARSE)]
            store = saved(store, tmp_path)
            assert [store.tables[key].stored.tobytes() for key in (DENSE, SPARSE)] == before
            for worker in crew:
                hello(store, worker.rank)
                worker.epoch = 2
        for worker in crew:
            worker.clocks = 4
        run(store, crew, [])
        for table in store.tables.values():
            table.versions %= VERSION_JUMP
        return contents(store)

    assert trained(restart=True) == trained(restart=False)


# -- several servers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[1, 3])
def client(request, meaning):
    with client_of(request.param, "asp") as client:
        yield client


@pytest.mark.sampled(6)
@pytest.mark.parametrize("pull", ["", "float16", "int8"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_on_any_number_of_servers_are_those_of_the_model(client, how, dtype, pull):
    """So many bytes a row that three servers share the table; bytes travel as they lie where the codecs are one."""
    name, rng = f"{how} {dtype} {pull}", np.random.default_rng(0)
    first = rng.standard_normal((400, 2000)).astype("f4")
    parameter = Parameter(
        first.shape, dtype, sparse=True, options={"learning_rate": 0.5}, pull=pull, at_rest=how, seed=5
    )
    client.create({name: parameter}, {name: first.astype(dtype)})
    assert len(client.blocks[name]) == len(client.transport.links)
    ids = np.sort(rng.choice(400, 7, replace=False))
    rows = np.array([rounded(how, first[i], 5, i, 0) for i in ids])
    for version in (1, 2):
        gradient = rng.standard_normal((7, 2000)).astype("f4")
        client.push_rows(name, ids, gradient.astype(dtype)).wait()
        rows = np.array([rounded(how, row, 5, i, version) for i, row in zip(ids, rows - np.float32(0.5) * gradient)])
    wanted = codec(pull).decode(codec(pull).encode(rows), 2000) if pull else rows
    found = client.pull_rows(name, ids).wait()
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == dtype
    if pull == how:
        np.testing.assert_array_equal(found, rows)


def test_functions_of_elements_change_rows_and_count_as_updates(client):
    first = np.random.default_rng(0).standard_normal((30, 4)).astype("f4")
    parameter = Parameter(first.shape, sparse=True, rule="add", reduce="sum", at_rest="int8", seed=5)
    plain = replace(parameter, at_rest="", beside="mapped")
    client.create({"mapped": parameter, "plain": plain}, {"mapped": first, "plain": first})
    map_elements(client, "mapped", lambda x, y: x + y, "plain").wait()
    lay = [rounded("int8", row, 5, i, 0) for i, row in enumerate(first)]
    wanted = np.array([rounded("int8", x + y, 5, i, 1) for i, (x, y) in enumerate(zip(lay, first))])
    np.testing.assert_array_equal(client.pull_rows("mapped", np.arange(30)).wait(), wanted)
    found = sum_elements(client, "mapped", lambda x: x * x).wait()
    np.testing.assert_allclose(found, (wanted.astype("f8") ** 2).sum(), rtol=1e-6)
    best, rows = client.call("mapped", "top_k", k=1).wait()
    assert wanted[best, 0].max() == wanted[:, 0].max() == rows[:, 0].max()


@pytest.mark.parametrize(
    "coded", [{"at_rest": "int8"}, {"push": "int8"}, {"push": "float16", "pull": "float16"}], ids=str
)
def test_of_a_cache_own_updates_make_rows_stale_too(coded, client):
    """The server rounds what it adds, so what a worker keeps would move away from it without bound."""
    parameter, name = Parameter((50, 8), sparse=True, rule="add", reduce="sum", **coded), f"cached {coded}"
    client.create({name: parameter}, {name: np.ones((50, 8))})
    table = CachedTable(client, name, Cache("lru", rows=20, pull_bound=3, push_bound=0))
    missed, rng = 0, np.random.default_rng(0)
    for _ in range(12):
        found = table.lookup(np.arange(10))
        lies = client.pull_rows(name, np.arange(10)).wait()
        missed = 0 if (found == lies).all() else missed + 1
        assert missed <= 3
        table.update(np.arange(10), rng.standard_normal((10, 8)) * 0.01)
    assert table.counters.fetched == 30


REFUSED = {
    "integers": (Parameter((8, 2), "int64", sparse=True, rule="add", reduce="sum"), "int8", "lies as int8"),
    "the largest only": (Parameter((8, 2), sparse=True), "topk:0.1", "at_rest='topk:0.1'"),
    "no such way": (Parameter((8, 2), sparse=True), "zip", "no way 'zip'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_lie_in_fewer_bytes_is_refused(what):
    parameter, way, said = REFUSED[what]
    with pytest.raises(HetuError, match=said):  # by who describes it, and by a server that is told so
        replace(parameter, at_rest=way).spec("t", 0, 8)
    store = new_store(1, ASP())
    [reply] = store.handle(
        Message(Kind.CREATE, key=9, seq=3, epoch=1, meta=parameter.spec("t", 0, 8).meta() | {"at_rest": way}), 0.0
    )
    assert reply.meta["code"] == "value" and said in reply.meta["message"] and len(store.tables) == 2


def test_rows_that_would_not_become_smaller_lie_as_they_are():
    lying = [
        (how, dtype, cols)
        for how, dtype, cols in itertools.product(HOWS, ["float16", "float32", "float64"], [0, 1, 2, 4, 5])
        if TableSpec("t", 0, 3, cols, dtype, at_rest=how).lying is None
    ]
    none = {("float16", "float16"): [0, 1, 2, 4, 5], ("int8", "float16"): [0, 1, 2, 4], ("int8", "float32"): [0, 1]}
    kinds = itertools.product(HOWS, ["float16", "float32", "float64"])
    assert lying == [(how, dtype, cols) for how, dtype in kinds for cols in none.get((how, dtype), [0])]
    table = ServerTable(TableSpec("t", 0, 3, 1, at_rest="int8"))
    assert table.stored is table.values


def test_what_is_no_table_is_refused():
    with pytest.raises(ArgumentError, match=r"(?s)servers keep no table.*served="):
        strategy = Hybrid(batch_size=0, compress=Compress(at_rest="int8"))
        ht.Executor(clicks("sgd"), strategy=strategy, comm=Connected(SerialComm()))
    with pytest.raises(ArgumentError, match=r"(?s)at_rest='int8' of what is no table.*sparse=True"):
        Parameter((8,), at_rest="int8")
    with pytest.raises(ArgumentError, match=r"(?s)at_rest='1bit'.*float16 or int8"):
        Compress(at_rest="1bit")


# -- as a strategy ----------------------------------------------------------------------------------------------------


NAMES = ["model/a/weight", "model/b/weight"]
OPTIMIZERS = {"sgd": lambda: ht.optim.SGD(0.5), "adam": lambda: ht.optim.Adam(0.05)}


def clicks(optimizer: str) -> dict[str, list]:
    """Two tables, which servers keep as one."""
    ids = ht.placeholder("ids", (None, 2), "int64")
    with ht.scope("model"):
        layers = [ht.nn.Embedding(40, 4, name=name) for name in "ab"]
        rows = [layer(ids[:, k]) for k, layer in enumerate(layers)]
        loss = ht.mean(ht.square(ht.tanh(ht.sum(ht.concat(rows, axis=1), axis=1)) - 0.1))
        whole = [layer(ht.constant(np.arange(40))) for layer in layers]
        with ht.scope("optimizer"):
            updates = OPTIMIZERS[optimizer]().minimize(loss)
    return {"train": [loss, updates], "tables": whole}


def fed(step: int) -> dict[str, np.ndarray]:
    return {"ids": np.random.default_rng(step).integers(0, 40, (8, 2))}


@functools.cache
def wanted(how: str, optimizer: str, steps: int = 6) -> list[np.ndarray]:
    """The tables of one process, of which the rows of each step are rounded after it."""
    one = ht.Executor(clicks(optimizer))
    seed, versions = crc32(NAMES[0].encode()), np.zeros(80, int)

    def write(k: int, ids: np.ndarray) -> None:
        table = one.state[NAMES[k]].copy()
        for i in ids:
            table[i] = rounded(how, table[i], seed, 40 * k + int(i), int(versions[40 * k + i]))
        one.state[NAMES[k]] = table

    for k in range(2):
        write(k, np.arange(40))
    for step in range(steps):
        one.run("train", fed(step))
        for k, ids in enumerate(fed(step)["ids"].T):
            versions[40 * k + np.unique(ids)] += 1
            write(k, np.unique(ids))
    return one.run("tables")


@pytest.mark.sampled(12)
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(
    "strategy", [ParameterServer, functools.partial(Hybrid, served="*weight")], ids=["ps", "hybrid"]
)
@pytest.mark.parametrize(("how", "optimizer"), [("float16", "adam"), ("int8", "sgd"), ("int8", "adam")])
def test_training_is_that_of_one_process_with_rounded_rows(how, optimizer, strategy, servers, monkeypatch):
    monkeypatch.setattr(partition, "CHUNK", 400)  # rows on all servers

    def body(client, rank):
        comm = Connected(Place(0, 1) if strategy is ParameterServer else SerialComm(), client)
        ex = ht.Executor(clicks(optimizer), strategy=strategy(compress=Compress(rows="", at_rest=how)), comm=comm)
        for step in range(6):
            ex.run("train", fed(step), ahead=fed(step + 1))
        assert [len(client.blocks[name]) for name, p in client.parameters.items() if p.sparse] == [servers]
        return ex.run("tables")

    np.testing.assert_array_equal(job("bsp", 1, body, servers=servers)[0], wanted(how, optimizer))


@pytest.mark.parametrize("how", HOWS)
def test_a_checkpoint_gives_rows_back_as_they_lay_and_another_executor_trains_alike(how, tmp_path):
    def body(client, rank):
        where = {"strategy": ParameterServer(compress=Compress(at_rest=how)), "comm": Connected(Place(0, 1), client)}
        first, later = (ht.Executor(clicks("adam"), **where) for _ in range(2))
        for ex in (first, later):
            for step in range(6):
                ex.run("train", fed(step))
        first.save(tmp_path / "kept")
        first.run("train", fed(6))
        first.load(tmp_path / "kept")
        return first.run("tables"), later.run("tables")

    for found in job("bsp", 1, body, servers=2)[0]:
        np.testing.assert_array_equal(found, wanted(how, "adam"))
    alone = ht.Executor(clicks("adam"))
    alone.load(tmp_path / "kept")
    np.testing.assert_array_equal(alone.run("tables"), wanted(how, "adam"))


def test_a_strategy_says_how_rows_lie():
    loss, updates = clicks("sgd")["train"]
    strategy = ParameterServer(compress=Compress(at_rest="int8")).build([loss, *updates.values()], 1)
    assert Strategy.from_json(strategy.to_json()) == strategy and "at_rest='int8'" in str(strategy)
