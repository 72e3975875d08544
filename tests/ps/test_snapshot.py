"""Snapshots of a server: what is in them, damage, and jobs that go on after `kill -9` of a server or a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import zmq

import hetu as ht
from hetu.checkpoint import MANIFEST, generations, part_name
from hetu.core.errors import ArgumentError, CheckpointError
from hetu.ps import (
    ASP,
    BSP,
    SSP,
    UNBOUNDED,
    Growth,
    Options,
    Parameter,
    ParameterStore,
    RefusedError,
    ServerError,
    ServerProcess,
)
from hetu.ps.saved import restore, restore_rows
from hetu.ps.store.growing import table_of
from hetu.ps.store.messages import Kind, Message, decode, encode
from hetu.ps.wire.handshake import admit, guarded
from hetu.ps.wire.heritage import Heritage
from hetu.ps.wire.snapshot import VERSION_JUMP, Snapshots

from .network import DEADLINE, TOKEN, ServerThread, connect, options
from .simulation import DENSE, GROWING, SPARSE, Worker, contents, grow, hello, new_store, run


def saved(store: ParameterStore, folder) -> ParameterStore:
    """The store of the server's next life."""
    snapshots = Snapshots(store, folder, every=1.0)
    snapshots.take(store.clocks.slowest)
    snapshots.finish()
    return restored(folder, len(store.members))


def restored(folder, workers: int = 2) -> ParameterStore:
    store = ParameterStore(workers, ASP(), epoch=2)
    assert Snapshots(store, folder, every=1.0).restore()
    return store


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam"])
@pytest.mark.parametrize("mode", [BSP(), SSP(1)], ids=str)
def test_training_goes_on_from_a_snapshot_as_if_nothing_had_happened(rule, mode, tmp_path):

    def trained(restart: bool) -> ParameterStore:
        store, crew = new_store(2, mode, rule), [Worker(rank, 2) for rank in range(2)]
        run(store, crew, [])
        for _ in range(0 if mode.buffered else 2):  # worker 0 reads and pushes
            [reply] = store.handle(crew[0].next(), 0.0)
            crew[0].receive(reply)
        if restart:
            store = saved(store, tmp_path)
            for worker in crew:
                hello(store, worker.rank)
                worker.epoch = 2
            for table in store.tables.values():
                table.versions -= VERSION_JUMP
        for worker in crew:
            worker.clocks = 4
        run(store, crew, [])
        assert store.consistency == mode and store.clocks.slowest == 4
        return store

    assert contents(trained(restart=True)) == contents(trained(restart=False))


def test_requests_that_took_effect_before_the_snapshot_do_so_only_once(tmp_path):
    store = new_store(1, ASP(), "add")
    push, bad = Message(Kind.PUSH, key=DENSE, seq=3, epoch=1, values=np.ones((1, 8), "<f4")), Message(Kind.PULL, key=9)
    store.handle(push, 0.0)
    bad.seq, bad.epoch = 4, 1
    store.handle(bad, 0.0)
    later = saved(store, tmp_path)
    hello(later, 0)
    push.epoch = bad.epoch = 2
    [reply] = later.handle(push, 0.0)
    assert reply.kind is Kind.OK and (later.tables[DENSE].values == 1).all()
    [reply] = later.handle(bad, 0.0)
    assert reply.meta["code"] == "key"


def test_a_worker_that_is_ahead_of_the_snapshot_takes_the_server_along(tmp_path):
    """Its leave to work at clock 5 under SSP(1) shows that nobody can be below 4, and what it is asked is below 99."""
    later = saved(new_store(3, SSP(1)), tmp_path)
    meta = {"incarnation": 100, "first": 99, "at": 5}
    [reply] = later.handle(Message(Kind.HELLO, worker=0, step=5, meta=meta), 0.0)
    assert reply.meta["clock"] == 5 and reply.meta["restored"]["clock"] == 0
    assert later.clocks.of == {0: 5, 1: 4, 2: 4} and later.members[0].done == 98
    [reply] = later.handle(Message(Kind.HELLO, worker=1, step=3, meta={**meta, "at": 3}), 0.0)
    assert later.clocks.of == {0: 5, 2: 4}  # the others had gone on without it


@pytest.mark.parametrize("kind", ["dense", "table", "growing"])
def test_what_a_job_loads_after_a_restart_of_all_is_loaded(kind, tmp_path):
    """Once: a load by a worker of a job that goes on, for which it was the first of its life, undoes nothing."""
    grows, shape = (Growth(1 << 20), (UNBOUNDED, 3)) if kind == "growing" else (None, (4, 3))
    made, ids = Parameter(shape, sparse=kind != "dense", rule="momentum", grows=grows), np.arange(4)

    def load(client, value: float) -> np.ndarray:
        values = np.full((2, 4, 3), value, "f4")
        if kind == "growing":
            restore_rows(client, "w", lambda: [(ids, values)], step=1)
        else:
            restore(client, "w", [(None, lambda: values)], step=1)
        return client.pull("w").wait() if kind == "dense" else client.pull_rows("w", ids).wait()

    told, first = (
        options("asp", 1, snapshots=str(tmp_path), snapshot_every=1e6),
        ht.init.zeros if grows else np.zeros((4, 3), "f4"),
    )
    for value in (1.0, 2.0, 3.0):
        with ServerThread(told) as server, connect([server.address]) as client:
            client.create({"w": made}, {"w": first})
            assert (load(client, value) == value).all() and (load(client, value + 9) == value + 9).all()
            client.clock(snapshot=True).wait()
    with ServerThread(told) as server, connect([server.address]) as client:
        client.create({"w": made}, {"w": first})
        assert (load(client, 5.0) == 5).all()
        client.clock(snapshot=True).wait()
        address, life = server.address, client.parameters["w"]
        server.stop()
        with ServerThread(replace(told, address=address)), pytest.warns(RuntimeWarning, match="restarted"):
            assert client.ping() is None
            client.parameters["w"] = replace(life, generation=0)
            assert (load(client, 7.0) == 5).all()


def test_a_cached_row_of_the_life_before_is_stale(tmp_path):
    later = saved(new_store(1, ASP()), tmp_path)
    hello(later, 0)
    held = {"ids": np.arange(3), "counts": np.full(3, 1 << 31)}
    [reply] = later.handle(Message(Kind.SYNC, key=SPARSE, seq=3, epoch=2, **held), 0.0)
    assert reply.ids.tolist() == [0, 1, 2]
    again = restored(tmp_path, workers=1)
    assert (again.tables[SPARSE].versions == 2 * VERSION_JUMP).all()


def test_versions_rise_also_when_a_life_goes_on_from_before_the_last(tmp_path):
    """A worker may still hold rows of a life whose own snapshots are given up."""
    store = new_store(1, ASP())
    snapshots = Snapshots(store, tmp_path, every=1.0)
    for clock in (1, 2):
        snapshots.take(clock)
    snapshots.finish()
    assert (restored(tmp_path, workers=1).tables[SPARSE].versions == VERSION_JUMP).all()  # at clock 2
    later = ParameterStore(1, ASP())
    assert Snapshots(later, tmp_path, every=1.0).restore(clock=1) and generations(tmp_path) == [1]
    assert (later.tables[SPARSE].versions == 2 * VERSION_JUMP).all()


def test_the_first_clock_is_kept_then_one_after_every_interval_and_three_of_them(tmp_path):
    store, seq = new_store(1, ASP()), 2
    snapshots = Snapshots(store, tmp_path, every=10.0)

    def tick(now: float, **meta: bool) -> tuple[dict | None, int]:
        """What the server says at the end of a clock, and the last clock that it has kept."""
        nonlocal seq
        seq += 1
        message = Message(Kind.CLOCK, seq=seq, epoch=1, step=seq - 3, meta=meta or None)
        [reply] = store.handle(message, now)
        snapshots.finish()
        return reply.meta, max(generations(tmp_path), default=0)

    greeting = store.handle(Message(Kind.HELLO, meta={"incarnation": 100}), 0.0)
    assert greeting[0].meta["snapshot"]
    assert tick(0.0, snapshot=True) == (None, 1) and tick(9.9) == (None, 1)
    assert tick(10.0) == ({"snapshot": True}, 1)
    assert tick(10.0, snapshot=True) == (None, 4) and tick(19.9) == (None, 4)
    assert tick(19.9, snapshot=True) == (None, 6)  # whoever asks is given one
    assert tick(20.0, snapshot=True) == (None, 7)
    assert generations(tmp_path) == [4, 6, 7]
    assert sorted(path.name for path in (tmp_path / "7").iterdir()) == [MANIFEST, part_name(1, 0)]


def test_damaged_and_foreign_snapshots_are_refused(tmp_path):
    snapshots = Snapshots(new_store(2, ASP()), tmp_path, every=1.0)
    snapshots.take(5)
    snapshots.finish()

    def again(workers: int, clock: int | None = None) -> None:
        Snapshots(ParameterStore(workers, ASP()), tmp_path, every=1.0).restore(clock)

    with pytest.raises(CheckpointError, match="of 2 workers"):
        again(3)
    with pytest.raises(CheckpointError, match="no snapshot of clock 4"):
        again(2, clock=4)
    file = tmp_path / "5" / MANIFEST
    manifest = json.loads(file.read_text())
    del manifest["extra"]["slowest"]
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no snapshot of a server"):
        again(2)
    part = tmp_path / "5" / part_name(1, 0)
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="was written with"):
        again(2)


FIELDS = (
    "workers",
    "consistency",
    "clocks",
    "slowest",
    "members",
    "groups",
    "tables",
    "users",
    "time",
    "life",
    "chain",
)
DAMAGES = {
    **{f"without {name}": (lambda m, name=name: m["extra"].pop(name)) for name in FIELDS},
    **{f"other {name}": (lambda m, name=name: m["extra"].update({name: "?"})) for name in FIELDS},
    "without a table's rows": lambda m: m["extra"]["tables"][str(SPARSE)].pop("rows"),
    "other rule": lambda m: m["extra"]["tables"][str(SPARSE)].update(rule="?"),
    "without keys": lambda m: m["variables"].pop(f"{GROWING}.ids"),
    "without values": lambda m: m["variables"].pop(f"{SPARSE}.values"),
    "other shape": lambda m: m["variables"][f"{SPARSE}.values"].update(shape=[3, 3], pieces=[[0, [[0, 3], [0, 3]]]]),
    "without variables": lambda m: m.pop("variables"),
    "older": lambda m: m["extra"].pop("format"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_whatever_a_snapshot_lacks_is_told_and_names_its_folder(damage, tmp_path):
    store = new_store(1, ASP())
    grow(store).update(np.array([7]), np.ones((1, 2), "f4"), 1, True, 0)
    snapshots = Snapshots(store, tmp_path, every=1.0)
    snapshots.take(5)
    snapshots.finish()
    file = tmp_path / "5" / MANIFEST
    manifest = json.loads(file.read_text())
    DAMAGES[damage](manifest)
    file.write_text(json.dumps(manifest))

    def inherited() -> None:
        """By servers of another number."""
        later = ParameterStore(1, ASP())
        Heritage([tmp_path], 5).begin(later)
        for table in store.tables.values():
            later.inherit(table_of(table.spec))

    for again in (lambda: Snapshots(ParameterStore(1, ASP()), tmp_path, every=1.0).restore(), inherited):
        if again is inherited and damage.split()[-1] in ("life", "users", "members"):  # which only its own server needs
            continue
        with pytest.raises(CheckpointError) as told:
            again()
        assert str(tmp_path) in told.value.message and told.value.fix
        assert damage != "older" or "is a snapshot of format None, this version of hetu writes 4" in told.value.message


def test_a_snapshot_that_cannot_be_written_is_refused_and_the_server_goes_on(tmp_path, capsys):
    store = new_store(1, ASP())
    snapshots = Snapshots(store, tmp_path / "no" / "folder", every=1.0)
    snapshots.restore()
    assert store.handle(Message(Kind.SNAPSHOT, seq=3, step=1, epoch=1), 0.0) == [] == snapshots.tick()
    [reply] = store.handle(Message(Kind.CLOCK, seq=4, epoch=1, meta={"snapshot": True}), 0.0)
    assert reply.kind is Kind.OK
    snapshots.finish()
    [reply] = snapshots.tick()
    assert (reply.seq, reply.meta["code"]) == (3, "snapshot") and "No such file" in capsys.readouterr().err
    [reply] = new_store(1, ASP()).handle(Message(Kind.SNAPSHOT, seq=3, epoch=1), 0.0)
    assert "keeps no snapshots" in reply.meta["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="servers fork on Linux")
def test_a_forked_child_writes_the_moment_of_the_fork_and_tells_what_fails(tmp_path, capsys):
    store = new_store(1, ASP(), "sgd")
    hello(store, 0)
    snapshots = Snapshots(store, tmp_path / "kept", every=1.0, forks=True)
    before = [table.values.copy() for table in store.tables.values()]
    snapshots.take(1)
    for table in store.tables.values():
        table.values += 1
    snapshots.finish()
    for table, values in zip(restored(tmp_path / "kept", 1).tables.values(), before):
        np.testing.assert_array_equal(table.values, values)
    (tmp_path / "file").write_text("no folder")
    snapshots = Snapshots(store, tmp_path / "file", every=1.0, forks=True)
    snapshots.take(2)
    snapshots.finish()
    assert "no snapshot in" in snapshots.ended[1].message and "no snapshot in" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="servers fork on Linux, and /proc says what is open")
@pytest.mark.parametrize("forks", [True, False])
def test_a_snapshot_that_finds_no_memory_is_refused_and_leaves_nothing_open(forks, tmp_path, capsys, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(12, "Cannot allocate memory") if forks else MemoryError

    store = new_store(1, ASP())
    snapshots = Snapshots(store, tmp_path / "kept", every=1.0, forks=forks)
    monkeypatch.setattr(os, "fork", full)
    monkeypatch.setattr(Snapshots, "_dump", full)
    assert store.handle(Message(Kind.SNAPSHOT, seq=3, step=1, epoch=1), 0.0) == []
    before = os.listdir("/proc/self/fd")
    [reply] = store.handle(Message(Kind.CLOCK, seq=4, epoch=1, meta={"snapshot": True}), 0.0)
    assert reply.kind is Kind.OK and os.listdir("/proc/self/fd") == before
    [reply] = snapshots.tick()
    assert (reply.seq, reply.meta["code"]) == (3, "snapshot") and "memory" in capsys.readouterr().err


def test_whoever_waits_for_a_snapshot_that_died_with_its_server_is_told(tmp_path):
    later = saved(new_store(1, ASP()), tmp_path)  # at clock 0, while the worker has gone on to clock 3
    meta = {"incarnation": 100, "first": 9, "at": 3}
    later.handle(Message(Kind.HELLO, step=3, meta=meta), 0.0)
    [reply] = later.handle(Message(Kind.SNAPSHOT, seq=9, step=3, epoch=2), 0.0)
    assert (reply.meta["code"], reply.meta["fix"]) == ("snapshot", "ask anew")
    assert later.handle(Message(Kind.SNAPSHOT, seq=10, step=4, epoch=2), 0.0) == [] and later.moments.coming == {4}


def test_options_are_checked():
    wrong = {
        "on_loss": "ignore",
        "lease": 0.0,
        "snapshot_every": -1.0,
        "arrive": 0.0,
        "consistency": "sps",
        "workers": 0,
    }
    for name, value in wrong.items():
        with pytest.raises(ArgumentError, match=f"{name}[\\s\\S]*fix: "):
            Options(**{"workers": 1, "token": TOKEN, name: value})


# -- processes ---------------------------------------------------------------------------------------------------


def test_after_kill_9_a_server_goes_on_from_its_snapshot_and_the_workers_say_so(tmp_path):
    """Two servers with a parameter each, one dies: three adds before the snapshot, one lost after it, then one more."""
    settings = [options("bsp", 1, snapshots=str(tmp_path / name)) for name in "vw"]
    counters = {name: Parameter((50_000,), rule="add", reduce="sum") for name in "vw"}  # through shared memory
    with (
        ServerProcess(settings[0]) as first,
        ServerProcess(settings[1]) as second,
        connect([first.address, second.address], retry=0.1) as client,
    ):
        client.create(counters, dict.fromkeys("vw", np.zeros(50_000)))
        assert [client.blocks[name][0].server for name in "vw"] == [0, 1]

        def step() -> list[float]:
            for name in "vw":
                client.push(name, np.ones(50_000, "f"))
            client.clock().wait()
            values = [np.unique(client.pull(name).wait()).tolist() for name in "vw"]
            return [value for [value] in values]

        for _ in range(3):
            step()
        client.clock(snapshot=True).wait()
        assert step() == [4, 4]
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        address = {"address": second.address}
        with (
            ServerProcess(options("bsp", 1, snapshots=str(tmp_path / "w"), **address)),
            pytest.warns(RuntimeWarning, match="restarted from its snapshot at clock 4"),
        ):
            assert step() == [5, 4]
            assert [status["clocks"] for status in client.status()] == [{"0": 6}] * 2


def test_a_worker_that_joined_late_keeps_its_place_when_the_server_dies_before_its_first_tick(tmp_path):
    settings = options("bsp", 2, snapshots=str(tmp_path))
    with ServerProcess(settings) as server:
        with connect([server.address], 1) as early:
            early.leave()
        with connect([server.address], retry=0.1) as first:
            first.create(w := {"w": Parameter((1,), rule="add", reduce="sum")}, {"w": np.zeros(1)})
            first.clock(snapshot=True).wait()
            with connect([server.address], 1, retry=0.1) as late, pytest.warns(RuntimeWarning, match="restarted"):
                late.create(w, {"w": np.zeros(1)})
                assert late.step == 1
                server.kill()
                with ServerProcess(replace(settings, address=server.address)):
                    late.ping()  # or the others would go on without it
                    for client in (first, late):
                        client.push("w", np.ones(1, "f"))
                    for handle in [client.clock() for client in (first, late)]:
                        handle.wait()
                    assert late.pull("w").wait() == 2


def test_a_greeting_that_is_sent_again_tells_what_the_worker_knows_by_then():
    """Or a restarted server would be taken along to a clock that is over."""
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as socket,
        ThreadPoolExecutor(1) as pool,
        ExitStack() as last,
    ):
        socket.linger = 0
        guard = guarded(context, socket)
        last.callback(guard.stop)
        socket.bind("tcp://127.0.0.1:*")
        admit(guard, TOKEN, socket.getsockopt_string(zmq.LAST_ENDPOINT))

        def received(kind: Kind) -> tuple[bytes, Message]:
            while True:
                assert socket.poll(1000 * DEADLINE)
                peer, *frames = socket.recv_multipart()
                if (message := decode(frames)).kind is kind:
                    return peer, message

        def answer(peer: bytes, message: Message) -> None:
            message.epoch = 7
            socket.send_multipart([peer, *encode(message)])

        made = pool.submit(connect, [socket.getsockopt_string(zmq.LAST_ENDPOINT)], retry=0.05, shared=False)
        peer, hello = received(Kind.HELLO)
        assert hello.step == 0
        answer(peer, hello.reply(meta={"lease": 60.0, "consistency": "asp", "clock": 0}))
        with made.result(timeout=DEADLINE) as client:
            ticked = client.clock()
            _, clock = received(Kind.CLOCK)
            answer(peer, clock.refusal(RefusedError("epoch", "an earlier life")))
            waiting = pool.submit(client.ping)  # which receives that, greets, and is not answered
            assert received(Kind.HELLO)[1].step == 0
            answer(peer, clock.reply())
            again = next(hello for hello in (received(Kind.HELLO)[1] for _ in range(20)) if hello.step)
            assert (again.step, again.meta["first"], again.meta["at"]) == (1, 2, 1)
            answer(peer, again.reply(meta={"lease": 60.0, "consistency": "asp", "clock": 1}))
            answer(peer, received(Kind.PING)[1].reply())
            waiting.result(timeout=DEADLINE)
            ticked.wait()


def test_a_folder_with_a_damaged_snapshot_keeps_a_server_from_starting(tmp_path, capfd):
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / MANIFEST).write_text("{}")
    with pytest.raises(ServerError):
        ServerProcess(options("asp", 1, snapshots=str(tmp_path)))


WORKER = """
import sys, numpy as np
from hetu.ps import Client, Parameter
address, token = sys.stdin.readline().split("|")
with Client([address], 1, token.strip()) as client:
    client.create({"w": Parameter((1,), rule="add", reduce="sum")}, {"w": np.zeros(1)})
    for _ in range(3):
        client.push("w", np.ones(1, "f"))
        client.clock().wait()
    print("working", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(("mode", "on_loss"), [("bsp", "evict"), ("ssp:1", "fail")])
def test_a_worker_that_is_killed_ends_with_its_lease_or_ends_the_job(mode, on_loss):
    with (
        ServerProcess(options(mode, 2, lease=0.5, on_loss=on_loss)) as server,
        subprocess.Popen([sys.executable, "-c", WORKER], stdin=-1, stdout=-1, text=True) as worker,
        connect([server.address]) as client,
    ):
        worker.stdin.write(f"{server.address}|{TOKEN}\n")
        worker.stdin.flush()
        client.create({"w": Parameter((1,), rule="add", reduce="sum")}, {"w": np.zeros(1)})
        for _ in range(3):
            client.clock().wait()
        assert worker.stdout.readline() == "working\n"
        worker.kill()
        worker.wait()
        if on_loss == "fail":
            with pytest.raises(RefusedError, match="worker 1 was silent for 0.5 s"):
                for _ in range(3):
                    client.clock().wait()
            return
        for _ in range(3):
            client.clock().wait()
        assert client.pull("w").wait() == 3 and client.status()[0]["clocks"] == {"0": 6}
