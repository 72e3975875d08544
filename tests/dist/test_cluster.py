"""The file of hosts: what it may say, and that what is wrong in it is named."""

from __future__ import annotations

import json
import socket

import pytest

from hetu.dist import launch
from hetu.dist.cluster import Host, mpiexec_options, parse_cluster, read_cluster
from hetu.errors import ArgumentError

TOML = """
[[hosts]]
name = "node2"
workers = 2
[[hosts]]
name = "localhost"
workers = 1
servers = 2
chief = true
"""
HOSTS = (Host("localhost", 1, 2, True), Host("node2", 2))


def test_toml_and_json_say_the_same(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    assert read_cluster(tmp_path / "a.toml") == HOSTS  # the chief comes first: it has rank 0
    rows = [{"name": "localhost", "workers": 1, "servers": 2, "chief": True}, {"name": "node2", "workers": 2}]
    for name in ("a.json", "cluster.yml"):
        (tmp_path / name).write_text(json.dumps({"hosts": rows}))
        assert read_cluster(tmp_path / name) == HOSTS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("cluster.yml", "hosts:\n  - name: a\n", r"not in the JSON form of YAML(.|\n)*\.toml"),
        ("a.toml", "[[hosts]\n", "no TOML"),
        ("a.json", "{", "no JSON"),
        ("none.toml", None, "No such file"),
    ],
)
def test_unreadable(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=message):
        read_cluster(tmp_path / name)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no list of hosts"),
        ([{"workers": 1}], "without a name"),
        ([{"name": "a", "wokers": 1}], "did you mean 'workers'"),
        ([{"name": "a", "workers": -1}], "workers = -1"),
        ([{"name": "a", "workers": True}], "workers = True"),
        ([{"name": "a b", "workers": 1}], "no name of a host"),
        ([{"name": "-x", "workers": 1}], "no name of a host"),
        ([{"name": "a", "workers": 1}, {"name": "a", "workers": 1}], "listed twice"),
        ([{"name": "a", "workers": 1}, {"name": "b", "workers": 1}], "0 chiefs"),
        ([{"name": "a", "workers": 1, "chief": True}, {"name": "b", "chief": True}], "2 chiefs"),
        ([{"name": "a", "servers": 1}], "no host has a worker"),
    ],
)
def test_wrong(rows, message):
    with pytest.raises(ArgumentError, match=message):
        parse_cluster({"hosts": rows})


def test_what_mpiexec_is_told():
    here = socket.gethostname()  # others could not call "localhost" back
    assert mpiexec_options(HOSTS, False, ["A"]) == ["-hosts", f"{here}:1,node2:2"]
    assert mpiexec_options(HOSTS, True, ["A", "B"]) == ["--host", f"{here}:1,node2:2", "-x", "A", "-x", "B"]
    assert mpiexec_options((Host("localhost", 4),), False, []) == []


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "count_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "cluster.toml"
    path.write_text(TOML)
    assert launch.main(["-c", str(path), "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "# node2: 2 workers, 0 servers\n" in shown and "OMP_NUM_THREADS=4\n" in shown
    assert f"-hosts {socket.gethostname()}:1,node2:2 -n 3 " in shown
    with pytest.raises(SystemExit):
        launch.main(["-c", str(path), "-w", "2", "train.py"])
    assert "leave -w and -s out" in capsys.readouterr().err
    path.write_text(TOML.replace("workers = 2", "workers = 2\nservers = 1"))
    with pytest.raises(SystemExit):
        launch.main(["-c", str(path), "train.py"])
    assert "servers on node2, which is not this host" in capsys.readouterr().err
