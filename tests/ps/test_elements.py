"""Functions of single elements that workers send: what vector-style servers offer, beside NumPy, under every mode."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ArgumentError, UnknownNameError
from hetu.ps import ASP, BSP, Parameter, RefusedError, map_elements, partition, sum_elements
from hetu.ps.store.messages import Kind, Message

from .network import client_of
from .simulation import DENSE, GROWING, ROWS, SPARSE, contents, grow, new_store

LONG = 700_000  # floats of three chunks
SHAPES = {"a scalar": ((), False), "short": ((5,), False), "long": ((LONG,), False), "a table": ((LONG // 4, 4), True)}
# By name: the function of elements, and of arrays; how many lie beside; scalars; rounding errors of a sum.
MAPS = {
    "scale": (lambda x, a: a * x, lambda x, a: a * x, 0, {"a": 0.5}),
    "axpy": (lambda y, x, a: y + a * x, lambda y, x, a: y + a * x, 1, {"a": -2.0}),
    "clip": (lambda x: ht.clip(x, -1.0, 1.0), lambda x: np.clip(x, np.float32(-1), np.float32(1)), 0, {}),
    "soft threshold": (
        lambda x, t: ht.sign(x) * ht.relu(abs(x) - t),
        lambda x, t: np.sign(x) * np.maximum(np.abs(x) - t, 0),
        0,
        {"t": 0.5},
    ),
    "momentum step": (
        lambda w, v, g, rate, keep: w - rate * (keep * v + g),
        lambda w, v, g, rate, keep: w - rate * (keep * v + g),
        2,
        {"rate": 0.25, "keep": 0.5},
    ),
}
SUMS = {
    "sum": (lambda x: x + 0.0, lambda x: x, 0),
    "dot": (lambda x, y: x * y, lambda x, y: x * y, 1),
    "distance": (lambda x, y: (x - y) ** 2, lambda x, y: (x - y) ** 2, 1),
    "count": (lambda x: ht.where(x > 0.0, 1.0, x * 0.0), lambda x: x > 0, 0),
}


@pytest.fixture(scope="module", params=[1, 3])
def client(request, meaning):
    with client_of(request.param, "bsp") as client:
        yield client


numbers = itertools.count()


def vectors(client, kind, count):
    """So many parameters of a shape, the later ones beside the first, and what they hold."""
    shape, sparse = SHAPES[kind]
    names = [f"v{next(numbers)}" for _ in range(count)]
    made = [Parameter(shape, sparse=sparse, beside=names[0] if k else "") for k in range(count)]
    held = [np.random.default_rng(k).standard_normal(shape, np.float32) for k in range(count)]
    client.create(dict(zip(names, made)), dict(zip(names, map(np.asarray, held))))
    return names, held


def whole(client, name):
    if client.parameters[name].sparse:
        return client.pull_rows(name, np.arange(client.parameters[name].shape[0])).wait()
    return client.pull(name).wait()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", MAPS)
def test_a_table_changes_as_an_array_does(client, name, kind):
    function, meaning, beside, scalars = MAPS[name]
    names, held = vectors(client, kind, 1 + beside)
    map_elements(client, names[0], function, *names[1:], **scalars)
    client.clock().wait()
    narrow = {k: np.float32(v) for k, v in scalars.items()}
    np.testing.assert_array_equal(whole(client, names[0]), meaning(*held, **narrow))
    for other, array in zip(names[1:], held[1:]):
        np.testing.assert_array_equal(whole(client, other), array)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", SUMS)
def test_only_the_sum_travels(client, name, kind):
    function, meaning, beside = SUMS[name]
    names, held = vectors(client, kind, 1 + beside)
    before = sum(server["sent"] for server in client.status())
    found = sum_elements(client, names[0], function, *names[1:]).wait()
    assert sum(server["sent"] for server in client.status()) - before == 8 * len(client.blocks[names[0]])
    np.testing.assert_allclose(found, np.sum(meaning(*held), dtype=np.float64), rtol=1e-6, atol=1e-3)


def send(store, kind, worker, seq, key, function, beside=(), scalars=(), step=0):
    data = ht.ops.composition.traced(function, 1 + len(beside), len(scalars), (1,), {}).data()
    meta = {"function": data, "beside": list(beside), "scalars": list(scalars)}
    return store.handle(Message(kind, worker=worker, seq=seq, key=key, step=step, epoch=1, meta=meta), 0.0)


def test_under_bsp_they_come_after_the_pushes_of_their_clock_in_the_order_of_ranks():
    """Worker 1 comes first, its map counts last; a read of the next clock has all of it."""
    store = new_store(2, BSP())
    before = store.tables[DENSE].values.copy()
    [told] = send(store, Kind.MAP, 1, 3, DENSE, lambda x, a: x * a, scalars=[3.0])
    assert told.kind is Kind.OK and (store.tables[DENSE].values == before).all()
    again = send(store, Kind.MAP, 1, 3, DENSE, lambda x, a: x * a, scalars=[3.0])
    assert [reply.kind for reply in again] == [Kind.OK]  # and counts once
    send(store, Kind.MAP, 0, 3, DENSE, lambda x: x + 1.0)
    gradient = np.full((1, 8), 2, "<f4")
    store.handle(Message(Kind.PUSH, worker=0, seq=4, key=DENSE, epoch=1, values=gradient), 0.0)
    assert send(store, Kind.SUM, 0, 5, DENSE, lambda x: x * 1.0, step=1) == []  # waits as a pull does
    for worker in (0, 1):
        answers = store.handle(Message(Kind.CLOCK, worker=worker, seq=6, epoch=1), 0.0)
    after = (before - np.float32(0.01) + 1) * 3
    np.testing.assert_allclose(store.tables[DENSE].values, after, rtol=1e-6)
    [total] = [reply.values for reply in answers if reply.seq == 5]
    np.testing.assert_allclose(total, [[after.sum()]], rtol=1e-5)


def test_what_a_lost_worker_asked_for_is_dropped_with_its_pushes():
    store = new_store(2, BSP())
    before = store.tables[DENSE].values.copy()
    send(store, Kind.MAP, 1, 3, DENSE, lambda x: x + 1.0)
    store.handle(Message(Kind.LEAVE, worker=1, seq=4, epoch=1), 0.0)
    store.handle(Message(Kind.CLOCK, worker=0, seq=3, epoch=1), 0.0)
    assert (store.tables[DENSE].values == before).all() and not store.maps


@pytest.mark.parametrize("end", [Kind.CLOCK, Kind.LEAVE])
def test_what_waits_for_the_end_of_a_clock_is_bounded_in_memory(end):
    store = new_store(1, BSP(), memory_limit=100_000)
    before, told, seq = store.bytes_used, [], 2
    while not told or told[-1].kind is Kind.OK:
        seq += 1
        told += send(store, Kind.MAP, 0, seq, DENSE, lambda x, a: ht.sign(x) * ht.relu(abs(x) - a), scalars=[0.5])
    assert told[-1].meta["code"] == "memory" and 3 < len(store.maps) == len(told) - 1 < 100
    store.handle(Message(end, seq=seq + 1, epoch=1), 0.0)
    assert store.bytes_used == before and not store.maps


def test_all_rows_count_as_updated():
    store = new_store(1, ASP())
    before = store.tables[SPARSE].versions.copy()
    send(store, Kind.MAP, 0, 3, SPARSE, lambda x: x + 1.0)
    assert (store.tables[SPARSE].versions == before + 1).all()


WRONG = {
    "another shape": (SPARSE, {"beside": [DENSE]}, "value", "lies not beside"),
    "a table without a bound": (SPARSE, {"beside": [GROWING]}, "value", "g .6, 2. lies not beside"),
    "no such table": (DENSE, {"beside": [77]}, "key", "no table 77"),
    "a name for a table": (DENSE, {"beside": ["t"]}, "key", "no table 't'"),
    "too few arrays": (DENSE, {"beside": []}, "value", r"a function of \(2, 1, 1\) arrays, scalars and results"),
    "text for a number": (DENSE, {"scalars": ["1"]}, "value", "a scalar '1'"),
    "no number": (DENSE, {"scalars": [10**400]}, "value", "a scalar 1000"),
    "whole arrays": (DENSE, {"function": {"arrays": 2, "scalars": 1, "lines": [["sum", [0], {}]], "outputs": [3]}},
                     "value", "sum"),
    "nothing": (DENSE, {"function": {}}, "value", "function={}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", [Kind.MAP, Kind.SUM])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused_changes_nothing(name, kind):
    key, wrong, code, said = WRONG[name]
    store = new_store(1, BSP())
    grow(store, rows=ROWS)
    before = contents(store)
    data = ht.ops.composition.traced(lambda x, y, a: x + a * y, 2, 1, (1,), {}).data()
    meta = {"function": data, "beside": [key], "scalars": [0.5]} | wrong
    [reply] = store.handle(Message(kind, seq=4, key=key, epoch=1, meta=meta), 0.0)
    assert (reply.kind, reply.meta["code"]) == (Kind.ERROR, code)
    assert re.search(said, reply.meta["message"])
    assert contents(store) == before and not store.maps


def test_mistakes_are_named_before_anything_travels(client):
    (x, _), _ = vectors(client, "short", 2)
    (z,), _ = vectors(client, "long", 1)
    with pytest.raises(ArgumentError, match=r"lies not beside(.|\n)*Parameter\(..., beside="):
        map_elements(client, x, lambda a, b: a + b, z)
    with pytest.raises(ArgumentError, match="servers cannot apply this function: softmax at .*test_elements"):
        map_elements(client, x, lambda a: ht.softmax(a))
    with pytest.raises(ArgumentError, match="which is no parameter of that shape"):
        client.create({"w": Parameter((6,), beside=x)}, {"w": np.zeros(6)})
    counts = f"{x} counts"
    client.create({counts: Parameter((3,), "int64", rule="add", reduce="sum")}, {counts: np.zeros(3, int)})
    with pytest.raises(RefusedError, match="a function of elements of int64"):
        sum_elements(client, counts, lambda a: a * 2.0).wait()
    with pytest.raises(UnknownNameError, match="no parameter 'nobody'"):
        sum_elements(client, "nobody", lambda a: a * 2.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sparse", [True, False])
def test_those_beside_another_lie_on_its_servers(sparse):
    shape = (LONG // 4, 4)
    first = {
        "b": Parameter(shape, sparse=sparse),
        "c": Parameter(shape, sparse=sparse, beside="b"),
        "a": Parameter((9,)),
    }
    blocks = partition(first, 3)
    blocks |= partition({"d": Parameter(shape, sparse=sparse, beside="c")}, 3, sum(map(len, blocks.values())), blocks)
    assert len({block.key for some in blocks.values() for block in some}) == sum(map(len, blocks.values()))
    for name in "cd":
        assert [(b.server, b.start, b.stop, b.first, b.step) for b in blocks[name]] == [
            (b.server, b.start, b.stop, b.first, b.step) for b in blocks["b"]
        ]
