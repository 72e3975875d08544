"""Bags that servers sum up: what NumPy sums, on any number of servers, of tables with a bound and without; bad bags."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import ShapeError, ValueRangeError
from hetu.ps import UNBOUNDED, Growth, Parameter, Placed
from hetu.ps.store import partition
from hetu.ps.wire import rows as module
from hetu.ps.wire.rows import pull_bags
from hetu.ps.wire.transport import SHARED_BYTES

from .test_heritage import Group

ROWS, COLS, ENTRIES, BAGS = 40, 3, 500, 60
TABLES = {
    "dealt": Parameter((ROWS, COLS), sparse=True),
    "placed": Parameter((ROWS, COLS), sparse=True, placed=Placed(np.arange(ROWS) % 5 % 2, parts=2)),
    "matrices": Parameter((ROWS, COLS, 2), "float64", sparse=True),
    "at rest": Parameter((ROWS, COLS), sparse=True, at_rest="float16"),
    "coded": Parameter((ROWS, COLS), sparse=True, pull="float16"),
    "growing": Parameter((UNBOUNDED, COLS), sparse=True, grows=Growth(1 << 20)),
}


@pytest.mark.parametrize("weighted", [False, True], ids=["sums", "weighted"])
@pytest.mark.parametrize("kind", TABLES)
def test_bags_are_summed_as_by_numpy(kind, weighted, tmp_path, monkeypatch):
    monkeypatch.setattr(partition, "CHUNK", 100)  # so that rows lie on both, and entries travel in several messages
    monkeypatch.setattr(module, "CHUNK", 100)
    rng, table = np.random.default_rng(0), TABLES[kind]
    rows = rng.standard_normal((ROWS, *table.shape[1:])).astype(table.dtype)
    ids, bags = rng.integers(0, ROWS, ENTRIES), rng.integers(0, BAGS - 1, ENTRIES)  # the last has none
    weights = rng.random(ENTRIES) if weighted else None
    with Group(tmp_path, 2) as client:
        client.create({"t": table}, {"t": ht.init.normal() if table.grows else rows})
        rows = client.pull_rows("t", np.arange(ROWS)).wait()
        found = pull_bags(client, "t", ids, bags, BAGS, weights).wait()
        none = pull_bags(client, "t", ids[:0], bags[:0], 2).wait()
    wanted = np.zeros((BAGS, *table.shape[1:]))
    weights = np.ones(ENTRIES) if weights is None else weights
    np.add.at(wanted, bags, rows[ids] * weights.reshape(-1, *[1] * (rows.ndim - 1)))
    tolerance = 1e-2 if kind == "coded" else 1e-5  # sums travel as they are, pulled rows do not
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
    assert found.dtype == table.element and none.shape == (2, *table.shape[1:]) and not none.any()


def test_servers_are_asked_for_bags_that_have_rows_there(tmp_path):
    """A bag comes once from each server that has rows of it, though all entries take many messages."""
    rng, count, each = np.random.default_rng(0), 3000, 20
    table = Parameter((8000, 32), sparse=True, placed=Placed(np.arange(8000) // 4000))
    ids, bags = rng.integers(0, 4000, count * each), np.repeat(np.arange(count), each)
    with Group(tmp_path, 2) as client:
        client.create({"t": table}, {"t": np.ones((8000, 32), "f4")})
        before = np.array(client.traffic())
        assert (pull_bags(client, "t", ids, bags, count).wait() == each).all()
        sent, came = (np.array(client.traffic()) - before).T
    assert came[0] < 1.05 * count * 32 * 4 and sent[0] < 4 * len(ids) and sent[1] + came[1] == 0


def test_weights_that_go_through_shared_memory(tmp_path):
    ids, weights = np.arange(SHARED_BYTES) % ROWS, np.arange(SHARED_BYTES) % 3
    with Group(tmp_path, 1) as client:
        client.create({"t": TABLES["dealt"]}, {"t": np.ones((ROWS, COLS), "f4")})
        before = client.traffic()[0][0]
        found = pull_bags(client, "t", ids, ids, ROWS, weights).wait()
        assert client.traffic()[0][0] - before < weights.nbytes / 2  # ids and bags are packed
    np.testing.assert_array_equal(found[:, 0], np.bincount(ids, weights))


def test_bags_that_cannot_be_are_refused(tmp_path):
    with Group(tmp_path, 1) as client:
        client.create({"t": TABLES["dealt"]}, {"t": np.zeros((ROWS, COLS), "f4")})
        ask = partial(pull_bags, client, "t")
        for arguments, kind, text in (
            (([1, 2], [0], 2), ShapeError, r"ids, bags and weights \[\(2,\), \(1,\), None\] for bags of t"),
            (([1, 2], [0, 1], 2, [1.0]), ShapeError, "give each entry its bag and weight"),
            (([1, 2], [0, 2], 2), ValueRangeError, r"bags 0\.\.2 of 2"),
            (([1, ROWS], [0, 1], 2), ValueRangeError, rf"ids 1\.\.{ROWS} of t"),
        ):
            with pytest.raises(kind, match=text):
                ask(*(np.asarray(a) if isinstance(a, list) else a for a in arguments)).wait()
