"""The file of hosts: what it may say, that what is wrong in it is named, and jobs over a stand-in for ssh."""

from __future__ import annotations

import ast
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hetu.core.errors import ArgumentError
from hetu.dist.launch import cluster, options
from hetu.dist.launch import heturun as launch
from hetu.dist.launch.cluster import Host, parse_cluster, read_cluster
from hetu.dist.launch.mpiexec import mpiexec_options

from .test_launch import WAITING, end_of_the_launcher, needs_pidfd

ROOT = Path(__file__).parents[2]
DEADLINE = 60  # seconds
YAML = """
hosts:
  - name: node2
    workers: 2
  - {name: localhost, workers: 1, servers: 2, chief: true}  # rank 0 runs here
"""
HOSTS = (Host("localhost", 1, 2, True), Host("node2", 2))


def test_yaml_and_json_say_the_same(tmp_path):
    rows = [{"name": "localhost", "workers": 1, "servers": 2, "chief": True}, {"name": "node2", "workers": 2}]
    for text in (YAML, json.dumps({"hosts": rows}), "\ufeff" + YAML):
        (tmp_path / "cluster.yml").write_text(text, encoding="utf-8")
        assert read_cluster(tmp_path / "cluster.yml") == HOSTS  # the chief comes first: it has rank 0


def test_the_example_in_the_documentation_is_right():
    for text in (cluster.__doc__, options.EPILOG):
        lines = text.splitlines()
        first = next(i for i, line in enumerate(lines) if line.strip() == "hosts:")
        example = [line for line in lines[first:] if line.startswith(lines[first][:2])]
        assert parse_cluster("\n".join(example[:8])) == (Host("node1", 4, 1, True), Host("node2", 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"hosts:\n  - {name: a\n", r"cluster.yml, line 3: no YAML \(expected ',' or '}', but got"),
        (b"hosts:\n\t- a\n", "line 2: no YAML"),
        (b"\xff\xfe\xff", "no YAML"),
        (b"hosts: []\n---\nhosts: []\n", "line 2: no YAML .but found another document"),
        (b"[" * 2_000, "no YAML"),
        (b"#" * 70_000, "more than 64 KiB"),
        (b"", "cluster.yml, the cluster is not made of keys"),
        (b"- a\n", "line 1: the cluster is not made of keys"),
    ],
    ids=str,
)
def test_unreadable(tmp_path, content, message):
    if content is not None:
        (tmp_path / "cluster.yml").write_bytes(content)
    with pytest.raises(ArgumentError, match=message):
        read_cluster(tmp_path / "cluster.yml")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "line 1: the cluster has no list of hosts"),
        ("- workers: 1", "line 2: a host without a name"),
        ("- node1", "line 2: a host is not made of keys and values"),
        ("- name: a\n  wokers: 1", r"line 3: a host has an unknown key 'wokers'(.|\n)*did you mean 'workers'"),
        ("- name: a\n  workers: 1\n  workers: 2", "line 4: a host has two keys 'workers'"),
        ("- name: a\n  [b]: 1", "line 3: a host has an unknown key"),
        ("- name: a\n  workers: -1", "line 3: host 'a': workers is -1(.|\n)*whole number from 0"),
        ("- name: a\n  workers: true", "line 3: host 'a': workers is True"),
        ("- name: a\n  workers: many", "line 3: host 'a': workers is 'many'"),
        ("- name: a\n  chief: 1", "line 3: host 'a': chief is 1(.|\n)*true or false"),
        ("- name: 7", "line 2: host 7: name is 7"),
        ("- name: a b", "line 2: 'a b' is no name of a host"),
        ("- name: -x", "line 2: '-x' is no name of a host"),
        ("- name: !!python/object/apply:os.system [exit]", "line 2: no YAML .could not determine a constructor"),
        ("- name: &a [*a]", "line 2: no YAML"),
        ("- name: 2020-99-99", "no YAML"),
        ("- {name: a, workers: 1}\n- {name: a, workers: 1}", "listed twice"),
        ("- {name: a, workers: 1}\n- {name: b, workers: 1}", "0 chiefs"),
        ("- {name: a, workers: 1, chief: true}\n- {name: b, chief: true}", "2 chiefs"),
        ("- {name: a, servers: 1}", "no host has a worker"),
    ],
)
def test_wrong(rows, message):
    with pytest.raises(ArgumentError, match=message):
        parse_cluster("hosts:\n" + "\n".join(f"  {line}" for line in rows.splitlines()))


def test_unknown_keys_beside_the_hosts():
    with pytest.raises(
        ArgumentError, match=r"line 2: the cluster has an unknown key 'host'(.|\n)*did you mean 'hosts'"
    ):
        parse_cluster("\nhost: []\n")


def test_a_small_file_cannot_become_a_large_value():
    """Each line names the one before ten times."""
    laughs = [f"    a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10) if i else 'ha'}]" for i in range(30)]
    with pytest.raises(ArgumentError, match="unknown key") as caught:
        parse_cluster("hosts:\n  - name: a\n" + "\n".join(laughs))
    assert len(str(caught.value)) < 1000
    deep = "[" * 30 + ", ".join(["&x [1]", *["*x"] * 9]) + "]" * 30
    with pytest.raises(ArgumentError, match="line 2: host") as caught:
        parse_cluster(f"hosts:\n  - name: {deep}")
    assert len(str(caught.value)) < 1000


def test_only_safe_yaml_is_named():
    """Other loaders of PyYAML make any Python object that a file asks for."""
    texts = {file: file.read_text("utf-8") for file in sorted((ROOT / "hetu").rglob("*.py"))}
    users = {file: text for file, text in texts.items() if "yaml" in text}
    assert users
    for file, text in users.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "yaml":
                assert node.attr in SAFE, f"{file}:{node.lineno} yaml.{node.attr}"
            assert not (isinstance(node, ast.ImportFrom) and node.module == "yaml"), f"{file}: import yaml as a whole"


SAFE = {"SafeLoader", "safe_load", "YAMLError", "Mark", "MarkedYAMLError", "SequenceNode", "Node"}


def test_what_mpiexec_is_told():
    here = socket.gethostname()  # others could not call "localhost" back
    assert mpiexec_options(HOSTS, False, ["A"]) == ["-hosts", f"{here}:1,node2:2"]
    assert mpiexec_options(HOSTS, True, ["A", "B"]) == ["--host", f"{here}:1,node2:2", "-x", "A", "-x", "B"]
    assert (mpiexec_options((), False, ["A"]), mpiexec_options((), True, ["A"])) == ([], ["-x", "A"])


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    path = tmp_path / "cluster.yml"
    path.write_text(YAML)
    assert launch.main(["-c", str(path), "--dry-run", "--consistency", "ssp:3", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "# node2: 2 workers, 0 servers\n" in shown and "OMP_NUM_THREADS=4\n" in shown
    assert f"-hosts {socket.gethostname()}:1,node2:2 -n 3 " in shown and "# 2 servers (consistency=ssp:3): " in shown
    with pytest.raises(SystemExit):
        launch.main(["-c", str(path), "-w", "2", "train.py"])
    assert "leave -w, -s and -H out" in capsys.readouterr().err
    assert launch.main(["-w", "3", "-s", "1", "-H", "localhost,node2", "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert "# localhost: 2 workers, 1 servers, chief\n# node2: 1 workers, 0 servers\n" in shown
    for wrong, said in {"a,": "'' is no name of a host", "a,a": "'a' is listed twice"}.items():
        with pytest.raises(SystemExit):
            launch.main(["-H", wrong, "train.py"])
        assert said in capsys.readouterr().err
    path.write_text("hosts:\n  - name: localhost\n    workes: 1\n")
    with pytest.raises(SystemExit):
        launch.main(["-c", str(path), "train.py"])
    assert f"heturun: error: {path}, line 3: a host has an unknown key 'workes'\n  fix: " in capsys.readouterr().err


# -- several hosts -----------------------------------------------------------------------------------------------------

# Stand-ins that note what they are asked and run it here.
SSH = """#!/bin/sh
# ssh [options] HOST COMMAND...
while :; do case "$1" in -*) shift;; *) break;; esac; done
echo "$1" >> "$HETU_TEST_HOSTS"
shift
exec sh -c "$*"
"""
SRUN = """#!/bin/sh
# srun -N NODES [options] COMMAND...
while :; do case "$1" in -N) nodes=$2; shift 2;; -n|--input) shift 2;; -*) shift;; *) break;; esac; done
for node in $(seq 0 $((nodes - 1))); do
    echo "task$node" >> "$HETU_TEST_HOSTS"
    SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
done
wait
"""
ALLOCATION = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_NTASKS": "2",
}


@pytest.fixture
def hosts(tmp_path):
    """Starts heturun in `tmp_path` on hosts that stand-ins pretend to reach; `reached` are their names."""

    class Hosts:
        def prepare(self, options, script, **variables):
            """The command, and where and with what it is to run."""
            (tmp_path / "train.py").write_text(script)
            for name, text in {"ssh": SSH, "srun": SRUN}.items():
                (tmp_path / name).write_text(text)
                (tmp_path / name).chmod(0o700)
            added = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
            added["HETU_TEST_HOSTS"] = str(tmp_path / "hosts")
            line = [sys.executable, "-m", "hetu.dist.launch.heturun", *options, "python", "train.py"]
            return line, {"cwd": tmp_path, "env": os.environ | added | variables}

        def listed(self, *rows):
            """The options for a file of these hosts."""
            (tmp_path / "cluster.yml").write_text("hosts:\n" + "\n".join(f"  - {row}" for row in rows))
            return ["-c", "cluster.yml"]

        def __call__(self, options, script, **variables):
            line, where = self.prepare(options, script, **variables)
            return subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE, **where)

        @property
        def reached(self):
            return sorted((tmp_path / "hosts").read_text().split())

    yield Hosts()
    assert not list(tmp_path.glob(".heturun-*"))  # the run directory, which hosts share


needs_posix = pytest.mark.skipif(os.name == "nt", reason="the stand-ins are shell scripts")


@needs_posix
def test_ranks_and_servers_over_ssh(hosts):
    script = """
import numpy as np
from hetu.dist import world
from hetu.ps.wire import environment
comm, client = world(), environment.connect()
total = np.array([comm.rank + 1])
comm.all_reduce(total, total)
client.ping()
print(comm, total[0], environment.os.environ["HETU_SERVERS"].count("tcp://127"))
"""
    rows = "{name: nodeB, workers: 2}", "{name: localhost, workers: 1, servers: 2, chief: true}"
    job = hosts(hosts.listed(*rows), script)
    assert (job.returncode, job.stderr) == (0, "")
    assert sorted(job.stdout.splitlines()) == [f"[rank {r}] <MPIComm rank {r} of 3> 6 0" for r in range(3)]
    assert hosts.reached == ["nodeB"]


SERVED = """
import os
from pathlib import Path
import numpy as np
from hetu.dist import world
from hetu.ps import Parameter, server_function
from hetu.ps.wire import environment

@server_function
def end_there(table):
    if "PMI_RANK" in os.environ and not Path("ended").exists():
        Path("ended").touch()
        os.kill(os.getpid(), 9)
    return [0], table[:1]

if __name__ == "__main__":
    comm, client = world(), environment.connect()
    tables = [f"t{number}" for number in range(len(client.transport.links))]
    table = Parameter((6, 1), sparse=True, rule="add", reduce="sum")
    client.create(dict.fromkeys(tables, table), dict.fromkeys(tables, np.zeros((6, 1))))
    client.push_rows(tables[-1], np.arange(6), np.full((6, 1), comm.rank + 1.0, "float32"))
    client.clock(snapshot=comm.rank == 0).wait()
    if Path("train.py").stat().st_mode & 1:
        client.call(tables[-1], "end_there").wait()
    print(client.pull_rows(tables[-1], np.arange(6)).wait().ravel().tolist(), os.environ["HETU_SERVERS"])
"""
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is this machine on Linux only")
HERE = socket.gethostname()


@pytest.mark.nightly
@needs_linux
def test_servers_on_other_hosts(hosts):
    job = hosts(["-w", "2", "-s", "3", "-H", f"{HERE},127.0.0.2,127.0.0.3", "--snapshots", "kept"], SERVED)
    assert (job.returncode, job.stderr) == (0, "")
    for rank, line in enumerate(sorted(job.stdout.splitlines())):
        found, addresses = line.removeprefix(f"[rank {rank}] ").rsplit(" ", 1)
        assert found == str([3.0] * 6)
        places = [address.rpartition(":")[0] for address in addresses.split(",")]
        assert places == [f"tcp://{name}" for name in (HERE, "127.0.0.2", "127.0.0.3")]
    assert hosts.reached == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]  # a server and a rank, and a server


@pytest.mark.nightly
@needs_linux
def test_a_server_that_is_killed_on_another_host_runs_again_there(hosts, tmp_path):
    options = ["-s", "2", "-H", f"{HERE},127.0.0.2", "--snapshots", "kept", "--imports", "train"]
    line, where = hosts.prepare(options, SERVED)
    (tmp_path / "train.py").chmod(0o755)  # as a sign
    job = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE, **where)
    assert job.returncode == 0, job.stderr
    said = (
        "heturun: server 1 on 127.0.0.2 was killed by SIGKILL and runs again, from its newest snapshot in kept/server-1"
    )
    assert said in job.stderr
    assert job.stdout.startswith(f"{[1.0] * 6} ")
    assert hosts.reached == ["127.0.0.2", "127.0.0.2"]


@needs_linux
def test_a_host_that_is_not_reached_ends_the_job_before_it_begins(hosts, tmp_path):
    line, where = hosts.prepare(["-s", "2", "-H", f"{HERE},127.0.0.2"], SERVED)
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'ssh: no route to host' >&2\nexit 255\n")
    job = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE, **where)
    assert (job.returncode, job.stdout) == (2, "")
    assert "no route to host" in job.stderr and "error: server 1 on 127.0.0.2 has ended" in job.stderr


FAILS = [pytest.param("1 / 0", 1, "ZeroDivisionError", marks=pytest.mark.nightly)]  # notes it where a guard does


@needs_posix
@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [*FAILS, ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL")],
)
def test_a_rank_that_fails_on_another_host_ends_all(hosts, ending, code, said):
    script = f"""
import os
from hetu.dist import world
comm = world()
comm.barrier()
if comm.rank == 1:
    {ending}
comm.barrier()
"""
    job = hosts(hosts.listed("{name: nodeA, workers: 1, chief: true}", "{name: nodeB, workers: 1}"), script)
    assert job.returncode == code
    assert job.stderr.splitlines()[-1].startswith(f"[rank 1] {said}")
    assert hosts.reached == ["nodeA", "nodeB"]


@needs_pidfd
def test_the_death_of_the_launcher_ends_the_ranks_on_other_hosts(hosts):
    """Two ranks, their guards, mpiexec with two helpers, and the sweep."""
    line, where = hosts.prepare(
        hosts.listed("{name: nodeA, workers: 1, chief: true}", "{name: nodeB, workers: 1}"), WAITING.format("")
    )
    assert end_of_the_launcher(line, signal.SIGKILL, 8, **where) == -9
    assert hosts.reached == ["nodeA", "nodeB"]


@needs_posix
def test_ranks_on_the_nodes_of_a_slurm_allocation(hosts):
    """mpiexec starts its helpers with srun and finds the nodes itself."""
    script = "from hetu.dist import world\nworld().barrier()\nprint(world())\n"
    job = hosts(["-w", "2"], script, **ALLOCATION)
    assert (job.returncode, job.stderr) == (0, "")
    assert sorted(job.stdout.splitlines()) == [f"[rank {r}] <MPIComm rank {r} of 2>" for r in (0, 1)]
    assert hosts.reached == ["task0", "task1"]
