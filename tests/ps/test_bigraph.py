"""Samples and rows divided together: what is fetched from others, balance, costs that fall, and what is no division."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetu.core.errors import ArgumentError, HetuError, ShapeError, ValueRangeError
from hetu.ps import Parameter, Placed, partition, partition_bigraph
from hetu.ps.store.bigraph import METHODS

from ..pairs import nightly

SAMPLES, FIELDS, ROWS, KINDS, BATCH = 20_000, 8, 8000, 16, 256


def samples(locality: float, seed: int = 0) -> np.ndarray:
    """Ids of samples of some kind, which share most of their rows; of each field a kind has 1 / KINDS of the ids."""
    rng, each = np.random.default_rng(seed), ROWS // FIELDS // KINDS
    kinds = rng.integers(0, KINDS, (SAMPLES, 1))
    taken = np.where(rng.random((SAMPLES, FIELDS)) < locality, kinds, rng.integers(0, KINDS, (SAMPLES, FIELDS)))
    ids = taken + KINDS * rng.integers(0, each, (SAMPLES, FIELDS)) + ROWS // FIELDS * np.arange(FIELDS)
    return rng.permutation(ROWS)[ids]


def remote(ids: np.ndarray, parts: np.ndarray, owners: np.ndarray, kept: list[set[int]]) -> float:
    """The share of distinct rows of a batch that its part lacks, counted one by one."""
    far = whole = 0
    for part in range(len(kept)):
        mine = ids[parts == part]
        for first in range(0, len(mine), BATCH):
            wanted = set(mine[first : first + BATCH].ravel().tolist())
            far += sum(owners[row] != part and row not in kept[part] for row in wanted)
            whole += len(wanted)
    return far / whole


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("locality", "parts", "copies", "most"),
    [(0.5, 4, 0.05, 0.75), (0.8, 2, 0.01, 0.4), (0.8, 4, 0.01, 0.5), (0.8, 8, 0.1, 0.4), (0.95, 4, 0.01, 0.15)]
    + nightly([(0.5, 4, 0.01, 0.75), (0.8, 16, 0.01, 0.5), (0.95, 8, 0.05, 0.15), (0.95, 16, 0.01, 0.3)]),
)
def test_fewer_rows_are_fetched_from_other_parts(locality, parts, copies, most):
    ids = samples(locality)
    found = partition_bigraph(ids, parts, rows=ROWS, batch_size=BATCH, replicas=copies)
    owners, kept = found.placed.owners, [set(found.placed.kept_by(part).tolist()) for part in range(parts)]
    rng = np.random.default_rng(1)
    base = remote(ids, rng.permutation(np.arange(SAMPLES) % parts), np.arange(ROWS) % parts, [set()] * parts)
    mine = remote(ids, found.samples, owners, kept)
    assert mine <= most * base, mine / base
    assert abs(mine - found.remote()) < 0.01
    assert all(0 < len(rows) <= copies * ROWS and not (owners[[*rows]] == part).any() for part, rows in enumerate(kept))
    assert found.remote() < found.remote(copies=False)
    data, rows = found.imbalance
    assert data == max(np.bincount(found.samples)) * parts / SAMPLES <= 1.001
    assert rows == max(np.bincount(owners)) * parts / ROWS <= 1.05
    assert len(found.costs) > 5 and all(after < before for before, after in itertools.pairwise(found.costs))


def test_costs_are_what_a_sum_over_all_rows_says():
    """Also where rows of a near part cost less; near parts then share more."""
    rng, parts = np.random.default_rng(0), 4
    ids, price = rng.integers(0, 60, (300, 3)), np.full((4, 4), 1.0)
    price[:2, :2] = price[2:, 2:] = 0.1
    np.fill_diagonal(price, 0)
    found = partition_bigraph(ids, parts, rows=60, batch_size=20, costs=price)
    whole = 0.0
    for row, owner in enumerate(found.placed.owners):
        for part in range(parts):
            uses = int((ids[found.samples == part] == row).sum())
            whole += price[part, owner] * (1 - (1 - uses * parts / 300) ** 20) * (300 / parts) / 20
    assert found.costs[-1] == pytest.approx(whole, rel=1e-5)
    fetched = found.fetches(copies=False)
    assert fetched[price == 0.1].sum() / 4 > fetched[price == 1].sum() / 8
    assert str(found).splitlines()[0] == "300 samples, 60 rows in 4 parts by gmp" and len(str(found).splitlines()) == 9


def test_copies_are_of_rows_of_others():
    """Also where a part pays for its own rows, too."""
    ids = np.random.default_rng(0).integers(0, 60, (300, 3))
    placed = partition_bigraph(ids, 4, batch_size=20, replicas=0.5, costs=np.ones((4, 4))).placed
    assert all(len(kept) and (placed.owners[kept] != part).all() for part, kept in enumerate(placed.replicas))


def test_metis_is_the_same_kind_of_answer():
    pytest.importorskip("pymetis")
    found = partition_bigraph(ids := samples(0.8), 4, rows=ROWS, batch_size=BATCH, method="metis")
    base = partition_bigraph(ids, 4, rows=ROWS, batch_size=BATCH, method="random")
    assert found.remote() < 0.4 * base.remote(copies=False) and found.costs[-1] < found.costs[0] == base.costs[-1]
    assert max(found.imbalance) < 1.1


def test_without_metis_its_name_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(ArgumentError, match=r"without METIS\n.*\n.*\n.*\n.*hetu-dl\[metis\]"):
        partition_bigraph(np.arange(8).reshape(4, 2), 2, method="metis")


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 30), st.sampled_from(METHODS[::2]), st.data())
def test_any_graph_is_divided(count, fields, rows, method, data):
    """Also one sample, one row, and a row that is twice in a sample."""
    ids = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, rows, (count, fields)).astype("u1")
    parts, batch = data.draw(st.integers(1, min(count, rows))), data.draw(st.integers(1, 50))
    found = partition_bigraph(ids, parts, rows=rows, batch_size=batch, method=method, replicas=0.5)
    sizes = np.bincount(found.samples, minlength=parts)
    assert sizes.max() == -(-count // parts) and sizes.min() == count // parts
    assert np.bincount(found.placed.owners, minlength=parts).max() <= max(-(-rows // parts), 1.05 * rows / parts)
    assert sorted(row for part in range(parts) for row in found.samples_of(part)) == [*range(count)]
    again = partition_bigraph(ids, parts, rows=rows, batch_size=batch, method=method, replicas=0.5)
    assert again.placed == found.placed and (again.samples == found.samples).all()


IDS = np.arange(12).reshape(6, 2)
WRONG = {
    "no samples": ((np.empty((0, 2), int), 2), {}, ShapeError, r"ids are int64 of shape \(0, 2\)"),
    "no fields": ((IDS[:, 0], 2), {}, ShapeError, r"of shape \(6,\)"),
    "floats": ((IDS / 2, 2), {}, ShapeError, "ids are float64"),
    "below 0": ((IDS - 1, 2), {}, ValueRangeError, r"ids -1\.\.10 of a table of 11 rows"),
    "above": ((IDS, 2), {"rows": 11}, ValueRangeError, r"ids 0\.\.11 of a table of 11 rows"),
    "more parts than samples": ((IDS, 7), {}, ArgumentError, "7 parts of 6 samples and 12 rows"),
    "no parts": ((IDS, 0), {}, ArgumentError, "parts"),
    "other costs": ((IDS, 2), {"costs": np.eye(3)}, ShapeError, r"costs \(3, 3\) of 2 parts"),
    "costs below 0": ((IDS, 2), {"costs": -np.eye(2)}, ValueRangeError, "costs from -1.0 to"),
    "costs of NaN": ((IDS, 2), {"costs": np.full((2, 2), np.nan)}, ValueRangeError, "costs from nan"),
    "a method": ((IDS, 2), {"method": "best"}, HetuError, "'gmp' or 'metis' or 'random'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_divided_is_told(what):
    given, more, error, text = WRONG[what]
    with pytest.raises(error, match=text):
        partition_bigraph(*given, **more)


# -- where rows are placed -------------------------------------------------------------------------------------------

NO_DIVISION = {
    "no rows": (lambda: Placed(np.array([], int)), r"owners are int64 of shape \(0,\)"),
    "a matrix": (lambda: Placed(np.zeros((2, 2), int)), r"of shape \(2, 2\)"),
    "floats": (lambda: Placed(np.zeros(3)), "owners are float64"),
    "a part below 0": (lambda: Placed(np.array([0, -1])), r"owners -1\.\.0"),
    "all below 0": (lambda: Placed(np.array([-1])), r"owners -1\.\.-1 of 1 parts"),
    "a part above": (lambda: Placed(np.array([0, 2]), parts=2), r"owners 0\.\.2 of 2 parts"),
    "too many parts": (lambda: Placed(np.array([0, 1 << 20])), "1048577 parts"),
    "parts of no number": (lambda: Placed.parse({"owners": [0, 1], "replicas": [], "parts": 2.5}), "2.5 parts"),
    "parts of true": (lambda: Placed.parse({"owners": [0, 0], "replicas": [], "parts": True}), "True parts"),
    "replicas for some": (lambda: Placed(np.array([0, 1]), [np.array([0])] * 3, 2), "2 parts with replicas for 3"),
    "a replica above": (lambda: Placed(np.array([0, 1]), [np.array([2]), np.array([0])]), r"replicas 2\.\.2 of part 0"),
    "no slice": (lambda: Placed(np.array([0, 1])).of(slice(2, 2)), "at least one row"),
    "no data": (lambda: Placed.parse({"owners": [0]}), "a division"),
    "another length": (lambda: Parameter((3, 2), sparse=True, placed=Placed(np.array([0, 1]))), "owners of 2 rows"),
    "no table": (lambda: Parameter((2, 2), placed=Placed(np.array([0, 1]))), "no table"),
}


@pytest.mark.parametrize("what", NO_DIVISION)
def test_what_is_no_division_is_refused(what):
    make, text = NO_DIVISION[what]
    with pytest.raises(HetuError, match=text):
        make()


def test_rows_lie_on_the_server_of_their_part():
    placed = Placed(np.array([2, 0, 0, 2, 2]), [np.array([0]), np.array([], int), np.array([2, 1, 2])])
    tables = {"t": Parameter((5, 2), sparse=True, placed=placed), "u": Parameter((5, 9), sparse=True, placed=placed)}
    blocks = partition({**tables, "v": Parameter((5, 1), sparse=True, beside="t", placed=placed)}, 2)
    assert [(b.server, b.start, b.stop) for b in blocks["t"]] == [(0, 0, 2), (1, 2, 2), (0, 2, 5)]  # part 2 on 2 % 2
    assert [b.server for b in blocks["u"]] == [b.server for b in blocks["v"]] == [0, 1, 0]
    with pytest.raises(ArgumentError, match="v beside 't', whose rows are placed otherwise"):
        partition({**tables, "v": Parameter((5, 1), sparse=True, beside="t")}, 2)
    assert Placed.parse(placed.data()) == placed != Placed(placed.owners) and hash(placed) == placed.number
    both = Placed.joined([placed, placed.of(slice(1, 3))])
    assert both.owners.tolist() == [2, 0, 0, 2, 2, 0, 0]
    assert [kept.tolist() for kept in both.replicas] == [[0], [], [1, 2, 5, 6]] and both.kept_by(4).tolist() == []
