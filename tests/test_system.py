"""What systems do differently: each row takes away what another system lacks, and what is there instead is called.

Ignored on purpose: whether Windows does what it is asked for.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetu import system
from hetu.core.errors import ArgumentError, HetuError, MissingDependencyError
from hetu.cpu_kernels import compiled, compiler, folder
from hetu.dist.comm import guard
from hetu.dist.launch import heturun, mpiexec, options
from hetu.gpu_kernels import emulator

DEADLINE = 60


class Calls(list[Any]):
    """What was called, with its first argument; each call gives `result`."""

    result: Any = None

    def __call__(self, *args: Any, **_: Any) -> Any:
        self.append(args[0] if len(args) == 1 else args)
        return self.result


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The commands that are run, which answer with code 3."""
    calls = Calls()
    calls.result = subprocess.CompletedProcess([], 3, stdout="")
    monkeypatch.setattr(subprocess, "run", calls)
    return calls


TASKKILL = ["taskkill", "/F", "/T", "/PID", "7"]
ENDS: list[tuple[str, Callable[[Any], object]]] = [
    ("terminate", system.terminate),
    ("kill_group", system.kill_group),
    ("end_group", lambda process: system.end_group(process.pid)),
]


@pytest.mark.parametrize(("name", "end"), ENDS, ids=[name for name, _ in ENDS])
def test_without_groups_a_tree_of_processes_is_ended(
    monkeypatch: pytest.MonkeyPatch, ran: Calls, name: str, end: Callable[[Any], object]
) -> None:
    monkeypatch.delattr(os, "killpg")
    end(SimpleNamespace(pid=7, wait=lambda: None))
    assert ran == [TASKKILL]


def test_what_is_started_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 512, raising=False)
    assert system.apart() == {"creationflags": 512}
    monkeypatch.delattr(subprocess, "CREATE_NEW_PROCESS_GROUP")
    assert system.apart() == {"start_new_session": True}


def test_a_program_that_becomes_another_is_waited_for_on_windows(monkeypatch: pytest.MonkeyPatch, ran: Calls) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        system.become(["python", "train.py"])
    assert (ended.value.code, ran) == (3, [["python", "train.py"]])


def test_the_main_thread_is_interrupted_without_signals_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "pthread_kill")
    other = threading.Thread(target=lambda: system.interrupt(threading.main_thread().ident))
    until = time.monotonic() + DEADLINE
    with pytest.raises(KeyboardInterrupt):
        other.start()
        while time.monotonic() < until:  # whoever waits in the system hears of it only afterwards
            other.join(0.01)
    other.join(DEADLINE)


@pytest.mark.parametrize("by", [system.marked, system._marked_by_ps], ids=["/proc", "ps"])
def test_processes_are_found_by_their_mark(by: Callable[[str], Any]) -> None:
    mark, line = "HETU_TEST_MARK=a b" if by is system.marked else "HETU_TEST_MARK=ab", "import sys; sys.stdin.read()"
    name, value = mark.split("=")
    with subprocess.Popen([sys.executable, "-c", line], stdin=subprocess.PIPE, env={name: value}) as child:
        if by is system.marked and not Path("/proc/self/environ").exists():
            pytest.skip("only Linux has /proc")
        commands, parents = by(mark)
        assert list(commands) == [child.pid] and line in commands[child.pid]
        assert parents[child.pid] == os.getpid()
    assert by(mark)[0] == {}


def test_without_ps_or_proc_nobody_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert system._marked_by_ps("A=b") == ({}, {})


class Msvcrt:
    """Locks of bytes, as Windows has them: where the file stands, and PermissionError where another has it."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def locking(self, number: int, mode: int, count: int) -> None:
        inode, place = os.fstat(number).st_ino, os.lseek(number, 0, os.SEEK_CUR)
        assert (place, count) == (0, 1)
        if mode == self.LK_NBLCK:
            if inode in self.held:
                raise PermissionError(13, "Permission denied")
            self.held[inode] = number
        elif self.held.get(inode) == number:
            del self.held[inode]
        else:
            raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("platform", ["posix", "win32"])
def test_one_process_has_the_lock_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, platform: str) -> None:
    if platform == "win32":
        monkeypatch.setattr(sys, "platform", "win32")
        monkeypatch.setitem(sys.modules, "msvcrt", Msvcrt())  # type: ignore[arg-type]
    (tmp_path / "lock").write_text("not at its begin")
    with open(tmp_path / "lock", "a") as mine, open(tmp_path / "lock", "a") as yours:
        assert system.lock(mine) and not system.lock(yours)
        system.unlock(yours)  # which it has not
        assert not system.lock(yours)
        system.unlock(mine)
        assert system.lock(yours)
        system.unlock(yours)


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl", reason="of POSIX")

    def flock(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert system.lock(io.StringIO())


def test_libraries_are_compiled_one_process_at_a_time_on_windows_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setitem(sys.modules, "msvcrt", held := Msvcrt())  # type: ignore[arg-type]
    monkeypatch.setattr(folder, "folder", lambda: tmp_path)
    with folder.lock():
        assert len(held.held) == 1
    assert held.held == {}


def test_a_library_in_use_keeps_its_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Windows removes no file that is loaded; without its digest it would be compiled again, and could not be moved."""
    for name in ("used.so", "used.sha256", "other.so", "other.sha256"):
        (tmp_path / name).write_bytes(bytes(100))
    remove = Path.unlink

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == "used.so":
            raise PermissionError(13, "Permission denied")
        remove(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    monkeypatch.setattr(folder, "folder", lambda: tmp_path)
    folder.tidy(most=0)
    assert {path.name for path in tmp_path.iterdir()} == {"used.so", "used.sha256"}


@pytest.mark.parametrize("system_says", [None, OSError, 6.0])
def test_how_crowded_the_machine_is(monkeypatch: pytest.MonkeyPatch, system_says: Any) -> None:
    def load() -> tuple[float, float, float]:
        if system_says is OSError:
            raise OSError
        return system_says, 0.0, 0.0

    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", load)
    if system_says is None:
        monkeypatch.delattr(os, "getloadavg")
    assert system.crowd() == (1.5 if system_says == 6.0 else 0.0)


def test_a_host_without_uname_goes_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "uname")
    monkeypatch.setenv("COMPUTERNAME", "BOX")
    assert runpy.run_path(guard.__file__)["HOST"] == "BOX"


# -- what cannot be had says so at its door ----------------------------------------------------------------------------


def _emulate() -> None:
    emulator.prepare(['extern "C" __global__ void never(float* y) {}'])


def _reach_hosts() -> None:
    options.job_of(options.parse(["-w", "2", "-H", "this,that", "python", "train.py"])[1])


DOORS: list[tuple[str, str, str, Callable[[], object], type[HetuError], str, str]] = [
    ("sys", "platform", "darwin", _emulate, MissingDependencyError, "emulator of GPUs runs on Linux", "container"),
    ("sys", "platform", "win32", _emulate, MissingDependencyError, "this is win32", "WSL"),
    ("os", "name", "nt", _reach_hosts, ArgumentError, "hosts cannot be reached from Windows", "WSL"),
    ("os", "name", "nt", mpiexec.find_mpiexec, MissingDependencyError, "no mpiexec", "pip install impi-rt"),
    ("os", "name", "posix", mpiexec.find_mpiexec, MissingDependencyError, "no mpiexec", 'pip install "mpich>=4.3"'),
]


@pytest.mark.parametrize(("module", "name", "value", "call", "error", "said", "fix"), DOORS)
def test_what_a_system_lacks_is_told_at_its_door(
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    name: str,
    value: str,
    call: Callable[[], object],
    error: type[HetuError],
    said: str,
    fix: str,
) -> None:
    monkeypatch.setattr(mpiexec, "WHEELS", ())
    monkeypatch.setattr(mpiexec.shutil, "which", lambda *_, **__: None)
    monkeypatch.delenv(mpiexec.MPIEXEC, raising=False)
    modules = {"sys": emulator.sys, "os": mpiexec.os}
    with monkeypatch.context() as on_that_system:
        on_that_system.setattr(modules[module], name, value)
        with pytest.raises(error) as told:
            call()
    assert said in str(told.value) and fix in str(told.value)


def test_a_compiler_for_msvc_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its libraries show no function, so it is passed over for the next, by name."""
    pytest.importorskip("fcntl", reason="the stand-in is a shell script")
    fake = tmp_path / "clang"
    fake.write_text("#!/bin/sh\necho '#define _MSC_VER 1940'\n")
    fake.chmod(0o755)
    made = compiler._asked([str(fake)], 30.0)
    assert isinstance(made, str) and "MSVC" in made and "MinGW" in made


@pytest.mark.nightly
@pytest.mark.parametrize("target", ["x86_64-windows-gnu", "aarch64-macos", "x86_64-macos"])
def test_what_walks_through_tables_compiles_for_other_systems(tmp_path: Path, target: str) -> None:
    """By the compiler of the extra [cc], which makes code for all; to link, it would first build their libraries."""
    pytest.importorskip("ziglang", reason="the extra [cc] is not installed")
    text, made = tmp_path / "walk.c", tmp_path / "walk.o"
    text.write_text("\n".join(map(compiled.text_of, ("prelude.h", "walk.c"))), "utf-8")
    line = [sys.executable, "-m", "ziglang", "cc", "-target", target, *compiler.FLAGS, "-c", str(text), "-o", str(made)]
    subprocess.run(line, check=True, timeout=DEADLINE)
    assert b"walk\0" in made.read_bytes()


# -- a whole job where much is missing ---------------------------------------------------------------------------------

WITHOUT = """
import os, signal, sys
for name in ("fork", "killpg", "sched_yield", "sched_getaffinity", "getloadavg", "register_at_fork",
             "memfd_create", "getuid", "geteuid"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("pthread_kill", "pthread_sigmask"):
    if hasattr(signal, name):
        delattr(signal, name)
sys.modules |= dict.fromkeys(("fcntl", "termios", "resource"))
"""
TRAIN = """
import os, sys
import numpy as np
import hetu as ht
from hetu.dist import world
assert not hasattr(os, "fork") and not hasattr(os, "killpg")
comm = world()
x = ht.placeholder("x", (4, 3))
loss = ht.mean(ht.nn.Linear(3, 2)(x))
ex = ht.Executor({"train": [loss, ht.optim.SGD(0.1).minimize(loss)]}, strategy=ht.dist.DataParallel())
print(ex.run("train", {x: np.ones((4, 3), "f")})[0].shape, comm.world_size)
comm.barrier()  # until all have said so
if len(sys.argv) > 1 and comm.rank:
    raise ValueError("on purpose")
comm.barrier()
"""


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_train_where_nothing_can_be_forked(tmp_path: Path, fails: bool) -> None:
    """A job with all that Windows lacks taken away: it trains, and a failure of one rank ends it with its report."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    (tmp_path / "train.py").write_text(TRAIN)
    path = os.pathsep.join([str(tmp_path), str(Path(heturun.__file__).parents[3])])
    line = [sys.executable, "-m", "hetu.dist.launch.heturun", "-w", "2", "python", "train.py", *["fail"] * fails]
    done = subprocess.run(
        line, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=DEADLINE
    )
    assert (done.returncode, "ValueError: on purpose" in done.stderr) == (int(fails), fails), done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] () 2", "[rank 1] () 2"]
