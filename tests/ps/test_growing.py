"""Tables without a bound against dictionaries: which rows there are, what they hold, what goes, what a restart has."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetu as ht
from hetu import checkpoint
from hetu.checkpoint import generations
from hetu.core.errors import ArgumentError, CheckpointError, ShapeError, UnknownNameError, ValueRangeError
from hetu.ps import (
    ASP,
    UNBOUNDED,
    Cache,
    CachedTable,
    Growth,
    Parameter,
    RefusedError,
    ServerProcess,
    TableSpec,
    export_rows,
    import_rows,
)
from hetu.ps.saved import state_of
from hetu.ps.store import growing
from hetu.ps.store.growing import Admission, GrowingTable
from hetu.ps.store.messages import Kind, Message
from hetu.ps.store.partition import BACK, mixed, places_before
from hetu.ps.store.tiers import Directory
from hetu.ps.wire.session import Sessions
from hetu.ps.wire.snapshot import KEPT, LONGEST, VERSION_JUMP, Snapshots

from .network import DEADLINE, ServerThread, connect, options
from .simulation import COLS, GROWING, LAW, grow, new_store
from .test_cache import DELTAS, TableClient
from .test_heritage import Group

KEYS = [0, 1, 7, 1 << 20, (1 << 40) + 3, 1 << 61, UNBOUNDED - 1]
FORMS = {
    "in turn": lambda n: n,
    "even": lambda n: 2 * n,
    "thousands": lambda n: 1000 * n,
    "low bits zero": lambda n: n << 33,
    "squares": lambda n: n * n,
    "fields above": lambda n: (n % 40 << 40) + n // 40,
    "the last": lambda n: UNBOUNDED - 1 - n,
}
ids_of_few = st.lists(st.sampled_from(KEYS), min_size=1, max_size=5, unique=True)


def spec(rows: int, cold: int = 0, **grows) -> TableSpec:
    """A table with room for so many rows, and for others in a file."""
    state = 2 * 4 * COLS
    beside = Growth(1, disk=cold, **grows).beside
    grows |= {"budget": (rows + cold) * beside + rows * state, "disk": cold * state}
    facts = {"name": "t", "start": 0, "rows": rows + cold, "cols": COLS, "rule": "adagrad"}
    return TableSpec.parse({**facts, "options": {"learning_rate": 1.0}, "grows": asdict(Growth(**grows)), "law": LAW})


def push(ids, value: float = 1.0, clock: int = 0, **more) -> Message:
    ids = np.sort(np.array(ids, "<i8"))
    return Message(Kind.PUSH, step=clock, ids=ids, values=np.full((len(ids), COLS), value, "<f4"), **more)


def pulled(table: GrowingTable, ids) -> np.ndarray:
    return table.read(Message(Kind.PULL, ids=np.array(ids, "<i8")))


# -- which server has an id ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, UNBOUNDED - 1), max_size=20))
def test_ids_are_mixed_one_to_one(ids):
    ids = np.array([*ids, *KEYS], "<i8")
    found = mixed(ids)
    assert found.min() >= 0 and found.max() < UNBOUNDED and (mixed(found, BACK) == ids).all()
    assert mixed(np.array(ids[0])) == found[0]  # of one id alone, too


@pytest.mark.parametrize("ids", FORMS)
@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_servers_have_as_many_ids_each_however_these_are_made(ids, parts):
    n = np.arange(20_000)
    table = Parameter((UNBOUNDED, 1), sparse=True, grows=Growth(1 << 20))
    places = table.places(FORMS[ids](n), parts)
    edges = [places_before(part, UNBOUNDED, parts) for part in range(parts)]
    held = np.bincount(np.searchsorted(edges, places, side="right") - 1, minlength=parts)
    assert abs(held / held.mean() - 1).max() < 0.06  # 4 deviations
    assert (table.ids(places, parts) == FORMS[ids](n)).all()


# -- which slot a key has ------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400), st.integers(1, 60)), max_size=30))
def test_a_directory_is_a_dictionary(turns):
    directory, held, room = Directory(500), {}, [*range(500)]
    for takes, first, count in turns:
        keys = [k * 0x9E3779B9 for k in range(first, first + count)]
        if takes:
            gone = [k for k in keys if k in held]
            directory[np.array(gone, "<i8")] = -1
            room += [held.pop(k) for k in gone]
        else:
            new = [k for k in keys if k not in held][: len(room)]
            held |= {k: room.pop() for k in new}
            directory[np.array(new, "<i8")] = np.array([held[k] for k in new], "<i8")
        asked = np.array([k * 0x9E3779B9 for k in range(470)], "<i8")
        assert directory[asked].tolist() == [held.get(k, -1) for k in asked.tolist()]
        assert len(directory) == len(held)


# -- rows ----------------------------------------------------------------------------------------------------------


def test_a_row_that_nobody_trained_has_the_value_that_follows_from_its_id():
    one, other = GrowingTable(spec(3)), GrowingTable(spec(50, evict="frequency"))
    assert (pulled(one, KEYS) == pulled(other, KEYS[::-1])[::-1]).all() and len(one.directory) == 0
    many = pulled(one, np.arange(20_000))
    assert abs(many.mean()) < 0.02 and abs(many.std() - 1) < 0.02 and len(np.unique(many)) > 0.99 * many.size


@pytest.mark.parametrize("parts", [2, 3])
def test_first_values_do_not_hang_on_the_number_of_servers(parts):
    whole = pulled(GrowingTable(spec(3)), np.arange(30))
    for first in range(parts):
        told = spec(3).meta() | {"parts": parts, "first": first}
        part = GrowingTable(TableSpec.parse(told))
        assert (pulled(part, np.arange(30 // parts)) == whole[first::parts][: 30 // parts]).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_each_server_has_its_share_of_all_ids_and_refuses_others(parts):
    edges = [places_before(part, UNBOUNDED, parts) for part in range(parts + 1)]
    for first in range(parts):
        table = GrowingTable(TableSpec.parse(spec(3).meta() | {"parts": parts, "first": first}))
        last = edges[first + 1] - edges[first] - 1
        table.check(push([0, last]))
        assert table.whole(np.array([last]))[0] < UNBOUNDED
        with pytest.raises(ValueRangeError, match=rf"row ids 0\.\.{last + 1}, t has {last + 1} rows here"):
            table.check(push([0, last + 1]))


def test_which_ids_have_luck_does_not_hang_on_the_number_of_servers():
    there = []
    for parts in (1, 2, 3):
        told, found = spec(4000, chance=0.5).meta(), []
        for first in range(parts):
            table = GrowingTable(TableSpec.parse(told | {"parts": parts, "first": first}))
            table.apply([push(np.arange(600 // parts), clock=3)], 1.0)
            found += table.whole(table.directory.keys[table.live]).tolist()
        there.append(sorted(found))
    assert there[0] == there[1] == there[2] and 250 < len(there[0]) < 350


@settings(max_examples=60)
@given(st.sampled_from(["age", "frequency"]), st.integers(1, 4), st.integers(0, 3), st.lists(ids_of_few, max_size=30))
def test_rows_are_trained_as_in_a_dictionary_and_the_oldest_or_rarest_go(evict, rows, cold, turns):
    table, zero, held = GrowingTable(spec(rows, cold, evict=evict)), GrowingTable(spec(1)), {}
    for clock, ids in enumerate(turns):
        ids = sorted(ids)[: rows + cold]
        before = {**held}
        table.apply([push(ids, clock=clock)], 1.0)
        for i in ids:
            value, total, *_ = held.get(i, (pulled(zero, [i])[0], np.zeros(COLS, "f4"), 0, 0))
            total = total + 1
            held[i] = value - 1 / np.sqrt(total), total, clock, held.get(i, (0, 0, 0, 0))[3] + 1
        there = set(table.directory.keys[table.live].tolist())
        assert {*ids} <= there <= {*held} and len(there) == len(table.directory) <= rows + cold
        slots = table.directory[np.array(ids)]
        in_memory = 0 if table.tiers is None else np.count_nonzero(~table.tiers.in_file(slots))
        assert in_memory == min(len(ids), rows) or not cold  # what was trained lies there
        gone = held.keys() - there
        if evict == "age" and gone:  # none that went was updated after one that stayed
            assert max(held[i][2] for i in gone) <= min([held[i][2] for i in there - {*ids}], default=clock)
        assert gone <= before.keys()
        held = {i: each for i, each in held.items() if i in there}
        found = pulled(table, [*held])
        np.testing.assert_allclose(found, np.stack([each[0] for each in held.values()]), rtol=1e-5, atol=1e-5)


def test_what_is_rarely_updated_goes_first():
    table = GrowingTable(spec(4, evict="frequency"))
    for clock, ids in enumerate([[1, 2, 3], [1, 2, 3], [1, 3], [4]]):
        table.apply([push(ids, clock=clock)], 1.0)
    table.apply([push([5], clock=9)], 1.0)
    assert {*table.directory.keys[table.live].tolist()} == {1, 2, 3, 5}


def test_pushes_of_one_clock_are_summed_and_of_too_many_ids_some_are_dropped():
    table = GrowingTable(spec(3))
    table.apply([push([1, 2]), push([2, 3]), push([4, 5])], 0.5)
    there = table.directory.keys[table.live]
    assert len(there) == 3 and table.counts["dropped"] == 2
    moved = pulled(table, there) - pulled(GrowingTable(spec(1)), there)
    np.testing.assert_allclose(moved, -1.0, rtol=1e-5)  # adagrad's first step, whatever the gradient


def test_of_rows_that_come_back_as_many_stay_as_there_is_room_for():
    table = GrowingTable(spec(3))
    rows = Message(Kind.RESTORE, ids=np.arange(5), values=np.ones((5, 2 * COLS), "f4"), meta={"step": 4})
    table.check(rows)
    table.restore(rows)
    assert len(table.directory) == 3 and (pulled(table, table.directory.keys[table.live]) == 1).all()


@pytest.mark.parametrize("evict", ["age", "frequency"])
def test_a_smaller_table_takes_those_rows_over_that_would_go_last(evict):
    before, after = GrowingTable(spec(20, evict=evict)), GrowingTable(spec(3, evict=evict))
    for clock in range(9):
        before.apply([push(range(clock + 1) if evict == "frequency" else [9 - clock], clock=clock)], 1.0)
    after.take(before)
    there = [0, 1, 2] if evict == "frequency" else [1, 2, 3]
    assert sorted(after.directory.keys[after.live]) == there and (pulled(after, there) == pulled(before, there)).all()


def test_an_id_gets_its_row_by_its_nth_update_or_by_chance():
    table = GrowingTable(spec(100, after=3))
    for clock in range(3):
        assert len(table.directory) == 0
        table.apply([push([5, 9], clock=clock)], 1.0)
    assert len(table.directory) == 2 and table.counts["dropped"] == 4
    tables = [GrowingTable(spec(4000, chance=0.25)) for _ in "ab"]
    for each in tables:
        each.apply([push(np.arange(4000))], 1.0)
    assert len(tables[0].directory) == len(tables[1].directory)  # counted, not drawn
    assert 850 < len(tables[0].directory) < 1150


@pytest.mark.parametrize("evict", ["age", "frequency"])
def test_of_the_rows_of_several_servers_those_stay_that_would_go_last(evict):
    """A row of one server is older, or rarer, than any of the other: whichever comes first, none of its rows stays."""
    for order in ([0, 1], [1, 0]):
        after = GrowingTable(spec(8, evict=evict))
        for first in order:
            before = GrowingTable(TableSpec.parse(spec(20, evict=evict).meta() | {"parts": 2, "first": first}))
            for clock in range(first * 5, 4 + first * 5):
                before.apply([push(range(8), clock=clock)] if first else [push([clock], clock=clock)], 1.0)
            after.take(before)
        assert sorted(after.directory.keys[after.live]) == [2 * i + 1 for i in range(8)]


@pytest.mark.parametrize("begin", [0, (1 << 31) - 30, (1 << 62) - 30], ids=["0", "2**31", "2**62"])
@pytest.mark.parametrize(("evict", "cold"), [("age", 0), ("frequency", 0), ("age", 1500), ("frequency", 1500)])
def test_each_row_that_goes_is_older_or_rarer_than_all_that_stay(evict, cold, begin):
    """Of 2,000, a 16th at once, however updates are drawn, and whichever clock it is."""
    table, rng, held = GrowingTable(spec(2000 - cold, cold, evict=evict)), np.random.default_rng(5), {}
    for clock in range(begin, begin + 60):
        ids = np.unique(np.concatenate([rng.zipf(1.3, 150) % 3000, rng.integers(0, 1 << 40, 60)]))
        table.apply([push(ids, clock=clock)], 1.0)
        before = {i: score for i, score in held.items() if i not in set(ids.tolist())}
        held |= {i: clock if evict == "age" else held.get(i, 0) + 1 for i in ids.tolist()}
        there = set(table.directory.keys[table.live].tolist())
        gone, stay = held.keys() - there, before.keys() & there
        assert gone <= before.keys() and len(gone) in (0, *range(2000 // 16, 2000 // 16 + len(ids)))
        assert max((before[i] for i in gone), default=0) <= min((before[i] for i in stay), default=0)
        held = {i: score for i, score in held.items() if i in there}
    assert table.counts["evicted"] > 2000 and len(held) == len(table.directory)


@pytest.mark.parametrize("after", [2, 3, 255])
def test_no_id_gets_its_row_later_than_by_its_nth_update_and_few_sooner(after):
    """Where no counts are halved: 1,000 ids in 200,000 cells, of which many meet in one message; then all cells are
    full."""
    admission, rng, came, sooner = (
        Admission(Growth(1, after=after), 200_000, np.uint64(7)),
        np.random.default_rng(0),
        {},
        0,
    )
    for _ in range(150 if after < 9 else 390):
        ids = rng.choice(1000, 500, replace=False) << 40
        for i, good in zip(ids.tolist(), admission.admits(ids, 0)):
            came[i] = came.get(i, 0) + 1
            assert good or came[i] < after
            sooner += good and came[i] < after
    assert sooner < 20 * after and len(came) == 1000
    admission.counts[:] = 255
    assert admission.admits(ids, 0).all()


@pytest.mark.parametrize(("after", "share"), [(2, 0.3), (3, 0.02), (30, 0.0), (255, 0.0)])
def test_an_id_that_comes_each_time_gets_its_row_whatever_comes_beside_it(after, share):
    """A tenth of what there is room for comes each time, nearly all of it once; counts are halved many times."""
    admission, rng, sooner = Admission(Growth(1, after=after), 10_000, np.uint64(7)), np.random.default_rng(0), []
    for turn in range(6 * after):
        which, late = divmod(turn, 2 * after)
        good = admission.admits(np.concatenate([[which], rng.integers(1 << 20, 1 << 60, 999)]), 0)
        assert good[0] or late < 2 * after - 1
        sooner.append(good[1:].mean())
    assert np.mean(sooner) <= share


def client_of(rows: int, **grows) -> TableClient:
    client = TableClient()
    client.parameters = {"t": replace(DELTAS, shape=(UNBOUNDED, COLS), grows=Growth(1 << 20, **grows))}
    added = spec(rows, **grows).meta() | {"rule": "add", "options": {}, "reduce": "sum"}
    client.table = GrowingTable(TableSpec.parse(added))
    return client


def test_what_a_cache_holds_of_a_row_that_went_is_stale_by_any_bound():
    """Also of one that was made again, or imported, and at reads of ids without a row."""
    client = client_of(2)
    table, ids = client.table, np.array([3, 1 << 50])
    cache = CachedTable(client, "t", Cache("lru", 2, pull_bound=1 << 62, push_bound=0))
    table.apply([push(ids)], 1.0)
    assert (cache.lookup(ids) == pulled(table, ids)).all()
    table.apply([push([8, 9], clock=5)], 1.0)  # for which both go
    assert (cache.lookup(ids) == pulled(table, ids)).all()
    table.apply([push(ids, 7.0, clock=6)], 1.0)
    assert (cache.lookup(ids) == pulled(table, ids)).all()
    table.restore(Message(Kind.RESTORE, ids=ids, values=np.full((2, COLS), 9, "f4"), meta={"step": 0}))  # imported
    assert (cache.lookup(ids) == 9).all()


def test_a_cache_does_not_keep_its_own_updates_that_were_dropped():
    client, ids = client_of(2, after=3), np.array([3, 1 << 50])
    caches = [CachedTable(client, "t", Cache("lru", 2, pull_bound=bound, push_bound=0)) for bound in (0, 1 << 62)]
    for clock in range(4):
        for cache in caches:  # after the third, one row has come that misses what the second has dropped of its own
            assert (cache.lookup(ids) == pulled(client.table, ids)).all()
        caches[clock % 2].update(ids, np.ones((2, COLS), "f4"))


@settings(max_examples=60)
@given(
    st.sampled_from(["lru", "lfu", "hot"]),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(0, 3),
    st.sampled_from([{}, {"after": 2}, {"after": 3, "evict": "frequency"}, {"chance": 0.5}]),
    st.lists(st.tuples(st.integers(0, 1), ids_of_few), min_size=1, max_size=40),
)
def test_no_read_is_staler_than_its_bound_while_rows_come_and_go(policy, capacity, bound, held_back, grows, turns):
    """Worker w adds 1 to column w at every update: of its own it sees those that were taken, of the others' most."""
    client = client_of(5, **grows)
    caches = [CachedTable(client, "t", Cache(policy, capacity, bound, held_back)) for _ in "ab"]
    for worker, ids in turns:
        cache, ids = caches[worker], np.sort(ids)
        found = cache.lookup(ids)
        lacks, slots = pulled(client.table, ids) - found, cache.slot_of[ids]
        own = np.where(slots < 0, 0, cache.deltas[slots, worker])
        np.testing.assert_allclose(lacks[:, worker], -own, atol=1e-4)
        assert (lacks[:, 1 - worker] > -1e-4).all() and (lacks[:, 1 - worker] < bound + 1e-4).all()
        cache.update(ids, np.tile(np.eye(2, dtype="f4")[worker], (len(ids), 1)))


def test_what_a_cache_holds_of_a_life_in_which_more_rows_went_is_stale(tmp_path):
    store, client = new_store(1, ASP()), client_of(2)
    store.tables[GROWING] = table = client.table
    cache = CachedTable(client, "t", Cache("lru", 2, pull_bound=1 << 62, push_bound=0))
    snapshots = Snapshots(store, tmp_path, every=1.0)
    snapshots.take(1)
    snapshots.finish()
    for clock in range(2, 40):  # two rows go each time
        table.apply([push([clock, clock + 50], clock=clock)], 1.0)
    assert (cache.lookup(ids := np.array([39, 89])) == pulled(table, ids)).all()
    later = new_store(1, ASP())
    later.tables.clear()
    assert Snapshots(later, tmp_path, every=1.0).restore()
    client.table = later.tables[GROWING]
    assert (cache.lookup(ids) == pulled(client.table, ids)).all()


# -- snapshots -----------------------------------------------------------------------------------------------------


def contents(table: GrowingTable) -> dict[int, bytes]:
    live = table.live
    counted = [] if table.uses is None else [table.uses[:, None], table.last[:, None]]
    rows = np.concatenate([np.take(a, live, axis=0) for a in (*table.arrays, *counted)], axis=1)
    return dict(zip(table.directory.keys[live].tolist(), (row.tobytes() for row in rows)))


@pytest.mark.parametrize("begin", [1, (1 << 31) - 12], ids=["1", "2**31"])
@pytest.mark.parametrize("grows", [{}, {"disk": 10_000}, {"evict": "frequency"}], ids=str)
def test_snapshots_hold_what_changed_and_any_of_them_is_the_whole(grows, begin, tmp_path, monkeypatch):
    """Counts too, which are halved of all rows, also of those that did not change; whichever clock it is."""
    monkeypatch.setattr(growing, "SAMPLE", 0.03)  # updates for each row
    monkeypatch.setattr(checkpoint, "PIECE", 500)  # bytes that are written at once
    monkeypatch.setattr(growing, "READ", 7)  # rows that are read at once
    store, rng = new_store(1, ASP()), np.random.default_rng(0)
    table = grow(store, rows=500, rule="adam", budget=30_000, **grows)
    snapshots, seen, sizes = Snapshots(store, tmp_path, every=1.0, forks=sys.platform == "linux"), {}, {}
    for clock in range(begin, begin + 3 * LONGEST - 1):
        ids = rng.integers(0, 700, 600 if clock == begin else 10)
        table.apply([push(np.unique(ids)[:500], clock=clock - 1)], 1.0)
        snapshots.take(clock)
        snapshots.finish()
        seen[clock] = contents(table)
        sizes[clock] = sum(path.stat().st_size for path in (tmp_path / str(clock)).glob("*.safetensors"))
    kept = generations(tmp_path)
    assert KEPT <= len(kept) <= KEPT + LONGEST + 1 and sorted(sizes.values())[len(sizes) // 2] < sizes[begin] / 5
    for clock in kept[-KEPT:][::-1]:
        later = new_store(1, ASP())
        later.tables.clear()
        assert Snapshots(later, tmp_path, every=1.0).restore(clock)
        assert contents(later.tables[GROWING]) == seen[clock]
        assert later.tables[GROWING].halved >= 2 or "evict" not in grows
        assert later.tables[GROWING].floor == table.floor + VERSION_JUMP or clock < kept[-1]
        missing = np.array([i for i in range(700) if i not in seen[clock]][:50])
        assert (pulled(later.tables[GROWING], missing) == pulled(GrowingTable(table.spec), missing)).all()


@pytest.mark.parametrize("grows", [{}, {"disk": 2000}, {"after": 3}, {"after": 9}, {"chance": 0.3}], ids=str)
@pytest.mark.parametrize("evict", ["age", "frequency"])
def test_a_table_goes_on_from_a_snapshot_as_if_nothing_had_happened(evict, grows, tmp_path):
    """Which ids get rows and which rows go hangs on nothing that a snapshot does not hold."""
    store, rng = new_store(1, ASP()), np.random.default_rng(3)
    table = grow(store, rows=100, rule="adam", budget=6000, evict=evict, **grows)
    snapshots = Snapshots(store, tmp_path, every=1.0)
    for clock in range(40):
        ids = np.unique(rng.zipf(1.2, 60) % 500)
        table.apply([push(ids, clock=clock)], 1.0)
        if clock in (9, 17, 19):
            snapshots.take(clock + 1)
            snapshots.finish()
            later = new_store(1, ASP())
            later.tables.clear()
            assert Snapshots(later, tmp_path, every=1.0).restore()
        if clock > 19:
            later.tables[GROWING].apply([push(ids, clock=clock)], 1.0)
    assert contents(later.tables[GROWING]) == contents(table)
    assert table.counts["dropped" if "after" in grows else "evicted"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="no fork")
@pytest.mark.parametrize("disk", [0, 10_000], ids=["in memory", "and on disk"])
def test_a_snapshot_is_of_one_moment_whatever_is_trained_while_it_is_written(disk, tmp_path, monkeypatch):
    """Also rows that lie in a file, which a child has in common with the server, and those that move in and out."""
    store, (reader, writer), server, save = new_store(1, ASP()), os.pipe(), os.getpid(), Snapshots._save

    def late(*args) -> None:
        if os.getpid() != server:
            os.read(reader, 1)
        save(*args)

    monkeypatch.setattr(Snapshots, "_save", late)
    table, snapshots = (
        grow(store, rows=500, rule="adam", budget=30_000, disk=disk),
        Snapshots(store, tmp_path, 1.0, True),
    )
    table.apply([push(range(480))], 1.0)
    snapshots.take(1)
    then = contents(table)
    table.apply([push(range(0, 480, 4), clock=1)], 1.0)
    os.write(writer, b"1")
    snapshots.finish()
    assert (table.tiers is not None) == bool(disk) and contents(table) != then
    later = new_store(1, ASP())
    later.tables.clear()
    assert Snapshots(later, tmp_path, every=1.0).restore(1)
    assert contents(later.tables[GROWING]) == then
    os.close(reader)
    os.close(writer)


def test_a_snapshot_without_those_it_goes_on_from_is_refused(tmp_path):
    store = new_store(1, ASP())
    table, snapshots = grow(store), Snapshots(store, tmp_path, every=1.0)
    for clock in (1, 2):
        table.apply([push([clock], clock=clock)], 1.0)
        snapshots.take(clock)
        snapshots.finish()
    for path in (tmp_path / "1").glob("*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"clock 2 .* goes on from that of 1, which is not there"):
        Snapshots(new_store(1, ASP()), tmp_path, every=1.0).restore(2)


TABLE = Parameter((UNBOUNDED, 3), sparse=True, rule="adam", grows=Growth(4 << 20))


@pytest.mark.parametrize(("before", "after", "disk"), [(1, 2, 0), (2, 1, 1 << 20), (3, 2, 0)])
def test_servers_of_another_number_take_the_rows_over(before, after, disk, tmp_path):
    table = replace(TABLE, grows=Growth(10_000 if disk else 4 << 20, disk=min(disk, 150 * 36)))
    ids, found = np.random.default_rng(0).integers(0, UNBOUNDED, 300), []
    for count in (before, after):
        with Group(tmp_path, count) as client:
            client.create({"t": table}, {"t": ht.init.uniform(-1, 1)})
            if count == before:
                client.push_rows("t", ids[:200], np.ones((200, 3), "f4")).wait()
                client.clock(snapshot=True).wait()
            rows = [
                (i, r.tobytes()) for some, each in export_rows(client, "t") for i, r in zip(some, each.swapaxes(0, 1))
            ]
            found.append((client.pull_rows("t", ids).wait().tobytes(), sorted(rows)))
    assert found[0] == found[1] and len(found[0][1]) == 200


def test_rows_of_a_table_that_comes_after_a_snapshot_are_in_the_next(tmp_path):
    """As they are old where servers of another number have kept them, and a snapshot holds what has changed."""
    ids, found = np.arange(90), []
    for turn, count in enumerate((1, 2, 2)):
        with Group(tmp_path, count) as client:
            for name in "ab":
                client.create({name: TABLE}, {name: ht.init.normal()})
                if turn == 0:
                    client.push_rows(name, ids, np.ones((90, 3), "f4")).wait()
                for _ in range(2):
                    client.clock(snapshot=True).wait()
            found.append([sorted(rows_of(client, name).items()) for name in "ab"])
    assert found[0] == found[1] == found[2] and [len(rows) for rows in found[0]] == [90, 90]


def test_a_killed_server_goes_on_from_what_a_snapshot_promised_in_memory_and_on_disk(tmp_path):
    grows = Growth(40 * Growth(1, disk=1).beside + 10 * 36, disk=30 * 36)  # 10 rows in memory, 30 in the file
    told = options("asp", 1, snapshots=str(tmp_path), snapshot_every=1e6)
    assert grows.rows(36) == (10, 40)
    ids, found = np.arange(40) << 50, []
    with ServerProcess(told) as server, connect([server.address]) as client:
        client.create({"t": replace(TABLE, grows=grows)}, {"t": ht.init.normal()})
        for some in (ids, ids[:5], ids[20:30]):
            client.push_rows("t", some, np.ones((len(some), 3), "f4")).wait()
            client.clock(snapshot=True).wait()
        found.append(rows_of(client))
        client.push_rows("t", ids, np.ones((40, 3), "f4")).wait()  # which no snapshot has promised
        server.kill()
    with ServerProcess(told) as server, connect([server.address]) as client:
        client.create({"t": replace(TABLE, grows=grows)}, {"t": ht.init.normal()})
        found.append(rows_of(client))
    assert found[0] == found[1] and len(found[0]) == 40


def test_a_server_that_writes_rows_of_a_file_for_long_gives_signs_of_life_and_does_the_rest_later(
    tmp_path, monkeypatch
):
    """The writer waits until the server has said that it lives more often than it may be silent."""
    greeted, beaten, save, sign = threading.Semaphore(0), threading.Semaphore(0), Snapshots._save, Sessions.sign

    def slow(*args) -> None:
        assert all(count.acquire(timeout=DEADLINE) for count in (*[greeted] * 8, *[beaten] * 4))
        save(*args)

    def counted(*args):
        signs = sign(*args)
        if signs is not None:
            (greeted if signs else beaten).release()
        return signs

    monkeypatch.setattr(Sessions, "sign", counted)
    grows = Growth(40 * Growth(1, disk=1).beside + 10 * 12, disk=30 * 12)
    told = options("asp", 1, snapshots=str(tmp_path), snapshot_every=1e6, lease=2.0)
    with ServerThread(told) as server, connect([server.address], silence=1.6) as client:
        client.create({"t": replace(TABLE, grows=grows, rule="add", reduce="sum")}, {"t": ht.init.zeros})
        client.push_rows("t", ids := np.arange(30), ones := np.ones((30, 3), "f4")).wait()
        monkeypatch.setattr(Snapshots, "_save", slow)
        written = client.clock(snapshot=True)
        later = client.push_rows("t", ids, ones)  # comes while it writes, and again and again
        written.wait()
        later.wait()
        assert (client.pull_rows("t", ids).wait() == 2).all() and generations(tmp_path) == [1]
    monkeypatch.undo()
    with ServerThread(told) as server, connect([server.address]) as client:
        client.create({"t": replace(TABLE, grows=grows, rule="add", reduce="sum")}, {"t": ht.init.zeros})
        assert (client.pull_rows("t", ids).wait() == 1).all()


def rows_of(client, name: str = "t") -> dict[int, bytes]:
    return {
        int(i): row.tobytes() for ids, rows in export_rows(client, name) for i, row in zip(ids, rows.swapaxes(0, 1))
    }


# -- workers -------------------------------------------------------------------------------------------------------


def test_rows_go_out_and_in_with_their_state_and_later_only_what_has_changed(tmp_path):
    ids, ones = np.random.default_rng(1).integers(0, UNBOUNDED, 500), np.ones((500, 3), "f4")
    with Group(tmp_path, 2) as client:
        client.create({"a": TABLE, "b": TABLE}, dict.fromkeys("ab", ht.init.normal(0.1)))
        for count in (500, 7):
            client.push_rows("a", ids[:count], ones[:count]).wait()
            client.clock().wait()
        assert sum(len(some) for some, _ in export_rows(client, "a", since=1, most=3)) == 7
        for some, rows in export_rows(client, "a", most=64):
            import_rows(client, "b", some, rows, step=2)
        for name in "ab":
            client.push_rows(name, ids, ones).wait()
        client.clock().wait()
        np.testing.assert_array_equal(*(client.pull_rows(name, ids).wait() for name in "ab"))


@pytest.mark.parametrize("rows", [0, 1 << 31])
def test_a_table_of_no_room_or_more_than_slots_can_number_is_refused(rows):
    with pytest.raises(ArgumentError, match=f"with room for {rows} rows"):
        TableSpec.parse(spec(1).meta() | {"rows": rows})


def test_wide_rows_go_out_in_messages_that_may_be():
    with ServerThread(options("asp", 1)) as server, connect([server.address]) as client:
        client.create({"t": replace(TABLE, shape=(UNBOUNDED, 100))}, {"t": ht.init.zeros})
        client.push_rows("t", np.array([7]), np.ones((1, 100), "f4")).wait()
        assert [ids.tolist() for ids, _ in export_rows(client, "t")] == [[7]]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"evict": "size"}, "evict='size'.*'age' or 'frequency'"),
        ({"after": 256}, "after=256.*from 1 to 255"),
        ({"chance": 0.0}, "chance=0.0.*above 0 to 1"),
        ({"budget": 0}, "budget=0.*of 1 at least"),
        ({"disk": True}, "disk=True.*whole number"),
        ({"size": 1}, "takes no 'size'"),
    ],
    ids=str,
)
def test_what_a_table_may_hold_is_checked_where_it_is_made_and_where_servers_hear_of_it(wrong, told):
    for make in (
        lambda: Growth(**{"budget": 99, **wrong}),
        lambda: TableSpec.parse(spec(1).meta() | {"grows": {"budget": 99, **wrong}}),
    ):
        with pytest.raises(ArgumentError, match=rf"Growth (?s:.)*{told.replace('.*', '(?s:.)*')}"):
            make()


@pytest.mark.parametrize("told", [{"grows": None}, {"sparse": False}, {"shape": (9, 3)}], ids=str)
def test_a_table_without_a_bound_says_what_it_may_hold(told):
    with pytest.raises(ArgumentError, match="of a parameter") as error:
        replace(TABLE, **told)
    assert "shape=(hetu.ps.UNBOUNDED, ...), sparse=True, grows=Growth(...)" in error.value.fix


def test_what_does_not_fit_is_refused_and_nothing_is_taken():
    with ServerThread(options("asp", 1)) as server, connect([server.address]) as client:
        for init in (ht.init.orthogonal(), ht.init.he_normal):  # of which the second divides by the number of rows
            with pytest.raises(ArgumentError, match=r"first values of t, a table without a bound") as told:
                client.create({"t": TABLE}, {"t": init})
            assert "draws each element alone" in told.value.fix
        assert Growth(np.int64(40), chance=np.float64(0.5)) == Growth(40, chance=0.5)
        with pytest.raises(ArgumentError, match=r"budget=40 of s, of which a row takes 68 bytes, on 1 server"):
            small = Parameter((UNBOUNDED, 3), sparse=True, rule="adam", grows=Growth(40))
            client.create({"s": small}, {"s": ht.init.zeros})
        client.create({"t": TABLE}, {"t": ht.init.zeros})
        rows = np.ones((3, 2, 3), "f4")
        for ids, given_rows, kind, text in (
            ([1, 2], rows[..., :2], ShapeError, r"rows float32\[3, 2, 2\] for ids \[2\] of t"),
            ([1, 2], rows[:1], ShapeError, r"rows float32\[1, 2, 3\]"),
            ([1, 2], rows.astype("f8"), ShapeError, r"rows float64\[3, 2, 3\]"),
            ([1, 1], rows, ValueRangeError, "imported twice"),
            ([-1, 1], rows, ValueRangeError, r"ids -1\.\.1 of t"),
            *(
                (
                    [5, 4],
                    np.where(np.arange(6).reshape(3, 2, 1) == at, bad, rows),
                    ValueRangeError,
                    rf"rows of t with numbers that are not finite, of ids \[{i}\]",
                )
                for bad in (np.nan, np.inf, -np.inf)
                for at, i in enumerate((5, 4) * 3)
            ),
        ):
            with pytest.raises(kind, match=text):
                import_rows(client, "t", np.array(ids), given_rows)
        client.create({"w": Parameter((2, 3))}, {"w": np.zeros((2, 3), "f4")})
        for name, kind, text in (("tt", UnknownNameError, "no parameter 'tt'"), ("w", ArgumentError, "w is no table")):
            for call in (partial(import_rows, ids=np.array([1]), rows=rows[:, :1]), lambda *of: [*export_rows(*of)]):
                with pytest.raises(kind, match=text):
                    call(client, name)
        with pytest.raises(ArgumentError, match=r"rows float64 of t") as told:
            client.pull_rows("t", np.array([1.5]))
        for whole in (client.pull, partial(state_of, client)):
            with pytest.raises(ArgumentError, match="all rows of t, a table without a bound"):
                whole("t")
        raw = client.transport.submit(0, Kind.PULL, key=client.blocks["t"][0].key)
        with pytest.raises(RefusedError, match="PULL of all rows of t, a table without a bound"):
            client.transport.wait([raw])
        with pytest.raises(RefusedError, match="CALL of all rows of t, a table without a bound"):
            client.call("t", "top_k", k=1, column=0).wait()
        assert not [*export_rows(client, "t")]
    with pytest.raises(RefusedError, match="EXPORT by a client that is closed"):
        next(export_rows(client, "t"))
