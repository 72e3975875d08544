"""First values of tables: who is asked for them, what servers draw themselves, and that all get the same bits."""

from __future__ import annotations

import itertools
import json
import sys
import threading

import numpy as np
import pytest

from hetu import init
from hetu.core.errors import ArgumentError, HetuError
from hetu.ps import ASP, BSP, Parameter, ParameterStore, TableSpec
from hetu.ps.saved import restore
from hetu.ps.store import first_values, givers
from hetu.ps.store.first_values import Drawn, Given, data, drawn, pieces
from hetu.ps.store.messages import META_LIMIT, Kind, Message
from hetu.ps.store.server_table import ServerTable
from hetu.ps.wire.snapshot import Snapshots

from .network import ServerThread, connect, job, options
from .simulation import hello

F32 = np.dtype("float32")
ROWS, COLS, KEY, SEED = 50, 3, 9, [7, 8]
NORMAL = Drawn(init.law_of(init.normal(1.0), (ROWS, COLS)), (ROWS, COLS), SEED)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(init, "AT_ONCE", 40)  # blocks of one row
    monkeypatch.setattr(givers, "SLICE", 7)


# -- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("sizes", [[50], [1], [0, 3], [20, 1, 61], [5, 0, 0, 9]])
def test_servers_draw_what_one_process_has(sizes, servers):
    """Tables one after the other, of which each server keeps every second row, or third."""
    shapes = [(size, COLS) for size in sizes]
    parts = [Drawn(init.law_of(init.uniform(), shape), shape, [3, n]) for n, shape in enumerate(shapes)]
    whole = np.concatenate([part.whole(F32) for part in parts])
    parts[0] = Given(lambda: whole[: sizes[0]], shapes[0])
    for first in range(servers):
        rows = range(first, sum(sizes), servers)
        for some in (parts, [NORMAL] if sizes == [50] else parts[1:]):
            told = data(some, range(first, sum(part.shape[0] for part in some), servers))
            assert (told is None) == (some is parts)
        found = np.full((len(rows), COLS), np.nan, "f4")
        for places, values in pieces(parts, F32, rows):
            found[places] = values
        np.testing.assert_array_equal(found, whole[rows.start :: servers])


def told(**changes):
    part = {"law": "normal", "numbers": [0.0, 1.0], "rows": 10, "seed": [1, 2]}
    changed = {name: value for name, value in changes.items() if name in part}
    return {
        "rows": [1, 10, 2],
        "parts": [{**part, **changed}],
        **{n: v for n, v in changes.items() if n not in changed},
    }


WRONG = {
    "more fields": {"more": 1},
    "no parts": {"parts": None},
    "a part that is none": {"parts": [7]},
    "too few rows": {"rows": 9},
    "rows below 0": {"rows": -1},
    "rows that are no number": {"rows": 1.0},
    "no seed": {"seed": []},
    "a long seed": {"seed": [1] * 9},
    "a seed below 0": {"seed": [-1]},
    "a large seed": {"seed": [1 << 257]},
    "no law": {"law": "mine"},
    "no number": {"numbers": ["1"]},
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_server_cannot_draw_is_refused(what):
    with pytest.raises(HetuError):
        drawn(told(**WRONG[what]), (5, COLS), F32)


@pytest.mark.parametrize(
    "rows", [[1, 10], [2, 10, 2], [1, 10, 0], [0, 10, 1], [1, 10, 5000], [True, 10, 2], [1, 1 << 70, 2]]
)
def test_rows_that_are_not_those_of_the_table_are_refused(rows):
    with pytest.raises(ArgumentError, match="first values"):
        drawn({**told(), "rows": rows}, (5, COLS), F32)


# -- who is asked ----------------------------------------------------------------------------------------------------


class Workers:
    """Those of one store, which send messages in turn."""

    def __init__(self, count: int = 3, store: ParameterStore | None = None, life: int = 100) -> None:
        self.store, self.seq = store or ParameterStore(count, ASP()), itertools.count(1)
        for worker in range(count):
            hello(self.store, worker, life)

    def send(self, worker: int, kind: Kind, **fields) -> list[tuple[int, int, bool]]:
        """The answers: to which worker, how many rows it is to give, and whether they come from others."""
        self.last = Message(kind, key=KEY, worker=worker, seq=next(self.seq), epoch=1, **fields)
        return self.told(self.store.handle(self.last, 0.0))

    def told(self, replies):
        assert all(reply.kind is Kind.OK for reply in replies), replies
        return [(reply.worker, reply.step, "coming" in reply.facts) for reply in replies]

    def create(self, worker: int, turn: str = "ask", first=None, generation: int = 0):
        meta = {"turn": turn} | TableSpec("t", 0, ROWS, COLS, generation=generation).meta()
        return self.send(
            worker, Kind.CREATE, meta=meta if first is None else {**meta, "draw": data([first], range(ROWS))}
        )

    def give(self, worker: int, first: int = 0, stop: int = ROWS):
        ids = np.arange(first, stop)
        return self.send(worker, Kind.ASSIGN, ids=ids, values=np.full((len(ids), COLS), 1.0 + worker, "f4"))


def test_one_worker_is_asked_and_the_others_wait():
    w = Workers()
    assert w.create(0) == [(0, ROWS, False)] and w.create(1) == [(1, 0, True)]
    assert w.create(1, "wait") == [] and w.create(2, "wait") == []
    assert w.create(0) == [(0, ROWS, False)]  # again, after its answer was lost
    assert w.give(0, 0, 20) == [(0, 0, False)]
    assert w.give(0, 20) == [(1, 0, False), (2, 0, False), (0, 0, False)]
    assert w.create(1, "wait") == w.create(1) == [(1, 0, False)]
    assert (w.store.tables[KEY].values == 1).all()


@pytest.mark.parametrize("how", ["silent", "left", "a new life", "passes"])
def test_another_is_asked_in_place_of_one_that_is_gone(how):
    w = Workers()
    w.create(0), w.create(1), w.create(1, "wait"), w.create(2, "wait"), w.give(0, 0, 20)
    if how == "silent":
        for worker in (1, 2):
            w.store.members[worker].last_seen = 60.0
        found = w.told(w.store.tick(61.0))
    elif how == "left":
        found = w.send(0, Kind.LEAVE)
    elif how == "passes":
        found = w.create(0, "pass")
    else:
        found = w.told(w.store.handle(Message(Kind.HELLO, meta={"incarnation": 101}), 0.0))
    assert (1, ROWS - 20, False) in found and not any(worker == 2 for worker, *_ in found)
    assert (2, 0, False) in w.give(1)
    assert w.store.tables[KEY].values[:, 0].tolist() == [1.0] * 20 + [2.0] * 30


def test_a_server_draws_between_messages_and_answers_others_meanwhile():
    w = Workers()
    assert w.create(0, first=NORMAL) == [(0, 0, True)] and w.create(1) == [(1, 0, True)]  # which would give others
    assert w.create(0, "wait", NORMAL) == w.create(1, "wait") == []
    slices = 0
    while w.store.givers.drawing:
        assert w.send(2, Kind.PING) == [(2, 0, False)]
        found = w.told(w.store.tick(0.0))
        slices += 1
    assert found == [(0, 0, False), (1, 0, False)] and slices == -(-ROWS // 7)
    np.testing.assert_array_equal(w.store.tables[KEY].values, NORMAL.whole(F32))


def test_a_worker_is_asked_for_what_the_server_fails_to_draw(monkeypatch, capfd):
    w = Workers()
    w.create(0, first=NORMAL), w.create(0, "wait", NORMAL), w.store.tick(0.0)
    with monkeypatch.context() as broken:
        broken.setattr(ServerTable, "fill", lambda *_: 1 / 0)
        assert w.told(w.store.tick(0.0)) == [(0, ROWS - 7, False)]
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert w.give(0) == [(0, 0, False)] and not w.store.givers.drawing
    np.testing.assert_array_equal(w.store.tables[KEY].values[:7], NORMAL.whole(F32)[:7])


def test_values_of_an_earlier_generation_are_not_asked_for():
    w = Workers()
    w.create(0, first=NORMAL), w.store.tick(0.0)
    assert w.create(1, generation=1) == [(1, ROWS, False)]  # from a checkpoint, in the place of what was drawn
    assert w.create(0, "wait", NORMAL) == [] and not w.store.givers.drawing
    state = {"meta": {"step": 3}, "values": np.full((ROWS, COLS), 5, "f4")}
    assert w.send(1, Kind.RESTORE, **state) == [(0, 0, False), (1, 0, False)]
    assert (w.store.tables[KEY].values == 5).all()


@pytest.mark.parametrize(
    "forks", [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="no fork"))]
)
def test_a_snapshot_holds_what_was_still_to_be_drawn(forks, tmp_path):
    w = Workers(1)
    snapshots = Snapshots(w.store, tmp_path, every=30.0, forks=forks)
    w.create(0, first=NORMAL), w.store.tick(0.0)
    w.store.moments.keep(1)
    snapshots.finish()
    assert bool(w.store.givers.drawing) == forks  # a child draws the rest for itself
    later = ParameterStore(1, BSP())
    assert Snapshots(later, tmp_path, every=30.0).restore()
    np.testing.assert_array_equal(later.tables[KEY].values, NORMAL.whole(F32))
    assert later.tables[KEY].wanting == 0 and not later.givers.drawing


def test_a_restored_server_wants_what_it_had_not_been_given(tmp_path):
    w, later = Workers(1), ParameterStore(1, ASP())
    snapshots = Snapshots(w.store, tmp_path, every=30.0)
    w.create(0), w.give(0, 0, 20), w.store.moments.keep(1)
    snapshots.finish()
    assert Snapshots(later, tmp_path, every=30.0).restore()
    w = Workers(1, later, life=101)
    assert w.create(0) == [(0, 30, False)] and w.create(0, "pass") == [(0, 0, False)]
    assert w.create(0, first=NORMAL) == [(0, 0, True)]
    while later.givers.drawing:
        later.tick(0.0)
    np.testing.assert_array_equal(later.tables[KEY].values[20:], NORMAL.whole(F32)[20:])
    assert (later.tables[KEY].values[:20] == 1).all() and w.create(0) == [(0, 0, False)]


# -- real servers ----------------------------------------------------------------------------------------------------

TABLE = {"t": Parameter((ROWS, COLS), sparse=True), "b": Parameter((4, 5)), "u": Parameter((7, 2), sparse=True)}


@pytest.mark.parametrize("servers", [1, 3])
def test_values_are_made_by_one_worker_and_travel_once(servers, monkeypatch):
    monkeypatch.setattr(first_values, "PIECE", 12)
    made, start = [], threading.Barrier(3)

    def body(client, rank):
        def make(name):
            made.append(name)
            return np.full(TABLE[name].shape, 1.0, "f4")

        start.wait(30)
        client.create(TABLE, {name: [Given(lambda name=name: make(name), p.shape)] for name, p in TABLE.items()})
        received = sum(server["received"] for server in client.status())
        start.wait(30)
        return [client.pull(name).wait() for name in TABLE], received

    results = job("asp", 3, body, servers, ServerThread)
    assert all((array == 1).all() for found, _ in results for array in found)
    assert len(TABLE) <= len(made) <= len(TABLE) * servers  # by each worker that is asked, for one server or for all
    sent = sum(p.nbytes for p in TABLE.values()) + 8 * (ROWS + 7)
    assert {received for _, received in results} == {sent}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_an_initializer_travels_in_place_of_its_values(servers):
    shape = (1000, 40)
    law, start = init.law_of(init.truncated_normal(), shape), threading.Barrier(2)

    def body(client, rank):
        client.create({"t": Parameter(shape, sparse=True)}, {"t": [Drawn(law, shape, SEED)]})
        received = sum(server["received"] for server in client.status())
        start.wait(30)
        return client.pull("t").wait(), received

    for found, received in job("bsp", 2, body, servers, ServerThread):
        np.testing.assert_array_equal(found, Drawn(law, shape, SEED).whole(F32))
        assert received == 0  # bytes of arrays


def test_a_worker_that_cannot_give_tells_the_others():
    """Each is asked in turn, and fails by itself: none waits for one that has failed."""
    start = threading.Barrier(2)

    def body(client, rank):
        def fails():
            raise ZeroDivisionError(rank)

        start.wait(30)
        with pytest.raises(ZeroDivisionError):
            client.create({"t": TABLE["t"]}, {"t": [Given(fails, (ROWS, COLS))]})
        start.wait(30)
        client.create({"t": TABLE["t"]}, {"t": np.ones((ROWS, COLS))})
        with pytest.raises(ZeroDivisionError):
            restore(client, "t", [(None, fails)], 0)
        start.wait(30)
        restore(client, "t", [(None, lambda: np.full((1, ROWS, COLS), 2.0))], 0)
        return client.pull("t").wait()

    assert all((found == 2).all() for found in job("asp", 2, body, 2, ServerThread))


def test_a_server_answers_while_it_draws(monkeypatch):
    monkeypatch.setattr(givers, "SLICE", 1)
    shape = (4000, COLS)  # a block each
    law = init.law_of(init.normal(), shape)
    with ServerThread(options("asp", 2)) as server, connect([server.address]) as a, connect([server.address], 1) as b:
        table = {"t": Parameter(shape, sparse=True)}
        waits = threading.Thread(target=a.create, args=(table, {"t": [Drawn(law, shape, SEED)]}))
        waits.start()
        drawing, seen = server.server.sessions.store.givers.drawing, 0
        while waits.is_alive():
            b.ping()
            seen += bool(drawing)
        assert seen > 3
        np.testing.assert_array_equal(a.pull("t").wait(), Drawn(law, shape, SEED).whole(F32))


def test_plain_lists_are_arrays_and_no_more_parts_travel_than_a_message_holds():
    def body(client, rank):
        client.create({"w": Parameter((2, 2))}, {"w": [[1, 2], [3, 4]]})
        return client.pull("w").wait().tolist()

    assert job("asp", 1, body, 1, ServerThread) == [[[1.0, 2.0], [3.0, 4.0]]]
    most = first_values.MOST_PARTS
    parts = [Drawn(NORMAL.law, (9, COLS), [1 << 256, 2]) for _ in range(most + 1)]
    assert data(parts, range(9 * (most + 1))) is None
    assert len(json.dumps(data(parts[:most], range(9 * most)))) < META_LIMIT - 8000
