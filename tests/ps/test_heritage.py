"""Servers that go on from what another number of servers kept: the same bits, at the same clock, or a refusal."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from hetu.core.errors import CheckpointError
from hetu.dist.launch.servers import Servers, ServerStartError
from hetu.ps import Client, Parameter, Placed, RefusedError
from hetu.ps.saved import state_of
from hetu.ps.store import partition as module

from .network import ServerThread, connect, options

PLACED = Placed(np.array([3, 1, 0, 0, 3, 1, 1, 0, 0, 0, 3]))  # of part 2 there are no rows
TABLES = {
    "table": Parameter((11, 3), sparse=True, rule="adam"),
    "one": Parameter((1, 3), sparse=True, rule="sgd"),
    "column": Parameter((9, 1), sparse=True, rule="adagrad"),
    "dense": Parameter((7, 9), rule="momentum"),
    "number": Parameter((), rule="adam"),
    "narrow": Parameter((11, 1), sparse=True, rule="adam", beside="table"),
    "wide": Parameter((11, 20), sparse=True, rule="sgd", beside="one of 11"),
    "one of 11": Parameter((11, 1), sparse=True, rule="sgd"),
    "exact": Parameter((7, 9), "float64", rule="momentum", beside="dense"),
    "coded": Parameter((11, 3), sparse=True, rule="sgd", beside="table", push="float16", pull="float16"),
    "at rest": Parameter((11, 3), sparse=True, rule="adam", at_rest="int8", seed=7),
    "placed": Parameter((11, 3), sparse=True, rule="adam", placed=PLACED),
    "narrow and placed": Parameter((11, 1), sparse=True, rule="adam", beside="placed", placed=PLACED),
    "halves": Parameter((11, 3), sparse=True, rule="sgd", at_rest="float16", pull="float16"),
}


class Group:
    """Some servers of a job with snapshots in a folder, started as `heturun` would."""

    def __init__(self, folder, count: int, workers: int = 1) -> None:
        launch = Servers([""] * count, workers, snapshots=folder)
        clock, inherit = launch.origin()
        self.inherited = len(inherit)
        told = {"snapshot_clock": clock, "inherit": tuple(inherit), "snapshot_every": 1e6}
        self.stack, self.servers = ExitStack(), []
        try:
            for own in launch.folders:
                server = ServerThread(options("bsp", workers, snapshots=str(own), **told))
                self.servers.append(self.stack.enter_context(server))
        except BaseException:
            self.stack.close()
            raise

    def __enter__(self) -> Client:
        return self.stack.enter_context(connect([server.address for server in self.servers]))

    def __exit__(self, *_: object) -> None:
        self.stack.close()


def steps(client: Client, first: int, last: int) -> None:
    for step in range(first, last):
        rng = np.random.default_rng(step)
        for name, parameter in TABLES.items():
            gradient = rng.standard_normal(parameter.shape).astype("f")
            if parameter.sparse:
                client.push_rows(name, np.arange(parameter.shape[0]), gradient)
            else:
                client.push(name, gradient)
        client.clock(snapshot=step == last - 1).wait()


def made(client: Client, number: float) -> Client:
    client.create(TABLES, {name: np.full(parameter.shape, number) for name, parameter in TABLES.items()})
    return client


def states(client: Client) -> dict[str, np.ndarray]:
    return {name: state_of(client, name) for name in TABLES}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("counts", [(2, 3, 1), (1, 4), (3, 2, 2, 3)], ids=str)
def test_training_goes_on_with_another_number_of_servers_as_with_the_same(counts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 48)  # many blocks of dense parameters; rows on all servers
    with Group(tmp_path / "whole", 1) as client:
        steps(made(client, 1.0), 0, 2 * len(counts))
        wanted = states(client)
    for turn, count in enumerate(counts):
        group = Group(tmp_path / "kept", count)
        assert group.inherited == (0 if turn == 0 or counts[turn - 1] == count else counts[turn - 1])
        with group as client:
            assert client.step == 2 * turn
            made(client, 1.0 if turn == 0 else -5.0)
            tables = [t for server in group.servers for t in server.server.sessions.store.tables.values()]
            assert tables and not any(table.wanting for table in tables)
            steps(client, 2 * turn, 2 * turn + 2)
            found = states(client)
    for name in TABLES:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def test_what_is_another_parameter_now_is_refused(tmp_path):
    with Group(tmp_path, 2) as client:
        steps(made(client, 1.0), 0, 1)
    wrong = {
        "table": replace(TABLES["table"], shape=(12, 3)),
        "column": replace(TABLES["column"], shape=(9, 2)),
        "dense": replace(TABLES["dense"], rule="sgd"),
        "number": replace(TABLES["number"], shape=(2,)),
        "at rest": replace(TABLES["at rest"], at_rest="float16"),
        "placed": replace(TABLES["placed"], placed=None),
        "halves": replace(TABLES["halves"], placed=PLACED),
    }
    with Group(tmp_path, 1) as client:
        for name, parameter in wrong.items():
            with pytest.raises(RefusedError, match=rf"{name} was kept|no block of {name}"):
                client.create({name: parameter}, {name: np.zeros(parameter.shape)})
        client.create({"dense": TABLES["dense"]}, {"dense": np.zeros((7, 9))})
        assert (client.pull("dense").wait() != 0).all()
    with pytest.raises(CheckpointError, match="of 1 workers, this job has 2"):
        Group(tmp_path, 3, workers=2)


def test_where_servers_begin(tmp_path):
    """From the newest clock that all servers of one number have, whatever that number is."""

    def keep(number: int, count: int, *clocks: int) -> None:
        for clock in clocks:
            folder = tmp_path / f"server-{number}-of-{count}" / str(clock)
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")

    def origin(count: int) -> tuple[int | None, list[str]]:
        clock, folders = Servers([""] * count, 1, snapshots=tmp_path).origin()
        return clock, [folder.rpartition("/")[2] for folder in folders]

    assert origin(2) == (None, [])
    keep(0, 2, 3, 5)
    with pytest.raises(ServerStartError, match="no clock of which all servers have a snapshot"):
        origin(2)
    with pytest.raises(ServerStartError, match="no clock of which all servers have a snapshot"):
        origin(3)
    keep(1, 2, 3, 4)
    assert origin(2) == (3, []) and origin(3) == (3, ["server-0-of-2", "server-1-of-2"])
    keep(0, 1, 3)
    assert origin(2) == (3, []) and origin(1) == (3, [])
    keep(0, 1, 7)
    assert origin(2) == (7, ["server-0-of-1"]) and origin(1) == (7, [])
