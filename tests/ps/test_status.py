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
from hetu.ps.wire.handshake import write_keys
from hetu.ps.wire.status import ServerJob, ask, find_job
from hetu.ps.wire.view import as_html, as_text, looks_at, since, table_rows

from .network import TOKEN, connect, options


@pytest.fixture(scope="module")
def server(meaning):
    with ServerProcess(options("ssp:3", 2)) as server:
        yield server


@pytest.fixture(scope="module")
def job_file(server, tmp_path_factory, meaning):
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
            for name in ("seconds", "silent", "requests", "handled"):
                status.pop(name)
        assert {**before[0], **found} == found
    assert "ssp:3, up" in shown and "s, 1 table, 4.23 kB" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert lines[2][:3] == ["0", "2", "0"] and lines[3] == ["1", "0", "2", "not", "here", "yet"]
    assert ["lead", "2,", "largest", "2", "(allowed", "4);", "0", "requests", "wait"] in lines
    assert ["t", "8", "x", "2", "add", "4.23", "kB", "1", "75.0%"] in lines


def look(**changed):
    """A server of one worker, seen for a second."""
    table = {"name": "t", "start": 0, "rows": 5, "columns": 2, "dtype": "float32", "rule": "sgd", "bytes": 1000}
    table |= {"joined": [], "grown": None, "placed": False}
    dense = {**table, "name": "b", "rows": 1, "columns": 100, "bytes": 2000, "asked": 0, "fetched": 0, "hot": []}
    said = {
        "consistency": "bsp", "clocks": {"0": 7}, "silent": {"0": 0.5}, "lead": 0, "widest": 1, "parked": 2,
        "partners": [],
        "bytes": 3000, "requests": {"push": 10}, "received": 4000, "sent": 0, "handled": {"0": 98, "40": 2},
        "seconds": 1.0, "tables": 2, "restored": None,
        "largest": [{**table, "asked": 8, "fetched": 2, "hot": [(0, 9), (4, 3)]},
                    dense],
    }  # fmt: skip
    return said | changed


def test_what_is_shown_of_several_servers():
    """Rows are dealt in turn: the second of three in the second part of a table is row 3 of all."""
    [first, _] = look()["largest"]
    second = {**first, "start": 5, "rows": 4, "hot": [(1, 20)], "asked": 0, "fetched": 0}
    restored = {"clock": 3, "age": 1.5}
    now = look(), look(largest=[second], consistency="ssp:2", restored=restored)
    before = [{**one, "seconds": 0.0, "requests": {}, "received": 0, "handled": {"0": 90}} for one in now]
    looks = looks_at(("tcp://a:1", "tcp://b:2"), before, now)
    assert as_text(looks).splitlines() == [
        "tcp://a:1  bsp, up 1 s, 2 tables, 3 kB",
        "  worker  clock  behind  silent",
        "       0      7       0   0.5 s",
        "  lead 0, largest 1 (allowed 1); 2 requests wait",
        "  10 requests/s, 4 kB/s in, 0 B/s out",
        "  a request takes 1 us, 99 % at most 1 ms",
        "",
        "tcp://b:2  ssp:2, up 1 s, 2 tables, 3 kB",
        "  worker  clock  behind  silent",
        "       0      7       0   0.5 s",
        "  goes on from a snapshot at clock 3, which was 1.5 s old",
        "  lead 0, largest 1 (allowed 3); 2 requests wait",
        "  10 requests/s, 4 kB/s in, 0 B/s out",
        "  a request takes 1 us, 99 % at most 1 ms",
        "",
        "table   size  rule  memory  servers  fresh  updated most",
        "t      9 x 2  sgd     2 kB        2  75.0%  3 (20), 0 (9), 8 (3)",
        "b        100  sgd     2 kB",
    ]
    assert as_html(looks).count("<table") == 3 and "3 (20), 0 (9), 8 (3)" in as_html(looks)
    tables = [{**part, "joined": [["a", 3], ["b", 5], ["c", 1]]} for part in (first, second)]
    joined = looks_at(("tcp://a:1", "tcp://b:2"), before, (look(largest=tables[:1]), look(largest=tables[1:])))
    assert as_text(joined).splitlines()[-1].endswith("b 0 (20), a 0 (9), c 0 (3)")
    none = looks_at(("tcp://a:1",), before[:1], [look(largest=[])])  # as of ranks that only average with partners
    assert as_text(none).splitlines()[-1].startswith("  a request") and as_html(none).count("<table") == 1
    again = since(look(seconds=9.0), look())  # after a restart
    assert again["requests_per_second"] == 10


def test_rows_that_are_updated_most_are_seen():
    with (
        ServerProcess(options("asp", 1)) as one,
        ServerProcess(options("asp", 1)) as two,
        connect([one.address, two.address]) as client,
    ):
        client.create({"t": Parameter((300_000, 1), sparse=True)}, {"t": np.zeros((300_000, 1))})
        for ids in ([7, 8, 11], [8, 11], [11]):
            client.push_rows("t", np.array(ids), np.ones((len(ids), 1), "float32")).wait()
        job = ServerJob((one.address, two.address), TOKEN)
        rows = table_rows(looks_at(job.addresses, *[ask(job)] * 2))
    assert rows[1] == ("t", "300,000 x 1", "sgd", "3.91 MB", "2", "", "11 (3), 8 (2), 7 (1)")


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


def test_how_rows_of_tables_without_a_bound_come_and_go_is_shown():
    grown = {"held": 750, "hits": 30, "on_disk": 3, "misses": 10, "made": 900, "evicted": 150, "dropped": 4}
    parts = [{**look()["largest"][0], "rows": 1000, "hot": [], "grown": grown} for _ in range(2)]
    looks = looks_at(("a", "b"), *[[look(largest=[part]) for part in parts]] * 2)
    told = as_text(looks).splitlines()
    assert told[-2:] == [
        "without a bound   rows  full  found  in memory   made  gone  dropped",
        "t                1,500   75%  75.0%      90.0%  1,800   300        8",
    ]
    assert "1,500" in as_html(looks)
