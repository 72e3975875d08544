"""The end of a rank: behind its threads and what it leaves to `atexit`; and its children, which are no ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hetu import job
from hetu.core.errors import ArgumentError
from hetu.dist.comm.guard import ELASTIC, RANK_VARIABLES
from hetu.dist.launch import heturun as launch
from hetu.dist.launch.heturun import Job
from hetu.dist.launch.servers import SERVER_VARIABLES

from .test_launch import DEADLINE, ROOT, heturun

# Each child does something that a rank does, and all ranks meet afterwards.
CHILDREN = """
import atexit, multiprocessing, os, subprocess, sys, threading
import numpy as np
from hetu.core.errors import ArgumentError
from hetu.dist import world
from hetu.ps.wire.environment import place

comm = world()
half, x = comm.split(range(comm.world_size)), np.ones(1)

def refused(call):
    try:
        call()
    except ArgumentError as error:
        os._exit(7 * ("is no rank itself" in str(error)))

def forked(do):
    if not (child := os.fork()):
        do()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def said(what):
    comm.all_reduce(np.ones(1), x)
    print(what, x[0], flush=True)

calls = {
    "barrier": comm.barrier,
    "broadcast": lambda: comm.broadcast(x),
    "group": half.barrier,
    "send": lambda: comm.send(x, to=1 - comm.rank),
    "split": lambda: comm.split((1, 0)),
    "world": lambda: world().barrier(),
    "place": place,
}
comm.broadcast(x)
for name, call in calls.items():
    said(f"{name} {forked(lambda: refused(call))}")
for end in ("sys.exit(0)", "sys.exit(3)", "1 / 0", "os._exit(5)"):
    said(f"{end} {forked(lambda: exec(end))}")
by_fork = multiprocessing.get_context("fork").Process(target=refused, args=(comm.barrier,))
by_fork.start()
by_fork.join()
said(f"process {by_fork.exitcode}")
line = [sys.executable, "-c", "from hetu.dist import world; world()"]
said(f"command {subprocess.run(line, stderr=subprocess.DEVNULL).returncode}")
atexit.register(said, "atexit")
threading.Thread(target=lambda: (threading.main_thread().join(), said("thread"))).start()
if not os.fork():
    atexit.unregister(said)  # and so the child comes to the end of the script, and to nothing else
else:
    os.wait()
"""
ENDS = {
    **dict.fromkeys(("barrier", "broadcast", "group", "send", "split", "world", "place"), 7),
    **{"sys.exit(0)": 0, "sys.exit(3)": 3, "1 / 0": 1, "os._exit(5)": 5, "process": 7, "command": 1},
}
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


@needs_fork
def test_what_a_rank_starts_is_no_rank_and_threads_and_atexit_may_still_communicate(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CHILDREN)
    run = heturun("-w", 2, "--deadline", 60, "python", script)
    assert run.returncode == 0, run.stderr
    for rank in (0, 1):
        lines = [line.removeprefix(f"[rank {rank}] ") for line in run.stdout.splitlines() if f"rank {rank}]" in line]
        assert lines == [*(f"{name} {code} 2.0" for name, code in ENDS.items()), "thread 2.0", "atexit 2.0"]


def test_a_rank_that_does_not_end_behind_its_script_is_waited_for_as_long_as_leave_says(tmp_path):
    (script := tmp_path / "train.py").write_text(
        "import atexit, time\nfrom hetu.dist import world\n"
        "if world().rank:\n    atexit.register(time.sleep, 600)\n"
        "else:\n    atexit.register(print, 'before')\n"
    )
    run = heturun("-w", 2, "--leave", 2, "python", script)
    assert (run.returncode, run.stdout) == (1, "[rank 0] before\n")
    assert "missing: rank 1 is at no line of the script, which has not begun or goes on in threads" in run.stderr
    assert "heturun --leave S waits for S seconds" in run.stderr


DRIFTED = """
import numpy as np
import hetu as ht
from hetu.ps.wire.environment import place
from hetu.strategies import ParameterServer
x = ht.placeholder("x", (None, 3))
loss = ht.mean(ht.square(ht.nn.Linear(3, 3)(x)))
ex = ht.Executor([loss, ht.optim.SGD(0.1).minimize(loss)], strategy=ParameterServer())
for step in range(3):
    ex.run({"x": np.full((6, 3), place().rank if step == 2 else 9, "f4")})
print("end")
"""


def test_a_step_that_servers_refuse_as_a_worker_leaves_them_is_an_error_of_the_script(tmp_path):
    (script := tmp_path / "train.py").write_text(DRIFTED)
    run = heturun("-w", 2, "-s", 1, "python", script)
    assert (run.returncode, sorted(run.stdout.splitlines())) == (1, ["[rank 0] end", "[rank 1] end"])
    first, *_, fix = run.stderr.splitlines()
    assert "RefusedError: worker" in first and "at the end of clock 2; either may be wrong" in first
    assert "fix: feed all ranks the whole batch" in fix


@pytest.mark.parametrize("stdout", ["sys.stdout.close()", "sys.stdout = None"])
def test_a_script_may_close_its_output(tmp_path, stdout):
    (script := tmp_path / "train.py").write_text(f"import sys\n{stdout}\n")
    assert launch.run(Job(1, (str(script),))) == 0


def python(text, **variables):
    line = [sys.executable, "-c", text]
    return subprocess.run(
        line, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def test_an_error_of_what_a_process_does_as_it_ends_is_one_of_the_script():
    run = python(
        "import atexit\nfrom hetu import job\n"
        "job.endings += [lambda: print('last'), lambda: 1 / 0, lambda: print('first')]\n"
        "atexit.register(print, 'before', end=' ')\n"
    )
    assert (run.returncode, run.stdout) == (1, "before first\n") and run.stderr.endswith("division by zero\n")


@needs_fork
def test_a_forked_process_has_nothing_to_leave():
    run = python(
        "import os\nfrom hetu import job\njob.endings.append(lambda: print('left'))\nif os.fork():\n    os.wait()\n"
    )
    assert (run.returncode, run.stdout) == (0, "left\n")


@needs_fork
def test_a_process_forked_before_mpi_starts_may_be_the_rank():
    run = python(
        "import os\nimport numpy as np\nfrom hetu.dist.comm.process import process\n"
        "if os.fork():\n    os.wait()\nelse:\n    print(process.note((0, 1), 'barrier', np.empty(0))[:2])\n",
        PMI_SIZE="2",
    )
    assert run.returncode == 0 and run.stdout, run.stderr


def test_a_child_belongs_to_no_job(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "3")
    assert job.job_size() == 3 and not job.is_child()
    monkeypatch.setenv(job.RANK_PROCESS, str(os.getpid()))
    assert job.job_size() == 3
    job.refuse_child()
    monkeypatch.setenv(job.RANK_PROCESS, str(os.getppid()))
    assert (job.job_size(), job.told_size()) == (1, 3)
    with pytest.raises(ArgumentError, match=f"by process {os.getppid()}, a rank, and is no rank itself") as caught:
        job.refuse_child()
    assert "heturun starts it as a job of its own" in str(caught.value)


def test_a_job_that_a_rank_starts_is_told_nothing_of_the_outer_one(tmp_path, monkeypatch, capfd):
    for name in (*RANK_VARIABLES, *job.SIZE_VARIABLES, job.RANK_PROCESS, ELASTIC, *SERVER_VARIABLES):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (script := tmp_path / "train.py").write_text(
        "from hetu.dist import world\nfrom hetu.ps.wire.environment import has_servers\nprint(world(), has_servers())\n"
    )
    assert launch.run(Job(1, (str(script),))) == 0
    assert capfd.readouterr().out == "<SerialComm rank 0 of 1> False\n"
