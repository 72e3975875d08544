"""Masked ids and rows are refused wherever they enter: plain arrays would hold what their mask says is not there."""

from __future__ import annotations

import numpy as np
import pytest

import hetu as ht
from hetu.core.errors import DataError
from hetu.data.parts import GraphPart
from hetu.ps import UNBOUNDED, Growth, Parameter, Placed, import_rows, partition_bigraph
from hetu.ps.wire.rows import pull_bags

from .network import client_of

IDS, ROWS = np.array([3, 1, 2]), np.ones((3, 2), "f4")
MASK = {"ids": np.ma.masked_array(IDS, mask=[0, 0, 1]), "rows": np.ma.masked_array(ROWS, mask=ROWS > 1)}
ALONE = {
    "hashed": lambda: ht.data.hashed(MASK["ids"]),
    "hashed, of a list": lambda: ht.data.hashed([MASK["ids"], MASK["ids"]]),
    "ids of samples": lambda: partition_bigraph(np.ma.masked_equal(np.eye(4, dtype=int), 1), 2),
    "costs": lambda: partition_bigraph(np.eye(4, dtype=int), 2, costs=np.ma.masked_equal(np.eye(2), 1)),
    "owners": lambda: Placed(np.ma.masked_equal([0, 1, 1], 0)),
    "replicas": lambda: Placed(np.array([0, 1]), [MASK["ids"], IDS]),
    "owners of nodes": lambda: GraphPart.of(np.zeros((1, 2), int), np.ma.masked_equal([0, 1], 1), 0),
    "nodes": lambda: GraphPart.of(np.zeros((1, 2), int), np.zeros(4, int), 0).places(MASK["ids"]),
}
SERVED = {
    "pull": lambda client: client.pull_rows("t", MASK["ids"]),
    "push ids": lambda client: client.push_rows("t", MASK["ids"], ROWS),
    "push rows": lambda client: client.push_rows("t", IDS, MASK["rows"]),
    "push and pull": lambda client: client.push_pull_rows("t", MASK["ids"], ROWS),
    "sync": lambda client: client.sync_rows("t", MASK["ids"], np.zeros(3, int)),
    "bags of ids": lambda client: pull_bags(client, "t", MASK["ids"], np.zeros(3, int), 1),
    "bags": lambda client: pull_bags(client, "t", IDS, np.ma.masked_equal([0, 1, 0], 1), 2),
    "weights of bags": lambda client: pull_bags(client, "t", IDS, np.zeros(3, int), 1, MASK["rows"][:, 0]),
    "import ids": lambda client: import_rows(client, "g", MASK["ids"], ROWS[None]),
    "import rows": lambda client: import_rows(client, "g", IDS, MASK["rows"][None]),
    "push": lambda client: client.push("w", np.ma.masked_array(np.ones(2, "f4"), mask=[0, 1])),
}


@pytest.mark.parametrize("where", ALONE)
def test_what_is_masked_is_refused(where):
    with pytest.raises(DataError, match="(?s)masked, and a mask is not taken.*compressed"):
        ALONE[where]()


def test_what_is_masked_goes_to_no_server():
    with client_of(2, "bsp") as client:
        tables = {"t": Parameter((5, 2), sparse=True), "w": Parameter((2,))}
        tables["g"] = Parameter((UNBOUNDED, 2), sparse=True, grows=Growth(1 << 20))
        client.create(tables, {"t": np.ones((5, 2), "f4"), "w": np.ones(2, "f4"), "g": ht.init.normal(0.1)})
        for where, ask in SERVED.items():
            with pytest.raises(DataError, match="masked, and a mask is not taken"):
                pytest.fail(f"{where}: {ask(client)}")
        assert (client.pull_rows("t", IDS).wait() == 1).all() and (client.pull("w").wait() == 1).all()
