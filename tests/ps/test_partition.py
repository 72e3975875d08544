"""Rows of a table on several servers: dealt out in turn, and all that a client does with them beside plain arrays."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetu.ps import Client, Parameter, Placed
from hetu.ps.saved import restore, state_of
from hetu.ps.store import partition as module
from hetu.ps.store.partition import ids_of, partition, places_before, places_of, sum_by_id

from .network import ServerThread, connect, options

SERVERS = 3


@given(st.integers(1, 60), st.data())
def test_places_are_the_rows_of_one_part_after_the_other(rows, data):
    parts = data.draw(st.integers(1, rows))
    places = places_of(np.arange(rows), rows, parts)
    assert (
        ids_of(np.arange(rows), rows, parts).tolist()
        == np.concatenate([np.arange(part, rows, parts) for part in range(parts)]).tolist()
    )
    np.testing.assert_array_equal(ids_of(places, rows, parts), np.arange(rows))
    edges = [places_before(part, rows, parts) for part in range(parts + 1)]
    assert edges[-1] == rows and max(np.diff(edges)) - min(np.diff(edges)) <= 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), min_size=1, max_size=3), st.integers(1, 9))
def test_rows_of_several_arrays_are_summed_where_they_lie_and_let_go(sizes, most):
    rng = np.random.default_rng(most)
    parts = [rng.normal(size=(n, 2 * k, 4)).astype("float32")[:, :k] for n, k in sizes]  # which lie apart
    ids = rng.integers(0, most, sum(n * k for n, k in sizes))
    wanted = np.zeros((most, 4), "float32")
    np.add.at(wanted, ids, np.concatenate([part.reshape(-1, 4) for part in parts]))
    distinct, sums = sum_by_id(ids, parts, (4,))
    np.testing.assert_array_equal(sums, wanted[distinct])
    assert distinct.tolist() == sorted({*ids.tolist()})
    gone = [weakref.ref(part) for part in parts]
    del parts, sums
    assert not any(of() is not None for of in gone)


@pytest.mark.parametrize("exponent", [1.0, 1.2])
def test_no_server_has_most_of_the_rows_of_a_batch(exponent):
    """Ids sorted by frequency, Zipf: the busiest of 4 servers had 81 to 87 % of the distinct rows."""
    rows, servers, rng = 100_000, 4, np.random.default_rng(0)
    blocks = partition({"t": Parameter((rows, 16), sparse=True)}, servers)["t"]
    odds = np.arange(1, rows + 1) ** -exponent
    places = places_of(np.unique(rng.choice(rows, 26 * 128, p=odds / odds.sum())), rows, len(blocks))
    loads = [np.sum((places >= b.start) & (places < b.stop)) for b in blocks]
    assert len(loads) == servers and max(loads) <= 1.15 * np.mean(loads)


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 64)  # several messages for each server
    servers = [ServerThread(options("asp", 1)) for _ in range(SERVERS)]
    try:
        with connect([s.address for s in servers], 0) as client:
            yield client
    finally:
        for server in servers:
            server.stop()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("parts", [0, 2, 5], ids=["in turn", "in 2 parts", "in 5, of which one is empty"])
@pytest.mark.parametrize("rows", [4, 7, 48, 50])
def test_a_table_in_parts_is_a_plain_one_to_a_client(client: Client, rows, parts):
    rng = np.random.default_rng(rows)
    table = rng.standard_normal((rows, 5)).astype("float32")
    placed = Placed(rng.integers(0, parts - (parts > 2), rows), parts=parts) if parts else None
    client.create({"t": Parameter(table.shape, sparse=True, rule="add", reduce="sum", placed=placed)}, {"t": table})
    assert len(client.blocks["t"]) > 1
    versions = np.zeros(rows, int)
    for _ in range(4):
        np.testing.assert_array_equal(client.pull("t").wait(), table)
        ids = rng.integers(0, rows, (4, 3))
        np.testing.assert_array_equal(client.pull_rows("t", ids).wait(), table[ids])
        new = rng.standard_normal((4, 3, 5)).astype("float32")
        client.push_rows("t", ids, new).wait()
        np.add.at(table, ids, new)
        versions[np.unique(ids)] += 1
        some = rng.permutation(rows)[: rows // 2 + 1]
        new, counts = rng.standard_normal((len(some), 5)).astype("float32"), rng.integers(1, 9, len(some))
        client.push_rows("t", some, new, counts).wait()
        table[some] += new
        versions[some] += counts
        limits = rng.integers(-1, 9, len(some))
        found, seen, values = client.sync_rows("t", some, limits).wait()
        assert sorted(found) == sorted(some[versions[some] > limits])
        np.testing.assert_array_equal(seen, versions[found])
        np.testing.assert_allclose(values, table[found], rtol=1e-5, atol=1e-6)
        table[...] = client.pull("t").wait()  # sums may round in another order
        client.clock().wait()
    np.testing.assert_array_equal(state_of(client, "t")[0], table)
    parts = [slice(0, 1), slice(1, 1), slice(1, rows - 2), slice(rows - 2, rows)]
    for part in parts:
        np.testing.assert_array_equal(state_of(client, "t", part)[0], table[part])
    restore(client, "t", [(part, lambda part=part: 2 * table[None, part]) for part in parts], step=0)
    np.testing.assert_array_equal(client.pull("t").wait(), 2 * table)
