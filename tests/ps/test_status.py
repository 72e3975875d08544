"""`hetu ps status`: a look at a running job by someone who is no worker."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from hetu import cli
from hetu.core.errors import ArgumentError
from hetu.dist.launch.servers import Servers
from hetu.ps import Parameter, RefusedError, ServerProcess, ServerTimeoutError, make_keys
from hetu.ps.wire.keys import write_keys
from hetu.ps.wire.status import ServerJob, ask, find_job

from .network import TOKEN, connect, options


@pytest.fixture(scope="module")
def server():
    with ServerProcess(options("ssp:3", 2)) as server:
        yield server


@pytest.fixture(scope="module")
def job_file(server, tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "servers.json"
    write_keys(path, {"HETU_SERVERS": server.address, "HETU_SERVER_TOKEN": TOKEN})
    return path


def test_a_look_shows_clocks_traffic_and_cache_hits_and_changes_nothing(server, job_file, capsys):
    with connect([server.address]) as client:
        client.create({"t": Parameter((8, 2), sparse=True, rule="add", reduce="sum")}, {"t": np.zeros((8, 2))})
        client.sync_rows("t", np.arange(8), np.array([-1] * 2 + [0] * 6)).wait()
        for _ in range(2):
            client.clock().wait()
        before = client.status()
        assert cli.main(["ps", "status", "--job", str(job_file), "--every", "0.01"]) == 0
        shown = capsys.readouterr().out
        assert cli.main(["ps", "status", "--job", str(job_file), "--every", "0.01", "--json"]) == 0
        [found] = json.loads(capsys.readouterr().out)["servers"]
        for status in (found, *before):  # time passes
            for name in ("seconds", "silent", "requests"):
                status.pop(name)
        assert {**before[0], **found} == found
    assert "ssp:3, up" in shown and "s, 1 table, 4.3 kB" in shown and "cache: 75.0% of 8 rows were fresh" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert lines[2][:3] == ["0", "2", "0"] and lines[3] == ["1", "0", "2", "not", "here", "yet"]
    assert ["lead", "2,", "largest", "2", "(allowed", "4);", "0", "requests", "wait"] in lines


def test_whoever_has_no_token_sees_nothing(server):
    with pytest.raises(RefusedError, match="token"):
        ask(ServerJob((server.address,), "guess"))


def test_a_server_that_is_gone_is_named():
    with pytest.raises(ServerTimeoutError, match=r"no answer from tcp://127.0.0.1:1\b"):
        ask(ServerJob(("tcp://127.0.0.1:1",), TOKEN), timeout=0.05)


def test_servers_with_keys_want_one(tmp_path):
    server_keys, (worker,) = make_keys(tmp_path, 1)
    with ServerProcess(options("asp", 1, key_file=str(server_keys))) as server:
        [found] = ask(ServerJob((server.address,), TOKEN, str(worker)), timeout=20.0)
        assert found["clocks"] == {"0": 0}
        with pytest.raises(RefusedError, match="asks for other credentials|breaks off the handshake"):
            ask(ServerJob((server.address,), TOKEN), timeout=20.0)


def test_where_a_job_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HETU_SERVERS", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="no job"):
        find_job(None)
    for age, name in enumerate(("heturun-a", ".heturun-b")):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "servers.json"
        write_keys(file, {"HETU_SERVERS": f"tcp://127.0.0.1:{age + 1},tcp://h:9", "HETU_SERVER_TOKEN": name})
        os.utime(file, (0, 1000 - age))
    assert find_job(None) == ServerJob(("tcp://127.0.0.1:1", "tcp://h:9"), "heturun-a")
    assert "2 jobs" in capsys.readouterr().err
    assert find_job(file).token == ".heturun-b"
    launched = Servers([], 1)
    launched.variables = {"HETU_SERVERS": "tcp://127.0.0.1:3", "HETU_SERVER_TOKEN": "c"}
    launched.describe(tmp_path)
    assert find_job(tmp_path / "servers.json") == ServerJob(("tcp://127.0.0.1:3",), "c")
    monkeypatch.setenv("HETU_SERVERS", "tcp://127.0.0.1:7")
    monkeypatch.setenv("HETU_SERVER_TOKEN", "t")
    monkeypatch.setenv("HETU_SERVER_KEYS", "keys")
    assert find_job(None) == ServerJob(("tcp://127.0.0.1:7",), "t", os.path.join("keys", "worker-0.json"))
    other = tmp_path / "other.json"
    write_keys(other, {"something": 1})
    with pytest.raises(ArgumentError, match="without HETU_SERVERS"):
        find_job(other)
