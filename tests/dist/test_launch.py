"""heturun with real MPI ranks: the contract of communicators, and no ending of one rank that leaves others behind."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest

from hetu.core.errors import ArgumentError
from hetu.dist.comm import guard
from hetu.dist.comm.recorder import RankState
from hetu.dist.launch import boot, mpiexec, options, servers, watch
from hetu.dist.launch import heturun as launch

from ..pairs import nightly

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
DEADLINE = 300  # seconds; a busy machine is slow, and what hangs hangs longer


def heturun(*arguments, **options):
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", *map(str, arguments)]
    asked = {"cwd": ROOT, "timeout": DEADLINE, **options}
    return subprocess.run(line, capture_output=True, text=True, check=False, **asked)


@pytest.mark.parametrize("n", [*nightly([[1], [2]]), 3])
def test_contract(n):
    job = heturun("-w", n, "python", HERE / "contract.py")
    assert (job.returncode, job.stderr) == (0, "")
    assert f"checks on {n} ranks of {'SerialComm' if n == 1 else 'MPIComm'}" in job.stdout


# Writes down what a rank has in shared memory, and the file of MPICH's proxy above it.
SHARED = (
    "from hetu.dist.comm import guard; "
    "open(f'{}/memory.{{comm.rank}}', 'w').writelines(f'{{name}}\\n' for name in guard.shared_files())"
)


def assert_nothing_is_shared(folder, ranks=2):
    """Of what the ranks had in shared memory, nothing is left."""
    noted = [(folder / f"memory.{rank}").read_text() for rank in range(ranks)]
    names = {line.removesuffix(" (deleted)") for line in "".join(noted).splitlines()}
    assert {name.split("_")[0] for name in names} >= {"/tmp/hydra"} or mpiexec.is_open_mpi(mpiexec.find_mpiexec())
    assert any(name.startswith("/dev/shm/") for name in names)
    assert not [name for name in names if Path(name).exists()]


# Every script ends badly on rank 1 while rank 0 waits for it.
ENDINGS = {
    "raise ZeroDivisionError('mine')": (1, "[rank 1] ZeroDivisionError: mine"),
    "sys.exit(3)": (3, "[rank 1] sys.exit(3)"),
    "os._exit(0)": (71, "[rank 1] ended with code 0 before its script did, as os._exit does"),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, "[rank 1] killed by SIGKILL (kill -9, or the system when memory"),
    "os.kill(os.getppid(), signal.SIGKILL); comm.barrier()": (137, "[rank 1] its guard, process "),
    "ctypes.string_at(0)": (139, 'train.py", line 5 in <module>'),
    "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); bytes(1 << 31)": (1, "[rank 1] MemoryError"),
    "sys.exit(0)": (1, "fix: all ranks must call the same collectives"),
    "comm.deadline = 0.2; comm.barrier(); comm.barrier()": (1, "fix: all ranks must call the same collectives"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("ending", "code", "last"), [(k, *v) for k, v in ENDINGS.items()], ids=ENDINGS)
def test_bad_ending(tmp_path, ending, code, last):
    script = tmp_path / "train.py"
    endless = "while True:\n    pass\n" if "deadline" in ending else ""
    script.write_text(
        "import ctypes, os, resource, signal, sys\n"
        f"from hetu.dist import world; comm = world(); {SHARED.format(tmp_path)}\ncomm.barrier()  # both wrote\n"
        f"if comm.rank == 1:\n    {ending}\n"
        f"comm.barrier()\n{endless}"
    )
    job = heturun("-w", 2, "python", script)
    assert job.returncode == code, job.stderr
    report = job.stderr.splitlines()
    assert last in report[-1]
    if "Error" in ending:
        assert report[-2:-1] == ["[rank 1]     raise ZeroDivisionError('mine')"]
    assert_nothing_is_shared(tmp_path)


@pytest.mark.parametrize(
    ("given", "told"), [(256, (1, "sys.exit(256)")), (-1, (255, "sys.exit(-1)")), ("no data", (1, "no data"))]
)
def test_what_a_script_exits_with_is_a_code_that_says_that_it_failed(monkeypatch, given, told):
    monkeypatch.setattr(boot, "run_script", lambda arguments: sys.exit(given))
    assert boot.run([]) == told


def test_a_signal_that_ends_a_rank_is_named(capsys):
    assert guard.report("", 1, -signal.SIGTERM) == 128 + signal.SIGTERM
    assert capsys.readouterr().err == "[rank 1] killed by SIGTERM\n"


JOINING = """
import mmap, os, runpy, sys, tempfile
guard = runpy.run_path(sys.argv[1])
def shared():
    file = tempfile.NamedTemporaryFile(dir="/dev/shm", delete=False)
    os.truncate(file.name, 4096)
    return file, mmap.mmap(file.fileno(), 4096)
of_the_user = shared()
with guard["noting_shared_files"]():
    of_mpi = shared()
    print(of_the_user[0].name, of_mpi[0].name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="memory has names on Linux")
def test_what_a_rank_shares_that_is_ended_on_its_way_into_mpi_is_removed_and_nothing_of_the_user(tmp_path):
    known = os.environ | {guard.RUN_DIRECTORY: str(tmp_path), "PMI_RANK": "1"}
    line, pipe = [sys.executable, "-c", JOINING, guard.__file__], subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=known) as rank:
        mine, of_mpi = map(Path, rank.stdout.readline().split())
        guard.note_joining(str(tmp_path))
        rank.kill()
    guard.remove_shared_files(str(tmp_path))
    assert mine.exists() and not of_mpi.exists()
    mine.unlink()


def test_a_process_that_a_rank_has_left_does_not_hold_the_job(tmp_path, monkeypatch, capfd):
    """mpiexec would pass on what that prints, and so wait for it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import subprocess\nfrom hetu.dist import world\n"
        "if world().rank:\n    print(subprocess.Popen(['sleep', '6000']).pid, flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert launch.run(launch.Job(2, (str(script),), leave=1.0)) == 0
    said = capfd.readouterr()
    left = f"sleep 6000 (process {said.out.split()[-1]})"
    assert said.err.splitlines()[-2:] == [  # behind what a busy machine says
        f"heturun: all ranks have ended, but what they started runs, for 1 s more: {left}",
        f"heturun: killed, as all ranks have ended: {left}",
    ]


def test_failure_before_mpi_starts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nif os.environ['PMI_RANK'] == '1':\n    import nowhere\n"
        "from hetu.dist import world\nworld().barrier()\n"
    )
    job = heturun("-w", 2, "python", script)
    assert job.returncode == 1
    assert job.stderr.splitlines()[-1] == "[rank 1] ModuleNotFoundError: No module named 'nowhere'"


def under_mpiexec(*arguments, **variables):
    """Two ranks that heturun has not started."""
    line = [mpiexec.find_mpiexec(), "-n", "2", sys.executable, *map(str, arguments)]
    paths = os.environ | {"PYTHONPATH": str(ROOT)} | launch.environment(2, cores=1) | variables
    return subprocess.run(line, env=paths, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)


@pytest.mark.nightly
def test_training_under_a_bare_mpiexec():
    job = under_mpiexec("-m", "tests.dist.train", "zero1", "mlp")
    assert (job.returncode, job.stderr) == (0, "")
    assert all(f"rank {r}: 8 losses equal those of one process" in job.stdout for r in (0, 1))


SHARDED = """
import numpy as np
from hetu.data import ArrayDataset, DataLoader  # before anything of hetu.dist is loaded
rows = [str(rows.tolist()) for (rows,) in DataLoader(ArrayDataset(np.arange(8)), batch_size=4, shard=True)]
print(" ".join(rows) + "\\n", end="")  # at once, as both ranks write to one stream
"""


def test_a_loader_knows_its_rank_under_a_bare_mpiexec(tmp_path):
    (script := tmp_path / "rows.py").write_text(SHARDED)
    job = under_mpiexec(script)
    assert (job.returncode, sorted(job.stdout.splitlines())) == (0, ["[0, 1] [4, 5]", "[2, 3] [6, 7]"])


def test_a_rank_that_never_joins_under_a_bare_mpiexec_is_waited_for_until_the_deadline(tmp_path):
    """And who waits leaves nothing of what it shares; the other one writes down what that is, and ends."""
    script, process, names = (tmp_path / name for name in ("train.py", "process", "names"))
    process.touch()
    first = "/dev/shm/" if mpiexec.is_open_mpi(mpiexec.find_mpiexec()) else "/dev/shm/mpich"
    script.write_text(
        "import os, time\nfrom pathlib import Path\nfrom hetu.dist import world\nfrom hetu.dist.comm import guard\n"
        f"process, names = Path({str(process)!r}), Path({str(names)!r})\n"
        "if os.environ['PMI_RANK'] == '1':\n"
        f"    while not (found := {{n for n in guard.shared_files(process.read_text() or '0') if {first!r} in n}}):\n"
        "        time.sleep(0.01)\n"
        "    names.write_text('\\n'.join(found))\n    raise SystemExit(3)\n"
        "process.write_text(str(os.getpid()))\nworld()  # in vain\n"
    )
    job = under_mpiexec(script, HETU_DEADLINE="2")
    assert job.returncode and "Timeout (0:00:02)!" in job.stderr and f'"{script}", line 12' in job.stderr
    shared, until = [Path(name) for name in names.read_text().splitlines()], time.monotonic() + DEADLINE
    while any(file.exists() for file in shared):  # whoever removes them has no one to tell
        assert time.monotonic() < until


def test_exception_under_a_bare_mpiexec(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from hetu.dist import world\ncomm = world()\nassert comm.rank == 0, 'mine'\ncomm.barrier()\n")
    job = under_mpiexec(script)
    assert job.returncode == 1 and "AssertionError: mine" in job.stderr


def test_what_an_error_says_is_read_before_the_abort(monkeypatch):
    pytest.importorskip("termios", reason="asks a pipe of POSIX how full it is")
    read, write = os.pipe()
    found = []
    with open(write, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(guard.time, "sleep", lambda _: found.append(os.read(read, 100)))  # the reader's turn
        stream.write("mine")
        guard.until_read()
        guard.until_read()
    os.close(read)
    assert found == [b"mine"]


def descendants(process):
    """The ids of all processes that this one has started, and that these have, as Linux lists them."""
    children = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            children[int(stat.read_text().rpartition(")")[2].split()[1])].append(int(stat.parent.name))
    found = list(children[process])
    for child in found:
        found += children[child]
    return found


def end_of_the_launcher(line, signal_, count, **options):
    """Start a job whose two ranks print, send the launcher the signal, and wait for the end of all of its processes."""
    job = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options)
    try:
        for _ in range(2):
            job.stdout.readline()
        alive = {os.pidfd_open(process) for process in descendants(job.pid)}
        assert len(alive) >= count
        job.send_signal(signal_)
        while alive:
            ended, _, _ = select.select(alive, [], [], DEADLINE)
            assert ended, "a process outlived the launcher"
            for process in ended:
                os.close(process)
            alive -= set(ended)
        return job.wait(DEADLINE)
    finally:
        job.kill()
        job.stdout.close()
        job.wait()


WAITING = """
from hetu.dist import world
comm = world()
{}
print("here", flush=True)
while comm.rank:
    pass
comm.barrier()
"""


needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches foreign processes through Linux' pidfd")


@pytest.mark.sampled(2)
@needs_pidfd
@pytest.mark.parametrize(
    ("signal_", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9), *nightly([(signal.SIGTERM, 130)])]
)
def test_end_of_the_launcher_ends_all_ranks(tmp_path, signal_, code):
    """Two ranks, their guards, mpiexec with a helper, a server, and the sweep; and nothing is left on the disk."""
    script, folder = tmp_path / "train.py", tmp_path / "temporary"
    script.write_text(WAITING.format(SHARED.format(tmp_path)))
    folder.mkdir()
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "2", "-s", "1", "python", str(script)]
    assert end_of_the_launcher(line, signal_, 8, cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)}) == code
    assert not list(folder.glob("heturun-*"))
    assert_nothing_is_shared(tmp_path)


APART = f"""#!{sys.executable}
import os, signal, subprocess, sys
os.mkdir(os.path.join(os.environ["{launch.SESSIONS}"], "session"))
ranks = [
    subprocess.Popen(sys.argv[3:], env=os.environ | {{"PMI_RANK": str(r), "PMI_SIZE": "2"}}, start_new_session=True)
    for r in range(2)
]
def end(*_):
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGKILL)
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
for rank in ranks:
    rank.wait()
"""


@needs_pidfd
@pytest.mark.parametrize(("signal_", "code"), [(signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_so_does_it_where_ranks_are_in_groups_of_their_own(tmp_path, signal_, code):
    """As under Open MPI, whose mpiexec also keeps a directory, which it does not remove if it is killed."""
    script, mpiexec, folder = tmp_path / "train.py", tmp_path / "mpiexec", tmp_path / "temporary"
    script.write_text("print('here', flush=True)\nwhile True:\n    pass\n")
    mpiexec.write_text(APART)
    mpiexec.chmod(0o755)
    folder.mkdir()
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "2", "python", str(script)]
    env = os.environ | {"TMPDIR": str(folder), "HETU_MPIEXEC": str(mpiexec)}
    assert end_of_the_launcher(line, signal_, 6, cwd=ROOT, env=env) == code
    assert not list(folder.iterdir())


def test_hosts_that_do_not_share_the_directory(tmp_path):
    line = [sys.executable, launch.GUARD, "train.py"]
    nowhere = os.environ | {launch.RUN_DIRECTORY: str(tmp_path / "nowhere"), "PMI_RANK": "3"}
    job = subprocess.run(line, env=nowhere, capture_output=True, text=True, timeout=DEADLINE)
    assert job.returncode == 1
    assert job.stderr.startswith("[rank 3] ") and "hosts must share the working directory" in job.stderr


def test_arguments_and_module_path_are_those_of_python(tmp_path):
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    (tmp_path / "train.py").write_text("import sys, beside\nprint(sys.argv[1:], __name__, beside.name)\n")
    job = heturun("-w", 1, "python", tmp_path / "train.py", "--workers", "7")
    assert job.stdout == "['--workers', '7'] __main__ beside\n"
    job = heturun("-w", 1, "python", "-m", "json.tool", "--help")
    assert "json" in job.stdout and job.returncode == 0


def test_threads_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "5")
    few, many = launch.environment(2, cores=8), launch.environment(16, cores=8)
    assert (few["OMP_NUM_THREADS"], many["OMP_NUM_THREADS"]) == ("4", "1")
    assert few["OPENBLAS_NUM_THREADS"] == "5"  # what the user set stays
    assert "MPIR_CVAR_POLLS_BEFORE_YIELD" in many and "MPIR_CVAR_POLLS_BEFORE_YIELD" not in few


def test_command_line(capsys):
    assert launch.main(["-n", "4", "-s", "1", "--dry-run", "python", "train.py", "--lr", "1"]) == 0
    shown = capsys.readouterr().out
    assert "-n 4" in shown and shown.rstrip().endswith("guard.py train.py --lr 1")
    assert "# 1 servers (bsp): " in shown
    for wrong in (
        ["-w", "0", "python", "x.py"],
        ["-w", "2"],
        ["-w", "2", "python", "-m"],
        ["-w", "2", "python", "-c", "print()"],
        ["-s", "-1", "x.py"],
        ["--consistency", "asp", "x.py"],
    ):
        with pytest.raises(SystemExit):
            launch.main(wrong)
    said = capsys.readouterr().err
    assert "usage: heturun" in said and "--consistency asp without a server\n  fix: add -s 1" in said
    with pytest.raises(ArgumentError):
        launch.rank_command(launch.Job(2, ("python",)))


def test_mpiexec_may_be_named(monkeypatch):
    monkeypatch.setenv(mpiexec.MPIEXEC, "/opt/mpi/mpiexec")
    job = launch.Job(2, ("x.py",))
    assert launch.rank_command(job)[:3] == ["/opt/mpi/mpiexec", "-n", "2"]
    with pytest.raises(ArgumentError, match="cannot start '/opt/mpi/mpiexec': No such file"):
        launch.run(job)


def test_lines_begin_with_their_rank_and_rank_0_has_the_only_progress_bar(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, tqdm\n"
        "for i in tqdm.tqdm(range(3), mininterval=0): pass\n"
        "print('a', end=''); print('b\\n\\nc')\n"
        "print(os.environ['OMP_NUM_THREADS'])\n"
    )
    job = heturun("-w", 2, "python", script, env={**os.environ, "OMP_NUM_THREADS": "7"})
    assert job.returncode == 0
    assert sorted(job.stdout.splitlines()) == sorted(
        line
        for rank in (0, 1)
        for line in (f"[rank {rank}] ab", f"[rank {rank}] ", f"[rank {rank}] c", f"[rank {rank}] 7")
    )
    assert "[rank 0] 100%" in job.stderr and "[rank 1]" not in job.stderr


def test_a_rank_knows_what_is_a_terminal(tmp_path):
    pty = pytest.importorskip("pty", reason="a terminal needs POSIX")
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint([s.isatty() for s in (sys.stdout, sys.stderr)])\n")
    terminal, end = pty.openpty()
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", "python", str(script)]
    job = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=end, text=True, timeout=DEADLINE)
    os.close(terminal)
    os.close(end)
    assert job.stdout == "[False, True]\n"


def test_a_rank_that_does_not_arrive_is_named_and_ends_the_job(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        watch, "ask", lambda directory, ranks: {r: RankState(where="train.py:3: load()") for r in ranks}
    )
    start = watch.Start(tmp_path, 3, 30.0)

    def late_at(seconds, *files):
        for name in files:
            (tmp_path / name).touch()
        now[0] = seconds
        return start.is_late(5.0)

    assert not late_at(4, "started.0", "started.1") and late_at(6)
    assert start.absent() == ["after 6 s rank 2 has not arrived: its process does not run"]
    assert not late_at(7, "started.2")
    assert not late_at(100)  # a script may join late, or never
    assert not late_at(104, "arrived.0") and late_at(106, "done.2")
    assert start.absent() == [
        "after 6 s rank 1 has not arrived: it is at train.py:3: load()",
        "after 6 s rank 2 has not arrived: it has ended",
    ]
    assert not late_at(200, "arrived.1", "arrived.2")


def test_a_rank_that_still_works_may_arrive_late(tmp_path, monkeypatch):
    now, cpu = [0.0], [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "ask", lambda directory, ranks: {r: RankState(cpu=cpu[0]) for r in ranks})
    start = watch.Start(tmp_path, 2, 30.0)
    for name in ("started.0", "started.1", "arrived.0"):
        (tmp_path / name).touch()
    assert not start.is_over()
    for now[0] in range(0, 100, 5):
        cpu[0] = now[0] / 2
        assert not start.is_over()
    over = any(start.is_over() for now[0] in range(100, 150, 5))
    assert over and 125 <= now[0] <= 140


def test_who_does_nothing_when_others_have_ended_is_named_and_who_works_is_not(tmp_path, monkeypatch):
    """However long that takes: servers let a slow rank go on alone."""
    now, states = [0.0], {2: RankState(cpu=0.0)}  # rank 1 does not answer
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        watch, "ask", lambda directory, ranks: {r: s._replace(cpu=now[0]) for r, s in states.items() if r in ranks}
    )
    end = watch.End(tmp_path, 3, 30.0)

    def over_by(first, last):
        return any(end.is_over() for now[0] in range(first, last, 5))

    assert not over_by(0, 200)  # nobody has ended
    (tmp_path / "done.0").touch()
    assert not over_by(200, 2000)  # rank 2 works
    states[2] = states[2]._replace(where="train.py:3: load()")
    monkeypatch.setattr(watch, "ask", lambda directory, ranks: {r: s for r, s in states.items() if r in ranks})
    assert over_by(2000, 2100) and 2020 <= now[0] <= 2045
    assert end.absent() == [
        "ranks [0] have ended, rank 1 has done nothing for 30 s since: it does not answer, as a stopped process",
        "ranks [0] have ended, rank 2 has done nothing for 30 s since: it is at train.py:3: load()",
    ]
    (tmp_path / "done.1").touch(), (tmp_path / "done.2").touch()
    assert not end.is_over()


def test_a_stopped_rank_ends_the_job_though_nobody_waits_for_it(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(watch, "ask", partial(watch.ask, seconds=0.2))  # which none answers
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal\nfrom hetu.dist.comm.guard import own_rank\n"
        "if own_rank():\n    print(os.getpid(), flush=True)\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    assert launch.run(launch.Job(2, (str(script),), leave=1.0)) == launch.RC_ABSENT
    said = capfd.readouterr()
    ended, fix = said.err.splitlines()[-2:]
    assert ended.startswith("heturun: ranks [0] have ended, rank 1 has done nothing for 1 s since: it does not answer")
    assert fix == "heturun: if it only takes long, heturun --leave 2"
    stat, until = Path(f"/proc/{said.out.split()[-1]}/stat"), time.monotonic() + DEADLINE
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until


def test_a_rank_that_is_late_ends_the_job(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launch, "WARN_AFTER", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (script := tmp_path / "train.py").write_text("while True:\n    pass\n")
    without_guards = [mpiexec.find_mpiexec(), "-n", "2", sys.executable, str(script)]  # none says that it starts
    monkeypatch.setattr(launch, "rank_command", lambda job, variables: without_guards)
    assert launch.run(launch.Job(2, (str(script),), arrive=1e-3)) == launch.RC_ABSENT
    said = [re.sub(r"after \d+ s", "after N s", line) for line in capfd.readouterr().err.splitlines()]
    absent = [f"heturun: after N s rank {rank} has not arrived: its process does not run" for rank in (0, 1)]
    assert said == [*absent, *absent, "heturun: if it only takes long, heturun --arrive 0.002"]


LATE = """
import os, time
from pathlib import Path
from hetu.dist import world
from hetu.dist.comm.guard import own_rank
here = Path({here!r})
if own_rank():
    here.touch()
    until = time.monotonic() + 2
    {busy}
while not here.exists():
    time.sleep(0.01)
world().barrier()
"""


class PatientAtFirst(watch.Start):
    """Gives processes all the time to start; only who does not arrive ends the job."""

    def is_over(self):
        return super().is_over() and self.stage == "arrived"


@pytest.mark.parametrize(
    ("busy", "arrive", "code"),
    [
        ("while time.monotonic() < until: pass", 1, 0),
        ("time.sleep(600)", 1, 72),
        pytest.param("time.sleep(2)", 60, 0, marks=pytest.mark.nightly),
    ],
)
def test_who_works_and_who_is_given_time_may_come_late(tmp_path, monkeypatch, capfd, busy, arrive, code):
    monkeypatch.setattr(launch, "Start", PatientAtFirst)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "train.py"
    script.write_text(LATE.format(busy=busy, here=str(tmp_path / "here")))
    assert launch.run(launch.Job(2, (str(script),), arrive=arrive)) == code
    said = capfd.readouterr().err
    if code:
        assert "rank 1 has not arrived: it is at train.py:10: time.sleep(600)" in said
        assert said.endswith("heturun: if it only takes long, heturun --arrive 2\n")


VALIDATE = """
import time
import numpy as np
import hetu as ht
from hetu.dist import world
comm = world()
short, comm.deadline = comm.deadline, 300.0
x = ht.placeholder("x", (64, 64))
validate = ht.Executor([ht.sum(ht.matmul(x, x))])
validate.run({{"x": np.ones((64, 64))}})  # compiles
comm.barrier()
comm.deadline = short
until = time.monotonic() + {seconds}
while comm.rank == 0 and time.monotonic() < until:
    {busy}
{last}
print("all here")
"""


LASTS = ["comm.barrier()", "comm.split((0, 1)).barrier()", "comm.split((1, 0)).barrier()", ""]
BUSY = [
    ("validate.run({'x': np.ones((64, 64))})", 3, ("--deadline", 2, "--leave", 2), 0),
    ("pass", 600, ("--deadline", 1, "--leave", 1), 1),
    ("time.sleep(0.01)", 2, ("--deadline", 60, "--leave", 60), 0),
]


@pytest.mark.parametrize(
    ("last", "busy", "seconds", "options", "code"),
    [
        pytest.param(last, *row, marks=() if last == LASTS[0] and row != BUSY[-1] else pytest.mark.nightly)
        for last in LASTS
        for row in BUSY
    ],
)
def test_a_rank_that_works_is_waited_for(tmp_path, busy, seconds, options, code, last):
    """One that runs an executor by itself does; one that turns in one line does not, unless it is given the time."""
    script = tmp_path / "train.py"
    script.write_text(VALIDATE.format(busy=busy, seconds=seconds, last=last))
    job = heturun("-w", 2, *options, "python", script)
    assert job.returncode == code, job.stderr
    if code:
        option = "--deadline" if last else "--leave"
        assert f"heturun {option} S waits for S seconds" in job.stderr and "train.py:1" in job.stderr


def test_waits_are_seconds(monkeypatch, capsys):
    for name in options.WAITS:
        with pytest.raises(SystemExit):
            launch.main(["-w", "2", f"--{name}", "-1", "python", "x.py"])
        assert f"--{name} -1: give seconds above 0, at most 1e+09" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            launch.main(["-w", "2", f"--{name}", "inf", "python", "x.py"])
        assert f"--{name} inf: give seconds above 0" in capsys.readouterr().err
    monkeypatch.setenv("HETU_ARRIVE", "soon")
    with pytest.raises(SystemExit):
        launch.main(["-w", "2", "--dry-run", "python", "x.py"])
    assert "HETU_ARRIVE is 'soon'\n  fix: give seconds, a number above 0 such as 600" in capsys.readouterr().err
    monkeypatch.setenv("HETU_ARRIVE", "7")
    assert options.job_of(options.parse(["x.py"])[1]).arrive == 7
    assert launch.main(["-w", "2", "--deadline", "900", "--leave", "60", "--dry-run", "python", "x.py"]) == 0
    shown = capsys.readouterr().out
    assert "HETU_DEADLINE=900\n" in shown and "HETU_LEAVE=60\n" in shown and "HETU_SILENCE" not in shown
    assert launch.main(["-w", "2", "-s", "1", "--silence", "20", "--dry-run", "python", "x.py"]) == 0
    assert "HETU_SILENCE=20\n" in capsys.readouterr().out


def test_under_a_foreign_mpiexec_it_is_a_rank(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from hetu.dist import world\ncomm = world()\ncomm.barrier()\nprint(comm)\n")
    job = under_mpiexec("-m", "hetu.dist.launch.heturun", script)
    assert sorted(job.stdout.splitlines()) == [f"[rank {r}] <MPIComm rank {r} of 2>" for r in (0, 1)]
    job = under_mpiexec("-m", "hetu.dist.launch.heturun", "-w", 3, script)
    assert job.returncode and "this is one of 2 ranks" in job.stderr and "say -w 2" in job.stderr


def test_under_a_bare_mpiexec_a_rank_that_is_killed_leaves_nothing(tmp_path):
    """What has met needs no name, and a process that outlives rank 0 removes where ranks ask each other."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import os\nfrom hetu.dist import world\ncomm = world()\n{SHARED.format(tmp_path)}\n"
        "comm.barrier()\nos.kill(os.getpid(), 9)\n"
    )
    (folder := tmp_path / "temporary").mkdir()
    assert under_mpiexec(script, TMPDIR=str(folder)).returncode
    assert_nothing_is_shared(tmp_path)
    until = time.monotonic() + DEADLINE
    while any(folder.iterdir()):  # whoever removes it has no one to tell
        assert time.monotonic() < until


def test_a_rank_that_is_killed_under_a_foreign_mpiexec_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nfrom hetu.dist import world\ncomm = world()\n"
        "if comm.rank:\n    os.kill(os.getpid(), 9)\ncomm.barrier()\n"
    )
    job = under_mpiexec("-m", "hetu.dist.launch.heturun", script)
    assert job.returncode and "[rank 1] killed by SIGKILL" in job.stderr and "[rank 0]" not in job.stderr


@pytest.mark.parametrize("known", [{}, {"SLURM_STEP_NUM_TASKS": "2"}])
def test_a_single_process_of_mpi_that_is_killed_leaves_nothing(known):
    script = (
        "import os; from hetu.dist.comm import guard, process; process.start()\n"
        "print(*guard.shared_files(), sep='\\n', flush=True); os.kill(os.getpid(), 9)\n"
    )
    line, known = [sys.executable, "-c", script], os.environ | {"PYTHONPATH": str(ROOT)} | known
    job = subprocess.run(line, env=known, capture_output=True, text=True, timeout=DEADLINE)
    names = [name.removesuffix(" (deleted)") for name in job.stdout.splitlines()]
    assert job.returncode == -signal.SIGKILL and names and not [name for name in names if Path(name).exists()]


def test_a_task_of_srun_that_mpi_knows_nothing_of_does_not_train_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from hetu.dist import world\nworld()\n")
    alone = os.environ | {"PYTHONPATH": str(ROOT), "SLURM_STEP_NUM_TASKS": "2"}
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", str(script)]
    job = subprocess.run(line, env=alone, capture_output=True, text=True, timeout=DEADLINE)
    assert job.returncode == 1
    assert "this is one of 2 processes, but MPI sees 1" in job.stderr and "srun --mpi=pmi2" in job.stderr


def test_servers_run_beside_the_ranks_under_the_consistency_that_is_asked_for(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nfrom hetu.ps.wire.environment import connect\n"
        "modes = [s['consistency'] for s in connect().status()]\n"
        "print(os.environ['HETU_SERVERS'].count('tcp://'), len(os.environ['HETU_SERVER_TOKEN']), modes)\n"
    )
    job = heturun("-w", 2, "-s", 2, "--consistency", "ssp:3", "python", script)
    assert (job.returncode, job.stderr) == (0, "")
    assert sorted(job.stdout.splitlines()) == [f"[rank {rank}] 2 32 ['ssp:3', 'ssp:3']" for rank in (0, 1)]


@pytest.mark.nightly
def test_servers_are_told_what_the_command_line_says(tmp_path):
    script = tmp_path / "train.py"
    (tmp_path / "ours.py").write_text(
        "from hetu.ps import server_function\n@server_function\ndef first_row(table):\n    return [0], table[:1]\n"
    )
    script.write_text(
        "import numpy as np\nfrom hetu.ps import Parameter\nfrom hetu.ps.wire.environment import connect\n"
        "client = connect()\n"
        "client.create({'t': Parameter((2, 3), sparse=True)}, {'t': np.ones((2, 3))})\n"
        "print(client.transport.links[0].lease, client.call('t', 'first_row').wait()[1].tolist())\n"
        "client.push_rows('t', [0, 1], np.full((2, 3), np.nan)).wait()\n"
    )
    told = "--lease", 7, "--imports", "ours", "--memory-limit", "2M", "--on-loss", "fail", "--finite"
    job = heturun("-s", 1, *told, "python", script, cwd=tmp_path)
    assert (job.returncode, job.stdout) == (1, "7.0 [[1.0, 1.0, 1.0]]\n")
    assert "worker 0 pushes 6 numbers of 6 to t that are not finite" in job.stderr
    script.write_text(
        "import numpy as np\nfrom hetu.ps import Parameter\nfrom hetu.ps.wire.environment import connect\n"
        "connect().create({'u': Parameter((1000, 1000))}, {'u': np.ones((1000, 1000))})\n"
    )
    job = heturun("-s", 1, *told, "python", script, cwd=tmp_path)
    assert job.returncode == 1 and f"the limit is {2 << 20}" in job.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("--consistency bps", "unknown consistency 'bps'\n  fix: use bsp, asp, or ssp:3 with any bound for 3\n"),
        ("--imports nosuch", "imports='nosuch': ModuleNotFoundError: No module named 'nosuch'\n  fix: name modules "),
        ("--lease 0", "lease=0.0\n  fix: use times above 0 seconds that end\n"),
        ("--lease inf", "lease=inf\n  fix: use times above 0 seconds that end\n"),
        ("--memory-limit 0", "memory_limit=0\n  fix: "),
        ("--decay 2", "decay=2.0\n  fix: give a factor between 0 and 1\n"),
        ("--group 1", "groups of 1 among 1 workers\n  fix: "),
    ],
)
def test_what_servers_refuse_to_be_told(told, said, tmp_path):
    job = heturun("-s", 1, *told.split(), "python", tmp_path / "train.py")
    assert (job.returncode, job.stdout) == (2, "")
    assert f"heturun: error: server 0: {said}" in job.stderr


@pytest.mark.parametrize("text", ["much", "inf", "1e400G", "nan"])
def test_bytes_are_a_number(text, capsys):
    with pytest.raises(SystemExit):
        launch.main(["-s", "1", "--memory-limit", text, "python", "x.py"])
    assert f"argument --memory-limit: invalid number of bytes value: '{text}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("sys.exit(3)", "has ended"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL; with --snapshots DIR it would run again"),
    ],
)
def test_the_end_of_a_server_ends_the_job(ending, said, tmp_path, monkeypatch, capfd):
    serve = f"import os, sys; sys.stdin.readline(); print('ready tcp://here', flush=True); {ending}"
    monkeypatch.setattr(launch.Servers, "COMMAND", (sys.executable, "-c", serve))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "train.py"
    script.write_text("while True:\n    pass\n")
    assert launch.run(launch.Job(1, (str(script),), servers=1)) == launch.RC_SERVER
    assert capfd.readouterr().err == f"heturun: server 0 {said}\n"


def test_a_server_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.Servers, "COMMAND", (sys.executable, "-c", "pass"))
    with pytest.raises(RuntimeError, match="server 0 has ended"):
        launch.run(launch.Job(1, ("train.py",), servers=2))
    monkeypatch.setattr(launch.Servers, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    with pytest.raises(
        RuntimeError, match=r"server 0 did not get ready in 0.2 s\n[\s\S]*\n  fix: [\s\S]*--arrive 0.4$"
    ):
        launch.run(launch.Job(1, ("train.py",), servers=1, arrive=0.2))
    monkeypatch.setattr(servers, "cores", lambda: 1)
    with pytest.raises(RuntimeError, match=r"0.2 s, of 2 that start on 1 cores\n[\s\S]*  fix: start fewer"):
        launch.run(launch.Job(1, ("train.py",), servers=2, arrive=0.2))


def test_a_host_that_cannot_be_reached_is_named(tmp_path, monkeypatch, capfd):
    """Or a word after -H that is none: what mpiexec says of it is hard to read."""
    monkeypatch.setenv(mpiexec.MPIEXEC, "false")
    monkeypatch.chdir(tmp_path)
    assert launch.main(["-H", "python", "train.py"]) == 1
    assert "can this host reach python by ssh? After -H stand hosts: -H node1,node2\n" in capfd.readouterr().err
