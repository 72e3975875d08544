"""Snapshots of a server: what is in them, damage, and jobs that go on after `kill -9` of a server or a worker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from hetu.checkpoint import MANIFEST, Checkpoint, part_name
from hetu.errors import ArgumentError, CheckpointError
from hetu.ps import ASP, BSP, SSP, Options, Parameter, ParameterStore, RefusedError, ServerError, ServerProcess
from hetu.ps.messages import Kind, Message
from hetu.ps.snapshot import VERSION_JUMP, Snapshots, load

from .network import TOKEN, connect, options
from .simulation import DENSE, SPARSE, Worker, contents, hello, new_store, run


def saved(store: ParameterStore, folder) -> ParameterStore:
    """The store of the server's next life."""
    snapshots = Snapshots(folder, every=1.0)
    snapshots.write(store, [])
    snapshots.finish()
    return restored(folder, len(store.members))


def restored(folder, workers: int = 2) -> ParameterStore:
    store = ParameterStore(workers, ASP(), epoch=2)
    assert Snapshots(folder, every=1.0).restore(store)
    return store


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adagrad", "adam"])
@pytest.mark.parametrize("mode", [BSP(), SSP(1)], ids=str)
def test_training_goes_on_from_a_snapshot_as_if_nothing_had_happened(rule, mode, tmp_path):

    def trained(restart: bool) -> ParameterStore:
        store, crew = new_store(2, mode, rule), [Worker(rank, 2) for rank in range(2)]
        run(store, crew, [])
        for _ in range(2):  # worker 0 reads and pushes; under BSP the push is held back
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


def test_a_cached_row_of_the_life_before_is_stale(tmp_path):
    later = saved(new_store(1, ASP()), tmp_path)
    hello(later, 0)
    held = {"ids": np.arange(3), "counts": np.full(3, 1 << 31)}
    [reply] = later.handle(Message(Kind.SYNC, key=SPARSE, seq=3, epoch=2, **held), 0.0)
    assert reply.ids.tolist() == [0, 1, 2]
    again = restored(tmp_path, workers=1)
    assert (again.tables[SPARSE].versions == 2 * VERSION_JUMP).all()


def test_the_first_snapshot_comes_with_the_first_push_then_one_every_interval(tmp_path):
    store, snapshots = new_store(1, ASP()), Snapshots(tmp_path / "s", every=10.0)
    store.snapshot_wanted = {}

    def number(now: float) -> int:
        snapshots.tick(store, now)
        snapshots.finish()
        return Checkpoint(tmp_path / "s").number if (tmp_path / "s").exists() else 0

    assert number(0.0) == 0
    store.handle(Message(Kind.PUSH, key=DENSE, seq=3, epoch=1, values=np.ones((1, 8), "<f4")), 0.0)
    assert [number(now) for now in (1.0, 10.9, 11.0, 20.0, 25.0)] == [1, 1, 2, 2, 3]
    assert len(list((tmp_path / "s").iterdir())) == 2  # the manifest and its one part


def test_damaged_and_foreign_snapshots_are_refused(tmp_path):
    snapshots = Snapshots(tmp_path, every=1.0)
    snapshots.write(new_store(2, ASP()), [])
    snapshots.finish()
    with pytest.raises(CheckpointError, match="of 2 workers"):
        snapshots.restore(ParameterStore(3, ASP()))
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    del manifest["extra"]["slowest"]
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no snapshot of a server"):
        load(Checkpoint(tmp_path), ParameterStore(2, ASP()))
    part = tmp_path / part_name(1, 0)
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="was written with"):
        snapshots.restore(ParameterStore(2, ASP()))


def test_a_snapshot_that_cannot_be_written_is_refused_and_the_server_goes_on(tmp_path, capsys):
    store = new_store(1, ASP())
    snapshots = Snapshots(tmp_path / "no" / "folder", every=1.0)
    snapshots.restore(store)
    assert store.handle(Message(Kind.SNAPSHOT, seq=3, epoch=1), 0.0) == []
    assert snapshots.tick(store, 0.0) == []
    snapshots.thread.join()
    [reply] = snapshots.tick(store, 0.1)
    assert (reply.seq, reply.meta["code"]) == (3, "snapshot") and "does not exist" in capsys.readouterr().err
    [reply] = new_store(1, ASP()).handle(Message(Kind.SNAPSHOT, seq=3, epoch=1), 0.0)
    assert "keeps no snapshots" in reply.meta["message"]


def test_options_are_checked():
    for wrong in ({"on_loss": "ignore"}, {"lease": 0.0}, {"snapshot_every": -1.0}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            Options(1, TOKEN, **wrong)


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
        client.snapshot()
        assert step() == [4, 4]
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        address = {"address": second.address}
        with (
            ServerProcess(options("bsp", 1, snapshots=str(tmp_path / "w"), **address)),
            pytest.warns(RuntimeWarning, match="restarted from its snapshot at clock 3"),
        ):
            assert step() == [5, 4]
            assert [status["clocks"] for status in client.status()] == [{"0": 5}] * 2


def test_a_folder_with_a_damaged_snapshot_keeps_a_server_from_starting(tmp_path, capfd):
    (tmp_path / MANIFEST).write_text("{}")
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
